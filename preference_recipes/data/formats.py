"""Recognises the formats of rows: conversations, prompts with completions, preferences, text."""

import re
import sys

from preference_recipes.data import chat
from preference_recipes.data.messages import (
    LOSS_KEYS,
    BadRow,
    as_messages,
    is_learned,
    is_message,
    is_messages,
    role_of,
)

# hh-rlhf transcripts: the prompt ends with the last marker that both answers share.
HH_MARKER = "\n\nAssistant:"

# A prompt or an answer: a string, or messages.
Text = str | list[dict]

FORMAT_COLUMNS = (
    "messages",
    "prompt",
    "completion",
    "text",
    "chosen",
    "rejected",
    "answer",
    "margin",
    "label",
    "tools",
    "system",
    # Alpaca's and ShareGPT's.
    "instruction",
    "input",
    "output",
    "conversations",
)

# Columns of images, audio and video that go with messages.
MEDIA_COLUMNS = ("images", "videos", "audios")
SINGLE_MEDIA_COLUMNS = ("image", "video", "audio")

NO_ASSISTANT = "no message of role assistant"

IS_KTO = (
    "column 'label': one answer and whether it is good is KTO's format, which recipes/kto.py "
    "alone reads. For sft keep the good answers and remove the column; for dpo make pairs of a "
    "chosen and a rejected answer"
)


# ============================================================ columns
def column_names(pairs: list[str] | None) -> dict[str, str]:
    """Maps each format column to the user's: `["prompt=question"]` -> `{"prompt": "question"}`.

    Raises:
        SystemExit: not of the form COLUMN=YOUR_COLUMN, an unknown column, or one named twice.
    """
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


def refuse_media(row: dict) -> None:
    """Raises `BadRow` if the row has images, videos or audios."""
    for column in (*MEDIA_COLUMNS, *SINGLE_MEDIA_COLUMNS):
        value = row.get(column)
        if column in SINGLE_MEDIA_COLUMNS and isinstance(value, str | int | float):
            # It may be something else, such as the name of a container's image. But `<image>` in a
            # text of the row shows that it is a picture.
            is_media = bool(value) and f"<{column}>" in str(row)
        else:
            is_media = bool(value)
        if is_media:
            raise BadRow(f"column {column!r} is not empty: only text is supported")


def refuse_media_and_kto(row: dict) -> None:
    """Raises `BadRow` if the row has images, videos or audios, or is in KTO's format."""
    refuse_media(row)
    has_label = str(row.get("label")).lower() in ("true", "false")
    # Next to a text alone, `label` is the class in a classification data set.
    if has_label and not (is_pair(row) or is_whole_text(row)):
        raise BadRow(IS_KTO)


def is_pair(row: dict) -> bool:
    """Whether a row has a chosen and a rejected answer, of any kind."""
    return row.get("chosen") is not None and row.get("rejected") is not None


# ============================================================ conversations, completions, text
def conversation(row: dict) -> tuple[Text, Text]:
    """Returns an SFT row as (prompt, completion), both strings or both message lists.

    The first line that fits the row decides:

        columns                   prompt    completion
        messages                  []        the messages
        text, without the others  ""        the text          (see `is_whole_text`)
        prompt and completion     both as strings, or both as message lists

    Raises:
        BadRow: none of these is there, or a value is of another kind.
    """
    refuse_media_and_kto(row)
    if row.get("messages") is not None:
        fits = is_messages(row["messages"])
        refuse_unless(fits, row, "messages", "a list of messages with role and content")
        messages = as_messages(row["messages"], "user")
        check_loss_keys(messages)
        return [], messages
    if is_whole_text(row):
        refuse_unless(isinstance(row["text"], str), row, "text", "a string")
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
    completion_messages = as_messages(completion, "assistant")
    check_loss_keys(completion_messages)
    return question_of(prompt), completion_messages


def question_of(prompt: str | dict | list[dict]) -> list[dict]:
    """Returns the messages of a prompt; none if it is empty, because then nothing is asked."""
    return as_messages(prompt, "user") if prompt else []


def is_whole_text(row: dict) -> bool:
    """Whether a row is read as its column `text` alone.

    Next to messages, a pair, or a prompt with a completion, `text` is the same in another form, as
    in Alpaca's original file.
    """

    def has(*columns: str) -> bool:
        return all(row.get(column) is not None for column in columns)

    has_parts = has("messages") or has("prompt", "completion") or has("chosen", "rejected")
    return has("text") and not has_parts


