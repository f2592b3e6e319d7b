"""What counts in an answer of several messages: what the model writes. Prompts that end with the assistant."""

import copy
import itertools
import types

import pytest
import torch

import templates
from preference_recipes.data import formats, prompts, rendering
from preference_recipes.data.messages import BadRow
from preference_recipes.models.logprobs import scatter_to_answers
from preference_recipes.models.packing import Packer
from recipes import load
from runs import forked, message
from templates import left_out

LONG = 4000
sft_row = load("sft").sft_row
distill_row = load("gkd", forked("gkd")).row_with_completion
reward_row = load("reward").reward_row


ASK = message("user", "What time is it?")
NO = message("assistant", "No.")
ZONE = {"type": "object", "properties": {"zone": {"type": "string", "description": "where"}}}
CLOCK = {"name": "clock", "description": "The time.", "parameters": ZONE | {"required": ["zone"]}}
CLOCK = {"type": "function", "function": CLOCK}
CLOCK_CALL = {"name": "clock", "arguments": {"zone": "CET"}}
CALLS = [{"type": "function", "id": "abcdefghi", "function": CLOCK_CALL}]
CALL = message("assistant", "", tool_calls=CALLS)
RESULT = message("tool", "12:00", name="clock", tool_call_id="abcdefghi")
NOON = message("assistant", "Noon.")
ANSWERS = {
    "a result": [CALL, RESULT, NOON],
    "a user": [message("assistant", "One."), message("user", "And then?"), NOON],
    "not learned": [message("assistant", "BAD", train=False), message("user", "And then?"), NOON],
    "not learned, alone": [message("assistant", "BAD", loss_mask=0), message("assistant", "Noon.")],
}


def targets_of(ids, targets):
    return list(itertools.compress(ids, targets))


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("name", ["qwen2_5", "deepseekv3", "gemma4"])
def test_the_mask_of_an_answer_is_that_of_sft(name, kind):
    tokenizer = templates.tokenizer(name)
    answer = ANSWERS[kind]
    given = {"prompt": [ASK], "tools": [CLOCK]}
    row = sft_row({**given, "completion": answer}, tokenizer, LONG, "assistant")
    learned = targets_of(row["input_ids"], row["loss_mask"])
    pair = {**given, "chosen": answer, "rejected": [NO]}
    read = [
        formats.preference_row(pair, tokenizer, LONG),
        formats.labelled_row(pair, tokenizer, LONG),
        formats.labelled_row({**given, "completion": answer, "label": "true"}, tokenizer, LONG),
    ]
    for row in read:
        assert len(row["chosen_ids"]) == len(row["chosen_loss_mask"])
        assert targets_of(row["chosen_ids"], row["chosen_loss_mask"]) == learned
        whole = tokenizer.decode(row["prompt_ids"] + row["chosen_ids"])
        assert all(part["content"] in whole for part in answer)
        assert row["rejected_loss_mask"] == [True] * len(row["rejected_ids"])
    row = {**given, "completion": answer}
    taught = distill_row(row, tokenizer, LONG, 1000, [], None, with_completion=True)
    assert targets_of(taught["completion_ids"], taught["completion_loss_mask"]) == learned
    assert 0 < len(learned) < len(taught["completion_ids"])


def test_an_answer_whose_turns_the_template_rewrites_is_left_out():
    """As one sequence it would be learned as no model writes it."""
    row = {"prompt": [ASK], "chosen": ANSWERS["a user"], "rejected": [NO]}
    why = left_out(formats.preference_row, row, templates.tokenizer("qwen3"), LONG)
    assert "writes the earlier turns of an answer differently" in why


def test_answers_with_nothing_to_learn_are_left_out():
    tokenizer = templates.tokenizer("qwen2_5")
    bad = ANSWERS["not learned"]
    row = {"prompt": [ASK], "chosen": bad[:1], "rejected": [NO]}
    why = left_out(formats.preference_row, row, tokenizer, LONG)
    assert why == "no answer that is to be learned"
    row["chosen"] = bad
    whole = formats.preference_row(row, tokenizer, LONG)
    first = len(whole["prompt_ids"]) + whole["chosen_loss_mask"].index(True)
    why = left_out(formats.preference_row, row, tokenizer, first)
    assert why == "nothing to learn within max_length"
    assert any(formats.preference_row(row, tokenizer, first + 1)["chosen_loss_mask"])
    for column in ("chosen", "rejected"):  # more than yes or no
        unclear = {**row, column: [message("assistant", "a", weight=0.5)]}
        with pytest.raises(BadRow, match=r"message 1, weight 0\.5"):
            formats.preference_row(unclear, tokenizer, LONG)


