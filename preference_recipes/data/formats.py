"""Recognises the formats of rows, and converts them to one form.

`normalize_columns` renames the columns of other tools, a reader such as `read_pair` makes a
`Conversation` of them, and `row_of_answers` encodes that as token ids.
"""

import re

from common import refuse
from preference_recipes.data import chat, rendering
from preference_recipes.data.messages import (
    BadRow,
    Conversation,
    LeftOut,
    as_json,
    as_list,
    as_messages,
    from_json,
    from_text,
    has_text,
    is_learned,
    is_message,
    is_messages,
    learned_turns,
    text_of,
)

# The columns that decide the format of a row, in order of precedence.
LEADING = ("messages", "prompt", "conversations", "instruction", "text")
# Columns that belong to the format of one of these.
LED_BY = {"completion": "prompt", "input": "instruction", "output": "instruction"}
OTHERS = ("chosen", "rejected", "answer", "margin", "label", "tools", "system")
FORMAT_COLUMNS = (*LEADING, *LED_BY, *OTHERS)
# The columns that hold messages or strings.
TEXTS = ("messages", "prompt", "completion", "chosen", "rejected")

# The marker of answers in hh-rlhf's transcripts.
HH_MARKER = "\n\nAssistant:"
# Spellings of `label`; the cells of a CSV file are text.
LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


# ============================================================ row functions
def preference_row(
    row: dict, tokenizer, max_length: int, strings_as_messages: bool = False
) -> dict:
    """Returns the token ids of one pair, see `row_of_answers`."""
    return row_of_answers(read_pair(row, strings_as_messages), tokenizer, max_length)


def labelled_row(row: dict, tokenizer, max_length: int, strings_as_messages: bool = False) -> dict:
    """Returns the columns of `row_of_answers`, and `n_answers`, for KTO.

    A pair has two answers. Any other row has one, and a `label` that decides whether its ids are
    `chosen_ids` or `rejected_ids`; the other list is empty.
    """
    if is_pair(row):
        return {**preference_row(row, tokenizer, max_length, strings_as_messages), "n_answers": 2}
    label = str(row.get("label")).lower()
    expected = "true or false, whether the answer is good, or 'chosen' and 'rejected' instead"
    refuse_unless(label in LABELS, row, "label", expected)
    conversation = read_demonstration({**row, "label": None})
    if not conversation.prompt and not conversation.is_text:  # the last message is the answer
        [messages] = conversation.answers
        conversation = conversation._replace(prompt=messages[:-1], answers=[messages[-1:]])
    conversation = with_turns_and_system(conversation, row, strings_as_messages)
    values = row_of_answers(conversation, tokenizer, max_length, is_good=LABELS[label])
    return {**values, "n_answers": 1}


def row_of_answers(
    conversation: Conversation, tokenizer, max_length: int, is_good: bool = True
) -> dict:
    """Returns the token ids of a prompt and of two answers, or of one, chosen if it `is_good`.

    A prompt with its answer is cut at `max_length`. The keys are `prompt_ids chosen_ids
    rejected_ids`; `chosen_loss_mask rejected_loss_mask`, which tokens of the answers count; and
    `length truncated notes`, see `dataset.Converter`. Raises `LeftOut` if nothing can be learned.
    """
    is_transcript = conversation.is_text and text_of(conversation.prompt).endswith(HH_MARKER)
    for answer in conversation.answers:
        if is_transcript and "\n\nHuman:" in text_of(answer):
            raise LeftOut("transcripts that differ before the last answer (--strings_as_messages)")
        if answer and answer[-1]["role"] != "assistant":
            raise LeftOut("answer that does not end with an assistant message")
        if not has_text(answer[-1:]) or not learned_turns(answer):
            raise LeftOut(missing_answer(answer))
    prompt_ids, sequences, notes = chat.encode_answers(tokenizer, *conversation)
    room = max_length - len(prompt_ids)
    if room <= 0:
        raise LeftOut("prompt fills max_length")
    cut = [chat.TokenSequence(ids[:room], loss_mask[:room]) for ids, loss_mask in sequences]
    if len(cut) == 2 and cut[0].ids == cut[1].ids:  # they may have differed further on
        raise LeftOut("chosen equal to rejected")
    if not all(any(loss_mask) for _, loss_mask in cut):
        raise LeftOut("nothing to learn within max_length")
    chosen, rejected = [*cut, chat.TokenSequence([], [])][:2]
    if not is_good:
        chosen, rejected = rejected, chosen
    return {
        "prompt_ids": prompt_ids,
        "chosen_ids": chosen.ids,
        "rejected_ids": rejected.ids,
        "chosen_loss_mask": chosen.loss_mask,
        "rejected_loss_mask": rejected.loss_mask,
        "length": sum(len(prompt_ids) + len(ids) for ids, _ in cut),
        "truncated": cut != sequences,
        "notes": notes,
    }


