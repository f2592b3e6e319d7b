"""Rows of KTO: one answer, and a label that says whether it is good."""

from preference_recipes.data.formats import (
    Text,
    as_chat,
    conversation,
    is_pair,
    preference_row,
    question_of,
    row_of_answers,
)
from preference_recipes.data.messages import BadRow

# How `label` may be written; the cells of a CSV file are text.
LABELS = {"true": True, "false": False, "1": True, "0": False}


def labelled_row(row: dict, tokenizer, max_length: int, strings_as_messages: bool = False) -> dict:
    """Returns what `formats.row_of_answers` does, and `n_answers`.

    A pair has a good answer, the chosen one, and a bad one, so that is 2. Any other row has one
    answer and a `label`: its ids are `chosen_ids` or `rejected_ids`, and the other list is empty.
    """
    if is_pair(row):
        values = preference_row(row, tokenizer, max_length, strings_as_messages)
        return {**values, "n_answers": 2}
    prompt, answer, is_good = labelled(row)
    prompt, answer = as_chat(row, strings_as_messages, prompt, answer)
    answers = {"chosen" if is_good else "rejected": answer}
    values = row_of_answers(row, prompt, answers, tokenizer, max_length)
    return {**values, "n_answers": 1}


def labelled(row: dict) -> tuple[Text, Text, bool]:
    """Returns a row of KTO as (prompt, answer, whether it is good).

    Prompt and answer are strings, or both are message lists. Of `messages`, the last one is
    the answer.
    """
    label = str(row.get("label")).lower()
    if label not in LABELS:
        raise BadRow(
            "column 'label': expected true or false, whether the answer is good, found "
            f"{row.get('label')!r:.80}; or 'chosen' and 'rejected'"
        )
    prompt, answer = conversation({**row, "label": None})
    if isinstance(answer, list) and not prompt:  # of `messages`
        prompt = question_of(answer[:-1], answer[-1:])
        answer = answer[-1:]
    return prompt, answer, LABELS[label]
