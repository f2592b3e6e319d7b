"""Turns a row with a prompt into token ids, for every recipe that samples its own answers."""

import json

from preference_recipes.data import chat, formats
from preference_recipes.data.messages import LeftOut


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
