"""Turns a row with a preference or a label into token ids, for every recipe that learns from it."""

from preference_recipes.data import chat, formats
from preference_recipes.data.messages import has_text, learned_turns


def preference_row(
    row: dict, tokenizer, max_length: int, strings_as_messages: bool = False
) -> dict:
    """Returns the token ids of one pair, see `row_of_answers`."""
    prompt, *texts = formats.as_chat(row, strings_as_messages, *formats.preference(row))
    return row_of_answers(
        row, prompt, dict(zip(("chosen", "rejected"), texts)), tokenizer, max_length
    )


def labelled_row(row: dict, tokenizer, max_length: int, strings_as_messages: bool = False) -> dict:
    """Returns what `row_of_answers` returns, and `n_answers`.

    A pair has a good answer, the chosen one, and a bad one, so that is 2. Any other row has one
    answer and a `label`: its ids are `chosen_ids` or `rejected_ids`, and the other list is empty.
    """
    if formats.is_pair(row):
        values = preference_row(row, tokenizer, max_length, strings_as_messages)
        return {**values, "n_answers": 2}
    *texts, is_good = formats.labelled(row)
    prompt, answer = formats.as_chat(row, strings_as_messages, *texts)
    answers = {"chosen" if is_good else "rejected": answer}
    return {**row_of_answers(row, prompt, answers, tokenizer, max_length), "n_answers": 1}


def row_of_answers(
    row: dict, prompt: formats.Text, answers: dict[str, formats.Text], tokenizer, max_length: int
) -> dict:
    """Returns the token ids of a prompt and of its answers: `chosen`, `rejected` or both.

    What is longer than `max_length` is cut at the end; prompt and one answer count together.

    Returns:
        `prompt_ids`, `chosen_ids` and `rejected_ids`; `chosen_learned` and `rejected_learned`,
        which tokens of the answers count; `length`, the tokens of all sequences together, the
        prompt in each; `truncated reason notes`, see `dataset.load`.
    """
    texts = list(answers.values())
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
    cut = [chat.Sequence(ids[:room], learned[:room]) for ids, learned in sequences]
    of_answers = dict.fromkeys(("chosen", "rejected"), chat.Sequence([], []))
    of_answers |= dict(zip(answers, cut))
    return {
        "prompt_ids": prompt_ids,
        "chosen_ids": of_answers["chosen"].ids,
        "rejected_ids": of_answers["rejected"].ids,
        "chosen_learned": of_answers["chosen"].learned,
        "rejected_learned": of_answers["rejected"].learned,
        "length": sum(len(prompt_ids) + len(ids) for ids, _ in cut),
        "truncated": len(prompt_ids) < n_prompt or cut != sequences,
        "reason": reason or why_too_long(cut, room),
        "notes": notes,
    }


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


def why_too_long(cut: list[chat.Sequence], room: int) -> str:
    """Returns why answers cut to their room cannot be used; "" if they can."""
    if not room:
        return "prompt fills max_length"
    # Only what is left can tell them apart.
    if len(cut) == 2 and cut[0].ids == cut[1].ids:
        return "chosen equal to rejected"
    return "" if all(any(learned) for _, learned in cut) else "nothing to learn within max_length"


def with_prompts(columns: dict, prompts: list[list[int]], max_length: int) -> dict:
    """Returns the columns of rows with other prompts, and their answers cut to `max_length`."""
    cut = {
        name: [ids[: max_length - len(prompt)] for prompt, ids in zip(prompts, columns[name])]
        for name in ("chosen_ids", "rejected_ids", "chosen_learned", "rejected_learned")
    }
    return {**columns, **cut, "prompt_ids": prompts}
