"""Turns a row with a prompt into token ids, for every recipe that samples its own answers."""

import json

from preference_recipes.data import chat, formats
from preference_recipes.data.messages import as_messages, has_text


def prompt_row(
    row: dict,
    tokenizer,
    max_length: int,
    max_new_tokens: int,
    strings_as_messages: bool = False,
    tools: list[dict] | None = None,
) -> dict:
    """Returns `prompt_ids length truncated columns reason notes` of one row.

    `columns` is the whole row as a JSON text, for the reward function. Of `max_length` tokens,
    `max_new_tokens` are for the response.

    Args:
        tools: JSON schemas of what an environment lets the model call; None: column `tools`.
    """
    formats.require(row, "prompt", expected="'prompt'")
    prompt = row["prompt"]
    if strings_as_messages:
        (prompt,) = formats.as_turns(prompt)
    notes: list[str] = []
    if isinstance(prompt, str):
        (ids,) = chat.encode_plain(tokenizer, prompt)
    else:
        prompt = formats.question_of(prompt)
        tools = tools or row.get("tools")
        text, ids = chat.encode_prompt(tokenizer, prompt, tools)
        notes = chat.unwritten_roles(tokenizer, prompt, tools, text)
    reason = ""  # why the row cannot be used
    if not has_text(prompt):
        reason = "empty prompt"
    elif len(ids) + max_new_tokens > max_length:
        reason = "prompt leaves no room for max_new_tokens within max_length"
    return {
        "prompt_ids": ids,
        "length": len(ids),
        "truncated": False,
        "columns": json.dumps(row, default=str),
        "reason": reason,
        "notes": notes,
    }


# ============================================================ prompts with teachers
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

    Of several teachers that is `teacher`, the row's own; `teacher_prompt_ids`, if the teacher reads
    another column; and with completions `completion_ids`, empty if the row has none,
    `completion_learned`, which of them the model writes, and what precedes them, `context_ids` and
    `teacher_context_ids`.

    Args:
        teacher_prompt: the column with the teacher's prompt; None: it reads the student's.
        with_completion: read the column `completion`, too. It is cut to `max_new_tokens`.
    """
    formats.require(row, "prompt", expected="'prompt'")
    has_completion = with_completion and row.get("completion") is not None
    if has_completion:
        pair = {name: row.get(name) for name in ("prompt", "completion", "label")}
        prompt, completion = formats.conversation(pair)
        if strings_as_messages:
            prompt, completion = formats.as_turns(prompt, completion)
        row = {**row, "prompt": prompt, "completion": completion}
    how = (tokenizer, max_length, max_new_tokens, strings_as_messages)
    values = prompt_row(row, *how)
    if teacher_names:
        if row.get("teacher") not in teacher_names:
            expected = " or ".join(teacher_names)
            formats.refuse_unless(False, {"teacher": None, **row}, "teacher", expected)
        values["teacher"] = row["teacher"]
    row_of_teacher = row
    if teacher_prompt is not None:
        formats.require(row, teacher_prompt, expected=f"{teacher_prompt!r} (--teacher_prompt)")
        prompt = row[teacher_prompt]
        if not (isinstance(prompt, str) and isinstance(row["prompt"], str)):
            prompt = formats.question_of(prompt)
        row_of_teacher = {**row, "prompt": prompt}
        of_teacher = prompt_row(row_of_teacher, *how)
        values["teacher_prompt_ids"] = of_teacher["prompt_ids"]
        values["reason"] = values["reason"] or of_teacher["reason"]
    if with_completion:
        add_completion(values, row, row_of_teacher, tokenizer, max_new_tokens, has_completion)
    return values


def add_completion(
    values: dict, row: dict, row_of_teacher: dict, tokenizer, room: int, has_completion: bool
) -> None:
    """Adds what `taught_row` says of completions, of which `room` tokens are kept."""
    context, answer, notes = encode_completion(row, tokenizer, has_completion)
    context_of_teacher, _, _ = encode_completion(row_of_teacher, tokenizer, has_completion)
    if has_completion and not answer.ids:
        left_out = chat.why_left_out(notes) or formats.missing_answer(row["completion"])
        values["reason"] = values["reason"] or left_out
    # Its tokens are the same after both prompts: those that the student would write.
    values["completion_ids"] = answer.ids[:room]
    values["completion_learned"] = answer.targets[:room]
    if answer.ids and not any(values["completion_learned"]):
        values["reason"] = values["reason"] or "nothing to learn within max_new_tokens"
    values["truncated"] = len(answer.ids) > room
    values["context_ids"] = context
    values["teacher_context_ids"] = context_of_teacher
    values["notes"] += notes


def encode_completion(
    row: dict, tokenizer, has_completion: bool
) -> tuple[list[int], chat.Sequence, list[str]]:
    """Returns the tokens before a row's completion, its own, none without a text, and notes."""
    if not has_completion or not has_text(row["completion"]):
        return [], chat.Sequence([], []), []
    completion = row["completion"]
    if not isinstance(row["prompt"], str):
        completion = as_messages(completion, "assistant")
    context, [answer], notes = chat.encode_answers(
        tokenizer, row["prompt"], [completion], row.get("tools")
    )
    return context, answer, notes
