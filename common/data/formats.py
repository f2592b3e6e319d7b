"""Recognises the formats of rows: conversations, prompts with completions, preferences, text."""

import json
import os
import re
import sys

# hh-rlhf transcripts: the prompt ends with the last marker that both answers share.
HH_MARKER = "\n\nAssistant:"

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
    """A row that fits no format; its text says which column, and what was expected."""


def column_names(pairs: list[str] | None) -> dict[str, str]:
    """The format's column -> the user's: `["prompt=question"]` gives `{"prompt": "question"}`.

    Raises:
        SystemExit: not of the form COLUMN=YOUR_COLUMN, an unknown column, or one named twice.
    """
    columns = {}
    for pair in pairs or []:
        column, _, own = pair.partition("=")
        if column not in FORMAT_COLUMNS or column in columns or not own:
            sys.exit(
                f"--columns {' '.join(pairs)}: expected {'|'.join(FORMAT_COLUMNS)}=YOUR_COLUMN, "
                "each once, such as prompt=question"
            )
        columns[column] = own
    return columns


def check(fits: bool, row: dict, column: str, expected: str) -> None:
    """Raises `BadRow` with the value that was found, unless it fits."""
    if not fits:
        raise BadRow(f"column {column!r}: expected {expected}, found {row[column]!r:.80}")


def require(row: dict, *columns: str, expected: str) -> None:
    """Raises `BadRow` unless every column is there and is a string or a list of messages."""
    for column in columns:
        value = row.get(column)
        if value is None:
            found = sorted(name for name in row if row[name] is not None)
            raise BadRow(
                f"no {column!r}: expected columns {expected}; found {found} "
                f"(--columns {column}=YOURS names another)"
            )
        fits = isinstance(value, str) or is_messages(value)
        check(fits, row, column, "a string or a list of messages with role and content")


def is_messages(value) -> bool:
    """Whether a value is a list of messages, see `is_message`."""
    return isinstance(value, list) and all(is_message(part) for part in value)


def is_message(value) -> bool:
    """Whether a value is `{"role": ..., "content": ...}`, both strings.

    A message that calls tools needs no content.
    """
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    return isinstance(content, str) or (content is None and bool(value.get("tool_calls")))


def as_messages(value: str | list[dict], role: str) -> list[dict]:
    """A list of messages, each with a content; a string becomes one message of that role."""
    messages = [{"role": role, "content": value}] if isinstance(value, str) else value
    messages = without_nulls(json.dumps(messages, default=str))
    return [{"content": "", **message} for message in messages]


def without_nulls(text: str):
    """The value of a JSON text without the keys, at any depth, whose value is null.

    In a parquet file every row has the keys of all rows, and those that it lacks are null.
    Templates ask whether a key is there.
    """

    def drop_nulls(parts: dict) -> dict:
        return {key: part for key, part in parts.items() if part is not None}

    return json.loads(text, object_hook=drop_nulls)


def has_text(value: str | list[dict]) -> bool:
    """Whether there is anything to read: in messages, a content or a tool call."""
    if isinstance(value, list):
        return any(message["content"] or message.get("tool_calls") for message in value)
    return bool(value)


def conversation(row: dict) -> tuple[list[dict] | str, list[dict] | str]:
    """An SFT row as (prompt, completion), both strings or both message lists.

    The formats are tried in this order: `messages` and `text`, which have an empty prompt, then
    `prompt` and `completion`.
    """
    if row.get("messages") is not None:
        fits = is_messages(row["messages"])
        check(fits, row, "messages", "a list of messages with role and content")
        return [], as_messages(row["messages"], "user")
    if row.get("text") is not None:
        check(isinstance(row["text"], str), row, "text", "a string")
        return "", row["text"]
    require(
        row,
        "prompt",
        "completion",
        expected="'messages', or 'prompt' and 'completion', or 'text'",
    )
    prompt = row["prompt"]
    completion = row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt, completion
    return as_messages(prompt, "user"), as_messages(completion, "assistant")