def test_a_reward_model_reads_the_whole_answer():
    tokenizer = templates.tokenizer("qwen2_5")
    row = {"prompt": [ASK], "chosen": [message("assistant", "BAD", train=False)], "rejected": [NO]}
    found = reward_row(row, tokenizer, LONG)
    assert tokenizer.decode(found["chosen_ids"]) == "BAD<|im_end|>"


class Uniform(torch.nn.Module):
    """Its log-prob of a token is minus its id / 1000, and so is what else it returns."""

    def forward(self, batch, extra_outputs=()):
        values = scatter_to_answers(-batch["targets"] / 1000, batch)
        return {"logps": values, **{name: values for name in extra_outputs}}


@pytest.mark.parametrize("share", [False, True])
def test_numbers_of_pairs_are_those_of_the_learned_tokens(share):
    """In padded rows and in packed ones with a shared prompt, whatever the loss averages over."""
    dpo = load("dpo")
    columns = {
        "prompt_ids": [[1, 2], [3]],
        "chosen_ids": [[10, 20, 30, 40], [50]],
        "rejected_ids": [[60, 70], [80, 90, 100]],
        "chosen_loss_mask": [[True, False, False, True], [True]],
        "rejected_loss_mask": [[False, True], [True, True, False]],
    }
    batch = dpo.collate(columns, Packer(torch.device("cpu"), share=share))
    kept = [[10, 40], [50]], [[70], [80, 90]]
    sums = [torch.tensor([-sum(ids) / 1000 for ids in answers]) for answers in kept]
    counts = [torch.tensor([len(ids) for ids in answers]) for answers in kept]
    averages = [total / count for total, count in zip(sums, counts)]
    for kind in ("sigmoid", "ipo", "simpo", "orpo"):
        args = dpo.Args(loss_type=kind, beta=0.5)
        batch["ref_logps"] = torch.zeros(4)
        reference = None if kind in dpo.REFERENCE_FREE else object()
        losses, values = dpo.pair_losses(Uniform(), reference, batch, args)
        if reference is None:
            expected = dpo.reference_free_loss(*averages, beta=0.5, loss_type=kind, gamma=1.0)
        else:
            expected = dpo.preference_loss(*sums, *counts, beta=0.5, loss_type=kind)
        torch.testing.assert_close(losses, expected)
        torch.testing.assert_close(values["logps/chosen"], sums[0])
        logits, mask = values["logits/rejected"]
        torch.testing.assert_close((logits * mask).sum(1) / mask.sum(1), averages[1])


def test_numbers_of_labelled_answers_are_those_of_the_learned_tokens():
    kto = load("kto")
    columns = {
        "row": [1, 2],
        "prompt_ids": [[1, 2], [3]],
        "chosen_ids": [[10, 20, 30], []],
        "rejected_ids": [[40, 50], [60, 70]],
        "chosen_loss_mask": [[True, False, True], []],
        "rejected_loss_mask": [[True, True], [False, True]],
    }
    batch = kto.collate(columns, Packer(torch.device("cpu"), share=True))
    logps = Uniform()(batch)["logps"].sum(1) * -1000
    assert logps.round().tolist() == [40, 90, 70]
    reference = types.SimpleNamespace(logps=lambda batch: torch.zeros(3, 1))
    _, values = kto.answer_losses(Uniform(), reference, batch, 0.25, kto.Args(beta=0.5))
    for tag, expected in {"chosen": [-0.02], "rejected": [-0.045, -0.035]}.items():
        rewards, is_of_tag = values[f"rewards/{tag}"]
        assert rewards[is_of_tag].tolist() == pytest.approx(expected)
    other = kto.with_prompts(columns, {"prompt_ids": [[1, 2, 3], [4]]}, max_length=5)
    assert other["chosen_loss_mask"] == [[True, False], []]


