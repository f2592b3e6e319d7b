"""Turns a row with a preference into token ids, for every recipe that learns from pairs."""

from preference_recipes.data import chat, formats
from preference_recipes.data.messages import has_text, learned_turns


def preference_row(
    row: dict, tokenizer, max_length: int, strings_as_messages: bool = False
) -> dict:
    """Returns the token ids of one pair, see `row_of_answers`."""
    prompt, chosen, rejected = formats.preference(row)
    answers = {"chosen": chosen, "rejected": rejected}
    return row_of_answers(row, prompt, answers, tokenizer, max_length, strings_as_messages)


def row_of_answers(
    row: dict,
    prompt: formats.Text,
    answers: dict[str, formats.Text],
    tokenizer,
    max_length: int,
    strings_as_messages: bool,
) -> dict:
    """Returns the token ids of a prompt and of its answers: `chosen`, `rejected` or both.

    What is longer than `max_length` is cut at the end; prompt and one answer count together.

    Returns:
        `prompt_ids`, `chosen_ids` and `rejected_ids`; `chosen_learned` and `rejected_learned`,
        which tokens of the answers count; `length`, the tokens of all sequences together, the
        prompt in each; `truncated reason notes`, see `dataset.load`.
    """
    texts = list(answers.values())
    if strings_as_messages:
        prompt, *texts = formats.as_turns(prompt, *texts)
    reason = missing_text(prompt, *texts)
    prompt_ids: list[int] = []
    sequences = [chat.Sequence([], []) for _ in texts]
    notes: list[str] = []
    if not reason:
        tools = row.get("tools")
        prompt_ids, sequences, notes = chat.encode_answers(tokenizer, prompt, texts, tools)
        if not all(sequence.ids for sequence in sequences):
            reason = chat.why_left_out(notes)

    n_prompt = len(prompt_ids)
    room = max(max_length - n_prompt, 0)
    prompt_ids = prompt_ids[:max_length]
    cut = [chat.Sequence(ids[:room], targets[:room]) for ids, targets in sequences]
    reason = reason or why_too_long(cut, room)
    of_answers = dict.fromkeys(("chosen", "rejected"), chat.Sequence([], []))
    of_answers |= dict(zip(answers, cut))
    return {
        "prompt_ids": prompt_ids,
        "chosen_ids": of_answers["chosen"].ids,
        "rejected_ids": of_answers["rejected"].ids,
        "chosen_learned": of_answers["chosen"].targets,
        "rejected_learned": of_answers["rejected"].targets,
        "length": sum(len(prompt_ids) + len(ids) for ids, _ in cut),
        "truncated": len(prompt_ids) < n_prompt or cut != sequences,
        "reason": reason,
        "notes": notes,
    }


def why_too_long(cut: list[chat.Sequence], room: int) -> str:
    """Returns why answers cut to their room cannot be used; "" if they can."""
    if not room:
        return "prompt fills max_length"
    # Only what is left can tell them apart.
    if len(cut) == 2 and cut[0].ids == cut[1].ids:
        return "chosen equal to rejected"
    return "" if all(any(targets) for _, targets in cut) else "nothing to learn within max_length"


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
        is_transcript = isinstance(answer, str) and str(prompt).endswith(formats.HH_MARKER)
        if is_transcript and "\n\nHuman:" in answer:
            return "transcripts that differ before the last answer, without --strings_as_messages"
    return ""
