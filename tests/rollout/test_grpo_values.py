"""The pure functions of recipes/grpo.py have the values of TRL, of closed forms and of enumeration."""

import json
import math
import types

import pytest
import torch

import expected_gradients
from common.metrics import Means
from peers import trl_grpo
from preference_recipes.rollouts import correction
from recipes import load
from runs import REPOSITORY, forked

grpo = load("grpo")
STORED = json.loads(trl_grpo.STORED.read_text())


def load_fork(name: str) -> types.ModuleType:
    return load(name, forked(name))


def losses_of(
    given: dict, args: types.SimpleNamespace, module=grpo, batch: dict | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]:
    """What a recipe makes of `trl_grpo.tensors` after a first update: log-probs, losses, weights, values."""
    logps = given["logps"].requires_grad_()
    experience = {
        "loss_mask": given["loss_mask"],
        "advantages": given["advantages"][:, None],
        "old_logps": given["old_logps"],
        "ref_logps": given["ref_logps"],
        "sampler_logps": given["sampler_logps"],
    }
    model = lambda *_, **__: {"logps": logps, "entropy": torch.zeros_like(logps)}
    losses, values = module.sample_losses(
        model, batch or {}, experience, args, is_first_update=False
    )
    return logps, losses, values["loss"][1], values


def ours(
    loss_type: str, average: str, ratio: str, with_kl: bool, correction: str | None = None
) -> tuple[float, torch.Tensor]:
    """The loss of `trl_grpo.tensors` by the recipe, and its gradient with respect to the log-probs."""
    kl_coef = trl_grpo.KL_COEF if with_kl else 0.0
    args = args_of(correction, loss_type=loss_type, average=average, ratio=ratio, kl_coef=kl_coef)
    module = load_fork("sapo") if loss_type == "sapo" else grpo
    logps, losses, weights, _ = losses_of(trl_grpo.tensors(), args, module)
    loss = (losses * weights).sum() / weights.sum()
    return loss.item(), torch.autograd.grad(loss, logps)[0]


def args_of(correction: str | None = None, **settings) -> types.SimpleNamespace:
    given = {
        "temperature": 1.0,
        "clip_range": trl_grpo.CLIP_LOW,
        "clip_range_high": trl_grpo.CLIP_HIGH,
        "kl_estimator": "k3",
        "max_new_tokens": trl_grpo.MAX_NEW_TOKENS,
        "vllm_url": ["http://127.0.0.1:8000"] if correction else None,
        "sampler_correction": correction or "none",
        "sampler_correction_max": trl_grpo.CORRECTIONS.get(correction, (None, 3.0))[1],
    }
    return types.SimpleNamespace(**given | settings)


def of_trl(loss_type: str, average: str, ratio: str, with_kl: bool) -> tuple[float, torch.Tensor]:
    """The stored loss and gradient."""
    stored = STORED[trl_grpo.name_of((loss_type, average, ratio, with_kl))]
    return stored["loss"][0], torch.tensor(stored["gradient"], dtype=torch.float64)


@pytest.mark.parametrize("case", trl_grpo.CASES, ids=trl_grpo.name_of)
def test_losses_and_gradients_are_those_of_trl(case):
    """TRL weights the KL by the ratio of a sequence, where there is one, we by each token's own."""
    loss_type, average, ratio, with_kl = case
    loss, gradient = ours(*case)
    expected_loss, expected = of_trl(*case)
    if ratio == "sequence" and with_kl:
        assert loss != pytest.approx(expected_loss, abs=1e-4)
        expected_loss, expected = of_trl(loss_type, average, "sequence", False)
        for sign, has_kl in ((1, True), (-1, False)):
            part_loss, part = of_trl(loss_type, average, "token", has_kl)
            expected_loss += sign * part_loss
            expected = expected + sign * part
    assert loss == pytest.approx(expected_loss, abs=1e-12)
    assert gradient.flatten().tolist() == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize("mode", trl_grpo.CORRECTIONS)
def test_corrections_of_the_sampler_are_those_of_trl(mode):
    stored = STORED[f"corrected {mode}"]
    given = trl_grpo.tensors()
    mask = given["loss_mask"]
    old = given["old_logps"].where(mask, 5.0)  # what the model did not draw counts nowhere
    logps = (old, given["sampler_logps"])
    weights, logged = correction.importance_weights(*logps, mask.double(), args_of(mode))
    expected = trl_grpo.correction_of_trl(mode).expand_as(weights)
    assert torch.allclose(weights[mask], expected[mask], rtol=1e-12)

    # What is logged is of the tokens, not of the places after a response.
    means = means_of(logged, len(mask))
    is_cut = (expected == 0) | (expected == trl_grpo.CORRECTIONS[mode][1])
    name = "sampling/importance_sampling_ratio"
    assert means[f"{name}/cut"] == pytest.approx(is_cut[mask].double().mean().item())
    assert 0 < means[f"{name}/cut"] < 1
    assert means[f"{name}/mean"] == pytest.approx(expected[mask].mean().item())

    loss, gradient = ours("clip", "token", "token", True, mode)
    assert loss == pytest.approx(stored["loss"][0], abs=1e-12)
    assert gradient.flatten().tolist() == pytest.approx(stored["gradient"], abs=1e-12)


def means_of(values: dict, n_samples: int) -> dict[str, float]:
    """What is logged of a batch, by tag."""
    means = Means(types.SimpleNamespace(gather=lambda table: table))
    means.add(values, torch.ones(n_samples))
    return means.reduce_and_reset()