def check_loss_keys(messages: list[dict]) -> None:
    """Raises `BadRow` if a turn of the assistant says more of the loss than yes or no.

    Other keys that by their name are about it are refused, too: what they mean is not plain.
    """
    for number, message in enumerate(messages, 1):
        for key, value in message.items():
            is_unclear = key in LOSS_KEYS and value not in (0, 1)
            is_unclear |= bool(value) and key.startswith(("skip", "mask"))
            if message["role"] == "assistant" and is_unclear:
                raise BadRow(
                    f"message {number}, {key} {value!r}: every learned turn counts alike; remove "
                    "the key, or give train: false to a turn that is not learned (--loss_on "
                    "completion learns the last turn only)"
                )


def without_loss_keys(value):
    """Returns messages without `LOSS_KEYS`, any other value as it is."""
    if not is_messages(value):
        return value
    return [{key: part[key] for key in part if key not in LOSS_KEYS} for part in value]


def missing_answer(answer: Text) -> str:
    """Returns why a row without anything to learn must be left out."""
    if isinstance(answer, list) and all(message["role"] != "assistant" for message in answer):
        return NO_ASSISTANT
    if isinstance(answer, list) and any(not is_learned(message) for message in answer):
        return "no answer that is to be learned"
    return "empty answer"


# ============================================================ one answer, good or bad
# How `label` may be written; the cells of a CSV file are text.
LABELS = {"true": True, "false": False, "1": True, "0": False}


def labelled(row: dict) -> tuple[Text, Text, bool]:
    """Returns a row of KTO as (prompt, answer, whether it is good).

    Prompt and answer are strings, or both are message lists. Of `messages`, the answer is what the
    assistant says last, in one message or several.

    Raises:
        BadRow: there is no label, or `conversation` refuses the rest.
    """
    label = str(row.get("label")).lower()
    if label not in LABELS:
        found = "none" if row.get("label") is None else f"{row['label']!r:.80}"
        raise BadRow(
            f"column 'label': expected true or false, whether the answer is good, found {found}; "
            "or 'chosen' and 'rejected'"
        )
    prompt, answer = conversation({name: row[name] for name in row if name != "label"})
    if isinstance(answer, list) and not prompt:  # of `messages`
        start = len(answer) - 1
        while start > 0 and answer[start]["role"] == answer[start - 1]["role"] == "assistant":
            start -= 1  # no prompt ends with the assistant: the answer would go on with that
        return answer[:start], answer[start:], LABELS[label]
    return prompt, answer, LABELS[label]


# ============================================================ preferences
def preference(row: dict) -> tuple[Text, Text, Text]:
    """Returns a preference row as (prompt, chosen, rejected), the prompt stated once.

    All three are strings, or all three are message lists: 1. if all are strings; 2. if the answers
    begin with the assistant; 3. if they begin with the prompt. Examples, with `U` and `A` for
    messages of user and assistant:

           prompt    chosen    rejected    returned
        1. "Why?"    "So."     "No."       see `preference_of_strings`
        2. "Why?"    [A1]      "No."       [U] [A1] [A2]
        2. [U]       "So."     "No."       [U] [A1] [A2]
        3. none      [U A1]    [U A2]      [U] [A1] [A2]
        3. "Why?"    [U A1]    [U A2]      [U] [A1] [A2]    (as in UltraFeedback)

    Raises:
        BadRow: a column is missing or has a value of another kind; in 3 the answers do not begin
            with the same prompt.
    """
    refuse_media_and_kto(row)
    prompt = row.get("prompt")
    needed = ["chosen", "rejected"]
    if prompt is not None:
        needed.append("prompt")
    expected = "'chosen' and 'rejected', and 'prompt' unless both begin with it"
    require(row, *needed, expected=expected)

    chosen = row["chosen"]
    rejected = row["rejected"]
    are_strings = all(isinstance(row[column], str) for column in needed)
    if are_strings:  # 1.
        return preference_of_strings(prompt, chosen, rejected)
    chosen = as_messages(chosen, "assistant")
    rejected = as_messages(rejected, "assistant")
    check_loss_keys(chosen)
    check_loss_keys(rejected)
    begin_with_answer = all(
        not messages or messages[0]["role"] == "assistant" for messages in (chosen, rejected)
    )
    if prompt is not None and begin_with_answer:  # 2.
        return question_of(prompt), chosen, rejected
    return with_prompt_once(prompt, chosen, rejected)  # 3.


