"""Each file of forks/ computes what its paper says, or what a peer does."""

import math

import numpy as np
import pytest
import torch

from peers import trl_grpo
from runs import forked
from test_grpo_values import advantages, args_of, loaded, losses_of, means_of


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
    signed = torch.randn(60, generator=draw, dtype=torch.float64)
    signed[0], signed[1] = 1.0, 0.0
    given = dict(mask=p > 0, advantages=signed, logps=p.log(), ref_logps=p.log())
    given |= dict(old_logps=old.log(), sampler_logps=q.log())
    settings = dict(loss_type=loss_type, average="token", ratio="token", kl_coef=0.0)
    settings |= dict(clip_range=0.05, clip_range_high=0.1)
    args = args_of("sequence_mask", **settings)
    logps, losses, weights, logged = losses_of(given, args, loaded(forked("dppo")))
    (gradient,) = torch.autograd.grad((losses * weights).sum(), logps)
    tokens = zip(logps.flatten(), q.log().flatten(), signed.repeat_interleave(5))
    expected = [dppo_of_verl(loss_type, *(each.item() for each in token)) for token in tokens]
    expected = torch.tensor(expected, dtype=torch.float64).view_as(p)
    assert torch.allclose(gradient, expected, atol=1e-9)
    assert torch.allclose(losses, (expected * logps).mean(1), atol=1e-9)
    # Ten times as likely and still allowed: its ratio of 10 is beyond any range of clipping.
    assert gradient[0, 0].item() == pytest.approx(-10)
    means = means_of(logged, len(losses))
    for name, is_side in (("low", signed < 0), ("high", signed > 0)):
        share = ((expected == 0) & is_side[:, None]).double().mean().item()
        assert means[f"clip_ratio/{name}_mean"] == pytest.approx(share) and share > 0.05
    assert not any(name.startswith("sampling") for name in means)


def test_advantages_of_maxrl():
    scores = torch.tensor([0.0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0.5, 0.25, 0.25, 1])
    found = advantages(scores, 4, "group", "mean", module=loaded(forked("maxrl")))
    assert found == pytest.approx([-1, 3, -1, -1, *[0] * 8, 0, -0.5, -0.5, 1])


@pytest.mark.slow
def test_the_mask_of_responses_that_became_unlikely_is_that_of_trl():
    trl = pytest.importorskip("trl")
    fork = loaded(forked("off_policy"))
    given = trl_grpo.tensors()
    signed = given["advantages"][:, None] * torch.tensor([[1.0], [-1.0]] * 3)  # all are above 0
    logps, sampler_logps, mask = given["logps"] - 1, given["sampler_logps"], given["mask"].long()
    for limit in (0.3, 1.0):
        kept = trl.GRPOTrainer.get_off_policy_mask(signed, logps, sampler_logps, mask, limit)
        found = fork.is_off_policy(logps, sampler_logps, mask, signed, limit)
        assert torch.equal(found, kept == 0) and found.any()


def test_each_reward_is_normalised_in_its_group_before_they_are_added():
    """arXiv:2601.05242. A reward of 100 does not drown one of 0.1, and equal ones add nothing."""
    parts = {
        "large": torch.tensor([100.0, 0.0, 0.0, 100.0, 5.0, 5.0, 5.0, 5.0]),
        "small": torch.tensor([0.1, 0.1, 0.0, 0.0, 0.3, 0.1, math.nan, 0.2]),
    }
    fork = loaded(forked("gdpo"))
    found = fork.scale_each(parts, {"large": 1.0, "small": 2.0}, group_size=4)
    expected = []
    for first in (0, 4):
        total = np.zeros(4)
        for name, weight in (("large", 1.0), ("small", 2.0)):
            rewards = parts[name][first : first + 4].double().numpy()
            spread = np.nanstd(rewards, ddof=1)
            if spread > 0:
                scaled = (rewards - np.nanmean(rewards)) / (spread + fork.EPSILON)
                total += weight * np.nan_to_num(scaled)
        expected += total.tolist()
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert found[6] == 0
