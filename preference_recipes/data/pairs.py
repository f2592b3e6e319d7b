"""Turns a row with a preference into token ids, for every recipe that learns from pairs."""

from preference_recipes.data import chat, formats


def preference_row(
    row: dict, tokenizer, max_length: int, strings_as_messages: bool = False
) -> dict:
    """Returns the token ids of one pair, and whether it can be used.

    What is longer than `max_length` is cut at the end; prompt and one answer count together.

    Returns:
        `prompt_ids`, `chosen_ids` and `rejected_ids`; `length`, the tokens of both sequences
        together, the prompt twice; `truncated`, whether anything was cut; `reason`, why the row
        must be left out, "" if it can be used; `longest`, the tokens of prompt and longer answer
        before the cut; `notes`, if there are any, see `dataset.load`.

    Raises:
        BadRow: the row is no preference, or the chat template refuses it.
    """
    prompt, chosen, rejected = formats.preference(row)
    if strings_as_messages:
        prompt, chosen, rejected = formats.as_turns(prompt, chosen, rejected)
    reason = missing_text(prompt, chosen, rejected)
    prompt_ids, chosen_ids, rejected_ids, notes = [], [], [], []
    if not reason:
        prompt_ids, chosen_ids, rejected_ids, notes = chat.encode_preference(
            tokenizer, prompt, chosen, rejected, tools=row.get("tools")
        )
        if not (chosen_ids and rejected_ids):
            reason = chat.why_left_out(notes)

    longest = len(prompt_ids) + max(len(chosen_ids), len(rejected_ids))
    room = max(max_length - len(prompt_ids), 0)
    prompt_ids = prompt_ids[:max_length]
    chosen_ids = chosen_ids[:room]
    rejected_ids = rejected_ids[:room]

    # Compared after the cut: only what is left can tell them apart.
    if not reason and chosen_ids == rejected_ids:
        reason = "chosen equal to rejected" if room else "prompt fills max_length"
    # The order of the keys is part of the data's fingerprint, see `conversion.checksum`.
    values = {
        "prompt_ids": prompt_ids,
        "chosen_ids": chosen_ids,
        "rejected_ids": rejected_ids,
        "length": 2 * len(prompt_ids) + len(chosen_ids) + len(rejected_ids),
        "truncated": longest > max_length,
        "reason": reason,
        "longest": longest,
    }
    if notes:
        values["notes"] = notes
    return values


def missing_text(prompt: formats.Text, *answers: formats.Text) -> str:
    """Returns why a row that lacks a text must be left out; "" if it has all."""
    if not formats.has_text(prompt):
        return "empty prompt"
    if not all(map(formats.has_text, answers)):
        return "empty answer"
    for answer in answers:
        if isinstance(answer, list) and answer[-1]["role"] != "assistant":
            return "answer that does not end with a message of the assistant"
    return ""