def preference_of_strings(prompt: str | None, chosen: str, rejected: str) -> tuple[str, str, str]:
    """Returns (prompt, chosen, rejected) of strings, the prompt stated once.

    Answers may be hh-rlhf transcripts that repeat the prompt:

        prompt    answers                             returned
        given     transcripts that begin with it      split; the prompt may be longer than given
        given     others                              as they are
        None      transcripts                         split
        None      others                              BadRow, see `split_transcripts`
    """
    shared = chosen[: chat.n_common(chosen, rejected)]
    repeat_prompt = HH_MARKER in shared and shared.startswith(prompt or "")
    if prompt is None or repeat_prompt:
        return split_transcripts(chosen, rejected)
    return prompt, chosen, rejected


def with_prompt_once(
    stated: Text | None, chosen: list[dict], rejected: list[dict]
) -> tuple[list[dict], list[dict], list[dict]]:
    """Returns (prompt, chosen, rejected) of two conversations that both begin with the prompt.

    Args:
        stated: column `prompt`, if there is one.

    Raises:
        BadRow: they do not begin with the same prompt, or column `prompt` contradicts it.
    """
    prompt, chosen_answer, rejected_answer = split_conversations(chosen, rejected)
    if not prompt:
        raise BadRow(
            "'chosen' and 'rejected' do not begin with the same prompt, each followed by an answer"
        )
    if not stated:
        return prompt, chosen_answer, rejected_answer
    whole_prompt = join_prompts(as_messages(stated, "user"), prompt)
    if not whole_prompt:
        raise BadRow(
            "'chosen' and 'rejected' begin with another prompt than that of column 'prompt'"
        )
    return whole_prompt, chosen_answer, rejected_answer


def split_transcripts(chosen: str, rejected: str) -> tuple[str, str, str]:
    r"""Returns (prompt, chosen, rejected) of two hh-rlhf transcripts that share their beginning.

    Example:

        chosen      \n\nHuman: Why?\n\nAssistant: Because.
        rejected    \n\nHuman: Why?\n\nAssistant: Be silent.
        prompt      \n\nHuman: Why?\n\nAssistant:
    """
    shared = chosen[: chat.n_common(chosen, rejected)]
    if HH_MARKER not in shared:
        raise BadRow(
            "no column 'prompt' (--columns prompt=YOURS names another), and 'chosen' and "
            f"'rejected' do not begin with the same transcript, up to a {HH_MARKER!r}"
        )
    end = shared.rindex(HH_MARKER) + len(HH_MARKER)
    return shared[:end], chosen[end:], rejected[end:]


def split_conversations(
    chosen: list[dict], rejected: list[dict]
) -> tuple[list[dict], list[dict], list[dict]]:
    """Returns (prompt, chosen, rejected) of two conversations that begin with the same prompt.

    The prompt is what both begin with, cut so that both answers begin with a message of the
    assistant, and each has at least one message. It does not end with one, with which they would go
    on. It is empty if there is no such place. Examples, with `U` and `A` for messages of user and
    assistant:

        chosen         rejected       prompt      answers
        U1 A1 U2 A2    U1 A1 U2 A3    U1 A1 U2    A2          A3
        U1 A1 U2 A2    U1 A1 U3 A3    U1          A1 U2 A2    A1 U3 A3
        U1 A1          U1 A1          U1          A1          A1
    """

    def are_answers_from(place: int) -> bool:
        is_open = place > 0 and chosen[place - 1]["role"] == "assistant"
        return chosen[place]["role"] == rejected[place]["role"] == "assistant" and not is_open

    longest_prompt = min(len(chosen), len(rejected)) - 1  # an answer has one message at least
    end = 0
    while end < longest_prompt and chosen[end] == rejected[end]:
        end += 1
    while end > 0 and not are_answers_from(end):
        end -= 1
    return chosen[:end], chosen[end:], rejected[end:]