@pytest.mark.parametrize("last", [message("assistant", "It is "), CALL])
def test_a_prompt_that_ends_with_the_assistant_is_refused(last):
    """A template would open a second turn after it."""
    tokenizer = templates.tokenizer("qwen2_5")
    row = {"prompt": [ASK, last], "chosen": [NOON], "rejected": [NO]}
    labelled = {"prompt": [ASK, last], "completion": "noon.", "label": 1}
    for function, given, *settings in (
        (formats.preference_row, row),
        (prompts.prompt_row, row, 8),
        (formats.labelled_row, labelled),
        (sft_row, labelled | {"label": None}, "assistant"),
    ):
        with pytest.raises(BadRow, match="the prompt ends with an assistant message"):
            function(given, tokenizer, LONG, *settings)


def test_two_messages_of_the_assistant_that_no_column_cuts_stay_two():
    tokenizer = templates.tokenizer("qwen2_5")
    both = [ASK, message("assistant", "One."), NOON]
    row = formats.preference_row({"chosen": both, "rejected": [*both[:2], NO]}, tokenizer, LONG)
    text = tokenizer.apply_chat_template(both, tokenize=False)
    assert tokenizer.decode(row["prompt_ids"] + row["chosen_ids"]) == text.removesuffix("\n")
    assert tokenizer.decode(row["prompt_ids"]).endswith("<|im_start|>assistant\n")


def test_transcripts_that_differ_before_the_last_turn_become_turns():
    tokenizer = templates.tokenizer("qwen2_5")
    row = {"rejected": "\n\nHuman: Why?\n\nAssistant: No."}
    row["chosen"] = "\n\nHuman: Why?\n\nAssistant: So.\n\nHuman: And?\n\nAssistant: Noon."
    found = formats.preference_row(row, tokenizer, LONG, strings_as_messages=True)
    learned = targets_of(found["chosen_ids"], found["chosen_loss_mask"])
    assert tokenizer.decode(learned) == "So.<|im_end|>Noon.<|im_end|>"
    assert "<|im_start|>user\nAnd?<|im_end|>" in tokenizer.decode(found["chosen_ids"])
    assert tokenizer.decode(found["rejected_ids"]) == "No.<|im_end|>"
    why = left_out(formats.preference_row, row, tokenizer, LONG)
    assert "transcripts that differ before the last answer" in why
    row["chosen"] = row["chosen"].removesuffix("\n\nAssistant: Noon.")
    why = left_out(formats.preference_row, row, tokenizer, LONG, strings_as_messages=True)
    assert why == "answer that does not end with an assistant message"


def test_many_spelled_ends_are_taken_off_at_once():
    """A pattern of two equal alternatives would take minutes."""
    tokenizer = templates.tokenizer("qwen2_5")
    many = "<|im_end|>" * 60
    for content, expected in ((f"4{many} \n", "4"), (f"{many} 4", f"{many} 4")):
        written = rendering.to_write(tokenizer, message("assistant", content))
        assert written["content"] == expected


def test_after_a_prompt_that_the_template_writes_as_nothing():
    """Nothing predicts the first token of an answer: no log-prob of it is asked for."""
    tokenizer = copy.deepcopy(templates.tokenizer("qwen2_5"))
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'system' %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    row = {"prompt": [message("system", "Be brief.")]}
    row |= {"chosen": [NOON], "rejected": [message("assistant", "It is.")]}
    read = formats.preference_row(row, tokenizer, LONG)
    assert read["prompt_ids"] == []
    for kind, text in (("chosen", "Noon."), ("rejected", "It is.")):
        ids = read[f"{kind}_ids"]
        assert tokenizer.decode(ids) == f"{text}<|im_end|>"
        assert read[f"{kind}_loss_mask"] == [False] + [True] * (len(ids) - 1)
    batch = Packer(torch.device("cpu")).make_batch([[]], [ids], [read["rejected_loss_mask"]])
    assert batch["targets"].tolist() == ids[1:]
