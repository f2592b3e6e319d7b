"""Environments that a model talks to: a user's class, one instance for each episode.

The protocol is in docs/environments.md. Nothing here knows tokens; `episodes.py` does.
"""

import asyncio
import functools
import inspect
import json
import math
import numbers
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from transformers.utils import get_json_schema

from common import arguments
from preference_recipes.data.messages import is_messages
from preference_recipes.rollouts.reward_calls import LARGEST, as_plain, cut, one_line, signature_of

# The methods of the protocol. All other public ones are tools, unless there is `step`.
PROTOCOL = ("reset", "step", "get_reward", "close")
# Calls of environments that run at once.
CALLS_AT_ONCE = 64
# How long closing an environment may take.
CLOSE_SECONDS = 10
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
# The name of `get_reward` among the parts of a score; the others are reward functions and models.
OF_ENVIRONMENT = "environment"


class Failure(NamedTuple):
    """Why a call of an environment gave nothing; `says` is for the user."""

    says: str


class ToolResults(NamedTuple):
    """What the tools gave that an answer called.

    Attributes:
        messages: one with the result of each call.
        n_failed: how many calls failed: the model did something wrong, the tool raised, or it
            returned a dict with `error`.
    """

    messages: list[dict]
    n_failed: int


class UserClass(NamedTuple):
    """What is known of the class of `--environment` before an episode begins.

    Attributes:
        name: MODULE:NAME.
        make: returns a new instance.
        reset: the signature of its method `reset`.
        has_step, has_reward: which other methods of the protocol it has.
        tools: JSON schemas of what the model may call; none if it has `step`.
    """

    name: str
    make: Callable[[], Any]
    reset: inspect.Signature
    has_step: bool
    has_reward: bool
    tools: list[dict]


@functools.cache
def load(name: str) -> UserClass:
    """Loads the class of `--environment`, makes an instance, and looks at its methods.

    Raises:
        SystemExit: it cannot be loaded, or has neither `step` nor a tool.
    """
    make = arguments.load_function(name)
    here = os.getcwd()
    probe = make()
    os.chdir(here)
    has_step = callable(getattr(probe, "step", None))
    names = [] if has_step else tools_of(probe)
    tools = [get_json_schema(getattr(probe, method)) for method in names]
    if not has_step and not tools:
        sys.exit(f"--environment {name} has neither a method `step` nor a public one as a tool")
    has_reward = callable(getattr(probe, "get_reward", None))
    reset = signature_of(probe.reset)
    close([probe])
    return UserClass(name, make, reset, has_step, has_reward, tools)


def check_columns(name: str, data: str, columns: Sequence[str]) -> None:
    """Refuses an environment whose `reset` cannot be called with the columns of some data.

    Raises:
        SystemExit: with what it wants, and what there is.
    """
    try:
        load(name).reset.bind(**dict.fromkeys(columns))
    except TypeError as error:
        sys.exit(
            f"--environment {name}: `reset` cannot be called with the columns of {data}, "
            f"{', '.join(columns)}: {error}"
        )


def tools_of(instance: Any) -> list[str]:
    """Returns the names of the public methods that a model may call."""
    members = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    return [name for name, _ in members if name not in PROTOCOL and not name.startswith("_")]


def close(instances: Iterable[Any]) -> None:
    """Calls `close` of the instances that have it; an error in it is of no consequence."""
    run_all([i.close for i in instances if hasattr(i, "close")], CLOSE_SECONDS)


# ============================================================ calls
def run_all(calls: Sequence[Callable[[], Any]], timeout: float) -> list[Any]:
    """Returns what calls of a user's code return, in their order, see `Calls`."""
    running = Calls(timeout)
    for number, call in enumerate(calls):
        running.start(number, call)
    results = running.wait()
    return [results[number] for number in range(len(calls))]


class Calls:
    """Calls of a user's code, which run beside each other and beside whoever started them.

    Each is in a thread of its own. One that blocks holds up only who waits for it: `wait`, and
    `start` while `CALLS_AT_ONCE` others run. A call that returns an awaitable is awaited, all in
    one event loop.

    Attributes:
        timeout: seconds that each may take; 0: no limit.
        results: what each call returned, by its number; a `Failure` if it raised or took too long.
        running: threads that were not waited for, and when each must have ended.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.results: dict[int, Any] = {}
        self.running: list[tuple[threading.Thread, float]] = []

    def start(self, number: int, call: Callable[[], Any]) -> None:
        """Starts a call. Waits for the oldest one if there are `CALLS_AT_ONCE`."""
        if len(self.running) == CALLS_AT_ONCE:
            self.wait_for_oldest()
        # The result until the call ends, and for good if it does not end in time.
        late = f"took longer than --environment_timeout {self.timeout:g} seconds"
        self.results[number] = Failure(late)
        thread = threading.Thread(target=run_one, args=(call, self.results, number), daemon=True)
        thread.start()
        self.running.append((thread, time.monotonic() + self.timeout))

    def wait_for_oldest(self) -> None:
        """Waits until the call that began first has ended or its time is over."""
        thread, deadline = self.running.pop(0)
        thread.join(max(deadline - time.monotonic(), 0) if self.timeout else None)

    def wait(self) -> dict[int, Any]:
        """Waits for all calls, and returns their results by number."""
        while self.running:
            self.wait_for_oldest()
        return dict(self.results)  # a copy: a call that ends late still writes into `results`


def run_one(call: Callable[[], Any], results: dict[int, Any], number: int) -> None:
    """Stores what a call returns, or why it failed, as one of `results`."""
    try:
        result = awaited_result(call())
    except BaseException as error:  # `sys.exit` as well
        result = Failure(f"raised {described(error)}")
    results[number] = result


def awaited_result(result: Any) -> Any:
    """Returns what a call returned or, if that is an awaitable, what awaiting it gives."""

    async def awaited() -> Any:
        return await result

    if not inspect.isawaitable(result):
        return result
    return asyncio.run_coroutine_threadsafe(awaited(), event_loop()).result()


LOOP: list[asyncio.AbstractEventLoop] = []
LOOP_LOCK = threading.Lock()


def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the loop in which all awaitables of environments run, in a thread of its own."""
    with LOOP_LOCK:  # calls of several threads may be the first
        if not LOOP:
            LOOP.append(asyncio.new_event_loop())
            threading.Thread(target=LOOP[0].run_forever, daemon=True).start()
    return LOOP[0]


