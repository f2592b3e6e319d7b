"""Environments that a model talks to: a user's class, one instance for each episode.

The protocol is in docs/environments.md. Nothing here knows tokens; `episodes.py` does.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import json
import math
import numbers
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers.utils import get_json_schema

from common import arguments

# The methods of the protocol. All other public ones are tools, unless there is `step`.
PROTOCOL = ("reset", "step", "get_reward", "close")
# Calls of environments that run at once.
CALLS_AT_ONCE = 64
# How long closing an environment may take.
CLOSE_SECONDS = 10
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
# The name of `get_reward` among the parts of a score; the others are reward functions and models.
OF_ENVIRONMENT = "environment"
# The largest score that fp32 holds.
LARGEST = float(np.finfo(np.float32).max)


class UserClass(NamedTuple):
    """What is known of the class of `--environment` before an episode begins."""

    name: str  # MODULE:NAME
    make: Callable[[], Any]  # a new instance
    has_step: bool
    has_reward: bool
    tools: list[dict]  # JSON schemas of what the model may call; none if it has `step`


@functools.cache
def load(name: str) -> UserClass:
    """Loads the class of `--environment`, makes an instance, and looks at its methods."""
    make = arguments.load_function(name)
    instance = make()
    has_step = hasattr(instance, "step")
    names = [] if has_step else tools_of(instance)
    if not has_step and not names:
        sys.exit(f"--environment {name} has neither a method `step` nor a public one as a tool")
    tools = [get_json_schema(getattr(instance, method)) for method in names]
    close([instance])
    return UserClass(name, make, has_step, hasattr(instance, "get_reward"), tools)


def tools_of(instance: Any) -> list[str]:
    """Returns the names of the public methods that a model may call."""
    members = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    return [name for name, _ in members if name not in PROTOCOL and not name.startswith("_")]


def close(instances: Iterable[Any]) -> None:
    """Calls `close` of the instances that have it; an error in it is of no consequence."""
    calls = Calls(CLOSE_SECONDS)
    for number, instance in enumerate(instances):
        if hasattr(instance, "close"):
            calls.start(number, instance.close)
    with contextlib.suppress(Exception):
        calls.wait()


# ============================================================ calls of a user's code


class Calls:
    """Calls of environments, which run beside each other and beside whoever started them.

    Each is in a thread of its own, which does not keep the run from ending, and may take `timeout`
    seconds; 0: no limit.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout or None
        self.futures: dict[int, concurrent.futures.Future] = {}  # by the number of the call
        self.free = threading.Semaphore(CALLS_AT_ONCE)
        event_loop()  # made by one thread, before those of the calls ask for it

    def start(self, number: int, function: Callable, *args, **keywords) -> None:
        """Starts a call; waits for another one if there are `CALLS_AT_ONCE`."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        self.futures[number] = future

        def run() -> None:
            try:
                future.set_result(awaited_result(function(*args, **keywords)))
            except BaseException as error:  # raised where it is waited for; `sys.exit`, too
                future.set_exception(error)
            finally:
                self.free.release()

        self.refuse_late(self.free.acquire(timeout=self.timeout))
        threading.Thread(target=run, daemon=True).start()

    def wait(self) -> dict[int, Any]:
        """Returns what all calls return, by their number, or raises what one of them raised."""
        for future in self.futures.values():
            done, _ = concurrent.futures.wait([future], self.timeout)
            self.refuse_late(bool(done))
        return {number: future.result() for number, future in sorted(self.futures.items())}

    def refuse_late(self, in_time: bool) -> None:
        if not in_time:
            raise TimeoutError(f"a call took longer than --environment_timeout {self.timeout:g}")


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the one loop for a user's code: clients that it keeps are bound to it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def awaited_result(result: Any) -> Any:
    """Returns what a call returned or, if that is an awaitable, what awaiting it gives."""

    async def awaited() -> Any:
        return await result

    if not inspect.isawaitable(result):
        return result
    return asyncio.run_coroutine_threadsafe(awaited(), event_loop()).result()


def check_scores(source: str, scores: Any, data_rows: Sequence[int]) -> list[float]:
    """Returns scores that a user's code gave as a list of numbers, NaN where it gave None.

    Raises:
        SystemExit: they are not one number that fp32 holds, or None, for each of these rows.
    """
    if hasattr(scores, "tolist"):  # of torch or numpy
        scores = scores.tolist()
    expected = f"{source}: expected {len(data_rows)} numbers, one for each response"
    if not isinstance(scores, (list, tuple)) or len(scores) != len(data_rows):
        sys.exit(f"{expected}, got {scores!r:.200}")
    values = [value.item() if hasattr(value, "item") else value for value in scores]
    for data_row, value in zip(data_rows, values):
        is_number = isinstance(value, numbers.Real)
        # Compared, not converted: a whole number may be too large even for fp64.
        if value is not None and (not is_number or not abs(value) <= LARGEST):
            sys.exit(f"{expected}, that fp32 holds; got {value!r:.200} for data row {data_row}")
    return [math.nan if value is None else float(value) for value in values]


# ============================================================ tools


def parsed(tokenizer, text: str, prompt: str, tools: list[dict]) -> dict:
    """Returns a message of the model, which read a prompt and wrote a text, with its `tool_calls`.

    They are found by the tokenizer's `response_template` if it has one, else as
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. If a call is not a JSON object, its
    `function` is its text.
    """
    message: dict[str, Any] = {"role": "assistant"}
    if getattr(tokenizer, "response_template", None) is not None:
        try:
            return message | tokenizer.parse_response(text, prefix=prompt, tools=tools)
        except Exception:  # the model wrote something that the template cannot hold
            return message | {"content": text}
    calls = []
    for found in TOOL_CALL.findall(text):
        try:
            # `**` raises a TypeError if it is not an object.
            calls.append({"type": "function", "function": {**json.loads(found)}})
        except (ValueError, TypeError):
            calls.append({"type": "function", "function": found})
    message["content"] = TOOL_CALL.sub("", text).strip()
    return {**message, "tool_calls": calls} if calls else message


def call_tools(instance: Any, message: dict) -> tuple[list[dict], int]:
    """Calls what a message asks for, and returns a message for each call, and how many failed.

    The model is told what it did wrong, and what a tool raises.
    """
    messages = []
    n_failed = 0
    for call in message.get("tool_calls", []):
        name, result = answer_call(instance, call.get("function"))
        n_failed += isinstance(result, dict) and "error" in result
        text = result if isinstance(result, str) else json.dumps(result, default=str)
        messages.append({"role": "tool", "name": name, "content": text})
    return messages, n_failed


def answer_call(instance: Any, function: Any) -> tuple[str, Any]:
    """Returns the name of what was called, and its result or `{"error": ...}`."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        found = one_line(repr(function))
        return "", {"error": f"no JSON object with name and arguments: {found}"}
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


def one_line(text: str, most: int = 200) -> str:
    """Returns a text as one line of limited length."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}..."
