"""Rows of KTO: one answer and whether it is good, or a pair, which has one of each."""

import pytest

from preference_recipes.data.formats import labelled_row, normalize_columns, preference_row
from preference_recipes.data.messages import BadRow
from recipes import load
from runs import forked, message, pair_of
from templates import left_out

distill_row = load("gkd", forked("gkd")).row_with_completion
ASK = message("user", "1+2=")
SAY = message("assistant", "3")


def read(tokenizer, row, **settings):
    return labelled_row(row, tokenizer, 64, **settings)


@pytest.mark.parametrize("label", [True, False, "true", "False", 1, 0, 1.0, "0.0"])
def test_a_label_says_which_list_the_answer_is_in(tokenizer, label):
    row = {"messages": [ASK, SAY], "label": label}
    is_good = str(label) in ("True", "true", "1", "1.0")
    pair = preference_row(pair_of("1+2=", "3", "4"), tokenizer, 64)
    found = read(tokenizer, row)
    answer, none = ("chosen_ids", "rejected_ids") if is_good else ("rejected_ids", "chosen_ids")
    assert found["prompt_ids"] == pair["prompt_ids"]
    assert found[answer] == pair["chosen_ids"] and found[none] == []
    assert found["n_answers"] == 1
    assert found["length"] == len(found["prompt_ids"]) + len(found[answer])


def test_prompt_and_completion_are_the_same_row(tokenizer):
    whole = read(tokenizer, {"messages": [ASK, SAY], "label": True})
    assert read(tokenizer, {"prompt": [ASK], "completion": [SAY], "label": True}) == whole
    tagged = {"messages": [ASK, SAY], "kto_tag": True, "label": None}  # null: of other rows
    assert read(tokenizer, normalize_columns(tagged, {})) == whole
    strings = {"prompt": "1+2=", "completion": "3", "label": True}
    assert read(tokenizer, strings, strings_as_messages=True) == whole
    plain = read(tokenizer, strings)
    assert tokenizer.decode(plain["prompt_ids"] + plain["chosen_ids"]) == "1+2=3<|end|>"


def test_a_pair_is_a_good_answer_and_a_bad_one(tokenizer):
    row = {"prompt": "1+2=", "chosen": "3", "rejected": "4"}
    assert read(tokenizer, row) == {**preference_row(row, tokenizer, 64), "n_answers": 2}


@pytest.mark.parametrize("messages, reason", [
    ([SAY], "empty prompt"),
    ([ASK, SAY, ASK], "answer that does not end with an assistant message"),
])  # fmt: skip
def test_rows_that_are_left_out(tokenizer, messages, reason):
    assert left_out(read, tokenizer, {"messages": messages, "label": False}) == reason


@pytest.mark.parametrize("label", [{}, {"label": None}, {"label": "good"}, {"label": 2}])
def test_a_row_without_a_label_is_refused(tokenizer, label):
    with pytest.raises(BadRow, match="'label': expected true or false"):
        read(tokenizer, {"messages": [ASK, SAY], **label})


def test_distillation_learns_no_completion_with_a_label(tokenizer):
    row = {"prompt": [ASK], "completion": [SAY], "label": 0}
    with pytest.raises(BadRow, match="'label'"):
        distill_row(row, tokenizer, 64, 8, [], None, with_completion=True)
