"""Recognises the formats of rows: conversations, prompts with completions, preferences, text.

Rows of Alpaca and ShareGPT are brought into these formats first, see `standard`.
"""

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
    "tools",
)

# Who speaks in ShareGPT's conversations, and the role that chat templates know. `function_call` is
# an assistant's turn, too, but its value is a call.
SENDERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}

# Columns of pictures, sound and films beside messages that have places for them.
MEDIA_COLUMNS = ("images", "videos", "audios")

# How much a turn counts in the loss, in LLaMA-Factory's and in OpenAI's files.
LOSS_WEIGHTS = ("loss_weight", "weight")

IS_KTO = (
    "column 'label': one answer and whether it is good is KTO's format, which no recipe reads. "
    "For sft keep the good answers and remove the column; for dpo make pairs of a chosen and a "
    "rejected answer"
)


class BadRow(Exception):
    """A row that fits no format; its text says which column, and what was expected."""


def column_names(pairs: list[str] | None) -> dict[str, str]:
    """Returns the user's column by the format's: `["prompt=question"]` -> `{"prompt": "question"}`.

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
        fits = isinstance(value, str) or is_messages(value) or is_message(value)
        check(fits, row, column, "a string or a list of messages with role and content")


def is_messages(value) -> bool:
    """Whether a value is a list of messages, see `is_message`."""
    return isinstance(value, list) and all(is_message(part) for part in value)


def is_message(value) -> bool:
    """Whether a value is `{"role": ..., "content": ...}`, or ShareGPT's `{"from", "value"}`.

    The content is a string or a list of parts. A message that calls tools needs none.
    """
    if not isinstance(value, dict):
        return False
    role = value.get("role")
    content = value.get("content")
    if role is None:
        role = value.get("from")
        content = value.get("value")
    if not isinstance(role, str):
        return False
    if isinstance(content, list):
        return all(isinstance(part, dict) for part in content)
    return isinstance(content, str) or (content is None and bool(value.get("tool_calls")))


def as_messages(value: str | dict | list[dict], role: str) -> list[dict]:
    """Returns messages, each with a role and a text; a string becomes one message of `role`.

    Raises:
        BadRow: a message says what no text can hold, such as an image, or is from nobody known.
    """
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    messages = [value] if isinstance(value, dict) else value
    messages = without_nulls(json.dumps(messages, default=str))
    return [as_message(message, number) for number, message in enumerate(messages, 1)]


def as_message(message: dict, number: int) -> dict:
    """Returns a message with `role` and a text as its `content`; what else it has is kept.

    Args:
        number: its place in the conversation from 1, for errors.
    """
    if "role" not in message:
        message = from_sharegpt(message, number)
    if isinstance(message.get("content"), list):
        message = from_parts(message, number)
    return {"content": "", **message}


def from_sharegpt(message: dict, number: int) -> dict:
    """Returns a message of `from` and `value` as one of role and content."""
    sender = message["from"]
    value = message.get("value", "")
    others = {key: part for key, part in message.items() if key not in ("from", "value")}
    if sender == "function_call":
        calls = tool_calls(value, f"message {number}")
        return {"role": "assistant", **others, "tool_calls": calls}
    if sender not in SENDERS:
        expected = ", ".join([*SENDERS, "function_call"])
        raise BadRow(f"message {number} is from {sender!r}: expected one of {expected}")
    return {"role": SENDERS[sender], "content": value, **others}


def from_parts(message: dict, number: int) -> dict:
    """Returns a message whose content is a list of parts as one whose content is a text.

    Thinking goes to `reasoning_content` and calls to `tool_calls`, where chat templates look.
    """
    texts = []
    thoughts = []
    calls = list(message.get("tool_calls", []))
    for part_number, part in enumerate(message["content"], 1):
        kind = part.get("type", "text")
        value = part.get(kind, part.get("value", part.get("text")))
        where = f"message {number}, part {part_number}"
        if kind not in ("text", "reasoning", "thinking", "tool_call"):
            raise BadRow(f"{where} is of type {kind!r}: only text can be read, calls and reasoning")
        if kind == "tool_call":
            calls += tool_calls(value, where)
            continue
        if not isinstance(value, str):
            raise BadRow(f"{where}: expected a text, found {part!r:.80}")
        if kind == "text":
            texts.append(value)
        else:
            thoughts.append(value)

    message = {**message, "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def tool_calls(value, where: str) -> list[dict]:
    """Returns the calls that a JSON text of one or several `{"name", "arguments"}` makes.

    Args:
        where: the message, for errors.
    """
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        given = None
    calls = given if isinstance(given, list) else [given]
    if not all(isinstance(call, dict) and ("name" in call or "function" in call) for call in calls):
        raise BadRow(
            f"{where}: expected a function call, JSON of name and arguments, found {value!r:.80}"
        )
    return [
        call if "function" in call else {"type": "function", "function": {"arguments": {}, **call}}
        for call in calls
    ]


def without_nulls(text: str):
    """Returns the value of a JSON text without the keys, at any depth, whose value is null.

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


