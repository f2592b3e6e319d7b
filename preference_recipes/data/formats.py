"""Recognises the formats of rows, and turns rows with answers into token ids.

The usual path is `preference_row`: `preference` finds the prompt, the chosen and the rejected
answer, `row_of_answers` encodes them. `standard` renames the columns of other tools first.
"""

import re
from collections.abc import Sequence
from typing import Any

from common import refuse
from preference_recipes.data import chat, rendering
from preference_recipes.data.messages import (
    SENDERS,
    BadRow,
    as_list,
    as_messages,
    from_json,
    has_text,
    is_learned,
    is_message,
    is_messages,
    learned_turns,
    without_nulls,
)

# A prompt or an answer: a string, or messages.
Text = str | list[dict]

# The columns that say which format a row has; the first that is there decides.
LEADING = ("messages", "prompt", "conversations", "instruction", "text")
# Others that belong to a format of these.
LED_BY = {"completion": "prompt", "input": "instruction", "output": "instruction"}
OTHERS = ("chosen", "rejected", "answer", "margin", "label", "tools", "system")
FORMAT_COLUMNS = (*LEADING, *LED_BY, *OTHERS)

# What precedes an answer in hh-rlhf's transcripts.
HH_MARKER = "\n\nAssistant:"
# How `label` may be written; the cells of a CSV file are text.
LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


# ============================================================ pairs, as token ids
def preference_row(
    row: dict, tokenizer, max_length: int, strings_as_messages: bool = False
) -> dict:
    """Returns the token ids of one pair, see `row_of_answers`."""
    prompt, chosen, rejected = as_asked(row, strings_as_messages, *preference(row))
    answers = {"chosen": chosen, "rejected": rejected}
    return row_of_answers(row, prompt, answers, tokenizer, max_length)


def preference(row: dict) -> tuple[Text, Text, Text]:
    """Returns a preference row as (prompt, chosen, rejected), the prompt stated once.

    All three are strings, or all three are message lists. With `U` and `A` for messages:

           prompt    chosen    rejected    returned
        1. [U]       [A1]      [A2]        [U] [A1] [A2]
        1. "Why?"    [A1]      "No."       [U] [A1] [A2]
        2. "Why?"    "So."     "No."       see `split_strings`
        3. none      [U A1]    [U A2]      [U] [A1] [A2]
        3. "Why?"    [U A1]    [U A2]      [U] [A1] [A2]    (as in UltraFeedback)
    """
    prompt = row.get("prompt")
    needed = ["chosen", "rejected"] + ["prompt"] * (prompt is not None)
    expected = "'chosen' and 'rejected', and 'prompt' unless both begin with it"
    require(row, *needed, expected=expected)
    if all(isinstance(row[column], str) for column in needed):  # 2.
        return split_strings(prompt, row["chosen"], row["rejected"])
    chosen = as_messages(row["chosen"], "assistant")
    rejected = as_messages(row["rejected"], "assistant")
    first_roles = {messages[0]["role"] for messages in (chosen, rejected) if messages}
    if prompt is None or not first_roles <= {"assistant"}:  # 3.
        return split_conversations(prompt, chosen, rejected)
    return question_of(prompt), chosen, rejected  # 1.


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
    reason = next(filter(None, (missing_text(prompt, text) for text in texts)), "")
    prompt_ids: list[int] = []
    sequences = [chat.NOTHING for _ in texts]
    notes: list[str] = []
    if not reason:
        tools = row.get("tools")
        prompt_ids, sequences, notes = chat.encode_answers(tokenizer, prompt, texts, tools)
        reason = chat.why_left_out(notes)

    room = max(max_length - len(prompt_ids), 0)
    cut = [chat.Sequence(ids[:room], learned[:room]) for ids, learned in sequences]
    if not reason and not room:
        reason = "prompt fills max_length"
    elif not reason and len(cut) == 2 and cut[0].ids == cut[1].ids:  # what is left tells them apart
        reason = "chosen equal to rejected"
    elif not reason and not all(any(learned) for _, learned in cut):
        reason = "nothing to learn within max_length"
    prompt_cut = prompt_ids[:max_length]
    by_name = {"chosen": chat.NOTHING, "rejected": chat.NOTHING, **dict(zip(answers, cut))}
    return {
        "prompt_ids": prompt_cut,
        "chosen_ids": by_name["chosen"].ids,
        "rejected_ids": by_name["rejected"].ids,
        "chosen_learned": by_name["chosen"].learned,
        "rejected_learned": by_name["rejected"].learned,
        "length": sum(len(prompt_cut) + len(ids) for ids, _ in cut),
        "truncated": prompt_cut != prompt_ids or cut != sequences,
        "reason": reason,
        "notes": notes,
    }