def described(error: BaseException) -> str:
    """Returns an error in one line, with the file and line in which it was raised."""
    message = one_line("".join(traceback.format_exception_only(error)))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__]
    frame = (own or frames)[-1]
    return f"{message} ({os.path.basename(frame.filename)}:{frame.lineno})"


# ============================================================ what a call may return
def checked_reset(value: Any) -> Any:
    """Returns what `reset` returned if it is None, a text or messages, else a `Failure`."""
    if value is None or isinstance(value, str | Failure) or is_messages(value):
        return value
    return Failure(f"returned {cut(value)}, expected None, a string or a list of messages")


def checked_step(value: Any) -> Any:
    """Returns what `step` returned if it is None or messages with texts, else a `Failure`."""
    is_right = is_messages(value) and all(isinstance(m.get("content"), str) for m in value)
    if value is None or isinstance(value, Failure) or (is_right and value):
        return value
    return Failure(f"returned {cut(value)}, expected None or a list of messages with texts")


def checked_reward(value: Any) -> float | Failure:
    """Returns what `get_reward` returned as a number that fp32 holds, else a `Failure`."""
    if isinstance(value, Failure):
        return value
    value = as_plain(value, "item")
    is_number = isinstance(value, numbers.Real)
    if is_number and math.isfinite(value) and -LARGEST <= value <= LARGEST:
        return float(value)
    return Failure(f"returned {cut(value)}, expected a number, none beyond {LARGEST:.3g} (fp32)")


# ============================================================ tools
def parsed(tokenizer, text: str, prompt: str, tools: list[dict]) -> dict:
    """Returns a message of the model with the calls in it.

    They are found by the tokenizer's `response_template` if it has one, else as
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Args:
        text: what the model wrote, without the token that ended it.
        prompt: what it read.

    Returns:
        `role`, `content` and, if it calls something, `tool_calls`. If a call is not a JSON object,
        its `function` is its text.
    """
    if getattr(tokenizer, "response_template", None) is not None:
        try:
            return {
                "role": "assistant",
                **tokenizer.parse_response(text, prefix=prompt, tools=tools),
            }
        except Exception:  # the model wrote something that the template cannot hold
            return {"role": "assistant", "content": text}
    calls = []
    for found in TOOL_CALL.findall(text):
        try:
            function = json.loads(found)
            # `**` raises a TypeError if it is not an object.
            calls.append({"type": "function", "function": {**function}})
        except (ValueError, TypeError):
            calls.append({"type": "function", "function": found})
    message: dict[str, Any] = {"role": "assistant", "content": TOOL_CALL.sub("", text).strip()}
    return {**message, "tool_calls": calls} if calls else message


def call_tools(instance: Any, message: dict) -> ToolResults:
    """Calls what a message asks for, one after the other.

    The model is told what it did wrong, and what a tool raises.
    """
    messages = []
    n_failed = 0
    for call in message.get("tool_calls", []):
        name, result = answer_call(instance, call.get("function"))
        n_failed += isinstance(result, dict) and "error" in result
        text = result if isinstance(result, str) else json.dumps(result, default=str)
        messages.append({"role": "tool", "name": name, "content": text})
    return ToolResults(messages, n_failed)


def answer_call(instance: Any, function: Any) -> tuple[str, Any]:
    """Returns the name of what was called, and its result or `{"error": ...}`."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return "", {"error": f"no JSON object with name and arguments: {cut(function)}"}
    name = function["name"]
    names = tools_of(instance)
    if name not in names:
        return name, {"error": f"unknown tool {name!r}; there are: {', '.join(names)}"}
    method = getattr(instance, name)
    try:
        given = function.get("arguments") or {}
        given = json.loads(given) if isinstance(given, str) else given
        inspect.signature(method).bind(**given)
        return name, awaited_result(method(**given))
    except Exception as error:
        return name, {"error": one_line(f"{type(error).__name__}: {error}")}
