"""Turns a row with a preference into token ids, for every recipe that learns from pairs."""

from preference_recipes.data import chat, formats
from preference_recipes.data.messages import has_text, learned_turns


def preference_row(
    row: dict, tokenizer, max_length: int, strings_as_messages: bool = False
) -> dict:
    """Returns the token ids of one pair, and whether it can be used.

    What is longer than `max_length` is cut at the end; prompt and one answer count together.

    Returns:
        `prompt_ids`, `chosen_ids` and `rejected_ids`; `chosen_targets` and `rejected_targets`,
        which tokens of the answers count, see `chat.Answer`; `length`, the tokens of both sequences
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
    encoded = chat.Preference([], chat.Sequence([], []), chat.Sequence([], []), notes=[])
    if not reason:
        encoded = chat.encode_preference(tokenizer, prompt, chosen, rejected, row.get("tools"))
        if not (encoded.chosen.ids and encoded.rejected.ids):
            reason = chat.why_left_out(encoded.notes)
    prompt_ids, (chosen_ids, chosen_targets), (rejected_ids, rejected_targets), notes = encoded

    longest = len(prompt_ids) + max(len(chosen_ids), len(rejected_ids))
    room = max(max_length - len(prompt_ids), 0)
    prompt_ids = prompt_ids[:max_length]
    chosen_ids = chosen_ids[:room]
    rejected_ids = rejected_ids[:room]
    chosen_targets = chosen_targets[:room]
    rejected_targets = rejected_targets[:room]

    # Compared after the cut: only what is left can tell them apart.
    if not reason and chosen_ids == rejected_ids:
        reason = "chosen equal to rejected" if room else "prompt fills max_length"
    if not reason and not (any(chosen_targets) and any(rejected_targets)):
        reason = "nothing to learn within max_length"
    # The order of the keys is part of the data's fingerprint, see `conversion.checksum`.
    values = {
        "prompt_ids": prompt_ids,
        "chosen_ids": chosen_ids,
        "rejected_ids": rejected_ids,
        "chosen_targets": chosen_targets,
        "rejected_targets": rejected_targets,
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
    if not has_text(prompt):
        return "empty prompt"
    if not all(map(has_text, answers)):
        return "empty answer"
    for answer in answers:
        if isinstance(answer, list) and answer[-1]["role"] != "assistant":
            return "answer that does not end with a message of the assistant"
        if isinstance(answer, list) and not learned_turns(answer, 0):
            return formats.missing_answer(answer)
        if isinstance(answer, str) and formats.goes_on(str(prompt), answer):
            return "transcripts that differ before the last answer, without --strings_as_messages"
    return ""
