"""Defines messages, and converts the kinds of messages that people use to one form."""

import json
import re
from typing import Any, NamedTuple

# The senders in ShareGPT's conversations, with the roles that chat templates know.
SENDERS = {"human": "user", "gpt": "assistant", "observation": "tool"}
SENDERS |= {role: role for role in ("system", "user", "assistant", "tool")}
SENDERS["function_call"] = "assistant"  # its value is a call
SPEAKERS = {*SENDERS, "developer"}
# Messages as Python prints them instead of as JSON.
PRINTED = re.compile(
    rf"""\s*(?:array\()?[\[{{].*'(?:role|from)': '(?:{"|".join(SPEAKERS)})'""", re.DOTALL
)
# The field of a message for each type of a content's parts.
PARTS = {"text": "content", "reasoning": "reasoning_content", "thinking": "reasoning_content"}
IMAGE_COLUMNS = ("images", "image")
IMAGES = ("image", "image_url", "input_image")  # types of parts that are images
SOURCES = ("image", "image_url", "url", "path", "base64")  # keys of such a part with the image
PLACE = "\ufffc"  # stands for an image in a text
ARGUMENTS = ("arguments", "parameters")
# Keys by which other programs say whether, or how much, a turn counts in the loss.
LOSS_KEYS = ["loss", "loss_mask", "loss_scale", "loss_weight", "weight"]
LOSS_KEYS += ["train", "trainable", "training"]


class BadRow(Exception):
    """A row that fits no format."""


class LeftOut(Exception):
    """A row that is not used. The run counts such rows by reason, and continues."""


class Conversation(NamedTuple):
    """A row of any format in the one form that is encoded."""

    prompt: list[dict]  # messages; empty if the answer is a whole conversation
    answers: list[list[dict]]  # one answer, or the chosen and the rejected one
    tools: list[dict] | None = None  # JSON schemas of functions that the model may call
    is_text: bool = False  # plain strings, one message each, encoded without a chat template


class Arguments(dict):
    """The arguments of a call, which turn into JSON where a template prints them or adds a text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __radd__(self, text: str) -> str:
        return text + str(self)


# ============================================================ messages
def is_messages(value) -> bool:
    """Whether a value is a list of messages."""
    return isinstance(value, list) and all(map(is_message, value))


def is_message(value) -> bool:
    """Whether a value has a role and a content or calls, or is ShareGPT's `{"from", "value"}`."""
    if not isinstance(value, dict):
        return False
    role, content = ("from", "value") if value.get("role") is None else ("role", "content")
    text = value.get(content)
    calls = from_json(value.get("tool_calls"))
    has_content = isinstance(text, (str, list)) or (text is None and calls)
    return isinstance(value.get(role), str) and bool(has_content)


def learned_turns(messages: list[dict], first: int = 0) -> list[int]:
    """Returns the indices, from `first` on, of the messages that the model writes and learns."""
    return [
        index
        for index, message in enumerate(messages[first:], first)
        if message["role"] == "assistant" and has_text([message]) and is_learned(message)
    ]


def is_learned(message: dict) -> bool:
    """Whether a message may be learned: an assistant's may forbid it by one of `LOSS_KEYS`."""
    return message["role"] != "assistant" or all(message.get(key, 1) for key in LOSS_KEYS)


def has_text(messages: list[dict]) -> bool:
    """Whether any of the messages has a content or a call."""
    return any(message["content"] or message.get("tool_calls") for message in messages)


def text_of(messages: list[dict]) -> str:
    """Returns the contents of messages, without roles and calls."""
    return "".join(message["content"] for message in messages)


def has_image_part(value: Any) -> bool:
    """Whether a column holds messages with parts that are images."""
    messages = (message for message in as_list(value) if isinstance(message, dict))
    contents = (message.get("content", message.get("value")) for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("type") in IMAGES for part in parts)


# ============================================================ conversion
def as_messages(value: str | dict | list[dict], role: str) -> list[dict]:
    """Returns messages, each with a role and a text; a string becomes one message of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = as_json(as_list(value), without_nulls=True)
    return [as_message(message, f"message {number}") for number, message in enumerate(messages, 1)]


def as_message(message: dict, where: str) -> dict:
    """Returns a message with `role` and a text as its `content`; other fields are kept."""
    if "role" not in message:  # ShareGPT's
        sender = message["from"]
        if sender not in SENDERS:
            raise BadRow(f"{where} is from {sender!r}: expected one of {', '.join(SENDERS)}")
        key = "tool_calls" if sender == "function_call" else "content"
        other_fields = {name: message[name] for name in message if name not in ("from", "value")}
        message = {**other_fields, "role": SENDERS[sender], key: message.get("value", "")}
    if message["role"] == "tool_call":  # many templates would write another speaker's turn
        raise BadRow(f"{where}, role 'tool_call': expected an assistant message with `tool_calls`")
    message = {"content": "", **message}
    calls = as_list(from_json(message.pop("tool_calls", None)) or [])  # "[]" and the like mean none
    if isinstance(message["content"], list):
        message, calls_in_content = from_parts(message, where)
        calls += calls_in_content
    if calls:
        message["tool_calls"] = [as_call(call, where) for call in calls]
    if message["role"] == "assistant":
        check_answer(message, where)
    return message


def check_answer(message: dict, where: str) -> None:
    """Refuses an assistant's message with an unclear loss, or with a call in another field."""
    for key, value in message.items():
        # Other keys that seem to be about the loss may mean anything.
        is_unclear = key in LOSS_KEYS and value not in (0, 1)
        is_unknown = key.startswith("train_") and value not in ("", [], {})
        if is_unclear or is_unknown or (value and key.startswith(("skip", "mask"))):
            expected = "remove the key, or give train: false to a turn that is not learned"
            raise BadRow(f"{where}, {key} {value!r}: every learned turn counts alike; {expected}")
        if value and "call" in key.lower() and not has_text([message]):
            raise LeftOut(f"a call in {key!r}, and none in 'tool_calls'")  # the turn is empty


