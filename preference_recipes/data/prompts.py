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
