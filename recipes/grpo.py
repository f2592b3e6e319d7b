"""Group Relative Policy Optimization: sample groups of answers, make the better ones more likely.

Shao et al. 2024, arXiv:2402.03300. The arguments below also give Dr. GRPO, DAPO, GSPO, RLOO,
REINFORCE++, CISPO, DPPO and MaxRL: docs/grpo.md has their settings. Loss of an update, with
r_t = pi(a_t)/pi_old(a_t), and A the score of a response minus its group's mean, divided by a
standard deviation:

    loss = average of -min(r_t A, clip(r_t, 1 - c_low, 1 + c_high) A) + kl_coef * KL_t

The demo, offline:
    python recipes/grpo.py
Your own model and data on 8 GPUs; accelerate_configs/ has the other ways to launch:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 \
        recipes/grpo.py --model_name_or_path M --dataset_name D --reward_function MODULE:NAME

Every metric: docs/grpo.md. Every argument: docs/arguments.md
"""

# ============================================================ imports
import gc
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    gc.disable()  # saves a fifth of the start: modules are never freed. `parse` enables it again

import torch

from common import arguments, console, distributed, errors, launch, optim
from common.actor import Actor
from common.checkpoint import Checkpoint, carried
from common.metrics import Means
from common.run import Run, Update
from common.shared_args import SchedulerType, arg, refuse_changed
from preference_recipes.models import checks, cost, load, prepare
from preference_recipes.models.packing import Packer
from preference_recipes.models.reference import Reference
from preference_recipes.rollouts import correction, episodes, rewards, rollout, vllm
from preference_recipes.rollouts.args import RewardArgs
from preference_recipes.rollouts.rewards import Judge, Scores
from preference_recipes.rollouts.rollout import Position, Rollout
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import Samples
from preference_recipes.tools import show_preview


# ============================================================ arguments
@dataclass
class Args(RewardArgs):
    ref_model_name_or_path: str | None = arg(None, "reference; default: the policy before training")
    n_samples_per_prompt: int = arg(8, "responses to a prompt, its group", at_least=1)
    max_new_tokens: int = arg(1024, "longest response", at_least=1)
    baseline: Literal["group", "rloo", "none"] = arg(
        "group", "subtracted from a score: the mean of its group, of the others, or 0"
    )
    advantage_std: Literal["batch", "group", "mean", "none"] = arg(
        "batch", "divides advantages: their deviation over rollout or group, the group's mean score"
    )
    reward_scaling: Literal["sum", "each"] = arg(
        "sum", "each: every reward is normalised in its group before they are added"
    )
    loss_type: Literal["clip", "sapo", "cispo", "dppo_tv", "dppo_kl"] = arg(
        "clip", "clip is PPO's; for the others see docs/grpo.md"
    )
    ratio: Literal["token", "sequence"] = arg("token", "of each token, or of a whole response")
    average: Literal["token", "sequence", "constant"] = arg(
        "token", "what the loss is averaged over, see docs/grpo.md"
    )
    clip_range: float = arg(0.2, "clipping of the ratio below 1; dppo: of the distance", at_least=0)
    clip_range_high: float = arg(
        0.28, "clipping of the ratio above 1; dppo: of the distance", at_least=0
    )
    off_policy_limit: float = arg(0.0, "drops bad responses too off-policy; 0: none", at_least=0)
    kl_coef: float = arg(0.0, "weight of the KL to the reference", at_least=0)
    kl_estimator: Literal["k3", "k2"] = arg("k3", "estimate of the KL")
    drop_equal_groups: bool = arg(True, "leave out groups without any advantage")
    refill_rounds: int = arg(0, "rounds that sample others for groups left out", at_least=0)
    overlong_buffer: int = arg(0, "penalised last tokens of a response; 0: none", at_least=0)
    overlong_penalty: float = arg(1.0, "the largest of these penalties", at_least=0)
    mask_truncated: bool = arg(False, "do not train on responses truncated at --max_new_tokens")
    train_batch_size: int = arg(256, "samples of one update", at_least=1)
    max_length: int = arg(2048, "tokens of prompt and --max_new_tokens together", at_least=2)
    learning_rate: float = arg(1e-6, "peak learning rate", with_lora=1e-5, at_least=0)
    lr_scheduler_type: SchedulerType = arg("constant_with_warmup", "a schedule of transformers")


# ============================================================ the algorithm
EPSILON = 1e-4  # added to a standard deviation before dividing by it
SAPO_TEMPERATURES = (1.0, 1.05)  # of its gate, at advantages above 0 and at others
LARGEST_RATIO = 20  # DPPO uses ratios up to this one
LARGEST_LOG_RATIO = 20  # it first clamps log-ratios to this, so that nothing overflows