def missing_text(prompt: Text, answer: Text) -> str:
    """Returns why a row with this prompt and answer must be left out; "" if it has both."""
    if not has_text(prompt):
        return "empty prompt"
    if isinstance(answer, str):
        if str(prompt).endswith(HH_MARKER) and "\n\nHuman:" in answer:
            return "transcripts that differ before the last answer, without --strings_as_messages"
        return "" if answer else "empty answer"
    if answer and answer[-1]["role"] != "assistant":
        return "answer that does not end with an assistant message"
    return "" if has_text(answer[-1:]) and learned_turns(answer, 0) else missing_answer(answer)


def missing_answer(answer: Text) -> str:
    """Returns why a row without anything to learn must be left out."""
    if answer and isinstance(answer, list):
        roles = sorted({message["role"] for message in answer})
        if "assistant" not in roles:
            return f"no message of role assistant, found {', '.join(roles)}"
        if not all(map(is_learned, answer)):
            return "no answer that is to be learned"
    return "empty answer"


# ============================================================ pairs that hold their prompt
def split_conversations(
    prompt: str | dict | list[dict] | None, chosen: list[dict], rejected: list[dict]
) -> tuple[list[dict], list[dict], list[dict]]:
    """Returns (prompt, chosen, rejected) of two conversations that begin alike.

    Both answers begin with the assistant, have at least one message, and the prompt does not end
    with the assistant: U1 A1 U2 A2 and U1 A1 U3 A3 share U1.

    Args:
        prompt: what the data states besides; it must be among the messages that both share.
    """
    for end in range(rendering.n_common(chosen[:-1], rejected[:-1]), 0, -1):
        begin = chosen[end]["role"] == rejected[end]["role"] == "assistant"
        if begin and chosen[end - 1]["role"] != "assistant":
            break
    else:
        raise BadRow("'chosen' and 'rejected' do not begin with the same prompt, then an answer")
    shared = [message["content"].strip() for message in chosen[:end]]
    stated = as_messages(prompt, "user") if prompt else []
    if not all(message["content"].strip() in shared for message in stated):
        raise BadRow("'chosen' and 'rejected' do not begin with all of the prompt in the row")
    return chosen[:end], chosen[end:], rejected[end:]


def split_strings(prompt: str | None, chosen: str, rejected: str) -> tuple[str, str, str]:
    r"""Returns (prompt, chosen, rejected) of strings, the prompt stated once.

    hh-rlhf's transcripts share their beginning, `\n\nHuman: Why?\n\nAssistant:`. That is the
    prompt, unless column `prompt` states another.
    """
    shared = chosen[: rendering.n_common(chosen, rejected)]
    place = shared.rfind(HH_MARKER)
    if place >= 0 and shared.startswith(prompt or ""):
        end = place + len(HH_MARKER)
        return chosen[:end], chosen[end:], rejected[end:]
    if prompt is None:
        raise BadRow(
            "no column 'prompt' (--columns prompt=YOURS names another), and 'chosen' and "
            f"'rejected' do not begin with the same transcript, up to a {HH_MARKER!r}"
        )
    return prompt, chosen, rejected


# ============================================================ one answer and a label, for KTO
def labelled_row(row: dict, tokenizer, max_length: int, strings_as_messages: bool = False) -> dict:
    """Returns what `row_of_answers` does, and `n_answers`.

    A pair has a good answer, the chosen one, and a bad one, so that is 2. Any other row has one
    answer and a `label`: its ids are `chosen_ids` or `rejected_ids`, and the other list is empty.
    """
    if is_pair(row):
        return {**preference_row(row, tokenizer, max_length, strings_as_messages), "n_answers": 2}
    prompt, answer, is_good = labelled(row)
    prompt, answer = as_asked(row, strings_as_messages, prompt, answer)
    answers = {"chosen" if is_good else "rejected": answer}
    return {**row_of_answers(row, prompt, answers, tokenizer, max_length), "n_answers": 1}


def labelled(row: dict) -> tuple[Text, Text, bool]:
    """Returns a row of KTO as (prompt, answer, whether it is good).

    Both are strings, or both are message lists. Of `messages`, the last one is the answer.
    """
    label = str(row.get("label")).lower()
    expected = "true or false, whether the answer is good, or 'chosen' and 'rejected' instead"
    refuse_unless(label in LABELS, row, "label", expected)
    prompt, answer = conversation({**row, "label": None})
    if isinstance(answer, list) and not prompt:  # of `messages`
        prompt = question_of(answer[:-1], answer[-1:])
        answer = answer[-1:]
    return prompt, answer, LABELS[label]