def missing_answer(answer: str | list[dict]) -> str:
    """Says why a row without anything to learn must be left out."""
    if isinstance(answer, list) and all(message["role"] != "assistant" for message in answer):
        return "no message of role assistant"
    return "empty answer"


def standard(row: dict, strings_as_messages: bool = False) -> dict:
    """Returns the row with the columns of the formats below, if it is one of Alpaca or ShareGPT.

    Its own columns stay: a reward function may ask for them. Rows of the formats below are
    returned as they are, but for a column `system`, which becomes the first message, and `tools`
    that hold none.

    Args:
        strings_as_messages: strings will be made turns, so a system message may come before them.

    Raises:
        BadRow: a column of the format has a value of another kind.
    """
    has_format = any(row.get(column) is not None for column in ("messages", "prompt", "text"))
    if not has_format and row.get("conversations") is not None:
        row = standard_sharegpt(row)
    elif not has_format and row.get("instruction") is not None:
        row = standard_alpaca(row)
    if row.get("tools") in ([], "[]"):
        row = {**row, "tools": None}
    return begin_with_system(row, strings_as_messages) if row.get("system") else row


def begin_with_system(row: dict, strings_as_messages: bool) -> dict:
    """Returns a row whose messages begin with its column `system`; one of `text` as it is.

    Raises:
        BadRow: its strings are read as plain text, which has no system message.
    """
    for column in ("messages", "prompt"):
        if is_messages(row.get(column)):
            return {**row, column: with_system(row, row[column])}
    prompt = row.get("prompt")
    answers = {name: row.get(name) for name in ("completion", "chosen", "rejected")}
    answers = {name: answer for name, answer in answers.items() if answer is not None}
    if any(is_messages(answer) for answer in answers.values()):
        if isinstance(prompt, str):
            return {**row, "prompt": with_system(row, as_messages(prompt, "user"))}
        # The prompt is the beginning of both answers.
        lists = {name: answer for name, answer in answers.items() if is_messages(answer)}
        return row | {name: with_system(row, messages) for name, messages in lists.items()}

    is_pair_of_transcripts = prompt is None and {"chosen", "rejected"} == set(answers)
    if row.get("text") is not None or not (isinstance(prompt, str) or is_pair_of_transcripts):
        return row  # text is a whole; what does not fit is refused where it is read
    if not strings_as_messages:
        raise BadRow(
            "column 'system' stands beside strings, and plain text has no system message: "
            "--strings_as_messages makes them turns of a chat that begins with it"
        )
    if is_pair_of_transcripts:
        prompt, *texts = split_transcripts(row["chosen"], row["rejected"])
    else:
        texts = list(answers.values())
    turns, *answer_turns = as_turns(prompt, *texts)
    begun = with_system(row, turns)  # type: ignore[arg-type]  # an empty prompt has no turns
    return {**row, **dict(zip(answers, answer_turns)), "prompt": begun}


def standard_sharegpt(row: dict) -> dict:
    """Returns a row of `conversations` as one of `messages`, or of a pair as one of `prompt`."""
    fits = is_messages(row["conversations"])
    check(fits, row, "conversations", "a list of messages with from and value")
    is_preference = row.get("chosen") is not None and row.get("rejected") is not None
    column = "prompt" if is_preference else "messages"
    return {**row, column: row["conversations"], "tools": standard_tools(row.get("tools"))}


def standard_tools(tools: list | str | None):
    """Returns tools as chat templates read them: `{"type": "function", "function": ...}`."""
    try:
        given = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError:
        return tools  # refused where it is rendered
    if not isinstance(given, list):
        return tools
    return [
        {"type": "function", "function": tool}
        if isinstance(tool, dict) and "name" in tool and "function" not in tool
        else tool
        for tool in given
    ]


def standard_alpaca(row: dict) -> dict:
    """Returns a row of `instruction`, `input` and `output` as one of `prompt` and `completion`.

    Instruction and input, with a line feed between them, are the user's message. `history` has
    pairs of earlier questions and answers.
    """
    for column in ("instruction", "input", "output"):
        fits = isinstance(row.get(column), (str, type(None)))
        check(fits, row, column, "a string")
    prompt = []
    for question, answer in row.get("history") or []:
        prompt.append({"role": "user", "content": question})
        prompt.append({"role": "assistant", "content": answer})
    question = "\n".join(text for text in (row["instruction"], row.get("input")) if text)
    prompt.append({"role": "user", "content": question})
    if row.get("output") is None:
        return {**row, "prompt": prompt}
    answer = [{"role": "assistant", "content": row["output"]}]
    return {**row, "prompt": prompt, "completion": answer}


def with_system(row: dict, messages: list[dict]) -> list[dict]:
    """Returns the messages behind that of column `system`, unless one begins them already."""
    check(isinstance(row["system"], str), row, "system", "a string")
    first = messages[0] if messages else {}
    if "system" in (first.get("role"), first.get("from")):
        return messages
    return [{"role": "system", "content": row["system"]}, *messages]


