"""The formats of rows."""

import json
import os
import sys

HH_MARKER = (
    "\n\nAssistant:"  # hh-rlhf transcripts: the prompt ends with the last one both answers share
)


FORMAT_COLUMNS = (
    "messages",
    "prompt",
    "completion",
    "text",
    "chosen",
    "rejected",
    "answer",
    "margin",
)


class BadRow(Exception):
    """A row that does not fit any format: which column, and what was expected."""


def column_names(pairs: list[str] | None) -> dict[str, str]:
    """`["prompt=question"]` -> `{"prompt": "question"}`: where a format's column stands in the user's file."""
    columns = dict(pair.partition("=")[::2] for pair in pairs or [])
    if (
        len(columns) < len(pairs or [])
        or not all(columns.values())
        or columns.keys() - FORMAT_COLUMNS
    ):
        sys.exit(
            f"--columns {' '.join(pairs)}: expected {'|'.join(FORMAT_COLUMNS)}=YOUR_COLUMN, each once, such as prompt=question"
        )
    return columns


def check(fits: bool, row: dict, column: str, expected: str) -> None:
    if not fits:
        raise BadRow(f"column {column!r}: expected {expected}, found {row[column]!r:.80}")


def is_messages(value) -> bool:
    """Whether a value is a list of `{"role": ..., "content": ...}`, both strings; a turn that calls tools needs no content."""
    fits = lambda m: (
        isinstance(m.get("role"), str)
        and isinstance(m.get("content"), str | None if m.get("tool_calls") else str)
    )
    return isinstance(value, list) and all(isinstance(m, dict) and fits(m) for m in value)


def as_messages(value: str | list[dict], role: str) -> list[dict]:
    """A string becomes one message of that role."""
    messages = [{"role": role, "content": value}] if isinstance(value, str) else value
    return [
        {"content": "", **message} for message in without_nulls(json.dumps(messages, default=str))
    ]


def without_nulls(text: str):
    """The value of a JSON text without the keys, at any depth, that are null: in a parquet file each row has the keys of all."""
    return json.loads(
        text,
        object_hook=lambda parts: {key: part for key, part in parts.items() if part is not None},
    )


def has_text(value: str | list[dict]) -> bool:
    return (
        any(message["content"] or message.get("tool_calls") for message in value)
        if isinstance(value, list)
        else bool(value)
    )


def require(row: dict, *columns: str, expected: str) -> None:
    """Every column is there, a string or a list of messages."""
    for column in columns:
        if row.get(column) is None:
            found = sorted(name for name in row if row[name] is not None)
            raise BadRow(
                f"no {column!r}: expected columns {expected}; found {found} (--columns {column}=YOURS names another)"
            )
        check(
            isinstance(row[column], str) or is_messages(row[column]),
            row,
            column,
            "a string or a list of messages with role and content",
        )


def preference(row: dict) -> tuple[list[dict] | str, list[dict] | str, list[dict] | str]:
    """A preference row as (prompt, chosen, rejected), all strings or all message lists, the prompt stated once."""
    prompt, chosen, rejected = (row.get(column) for column in ("prompt", "chosen", "rejected"))
    stated = [] if prompt is None else ["prompt"]
    require(
        row,
        "chosen",
        "rejected",
        *stated,
        expected="'chosen' and 'rejected', and 'prompt' unless it is in both",
    )
    if isinstance(chosen, str) and isinstance(rejected, str) and not isinstance(prompt, list):
        if stated:
            return prompt, chosen, rejected
        shared = os.path.commonprefix([chosen, rejected])
        if HH_MARKER not in shared:
            raise BadRow(
                f"no column 'prompt', and 'chosen' and 'rejected' do not share a transcript that holds {HH_MARKER!r}"
            )
        cut = shared.rindex(HH_MARKER) + len(HH_MARKER)
        return shared[:cut], chosen[cut:], rejected[cut:]
    chosen, rejected = as_messages(chosen, "assistant"), as_messages(rejected, "assistant")
    if stated and (not chosen or chosen[0]["role"] == "assistant"):
        return as_messages(prompt, "user"), chosen, rejected
    # The prompt stands inside both (UltraFeedback repeats it): it is what they share, up to an answer.
    cut = next(
        (i for i, (a, b) in enumerate(zip(chosen[:-1], rejected[:-1])) if a != b),
        min(len(chosen), len(rejected)) - 1,
    )
    while cut > 0 and not chosen[cut]["role"] == rejected[cut]["role"] == "assistant":
        cut -= 1
    inside = [message["content"].strip() for message in chosen[: max(cut, 0)]]
    if not inside or (prompt and as_messages(prompt, "user")[-1]["content"].strip() not in inside):
        raise BadRow(
            "'chosen' and 'rejected' do not begin with the same prompt, that of column 'prompt' if there is one"
        )
    return chosen[:cut], chosen[cut:], rejected[cut:]
