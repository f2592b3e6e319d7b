"""The divergence of a student from its teacher: values and gradients against plain fp64."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

import recipes
from architectures import build
from plain_rollouts import coarsened
from preference_recipes.models import distillation, logprobs, packing
from preference_recipes.models.distillation import DistillJob, DistillModel, Head, TeacherOutput
from preference_recipes.models.logprobs import ChunkedHead

BETAS = (0.0, 0.1, 0.5, 1.0)
# Multiplier and soft cap of the student's logits, and of the teacher's.
FORMULAS = {"plain": ((1.0, 0.0), (1.0, 0.0)), "capped": ((0.7, 4.0), (1.4, 6.0))}


distill = recipes.load("distill")


def formula_of(beta: float | None) -> tuple[Callable, Callable]:
    """The recipe's `token_outputs` and `objective_gradient`; None: of sampled tokens."""
    args = distill.Args(loss_type="sampled" if beta is None else "divergence", beta=beta)
    return partial(distill.token_outputs, args=args), partial(distill.objective_gradient, args=args)


# ---------------------------------------------------------------------------------------------- a plain reference


def dense_logps(hidden, weight, bias, multiplier, softcap, temperature) -> torch.Tensor:
    logits = multiplier * (hidden @ weight.T + bias)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1)


def dense(student, teacher, targets, beta) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What `token_outputs` returns, by the definitions, from log-probs `[n, v]`."""
    kl = lambda one, other: (one.exp() * (one - other)).sum(-1)
    values = {
        "reverse_kl": kl(student, teacher),
        "forward_kl": kl(teacher, student),
        "entropy": -(student.exp() * student).sum(-1),
        "teacher_entropy": -(teacher.exp() * teacher).sum(-1),
        "agreement": (student.argmax(-1) == teacher.argmax(-1)).double(),
        "logps": student.gather(1, targets[:, None])[:, 0],
        "teacher_logps": teacher.gather(1, targets[:, None])[:, 0],
    }
    if beta is None:
        return values["logps"], values
    if beta in (0, 1):
        return values["reverse_kl" if beta else "forward_kl"], values
    mixture = ((1 - beta) * student.exp() + beta * teacher.exp()).log()
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture), values


def drawn(n=11, vocab_size=67, teacher_vocab_size=71, cut=61) -> dict:
    """Hidden states and output layers of a student and a wider teacher, padded to different sizes; fp32."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    return {
        "hidden": draw(n, 16),
        "weight": draw(vocab_size, 16) / 4,
        "bias": draw(vocab_size),
        "teacher_hidden": draw(n, 24),
        "teacher_weight": draw(teacher_vocab_size, 24) / 4,
        "teacher_bias": draw(teacher_vocab_size),
        "targets": torch.randint(cut, (n,), generator=generator),
        "weights": torch.rand(n, generator=generator) * (torch.arange(n) % 4 != 1),
    }


def top_output(teacher, targets, k: int) -> distillation.TopKTeacherOutput:
    """What a server tells of a teacher with these log-probs `[n, v]`."""
    logps, ids = teacher.topk(k)
    return distillation.TopKTeacherOutput(
        ids, logps, teacher.gather(1, targets[:, None])[:, 0], torch.arange(0)
    )