def join_prompts(stated: list[dict], repeated: list[dict]) -> list[dict]:
    """Returns the whole prompt of a row whose answers repeat what column `prompt` states.

    The answers may repeat more of the prompt than the column states, or only its end. Messages are
    equal if they have the same text, and both or neither are the assistant's. Examples, with `S`,
    `U` and `A` for messages of system, user and assistant:

           stated        repeated    returned
        1. U             S U         S U
        2. S U1 A1 U2    U2          S U1 A1 U2
        3. U1            U2          []            (neither is part of the other)

    Args:
        stated: column `prompt`.
        repeated: what both answers begin with.
    """

    def turns_of(messages: list[dict]) -> list[tuple[bool, str]]:
        return [(part["role"] == "assistant", part["content"].strip()) for part in messages]

    stated_turns = turns_of(stated)
    repeated_turns = turns_of(repeated)
    # 1. The answers repeat all that the column states, maybe with other messages around or between.
    if is_in_order(stated_turns, repeated_turns):
        return repeated
    # 2. They repeat only its end.
    for length in range(min(len(stated), len(repeated)), 0, -1):
        if stated_turns[-length:] == repeated_turns[:length]:
            return stated[:-length] + repeated
    return []  # 3.


def is_in_order(parts: list, whole: list) -> bool:
    """Whether a list has all parts in their order, maybe with others between them."""
    remaining = iter(whole)
    return all(part in remaining for part in parts)  # `in` continues where it stopped


def roles_of(row: dict, strings_as_messages: bool) -> list[str]:
    """Returns the roles of a row's messages, each once; none if it has no message.

    They are for what a run prints: the note on rows without an assistant, and at the end how to ask
    the model.

    Args:
        strings_as_messages: count strings as user and assistant, where they become turns of them.
    """
    roles = []
    for name in ("messages", "prompt", "completion", "chosen", "rejected"):
        value = row.get(name)  # of any kind: a recipe checks only the columns that it reads
        parts = value if isinstance(value, list) else [value]
        roles += [role_of(part) for part in parts if isinstance(part, dict)]
    if not roles and strings_as_messages and is_plain_text(row):
        roles = ["user", "assistant"]
    return list(dict.fromkeys(roles))


# ============================================================ strings
def is_plain_text(row: dict) -> bool:
    """Whether `as_turns` could make turns of a row: its prompt and its answers are strings.

    A row with `messages` has turns already, and a whole text is no conversation.
    """
    if row.get("messages") is not None or is_whole_text(row):
        return False
    names = ("prompt", "completion", "chosen", "rejected")
    values = [row[name] for name in names if row.get(name) is not None]
    return bool(values) and all(isinstance(value, str) for value in values)


def as_turns(prompt: Text, *answers: Text) -> tuple[Text, ...]:
    r"""Returns a prompt and its answers as message lists: strings become turns.

    Either all are strings, or all are message lists. If the prompt is empty and there is an answer,
    nothing is asked, so both stay strings. Examples, with `U` and `A` for messages of user and
    assistant:

        prompt                                 answer            returned
        "Why?"                                 "So."             [U]    [A]
        "\n\nHuman: Why?\n\nAssistant:"        " So."            [U]    [A]
        ""                                     "So."             ""     "So."
        ""                                     none (in PPO)     [U]
        [U]                                    [A]               [U]    [A]
    """
    if not isinstance(prompt, str):
        return prompt, *answers
    if answers and not prompt:  # nothing is asked
        return prompt, *answers
    turns = transcript_turns(prompt)
    if turns is None:
        answer_turns = [[{"role": "assistant", "content": str(answer)}] for answer in answers]
        return [{"role": "user", "content": prompt}], *answer_turns
    # Its answers may have several turns, too. In hh-rlhf they begin with a space.
    answer_turns = [transcript_turns(HH_MARKER + str(answer)) or [] for answer in answers]
    if turns[-1]["role"] == "assistant":  # which the answers go on with
        for answer, (first, *_) in zip(answers, filter(None, answer_turns)):
            first["content"] = " " * str(answer).startswith(" ") + first["content"]
    return turns, *answer_turns


def goes_on(prompt: str, answer: str) -> bool:
    """Whether an answer to an hh-rlhf transcript has a turn of the user, too."""
    return prompt.endswith(HH_MARKER) and "\n\nHuman:" in answer


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
