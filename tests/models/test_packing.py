"""Prompts and answers as rows: where each token stands and what it sees, and whether prompts are shared.

That shared rows give the log-probs of each answer alone is in test_architectures.py, for every architecture.
"""

import types

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from architectures import TEXT, build, config_of
from preference_recipes.models import checks, packing
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer

CPU = torch.device("cpu")
UNBATCHABLE = Packer(CPU)
SHARED = Packer(CPU, share=True)
# What checks read of an accelerator.
ON_CPU = types.SimpleNamespace(device=CPU, mixed_precision="no")


def can_share(wrapper, max_length: int = 30) -> bool:
    return checks.can_share(ON_CPU, wrapper, max_length)


def lists(tensors: dict) -> dict[str, list]:
    return {name: tensor.int().tolist() for name, tensor in tensors.items()}


# ============================================================ where tokens stand


def test_two_answers_to_a_prompt_are_laid_out_as_the_module_shows_it():
    batch = SHARED.make_batch([[1, 2], [1, 2]], [[4, 5], [6]])
    seen = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    assert lists(batch.pop("inputs")) == {
        "input_ids": [[1, 2, 4, 5, 6]],
        "position_ids": [[0, 1, 2, 3, 2]],
        "attention_mask": [[seen]],
    }
    assert batch.pop("n_tokens") == 5
    assert lists(batch) == {
        "targets": [4, 5, 6],
        "predictor_index": [1, 2, 1],
        "last_token_index": [3, 4],
        "mask": [[1, 1], [1, 0]],
        "target_slots": [0, 1, 2],
    }


def test_rows_of_several_prompts():
    """The second row is padded, and its padding sees itself."""
    prompts = [[1, 2], [1, 2], [3], [7], [7]]
    batch = SHARED.make_batch(prompts, [[4, 5], [6, 8, 9], [6], [7], [8, 9]])
    mask = batch["inputs"].pop("attention_mask")
    assert lists(batch["inputs"]) == {
        "input_ids": [[1, 2, 4, 5, 6, 8, 9], [7, 7, 8, 9, 3, 6, 0]],
        "position_ids": [[0, 1, 2, 3, 2, 3, 4], [0, 1, 1, 2, 0, 1, 0]],
    }
    assert mask.shape == (2, 1, 7, 7)
    last_tokens = [[0, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1]]
    assert mask[1, 0, 4:].int().tolist() == last_tokens
    assert batch["n_tokens"] == 13 and batch["last_token_index"].tolist() == [3, 6, 12, 8, 10]
    assert batch["predictor_index"].tolist() == [1, 2, 1, 4, 5, 11, 7, 7, 9]


def test_padded_rows_begin_with_the_longest():
    batch = UNBATCHABLE.make_batch([[1, 2], [3]], [[4, 5], [6, 7, 8, 9]])
    assert lists(batch["inputs"]) == {"input_ids": [[3, 6, 7, 8, 9], [1, 2, 4, 5, 0]]}
    assert batch["predictor_index"].tolist() == [6, 7, 0, 1, 2, 3]
    assert batch["last_token_index"].tolist() == [8, 4] and batch["target_slots"].tolist() == [
        0,
        1,
        4,
        5,
        6,
        7,
    ]


def test_the_first_token_after_an_empty_prompt_is_no_target():
    for learned in (None, [[True], [True, False]]):
        with pytest.raises(ValueError, match="answer 1 has an empty prompt"):
            SHARED.make_batch([[5], []], [[6], [7, 8]], learned)
    batch = SHARED.make_batch([[5], []], [[6], [7, 8]], [[True], [False, True]])
    assert batch["targets"].tolist() == [6, 8]


def test_without_any_target_there_are_log_probs_of_zero():
    """Each episode may consist of what an environment wrote."""
    batch = SHARED.make_batch([[5], [5]], [[6], [7, 8]], [[False], [False, False]])
    assert [batch[name].dtype for name in ("targets", "predictor_index")] == [torch.int64] * 2
    logps = LogProbModel(build("llama"))(batch)["logps"]
    assert logps.tolist() == [[0, 0], [0, 0]]
    logps.sum().backward()


# ============================================================ whether prompts are shared


@pytest.mark.parametrize("name", ["lfm2", "falcon alibi"])
def test_where_something_else_passes_from_token_to_token_nothing_is_shared(name):
    """A convolution carries the first answer into the second, however little.

    Falcon counts positions from the mask.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name), attn_implementation="sdpa").eval()
    assert not can_share(LogProbModel(model))


@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk_size"])  # Mistral's; Llama 4's
def test_attention_of_a_part_of_longer_rows_shares_nothing(name):
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **TEXT, **{name: 50})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    wrapper = LogProbModel(model)
    assert can_share(wrapper, max_length=50) and not can_share(wrapper, max_length=51)


def test_prompts_are_shared_where_that_pays(monkeypatch):
    """Not sixteen answers of 300 tokens to a prompt of 10: fewer tokens, and 15 times the attention."""

    def shape(prompt: int, *answers: int) -> tuple[int, int]:
        prompts = [[5] * prompt] * len(answers)
        rows, length = SHARED.lay_out(prompts, [[6] * n for n in answers], [()] * len(answers))
        return len(rows), length

    assert shape(10, *[300] * 16) == (16, 310) and shape(300, *[10] * 16) == (1, 460)
    assert shape(100, 100, 100) == (1, 300)
    for largest_mask, expected in ((460**2, (1, 460)), (460**2 - 1, (3, 430))):
        monkeypatch.setattr(packing, "MAX_MASK", largest_mask)
        assert shape(400, 20, 30, 10) == expected
