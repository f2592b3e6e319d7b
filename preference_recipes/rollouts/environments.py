"""Environments that a model talks to: a user's class, one instance for each episode.

The protocol is in docs/environments.md. This module never sees token ids; `episodes.py` does.
"""

import asyncio
import concurrent.futures
import functools
import inspect
import json
import os
import pkgutil
import re
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from transformers.utils import get_json_schema

from common import errors, one_line, refuse

# The methods of the protocol. All other public methods are tools, unless there is `step`.
PROTOCOL = ("reset", "step", "get_reward", "close")
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class UserClass(NamedTuple):
    """The class of `--environment`, inspected before the first episode."""

    name: str  # MODULE:NAME
    make: Callable[[], Any]  # a new instance
    has_reward: bool
    tools: list[dict]  # JSON schemas of the tools that the model may call; none if it has `step`


@functools.cache
def load(name: str) -> UserClass:
    make = load_function(name)
    with errors.exits_with_a_message():
        instance = make()
        if hasattr(instance, "close"):
            awaited_result(instance.close())
    tools = []
    if not hasattr(instance, "step"):
        tools = [get_json_schema(getattr(instance, method)) for method in tools_of(instance)]
    return UserClass(name, make, hasattr(instance, "get_reward"), tools)


def tools_of(instance: Any) -> list[str]:
    members = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    return [name for name, _ in members if name not in PROTOCOL and not name.startswith("_")]


# ============================================================ calls of a user's code
def load_function(name: str) -> Callable:
    """Loads the function or class `MODULE:NAME`. The current directory is searched, too."""
    here = os.getcwd()
    sys.path.append(here)
    try:
        with errors.exits_with_a_message():  # importing a script may run it
            function = pkgutil.resolve_name(name)
    except (ModuleNotFoundError, AttributeError, ValueError, SyntaxError) as error:
        refuse(f"{name!r} cannot be loaded, from {here} or as installed: {one_line(error)}")
    finally:
        os.chdir(here)  # the module may have changed it
    if not callable(function):
        refuse(f"{name!r} is no function or class: expected MODULE:NAME")
    return function


class Calls:
    """Calls of environments that run at the same time, in the background.

    Each has a daemon thread, and `timeout` seconds to finish; 0: no limit.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout or None
        self.futures: dict[int, concurrent.futures.Future] = {}  # by the index of the call
        event_loop()  # one thread makes it before those of the calls need it

    def start(self, index: int, function: Callable, /, *args, **keywords) -> None:
        future: concurrent.futures.Future = concurrent.futures.Future()
        self.futures[index] = future

        def run() -> None:
            try:
                future.set_result(awaited_result(function(*args, **keywords)))
            except BaseException as error:  # `wait` raises it; also `SystemExit`
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()

    def wait(self) -> dict[int, Any]:
        """Returns the results of all calls by their indices, or raises an error of one of them."""
        _, late = concurrent.futures.wait(self.futures.values(), self.timeout)
        if late:
            raise TimeoutError(f"a call took longer than --environment_timeout {self.timeout:g}")
        return {index: future.result() for index, future in sorted(self.futures.items())}


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the only loop for a user's code, whose clients may be bound to their loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def awaited_result(result: Any) -> Any:
    """Returns a call's result; if it is an awaitable, its awaited result."""

    async def awaited() -> Any:
        try:
            return await result
        except SystemExit as end:  # it would silently end the loop
            raise RuntimeError(f"sys.exit({end.code!r})") from end

    if not inspect.isawaitable(result):
        return result
    return asyncio.run_coroutine_threadsafe(awaited(), event_loop()).result()


# ============================================================ tools
def parsed(tokenizer, text: str, prompt: str, tools: list[dict]) -> dict:
    """Returns a text that the model wrote after a prompt as a message, with its `tool_calls`.

    The tokenizer's `response_template` finds the calls if it has one; otherwise their form is
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. If a call is not a JSON object, its
    `function` is its text.
    """
    message: dict[str, Any] = {"role": "assistant"}
    if getattr(tokenizer, "response_template", None) is not None:
        try:
            return message | tokenizer.parse_response(text, prefix=prompt, tools=tools)
        except Exception:  # the model wrote something that the template cannot parse
            return message | {"content": text}
    calls = []
    for call_text in TOOL_CALL.findall(text):
        try:
            # `**` raises a TypeError if the call is not an object.
            calls.append({"type": "function", "function": {**json.loads(call_text)}})
        except (ValueError, TypeError):
            calls.append({"type": "function", "function": call_text})
    message["content"] = TOOL_CALL.sub("", text).strip()
    return {**message, "tool_calls": calls} if calls else message


def call_tools(instance: Any, message: dict) -> tuple[list[dict], int]:
    """Calls the tools that a message names; returns one message per call, and how many failed."""
    messages = []
    n_failed = 0
    for call in message.get("tool_calls", []):
        name, result = answer_call(instance, call.get("function"))
        n_failed += isinstance(result, dict) and "error" in result
        text = result if isinstance(result, str) else json.dumps(result, default=str)
        messages.append({"role": "tool", "name": name, "content": text})
    return messages, n_failed


def answer_call(instance: Any, function: Any) -> tuple[str, Any]:
    """Returns the name of the called tool, and its result or the model's error."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return "", {"error": f"no JSON object with name and arguments: {function!r:.200}"}
    name = function["name"]
    names = tools_of(instance)
    if name not in names:
        return name, {"error": f"unknown tool {name!r}; there are: {', '.join(names)}"}
    try:
        arguments = function.get("arguments") or {}
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return name, awaited_result(getattr(instance, name)(**arguments))
    except Exception as error:
        return name, {"error": f"{type(error).__name__}: {one_line(error, most=200)}"}
