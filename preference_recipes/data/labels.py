"""Turns a row into token ids of answers that are good or bad: one with a label, or a pair."""

from preference_recipes.data import formats, pairs


def labelled_row(row: dict, tokenizer, max_length: int, strings_as_messages: bool = False) -> dict:
    """Returns what `pairs.row_of_answers` returns, and `n_answers`.

    A pair has a good answer, the chosen one, and a bad one, so that is 2. Any other row has one
    answer and a `label`: its ids are `chosen_ids` or `rejected_ids`, and the other list is empty.
    """
    how = (tokenizer, max_length, strings_as_messages)
    if formats.is_pair(row):
        return {**pairs.preference_row(row, *how), "n_answers": 2}
    prompt, answer, is_good = formats.labelled(row)
    answers = {"chosen" if is_good else "rejected": answer}
    return {**pairs.row_of_answers(row, prompt, answers, *how), "n_answers": 1}


def with_prompts(columns: dict, prompts: list[list[int]], max_length: int) -> dict:
    """Returns the columns of rows with other prompts, and their answers cut to `max_length`."""
    cut = {
        name: [ids[: max_length - len(prompt)] for prompt, ids in zip(prompts, columns[name])]
        for name in ("chosen_ids", "rejected_ids", "chosen_learned", "rejected_learned")
    }
    return {**columns, **cut, "prompt_ids": prompts}
