"""Recognises the formats of rows: conversations, prompts with completions, preferences, text."""

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from preference_recipes.data import rendering
from preference_recipes.data.messages import (
    LOSS_KEYS,
    BadRow,
    as_messages,
    from_json,
    is_learned,
    is_message,
    is_messages,
    without_nulls,
)

# hh-rlhf transcripts: the prompt ends with the last marker that both answers share.
HH_MARKER = "\n\nAssistant:"

# A prompt or an answer: a string, or messages.
Text = str | list[dict]

# The columns that say which format a row has; the first that is there decides.
LEADING = ("messages", "prompt", "conversations", "instruction", "text")
# Others that belong to a format of these.
LED_BY = {"completion": "prompt", "input": "instruction", "output": "instruction"}
OTHERS = ("chosen", "rejected", "answer", "margin", "label", "tools", "system")
FORMAT_COLUMNS = (*LEADING, *LED_BY, *OTHERS)
MEDIA_COLUMNS = ("images", "videos", "audios", "image", "video", "audio")
# How `label` may be written; the cells of a CSV file are text.
LABELS = {"true": True, "false": False, "1": True, "0": False}


# ============================================================ prompts and answers
def preference(row: dict) -> tuple[Text, Text, Text]:
    """Returns a preference row as (prompt, chosen, rejected), the prompt stated once.

    All three are strings, or all three are message lists. With `U` and `A` for messages:

           prompt    chosen    rejected    returned
        1. "Why?"    "So."     "No."       see `preference_of_strings`
        2. "Why?"    [A1]      "No."       [U] [A1] [A2]
        3. none      [U A1]    [U A2]      [U] [A1] [A2]
        3. "Why?"    [U A1]    [U A2]      [U] [A1] [A2]    (as in UltraFeedback)
    """
    refuse_label(row)
    prompt = row.get("prompt")
    needed = ["chosen", "rejected"] + ["prompt"] * (prompt is not None)
    expected = "'chosen' and 'rejected', and 'prompt' unless both begin with it"
    require(row, *needed, expected=expected)

    if all(isinstance(row[column], str) for column in needed):  # 1.
        return preference_of_strings(prompt, row["chosen"], row["rejected"])
    chosen = as_messages(row["chosen"], "assistant")
    rejected = as_messages(row["rejected"], "assistant")
    begin_with_answer = all(
        not messages or messages[0]["role"] == "assistant" for messages in (chosen, rejected)
    )
    if prompt is not None and begin_with_answer:  # 2.
        return question_of(prompt), chosen, rejected
    end = end_of_prompt(chosen, rejected)  # 3.
    if end == 0:
        raise BadRow(
            "'chosen' and 'rejected' do not begin with the same prompt, each followed by an answer"
        )
    # Others may be between them; `in` continues where it stopped.
    stated = as_messages(prompt, "user") if prompt else []
    repeated = iter(turns_of(chosen[:end]))
    if not all(turn in repeated for turn in turns_of(stated)):
        raise BadRow(
            "'chosen' and 'rejected' do not begin with all of the prompt in column 'prompt'"
        )
    return chosen[:end], chosen[end:], rejected[end:]


def preference_of_strings(prompt: str | None, chosen: str, rejected: str) -> tuple[str, str, str]:
    r"""Returns (prompt, chosen, rejected) of strings, the prompt stated once.

    hh-rlhf's transcripts share their beginning, `\n\nHuman: Why?\n\nAssistant:`. That is the
    prompt, unless column `prompt` states another.
    """
    shared = os.path.commonprefix([chosen, rejected])
    if HH_MARKER in shared and shared.startswith(prompt or ""):
        end = shared.rindex(HH_MARKER) + len(HH_MARKER)
        return shared[:end], chosen[end:], rejected[end:]
    if prompt is None:
        raise BadRow(
            "no column 'prompt' (--columns prompt=YOURS names another), and 'chosen' and "
            f"'rejected' do not begin with the same transcript, up to a {HH_MARKER!r}"
        )
    return prompt, chosen, rejected


def end_of_prompt(chosen: list[dict], rejected: list[dict]) -> int:
    """Returns how many messages two conversations share as their prompt; 0 if there is none.

    Both answers begin with the assistant, have at least one message, and the prompt does not end
    with the assistant: U1 A1 U2 A2 and U1 A1 U3 A3 share U1.
    """

    def are_answers_from(place: int) -> bool:
        is_open = chosen[place - 1]["role"] == "assistant"
        return chosen[place]["role"] == rejected[place]["role"] == "assistant" and not is_open

    end = rendering.n_common(chosen[:-1], rejected[:-1])
    while end > 0 and not are_answers_from(end):
        end -= 1
    return end


def turns_of(messages: list[dict]) -> list[tuple[bool, str]]:
    """Returns what makes messages of two columns the same: the assistant or not, and the text."""
    return [(part["role"] == "assistant", part["content"].strip()) for part in messages]


