"""Brings rows of Alpaca and ShareGPT, and a column `system`, into the formats of `formats.py`."""

import json

from preference_recipes.data import formats
from preference_recipes.data.formats import refuse_unless
from preference_recipes.data.messages import BadRow, is_message, is_messages

# Columns that hold an answer: a string, or messages.
PAIR = ("chosen", "rejected")
ANSWERS = ("completion", *PAIR)


def standard(row: dict, strings_as_messages: bool = False) -> dict:
    """Returns a row with the columns of `formats.py`, whichever format it has.

    Its own columns stay: a reward function may ask for them. A column `system` becomes the first
    message, see `begin_with_system`, and an empty list of `tools` becomes None.

    Args:
        strings_as_messages: whether strings will become turns of a chat. Only then can a system
            message come before them.

    Raises:
        BadRow: a column of the format has a value of another kind.
    """
    if row.get("messages") is None and row.get("prompt") is None:
        row = from_other_format(row)
    if row.get("tools") in ([], "[]"):
        row = {**row, "tools": None}
    if row.get("tools"):
        row = {**row, "tools": standard_tools(row["tools"])}
    if row.get("system"):
        row = begin_with_system(row, strings_as_messages)
    return row


def from_other_format(row: dict) -> dict:
    """Returns a row of ShareGPT or Alpaca with the columns of `formats.py`, others as they are."""
    # Beside a text these columns may be something else, so their values must fit, too.
    strict = row.get("text") is not None
    if is_sharegpt(row, strict):
        return from_sharegpt(row)
    if is_alpaca(row, strict):
        return from_alpaca(row)
    return row


# ============================================================ ShareGPT and Alpaca
def from_sharegpt(row: dict) -> dict:
    """Returns a row of `conversations` as one of `messages`, or of a pair as one of `prompt`."""
    fits = is_messages(row["conversations"])
    refuse_unless(fits, row, "conversations", "a list of messages with from and value")
    column = "prompt" if formats.is_pair(row) else "messages"
    return {**row, column: row["conversations"]}


def standard_tools(tools: list | str | None):
    """Returns tools as chat templates read them: `{"type": "function", "function": ...}`."""
    try:
        given = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError:
        return tools  # refused where it is rendered
    if not isinstance(given, list):
        return tools
    return [nested_tool(tool) for tool in given]


def nested_tool(tool):
    """Returns a tool whose schema is under `function`."""
    is_flat = isinstance(tool, dict) and "name" in tool and "function" not in tool
    return {"type": "function", "function": tool} if is_flat else tool


def is_sharegpt(row: dict, strict: bool) -> bool:
    """Whether a row has a column `conversations`; strictly, whether that holds messages."""
    if strict:
        return bool(row.get("conversations")) and is_messages(row["conversations"])
    return row.get("conversations") is not None


def is_alpaca(row: dict, strict: bool) -> bool:
    """Whether a row has a column `instruction`; strictly, whether it and `output` are strings."""
    if strict:
        return isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str)
    return row.get("instruction") is not None


def from_alpaca(row: dict) -> dict:
    """Returns a row of `instruction`, `input` and `output` as one of `prompt` and `completion`.

    Instruction and input, joined by a newline, are the user's message. `history` has pairs of
    earlier questions and answers.
    """
    for column in ("instruction", "input", "output"):
        fits = isinstance(row.get(column), (str, type(None)))
        refuse_unless(fits, row, column, "a string")
    history = row.get("history") or []
    refuse_unless(are_pairs(history), row, "history", "a list of pairs of strings")
    prompt = []
    for question, answer in history:
        prompt.append({"role": "user", "content": question})
        prompt.append({"role": "assistant", "content": answer})
    question = "\n".join(text for text in (row["instruction"], row.get("input")) if text)
    prompt.append({"role": "user", "content": question})
    if row.get("output") is None:
        return {**row, "prompt": prompt}
    answer = [{"role": "assistant", "content": row["output"]}]
    return {**row, "prompt": prompt, "completion": answer}


def are_pairs(history) -> bool:
    """Whether a value is a list of pairs of strings."""
    return isinstance(history, (list, tuple)) and all(
        isinstance(turn, (list, tuple)) and list(map(type, turn)) == [str, str] for turn in history
    )


# ============================================================ a column `system`
def begin_with_system(row: dict, strings_as_messages: bool) -> dict:
    """Returns a row whose messages begin with its column `system`.

    Examples, with `S`, `U` and `A` for messages of system, user and assistant:

        1. messages [U A]                     ->  messages [S U A]
        2. prompt "Why?", completion "So."    ->  prompt [U], completion [A], and then as in 4
        3. chosen [U A], rejected [U A]       ->  chosen [S U A], rejected [S U A]
        4. prompt [U]                         ->  prompt [S U]
           prompt "Why?", completion [A]      ->  prompt [S U]
        5. text "Why? So.", or no format      ->  the same row

    Raises:
        BadRow: its strings are read as plain text, which has no system message.
    """
    if is_messages(row.get("messages")):  # 1.
        return {**row, "messages": with_system(row, row["messages"])}
    row = with_lists(row)
    row = with_turns(row, strings_as_messages)  # 2.
    prompt = row.get("prompt")
    conversations = [name for name in PAIR if is_messages(row.get(name))]
    if formats.is_pair(row) and conversations and not prompt:  # 3.
        return row | {name: with_system(row, row[name]) for name in conversations}
    if isinstance(prompt, str):  # next to answers that are messages, or ""
        prompt = formats.question_of(prompt)
    if is_messages(prompt):  # 4.
        return {**row, "prompt": with_system(row, prompt)}
    return row  # 5.


def with_lists(row: dict) -> dict:
    """Returns a row in which a single message is a list of one."""
    singles = [name for name in ("prompt", *ANSWERS) if is_message(row.get(name))]
    return row | {name: [row[name]] for name in singles}


def with_turns(row: dict, strings_as_messages: bool) -> dict:
    """Returns a row with turns in place of its strings, if its prompt and answers are strings.

    Raises:
        BadRow: they are strings, and `strings_as_messages` is off.
    """
    is_pair = formats.is_pair(row)
    names = ("prompt", *(PAIR if is_pair else ANSWERS))
    given = {name: row[name] for name in names if row.get(name) is not None}
    has_format = is_pair or "prompt" in given
    if not has_format or not all(isinstance(value, str) for value in given.values()):
        return row
    if not strings_as_messages:
        raise BadRow(
            "column 'system' is next to strings, and plain text has no system message: "
            "--strings_as_messages makes them turns of a chat that begins with it"
        )
    if is_pair:  # it may have no prompt: transcripts are split
        given = dict(zip(names, formats.preference(row)))
    return {**row, **dict(zip(given, formats.as_turns(*given.values())))}


def with_system(row: dict, messages: list[dict]) -> list[dict]:
    """Returns the messages after that of column `system`, unless one begins them already."""
    refuse_unless(isinstance(row["system"], str), row, "system", "a string")
    first = messages[0] if messages else {}
    if "system" in (first.get("role"), first.get("from")):
        return messages
    return [{"role": "system", "content": row["system"]}, *messages]
