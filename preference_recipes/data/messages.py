"""Says what a message is, and brings the kinds of messages that people use into one form."""

import json
from typing import Any

# Who speaks in ShareGPT's conversations, and the role that chat templates know. `function_call` is
# an assistant's turn, too, but its value is a call.
SENDERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}
# What some data call the arguments of a tool call, besides `arguments` and `parameters`.
OTHER_ARGUMENTS = {"args", "input", "inputs", "kwargs", "params"}
# How data that store tool calls as JSON say that there are none.
NO_CALLS = ("", "[]", "{}", "null")
# Whether, or how much, a turn counts in the loss, in files for other programs: OpenAI's `weight`.
LOSS_KEYS = ("weight", "loss_weight", "loss_mask", "loss", "train", "trainable")


class BadRow(Exception):
    """A row that fits no format; its text says which column, and what was expected."""


def is_messages(value) -> bool:
    """Whether a value is a list of messages, see `is_message`."""
    return isinstance(value, list) and all(is_message(part) for part in value)


def is_message(value) -> bool:
    """Whether a value is `{"role": ..., "content": ...}`, or ShareGPT's `{"from", "value"}`.

    The content is a string or a list of parts. A message that calls tools needs none.
    """
    if not isinstance(value, dict):
        return False
    role = value.get("role")
    content = value.get("content")
    if role is None:
        role = value.get("from")
        content = value.get("value")
    if not isinstance(role, str):
        return False
    if isinstance(content, list):
        return all(isinstance(part, dict) for part in content)
    return isinstance(content, str) or (content is None and not has_no_calls(value))


def has_no_calls(message: dict) -> bool:
    """Whether a message calls no tool, in any of the ways of data to say so."""
    calls = message.get("tool_calls") or message.get("function_call")
    return not calls or (isinstance(calls, str) and calls.strip() in NO_CALLS)


def learned_turns(messages: list[dict], first: int) -> list[int]:
    """Returns which messages, from number `first` on, the model writes and learns."""
    return [
        number
        for number, message in enumerate(messages)
        if number >= first and message["role"] == "assistant"
        if has_text([message]) and is_learned(message)
    ]


def is_learned(message: dict) -> bool:
    """Whether a message may be learned: not an assistant's that says no in one of `LOSS_KEYS`."""
    return message["role"] != "assistant" or all(message.get(key, 1) for key in LOSS_KEYS)


def has_text(value: str | list[dict]) -> bool:
    """Whether a text is not empty; of messages, whether one has a content or a call."""
    if isinstance(value, list):
        return any(message["content"] or message.get("tool_calls") for message in value)
    return bool(value)


def as_messages(value: str | dict | list[dict], role: str) -> list[dict]:
    """Returns messages, each with a role and a text; a string becomes one message of `role`.

    Raises:
        BadRow: a message says what no text can hold, such as an image, or its sender is unknown.
    """
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    messages = [value] if isinstance(value, dict) else value
    return [as_message(without_nulls(part), number) for number, part in enumerate(messages, 1)]


def as_message(message: dict, number: int) -> dict:
    """Returns a message with `role` and a text as its `content`; what else it has is kept.

    Args:
        number: its position in its column, counted from 1, for errors.
    """
    if "role" not in message:
        message = from_sharegpt(message, number)
    if message.get("function_call") and not message.get("tool_calls"):  # OpenAI's first form
        message = {**message, "tool_calls": message["function_call"]}
        del message["function_call"]
    if isinstance(message.get("content"), list):
        message = from_parts(message, number)
    calls = message.get("tool_calls")
    if isinstance(calls, (str, dict)):  # JSON, or a single call
        calls = [] if has_no_calls(message) else tool_calls(calls, f"message {number}")
    if isinstance(calls, list):
        for call in calls:
            nested(call)  # to refuse its arguments: a flat call stays one
        message = {**message, "tool_calls": [with_arguments(call) for call in calls]}
    return {"content": "", **message}


def nested(call: Any) -> Any:
    """Returns a tool call with its name and arguments under `function`, as in OpenAI's API.

    A flat call has them side by side, the arguments under `arguments` or `parameters`. A call
    with neither has no arguments. One with a key of `OTHER_ARGUMENTS` is returned as it is, because
    its arguments may be there.
    """
    is_flat = isinstance(call, dict) and "name" in call and "function" not in call
    arguments_key = key_of_arguments(call) if is_flat else None
    if arguments_key is None:
        return call
    others = {key: value for key, value in call.items() if key not in ("name", arguments_key)}
    function = {"name": call["name"], "arguments": call.get(arguments_key)}
    return with_arguments({**others, "type": "function", "function": function})


