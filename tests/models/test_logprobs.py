"""Log-probs, their gradients and statistics against the architecture's own logits.

For real architectures and delicate inputs.
"""

import types
import weakref

import pytest
import torch
from torch.utils.checkpoint import CheckpointError, checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from architectures import TEXT, build, config_of
from common import cpu
from common.shared_args import SharedArgs
from preference_recipes.models import architecture, checks, load, logprobs, onednn, packing
from preference_recipes.models.logprobs import ByChunks, LogProbJob, LogProbModel
from preference_recipes.models.packing import Packer
from runs import tiny_llama

CPU = torch.device("cpu")
ALONE = Packer(CPU)
SHARED = Packer(CPU, share=True)

# What checks read of an accelerator.
ON_CPU = types.SimpleNamespace(device=CPU, mixed_precision="no")
IN_BF16 = types.SimpleNamespace(device=CPU, mixed_precision="bf16")


def can_share(wrapper, max_length: int = 30) -> bool:
    return checks.can_share(ON_CPU, wrapper, max_length)


def batch():
    """Rows of 20, 9 and 14 tokens, padded on the right; the second half of each is scored."""
    torch.manual_seed(1)
    ids, scored = torch.zeros(3, 20, dtype=torch.long), torch.zeros(3, 20, dtype=torch.bool)
    for row, length in enumerate((20, 9, 14)):
        ids[row, :length] = torch.randint(3, 300, (length,))
        scored[row, length // 2 : length] = True
    return ids, scored


def own(model, ids, scored, temperature=1.0):
    """One row at a time, unpadded, from the model's own logits."""
    logps, means, hits = (torch.zeros(3, 20) for _ in range(3))
    for row in range(3):
        length = int(scored[row].nonzero().max()) + 1
        logits = model(ids[row : row + 1, :length], use_cache=False).logits[0, :-1].float()
        logits = logits / temperature
        target, mask = ids[row, 1:length], scored[row, 1:length]
        logps[row, 1:length] = logits.log_softmax(-1).gather(1, target[:, None])[:, 0] * mask
        means[row, 1:length] = logits.mean(-1) * mask
        hits[row, 1:length] = (logits.argmax(-1) == target) * mask
    return logps, means, hits


def test_two_answers_to_a_prompt_are_laid_out_as_the_module_shows_it():
    batch = SHARED.make_batch([[1, 2], [1, 2]], [[4, 5], [6]])
    inputs = batch.pop("inputs")
    mask = inputs.pop("attention_mask")
    assert {name: tensor.tolist() for name, tensor in inputs.items()} == {
        "input_ids": [[1, 2, 4, 5, 6]],
        "position_ids": [[0, 1, 2, 3, 2]],
    }
    seen = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    assert mask.int().tolist() == [[seen]]
    assert batch.pop("n_tokens") == 5
    assert {name: tensor.int().tolist() for name, tensor in batch.items()} == {
        "targets": [4, 5, 6],
        "predictors": [1, 2, 1],
        "last": [3, 4],
        "mask": [[1, 1], [1, 0]],
        "cells": [0, 1, 2],
    }


def test_rows_of_several_prompts():
    """The second row is padded, and its padding sees itself."""
    prompts = [[1, 2], [1, 2], [3], [7], [7]]
    batch = SHARED.make_batch(prompts, [[4, 5], [6, 8, 9], [6], [7], [8, 9]])
    assert batch["inputs"]["input_ids"].tolist() == [[1, 2, 4, 5, 6, 8, 9], [7, 7, 8, 9, 3, 6, 0]]
    assert batch["inputs"]["position_ids"].tolist() == [
        [0, 1, 2, 3, 2, 3, 4],
        [0, 1, 1, 2, 0, 1, 0],
    ]
    mask = batch["inputs"]["attention_mask"]
    assert mask.shape == (2, 1, 7, 7)
    assert mask[1, 0, 4:].int().tolist() == [
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]
    assert batch["n_tokens"] == 13 and batch["last"].tolist() == [3, 6, 12, 8, 10]
    assert batch["predictors"].tolist() == [1, 2, 1, 4, 5, 11, 7, 7, 9]


def test_padded_rows_begin_with_the_longest():
    batch = ALONE.make_batch([[1, 2], [3]], [[4, 5], [6, 7, 8, 9]])
    assert {name: tensor.tolist() for name, tensor in batch["inputs"].items()} == {
        "input_ids": [[3, 6, 7, 8, 9], [1, 2, 4, 5, 0]]
    }
    assert batch["predictors"].tolist() == [6, 7, 0, 1, 2, 3]
    assert batch["last"].tolist() == [8, 4] and batch["cells"].tolist() == [0, 1, 4, 5, 6, 7]


def test_the_first_token_after_an_empty_prompt_is_no_target():
    for scored in (None, [[True], [True, False]]):
        with pytest.raises(ValueError, match="answer 1 has an empty prompt"):
            SHARED.make_batch([[5], []], [[6], [7, 8]], scored)
    batch = SHARED.make_batch([[5], []], [[6], [7, 8]], [[True], [False, True]])
    assert batch["targets"].tolist() == [6, 8]


def test_without_any_target_there_are_log_probs_of_zero():
    """Each episode may consist of what an environment wrote."""
    batch = SHARED.make_batch([[5], [5]], [[6], [7, 8]], [[False], [False, False]])
    assert [batch[name].dtype for name in ("targets", "predictors")] == [torch.int64] * 2
    logps = LogProbModel(build("llama"))(batch)["logps"]
    assert logps.tolist() == [[0, 0], [0, 0]]
    logps.sum().backward()


def changed_logits(change):
    """A model whose forward changes its logits once more."""
    model = build("llama")
    forward = model.forward

    def changed(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = change(out.logits)
        return out

    model.forward = changed
    return model


@pytest.mark.parametrize(
    "change",
    [lambda logits: logits.roll(1, -1), lambda logits: logits[..., :-1], lambda logits: logits**3],
)
def test_an_architecture_that_changes_its_logits_otherwise_is_refused(change):
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM: its logits.*not supported yet"):
        LogProbModel(changed_logits(change))


@pytest.mark.parametrize("multiplier, softcap", [(2.0, 0.0), (0.3, 0.0), (1.0, 30.0), (0.3, 7.0)])
def test_scale_and_soft_cap_are_read_from_the_forward(multiplier, softcap):
    def change(logits):
        scaled = logits * multiplier
        return torch.tanh(scaled / softcap) * softcap if softcap else scaled

    wrapper = LogProbModel(changed_logits(change))
    assert (wrapper.multiplier, wrapper.softcap) == pytest.approx((multiplier, softcap), rel=1e-7)
    checks.check_logprobs(ON_CPU, wrapper, list(range(3, 19)))


@pytest.mark.parametrize("multiplier, softcap", [(1.001, 0.0), (1.0, 100.0)])
def test_in_fp32_log_probs_may_differ_by_rounding_alone(multiplier, softcap):
    """Of log-probs of up to 8 these miss a few hundredths: half precision would excuse them."""
    wrapper = LogProbModel(build("llama"))
    wrapper.multiplier, wrapper.softcap = multiplier, softcap
    with pytest.raises(ValueError, match=r"differ from its own logits.*not supported yet"):
        checks.check_logprobs(ON_CPU, wrapper, list(range(3, 19)))
    with torch.autocast("cpu", torch.bfloat16):
        checks.check_logprobs(IN_BF16, wrapper, list(range(3, 19)))


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_head_under_half_precision(dtype, softcap, monkeypatch):
    """What a GPU computes of halves: logits and log-probs to the digits of fp32, gradients to those of the half."""
    torch.manual_seed(0)
    shapes = (23, 16), (300, 16), (300,)
    hidden, weight, bias = (torch.randn(shape).to(dtype) for shape in shapes)
    targets, weights = torch.randint(300, (23,)), torch.rand(23)
    monkeypatch.setattr(logprobs, "product_dtype", lambda hidden: hidden.dtype)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 300 * 7)
    job = LogProbJob(targets, 0.7, softcap)
    raw = (hidden.double() @ weight.double().T + bias.double()).requires_grad_()
    exact = softcap * torch.tanh(0.7 * raw / softcap) if softcap else 0.7 * raw
    exact_logps = exact.log_softmax(-1)
    logits = job.read(slice(None), hidden, weight, bias)
    torch.testing.assert_close(logits.double(), exact, rtol=1e-6, atol=2e-6)
    found_logps, *_ = job.values(slice(None), logits)
    assert found_logps.dtype == torch.float32
    expected_logps = exact_logps.gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(found_logps.double(), expected_logps, rtol=1e-6, atol=1e-6)
    (exact_logps.gather(1, targets[:, None]).squeeze(1) * weights).sum().backward()
    learned = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    (logps,) = ByChunks.apply(*learned, job)
    ours = torch.autograd.grad((logps * weights).sum(), learned)
    exact = raw.grad @ weight.double(), raw.grad.T @ hidden.double(), raw.grad.sum(0)
    for grad, expected in zip(ours, exact):
        assert (grad.double() - expected).norm() <= 2 * torch.finfo(dtype).eps * expected.norm()


def test_no_logits_of_the_whole_sequence_exist(monkeypatch):
    """The largest tensor of forward and backward is a chunk: 50 positions x 20,000 entries never stand at once."""
    hidden = torch.randn(50, 8, requires_grad=True)
    weight = torch.randn(20_000, 8, requires_grad=True)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            leaves = torch.utils._pytree.tree_leaves(out)
            sizes.extend(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
            return out

    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 20_000 * 10)
    with Watch():
        job = LogProbJob(torch.arange(50), extras=tuple(logprobs.EXTRAS))
        logps, *_ = ByChunks.apply(hidden, weight, None, job)
        logps.sum().backward()
    assert max(sizes) == 20_000 * 10


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
        rows, length = SHARED.lay_out(prompts, [[6] * answer for answer in answers])
        return len(rows), length

    assert shape(10, *[300] * 16) == (16, 310) and shape(300, *[10] * 16) == (1, 460)
    assert shape(100, 100, 100) == (1, 300)
    monkeypatch.setattr(packing, "MOST_MASK", 460**2)
    assert shape(400, 20, 30, 10) == (1, 460)
    monkeypatch.setattr(packing, "MOST_MASK", 460**2 - 1)
    assert shape(400, 20, 30, 10) == (3, 430)


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


@pytest.fixture
def products():
    """What `use_onednn` sets for the whole process, as it is without it."""
    setting, attention = torch.backends.mkldnn.matmul, AttentionInterface()
    setting.fp32_precision = "ieee"
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    return setting, attention


def test_products_of_a_wide_model_are_fp32(products, tokenizer, tmp_path):
    setting, attention = products
    load.causal_lm(str(tiny_llama(tmp_path / "narrow", hidden_size=128)), tokenizer, SharedArgs())
    assert (setting.fp32_precision, attention["sdpa"]) == ("ieee", sdpa_attention_forward)
    load.causal_lm(str(tiny_llama(tmp_path / "wide", hidden_size=192)), tokenizer, SharedArgs())
    asked = setting.fp32_precision == "bf16"
    assert asked == (attention["sdpa"] is onednn.attention_by_mkl)
    torch.manual_seed(0)
    for rows, length in ((3, 150), (700, 1)):
        shapes = (rows, length, 256), (512, 256), (rows, length, 512)
        x, weight, grad = (torch.randn(shape) for shape in shapes)
        found, exact = [], []
        for results, dtype in (found, torch.float32), (exact, torch.float64):
            inputs = [value.to(dtype, copy=True).requires_grad_() for value in (x, weight)]
            out = torch.nn.functional.linear(*inputs)
            out.backward(grad.to(dtype))
            results += [out.detach(), *(value.grad for value in inputs)]
        for one, other in zip(found, exact):  # bf16 would be 3e-3 apart, tf32 4e-4
            assert ((one - other).norm() / other.norm()).item() < 1e-6
    if not asked:  # where a CPU makes use of the permission it must have been taken back
        setting.fp32_precision = "bf16"
        assert (torch.full((256, 256), 1 + 2**-12) @ torch.eye(256)).min() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_on_a_cpu_are_clipped_by_their_exact_norm(dtype):
    """Most of the numbers are so small that a sum of squares in fp32 does not grow by them."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (2_500_000, 30)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(dtype)
        parameter.grad[10_000:] *= 0.01
    before = [parameter.grad.double() for parameter in parameters]
    expected = torch.cat(before).norm().item()

    assert float(cpu.clip_by_exact_norm(parameters, 2.0)) == pytest.approx(expected, rel=1e-12)
    rounding = torch.finfo(dtype).eps
    for parameter, gradient in zip(parameters, before):
        assert parameter.grad.dtype == dtype
        clipped = gradient * (2.0 / expected)
        assert (parameter.grad.double() - clipped).norm() <= rounding * clipped.norm()


def test_attention_is_computed_by_mkl_forward_and_backward(products, monkeypatch):
    """Each gradient, also where only keys have one: adapters may be on `k_proj` alone."""
    setting, _ = products
    setting.fp32_precision = "bf16"
    asked = []  # whose products, at the kernel forward and backward
    attend = sdpa_attention_forward

    def noted(*args, **kwargs):
        output, weights = attend(*args, **kwargs)
        asked.append(setting.fp32_precision)
        output.register_hook(lambda gradient: asked.append(setting.fp32_precision))
        return output, weights

    monkeypatch.setattr(onednn, "sdpa_attention_forward", noted)
    torch.manual_seed(0)
    states = torch.randn(3, 2, 4, 40, 16)
    module = types.SimpleNamespace(is_causal=True, training=True)
    for learned in ([True, True, True], [False, True, False]):
        inputs = [each.clone().requires_grad_(flag) for each, flag in zip(states, learned)]
        found, _ = onednn.attention_by_mkl(module, *inputs, None)
        found.square().sum().backward()
        exact = [each.double().requires_grad_(flag) for each, flag in zip(states, learned)]
        scores = exact[0] @ exact[1].mT / 4
        scores = scores.masked_fill(~torch.ones(40, 40).tril().bool(), -torch.inf)
        expected = (scores.softmax(-1) @ exact[2]).transpose(1, 2)
        expected.square().sum().backward()
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
        for one, other, flag in zip(inputs, exact, learned):
            assert (one.grad is not None) == flag
            if flag:
                torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-5)
    assert asked == ["ieee"] * 4 and setting.fp32_precision == "bf16"


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_attention_by_mkl_is_a_part_of_the_graph(products, monkeypatch, is_checkpointed):
    """Gradient checkpointing recomputes it once, and keeps nothing; a mask may be learned (Doge)."""
    products[0].fp32_precision = "bf16"
    queries = []
    attend = sdpa_attention_forward

    def noted(module, query, *args, **kwargs):
        queries.append(weakref.ref(query))
        return attend(module, query, *args, **kwargs)

    monkeypatch.setattr(onednn, "sdpa_attention_forward", noted)
    module = types.SimpleNamespace(is_causal=True, training=True)

    def layer(states: torch.Tensor, attention) -> torch.Tensor:
        mask = states.mean(-1)[:, :, None]
        output, _ = attention(module, states * 2, states, states.square(), mask)
        return output.square()

    torch.manual_seed(0)
    states = torch.randn(2, 4, 40, 16, requires_grad=True)
    exact = states.detach().double().requires_grad_()
    layer(exact, attend).sum().backward()
    if is_checkpointed:
        settings = dict(use_reentrant=False)
        output = checkpoint(layer, states, onednn.attention_by_mkl, **settings)
        assert [query() for query in queries] == [None]
    else:
        output = layer(states, onednn.attention_by_mkl)
    loss = output.sum()
    for times in (1, 2):  # a graph that is retained may be used again
        loss.backward(retain_graph=times == 1)
        torch.testing.assert_close(states.grad.double(), times * exact.grad, rtol=1e-4, atol=1e-3)
        assert len(queries) == 1 + times * is_checkpointed


@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_of_one_token_is_attention(products, is_masked):
    """Of the keys that several heads share no copies are made, and the products are MKL's."""
    setting, _ = products
    setting.fp32_precision = "bf16"
    torch.manual_seed(0)
    query = torch.randn(3, 6, 1, 16)
    key, value = torch.randn(2, 3, 2, 40, 16)
    sees = torch.ones(3, 1, 1, 40, dtype=torch.bool)
    sees[0, ..., :7] = not is_masked
    module = types.SimpleNamespace(is_causal=True, training=False, num_key_value_groups=3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found, _ = onednn.attention_by_mkl(module, query, key, value, sees if is_masked else None)
    assert setting.fp32_precision == "bf16"
    called = {event.name for event in profile.events()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in called
    assert not called & {"aten::repeat_interleave", "aten::expand_as"}
    keys, values = (each.double().repeat_interleave(3, 1) for each in (key, value))
    scores = (query.double() @ keys.mT / 4).masked_fill(~sees, -torch.inf)
    expected = (scores.softmax(-1) @ values).transpose(1, 2)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_half_products_on_a_cpu_are_recomputed_as_they_were():
    """torch leaves its function modes in a backward pass: `--gradient_checkpointing` ended with an error of torch."""
    query = torch.randn(1, 2, 5, 8, dtype=torch.bfloat16)
    weight = torch.randn(8, 8, dtype=torch.bfloat16)

    def gradient(compute) -> torch.Tensor:
        inputs = query.clone().requires_grad_()
        with cpu.HalfProductsInFp32():
            compute(inputs).sum().backward()
        return inputs.grad

    def attend(inputs: torch.Tensor) -> torch.Tensor:
        values = torch.nn.functional.linear(inputs, weight)
        return torch.nn.functional.scaled_dot_product_attention(inputs, inputs, values)

    def again(inputs: torch.Tensor) -> torch.Tensor:
        contexts = cpu.contexts_of_checkpoint
        return checkpoint(attend, inputs, use_reentrant=False, context_fn=contexts)

    assert torch.equal(gradient(again), gradient(attend))
    with pytest.raises(CheckpointError):
        gradient(lambda inputs: checkpoint(attend, inputs, use_reentrant=False))