def missing_answer(answer: list[dict]) -> str:
    """Returns why a row without anything to learn must be left out."""
    roles = sorted({message["role"] for message in answer})
    if answer and "assistant" not in roles:
        return f"no message of role assistant, found {', '.join(roles)}"
    return "empty answer" if all(map(is_learned, answer)) else "no answer that is to be learned"


# ============================================================ readers
def read_prompt(row: dict, strings_as_messages: bool) -> Conversation:
    """Reads a row whose answers will be sampled."""
    require(row, "prompt", expected="'prompt'")
    return with_turns_and_system(conversation_of(row, row["prompt"]), row, strings_as_messages)


def read_pair(row: dict, strings_as_messages: bool) -> Conversation:
    """Reads a chosen and a rejected answer and their common prompt.

    With `U` and `A` for messages:

           prompt    chosen    rejected    read as
        1. [U]       [A1]      [A2]        [U] [A1] [A2]
        1. "Why?"    [A1]      "No."       [U] [A1] [A2]
        2. "Why?"    "So."     "No."       see `split_strings`
        3. none      [U A1]    [U A2]      [U] [A1] [A2]
        3. "Why?"    [U A1]    [U A2]      [U] [A1] [A2]    (as in UltraFeedback)
    """
    needed = ["chosen", "rejected"] + ["prompt"] * (row.get("prompt") is not None)
    expected = "'chosen' and 'rejected', and 'prompt' unless both begin with it"
    require(row, *needed, expected=expected)
    prompt, chosen, rejected = (row.get(column) for column in ("prompt", "chosen", "rejected"))
    if all(isinstance(row[column], str) for column in needed):  # 2.
        prompt, chosen, rejected = split_strings(prompt, chosen, rejected)
    conversation = conversation_of(row, prompt, chosen, rejected)
    first_roles = {answer[0]["role"] for answer in conversation.answers if answer}
    if prompt is None or not first_roles <= {"assistant"}:  # 3.
        conversation = split_conversations(conversation)
    return with_turns_and_system(conversation, row, strings_as_messages)


def read_chat(row: dict, strings_as_messages: bool) -> Conversation:
    """Reads a row of SFT, which may begin with the answer."""
    return with_turns_and_system(read_demonstration(row), row, strings_as_messages, must_ask=False)


def read_demonstration(row: dict) -> Conversation:
    """Reads `messages` or `text`, which have no prompt, or `prompt` and `completion`."""
    leading = leading_column(row)
    if leading == "text":
        refuse_unless(isinstance(row["text"], str), row, "text", "a string")
        return Conversation([], [as_messages(row["text"], "assistant")], is_text=True)
    labels = ("true", "false") if leading == "messages" else LABELS  # 0 and 1 may be classes
    if str(row.get("label")).lower() in labels:  # it would learn bad answers, too
        raise BadRow("'label' or 'kto_tag' rates answers: use recipes/kto.py, or remove the column")
    if leading == "messages":
        fits = is_messages(row["messages"])
        refuse_unless(fits, row, "messages", "a list of messages with role and content")
        return Conversation([], [as_messages(row["messages"], "user")], row.get("tools"))
    require(row, "prompt", "completion", expected="'messages', 'text', or 'prompt' + 'completion'")
    conversation = conversation_of(row, row["prompt"], row["completion"])
    roles = [message["role"] for message in conversation.prompt[-1:] + conversation.answers[0][:1]]
    if roles in (["user", "user"], ["user", "system"]):  # two questions in a row
        raise BadRow("'completion' has a prompt, too: remove it, or --columns messages=completion")
    return conversation


