"""Turns a row into token ids of answers that are good or bad: one with a label, or a pair."""

from preference_recipes.data import chat, formats, pairs


def labelled_row(row: dict, tokenizer, max_length: int, strings_as_messages: bool = False) -> dict:
    """Returns what `pairs.preference_row` returns, and `n_answers`.

    A pair has a good answer, the chosen one, and a bad one, so `n_answers` is 2. Any other row has
    one answer and a `label`, true or false: its ids are `chosen_ids` or `rejected_ids`, and the
    other list is empty. So are the targets.

    Raises:
        BadRow: the row fits neither format, or the chat template refuses it.
    """
    if formats.is_pair(row):
        values = pairs.preference_row(row, tokenizer, max_length, strings_as_messages)
        return {**values, "n_answers": 2}

    prompt, answer, is_good = formats.labelled(row)
    if strings_as_messages:
        prompt, answer = formats.as_turns(prompt, answer)
    reason = pairs.missing_text(prompt, answer)
    prompt_ids, answer_ids, targets, notes = [], [], [], []
    if not reason:
        prompt_ids, answer_ids, targets, notes = encode(tokenizer, prompt, answer, row.get("tools"))
        reason = "" if answer_ids else chat.why_left_out(notes)

    longest = len(prompt_ids) + len(answer_ids)
    room = max(max_length - len(prompt_ids), 0)
    if not reason and not room:
        reason = "prompt fills max_length"
    prompt_ids = prompt_ids[:max_length]
    answer_ids = answer_ids[:room]
    targets = targets[:room]
    if not reason and not any(targets):
        reason = "nothing to learn within max_length"
    values = {
        "prompt_ids": prompt_ids,
        "chosen_ids": answer_ids if is_good else [],
        "rejected_ids": [] if is_good else answer_ids,
        "chosen_targets": targets if is_good else [],
        "rejected_targets": [] if is_good else targets,
        "length": len(prompt_ids) + len(answer_ids),
        "truncated": longest > max_length,
        "reason": reason,
        "longest": longest,
        "n_answers": 1,
    }
    if notes:
        values["notes"] = notes
    return values


def encode(tokenizer, prompt, answer, tools=None) -> tuple[list, list, list, list]:
    """Returns the ids of a prompt and an answer, strings or lists, the answer's targets, notes."""
    if isinstance(prompt, str):
        prompt_ids, answer_ids = chat.encode_plain(tokenizer, prompt, answer)
        return prompt_ids, answer_ids, [True] * len(answer_ids), []
    encoded = chat.encode_answer(tokenizer, prompt, answer, tools)
    notes = encoded.notes + chat.notes_on_prompt(tokenizer, prompt, tools)
    return encoded.context, encoded.ids, encoded.targets, notes


def with_prompts(columns: dict, prompts: list[list[int]], max_length: int) -> dict:
    """Returns the columns of rows with other prompts, and their answers cut to `max_length`."""
    cut = {
        name: [ids[: max_length - len(prompt)] for prompt, ids in zip(prompts, columns[name])]
        for name in ("chosen_ids", "rejected_ids", "chosen_targets", "rejected_targets")
    }
    return {**columns, **cut, "prompt_ids": prompts}
