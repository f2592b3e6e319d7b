"""Long rows: what a mask may take, when sharing pays in a model, and packing for attention that takes no mask."""

import runpy

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, modeling_flash_attention_utils

import common
from architectures import build
from preference_recipes.models import architecture, checks, packing
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer
from runs import recipe
from test_logprobs import ALONE, CPU, ON_CPU, SHARED, can_pack

GIB = 2**30


def peak_of(function) -> int:
    """The most bytes that this process's memory grows by while a function runs."""

    def memory(field: str) -> int:
        with open("/proc/self/status") as file:
            (line,) = [line for line in file if line.startswith(field)]
        return 1024 * int(line.split()[1])

    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forgets the peak until now
    before = memory("VmRSS")
    function()
    return memory("VmHWM") - before


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


@pytest.mark.parametrize("prompt_length, is_shared", [(15_000, True), (32_000, False)])
def test_a_long_prompt_takes_half_a_gib_at_most(prompt_length, is_shared):
    prompts, answers = numbered([(prompt_length, [100, 120])])
    made = []
    peak = peak_of(lambda: made.append(SHARED.make_batch(prompts, answers)))
    inputs = made[0]["inputs"]
    assert inputs["input_ids"].shape[0] == (1 if is_shared else 2)
    assert ("attention_mask" in inputs) == is_shared
    assert peak < 0.5 * GIB


def test_a_mask_computed_in_parts_is_the_whole_one(monkeypatch):
    prompts, answers = numbered([(9, [5, 3]), (4, [6]), (1, [2, 2, 2])])
    layout = packing.lay_out(SHARED.arrange(prompts, answers))
    pieces, of_prompts = torch.from_numpy(layout.pieces), torch.from_numpy(layout.prompts)
    key, query = pieces[:, None, None, :], pieces[:, None, :, None]
    whole = ((key == query) | (key == of_prompts[:, None, :, None])).tril()
    for at_once in (1, 100, 10**6):
        monkeypatch.setattr(packing, "MASK_AT_ONCE", at_once)
        assert packing.attention_mask(pieces, of_prompts).equal(whole)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 autocast"])
def test_all_layers_share_one_mask(precision, monkeypatch):
    """What the backward pass keeps does not grow with the layers, and no log-prob or gradient changes by a bit."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    wrapper = LogProbModel(build("llama", num_hidden_layers=5, max_position_embeddings=1000)).to(
        dtype
    )
    prompts, answers = numbered([(90, [20, 17, 20, 23])])
    batch = SHARED.make_batch(prompts, answers)
    *_, length = batch["inputs"]["attention_mask"].shape
    assert batch["tokens"] == 90 + 20 + 17 + 20 + 23

    def learn() -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
        masks = {}

        def keep(tensor):
            if tensor.shape[-2:] == (length, length):
                masks[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        wrapper.zero_grad()
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16 autocast")
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
            logps = wrapper(batch)["logps"]
        logps.sum().backward()
        return [logps, *(parameter.grad for parameter in wrapper.parameters())], masks

    found, masks = learn()
    (mask,) = masks.values()
    # A kernel on a GPU copies masks of other strides.
    assert length % 8 and all(stride % 8 == 0 for stride in mask.stride()[:-1])
    monkeypatch.setattr(architecture, "as_numbers", lambda model, mask: mask)
    expected, masks = learn()
    assert len(masks) == 5
    assert all(map(torch.equal, found, expected))


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


# ============================================================ what attention costs
def without_weights(**settings) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))


def test_the_row_length_at_which_attention_equals_the_rest():
    """By hand: the numbers in the weights of a layer, over those of a layer's queries."""
    of_7b = without_weights(model_type="llama")  # transformers' default is Llama 2 7B
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    expected = (32 * layer + 4096) / (32 * 4096)
    assert architecture.attention_equals_rest([of_7b]) == round(expected) == 49410
    mixture = without_weights(
        model_type="mixtral", num_hidden_layers=2, hidden_size=64, intermediate_size=128,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 2 / 8 * 8 * 3 * 64 * 128 + 8 * 64 + 2 * 64
    assert architecture.attention_equals_rest([mixture]) == round((2 * layer + 64) / (2 * 64))
    # Two models read the same rows: what all their layers take, over all their queries.
    both = (32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096 + 2 * layer + 64) / (
        32 * 4096 + 2 * 64
    )
    assert architecture.attention_equals_rest([of_7b, mixture]) == round(both)


def test_sharing_pays_in_a_large_model_where_it_does_not_in_a_small_one():
    """One row of 1600 tokens against two of 1200: 1600 * (2 * 1600 + e) = 2 * 1200 * (1200 + e) at e = 2800."""
    prompts, answers = numbered([(800, [400, 400])])
    rows = lambda equal: Packer(CPU, share=True, attention_equals_rest=equal).arrange(
        prompts, answers
    )
    assert len(rows(2500)) == 2 and len(rows(3000)) == 1


def test_the_models_that_read_the_rows_decide():
    wrapper = LogProbModel(build("llama")).eval()
    packer = checks.make_packer(ON_CPU, [wrapper, None], max_length=30, share=True)
    expected = architecture.attention_equals_rest([wrapper.model])
    assert packer.attention_equals_rest == expected == 290
    assert packer.share and not packer.varlen


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
    columns = {"input_ids": rows, "targets": targets}
    packed = sft["collate"](columns, varlen)
    assert packed["inputs"]["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 11]]
    assert packed["inputs"]["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert packed["inputs"]["max_length_q"] == 4
    padded = sft["collate"](columns, ALONE)
    wrapper = flash_model()
    with torch.no_grad():
        torch.testing.assert_close(wrapper(packed)["logps"], wrapper(padded)["logps"])
    assert "cu_seq_lens_q" not in sft["collate"](columns, SHARED)["inputs"]


def test_flash_attention_packs_by_lengths_alone_and_says_so(flash, capsys):
    common.print_once.cache_clear()
    wrapper = flash_model()
    assert can_pack(wrapper, varlen=True)
    assert capsys.readouterr().out == ""
    assert not can_pack(wrapper)
    said = capsys.readouterr().out
    assert "--attn_implementation flash_attention_2 each answer has a row of its own" in said
    assert not can_pack(LogProbModel(build("llama")).eval(), varlen=True)
    # A window would be the sequences' own, but longer rows are refused as ever.
    assert not can_pack(flash_model("mistral"), varlen=True)


def test_what_text_reaches_is_found_under_flash_attention(flash):
    """It does not run without values: sdpa takes its place while the run looks."""
    wrapper = flash_model()
    assert architecture.without_gradient(wrapper, 16) == set() and flash == []
    assert wrapper.config._attn_implementation == "flash_attention_2"
    wrapper.model.model.layers[1].unused = torch.nn.Linear(2, 2)
    found = architecture.without_gradient(wrapper, 16)
    assert {name.rpartition(".")[0] for name in found} == {"model.model.layers.1.unused"}


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