def conversation_of(row: dict, prompt, *answers) -> Conversation:
    """Makes a conversation from a prompt and answers, strings or messages, and a row's tools."""
    return Conversation(
        as_messages(prompt, "user") if prompt else [],
        [as_messages(answer, "assistant") for answer in answers],
        row.get("tools"),
        is_text=all(isinstance(value, str) for value in (prompt, *answers)),
    )


def with_turns_and_system(
    conversation: Conversation, row: dict, strings_as_messages: bool, must_ask: bool = True
) -> Conversation:
    """Adds column `system` to a conversation, and turns strings into messages if asked for.

    With `must_ask`, a row with an empty prompt is left out.
    """
    prompt, answers, _, is_text = conversation
    if is_text and strings_as_messages and has_text(prompt):
        turns = transcript_turns(text_of(prompt))
        if turns is not None:
            prompt = turns
            answers = [transcript_turns(HH_MARKER + text_of(answer)) or [] for answer in answers]
        conversation = conversation._replace(prompt=prompt, answers=answers, is_text=False)
    next_roles = {answer[0]["role"] for answer in answers if answer} or {"assistant"}
    if prompt and prompt[-1]["role"] == "assistant" and "assistant" in next_roles:
        raise BadRow("the prompt ends with an assistant message, which cannot be continued")
    if must_ask and not has_text(prompt):
        raise LeftOut("empty prompt")
    if not row.get("system") or leading_column(row) == "text":
        return conversation
    refuse_unless(isinstance(row["system"], str), row, "system", "a string")
    if conversation.is_text:
        raise BadRow("column 'system' is next to strings: give messages, or --strings_as_messages")
    first = next((messages[0]["role"] for messages in (prompt, *answers) if messages), "")
    system = [{"role": "system", "content": row["system"]}] if first != "system" else []
    return conversation._replace(prompt=system + prompt)


def require(row: dict, *columns: str, expected: str) -> None:
    """Raises `BadRow`, which names the `expected` columns, unless each has text or messages."""
    for column in columns:
        value = row.get(column)
        if value is None:
            present = sorted(name for name in row if row[name] is not None)
            expected = f"{expected} (--columns {column}=YOURS names another)"
            raise BadRow(f"no {column!r}: expected columns {expected}; found {present}")
        fits = isinstance(value, str) or is_messages(value) or is_message(value)
        refuse_unless(fits, row, column, "a string or a list of messages with role and content")


def refuse_unless(fits: bool, row: dict, column: str, expected: str) -> None:
    """Raises `BadRow` unless a value `fits`; names the value, or its first bad message."""
    if fits:
        return
    parts = as_list(row.get(column))
    bad = [n for n, part in enumerate(parts) if isinstance(part, dict) and not is_message(part)]
    shown = f"{parts[bad[0]]!r:.80} as message {bad[0] + 1}" if bad else f"{row.get(column)!r:.80}"
    raise BadRow(f"column {column!r}: expected {expected}, found {shown}")


# ============================================================ pairs that hold their prompt
def split_conversations(pair: Conversation) -> Conversation:
    """Makes the common beginning of a pair's conversations their prompt.

    Both answers begin with the assistant, and the prompt does not end with it: U1 A1 U2 A2 and
    U1 A1 U3 A3 share U1. If the row also has a prompt, its messages must be in that beginning.
    """
    chosen, rejected = pair.answers
    for end in range(rendering.n_common(chosen[:-1], rejected[:-1]), 0, -1):
        begin = chosen[end]["role"] == rejected[end]["role"] == "assistant"
        if begin and chosen[end - 1]["role"] != "assistant":
            break
    else:
        expected = "with the same prompt (--columns prompt=YOURS names one), then an answer"
        raise BadRow(f"'chosen' and 'rejected' do not begin {expected}")
    shared = [message["content"].strip() for message in chosen[:end]]
    if not all(message["content"].strip() in shared for message in pair.prompt):
        raise BadRow("'chosen' and 'rejected' do not begin with all of the prompt in the row")
    return pair._replace(prompt=chosen[:end], answers=[chosen[end:], rejected[end:]])


