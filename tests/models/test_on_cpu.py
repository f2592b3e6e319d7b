"""Products, attention and norms on a CPU are those of fp32, whichever library computes them; see `models/onednn.py`."""

import types
import weakref

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointError, checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common import cpu
from common.shared_args import SharedArgs
from preference_recipes.models import load, onednn
from runs import tiny_llama

TRAINED = types.SimpleNamespace(is_causal=True, training=True)


def exact_attention(query, keys, values, sees: torch.Tensor) -> torch.Tensor:
    """In fp64, as transformers lays it out; heads are of 16 numbers."""
    query, keys, values = (each.double() for each in (query, keys, values))
    scores = (query @ keys.mT / 4).masked_fill(~sees, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(1, 2)


@pytest.fixture
def setting():
    """What `use_onednn` sets for the whole process, as it is without it."""
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    return torch.backends.mkldnn.matmul


def watch_attention(monkeypatch, note) -> None:
    """Calls `note(query, output)` where MKL's attention calls torch's."""

    def watched(module, query, *args, **kwargs):
        output, weights = sdpa_attention_forward(module, query, *args, **kwargs)
        note(query, output)
        return output, weights

    monkeypatch.setattr(onednn, "sdpa_attention_forward", watched)


# ============================================================ products


def test_products_of_a_wide_model_are_fp32(setting, tokenizer, tmp_path):
    attention = AttentionInterface()
    load.causal_lm(str(tiny_llama(tmp_path / "narrow", hidden_size=128)), tokenizer, SharedArgs())
    assert (setting.fp32_precision, attention["sdpa"]) == ("ieee", sdpa_attention_forward)
    load.causal_lm(str(tiny_llama(tmp_path / "wide", hidden_size=192)), tokenizer, SharedArgs())
    asked = setting.fp32_precision == "bf16"
    assert asked == (attention["sdpa"] is onednn.attention_by_mkl)

    def results(dtype: torch.dtype, x, weight, grad) -> list[torch.Tensor]:
        inputs = [value.to(dtype, copy=True).requires_grad_() for value in (x, weight)]
        out = linear(*inputs)
        out.backward(grad.to(dtype))
        return [out.detach(), *(value.grad for value in inputs)]

    torch.manual_seed(0)
    for rows, length in ((3, 150), (700, 1)):
        shapes = (rows, length, 256), (512, 256), (rows, length, 512)
        values = [torch.randn(shape) for shape in shapes]
        for one, other in zip(results(torch.float32, *values), results(torch.float64, *values)):
            # bf16 would be 3e-3 apart, tf32 4e-4
            assert ((one - other).norm() / other.norm()).item() < 1e-6
    if not asked:  # where a CPU makes use of the permission it must have been taken back
        setting.fp32_precision = "bf16"
        assert (torch.full((256, 256), 1 + 2**-12) @ torch.eye(256)).min() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_clipped_by_their_exact_norm(dtype):
    """Most of the numbers are so small that a sum of squares in fp32 does not grow by them."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (2_500_000, 30)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(dtype)
        parameter.grad[10_000:] *= 0.01
    before = [parameter.grad.double() for parameter in parameters]
    expected = torch.cat(before).norm().item()
    assert float(cpu.clip_by_exact_norm(parameters, 2.0)) == pytest.approx(expected, rel=1e-12)
    for parameter, gradient in zip(parameters, before):
        assert parameter.grad.dtype == dtype
        clipped = gradient * (2.0 / expected)
        rounding = torch.finfo(dtype).eps * clipped.norm()
        assert (parameter.grad.double() - clipped).norm() <= rounding


def test_half_products_are_recomputed_as_they_were():
    """torch leaves its function modes in a backward pass: `--gradient_checkpointing` ended with an error of torch."""
    query = torch.randn(1, 2, 5, 8, dtype=torch.bfloat16)
    weight = torch.randn(8, 8, dtype=torch.bfloat16)

    def gradient(**how) -> torch.Tensor:
        inputs = query.clone().requires_grad_()
        with cpu.HalfProductsInFp32():
            output = (
                checkpoint(attend, inputs, use_reentrant=False, **how) if how else attend(inputs)
            )
            output.sum().backward()
        return inputs.grad

    def attend(inputs: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(inputs, inputs, linear(inputs, weight))

    assert torch.equal(gradient(context_fn=cpu.contexts_of_checkpoint), gradient())
    with pytest.raises(CheckpointError):
        gradient(preserve_rng_state=True)  # torch's default contexts


# ============================================================ attention by MKL


def test_attention_is_computed_by_mkl_forward_and_backward(setting, monkeypatch):
    """Each gradient, also where only keys have one: adapters may be on `k_proj` alone."""
    setting.fp32_precision = "bf16"
    asked = []  # whose products, at the kernel forward and backward

    def note(query, output):
        asked.append(setting.fp32_precision)
        output.register_hook(lambda gradient: asked.append(setting.fp32_precision))

    watch_attention(monkeypatch, note)
    torch.manual_seed(0)
    states = torch.randn(3, 2, 4, 40, 16)
    for learned in ([True, True, True], [False, True, False]):
        inputs = [each.clone().requires_grad_(flag) for each, flag in zip(states, learned)]
        found, _ = onednn.attention_by_mkl(TRAINED, *inputs, None)
        found.square().sum().backward()
        exact = [each.double().requires_grad_(flag) for each, flag in zip(states, learned)]
        expected = exact_attention(*exact, torch.ones(40, 40).tril().bool())
        expected.square().sum().backward()
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
        for one, other, flag in zip(inputs, exact, learned):
            assert (one.grad is not None) == flag
            if flag:
                torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-5)
    assert asked == ["ieee"] * 4 and setting.fp32_precision == "bf16"


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_attention_by_mkl_is_a_part_of_the_graph(setting, monkeypatch, is_checkpointed):
    """Gradient checkpointing recomputes it once, and keeps nothing; a mask may be learned (Doge)."""
    setting.fp32_precision = "bf16"
    queries = []
    watch_attention(monkeypatch, lambda query, output: queries.append(weakref.ref(query)))

    def layer(states: torch.Tensor, attention) -> torch.Tensor:
        mask = states.mean(-1)[:, :, None]
        output, _ = attention(TRAINED, states * 2, states, states.square(), mask)
        return output.square()

    torch.manual_seed(0)
    states = torch.randn(2, 4, 40, 16, requires_grad=True)
    exact = states.detach().double().requires_grad_()
    layer(exact, sdpa_attention_forward).sum().backward()
    if is_checkpointed:
        output = checkpoint(layer, states, onednn.attention_by_mkl, use_reentrant=False)
        assert [query() for query in queries] == [None]
    else:
        output = layer(states, onednn.attention_by_mkl)
    loss = output.sum()
    for times in (1, 2):  # a graph that is retained may be used again
        loss.backward(retain_graph=times == 1)
        torch.testing.assert_close(states.grad.double(), times * exact.grad, rtol=1e-4, atol=1e-3)
        assert len(queries) == 1 + times * is_checkpointed


@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_of_one_token_is_attention(setting, is_masked):
    """Of the keys that several heads share no copies are made, and the products are MKL's."""
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
    of_each_head = (each.repeat_interleave(3, 1) for each in (key, value))
    expected = exact_attention(query, *of_each_head, sees)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