def conversation(row: dict) -> tuple[Text, Text]:
    """Returns an SFT row as (prompt, completion), both strings or both message lists.

    The prompt of `messages` and of `text` is empty.
    """
    refuse_label(row)
    if row.get("messages") is not None:
        fits = is_messages(row["messages"])
        refuse_unless(fits, row, "messages", "a list of messages with role and content")
        return [], as_messages(row["messages"], "user")
    if is_whole_text(row):
        refuse_unless(isinstance(row["text"], str), row, "text", "a string")
        return "", row["text"]
    expected = "'messages', or 'prompt' and 'completion', or 'text'"
    require(row, "prompt", "completion", expected=expected)
    prompt = row["prompt"]
    completion = row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt, completion
    answer = as_messages(completion, "assistant")
    return question_of(prompt, answer), answer


def labelled(row: dict) -> tuple[Text, Text, bool]:
    """Returns a row of KTO as (prompt, answer, whether it is good).

    Prompt and answer are strings, or both are message lists. Of `messages`, the answer is what the
    assistant says last, in one message or several.
    """
    label = str(row.get("label")).lower()
    if label not in LABELS:
        raise BadRow(
            "column 'label': expected true or false, whether the answer is good, found "
            f"{row.get('label')!r:.80}; or 'chosen' and 'rejected'"
        )
    prompt, answer = conversation({**row, "label": None})
    if isinstance(answer, list) and not prompt:  # of `messages`
        start = len(answer) - 1
        while start > 0 and answer[start]["role"] == answer[start - 1]["role"] == "assistant":
            start -= 1  # no prompt ends with the assistant
        return answer[:start], answer[start:], LABELS[label]
    return prompt, answer, LABELS[label]


def refuse_label(row: dict) -> None:
    """Raises `BadRow` if a row is KTO's: a recipe that reads no label would learn bad answers."""
    has_label = str(row.get("label")).lower() in ("true", "false")
    if has_label and not (is_pair(row) or is_whole_text(row)):
        raise BadRow(
            "column 'label': one answer and whether it is good is KTO's format, which "
            "recipes/kto.py alone reads"
        )


def question_of(prompt: str | dict | list[dict], answer: Sequence[dict] = ()) -> list[dict]:
    """Returns the messages of a prompt; none if it is empty, because then nothing is asked.

    Raises:
        BadRow: it ends with the assistant, and so does the answer begin, in a second turn.
    """
    messages = as_messages(prompt, "user") if prompt else []
    next_role = answer[0]["role"] if answer else "assistant"
    if messages and messages[-1]["role"] == next_role == "assistant":
        raise BadRow("the prompt ends with a message of the assistant, which cannot be continued")
    return messages


def is_pair(row: dict) -> bool:
    """Whether a row has a chosen and a rejected answer, of any kind."""
    return row.get("chosen") is not None and row.get("rejected") is not None


def is_whole_text(row: dict) -> bool:
    """Whether a row is read as its column `text` alone, whatever beside it is no format."""
    return leading_column(row) == "text" and not is_pair(row)


def leading_column(row: dict) -> str | None:
    """Returns the column that decides about a row's format."""
    return next((name for name in LEADING if row.get(name) is not None), None)


def missing_answer(answer: Text) -> str:
    """Returns why a row without anything to learn must be left out."""
    if isinstance(answer, list):
        roles = sorted({message["role"] for message in answer})
        if "assistant" not in roles:
            return f"no message of role assistant, found {', '.join(roles) or 'none'}"
        if not all(map(is_learned, answer)):
            return "no answer that is to be learned"
    return "empty answer"


def without_loss_keys(value):
    """Returns messages without `LOSS_KEYS`, any other value as it is."""
    if not is_messages(value):
        return value
    return [{key: part[key] for key in part if key not in LOSS_KEYS} for part in value]


def refuse_unless(fits: bool, row: dict, column: str, expected: str) -> None:
    """Raises `BadRow` with the value that was found, unless it fits."""
    if not fits:
        raise BadRow(f"column {column!r}: expected {expected}, found {row[column]!r:.80}")


def require(row: dict, *columns: str, expected: str) -> None:
    """Raises `BadRow` unless every column is there and holds a string, a message or several.

    Args:
        expected: the columns that the format needs, which the error names.
    """
    for column in columns:
        value = row.get(column)
        if value is None:
            found = sorted(name for name in row if row[name] is not None)
            raise BadRow(
                f"no {column!r}: expected columns {expected}; found {found} "
                f"(--columns {column}=YOURS names another)"
            )
        fits = isinstance(value, str) or is_messages(value) or is_message(value)
        refuse_unless(fits, row, column, "a string or a list of messages with role and content")


