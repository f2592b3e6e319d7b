"""Prompts and answers as rows: where each token stands and what it sees, and whether prompts are shared.

That shared rows give the log-probs of each answer alone is in test_architectures.py, for every architecture.
"""

import itertools
import types

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from architectures import TEXT, build, config_of
from preference_recipes.models import checks, packing, shared_attention
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer
from preference_recipes.models.shared_attention import SharedMask

CPU = torch.device("cpu")
UNSHARED_ROWS = Packer(CPU)
SHARED = Packer(CPU, share=True)
# What checks read of an accelerator.
ON_CPU = types.SimpleNamespace(device=CPU, mixed_precision="no")


def can_share(wrapper, max_length: int = 30) -> bool:
    return checks.can_share(ON_CPU, wrapper, max_length)


def lists(tensors: dict) -> dict[str, list]:
    return {name: tensor.int().tolist() for name, tensor in tensors.items()}


# ============================================================ where tokens stand


def seen_by(mask: torch.Tensor) -> list[list[int]]:
    """Returns which keys (columns) each query (row) gives a weight, when all scores are 0."""
    length = mask.shape[-1]
    zeros = torch.zeros(1, 1, length, 8)
    one_each = torch.eye(length)[None, None]
    weights = functional.scaled_dot_product_attention(zeros, zeros, one_each, attn_mask=mask)
    return (weights[0, 0] > 0).int().tolist()


def test_several_prompts_form_one_row():
    """Answers stand after their prompt. None of them sees another prompt."""
    prompts = [[1, 2], [7], [1, 2], [3], [7]]
    batch = SHARED.make_batch(prompts, [[4, 5], [7], [6, 8, 9], [6], [8, 9]])
    seen = seen_by(batch["inputs"].pop("attention_mask"))
    assert lists(batch.pop("inputs")) == {
        "input_ids": [[1, 2, 4, 5, 6, 8, 9, 7, 7, 8, 9, 3, 6]],
        "position_ids": [[0, 1, 2, 3, 2, 3, 4, 0, 1, 1, 2, 0, 1]],
    }
    visible = [[index for index, is_seen in enumerate(keys) if is_seen] for keys in seen]
    assert visible[:7] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 4],
        [0, 1, 4, 5],
        [0, 1, 4, 5, 6],
    ]
    assert visible[7:] == [[7], [7, 8], [7, 9], [7, 9, 10], [11], [11, 12]]
    assert batch.pop("n_tokens") == 13
    assert lists(batch) == {
        "targets": [4, 5, 7, 6, 8, 9, 6, 8, 9],
        "predictor_index": [1, 2, 7, 1, 4, 5, 11, 7, 9],
        "last_token_index": [3, 8, 6, 12, 10],
        "loss_mask": [[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]],
        "target_slots": [0, 1, 3, 6, 7, 8, 9, 12, 13],
    }


@pytest.mark.parametrize("heads, blocks", [(1, 1), (3, 1), (3, 2), (1, 4)])
def test_attention_of_a_shared_row_is_that_of_a_mask_over_the_whole_row(heads, blocks, monkeypatch):
    """Also its gradients, and where queries share heads of keys; prompts and answers may be empty."""
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(shared_attention, "BLOCK_COST", {"cpu": {1: 1000, 2: 100, 4: 0}[blocks]})
    mask = SharedMask.make([(5, [3, 7, 1]), (0, [4]), (9, [2, 2]), (2, [0])], CPU)
    assert len(mask.blocks) == blocks
    length = 5 + 3 + 7 + 1 + 4 + 9 + 2 + 2 + 2
    assert mask.shape == (1, 1, length, length) and mask.untyped_storage().nbytes() == 1
    whole = torch.tensor(seen_by(mask), dtype=torch.bool)
    assert whole.sum() == 15 + (15 + 6) + (35 + 28) + (5 + 1) + 10 + 45 + 2 * (18 + 3) + 3
    found = []
    for attn_mask in (mask, mask.detach(), whole):  # ZeRO-3 detaches it
        shapes = (1, 2 * heads, length, 4), (1, 2, length, 4), (1, 2, length, 4)
        generator.manual_seed(1)
        states = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
        states = [tensor.requires_grad_() for tensor in states]
        output = functional.scaled_dot_product_attention(
            *states, attn_mask=attn_mask, scale=0.7, enable_gqa=heads > 1
        )
        output.square().sum().backward()
        found.append([output, *(tensor.grad for tensor in states)])
    torch.testing.assert_close(found[:2], [found[2]] * 2, rtol=1e-12, atol=1e-12)


def test_prompts_and_answers_of_unlike_lengths_are_computed_apart():
    """Padded to the longest, eight real pairs took more products than a mask over the whole row."""
    lengths = (
        "729 11 41, 360 222 469, 235 15 293, 325 73 49, 300 68 64, 234 5 116, 229 44 70, 203 8 145"
    )
    pairs = [list(map(int, pair.split())) for pair in lengths.split(",")]
    groups = [(prompt, answers) for prompt, *answers in pairs]
    needed = sum(prompt**2 // 2 + 2 * max(pair) * (prompt + max(pair)) for prompt, pair in groups)
    found = {}
    for name in ("cpu", "cuda"):
        blocks = shared_attention.split(groups, torch.device(name))
        assert sorted(itertools.chain(*blocks)) == list(range(8))
        found[name] = sum(shared_attention.cost([groups[n] for n in block]) for block in blocks)
    assert needed == 2_012_432 and found["cpu"] < 1.05 * needed and found["cuda"] < 5 * needed
    same = shared_attention.split([(300, [50, 50])] * 6, torch.device("cpu"))
    assert same == [list(range(6))]


def test_padded_rows_begin_with_the_longest():
    batch = UNSHARED_ROWS.make_batch([[1, 2], [3]], [[4, 5], [6, 7, 8, 9]])
    assert lists(batch["inputs"]) == {"input_ids": [[3, 6, 7, 8, 9], [1, 2, 4, 5, 0]]}
    assert batch["n_tokens"] == 9
    assert batch["predictor_index"].tolist() == [6, 7, 0, 1, 2, 3]
    assert batch["last_token_index"].tolist() == [8, 4]
    assert batch["target_slots"].tolist() == [0, 1, 4, 5, 6, 7]


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
    """A convolution carries one answer into the next; Falcon counts positions from the mask."""
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
    """Not two answers of 9,000 tokens to a prompt of 10: the mask hides half of their attention."""

    def shape(prompt: int, *answers: int) -> tuple[int, ...]:
        prompts = [[5] * prompt] * len(answers)
        return tuple(
            SHARED.make_batch(prompts, [[6] * n for n in answers])["inputs"]["input_ids"].shape
        )

    assert shape(10, 9000, 9000) == (2, 9010) and shape(9000, 10, 10) == (1, 9020)
    assert shape(10, *[300] * 16) == (16, 310) and shape(100, 100, 100) == (1, 300)
    for most, expected in ((3 * 30 * 430, (1, 460)), (3 * 30 * 430 - 1, (3, 430))):
        monkeypatch.setattr(packing, "MAX_MASK", most)
        assert shape(400, 20, 30, 10) == expected