def refuse_unread(row: dict) -> None:
    """Raises `BadRow` if the row holds what a language model of text cannot learn from."""
    for column in MEDIA_COLUMNS:
        if row.get(column):
            raise BadRow(f"column {column!r} is not empty: only text can be read")
    has_pair = row.get("chosen") is not None and row.get("rejected") is not None
    is_label = str(row.get("label")).lower() in ("true", "false")
    if is_label and not has_pair and row.get("text") is None:
        raise BadRow(IS_KTO)


def refuse_weights(messages: list[dict]) -> None:
    """Raises `BadRow` if an assistant's turn is to count other than once."""
    for number, message in enumerate(messages, 1):
        for key in LOSS_WEIGHTS:
            weight = message.get(key, 1)
            if message["role"] == "assistant" and weight != 1:
                raise BadRow(
                    f"message {number}, {key} {weight!r}: every learned turn counts alike; remove "
                    "the key (--loss_on completion learns the last turn only)"
                )


def conversation(row: dict) -> tuple[list[dict] | str, list[dict] | str]:
    """Returns an SFT row as (prompt, completion), both strings or both message lists.

    The formats are tried in this order: `messages` and `text`, which have an empty prompt, then
    `prompt` and `completion`.
    """
    refuse_unread(row)
    if row.get("messages") is not None:
        fits = is_messages(row["messages"])
        check(fits, row, "messages", "a list of messages with role and content")
        messages = as_messages(row["messages"], "user")
        refuse_weights(messages)
        return [], messages
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
    """Returns a preference row as (prompt, chosen, rejected), the prompt stated once.

    All three are strings, or all three are message lists.
    """
    refuse_unread(row)
    prompt = row.get("prompt")
    has_prompt = prompt is not None
    required = ["chosen", "rejected"]
    if has_prompt:
        required.append("prompt")
    require(
        row,
        *required,
        expected="'chosen' and 'rejected', and 'prompt', unless both begin with it",
    )
    chosen = row["chosen"]
    rejected = row["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str) and not isinstance(prompt, list):
        if has_prompt:
            return prompt, chosen, rejected
        return split_transcripts(chosen, rejected)

    chosen = as_messages(chosen, "assistant")
    rejected = as_messages(rejected, "assistant")
    # An answer list that does not begin with the assistant begins with the prompt, whether the row
    # states it or not.
    if has_prompt and (not chosen or chosen[0]["role"] == "assistant"):
        return as_messages(prompt, "user"), chosen, rejected
    return split_conversations(prompt, chosen, rejected)


def split_transcripts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Returns (prompt, chosen, rejected) of two hh-rlhf transcripts that share their beginning."""
    shared = os.path.commonprefix([chosen, rejected])
    if HH_MARKER not in shared:
        raise BadRow(
            "no column 'prompt' (--columns prompt=YOURS names another), and 'chosen' and "
            f"'rejected' do not begin with the same transcript, up to a {HH_MARKER!r}"
        )
    cut = shared.rindex(HH_MARKER) + len(HH_MARKER)
    return shared[:cut], chosen[cut:], rejected[cut:]


def split_conversations(
    prompt: str | list[dict] | None, chosen: list[dict], rejected: list[dict]
) -> tuple[list[dict], list[dict], list[dict]]:
    """Returns (prompt, chosen, rejected) of two conversations that both begin with the prompt.

    Args:
        prompt: column `prompt`, if there is one. UltraFeedback states the last question there, too.
            A list may hold more than the conversations repeat, such as the system message.
    """
    cut = shared_prompt_length(chosen, rejected)
    shared = chosen[:cut]
    whole = shared
    if shared and prompt:
        whole = joined_prompt(as_messages(prompt, "user"), shared)
    if not whole:
        raise BadRow(
            "'chosen' and 'rejected' do not begin with the same prompt, "
            "that of column 'prompt' if there is one"
        )
    return whole, chosen[cut:], rejected[cut:]


def joined_prompt(prompt: list[dict], shared: list[dict]) -> list[dict]:
    """Returns the prompt of a row whose answers begin with `shared`; empty if they contradict.

    That is `shared` if it repeats all messages of the prompt in their order. If it repeats only the
    last ones, those before them go in front.
    """
    stated = [message["content"].strip() for message in prompt]
    repeated = [message["content"].strip() for message in shared]
    remaining = iter(repeated)
    if all(content in remaining for content in stated):  # `in` goes on where it stopped
        return shared
    for length in range(min(len(stated), len(repeated)), 0, -1):
        if stated[-length:] == repeated[:length]:
            return prompt[:-length] + shared
    return []


def shared_prompt_length(chosen: list[dict], rejected: list[dict]) -> int:
    """Counts the messages that both conversations begin with, up to an assistant's in both.

    At least one message of each is left as its answer, also where the conversations are equal.
    """
    longest = min(len(chosen), len(rejected)) - 1
    cut = 0
    while cut < longest and chosen[cut] == rejected[cut]:
        cut += 1
    # If they first differ at a user's message, go back to the assistant's turn before it.
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


def as_turns(prompt: str | list[dict], *answers: str | list[dict]) -> tuple[str | list[dict], ...]:
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
    # Answers are strings where the prompt is one.
    texts = [answer.strip() for answer in answers]  # type: ignore[union-attr]
    return turns, *([{"role": "assistant", "content": text}] for text in texts)
