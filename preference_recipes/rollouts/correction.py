"""Logs how the sampler's log-probs differ from those of training, and corrects for it.

A vLLM server computes with other kernels, perhaps in another precision and, with
`--rollouts_ahead`, with earlier weights. So the samples come from a distribution q other than the
policy before its updates, p. An expectation over p equals one over q in which each sample is
weighted by p/q. Such ratios may be huge, so they are cut: a little bias for much less variance.
"""

import torch


def for_sampler(
    losses: torch.Tensor,
    old_logps: torch.Tensor,
    experience: dict[str, torch.Tensor],
    args,
    is_first_update: bool,
) -> tuple[torch.Tensor, dict]:
    """Returns the losses, weighted where a server sampled, and values to log about the sampler.

    Args:
        losses: `[samples, length]` or `[samples, 1]`.
        old_logps: of the policy before the rollout's first update, which is taken for the sampler.
        experience: `Rollout.experience` for the same samples.
        is_first_update: whether no update of the rollout was applied yet.
    """
    mask = experience["loss_mask"].to(old_logps.dtype)
    values = {}
    if is_first_update:
        values = sampler_differences(old_logps, experience["sampler_logps"], mask)
    if args.vllm_url:
        weights, ratio_values = importance_weights(
            old_logps, experience["sampler_logps"], mask, args
        )
        losses = losses * weights
        values |= ratio_values
    return losses, values


def importance_weights(
    logps: torch.Tensor, sampler_logps: torch.Tensor, mask: torch.Tensor, args
) -> tuple[torch.Tensor, dict]:
    """Returns the weight p/q of each token's loss `[samples, length]`, and values to log about it.

    token_truncate: the token's own ratio, at most `--sampler_correction_max`; Yao et al. 2025.
    token_mask: the token's own ratio, 0 where it is above this maximum or below its inverse;
    IcePop, Ling Team 2025.
    sequence_mask: the ratio of the whole response, 0 where it is above the maximum; as in TRL.
    none: 1 for all.
    """
    correction = args.sampler_correction
    bound = args.sampler_correction_max
    log_ratios = (logps - sampler_logps) * (mask > 0)
    if correction == "sequence_mask":
        log_ratios = log_ratios.sum(1, keepdim=True).expand_as(log_ratios)
    elif correction == "none":
        log_ratios = torch.zeros_like(log_ratios)
    ratios = log_ratios.exp()
    is_cut = ratios > bound
    if correction == "token_mask":
        is_cut |= ratios < 1 / bound
    if correction == "token_truncate":
        ratios = ratios.clamp(max=bound)
    else:
        ratios = ratios.masked_fill(is_cut, 0.0)
    name = "sampling/importance_sampling_ratio"
    return ratios, {
        f"{name}/mean": (ratios, mask),
        f"{name}/cut": (is_cut.float(), mask),
        f"{name}/max": (ratios, mask, "max"),
    }


def sampler_differences(
    logps: torch.Tensor, sampler_logps: torch.Tensor, mask: torch.Tensor
) -> dict[str, tuple]:
    """Returns values to log: how much the sampler's log-probs differ from those of training."""
    difference = (logps - sampler_logps).abs()
    name = "sampling/sampling_logp_difference"
    return {f"{name}/mean": (difference, mask), f"{name}/max": (difference, mask, "max")}
