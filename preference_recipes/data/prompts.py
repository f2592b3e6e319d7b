"""Turns a row with a prompt into token ids, for every recipe that samples its own answers."""

import json

from preference_recipes.data import chat, formats
from preference_recipes.data.messages import has_text


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
    if not isinstance(prompt, str):
        prompt = formats.question_of(prompt)
    [prompt] = formats.as_asked(row, strings_as_messages, prompt)
    if row.get("system"):
        row = {**row, "prompt": prompt}
    notes: list[str] = []
    if isinstance(prompt, str):
        (ids,) = chat.encode_plain(tokenizer, prompt)
    else:
        _, ids, notes = chat.encode_prompt(tokenizer, prompt, tools or row.get("tools"))
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


def taught_row(
    row: dict,
    tokenizer,
    max_length: int,
    max_new_tokens: int,
    teacher_names: list[str],
    teacher_prompt: str | None,
    strings_as_messages: bool = False,
) -> dict:
    """Returns what `prompt_row` does for one row, and what a distillation needs besides.

    That is `teacher`, if there are several, and `teacher_prompt_ids`, if the teacher's prompt is in
    another column, `teacher_prompt`.
    """
    values = prompt_row(row, tokenizer, max_length, max_new_tokens, strings_as_messages)
    if teacher_names:
        fits = row.get("teacher") in teacher_names
        formats.refuse_unless(fits, {"teacher": None, **row}, "teacher", " or ".join(teacher_names))
        values["teacher"] = row["teacher"]
    if teacher_prompt is not None:
        formats.require(row, teacher_prompt, expected=f"{teacher_prompt!r} (--teacher_prompt)")
        prompt = row[teacher_prompt]
        if not (isinstance(prompt, str) and isinstance(row["prompt"], str)):
            prompt = formats.question_of(prompt)
        row = {**row, "prompt": prompt, "system": None}
        taught = prompt_row(row, tokenizer, max_length, max_new_tokens, strings_as_messages)
        values["teacher_prompt_ids"] = taught["prompt_ids"]
        values["reason"] = values["reason"] or taught["reason"]
    return values
