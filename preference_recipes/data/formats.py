"""Recognises the formats of rows, and turns rows with answers into token ids.

`preference_row` is the usual path: `preference` finds prompt, chosen and rejected answer,
`row_of_answers` encodes them.
"""

import re
import sys
from collections.abc import Sequence
from typing import Any

from preference_recipes.data import chat, rendering
from preference_recipes.data.messages import (
    LOSS_KEYS,
    BadRow,
    as_messages,
    from_json,
    has_text,
    is_learned,
    is_message,
    is_messages,
    learned_turns,
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
# How `label` may be written; the cells of a CSV file are text.
LABELS = {"true": True, "false": False, "1": True, "0": False}


# ============================================================ pairs, as token ids
def preference_row(
    row: dict, tokenizer, max_length: int, strings_as_messages: bool = False
) -> dict:
    """Returns the token ids of one pair, see `row_of_answers`."""
    prompt, chosen, rejected = as_chat(row, strings_as_messages, *preference(row))
    answers = {"chosen": chosen, "rejected": rejected}
    return row_of_answers(row, prompt, answers, tokenizer, max_length)


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
    place = chosen.rfind(HH_MARKER)
    while place >= 0 and not rejected.startswith(chosen[: place + len(HH_MARKER)]):
        place = chosen.rfind(HH_MARKER, 0, place)
    end = place + len(HH_MARKER)
    begin_with_prompt = all(text.startswith(prompt or "") for text in (chosen, rejected))
    if place >= 0 and begin_with_prompt:
        return chosen[:end], chosen[end:], rejected[end:]
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
    for end in range(rendering.n_common(chosen[:-1], rejected[:-1]), 0, -1):
        begins = chosen[end]["role"] == rejected[end]["role"] == "assistant"
        if begins and chosen[end - 1]["role"] != "assistant":
            return end
    return 0


def turns_of(messages: list[dict]) -> list[tuple[bool, str]]:
    """Returns what makes messages of two columns the same: the assistant or not, and the text."""
    return [(part["role"] == "assistant", part["content"].strip()) for part in messages]


def row_of_answers(
    row: dict, prompt: Text, answers: dict[str, Text], tokenizer, max_length: int
) -> dict:
    """Returns the token ids of a prompt and of its answers: `chosen`, `rejected` or both.

    What is longer than `max_length` is cut at the end; prompt and one answer count together.

    Returns:
        `prompt_ids`, `chosen_ids` and `rejected_ids`; `chosen_learned` and `rejected_learned`,
        which tokens of the answers count; `length`, the tokens of all sequences together, the
        prompt in each; `truncated reason notes`, see `dataset.Converter`.
    """
    texts = list(answers.values())
    reason = missing_text(prompt, *texts)
    prompt_ids: list[int] = []
    sequences = [chat.Sequence([], []) for _ in texts]
    notes: list[str] = []
    if not reason:
        tools = row.get("tools")
        prompt_ids, sequences, notes = chat.encode_answers(tokenizer, prompt, texts, tools)
        if not all(sequence.ids for sequence in sequences):
            reason = chat.why_left_out(notes)

    room = max(max_length - len(prompt_ids), 0)
    cut = [chat.Sequence(ids[:room], learned[:room]) for ids, learned in sequences]
    if not reason and not room:
        reason = "prompt fills max_length"
    elif not reason and len(cut) == 2 and cut[0].ids == cut[1].ids:  # what is left tells them apart
        reason = "chosen equal to rejected"
    elif not reason and not all(any(learned) for _, learned in cut):
        reason = "nothing to learn within max_length"
    of_answers = dict.fromkeys(("chosen", "rejected"), chat.Sequence([], []))
    of_answers |= dict(zip(answers, cut))
    prompt_cut = prompt_ids[:max_length]
    return {
        "prompt_ids": prompt_cut,
        "chosen_ids": of_answers["chosen"].ids,
        "rejected_ids": of_answers["rejected"].ids,
        "chosen_learned": of_answers["chosen"].learned,
        "rejected_learned": of_answers["rejected"].learned,
        "length": sum(len(prompt_cut) + len(ids) for ids, _ in cut),
        "truncated": prompt_cut != prompt_ids or cut != sequences,
        "reason": reason,
        "notes": notes,
    }


def missing_text(prompt: Text, *answers: Text) -> str:
    """Returns why a row that lacks a text must be left out; "" if it has all."""
    if not has_text(prompt):
        return "empty prompt"
    if not all(map(has_text, answers)):
        return "empty answer"
    for answer in answers:
        if isinstance(answer, list) and answer[-1]["role"] != "assistant":
            return "answer that does not end with a message of the assistant"
        if isinstance(answer, list) and not learned_turns(answer, 0):
            return missing_answer(answer)
        is_transcript = isinstance(answer, str) and str(prompt).endswith(HH_MARKER)
        if is_transcript and "\n\nHuman:" in answer:
            return "transcripts that differ before the last answer, without --strings_as_messages"
    return ""


def missing_answer(answer: Text) -> str:
    """Returns why a row without anything to learn must be left out."""
    if isinstance(answer, list):
        roles = sorted({message["role"] for message in answer})
        if "assistant" not in roles:
            return f"no message of role assistant, found {', '.join(roles) or 'none'}"
        if not all(map(is_learned, answer)):
            return "no answer that is to be learned"
    return "empty answer"


# ============================================================ one answer and a label
def labelled_row(row: dict, tokenizer, max_length: int, strings_as_messages: bool = False) -> dict:
    """Returns what `row_of_answers` returns, and `n_answers`.

    A pair has a good answer, the chosen one, and a bad one, so that is 2. Any other row has one
    answer and a `label`: its ids are `chosen_ids` or `rejected_ids`, and the other list is empty.
    """
    if is_pair(row):
        values = preference_row(row, tokenizer, max_length, strings_as_messages)
        return {**values, "n_answers": 2}
    prompt, answer, is_good = labelled(row)
    prompt, answer = as_chat(row, strings_as_messages, prompt, answer)
    answers = {"chosen" if is_good else "rejected": answer}
    return {**row_of_answers(row, prompt, answers, tokenizer, max_length), "n_answers": 1}


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


def with_prompts(columns: dict, prompts: list[list[int]], max_length: int) -> dict:
    """Returns the columns of rows with other prompts, and their answers cut to `max_length`."""
    cut = {
        name: [ids[: max_length - len(prompt)] for prompt, ids in zip(prompts, columns[name])]
        for name in ("chosen_ids", "rejected_ids", "chosen_learned", "rejected_learned")
    }
    return {**columns, **cut, "prompt_ids": prompts}


# ============================================================ conversations
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
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [
        {"role": roles[speaker], "content": content.strip()}
        for speaker, content in zip(parts[0::2], parts[1::2])
    ]
    # The transcript ends where the answer begins.
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns


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


def standard(row: dict, columns: dict[str, str]) -> dict:
    """Returns a row with the columns of DPO, SFT and the others, whichever format it has.

    Its own columns stay: a reward function may ask for them. ShareGPT's `conversations` are
    messages; Alpaca's `instruction` and `input` are the user's, and `output` is the completion.

    Args:
        columns: see `column_names`. The user's columns take precedence over the data's own: with
            `{"prompt": "question"}` a column `messages`, looked for before `prompt`, is left out.
    """
    if columns:
        named = {LED_BY.get(column, column) for column in columns}
        first = next((place for place, column in enumerate(LEADING) if column in named), 0)
        given = {name: row[users] for name, users in columns.items() if users in row}
        row = {name: row[name] for name in row if name not in LEADING[:first]} | given
    leading = leading_column(row)
    if leading == "conversations":
        row = {**row, "prompt" if is_pair(row) else "messages": row["conversations"]}
    if leading == "instruction":
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