def advantages(scores, group, baseline, std, in_update=None, module=grpo) -> list[float]:
    """The advantages of scores `[samples]` in groups of so many."""
    grouped = scores.view(-1, group)
    in_update = torch.ones(len(scores)) > 0 if in_update is None else in_update
    args = types.SimpleNamespace(baseline=baseline, advantage_std=std)
    return module.advantages_of(grouped, in_update.view_as(grouped), args).flatten().tolist()


@pytest.mark.slow
def test_what_is_stored_is_what_trl_computes():
    found = trl_grpo.values()
    assert found.keys() == STORED.keys()
    for name, values in found.items():
        for kind, numbers in values.items():
            assert numbers == pytest.approx(STORED[name][kind], abs=1e-6), (name, kind)


def test_two_settings_without_bias_and_the_one_of_a_known_factor():
    """Before the first update the expected gradient is the policy gradient, up to a constant.

    That is 1 / max_new_tokens, as Dr. GRPO divides sums over tokens by it. A baseline that holds the
    sample itself takes another factor of (n - 1) / n, at n = 2 one half.
    """
    analytic = expected_gradients.analytic_gradient() / expected_gradients.MAX_NEW_TOKENS
    for baseline, factor in {"none": 1, "rloo": 1, "group": 1 / 2}.items():
        expected = expected_gradients.expected_gradient(grpo, 2, baseline, "none", "constant")
        assert (expected - factor * analytic).abs().max() < 1e-10, baseline
        # With another average the gradient points elsewhere: the test can tell.
        other = expected_gradients.expected_gradient(grpo, 2, baseline, "none", "sequence")
        assert expected_gradients.bias(other, analytic)[1] > 10


@pytest.mark.slow
def test_the_table_of_biases_in_the_docs_is_what_enumeration_gives():
    page = (REPOSITORY / "docs/grpo.md").read_text()
    section = page.partition("\n## Bias")[2].partition("\n## ")[0]
    starts = ("| group", "| rloo", "| none")
    shown = [line for line in section.splitlines() if line.startswith(starts)]
    assert len(shown) == 9
    assert set(shown) <= set(expected_gradients.table_rows(grpo))


def test_the_kl_terms_have_the_gradient_of_the_kl_at_any_ratio():
    """Summed over the vocabulary with the old probabilities: both estimators, while the policy has moved."""
    generator = torch.Generator().manual_seed(2)
    old, new, ref = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    new = new.requires_grad_()
    old, ref = old.log_softmax(0), ref.log_softmax(0)
    logps = new.log_softmax(0)
    kl = (logps.exp() * (logps - ref)).sum()
    exact = torch.autograd.grad(kl, new, retain_graph=True)[0]
    for estimator in ("k2", "k3"):
        ratios = (logps - old).exp()
        estimate, term = grpo.kl_losses(logps, ref, ratios, estimator)
        found = torch.autograd.grad((old.exp() * term).sum(), new, retain_graph=True)[0]
        assert torch.allclose(found, exact, atol=1e-12), estimator
        assert (estimate >= 0).all()
    found = (logps.exp() * grpo.kl_losses(logps, ref, ratios, "k3")[0]).sum()
    assert found.item() == pytest.approx(kl.item())


def test_advantages_by_hand():
    """The deviation of a rollout is that of what is trained on."""
    scores = torch.tensor([1.0, 0.0, 0.0, 3.0, 1.0, 2.0], dtype=torch.float64)
    in_update = torch.tensor([True, True, False, False, True, True])

    def of_groups(baseline, std, in_update=in_update):
        return advantages(scores, 3, baseline, std, in_update)

    third = 1 / 3  # what is cut counts in the mean of its group
    group = [2 * third, -third, -third, 1, -1, 0]
    of_trained = [2 * third, -third, -1, 0]
    deviation = math.sqrt(sum(a**2 for a in of_trained) / 3)
    assert of_groups("group", "batch") == pytest.approx([a / (deviation + 1e-4) for a in group])
    # Of these two the deviation from their own mean would be 0, and both advantages -3,333.
    alike = of_groups("group", "batch", torch.tensor([0, 1, 1, 0, 0, 0]) > 0)
    assert alike[1:3] == pytest.approx([-third / (math.sqrt(2) * third + 1e-4)] * 2)
    # The scores 1, 0, 1, 2 of what is trained on have the mean 1.
    deviation = math.sqrt(2 / 3)
    expected = [(s - 1) / (deviation + 1e-4) for s in scores.tolist()]
    assert of_groups("none", "batch") == pytest.approx(expected)
    # One sample has no deviation, and would be its own mean: neither is applied.
    assert of_groups("group", "batch", torch.arange(6) == 3) == pytest.approx(group)
    assert of_groups("none", "batch", torch.arange(6) == 3) == scores.tolist()
    # What is trained on makes no difference to a group's own mean and deviation.
    assert of_groups("group", "none") == pytest.approx(group)
    assert of_groups("rloo", "none") == pytest.approx([1.5 * a for a in group])
    deviations = [math.sqrt(third)] * 3 + [1] * 3
    scaled = [a / (deviation + 1e-4) for a, deviation in zip(group, deviations)]
    assert of_groups("group", "group") == pytest.approx(scaled)


def test_a_kl_keeps_groups_whose_advantages_are_all_zero():
    scores = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]])

    def kept(**settings):
        args = types.SimpleNamespace(baseline="group", advantage_std="batch", **settings)
        return grpo.groups_to_keep(scores, args).tolist()

    assert kept(drop_equal_groups=True, kl_coef=0.0) == [False, False, True]
    assert kept(drop_equal_groups=True, kl_coef=0.1) == [True, True, True]
    assert kept(drop_equal_groups=False, kl_coef=0.0) == [True, True, True]