def length_penalties(response_lengths: torch.Tensor, args: Args) -> torch.Tensor:
    """Returns what is subtracted from each score for its response's length, `[samples]`.

    It grows from 0 to `--overlong_penalty` over the last `--overlong_buffer` tokens. Source: DAPO,
    arXiv:2503.14476 eq. 13.
    """
    if args.overlong_buffer == 0:
        return torch.zeros(len(response_lengths))
    beyond = (response_lengths - (args.max_new_tokens - args.overlong_buffer)).clamp(min=0)
    return args.overlong_penalty * beyond / args.overlong_buffer


def groups_to_keep(scores: torch.Tensor, args: Args) -> torch.Tensor:
    """Returns which groups of a rollout are kept, bool `[groups]`.

    With a KL term all are: it has a gradient in each. Source: DAPO, arXiv:2503.14476 section 3.2.

    Args:
        scores: `[samples]`, without the penalty for length: a group whose responses are all right,
            or all wrong, is left out even if their lengths differ.
    """
    if args.kl_coef or not args.drop_equal_groups:
        return torch.ones(len(scores) // args.n_samples_per_prompt, dtype=torch.bool)
    return groups_with_advantages(
        scores, args.n_samples_per_prompt, args.baseline, args.advantage_std
    )


def groups_with_advantages(
    scores: torch.Tensor, group_size: int, baseline: str, advantage_std: str
) -> torch.Tensor:
    """Returns which groups can have an advantage other than zero, bool `[groups]`."""
    groups = scores.reshape(-1, group_size)
    if baseline != "none":
        return scores_differ(groups)
    if advantage_std == "batch":  # not known yet: the mean of the rollout is subtracted
        return torch.ones(len(groups), dtype=torch.bool)
    return groups.ne(0).any(1)


def estimate_advantages(
    scores: torch.Tensor,
    group_size: int,
    baseline: str,
    advantage_std: str,
    is_trained: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the advantage of each response, `[samples]`; it is the same for all its tokens.

    Sources of `advantage_std`: group, arXiv:2402.03300 section 4.1.2; batch, REINFORCE++,
    arXiv:2501.03262; mean, MaxRL, arXiv:2602.02710; none, Dr. GRPO, arXiv:2503.20783. Of the
    baseline rloo: arXiv:2402.14740.

    Args:
        scores: `[samples]`, those of a group side by side.
        is_trained: bool `[samples]`; None: all. A sample that is not trained on still counts in its
            group, but not in `batch`.
    """
    grouped = scores.double().reshape(-1, group_size)
    if is_trained is None:
        is_trained = torch.ones_like(scores, dtype=torch.bool)
    means = grouped.mean(1, keepdim=True)
    advantages = grouped - baselines(grouped, means, baseline)

    if advantage_std == "batch":
        advantages = standardise(advantages, is_trained, centre=baseline == "none")
    elif advantage_std == "group":
        advantages = advantages / (std_of_groups(advantages) + EPSILON)
    elif advantage_std == "mean":
        # A group of zeros has advantages of 0.
        advantages = torch.where(means > 0, advantages / means, 0.0)
    return advantages.flatten().to(scores.dtype)


def standardise(advantages: torch.Tensor, is_trained: torch.Tensor, centre: bool) -> torch.Tensor:
    """Returns advantages divided by the standard deviation of the trained ones, taken from zero.

    Taken from their mean, it would vanish where all are alike, such as those of the only response
    of each group that was not cut. With fewer than two trained samples nothing is divided.

    Args:
        advantages: `[groups, group size]`.
        centre: subtract the mean of the trained samples first.
    """
    trained = advantages.flatten()[is_trained]
    if len(trained) < 2:
        return advantages
    mean = trained.mean() if centre else 0.0
    deviation = (trained - mean).norm() / math.sqrt(len(trained) - 1)
    return (advantages - mean) / (deviation + EPSILON)


def baselines(grouped: torch.Tensor, means: torch.Tensor, baseline: str) -> torch.Tensor:
    """Returns what is subtracted from each score, `[groups, group size or 1]`."""
    if baseline == "none":
        return torch.zeros_like(means)
    if baseline == "group":
        return means
    # rloo: the mean of the others.
    return (grouped.sum(1, keepdim=True) - grouped) / (grouped.shape[1] - 1)


def std_of_groups(groups: torch.Tensor) -> torch.Tensor:
    """Returns the standard deviation of each group, `[groups, 1]`. NaN counts nowhere."""
    n = groups.isfinite().sum(1, keepdim=True)
    squares = (groups - groups.nanmean(1, keepdim=True)).square()
    return (squares.nansum(1, keepdim=True) / (n - 1).clamp(min=1)).sqrt()


def scale_each(
    parts: dict[str, torch.Tensor], weights: dict[str, float], group_size: int
) -> torch.Tensor:
    """Returns the weighted sum of rewards, each normalised in its group, `[samples]`.

    In the plain sum, differences in one reward could vanish beside those in another of a larger
    scale. Source: GDPO, arXiv:2601.05242.

    Args:
        parts: `[samples]` by name; NaN: the sample has no such reward.
    """
    total = torch.zeros_like(next(iter(parts.values())), dtype=torch.float64)
    for name, part in parts.items():
        groups = part.double().reshape(-1, group_size)
        centred = groups - groups.nanmean(1, keepdim=True)
        scaled = centred / (std_of_groups(groups) + EPSILON)
        # Equal rewards are not told apart by their rounding.
        scaled = scaled.where(scores_differ(groups)[:, None], 0.0)
        total += weights[name] * scaled.nan_to_num(0.0).flatten()
    return total.float()


def scores_differ(groups: torch.Tensor) -> torch.Tensor:
    """Returns which groups have two scores that are not equal, bool `[groups]`. NaN is no score."""
    is_scored = groups.isfinite()
    least = groups.where(is_scored, math.inf).amin(1)
    greatest = groups.where(is_scored, -math.inf).amax(1)
    return least < greatest


def ratios_to_old(
    logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor, ratio: str
) -> torch.Tensor:
    """Returns the ratios of new to old probabilities, `[samples, length]`.

    The ratio of a sequence is the geometric mean of its tokens' ratios, `[samples, 1]`. Source:
    GSPO, arXiv:2507.18071 eq. 7.
    """
    log_ratios = logps - old_logps
    if ratio == "sequence":
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        log_ratios = (log_ratios * mask).sum(1, keepdim=True) / lengths
    return torch.exp(log_ratios)


def policy_losses(
    logps: torch.Tensor,
    ratios: torch.Tensor,
    advantages: torch.Tensor,
    loss_type: str,
    low: float,
    high: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the loss of each token, and whether it was clipped below 1, and above 1.

    All three have the shape of `ratios`, except the losses of `cispo`: `[samples, length]`.

    clip: `-min(r A, clip(r, 1 - low, 1 + high) A)`.
    cispo: `-min(r, 1 + high) A log pi`, the first factor a constant. Every token has a gradient.
    sapo: `-A sigmoid(t (r - 1)) 4 / t`: the gradient fades smoothly as r leaves 1.

    Sources: clip, arXiv:2402.03300 eq. 3; a wider range above 1, DAPO, arXiv:2503.14476 section
    3.1; cispo, arXiv:2506.13585 eq. 4 and 5; sapo, arXiv:2511.20347.

    Args:
        ratios: `[samples, length]` or `[samples, 1]`.
        advantages: `[samples, 1]`.
    """
    is_below = ratios < 1 - low
    is_above = ratios > 1 + high
    if loss_type == "cispo":
        clipped_ratios = ratios.clamp(max=1 + high).detach()
        losses = -clipped_ratios * advantages * logps
        return losses, torch.zeros_like(is_below), is_above & (advantages != 0)
    if loss_type == "sapo":
        temperatures = torch.where(advantages > 0, *SAPO_TEMPERATURES)
        gates = torch.sigmoid(temperatures * (ratios - 1)) * 4 / temperatures
        return -gates * advantages, torch.zeros_like(is_below), torch.zeros_like(is_above)
    clipped = ratios.clamp(1 - low, 1 + high)
    losses = -torch.minimum(ratios * advantages, clipped * advantages)
    return losses, is_below & (advantages < 0), is_above & (advantages > 0)


def divergence_losses(
    logps: torch.Tensor,
    sampler_logps: torch.Tensor,
    advantages: torch.Tensor,
    loss_type: str,
    low: float,
    high: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the loss of each token, and whether it is masked as less likely, or as more likely.

    A token has probability p under the policy, and q under the policy that sampled it. Its loss is
    -A min(p/q, LARGEST_RATIO) log p, the second factor a constant, and 0 where p is too far from q
    already and the update would move it further away. The distance is

        dppo_tv: |p - q|, the total variation between "this token" and "any other";
        dppo_kl: the KL of the same two outcomes, q log(q/p) + (1 - q) log((1 - q)/(1 - p)).

    Source: DPPO, arXiv:2602.04879.

    Args:
        low: the largest distance of a token that has become less likely, at a negative advantage.
        high: that of a token that has become more likely, at a positive advantage.
    """
    log_ratios = (logps - sampler_logps).detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    p = logps.detach().exp()
    q = sampler_logps.exp()
    distance = (p - q).abs()
    if loss_type == "dppo_kl":
        distance = -q * log_ratios + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
    is_below = (advantages < 0) & (p < q) & (distance > low)
    is_above = (advantages > 0) & (p > q) & (distance > high)
    ratios = log_ratios.exp().clamp(max=LARGEST_RATIO)
    losses = -ratios * advantages * logps
    return losses.masked_fill(is_below | is_above, 0.0), is_below, is_above


def kl_losses(
    logps: torch.Tensor, ref_logps: torch.Tensor, ratios: torch.Tensor, estimator: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the estimated KL(policy || reference) of each token, and its term in the loss.

    The old policy sampled the tokens, so the term of each is weighted by its ratio of new to old.
    The mean of ratio * k3 is the KL, so both factors are differentiated. The mean of ratio * k2 is
    not. But its gradient is that of the KL if the ratio is a constant.

    Sources: Schulman 2020, http://joschu.net/blog/kl-approx.html; DeepSeek-V3.2, arXiv:2512.02556
    eq. 7.

    Args:
        ratios: of each token, `[samples, length]`.
    """
    difference = logps - ref_logps
    if estimator == "k2":
        kl = difference**2 / 2
        return kl, kl * ratios.detach()
    kl = torch.exp(-difference) - 1 + difference
    return kl, kl * ratios


def is_off_policy(
    logps: torch.Tensor,
    sampler_logps: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """Returns which responses are too far from the sampler's policy to be unlearned.

    These have a negative advantage, and their tokens have lost more than `limit` of log-prob on
    average since they were sampled; bool `[samples, 1]`. Source: DeepSeek-V3.2,
    arXiv:2512.02556 eq. 9.
    """
    lost = ((sampler_logps - logps.detach()) * mask).sum(1, keepdim=True)
    return (advantages < 0) & (lost > limit * mask.sum(1, keepdim=True))


def average_tokens(
    losses: torch.Tensor, mask: torch.Tensor, average: str, max_new_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss of each sample, and its weight in the mean over an update, `[samples]`.

    Sources: token, DAPO, arXiv:2503.14476 section 3.3; sequence, arXiv:2402.03300 eq. 3; constant,
    Dr. GRPO, arXiv:2503.20783.

    Args:
        losses: `[samples, length]`, or `[samples, 1]` if all tokens of a response have the same.
    """
    lengths = mask.sum(1)
    sums = (losses * mask).sum(1)
    if average == "constant":
        return sums / max_new_tokens, torch.ones_like(sums)
    means = sums / lengths.clamp(min=1)
    if average == "sequence":
        return means, torch.ones_like(sums)
    return means, lengths.to(sums.dtype)  # so each token counts the same


def total_weight(mask: torch.Tensor, average: str) -> int:
    """Returns the sum of the weights that `average_tokens` gives to the samples of this mask."""
    return int(mask.sum()) if average == "token" else len(mask)


def sample_losses(
    model: torch.nn.Module, batch: dict, stored: dict, args: Args, has_moved: bool
) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Returns the losses of samples, the weight of each in their mean, and values to log.

    Args:
        stored: `Rollout.tokens` of the same samples.
        has_moved: whether an update was applied since the rollout was made. If not, the
            log-probs of this very pass are the old ones, so all ratios are exactly 1.
    """
    output = model(batch, args.temperature, extras=("entropy",))
    logps = output["logps"]
    mask = stored["mask"].to(logps.dtype)
    values = {}
    if not has_moved:
        # How far the sampler's log-probs are from those of this pass.
        values = correction.sampler_differences(output, stored, mask)
        stored = {**stored, "logps": logps.detach()}

    ratios = ratios_to_old(logps, stored["logps"], stored["mask"], args.ratio)
    advantages = stored["advantages"]
    how = args.loss_type, args.clip_range, args.clip_range_high
    if args.loss_type.startswith("dppo"):  # it compares with the sampler, not with the old policy
        surrogate = divergence_losses(logps, stored["sampler_logps"], advantages, *how)
    else:
        surrogate = policy_losses(logps, ratios, advantages, *how)
    token_losses, clipped_low, clipped_high = surrogate
    if args.vllm_url and not args.loss_type.startswith("dppo"):
        # A server's log-probs differ from those of training, so the policy's losses are weighted.
        # The KL below is not: its own ratios take the old policy for the sampler.
        corrections, of_sampler = correction.importance_weights(stored, mask, args)
        token_losses = token_losses * corrections
        values |= of_sampler
    if args.off_policy_limit:
        sampler_logps = stored["sampler_logps"]
        is_off = is_off_policy(logps, sampler_logps, mask, advantages, args.off_policy_limit)
        token_losses = token_losses * ~is_off
        values["clip_ratio/off_policy"] = (is_off.flatten().float(), torch.ones_like(mask[:, 0]))
    if args.kl_coef:
        # The ratio of each token, also with --ratio sequence.
        token_ratios = ratios_to_old(logps, stored["logps"], stored["mask"], "token")
        kl, kl_terms = kl_losses(logps, stored["ref_logps"], token_ratios, args.kl_estimator)
        token_losses = token_losses + args.kl_coef * kl_terms
        values["kl"] = (kl, mask)
    losses, shares = average_tokens(token_losses, stored["mask"], args.average, args.max_new_tokens)
    values |= {
        "loss": (losses, shares),
        "clip_ratio/low_mean": (clipped_low.expand_as(mask).float(), mask),
        "clip_ratio/high_mean": (clipped_high.expand_as(mask).float(), mask),
        "entropy": (output["entropy"], mask),
        "policy/approxkl_avg": ((logps - stored["logps"]) ** 2 / 2, mask),
        "val/ratio": (ratios.expand_as(logps), mask),
    }
    return losses, shares, values


# ============================================================ the rollout
@carried
@dataclass
class State(rollout.State):
    """What the run carries from update to update, see `rollout.State`."""

    prompts_seen_when_trainable: int = 0  # when a rollout last had something to train on

    @property
    def prompts_without_update(self) -> int:
        return self.position.prompts_seen - self.prompts_seen_when_trainable


def make_rollout(
    run: Run,
    sampler: Sampler,
    state: State,
    judge: Judge,
    reference: Reference | None,
    packer: Packer,
) -> Rollout | None:
    """Samples groups, scores them, and computes what their updates need.

    Truncated samples that are not trained on (`--mask_truncated`) still count in their group's
    baseline. Returns None if no response is left to train on.
    """
    args = run.args
    samples, scores = sample_groups(run, sampler, state.position, judge, packer)
    is_trained = samples.ended if args.mask_truncated else torch.ones_like(samples.ended)
    if not is_trained.any():
        return None
    if args.advantage_std == "mean" and (scores < 0).any():
        sys.exit(f"--advantage_std mean needs scores of 0 or more; one is {scores.min():g}")
    advantages = estimate_advantages(
        scores, args.n_samples_per_prompt, args.baseline, args.advantage_std, is_trained
    )
    tokens = {
        "mask": samples.mask,
        "advantages": advantages[:, None],
        "sampler_logps": samples.padded_sampler_logps,
    }
    made = Rollout(samples, is_trained, tokens, started_at=run.global_step)
    with run.timed("score"):
        # The first update takes the log-probs of its own pass as the old ones, later ones these.
        names = ("logps",) if made.n_updates(args) > 1 else ()
        computed = rollout.compute_logps(sampler, samples, packer, names, reference)
        samples.check_finite(sampler, **computed)
    made.tokens |= computed
    # `skip_rollout` counts prompts from the last rollout that had something to train on.
    state.prompts_seen_when_trainable = state.position.prompts_seen
    return made


def sample_groups(
    run: Run, sampler: Sampler, position: Position, judge: Judge, packer: Packer
) -> tuple[Samples, torch.Tensor]:
    """Returns the groups of responses that a rollout trains on, and their scores.

    If groups are dropped, further rounds sample the next prompts in their place, until the rollout
    is full, `--refill_rounds` are used up, or the epoch ends.
    """
    args = run.args
    kept_samples = []
    kept_scores = []
    groups_missing = args.rollout_batch_size
    for round_number in range(1 + args.refill_rounds):
        samples, scores = sample_round(
            run, sampler, position, judge, packer, groups_missing, round_number
        )
        kept_samples.append(samples)
        kept_scores.append(scores)
        groups_missing -= len(samples) // args.n_samples_per_prompt
        at_end_of_epoch = position.prompts_seen % run.n_rows == 0
        if groups_missing == 0 or at_end_of_epoch:
            break
    return Samples.joined(kept_samples), torch.cat(kept_scores)


def sample_round(
    run: Run,
    sampler: Sampler,
    position: Position,
    judge: Judge,
    packer: Packer,
    n_prompts: int,
    round_number: int,
) -> tuple[Samples, torch.Tensor]:
    """Samples a group of responses to each prompt, scores them, and keeps groups worth training on.

    Returns:
        The samples of the groups that are kept; what their advantages come from, `[samples]`:
        their scores, see `--reward_scaling`, less the penalty for length.
    """
    args = run.args
    prompts_of_round = position.take_prompts(sampler, n_prompts)
    with run.timed("generate"):
        # Drawn for all processes, so that responses do not depend on how many there are.
        uniforms = position.draw_uniforms(args, len(prompts_of_round["row"]), round_number)
        samples = rollout.sample(sampler, prompts_of_round, uniforms, args.temperature)
        vllm.sample_ahead(sampler, position)  # does nothing without --rollouts_ahead
    samples.check_finite(sampler)
    with run.timed("score"):
        scores = judge.score(sampler, samples, packer)
    compared = scores.total  # what the responses of a group are compared by
    if args.reward_scaling == "each":
        compared = scale_each(scores.parts, judge.weights, args.n_samples_per_prompt)
    # Without the penalty for length: a group that is all right, or all wrong, teaches nothing.
    group_is_kept = groups_to_keep(compared, args)
    penalties = length_penalties(samples.mask.sum(1), args)
    penalised = scores._replace(total=scores.total - penalties)
    log_rollout(run, sampler, samples, penalised, group_is_kept)
    sample_is_kept = group_is_kept.repeat_interleave(args.n_samples_per_prompt)
    return samples.select(sample_is_kept), (compared - penalties)[sample_is_kept]


def log_rollout(
    run: Run, sampler: Sampler, samples: Samples, scores: Scores, is_kept: torch.Tensor
) -> None:
    """Adds the metrics of sampled groups to the next log line, and records the samples.

    Each metric, of any shape, is that of the whole rollout on every process; NaN counts nowhere.
    """
    response_lengths = samples.mask.sum(1)
    logged = {
        "reward": scores.total,
        "completions/mean_length": response_lengths,
        "completions/clipped_ratio": ~samples.ended,
        **samples.of_episodes,
    }
    for name, part in scores.parts.items():
        logged[f"rewards/{name}/mean"] = part
    logged["frac_groups_dropped"] = ~is_kept
    if run.args.n_samples_per_prompt > 1:
        groups = scores.total.double().reshape(-1, run.args.n_samples_per_prompt)
        logged["frac_reward_zero_std"] = ~scores_differ(groups)
        logged["reward_std"] = std_of_groups(groups)
    sampler.means.add_rollout(logged)
    sampler.means.add_rollout({"completions/min_length": response_lengths}, reduce="min")
    sampler.means.add_rollout({"completions/max_length": response_lengths}, reduce="max")
    run.write_samples(samples.examples(sampler.tokenizer, scores, "rollout"))


# TensorBoard's charts: title -> the metrics that it shows together.
CHARTS = {
    "rewards": ["reward", "eval/scores"],
    "right answers": ["eval/exact_match"],
    "entropy, KL to the reference": ["entropy", "kl"],
    "length": ["completions/mean_length", "eval/length"],
}


def main():
    # ============================================================ set-up
    args = arguments.parse(Args, demo="grpo.yaml")
    check_settings(args)
    accelerator = launch.make_accelerator(args, "grpo")  # it also makes the run's folder
    tokenizer = load.tokenizer_of_run(accelerator, args)
    data = rewards.load_prompts(accelerator, args, tokenizer)
    show_preview(accelerator, args, data)  # with --preview: prints rows and exits
    n_prompts = len(data.train)

    # Without dropout, because responses are sampled without.
    policy = prepare.policy(accelerator, args, tokenizer, dropout=False)
    readers = (args.ref_model_name_or_path, args.reward_model_name_or_path)
    sizes = load.check_embeddings(data, args.model_name_or_path, *readers, draws=True)
    policy.vocabulary = min(sizes.values())  # it draws what all can read
    state = State(Position())
    flop = cost.flop(policy)
    # Updates as if no group were dropped; the position tells how much of the data is used up.
    epochs = dict(updates_per_epoch=rollout.n_updates(args, n_prompts), position=state.position)
    run = Run(accelerator, args, n_prompts, flop=flop, bar_metric="reward", charts=CHARTS, **epochs)
    optimizer = optim.build(accelerator, optim.parameter_groups(policy, args), args)
    scheduler = optim.scheduler(optimizer, args, run.total_steps)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer)
    checks.check_logprobs(accelerator, model, data.train[0]["prompt_ids"])

    means = Means(accelerator)
    sampler = Sampler(accelerator, args, tokenizer, model, data, run, means)
    vllm.connect(sampler)  # does nothing without --vllm_url
    episodes.start(sampler)  # does nothing without --environment
    reference = Reference(accelerator, args, tokenizer, model) if args.kl_coef else None
    judge = Judge(sampler)
    models = [model, judge.model, reference.model if reference else None]
    packer = checks.make_packer(
        accelerator, models, max_length=args.max_length, share=args.share_prompts
    )

    actor = Actor(run, model, tokenizer)
    # What must be the same in a run and in the checkpoint it resumes from, besides arguments.
    identity = {**data.fingerprints, **load.base_fingerprints(policy)}
    identity |= judge.fingerprints | (reference.fingerprints if reference else {})
    parts = dict(model=model, optimizer=optimizer, scheduler=scheduler, means=means, actor=actor)
    checkpoint = Checkpoint(run, identity=identity, **parts, rollout=state, ahead=sampler)
    checkpoint.resume()  # sets seeds, loads what --resume names, opens the log
    what = f"{len(data.train)} rows; {packer.describe()}"
    console.begin(
        checkpoint, data=what, updates=rollout.describe_updates(args, n_prompts, run.total_steps)
    )

    # ============================================================ the loop
    max_norm = args.max_grad_norm or math.inf  # inf: the norm is only measured
    if state.prompts_without_update >= run.n_rows:  # as in `skip_rollout`: the run had ended
        run.stopped_early = True
        why = "a whole epoch of prompts led to no update: to go on, resume an earlier checkpoint"
        distributed.warn(accelerator, why)
    if state.position.prompts_seen == 0:  # at the start; `updates_seen` may be 0 later, too
        evaluate(run, actor, sampler, judge, packer)
    while not run.finished:
        if state.rollout is None:
            state.rollout = make_rollout(run, sampler, state, judge, reference, packer)
        if state.rollout is None:  # nothing to train on: take the next prompts
            skip_rollout(run, state, means)  # this may end the run
        else:
            samples = state.rollout.samples
            tokens = state.rollout.tokens
            update = next_update(run, state, packer)
            # What the loss is a mean over: its tokens, or its samples, see --average.
            sum_of_weights = total_weight(tokens["mask"][update.rows], args.average)
            has_moved = run.global_step > state.rollout.started_at  # since it made the rollout
            for rows, weights in update.micro_batches:
                with run.timed("data"):
                    batch, stored = samples.collate(rows, tokens, packer)
                    data_rows = [samples.data_rows[row] for row in rows]
                with accelerator.accumulate(model):
                    losses, shares, values = sample_losses(model, batch, stored, args, has_moved)
                    sample_weights = shares * weights
                    run.check_finite(update, data_rows, losses, sample_weights)
                    # This micro-batch's part of the weighted mean. The engine divides by the
                    # micro-batches of a process and averages over processes: `divisor` undoes both.
                    loss = (losses * sample_weights).sum() * update.divisor / sum_of_weights
                    accelerator.backward(loss)  # DeepSpeed clips and steps in here
                    if accelerator.sync_gradients:  # true once, in the last micro-batch
                        grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                    # With DeepSpeed these do nothing; else they act only in the last micro-batch.
                    optimizer.step()
                    optimizer.zero_grad()
                means.add(values, weights)
                run.count_flop(batch, weights)

            applied = run.count(update, grad_norm)  # False: gradients overflowed
            of_update = dict(learning_rate=scheduler.get_last_lr()[0], loss_scale=update.loss_scale)
            means.close_update(applied, grad_norm=grad_norm, **of_update)
            if applied:
                scheduler.step()
            state.advance(args)  # a skipped update has used up its samples, too

        if run.due(args.logging_steps, first=True):
            run.log(means.reduce())
        if run.due(args.eval_steps):
            evaluate(run, actor, sampler, judge, packer)
        actor.save_if_due()
        checkpoint.save_if_due()  # ends the run if a signal asked for it

    run.log(means.reduce())  # what is in no line yet
    actor.save()
    console.end(actor)


def next_update(run: Run, state: State, packer: Packer) -> Update:
    """Returns the next update of the rollout. All processes agree on its samples."""
    rows = state.rollout.rows_of_update(state.position, run.args)
    # Sorted by these lengths a group stays together where its prompt can be shared.
    lengths = state.rollout.samples.lengths_for_split(packer)
    return run.update_of(rows, lengths, state.rollout.n_tokens(rows))


def skip_rollout(run: Run, state: State, means: Means) -> None:
    """Goes past a rollout that has nothing to train on, with a warning.

    The run ends there if these were its last prompts, or if a whole epoch of prompts has led to no
    update. Without any update, it fails.
    """
    position = state.position
    position.end_rollout()
    run.idle = True  # the model has not changed, so nothing is due until the next update

    message = (
        f"no update: rollout {position.rollouts_seen} has no response to train on (the advantages "
        "of all groups are zero, or all responses are truncated)"
    )
    if state.prompts_without_update >= run.n_rows:
        message += (
            f". The last {state.prompts_without_update} prompts, a whole epoch, led to no update, "
            "so the run ends here"
        )
        run.stopped_early = True
    if run.finished and run.global_step == 0:
        run.log(means.reduce())  # so that the rewards are in the log
        sys.exit(f"{message}. The run has applied no update")
    distributed.warn(run.accelerator, message)


# ============================================================ evaluation
def evaluate(run: Run, actor: Actor, sampler: Sampler, judge: Judge, packer: Packer) -> None:
    """Logs how the policy responds to the held-out prompts, scored as in training."""
    line = {}
    examples = []
    with run.timed("paused"):
        for prefix, eval_set in sampler.data.eval_sets.items():
            samples = rollout.sample_held_out(sampler, eval_set)
            scores = judge.score(sampler, samples, packer)
            penalties = length_penalties(samples.mask.sum(1), run.args)
            scores = scores._replace(total=scores.total - penalties)
            values, shown = rollout.held_out_results(sampler, samples, scores, eval_set, prefix)
            line |= values
            examples += shown
    run.log_evaluation(line, examples)
    actor.keep_best(line)  # may end the run, see --stop_after


# ============================================================ refusals
def check_settings(args: Args) -> None:
    """Refuses settings that would be ignored, or that contradict each other."""
    rewards.check_settings(args)
    loss = f"--loss_type {args.loss_type}"
    unused = [  # where, what is not used there, and what to do
        (
            args.kl_coef == 0,
            ["ref_model_name_or_path", "kl_estimator"],
            "not used, since there is no KL: give --kl_coef above 0, too",
        ),
        (args.overlong_buffer == 0, ["overlong_penalty"], "not used: give --overlong_buffer, too"),
        (args.loss_type == "cispo", ["clip_range"], f"not used: {loss} clips only above 1"),
        (args.loss_type == "sapo", ["clip_range", "clip_range_high"], f"not used by {loss}"),
        (
            args.loss_type.startswith("dppo"),
            ["ratio", "sampler_correction", "sampler_correction_max"],
            f"not used by {loss}, which compares each token with the sampler",
        ),
    ]
    for is_so, names, why in unused:
        if is_so:
            refuse_changed(args, names, why)

    over_rollout = args.baseline == "none" and args.advantage_std == "batch"
    keeps_all = not args.drop_equal_groups or args.kl_coef > 0 or over_rollout
    contradictions = [
        (
            args.n_samples_per_prompt == 1 and args.baseline != "none",
            f"--baseline {args.baseline} compares the responses to a prompt: "
            "--n_samples_per_prompt 1 leaves no other. Take 2 or more, or --baseline none",
        ),
        (
            args.baseline == "none" and args.advantage_std == "group",
            "--baseline none --advantage_std group: equal scores of a group would be divided by "
            f"almost zero, {EPSILON:g}. Take --advantage_std batch or none",
        ),
        (
            args.advantage_std == "mean" and (args.baseline != "group" or args.overlong_buffer > 0),
            "--advantage_std mean divides by a group's mean score: it needs --baseline group and "
            "no penalty for length, which could make that mean zero or negative",
        ),
        (
            args.reward_scaling == "each" and args.advantage_std != "batch",
            "--reward_scaling each divides by the deviation of each group already: it needs "
            "--advantage_std batch",
        ),
        (
            args.refill_rounds > 0 and keeps_all,
            "--refill_rounds replaces dropped groups, and none is dropped with --kl_coef above 0, "
            "--drop_equal_groups false, or --baseline none --advantage_std batch",
        ),
        (
            args.refill_rounds > 0 and args.rollouts_ahead > 0,
            "--refill_rounds decides which prompts the next rollout has, so that --rollouts_ahead "
            "cannot sample them before",
        ),
    ]
    for is_so, message in contradictions:
        if is_so:
            sys.exit(message)
    rollout.check_rollout_size(args)


if __name__ == "__main__":
    errors.run(main)
