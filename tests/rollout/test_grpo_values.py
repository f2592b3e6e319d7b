"""The pure functions of recipes/grpo.py have the values of TRL, of closed forms and of enumeration."""

import json
import math
import runpy
import types

import numpy as np
import pytest
import torch

import expected_gradients
from common.metrics import Means
from peers import trl_grpo
from preference_recipes.rollouts import correction, rollout
from runs import REPOSITORY, recipe

grpo = types.SimpleNamespace(**runpy.run_path(str(recipe("grpo"))))
STORED = json.loads(trl_grpo.STORED.read_text())


def losses_of(
    given: dict, args: types.SimpleNamespace
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict]:
    """What the recipe makes of these tensors after a first update: log-probs, losses, weights, values.

    Args:
        given: as `trl_grpo.tensors` returns them.
    """
    logps = given["logps"].requires_grad_()
    stored = {
        "mask": given["mask"],
        "advantages": given["advantages"][:, None],
        "logps": given["old_logps"],
        "ref_logps": given["ref_logps"],
        "sampler_logps": given["sampler_logps"],
    }
    model = lambda *_, **__: {"logps": logps, "entropy": torch.zeros_like(logps)}
    losses, weights, values = grpo.sample_losses(model, {}, stored, args, has_moved=True)
    return logps, losses, weights, values


def ours(
    loss_type: str, average: str, ratio: str, with_kl: bool, correction: str | None = None
) -> tuple[float, torch.Tensor]:
    """The loss of `trl_grpo.tensors` by the recipe, and its gradient with respect to the log-probs."""
    kl_coef = trl_grpo.KL_COEF if with_kl else 0.0
    args = args_of(correction, loss_type=loss_type, average=average, ratio=ratio, kl_coef=kl_coef)
    logps, losses, weights, _ = losses_of(trl_grpo.tensors(), args)
    loss = (losses * weights).sum() / weights.sum()
    return loss.item(), torch.autograd.grad(loss, logps)[0]


