"""Long rows: what a mask may take, when sharing pays in a model, and packing for attention that takes no mask."""

import runpy

import pytest
import torch
import torch.nn.functional as F
from transformers import modeling_flash_attention_utils

from architectures import build
from preference_recipes.models import architecture, packing
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer
from runs import recipe
from test_logprobs import ALONE, CPU, SHARED


# ============================================================ the mask
def numbered(groups: list[tuple[int, list[int]]]):
    """Prompts and answers of these lengths, no two tokens alike modulo 290."""
    tokens = iter(range(10**6))
    some = lambda n: [3 + next(tokens) * 7 % 290 for _ in range(n)]
    prompts, answers = [], []
    for prompt_length, answer_lengths in groups:
        prompt = some(prompt_length)
        for length in answer_lengths:
            prompts.append(prompt)
            answers.append(some(length))
    return prompts, answers


def test_where_the_mask_would_be_too_large_log_probs_are_those_of_each_alone(monkeypatch):
    wrapper = LogProbModel(build("llama", max_position_embeddings=1000)).eval()
    prompts, answers = numbered([(400, [20, 30, 10])])
    with torch.no_grad():
        shared = wrapper(SHARED.make_batch(prompts, answers))["logps"]
        alone = wrapper(ALONE.make_batch(prompts, answers))["logps"]
        monkeypatch.setattr(packing, "MOST_MASK", 460**2)
        at_limit = SHARED.make_batch(prompts, answers)
        monkeypatch.setattr(packing, "MOST_MASK", 460**2 - 1)
        above = SHARED.make_batch(prompts, answers)
        assert at_limit["inputs"]["input_ids"].shape == (1, 460)
        assert above["inputs"]["input_ids"].shape == (3, 430)
        assert wrapper(above)["logps"].equal(alone)
    torch.testing.assert_close(shared, alone, rtol=1e-4, atol=1e-4)


# ============================================================ attention by lengths
@pytest.fixture
def flash(monkeypatch):
    """The functions of flash attention, computed by torch; `calls` names those that were used."""
    calls = []

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **_):
        calls.append("rows")
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(
            *heads_first, is_causal=causal, scale=softmax_scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, **_,
    ):  # fmt: skip
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert cu_seqlens_q[0] == 0 and cu_seqlens_q[-1] == len(q)
        assert cu_seqlens_q.diff().max() == max_seqlen_q == max_seqlen_k
        parts = []
        for start, end in zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist()[1:]):
            one = [x[None, start:end] for x in (q, k, v)]
            parts.append(flash_attn_func(*one, softmax_scale=softmax_scale, causal=causal)[0])
        calls[-len(parts) :] = [f"{len(parts)} lengths"]
        return torch.cat(parts)

    utils = modeling_flash_attention_utils
    functions = (flash_attn_func, flash_attn_varlen_func, None, None, None)
    process = utils._lazy_define_process_function(flash_attn_varlen_func)
    monkeypatch.setattr(
        utils, "lazy_import_flash_attention", lambda *_, **__: (functions, (process, dict))
    )
    return calls


def flash_model(name="llama", **changes) -> LogProbModel:
    wrapper = LogProbModel(build(name, **changes)).eval()
    wrapper.config._attn_implementation = "flash_attention_2"
    return wrapper


def test_flash_attention_reads_packed_sequences_as_each_alone(flash):
    """Log-probs and gradients; a single row without padding, through transformers' own code."""
    wrapper = flash_model()
    prompts, answers = numbered([(6, [4, 7]), (3, [9]), (5, [2])])
    found, gradients = {}, {}
    for pack in (False, True):
        flash.clear()
        packer = Packer(CPU, share=pack, varlen=True)
        batch = packer.make_batch(prompts, answers)
        wrapper.zero_grad()
        found[pack] = wrapper(batch)["logps"]
        assert flash == (["4 lengths"] if pack else ["rows"]) * 2
        (found[pack] * torch.linspace(-1, 1, 36).view(4, 9)).sum().backward()
        gradients[pack] = torch.cat([p.grad.flatten() for p in wrapper.parameters()])
    inputs = batch["inputs"]
    assert inputs["input_ids"].shape == (1, 6 + 4 + 6 + 7 + 3 + 9 + 5 + 2)
    assert "attention_mask" not in inputs
    assert inputs["cu_seq_lens_q"].tolist() == [0, 10, 23, 35, 42]
    assert batch["tokens"] == 42  # no prompt is shared
    torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=1e-4)
    assert (gradients[True] - gradients[False]).norm() <= 1e-5 * gradients[False].norm()


def test_sft_packs_for_flash_attention(flash):
    sft = runpy.run_path(str(recipe("sft")))
    varlen = Packer(CPU, share=True, varlen=True)
    rows = [[5, 6, 7, 8], [9, 10, 11]]
    targets = [[False, True, False, True], [False, True, True]]
    columns = {"input_ids": rows, "learned": targets}
    packed = sft["collate"](columns, varlen)
    assert packed["inputs"]["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 11]]
    assert packed["inputs"]["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert packed["inputs"]["max_length_q"] == 4
    padded = sft["collate"](columns, ALONE)
    wrapper = flash_model()
    with torch.no_grad():
        torch.testing.assert_close(wrapper(packed)["logps"], wrapper(padded)["logps"])
    assert "cu_seq_lens_q" not in sft["collate"](columns, SHARED)["inputs"]


class Noting(dict):
    """A dict that notes which keys are asked for by name, as that of ZeRO-3 gathers them."""

    def __init__(self, values):
        super().__init__(values)
        self.asked = []

    def __getitem__(self, name):
        self.asked.append(name)
        return super().__getitem__(name)


def test_the_dtype_of_a_mask_is_found_without_gathering_weights():
    """ZeRO-3 would gather them in a process that has a mask, and not in one that has none."""
    model = build("llama")
    embeddings = model.get_input_embeddings()
    embeddings._parameters = Noting(embeddings._parameters)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    assert architecture.as_numbers(model, mask).dtype == torch.float32
    assert embeddings._parameters.asked == []
    assert embeddings.weight is not None and embeddings._parameters.asked == ["weight"]