def with_arguments(call: Any) -> Any:
    """Returns a tool call whose `function` has `arguments`, an object, as `nested` does.

    OpenAI's API writes an object's JSON, '{"a": 1}', which most templates would quote once more.
    For templates that want a string, `chat.render` makes one.
    """
    function = call.get("function") if isinstance(call, dict) else None
    key = key_of_arguments(function) if isinstance(function, dict) else None
    if key is None:
        return call
    arguments = decoded(function.get(key), function.get("name"))
    renamed = {"arguments" if name == key else name: value for name, value in function.items()}
    return {**call, "function": {**renamed, "arguments": arguments}}


def key_of_arguments(function: dict) -> str | None:
    """Returns where a function's arguments are, or would be; None if they have another name."""
    found = next((key for key in ("arguments", "parameters") if key in function), None)
    return found or (None if function.keys() & OTHER_ARGUMENTS else "arguments")


def decoded(arguments: Any, name: Any) -> dict:
    """Returns arguments as an object: they may be its JSON, or the JSON of that; {} for none.

    Raises:
        BadRow: they are something else.
    """
    value = arguments
    try:
        while isinstance(value, str):
            value = json.loads(value) if value.strip() else None
    except ValueError:
        pass  # refused below
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRow(
            f"the arguments of a call of {name!r}: expected an object or its JSON, found "
            f"{arguments!r:.80}"
        )
    return value


def role_of(message: dict) -> str:
    """Returns the role of a message in either form. The message may be unchecked.

    A sender who is not in `SENDERS` counts as the assistant: `function_call`, or an unknown one.
    """
    if message.get("role"):
        return str(message["role"])
    return SENDERS.get(str(message.get("from")), "assistant")


def from_sharegpt(message: dict, number: int) -> dict:
    """Returns a message of `from` and `value` as one of role and content.

    Raises:
        BadRow: the sender is unknown, or the value of a `function_call` is not a call.
    """
    sender = message["from"]
    value = message.get("value", "")
    others = {key: part for key, part in message.items() if key not in ("from", "value")}
    if sender == "function_call":
        calls = tool_calls(value, f"message {number}")
        for call in calls:
            if "function" not in call:
                call.pop("id", None)  # of no use here: in ShareGPT results do not name it
        return {**others, "role": "assistant", "tool_calls": [nested(call) for call in calls]}
    if sender not in SENDERS:
        expected = ", ".join([*SENDERS, "function_call"])
        raise BadRow(f"message {number} is from {sender!r}: expected one of {expected}")
    return {**others, "role": SENDERS[sender], "content": value}


def from_parts(message: dict, number: int) -> dict:
    """Returns a message whose content is a list of parts as one whose content is a text.

    Thinking goes to `reasoning_content`, in place of what the message has there. Calls go to
    `tool_calls`, after those that the message has.

    Raises:
        BadRow: a part of another type, or one whose value does not fit its type.
    """
    texts = []
    thoughts = []
    calls = []
    if not has_no_calls(message):
        calls += tool_calls(message["tool_calls"], f"message {number}")
    for part_number, part in enumerate(message["content"], 1):
        where = f"message {number}, part {part_number}"
        kind = str(part.get("type", "text"))
        value = value_of_part(part, kind)
        if kind == "tool_call":
            calls += tool_calls(value, where)
            continue
        if kind not in ("text", "reasoning", "thinking"):
            raise BadRow(
                f"{where} is of type {kind!r}: only text, calls and reasoning are supported"
            )
        if not isinstance(value, str):
            raise BadRow(f"{where}: expected a text, found {part!r:.80}")
        (texts if kind == "text" else thoughts).append(value)

    message = {**message, "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [nested(call) for call in calls]
    return message


def value_of_part(part: dict, kind: str) -> Any:
    """Returns what a part of a content holds; None if it holds nothing.

    It is under the part's own type, as in `{"type": "thinking", "thinking": ...}`, or else under
    `value` or `text`.
    """
    return next((part[key] for key in (kind, "value", "text") if key in part), None)


def tool_calls(value: Any, where: str) -> list[dict]:
    """Returns tool calls as a list.

    Args:
        value: one call or a list of calls, or the JSON of either. A call may be flat, see `nested`.
        where: the message, and the part of it, for errors.

    Raises:
        BadRow: it is not a call.
    """
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        given = None  # refused below
    calls = given if isinstance(given, list) else [given]
    are_calls = all(isinstance(call, dict) and "function" in nested(call) for call in calls)
    if not calls or not are_calls:
        raise BadRow(
            f"{where}: expected a function call, JSON of name and arguments, found {value!r:.80}"
        )
    return calls


def without_nulls(value: Any) -> Any:
    """Returns a value as JSON would hold it, with keys whose value is None removed at every depth.

    Parquet gives every row the keys of all rows, null where a row lacks them, and templates ask
    whether a key is there.
    """
    if isinstance(value, dict):
        return {str(key): without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(part) for part in value]
    is_json = value is None or isinstance(value, (str, int, float))
    return value if is_json else str(value)  # such as a date
