"""Turns a row with a prompt into token ids, for every recipe that samples its own answers."""

import json

from preference_recipes.data import chat, formats
from preference_recipes.data.messages import LeftOut, from_text


def prompt_row(
    row: dict,
    tokenizer,
    max_length: int,
    max_new_tokens: int,
    strings_as_messages: bool = False,
    tools: list[dict] | None = None,
) -> dict:
    """Returns `prompt_ids length truncated columns notes` of one row.

    `columns` is the whole row as a JSON text, for the reward function. Of `max_length` tokens,
    `max_new_tokens` are for the response. Raises `LeftOut` if the prompt leaves no room for it.

    Args:
        tools: JSON schemas of what an environment lets the model call; None: column `tools`.
    """
    conversation = formats.read_prompt(row, strings_as_messages)
    if row.get("system"):
        row = {**row, "prompt": conversation.prompt}
    if tools:
        conversation = conversation._replace(tools=tools)
    ids, _, notes = chat.encode_answers(tokenizer, *conversation)
    if len(ids) + max_new_tokens > max_length:
        raise LeftOut("prompt leaves no room for max_new_tokens within max_length")
    return {
        "prompt_ids": ids,
        "length": len(ids),
        "truncated": False,
        "columns": json.dumps(row, default=str),
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
    """Returns what `prompt_row` does, and what a distillation needs besides.

    That is `teacher` if there are several, and `teacher_prompt_ids` of column `teacher_prompt`.
    """
    values = prompt_row(row, tokenizer, max_length, max_new_tokens, strings_as_messages)
    if teacher_names:
        fits = row.get("teacher") in teacher_names
        formats.refuse_unless(fits, {"teacher": None, **row}, "teacher", " or ".join(teacher_names))
        values["teacher"] = row["teacher"]
    if teacher_prompt is not None:
        row = row_for_teacher(row, teacher_prompt)
        taught = prompt_row(row, tokenizer, max_length, max_new_tokens, strings_as_messages)
        values["teacher_prompt_ids"] = taught["prompt_ids"]
    return values


def row_for_teacher(row: dict, teacher_prompt: str) -> dict:
    """Returns a row with the prompt that its column `teacher_prompt` holds."""
    formats.require(row, teacher_prompt, expected=f"{teacher_prompt!r} (--teacher_prompt)")
    prompt = from_text(teacher_prompt, row[teacher_prompt])
    if isinstance(prompt, str) and not isinstance(row["prompt"], str):
        prompt = [{"role": "user", "content": prompt}]
    return {**row, "prompt": prompt, "system": None}
