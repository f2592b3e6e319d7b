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


def make_rewards(binary: bool) -> torch.Tensor:
    """What each response to each prompt earns, `[prompts, responses]`: between 0 and 1, or one of them."""
    rewards = torch.rand(
        PROMPTS, len(RESPONSES), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return (rewards > 0.5).double() if binary else rewards


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
    objective = -(probabilities * make_rewards(binary=False)).sum() / PROMPTS
    return torch.autograd.grad(objective, policy)[0]


def expected_gradient(
    grpo,
    n_samples: int,
    baseline: str,
    advantage_std: str,
    average: str,
    binary: bool = False,
) -> torch.Tensor:
    """The expected gradient of a rollout's loss before its first update.

    Args:
        grpo: the module `recipes/grpo.py`.
        binary: rewards of 0 and 1, so that different responses often earn the same.
    """
    policy = make_policy().requires_grad_()
    # All rollouts: for each, which response each sample is. [rollouts, prompts * n_samples]
    choices = torch.tensor(
        list(itertools.product(range(len(RESPONSES)), repeat=PROMPTS * n_samples))
    )
    owner = torch.arange(PROMPTS).repeat_interleave(n_samples)
    scores = make_rewards(binary)[owner, choices]
    kept = torch.ones(scores.shape, dtype=torch.bool)
    if advantage_std != "batch":  # groups are independent: all rollouts at once
        of_all = grpo.estimate_advantages(scores.flatten(), n_samples, baseline, advantage_std)
        return gradient_of(grpo, policy, choices, of_all.reshape(scores.shape), kept, average)
    advantages = torch.stack(
        [grpo.estimate_advantages(row, n_samples, baseline, advantage_std) for row in scores]
    )
    return gradient_of(grpo, policy, choices, advantages, kept, average)


def gradient_of(
    grpo,
    policy: torch.Tensor,
    choices: torch.Tensor,
    advantages: torch.Tensor,
    kept: torch.Tensor,
    average: str,
) -> torch.Tensor:
    """The expected gradient of rollouts with these responses and advantages, `[rollouts, samples]` each."""
    logps = token_logps(policy)
    owner = torch.arange(PROMPTS).repeat_interleave(choices.shape[1] // PROMPTS)
    probabilities = logps.detach().sum(2).exp()[owner, choices].prod(1)
    assert math.isclose(probabilities.sum(), 1, rel_tol=1e-9)
    samples = logps[owner, choices].flatten(0, 1)
    mask = MASK[choices].flatten(0, 1)
    ratios = grpo.ratios_to_old(samples, samples.detach(), mask, "token")
    losses, _, _ = grpo.policy_losses(samples, ratios, advantages.reshape(-1, 1), "clip", 0.2, 0.28)
    losses, weights = grpo.average_tokens(losses, mask, average, MAX_NEW_TOKENS)
    losses = losses.reshape(kept.shape)
    weights = weights.reshape(kept.shape) * kept
    of_rollouts = (losses * weights).sum(1) / weights.sum(1).clamp(min=1)
    return torch.autograd.grad((of_rollouts * probabilities).sum(), policy)[0]


def kl_gradients(grpo, ratio: str, estimator: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The expected gradient of the loss of the KL alone, before a rollout's first update, and the exact one.

    Exact is that of KL(policy || reference) of each next token, over what the policy writes before it. All responses
    to all prompts are samples of one update, weighted by their probabilities.
    """
    policy = make_policy().requires_grad_()
    noise = torch.randn(
        policy.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    reference = make_policy() + noise
    logps = token_logps(policy)
    probabilities = logps.detach().sum(2).exp()  # [prompts, responses]

    args = types.SimpleNamespace(
        loss_type="clip",
        average="constant",
        ratio=ratio,
        clip_range=0.2,
        clip_range_high=0.28,
        kl_coef=1.0,
        kl_estimator=estimator,
        max_new_tokens=MAX_NEW_TOKENS,
        temperature=1.0,
        off_policy_limit=0.0,
        vllm_url=None,
    )
    samples = logps.flatten(0, 1)
    stored = {  # no log-probs of the old policy: it is the one that this pass reads
        "mask": MASK.repeat(PROMPTS, 1),
        "advantages": torch.zeros(len(samples), 1, dtype=torch.float64),
        "sampler_logps": samples.detach(),
        "ref_logps": token_logps(reference).flatten(0, 1),
    }
    model = lambda *_, **__: {"logps": samples, "entropy": torch.zeros_like(samples)}
    losses, weights, _ = grpo.sample_losses(model, {}, stored, args, has_moved=False)
    weights = weights * probabilities.flatten()
    found = torch.autograd.grad((losses * weights).sum(), policy, retain_graph=True)[0]

    new, ref = policy.log_softmax(-1), reference.log_softmax(-1)
    kl = (new.exp() * (new - ref)).sum(-1)  # [prompts, 4], of the first token and of each second
    first = new[:, 0, 1:].exp().detach()  # how probable it is that there is this second token
    exact = (kl[:, 0] + (first * kl[:, 2:]).sum(1)).sum() / MAX_NEW_TOKENS
    return found, torch.autograd.grad(exact, policy)[0]


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
        ("none", "group", "mean", "batch"),
        ("constant", "token", "sequence"),
    ):
        if baseline == "none" and std in ("group", "mean"):
            continue  # refused
        expected = expected_gradient(grpo, 2, baseline, std, average)
        factor, degrees = bias(expected, analytic)
        rows.append(f"| {baseline} | {std} | {average} | {factor:.3f} | {degrees:.1f} |")
    return rows


if __name__ == "__main__":
    import runpy
    from pathlib import Path

    recipe = Path(__file__).resolve().parents[1] / "recipes/grpo.py"
    print("\n".join(table_rows(types.SimpleNamespace(**runpy.run_path(str(recipe))))))