def args_of(correction: str | None = None, **settings) -> types.SimpleNamespace:
    given = {
        "temperature": 1.0,
        "off_policy_limit": 0.0,
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
    """But for the KL beside the ratio of a sequence: TRL weights it by that ratio, we by each token's own.

    There ours is TRL's loss without a KL plus the term of the KL that TRL has with the ratio of each token.
    """
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
    mask = given["mask"]
    old = {"logps": given["old_logps"], "sampler_logps": given["sampler_logps"]}
    weights, logged = correction.importance_weights(old, mask.double(), args_of(mode))
    expected = torch.tensor(stored["weights"], dtype=torch.float64).reshape(len(weights), -1)
    expected = expected.expand_as(weights)
    assert torch.allclose(weights, expected, rtol=1e-12)

    # What is logged is of the tokens, not of the places after a response.
    means = means_of(logged, len(mask))
    ratios = (given["old_logps"] - given["sampler_logps"]).exp()
    if mode == "sequence_mask":
        ratios = (ratios.log() * mask).sum(1, keepdim=True).exp().expand_as(ratios)
    largest = trl_grpo.CORRECTIONS[mode][1]
    is_cut = ratios > largest
    if mode == "token_mask":
        is_cut |= ratios < 1 / largest
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
    return means.reduce()


def dppo_of_verl(loss_type: str, logp: float, sampler: float, advantage: float) -> float:
    """The derivative of a token's loss by its log-prob, as verl defines it.

    Written after `compute_policy_loss_dppo_tv` and `_kl` of verl's `core_algos.py`.
    """
    p, q = math.exp(logp), math.exp(sampler)
    log_ratio = min(max(logp - sampler, -20.0), 20.0)
    if loss_type == "dppo_tv":
        is_valid = p - q <= 0.1 if advantage > 0 else p - q >= -0.05
    else:
        kl = -q * log_ratio + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        is_valid = (kl <= 0.1 or p <= q) if advantage > 0 else (kl <= 0.05 or p >= q)
    return -min(math.exp(log_ratio), 20.0) * advantage * is_valid


@pytest.mark.parametrize("loss_type", ["dppo_tv", "dppo_kl"])
def test_the_losses_of_dppo_are_those_of_verl(loss_type):
    """At random, and at corners: a tiny probability tenfold, one of nearly 1, an advantage of 0.

    The anchor is the sampler, not the old policy, and there is nothing left to correct.
    """
    draw = torch.Generator().manual_seed(1)
    p, q, old = torch.rand(3, 60, 5, generator=draw, dtype=torch.float64)
    p[0] = torch.tensor([1e-4, 1e-12, 0.999999, 0.5, 0.3])
    q[0] = torch.tensor([1e-5, 0.9, 0.2, 0.5, 0.31])
    advantages = torch.randn(60, generator=draw, dtype=torch.float64)
    advantages[0], advantages[1] = 1.0, 0.0
    given = dict(mask=p > 0, advantages=advantages, logps=p.log(), ref_logps=p.log())
    given |= dict(old_logps=old.log(), sampler_logps=q.log())
    settings = dict(loss_type=loss_type, average="token", ratio="token", kl_coef=0.0)
    settings |= dict(clip_range=0.05, clip_range_high=0.1)
    logps, losses, weights, logged = losses_of(given, args_of("sequence_mask", **settings))
    (gradient,) = torch.autograd.grad((losses * weights).sum(), logps)
    tokens = zip(logps.flatten(), q.log().flatten(), advantages.repeat_interleave(5))
    expected = [dppo_of_verl(loss_type, *(each.item() for each in token)) for token in tokens]
    expected = torch.tensor(expected, dtype=torch.float64).view_as(p)
    assert torch.allclose(gradient, expected, atol=1e-9)
    assert torch.allclose(losses, (expected * logps).mean(1), atol=1e-9)
    # Ten times as likely and still allowed: its ratio of 10 is beyond any range of clipping.
    assert gradient[0, 0].item() == pytest.approx(-10)
    means = means_of(logged, len(losses))
    for name, is_side in (("low", advantages < 0), ("high", advantages > 0)):
        share = ((expected == 0) & is_side[:, None]).double().mean().item()
        assert means[f"clip_ratio/{name}_mean"] == pytest.approx(share) and share > 0.05
    assert not any(name.startswith("sampling") for name in means)


def test_advantages_of_maxrl():
    scores = torch.tensor([0.0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0.5, 0.25, 0.25, 1])
    found = grpo.estimate_advantages(scores, 4, "group", "mean")
    assert found.tolist() == pytest.approx([-1, 3, -1, -1, *[0] * 8, 0, -0.5, -0.5, 1])


@pytest.mark.parametrize("name", trl_grpo.ADVANTAGES)
def test_advantages_are_those_of_trl(name):
    stored = STORED[f"advantages {name}"]
    scores = torch.tensor(stored["scores"])
    assert len(scores) == 12 and len(set(stored["scores"])) > 6  # groups of unequal scores
    advantages = grpo.estimate_advantages(scores, trl_grpo.GROUP, *name.split())
    expected = pytest.approx(stored["advantages"], abs=1e-6)  # TRL computes in fp32
    assert advantages.tolist() == expected


@pytest.mark.slow
def test_the_mask_of_responses_that_became_unlikely_is_that_of_trl():
    trl = pytest.importorskip("trl")
    given = trl_grpo.tensors()
    advantages = given["advantages"][:, None] * torch.tensor([[1.0], [-1.0]] * 3)  # all are above 0
    logps, sampler_logps, mask = given["logps"] - 1, given["sampler_logps"], given["mask"].long()
    for limit in (0.3, 1.0):
        kept = trl.GRPOTrainer.get_off_policy_mask(advantages, logps, sampler_logps, mask, limit)
        found = grpo.is_off_policy(logps, sampler_logps, mask, advantages, limit)
        assert torch.equal(found, kept == 0) and found.any()


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
    assert len(shown) == 10
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


def test_the_deviation_of_the_rollout_is_that_of_what_is_trained_on():
    scores = torch.tensor([1.0, 0.0, 0.0, 3.0, 1.0, 2.0], dtype=torch.float64)
    is_trained = torch.tensor([True, True, False, False, True, True])

    def advantages(baseline, std, is_trained=is_trained):
        return grpo.estimate_advantages(scores, 3, baseline, std, is_trained).tolist()

    third = 1 / 3  # what is cut counts in the mean of its group
    group = [2 * third, -third, -third, 1, -1, 0]
    of_trained = [2 * third, -third, -1, 0]
    deviation = math.sqrt(sum(a**2 for a in of_trained) / 3)
    assert advantages("group", "batch") == pytest.approx([a / (deviation + 1e-4) for a in group])
    # Of these two the deviation from their own mean would be 0, and both advantages -3,333.
    alike = advantages("group", "batch", torch.tensor([0, 1, 1, 0, 0, 0]) > 0)
    assert alike[1:3] == pytest.approx([-third / (math.sqrt(2) * third + 1e-4)] * 2)
    # The scores 1, 0, 1, 2 of what is trained on have the mean 1.
    deviation = math.sqrt(2 / 3)
    expected = [(s - 1) / (deviation + 1e-4) for s in scores.tolist()]
    assert advantages("none", "batch") == pytest.approx(expected)
    # One sample has no deviation, and would be its own mean: neither is applied.
    assert advantages("group", "batch", torch.arange(6) == 3) == pytest.approx(group)
    assert advantages("none", "batch", torch.arange(6) == 3) == scores.tolist()
    assert advantages("group", "group") == advantages("group", "group", None)


def test_a_kl_keeps_groups_whose_advantages_are_all_zero():
    scores = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0])  # three groups of two

    def kept(**settings):
        args = types.SimpleNamespace(
            n_samples_per_prompt=2, baseline="group", advantage_std="batch", **settings
        )
        return grpo.groups_to_keep(scores, args).tolist()

    assert kept(drop_equal_groups=True, kl_coef=0.0) == [False, False, True]
    assert kept(drop_equal_groups=True, kl_coef=0.1) == [True, True, True]
    assert kept(drop_equal_groups=False, kl_coef=0.0) == [True, True, True]