def from_parts(message: dict, where: str) -> tuple[dict, list]:
    """Converts a message whose content is a list of parts to one with a text, and its calls.

    `image_sources` has an image, or None, for each part that is an image.
    """
    texts: dict[str, Any] = {"content": ""}
    calls = []
    for part in message["content"]:
        fields = part if isinstance(part, dict) else {}
        kind = str(fields.get("type", "text"))
        value = next((fields[key] for key in (kind, "value", "text") if key in fields), None)
        if kind == "tool_call":
            calls += as_list(from_json(value))
        elif kind in IMAGES and message["role"] != "assistant":  # a model writes text alone
            texts["content"] += PLACE
            source = next((fields[key] for key in SOURCES if fields.get(key)), None)
            if source is fields.get("base64"):
                source = source and f"data:,{source}"
            texts["image_sources"] = [*texts.get("image_sources", []), source]
        elif kind in PARTS and isinstance(value, str):
            if value:
                texts[PARTS[kind]] = texts.get(PARTS[kind], "") + value
        else:
            raise BadRow(f"{where}: expected text, reasoning or a call, found {part!r:.80}")
    return {**message, **texts}, calls


def as_call(call: Any, where: str) -> dict:
    """Returns a nested or flat call as in OpenAI's API."""
    call = as_json(call, without_nulls=True)  # a call that was JSON text may have some
    if isinstance(call, dict) and "function" not in call:
        function = {key: call[key] for key in ("name", *ARGUMENTS) if key in call}
        other_fields = {key: value for key, value in call.items() if key not in function}
        call = {**other_fields, "type": "function", "function": function}
    function = call["function"] if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(f"{where}: expected a call, JSON of name and arguments, found {call!r:.80}")
    raw_arguments = next((function[key] for key in ARGUMENTS if key in function), None)
    arguments = from_json(from_json(raw_arguments))  # some files quote them twice
    if not isinstance(arguments, (dict, type(None))):
        call_of = f"{where}: the arguments of a call of {function['name']!r}"
        raise BadRow(f"{call_of}: expected an object or its JSON, found {arguments!r:.80}")
    renamed = {"arguments" if key in ARGUMENTS else key: function[key] for key in function}
    return {**call, "function": {**renamed, "arguments": Arguments(arguments or {})}}


# ============================================================ values
def from_text(column: str, value: Any) -> Any:
    """Returns the message or messages that a text holds as JSON; any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{", '"', "array(")):
        return value
    if PRINTED.match(value):
        shown = f"messages as Python prints them, not as `json.dumps` writes them: {value!r:.80}"
        raise BadRow(f"column {column!r} holds {shown}")
    parsed = from_json(from_json(value))  # some files quote it twice
    messages = as_list(parsed)
    speakers = {part.get("role") or part.get("from") for part in messages if is_message(part)}
    are_known = column == "messages" or speakers <= SPEAKERS
    return parsed if parsed and is_messages(messages) and are_known else value


def from_json(value: Any) -> Any:
    """Returns the value of a JSON text, None for an empty one; any other value unchanged."""
    try:
        return json.loads(value.strip() or "null") if isinstance(value, str) else value
    except ValueError:
        return value


def as_list(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def as_json(value: Any, without_nulls: bool = False) -> Any:
    """Returns a value as JSON would hold it, maybe `without_nulls`, about which templates ask.

    The arguments of a call keep their nulls, because the model writes them.
    """
    if isinstance(value, dict):
        return {
            str(key): as_json(part, without_nulls and key not in ARGUMENTS)
            for key, part in value.items()
            if part is not None or not without_nulls
        }
    if isinstance(value, (list, tuple)):
        return [as_json(part, without_nulls) for part in value]
    is_kept = value is None or isinstance(value, (str, int, float, bytes))
    is_image = hasattr(value, "getexif")  # PIL's
    return value if is_kept or is_image else str(value)  # such as a date
