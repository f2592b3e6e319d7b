"""Log-probs of the output layer, by chunks and in half precision, and what is tried before training.

That they are those of an architecture's own logits, with their gradients, is in test_architectures.py.
"""

import types

import pytest
import torch
from transformers import AutoModelForCausalLM

from architectures import build
from preference_recipes.models import checks, logprobs, prepare
from preference_recipes.models.logprobs import ChunkedHead, LogProbJob, LogProbModel
from runs import ASSETS, code_of_page
from test_packing import CPU, ON_CPU

IN_BF16 = types.SimpleNamespace(device=CPU, mixed_precision="bf16")


def test_the_lines_of_the_page_run_and_give_the_log_probs_of_transformers(capsys):
    names = {}
    code = code_of_page("preference_recipes/models/README.md")
    exec(code.replace("assets/model", str(ASSETS / "model")), names)
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "model", dtype="float32")
    ids = torch.tensor([names["prompt"] + answer for answer in names["answers"]])
    logps = model(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    expected = logps[:, len(names["prompt"]) - 1 :]
    torch.testing.assert_close(names["logps"], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"the output layer is LogProbHead, only"):
        LogProbModel(names["model"].model)


# ============================================================ from the head's output to logits


def model_with(change) -> torch.nn.Module:
    """A model whose forward changes its logits once more."""
    model = build("llama")
    forward = model.forward

    def changed(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = change(output.logits)
        return output

    model.forward = changed
    return model


@pytest.mark.parametrize(
    "change",
    [lambda logits: logits.roll(1, -1), lambda logits: logits[..., :-1], lambda logits: logits**3],
)
def test_an_architecture_that_changes_its_logits_otherwise_is_refused(change):
    with pytest.raises(ValueError, match=r"^LlamaForCausalLM: its logits.*not supported yet"):
        LogProbModel(model_with(change))


@pytest.mark.parametrize("multiplier, softcap", [(2.0, 0.0), (0.3, 0.0), (1.0, 30.0), (0.3, 7.0)])
def test_scale_and_soft_cap_are_read_from_the_forward(multiplier, softcap):
    def change(logits):
        scaled = logits * multiplier
        return torch.tanh(scaled / softcap) * softcap if softcap else scaled

    wrapper = LogProbModel(model_with(change))
    assert (wrapper.multiplier, wrapper.softcap) == pytest.approx((multiplier, softcap), rel=1e-7)
    checks.check_logprobs(ON_CPU, wrapper)


# ============================================================ the output layer, by chunks


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_head_under_half_precision(dtype, softcap, monkeypatch):
    """What a GPU computes of halves: logits and log-probs to the digits of fp32, gradients to those of the half."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype) for shape in ((23, 16), (300, 16), (300,))]
    hidden, weight, bias = (tensor.double() for tensor in inputs)
    targets, weights = torch.randint(300, (23,)), torch.rand(23)
    raw = (hidden @ weight.T + bias).requires_grad_()
    exact = softcap * torch.tanh(0.7 * raw / softcap) if softcap else 0.7 * raw
    exact_logps = exact.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)

    monkeypatch.setattr(logprobs, "product_dtype", lambda hidden: hidden.dtype)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 300 * 7)
    job = LogProbJob(targets, 0.7, softcap)
    logits = job.forward_chunk(slice(None), *inputs)
    torch.testing.assert_close(logits.double(), exact, rtol=1e-6, atol=2e-6)
    found_logps, *_ = job.outputs(slice(None), logits)
    assert found_logps.dtype == torch.float32
    torch.testing.assert_close(found_logps.double(), exact_logps, rtol=1e-6, atol=1e-6)

    (exact_logps * weights).sum().backward()
    expected = raw.grad @ weight, raw.grad.T @ hidden, raw.grad.sum(0)
    learned = [tensor.clone().requires_grad_() for tensor in inputs]
    (logps,) = ChunkedHead.apply(*learned, job)
    for grad, of_fp64 in zip(torch.autograd.grad((logps * weights).sum(), learned), expected):
        assert (grad.double() - of_fp64).norm() <= 2 * torch.finfo(dtype).eps * of_fp64.norm()


def test_no_logits_of_the_whole_sequence_exist(monkeypatch):
    """The largest tensor of forward and backward is a chunk: 50 positions x 20,000 entries never stand at once."""
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            leaves = torch.utils._pytree.tree_leaves(out)
            sizes.extend(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
            return out

    hidden, weight = (torch.randn(rows, 8, requires_grad=True) for rows in (50, 20_000))
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 20_000 * 10)
    with Watch():
        job = LogProbJob(torch.arange(50), extra_outputs=tuple(logprobs.EXTRA_OUTPUTS))
        logps, *_ = ChunkedHead.apply(hidden, weight, None, job)
        logps.sum().backward()
    assert max(sizes) == 20_000 * 10


# ============================================================ what is tried before training


@pytest.mark.parametrize("multiplier, softcap", [(1.001, 0.0), (1.0, 100.0)])
def test_in_fp32_log_probs_may_differ_by_rounding_alone(multiplier, softcap):
    """Of log-probs of up to 8 these miss a few hundredths: half precision would excuse them."""
    wrapper = LogProbModel(build("llama"))
    wrapper.multiplier, wrapper.softcap = multiplier, softcap
    with pytest.raises(ValueError, match=r"differ from its own logits.*not supported yet"):
        checks.check_logprobs(ON_CPU, wrapper)
    with torch.autocast("cpu", torch.bfloat16):
        checks.check_logprobs(IN_BF16, wrapper)


@pytest.mark.parametrize("fails", [False, True])
def test_modes_come_back_as_they_were(fails):
    """Each module's own: some are frozen in evaluation mode while the others train."""
    model = build("llama").train()
    model.lm_head.eval()
    model.model.layers[0].eval()
    model.model.layers[0].mlp.train()
    before = [module.training for module in model.modules()]
    try:
        with prepare.evaluation_mode(model):
            assert not any(module.training for module in model.modules())
            assert not fails
    except AssertionError:
        assert fails
    assert len(set(before)) == 2 and [module.training for module in model.modules()] == before