def test_each_reward_is_normalised_in_its_group_before_they_are_added():
    """arXiv:2601.05242. A reward of 100 does not drown one of 0.1, and equal ones add nothing."""
    parts = {
        "large": torch.tensor([100.0, 0.0, 0.0, 100.0, 5.0, 5.0, 5.0, 5.0]),
        "small": torch.tensor([0.1, 0.1, 0.0, 0.0, 0.3, 0.1, math.nan, 0.2]),
    }
    found = grpo.scale_each(parts, {"large": 1.0, "small": 2.0}, group_size=4)
    expected = []
    for first in (0, 4):
        total = np.zeros(4)
        for name, weight in (("large", 1.0), ("small", 2.0)):
            rewards = parts[name][first : first + 4].double().numpy()
            spread = np.nanstd(rewards, ddof=1)
            if spread > 0:
                scaled = (rewards - np.nanmean(rewards)) / (spread + grpo.EPSILON)
                total += weight * np.nan_to_num(scaled)
        expected += total.tolist()
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert found[6] == 0


@pytest.mark.parametrize("drops, max_steps", [(False, 0), (True, 0), (True, 6)])
def test_updates_that_dropped_groups_may_save_are_not_promised(drops, max_steps):
    given = dict(rollout_batch_size=2, n_samples_per_prompt=4, num_epochs_per_rollout=1)
    args = types.SimpleNamespace(
        **given, train_batch_size=4, drop_equal_groups=drops, max_steps=max_steps
    )
    most = "at most " * drops
    assert rollout.describe_updates(args, n_prompts=6, total_steps=6) == (
        f"a rollout: 2 prompts, 8 samples, {most}2 updates; an epoch: 3 rollouts, {most}6 updates; "
        f"{'' if max_steps else most}6 updates in all"
    )