# ============================================================ conversations
def conversation(row: dict) -> tuple[Text, Text]:
    """Returns an SFT row as (prompt, completion), both strings or both message lists.

    The prompt of `messages` and of `text` is empty.
    """
    leading = leading_column(row)
    if leading == "text":
        refuse_unless(isinstance(row["text"], str), row, "text", "a string")
        return "", row["text"]
    labels = ("true", "false") if leading == "messages" else LABELS  # 0 and 1 may be classes
    if str(row.get("label")).lower() in labels:  # it would learn bad answers, too
        raise BadRow("'label' or 'kto_tag' rates answers: use recipes/kto.py, or remove the column")
    if leading == "messages":
        fits = is_messages(row["messages"])
        refuse_unless(fits, row, "messages", "a list of messages with role and content")
        return [], as_messages(row["messages"], "user")
    require(row, "prompt", "completion", expected="'messages', 'text', or 'prompt' + 'completion'")
    if isinstance(row["prompt"], str) and isinstance(row["completion"], str):
        return row["prompt"], row["completion"]
    answer = as_messages(row["completion"], "assistant")
    prompt = question_of(row["prompt"], answer)
    roles = [message["role"] for message in (*prompt[-1:], *answer[:1])]
    if roles in (["user", "user"], ["user", "system"]):  # the model would be asked twice
        raise BadRow(
            "'completion' holds a prompt, too: remove that, or in sft and kto read it all with "
            "--columns messages=completion"
        )
    return prompt, answer


def question_of(prompt: str | dict | list[dict], answer: Sequence[dict] = ()) -> list[dict]:
    """Returns the messages of a prompt; none if it is empty, because then nothing is asked.

    Raises:
        BadRow: it ends with the assistant, and so does the answer begin, in a second turn.
    """
    messages = as_messages(prompt, "user") if prompt else []
    next_role = answer[0]["role"] if answer else "assistant"
    if messages and messages[-1]["role"] == next_role == "assistant":
        raise BadRow("the prompt ends with an assistant message, which cannot be continued")
    return messages


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


def refuse_unless(fits: bool, row: dict, column: str, expected: str) -> None:
    """Raises `BadRow` with the value that was found, or its first bad message, unless it fits."""
    if fits:
        return
    parts = as_list(row.get(column))
    bad = [n for n, part in enumerate(parts) if isinstance(part, dict) and not is_message(part)]
    found = f"{parts[bad[0]]!r:.80} as message {bad[0] + 1}" if bad else f"{row.get(column)!r:.80}"
    raise BadRow(f"column {column!r}: expected {expected}, found {found}")


# ============================================================ strings, and a column `system`
def as_chat(row: dict, strings_as_messages: bool, *texts: Text) -> tuple[Any, ...]:
    """Returns a row's prompt and answers: strings as turns, if asked for, after column `system`.

    Args:
        texts: the prompt and the answers, all strings or all message lists.
    """
    if strings_as_messages and isinstance(texts[0], str):
        texts = as_turns(*texts)
    prompt, *answers = texts
    is_whole_text = prompt == "" and leading_column(row) == "text"
    if not row.get("system") or is_whole_text:
        return texts
    if isinstance(prompt, str):
        raise BadRow(
            "column 'system' is next to strings, and plain text has no system message: where the "
            "prompt is not empty, --strings_as_messages makes them turns that begin with it"
        )
    first: Any = next((messages[0] for messages in texts if messages), {})
    if first.get("role") != "system":
        prompt = [{"role": "system", "content": row["system"]}, *prompt]
    return prompt, *answers


def as_asked(row: dict, strings_as_messages: bool, *texts: Text) -> tuple[Any, ...]:
    """Returns what `as_chat` does, but texts as they are if nothing is asked: they are left out."""
    return as_chat(row, strings_as_messages, *texts) if has_text(texts[0]) else texts


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
            refuse(
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
    for column, users_name in columns.items():
        if users_name not in row and column != "answer":  # which held-out sets alone may have
            raise BadRow(f"--columns {column}={users_name}: found columns {sorted(row)}")
    if columns:
        named = {LED_BY.get(column, column) for column in columns}
        first = next((place for place, column in enumerate(LEADING) if column in named), 0)
        given = {name: row[users] for name, users in columns.items() if users in row}
        row = {name: row[name] for name in row if name not in LEADING[:first]} | given
    leading = leading_column(row)
    if leading == "conversations":
        row = {**row, "prompt" if is_pair(row) else "messages": row["conversations"]}
    messages = row.get("messages")
    if messages and is_messages(messages) and is_pair(row) and row.get("prompt") is None:
        sender = messages[-1].get("role") or SENDERS.get(messages[-1]["from"])
        if sender in ("user", "tool"):  # others may hold the answer of a pair
            row = {**row, "prompt": messages}
    tag = row.get("kto_tag")
    if tag is not None and row.get("label") is None:
        row = {**row, "label": LABELS.get(str(tag).lower(), tag)}  # 0 would pass for a class
    if leading == "instruction":
        question = "\n".join(text for text in (row["instruction"], row.get("input")) if text)
        row = {**row, "prompt": [{"role": "user", "content": question}] if question else []}
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


def leading_column(row: dict) -> str | None:
    """Returns the column that decides about a row's format."""
    return next((name for name in LEADING if row.get(name) is not None), None)


def is_pair(row: dict) -> bool:
    """Whether a row has a chosen and a rejected answer, of any kind."""
    return row.get("chosen") is not None and row.get("rejected") is not None