def ours(given: dict, formulas, beta, temperature, cut: int, k=None, is_autocast=False):
    """What the recipe gives of these tensors, and the gradients of hidden states, weight and bias."""
    (multiplier, softcap), of_teacher = formulas
    trained = [given[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")]
    of_teacher = [number / temperature for number in of_teacher]
    head = Head(given["teacher_weight"][:cut], given["teacher_bias"][:cut], *of_teacher)
    output = TeacherOutput(given["teacher_hidden"], head, torch.arange(0))
    if k:
        output = top_output(head.logps(given["teacher_hidden"])[0], given["targets"], k)
    of_student = (multiplier / temperature, softcap / temperature)
    job = DistillJob(given["targets"], *of_student, output, *formula_of(beta))
    hidden, weight, bias = trained
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        first, *others = ChunkedHead.apply(hidden, weight[:cut], bias[:cut], job)
    gradients = torch.autograd.grad((first * given["weights"]).sum(), trained)
    return first.detach(), dict(zip(job.names[1:], others)), gradients


def exact(given: dict, formulas, beta, temperature: float, cut: int, k: int | None = None):
    """The same by `dense` in fp64."""
    given = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
    trained = [given[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")]
    of_teacher = [given[f"teacher_{name}"] for name in ("hidden", "weight", "bias")]
    student, teacher = (
        dense_logps(hidden, weight[:cut], bias[:cut], *formula, temperature)
        for (hidden, weight, bias), formula in zip((trained, of_teacher), formulas)
    )
    first, others = dense(student, teacher, given["targets"], beta)
    if k and k < cut:
        top = teacher.topk(k).indices
        coarse = [coarsened(logps, top) for logps in (student, teacher)]
        of_coarse, values = dense(*coarse, torch.zeros_like(given["targets"]), beta)
        first = first if beta is None else of_coarse
        others |= {name: values[name] for name in ("reverse_kl", "forward_kl", "teacher_entropy")}
    gradients = torch.autograd.grad((first * given["weights"]).sum(), trained)
    return first.detach(), {name: value.detach() for name, value in others.items()}, gradients


def assert_close(found, expected, bound=1e-6):
    """Values up to the bound, of those above 1 as a share; gradients as a share of their norm."""
    (first, values, gradients), (exact_first, exact_values, exact_gradients) = found, expected
    assert first.dtype == torch.float32
    torch.testing.assert_close(first.double(), exact_first, rtol=bound, atol=bound)
    for name, value in exact_values.items():
        torch.testing.assert_close(values[name].double(), value, rtol=bound, atol=bound, msg=name)
    for gradient, exact_gradient in zip(gradients, exact_gradients):
        assert (gradient.double() - exact_gradient).norm() <= bound * exact_gradient.norm()


# ---------------------------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("beta", [*BETAS, None])
@pytest.mark.parametrize("k", [None, 1, 9, 61])
def test_values_and_gradients_are_those_of_plain_fp64(k, beta, temperature, formula, monkeypatch):
    """Chunks of 3 of 11 positions, some of which count nowhere; heads of 67 and 71 rows cut to 61."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 2 * 61 * 3)
    case = (drawn(), FORMULAS[formula], beta, temperature, 61, k)
    found = ours(*case)
    # Put together, the tokens' gradients are smaller than what is rounded of each.
    assert_close(found, exact(*case), bound=5e-6 if k else 1e-6)
    assert not any(found[2][place][61:].any() for place in (1, 2))  # what is cut off learns nothing


def test_chunks_are_computed_again_in_the_precision_of_the_forward_pass(monkeypatch):
    """On a GPU autocast halves its products, and does not reach the backward pass."""

    def product_dtype(hidden: torch.Tensor) -> torch.dtype:
        is_half = torch.is_autocast_enabled("cpu")
        return torch.get_autocast_dtype("cpu") if is_half else hidden.dtype

    for module in (logprobs, distillation):
        monkeypatch.setattr(module, "product_dtype", product_dtype, raising=False)
    found = []
    for positions in (3, 11):  # at 11 nothing is computed again
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 2 * 61 * positions)
        _, _, (of_hidden, *_) = ours(drawn(), FORMULAS["plain"], 1.0, 1.0, 61, is_autocast=True)
        found.append(of_hidden)
    assert torch.equal(*found)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_probabilities_that_fp32_cannot_hold_overflow_nothing(beta):
    """Logits a hundred apart: a token is as good as impossible for one of both."""
    given = drawn()
    given["weight"] = given["weight"] * 25
    given["teacher_weight"] = given["teacher_weight"] * 25
    found, expected = (call(given, FORMULAS["plain"], beta, 1.0, 61) for call in (ours, exact))
    assert expected[1]["reverse_kl"].max() > 50
    # A logit of 100 is itself rounded by 4e-6. Where one token has all the probability, the terms of
    # a gradient are that large and cancel.
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    for gradient, exact_gradient in zip(found[2], expected[2]):
        assert (gradient.double() - exact_gradient).norm() <= 3e-5 * (1 + exact_gradient.norm())


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("spread", [1, 4, 30])  # 30: one token is certain up to rounding
def test_the_top_tokens_give_a_bound_from_below_and_all_of_them_the_divergence(beta, spread):
    """In fp64: by the definition, with its gradient, and for each number of tokens above the one before."""
    draw = torch.Generator().manual_seed(2)
    logits = spread * torch.randn(2, 50, 12, generator=draw, dtype=torch.float64)
    logits.requires_grad_()
    student, teacher = logits.log_softmax(-1)
    targets = torch.zeros(50, dtype=torch.long)
    compare, gradient = formula_of(beta)
    bound, error = torch.zeros(50), torch.full((50,), 1e-14)
    for k in range(1, 13):
        output = top_output(teacher, targets, k)
        filled = output.all_logps(slice(None), student, student.dtype)
        last, bound = bound, compare(student, filled, targets)["objective"]
        assert (bound - last + error).min() >= 0
        # What is left of 1 is rounded, and so is the divergence.
        ours = student.scatter(1, output.ids, -math.inf).logsumexp(1)
        theirs = output.rest(slice(None))[:, 0].exp()
        error = ours.exp() * (1e-15 / theirs).log1p() + 1e-15 * (9 - ours.clamp(min=-999))
        if k < 12 and spread < 30:
            whole = dense(*(coarsened(p, output.ids) for p in (student, teacher)), targets, beta)[0]
            assert torch.allclose(bound, whole, rtol=1e-9, atol=1e-12)
            (expected,) = torch.autograd.grad(whole.sum(), logits, retain_graph=True)
            found = gradient(student, filled, targets)
            assert torch.allclose(found, expected[0], rtol=1e-6, atol=1e-9)
    assert torch.allclose(bound, dense(student, teacher, targets, beta)[0], rtol=1e-12)


def test_the_rest_is_precise_at_both_ends():
    for p in (1e-20, 0.1, 0.9, 1 - 1e-6):
        logp = torch.tensor([[math.log(p)]], dtype=torch.float64)
        rest = top_output(logp, torch.tensor([0]), 1).rest(slice(1)).item()
        assert rest == pytest.approx(math.log1p(-p), rel=1e-9)
    for logp in (0.0, 1e-12, -1e-17):  # the sum of rounded numbers may be above 1
        output = top_output(torch.tensor([[logp]], dtype=torch.float64), torch.tensor([0]), 1)
        assert output.rest(slice(1)).item() == pytest.approx(math.log(2.0**-52))


# ---------------------------------------------------------------------------------------------- whole models


def batch_of(packed: bool) -> dict:
    """Five answers to three prompts."""
    numbers = torch.randint(3, 290, (90,), generator=torch.Generator().manual_seed(2)).tolist()
    some = lambda length: [numbers.pop() for _ in range(length)]
    shared, other, single = some(5), some(3), some(1)
    prompts = [shared, other, shared, single, shared]
    answers = [some(length) for length in (4, 7, 2, 3, 1)]
    return packing.Packer(torch.device("cpu"), packed).make_batch(prompts, answers)


def own_logps(model, batch: dict, temperature: float, vocab_size: int) -> torch.Tensor:
    """Log-probs of all tokens before each target, from the architecture's own logits."""
    logits = model(**batch["inputs"], use_cache=False).logits.flatten(0, 1)[
        batch["predictor_index"]
    ]
    return (logits[:, :vocab_size] / temperature).log_softmax(-1)


# Students and teachers: an untied and a tied head, a soft cap, multipliers, a bias.
PAIRS = [("gemma2", "qwen3"), ("cohere", "phi")]


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_a_student_learns_what_the_definition_says(names, monkeypatch):
    """Loss, values and the gradient of every weight."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 2 * 295 * 5)
    student, teacher = (build(name) for name in names)
    other_teacher = build("llama tied", vocab_size=310)
    batch = batch_of(packed="gemma2" not in names)  # whose window is shorter than the rows
    weights = torch.rand(batch["loss_mask"].shape)
    temperature, beta, vocab_size = 0.7, 0.3, 295
    # The first teacher's answers are the second and the last.
    is_first = torch.tensor([False, True, False, False, True])
    of_first = is_first[:, None].expand_as(batch["loss_mask"])[batch["loss_mask"]]

    with torch.no_grad():
        teacher_logps = torch.where(
            of_first[:, None],
            own_logps(teacher, batch, temperature, vocab_size),
            own_logps(other_teacher, batch, temperature, vocab_size),
        )
    student_logps = own_logps(student, batch, temperature, vocab_size)
    first, values = dense(student_logps, teacher_logps, batch["targets"], beta)
    (first * weights[batch["loss_mask"]]).sum().backward()
    expected = {name: p.grad.clone() for name, p in student.named_parameters()}
    student.zero_grad()

    wrapped = DistillModel(student)
    wrapped.vocab_size = vocab_size
    outputs = []
    for model, is_mine in ((teacher, of_first), (other_teacher, ~of_first)):
        wrapped_teacher = DistillModel(model)
        wrapped_teacher.vocab_size = vocab_size
        with torch.no_grad():
            hidden = wrapped_teacher(batch, as_teacher=True)
        places = is_mine.nonzero().flatten()
        head = wrapped_teacher.whole_head(temperature)
        assert len(head.weight) == vocab_size
        outputs.append(TeacherOutput(hidden[places], head, places))
    compare, gradient = formula_of(beta)
    output = wrapped(
        batch,
        temperature,
        teacher_outputs=outputs,
        token_outputs=compare,
        objective_gradient=gradient,
    )
    assert output.keys() == {"objective", *values}
    for name, value in {**values, "objective": first}.items():
        found = output[name]
        assert not found[~batch["loss_mask"]].any()
        torch.testing.assert_close(
            found[batch["loss_mask"]],
            value.detach().to(found.dtype),
            rtol=1e-4,
            atol=1e-4,
            msg=name,
        )
    (output["objective"] * weights).sum().backward()
    found = {name: p.grad for name, p in student.named_parameters()}
    ours, theirs = (
        torch.cat([gradients[name].flatten() for name in expected])
        for gradients in (found, expected)
    )
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
