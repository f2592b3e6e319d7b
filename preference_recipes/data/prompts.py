"""Encodes rows with a prompt as token ids, for all recipes that sample their own answers."""

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
    """Returns `prompt_ids length truncated row_json notes` of one row.

    `row_json` is the whole row as a JSON text, for reward functions. The response needs
    `max_new_tokens` of `max_length`; raises `LeftOut` if the prompt leaves fewer.

    Args:
        tools: JSON schemas of an environment's tools; None: column `tools`.
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
        "row_json": json.dumps(row, default=str),
        "notes": notes,
    }


def distill_row(
    row: dict,
    tokenizer,
    max_length: int,
    max_new_tokens: int,
    teacher_names: list[str],
    teacher_prompt: str | None,
    strings_as_messages: bool = False,
) -> dict:
    """Returns the columns of `prompt_row`, and those that a distillation adds.

    These are `teacher` if there are several, and `teacher_prompt_ids` if `teacher_prompt` is given.
    """
    values = prompt_row(row, tokenizer, max_length, max_new_tokens, strings_as_messages)
    if teacher_names:
        fits = row.get("teacher") in teacher_names
        formats.refuse_unless(fits, {"teacher": None, **row}, "teacher", " or ".join(teacher_names))
        values["teacher"] = row["teacher"]
    if teacher_prompt is not None:
        row = row_for_teacher(row, teacher_prompt)
        teacher_values = prompt_row(row, tokenizer, max_length, max_new_tokens, strings_as_messages)
        values["teacher_prompt_ids"] = teacher_values["prompt_ids"]
    return values


def row_for_teacher(row: dict, teacher_prompt: str) -> dict:
    """Returns a row with the prompt that its column `teacher_prompt` holds."""
    formats.require(row, teacher_prompt, expected=f"{teacher_prompt!r} (--teacher_prompt)")
    prompt = from_text(teacher_prompt, row[teacher_prompt])
    if isinstance(prompt, str) and not isinstance(row["prompt"], str):
        prompt = [{"role": "user", "content": prompt}]
    return {**row, "prompt": prompt, "system": None}