def split_strings(prompt: str | None, chosen: str, rejected: str) -> tuple[str, str, str]:
    """Returns the prompt and the answers of a pair of strings.

    The prompt is what hh-rlhf's transcripts share, up to `HH_MARKER`, unless `prompt` is another.
    """
    shared = chosen[: rendering.n_common(chosen, rejected)]
    marker_at = shared.rfind(HH_MARKER)
    if marker_at >= 0 and shared.startswith(prompt or ""):
        end = marker_at + len(HH_MARKER)
        return chosen[:end], chosen[end:], rejected[end:]
    if prompt is None:
        shared = f"'chosen' and 'rejected' do not begin alike up to a {HH_MARKER!r}"
        raise BadRow(f"no column 'prompt' (--columns prompt=YOURS names another), and {shared}")
    return prompt, chosen, rejected


def transcript_turns(text: str) -> list[dict] | None:
    """Returns the turns of an hh-rlhf transcript; None if it is not a transcript."""
    before, *parts = re.split(r"\n\n(Human|Assistant):", text)
    if not parts or before.strip():
        return None
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [
        {"content": content.strip(), "role": roles[speaker]}
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
            choices = "|".join(FORMAT_COLUMNS)
            expected = f"{choices}=YOUR_COLUMN, each once, such as prompt=question"
            refuse(f"--columns {' '.join(pairs)}: expected {expected}")
        columns[column] = users_name
    return columns


def normalize_columns(row: dict, columns: dict[str, str]) -> dict:
    """Adds the columns that readers know to a row. Its own stay, for reward functions.

    Args:
        columns: see `column_names`. They take precedence over the data's own: with
            `{"prompt": "question"}`, a column `messages`, which would decide first, is left out.
    """
    for column, users_name in columns.items():
        if users_name not in row and column != "answer":  # only held-out sets may have it
            raise BadRow(f"--columns {column}={users_name}: found columns {sorted(row)}")
    if columns:
        leaders = {LED_BY.get(column, column) for column in columns}
        first = next((index for index, column in enumerate(LEADING) if column in leaders), 0)
        renamed = {name: row[users] for name, users in columns.items() if users in row}
        row = {name: row[name] for name in row if name not in LEADING[:first]} | renamed
    for column in (*TEXTS, "conversations"):
        if isinstance(row.get(column), str):
            row = {**row, column: from_text(column, row[column])}
    tag = row.get("kto_tag")
    if tag is not None and row.get("label") is None:
        row = {**row, "label": LABELS.get(str(tag).lower(), tag)}  # 0 would be read as a class
    leading = leading_column(row)
    if leading == "conversations":  # ShareGPT's
        row = {**row, "prompt" if is_pair(row) else "messages": row["conversations"]}
    elif leading == "instruction":
        row = {**row, **from_alpaca(row)}
    return {**row, "tools": standard_tools(row["tools"])} if row.get("tools") else row


def from_alpaca(row: dict) -> dict:
    """Converts Alpaca's `instruction` and `input` to the user's message, `output` to the answer."""
    for column in filter(row.get, ("instruction", "input", "output")):
        refuse_unless(isinstance(row[column], str), row, column, "a string")
    question = "\n".join(text for text in (row["instruction"], row.get("input")) if text)
    columns = {"prompt": [{"role": "user", "content": question}] if question else []}
    if row.get("output") is not None:
        columns["completion"] = [{"role": "assistant", "content": row["output"]}]
    return columns


def standard_tools(tools) -> list[dict] | None:
    """Returns nested or flat tools (OpenAI's Responses API) as templates read them, or None."""
    parsed = from_json(tools) or []
    if not isinstance(parsed, list) or not all(isinstance(tool, dict) for tool in parsed):
        raise BadRow(f"column 'tools': expected a list of JSON schemas, found {tools!r:.80}")
    nested = []
    for tool in map(as_json, parsed):
        if "name" in tool and "function" not in tool:
            function = {key: tool[key] for key in tool if (key, tool[key]) != ("type", "function")}
            tool = {"type": "function", "function": function}
        nested.append(tool)
    return nested or None


def leading_column(row: dict) -> str | None:
    """Returns the column that decides a row's format."""
    return next((name for name in LEADING if row.get(name) is not None), None)


def is_pair(row: dict) -> bool:
    """Whether a row has a chosen and a rejected answer, of any kind."""
    return row.get("chosen") is not None and row.get("rejected") is not None
