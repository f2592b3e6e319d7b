"""Turns a row with a prompt into token ids, for every recipe that samples its own answers."""

import json

from common.data import formats, templates, tokens
from common.data.ids import encode_text
from common.data.messages import as_messages


def prompt_row(
    row: dict,
    tokenizer,
    max_length: int,
    max_new_tokens: int,
    strings_as_messages: bool = False,
) -> dict:
    """Returns `prompt_ids length truncated columns reason` of one row, and maybe `notes`.

    `columns` is the whole row as a JSON text, for the reward function. Of `max_length` tokens,
    `max_new_tokens` are for the response.

    Raises:
        BadRow: the row has no prompt, or the chat template refuses it.
    """
    formats.require(row, "prompt", expected="'prompt'")
    prompt = row["prompt"]
    if strings_as_messages:
        (prompt,) = formats.as_turns(prompt)
    notes = []
    if isinstance(prompt, str):
        (ids,) = tokens.encode_plain(tokenizer, prompt)
    else:
        messages = as_messages(prompt, "user")
        text = templates.render(tokenizer, messages, row.get("tools"), add_generation_prompt=True)
        ids = encode_text(tokenizer, text)
        notes = templates.unwritten_parts(tokenizer, messages, row.get("tools"))
    reason = ""  # why the row cannot be used
    if not formats.has_text(prompt):
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
