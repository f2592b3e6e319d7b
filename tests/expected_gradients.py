"""The expected gradient of GRPO's losses, by enumerating all that a tiny policy can sample.

A policy of 3 tokens writes up to 2 of them; token 0 ends a response. So there are 7 responses, and all rollouts of 2
prompts with a few responses each can be listed, each with its probability.
"""

import itertools
import math
import types

import torch

MAX_NEW_TOKENS = 2
RESPONSES = [(0,), *((first, second) for first in (1, 2) for second in (0, 1, 2))]
MASK = torch.tensor([[True, len(response) == 2] for response in RESPONSES])
PROMPTS = 2


def make_policy() -> torch.Tensor:
    """Logits of each prompt, `[prompts, 4, 3]`: of the first token, and of the second after each first one."""
    return torch.randn(
        PROMPTS, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def make_rewards() -> torch.Tensor:
    """What each response to each prompt earns, `[prompts, responses]`: between 0 and 1."""
    return torch.rand(
        PROMPTS, len(RESPONSES), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def token_logps(policy: torch.Tensor) -> torch.Tensor:
    """Log-probs of the tokens of each response to each prompt, `[prompts, responses, 2]`."""
    logps = policy.log_softmax(-1)
    of_first = [logps[:, 0, response[0]] for response in RESPONSES]
    of_second = [
        logps[:, 1 + response[0], response[1]] if len(response) == 2 else logps[:, 0, 0] * 0
        for response in RESPONSES
    ]
    return torch.stack([torch.stack(of_first, 1), torch.stack(of_second, 1)], 2)


def analytic_gradient() -> torch.Tensor:
    """The gradient of minus the expected reward, averaged over the prompts."""
    policy = make_policy().requires_grad_()
    probabilities = token_logps(policy).sum(2).exp()
    assert torch.allclose(probabilities.sum(1), torch.ones(PROMPTS, dtype=torch.float64))
    objective = -(probabilities * make_rewards()).sum() / PROMPTS
    return torch.autograd.grad(objective, policy)[0]


def expected_gradient(
    grpo,
    n_samples: int,
    baseline: str,
    advantage_std: str,
    average: str,
) -> torch.Tensor:
    """The expected gradient of a rollout's loss before its first update; `grpo` is the recipe's module."""
    policy = make_policy().requires_grad_()
    # All rollouts: for each, which response each sample is. [rollouts, prompts * n_samples]
    choices = torch.tensor(
        list(itertools.product(range(len(RESPONSES)), repeat=PROMPTS * n_samples))
    )
    owner = torch.arange(PROMPTS).repeat_interleave(n_samples)
    scores = make_rewards()[owner, choices]
    # Groups are independent unless their deviation is the rollout's: then all rollouts at once.
    at_once = [scores.flatten()] if advantage_std != "batch" else scores
    args = types.SimpleNamespace(baseline=baseline, advantage_std=advantage_std)
    args.loss_type, args.clip_range, args.clip_range_high = "clip", 0.2, 0.28
    args.average, args.max_new_tokens = average, MAX_NEW_TOKENS
    grouped = [row.view(-1, n_samples) for row in at_once]
    advantages = torch.cat(
        [grpo.advantages_of(each, torch.ones_like(each) > 0, args).flatten() for each in grouped]
    )
    logps = token_logps(policy)
    probabilities = logps.detach().sum(2).exp()[owner, choices].prod(1)
    assert math.isclose(probabilities.sum(), 1, rel_tol=1e-9)
    samples = logps[owner, choices].flatten(0, 1)
    mask = MASK[choices].flatten(0, 1)
    ratios = (samples - samples.detach()).exp()
    losses, _, _ = grpo.policy_losses(samples, ratios, advantages[:, None], args)
    weights = grpo.averaging_weights(mask, args).reshape(scores.shape)
    losses = grpo.average_tokens(losses, mask, args).reshape(scores.shape)
    of_rollouts = (losses * weights).sum(1) / weights.sum(1).clamp(min=1)
    return torch.autograd.grad((of_rollouts * probabilities).sum(), policy)[0]


def bias(expected: torch.Tensor, analytic: torch.Tensor) -> tuple[float, float]:
    """How much longer the expected gradient is along the analytic one, and the angle between them in degrees."""
    along = float((expected * analytic).sum() / (analytic * analytic).sum())
    cosine = float((expected * analytic).sum() / expected.norm() / analytic.norm())
    return along, math.degrees(math.acos(min(cosine, 1)))


def table_rows(grpo) -> list[str]:
    """Rows for the table in docs/grpo.md, which has some of them: rewards between 0 and 1."""
    rows = []
    analytic = analytic_gradient() / MAX_NEW_TOKENS
    for baseline, std, average in itertools.product(
        ("group", "rloo", "none"),
        ("none", "group", "batch"),
        ("constant", "token", "sequence"),
    ):
        if baseline == "none" and std == "group":
            continue  # refused
        expected = expected_gradient(grpo, 2, baseline, std, average)
        factor, degrees = bias(expected, analytic)
        rows.append(f"| {baseline} | {std} | {average} | {factor:.3f} | {degrees:.1f} |")
    return rows