def preference(row: dict) -> tuple[list[dict] | str, list[dict] | str, list[dict] | str]:
    """A preference row as (prompt, chosen, rejected), the prompt stated once.

    All three are strings, or all three are message lists.
    """
    prompt = row.get("prompt")
    has_prompt = prompt is not None
    required = ["chosen", "rejected"]
    if has_prompt:
        required.append("prompt")
    require(
        row,
        *required,
        expected="'chosen' and 'rejected', and 'prompt' unless it is in both",
    )
    chosen = row["chosen"]
    rejected = row["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str) and not isinstance(prompt, list):
        if has_prompt:
            return prompt, chosen, rejected
        return split_transcripts(chosen, rejected)

    chosen = as_messages(chosen, "assistant")
    rejected = as_messages(rejected, "assistant")
    # Lists that begin with another role begin with the prompt, whether the row states it or not.
    if has_prompt and (not chosen or chosen[0]["role"] == "assistant"):
        return as_messages(prompt, "user"), chosen, rejected
    return split_conversations(prompt, chosen, rejected)


def split_transcripts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) of two hh-rlhf transcripts that share their beginning."""
    shared = os.path.commonprefix([chosen, rejected])
    if HH_MARKER not in shared:
        raise BadRow(
            "no column 'prompt', and 'chosen' and 'rejected' do not share a transcript that holds "
            f"{HH_MARKER!r}"
        )
    cut = shared.rindex(HH_MARKER) + len(HH_MARKER)
    return shared[:cut], chosen[cut:], rejected[cut:]


def split_conversations(
    prompt: str | list[dict] | None, chosen: list[dict], rejected: list[dict]
) -> tuple[list[dict], list[dict], list[dict]]:
    """(prompt, chosen, rejected) of two conversations that both begin with the prompt.

    Args:
        prompt: column `prompt`, if there is one. UltraFeedback states the last question there, too.
    """
    cut = shared_prompt_length(chosen, rejected)
    shared = [message["content"].strip() for message in chosen[:cut]]
    is_shared = bool(shared)
    if shared and prompt:
        is_shared = as_messages(prompt, "user")[-1]["content"].strip() in shared
    if not is_shared:
        raise BadRow(
            "'chosen' and 'rejected' do not begin with the same prompt, "
            "that of column 'prompt' if there is one"
        )
    return chosen[:cut], chosen[cut:], rejected[cut:]


def shared_prompt_length(chosen: list[dict], rejected: list[dict]) -> int:
    """The number of messages that both conversations begin with, up to an assistant's in both.

    At least one message of each is left as its answer, also where the conversations are equal.
    """
    longest = min(len(chosen), len(rejected)) - 1
    cut = 0
    while cut < longest and chosen[cut] == rejected[cut]:
        cut += 1
    # They may part at a user's message: the answers then begin with the assistant's turn before.
    while cut > 0 and not chosen[cut]["role"] == rejected[cut]["role"] == "assistant":
        cut -= 1
    return cut


def is_plain_text(row: dict) -> bool:
    """Whether a row's prompt and answers are strings, which no chat template writes."""
    if row.get("messages") is not None or row.get("text") is not None:
        return False
    names = ("prompt", "completion", "chosen", "rejected")
    values = [row[name] for name in names if row.get(name) is not None]
    return bool(values) and all(isinstance(value, str) for value in values)


def as_turns(prompt: str | list[dict], *answers: str | list[dict]) -> tuple[list[dict], ...]:
    """A prompt and its answers as message lists: strings become turns of user and assistant.

    A transcript of hh-rlhf becomes the turns that it holds. A text without a prompt stays as it
    is, because nothing says whose turn it would be.
    """
    if not isinstance(prompt, str) or (answers and not prompt):
        return prompt, *answers
    parts = re.split(r"\n\n(Human|Assistant):", prompt)
    is_transcript = len(parts) > 1 and not parts[0].strip()
    if not is_transcript:
        turns = [{"role": "user", "content": prompt}]
        return turns, *([{"role": "assistant", "content": answer}] for answer in answers)

    turns = []
    for speaker, text in zip(parts[1::2], parts[2::2]):
        role = "user" if speaker == "Human" else "assistant"
        turns.append({"role": role, "content": text.strip()})
    # The transcript ends where the answer begins.
    if turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()
    return turns, *([{"role": "assistant", "content": answer.strip()}] for answer in answers)