# ============================================================ strings, and a column `system`
def as_chat(row: dict, strings_as_messages: bool, *texts: Text) -> tuple[Any, ...]:
    """Returns a row's prompt and answers: strings as turns, if asked for, after column `system`.

    Args:
        texts: the prompt and the answers, all strings or all message lists.
    """
    if strings_as_messages and isinstance(texts[0], str):
        texts = as_turns(*texts)
    if not row.get("system") or is_whole_text(row):
        return texts
    prompt, *answers = texts
    if isinstance(prompt, str):
        raise BadRow(
            "column 'system' is next to strings, and plain text has no system message: "
            "--strings_as_messages makes them turns of a chat that begins with it"
        )
    refuse_unless(isinstance(row["system"], str), row, "system", "a string")
    first: Any = next((messages[0] for messages in texts if messages), {})
    if first.get("role") != "system":
        prompt = [{"role": "system", "content": row["system"]}, *prompt]
    return prompt, *answers


def as_turns(prompt, *answers) -> tuple[Text, ...]:
    """Returns the strings of a prompt and its answers as message lists.

    If the prompt is empty and there is an answer, nothing is asked, so both stay strings. A
    transcript of hh-rlhf has several turns, and so may its answers.
    """
    if answers and not prompt:
        return prompt, *answers
    turns = transcript_turns(prompt)
    if turns is None:
        answer_turns = [[{"role": "assistant", "content": answer}] for answer in answers]
        return [{"role": "user", "content": prompt}], *answer_turns
    return question_of(turns), *(transcript_turns(HH_MARKER + answer) or [] for answer in answers)


def transcript_turns(text: str) -> list[dict] | None:
    """Returns the turns of an hh-rlhf transcript; None if it is not a transcript."""
    before, *parts = re.split(r"\n\n(Human|Assistant):", text)
    if not parts or before.strip():
        return None
    turns = []
    for speaker, content in zip(parts[0::2], parts[1::2]):
        role = "user" if speaker == "Human" else "assistant"
        turns.append({"role": role, "content": content.strip()})
    # The transcript ends where the answer begins.
    if turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()
    return turns


def is_plain_text(row: dict) -> bool:
    """Whether `as_turns` could make turns of a row: its prompt and its answers are strings."""
    if row.get("messages") is not None or is_whole_text(row):
        return False
    values = [row.get(name) for name in ("prompt", "completion", "chosen", "rejected")]
    kinds = {type(value) for value in values if value is not None}
    return kinds == {str}


# ============================================================ other names, other formats
def column_names(pairs: list[str] | None) -> dict[str, str]:
    """Maps each format column to the user's: `["prompt=question"]` -> `{"prompt": "question"}`."""
    columns = {}
    for pair in pairs or []:
        column, _, users_name = pair.partition("=")
        if column not in FORMAT_COLUMNS or column in columns or not users_name:
            sys.exit(
                f"--columns {' '.join(pairs)}: expected {'|'.join(FORMAT_COLUMNS)}=YOUR_COLUMN, "
                "each once, such as prompt=question"
            )
        columns[column] = users_name
    return columns


def rename_columns(row: dict, columns: dict[str, str]) -> dict:
    """Returns a row under a format's names. The user's columns take precedence over the data's own.

    Example: with `{"prompt": "question"}`, the row `{"question": "Why?", "messages": []}` becomes
    `{"question": "Why?", "prompt": "Why?"}`: `messages` would be looked for before `prompt`.
    """
    named = {LED_BY.get(column, column) for column in columns}
    first = next((place for place, column in enumerate(LEADING) if column in named), 0)
    renamed = {name: value for name, value in row.items() if name not in LEADING[:first]}
    return renamed | {name: row[users] for name, users in columns.items() if users in row}


def standard(row: dict) -> dict:
    """Returns a row with the columns of DPO, SFT and the others, whichever format it has.

    Its own columns stay: a reward function may ask for them. ShareGPT's `conversations` are
    messages; Alpaca's `instruction` and `input` are the user's, and `output` is the completion.
    """
    for column in MEDIA_COLUMNS:
        # A text or a number may be something else, such as the name of a container's image.
        if row.get(column) and not isinstance(row[column], (str, int, float)):
            raise BadRow(f"column {column!r} is not empty: only text is supported")
    leading = leading_column(row)
    if leading == "conversations":
        row = {**row, "prompt" if is_pair(row) else "messages": row["conversations"]}
    if leading == "instruction":
        if row.get("history"):
            raise BadRow("column 'history' is not read: give earlier turns as messages")
        question = "\n".join(text for text in (row["instruction"], row.get("input")) if text)
        row = {**row, "prompt": [{"role": "user", "content": question}]}
        if row.get("output") is not None:
            row["completion"] = [{"role": "assistant", "content": row["output"]}]
    if row.get("tools"):
        row = {**row, "tools": standard_tools(row["tools"])}
    return row


def standard_tools(tools) -> list[dict] | None:
    """Returns tools, which may be JSON, as templates read them; None for an empty list."""
    given = from_json(tools)
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise BadRow(f"column 'tools': expected a list of JSON schemas, found {tools!r:.80}")
    nested = [
        tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool}
        for tool in given
    ]
    return without_nulls(nested) or None
