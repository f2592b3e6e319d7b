"""Turns a row with a prompt into token ids, for every recipe that samples its own answers."""

import json

from preference_recipes.data import chat, formats
from preference_recipes.data.messages import BadRow, as_messages, has_text, is_messages


def prompt_row(
    row: dict,
    tokenizer,
    max_length: int,
    max_new_tokens: int,
    strings_as_messages: bool = False,
    tools: list[dict] | None = None,
) -> dict:
    """Returns `prompt_ids length truncated columns reason` of one row, and maybe `notes`.

    `columns` is the whole row as a JSON text, for the reward function. Of `max_length` tokens,
    `max_new_tokens` are for the response.

    Args:
        tools: JSON schemas of what an environment lets the model call; None: column `tools`.

    Raises:
        BadRow: the row has no prompt, or the chat template refuses it.
    """
    formats.refuse_media(row)
    formats.require(row, "prompt", expected="'prompt'")
    prompt = row["prompt"]
    if strings_as_messages:
        (prompt,) = formats.as_turns(prompt)
    notes = []
    if isinstance(prompt, str):
        (ids,) = chat.encode_plain(tokenizer, prompt)
    else:
        prompt = messages = as_messages(prompt, "user")
        tools = tools or row.get("tools")
        ids = chat.encode_prompt(tokenizer, messages, tools).ids
        notes = chat.notes_on_prompt(tokenizer, messages, tools)
    reason = ""  # why the row cannot be used
    if not has_text(prompt):
        reason = "empty prompt"
    elif len(ids) + max_new_tokens > max_length:
        reason = "prompt leaves no room for max_new_tokens within max_length"
    values = {
        "prompt_ids": ids,
        "length": len(ids),
        "truncated": False,
        "columns": json.dumps(row, default=str),
        "reason": reason,
    }
    if notes:
        values["notes"] = notes
    return values


# ============================================================ prompts with teachers
NO_ANSWER = chat.Answer([], [], [], [], notes=[])


def taught_row(
    row: dict,
    tokenizer,
    max_length: int,
    max_new_tokens: int,
    teacher_names: list[str],
    teacher_prompt: str | None,
    with_completion: bool,
    strings_as_messages: bool = False,
) -> dict:
    """Returns what `prompt_row` does for one row, and what a distillation needs besides.

    Where there are several teachers that is `teacher`, the name of the row's own. Where the teacher
    reads another prompt it is `teacher_prompt_ids`. With completions it is `completion_ids`, empty
    if the row has none, `completion_targets`, which of them the model writes itself, and the tokens
    before them, `context_ids` and `teacher_context_ids`.

    Args:
        teacher_names: of several teachers; none if there is one.
        teacher_prompt: the column with the teacher's prompt; None: it reads the student's.
        with_completion: read the column `completion`, too. It is cut to `max_new_tokens`.

    Raises:
        BadRow: a column is missing, or its value is of another kind.
    """

    def read(row: dict) -> dict:
        return prompt_row(row, tokenizer, max_length, max_new_tokens, strings_as_messages)

    has_completion = with_completion and row.get("completion") is not None
    if has_completion:
        row = with_conversation(row, strings_as_messages)
    values = read(row)
    if teacher_names:
        values["teacher"] = teacher_of(row, teacher_names)
    row_of_teacher = row
    if teacher_prompt is not None:
        row_of_teacher = {**row, "prompt": prompt_of_teacher(row, teacher_prompt)}
        of_teacher = read(row_of_teacher)
        values["teacher_prompt_ids"] = of_teacher["prompt_ids"]
        values["reason"] = values["reason"] or of_teacher["reason"]
        values["longest"] = max(values["length"], of_teacher["length"])
    if with_completion:
        answer = NO_ANSWER
        answer_of_teacher = NO_ANSWER
        if has_completion:
            answer = encode_completion(row, tokenizer)
            answer_of_teacher = encode_completion(row_of_teacher, tokenizer)
            if not answer.ids:
                values["reason"] = values["reason"] or reason_of_missing(row, answer)
        # Its tokens are the same after both prompts: those that the student would write.
        values["completion_ids"] = answer.ids[:max_new_tokens]
        values["completion_targets"] = answer.targets[:max_new_tokens]
        if answer.ids and not any(values["completion_targets"]):
            values["reason"] = values["reason"] or "nothing to learn within max_new_tokens"
        values["truncated"] = len(answer.ids) > max_new_tokens
        if values["truncated"]:
            values["longest"] = len(answer.ids)
        values["context_ids"] = answer.context
        values["teacher_context_ids"] = answer_of_teacher.context
        if answer.notes:
            values["notes"] = values.get("notes", []) + answer.notes
    return values


def with_conversation(row: dict, strings_as_messages: bool) -> dict:
    """Returns the row with prompt and completion as two strings or two message lists."""
    formats.require(row, "prompt", expected="'prompt'")
    pair = {name: row[name] for name in ("prompt", "completion")}
    prompt, completion = formats.conversation(pair)
    if strings_as_messages:
        prompt, completion = formats.as_turns(prompt, completion)
    return {**row, "prompt": prompt, "completion": completion}


def teacher_of(row: dict, names: list[str]) -> str:
    """Returns the name of a row's teacher."""
    name = row.get("teacher")
    if name not in names:
        raise BadRow(f"column 'teacher': expected {' or '.join(names)} (--teacher), found {name!r}")
    return name


def prompt_of_teacher(row: dict, column: str) -> str | list[dict]:
    """Returns what the teacher reads in place of the row's prompt, of the same kind as that."""
    prompt = row.get(column)
    if not (isinstance(prompt, str) or is_messages(prompt)):
        raise BadRow(
            f"column {column!r} (--teacher_prompt): expected a string or a list of messages with "
            f"role and content, found {prompt!r:.80}"
        )
    if isinstance(prompt, str) and not isinstance(row["prompt"], str):
        return as_messages(prompt, "user")
    return prompt


def encode_completion(row: dict, tokenizer) -> chat.Answer:
    """Returns the tokens of a row's completion, none if it has no text, and of what precedes it."""
    prompt = row["prompt"]
    completion = row["completion"]
    if not has_text(completion):
        return NO_ANSWER
    if isinstance(prompt, str) and isinstance(completion, str):
        context, ids = chat.encode_plain(tokenizer, prompt, completion)
        return chat.Answer(context, context, ids, [True] * len(ids), notes=[])
    before = as_messages(prompt, "user")
    after = as_messages(completion, "assistant")
    return chat.encode_answer(tokenizer, before, after, row.get("tools"))


def reason_of_missing(row: dict, answer: chat.Answer) -> str:
    """Returns why a completion has no tokens, although the row has one."""
    return chat.why_left_out(answer.notes) or formats.missing_answer(row["completion"])
