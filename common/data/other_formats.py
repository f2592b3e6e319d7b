"""Brings rows of Alpaca and ShareGPT, and a column `system`, into the formats of `formats.py`."""

import json

from common.data import formats
from common.data.formats import refuse_unless
from common.data.messages import BadRow, is_message, is_messages

# Columns that hold an answer: a string, or messages.
ANSWERS = ("completion", "chosen", "rejected")


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
    return {**row, column: row["conversations"], "tools": standard_tools(row.get("tools"))}


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

        1. messages [U A]                    ->  messages [S U A]
        2. chosen [U A], rejected [U A]      ->  chosen [S U A], rejected [S U A]
        3. prompt [U]                        ->  prompt [S U]
        4. prompt "Why?", completion [A]     ->  prompt [S U]
        5. prompt "Why?", completion "So."   ->  see `begin_strings_with_system`
        6. text "Why? So.", or no format     ->  the same row

    Raises:
        BadRow: its strings are read as plain text, which has no system message.
    """
    if is_messages(row.get("messages")):  # 1.
        return {**row, "messages": with_system(row, row["messages"])}
    row = with_lists(row)
    prompt = row.get("prompt")
    answers = {name: row[name] for name in ANSWERS if is_messages(row.get(name))}
    # Without a column `prompt`, chosen and rejected begin with it. A completion never does.
    answers_hold_prompt = not prompt and ("chosen" in answers or "rejected" in answers)
    if answers_hold_prompt:  # 2.
        return row | {name: with_system(row, messages) for name, messages in answers.items()}
    if is_messages(prompt):  # 3.
        return {**row, "prompt": with_system(row, prompt)}
    if answers and isinstance(prompt, str):  # 4. Next to messages a string is a message, too.
        return {**row, "prompt": with_system(row, formats.question_of(prompt))}
    if isinstance(prompt, str) or formats.is_pair(row):  # 5.
        return begin_strings_with_system(row, strings_as_messages)
    return row  # 6.


def with_lists(row: dict) -> dict:
    """Returns a row in which a single message is a list of one."""
    singles = [name for name in ("prompt", *ANSWERS) if is_message(row.get(name))]
    return row | {name: [row[name]] for name in singles}


def begin_strings_with_system(row: dict, strings_as_messages: bool) -> dict:
    """Returns a row of strings as one of messages that begin with its column `system`.

    Examples, with `S`, `U` and `A` for messages of system, user and assistant:

        prompt "Why?", completion "So."         ->  prompt [S U], completion [A]
        prompt "Why?" alone                     ->  prompt [S U]
        prompt "", completion "So."             ->  prompt [S], completion "So."
        chosen and rejected are transcripts     ->  prompt [S U], chosen [A], rejected [A]

    Raises:
        BadRow: `strings_as_messages` is off, or a column has a value of another kind.
    """
    if not strings_as_messages:
        raise BadRow(
            "column 'system' is next to strings, and plain text has no system message: "
            "--strings_as_messages makes them turns of a chat that begins with it"
        )
    if formats.is_pair(row):
        names = ["chosen", "rejected"]
        prompt, *answers = formats.preference(row)  # which splits transcripts
    else:
        names = [name for name in ANSWERS if row.get(name) is not None]
        formats.require(row, "prompt", *names, expected="'prompt' and answers, as strings")
        prompt, *answers = [row[name] for name in ("prompt", *names)]
    if answers and not prompt:
        # Nothing is asked. Next to the system message the answer is read as a message, too.
        return {**row, "prompt": with_system(row, [])}
    turns, *answer_turns = formats.as_turns(prompt, *answers)
    prompt_turns = with_system(row, turns)  # type: ignore[arg-type]
    return {**row, **dict(zip(names, answer_turns)), "prompt": prompt_turns}


def with_system(row: dict, messages: list[dict]) -> list[dict]:
    """Returns the messages after that of column `system`, unless one begins them already."""
    refuse_unless(isinstance(row["system"], str), row, "system", "a string")
    first = messages[0] if messages else {}
    if "system" in (first.get("role"), first.get("from")):
        return messages
    return [{"role": "system", "content": row["system"]}, *messages]
