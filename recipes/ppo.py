"""Proximal Policy Optimization: sample answers, make those better than expected more likely.

Schulman et al. 2017, arXiv:1707.06347; for language models Ziegler et al. 2019, arXiv:1909.08593,
and the details of Huang et al. 2024, arXiv:2403.17031. Loss of an update, over its response tokens,
with r_t = pi(a_t)/pi_old(a_t), A_t by GAE, whitened in the first term, and V clipped around V_old:

    loss = mean of -min(r_t A_t, clip(r_t, 1 - c, 1 + c) A_t)
                   + vf_coef * 1/2 max((V_t - G_t)^2, (clip(V_t) - G_t)^2),    G_t = A_t + V_old

By default the reward of a token is -kl_coef * KL_t, to which the last token adds the score of the
response.

Demo, offline:
    python recipes/ppo.py
One GPU:
    accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/ppo.py \
        --model_name_or_path M --dataset_name D --reward_model_name_or_path R
N GPUs:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 recipes/ppo.py \
        --model_name_or_path M --dataset_name D --reward_model_name_or_path R
DeepSpeed fp16:
    accelerate launch --config_file accelerate_configs/ds_fp16.yaml recipes/ppo.py

Every metric: docs/ppo.md. Every argument: docs/arguments.md
"""

# ============================================================ imports
import common

# Another package called `common` may come first on the path.
if getattr(common, "PROJECT", None) != "preference-recipes":
    raise SystemExit(
        f"'common' is {common.__file__ or common.__path__[0]}, not this recipe's package: move or "
        "rename it, or keep the recipe in another folder, and `pip install -e` its repository"
    )
common.check_recipe(__file__)

import math
import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from common import (
    actor,
    arguments,
    batches,
    checkpoint,
    console,
    engine,
    errors,
    guards,
    hub,
    launch,
    optim,
)
from common.metrics import Logged, Metrics
from common.progress import Progress
from common.run import Run
from common.shared_args import RewardArgs, arg, refuse_changed
from preference_recipes.data import dataset, prompts
from preference_recipes.models import checks, load, lora, prepare
from preference_recipes.models.logprobs import ActorCritic
from preference_recipes.models.packing import Packer
from preference_recipes.models.reference import Reference
from preference_recipes.rollouts import correction, episodes, evaluation, generation, rewards, vllm
from preference_recipes.rollouts.rewards import Judge, Scores
from preference_recipes.rollouts.samples import Collected, Samples
from preference_recipes.rollouts.schedule import Position, RolloutSchedule
from preference_recipes.tools import preview


# ============================================================ arguments
@dataclass
class Args(RewardArgs):
    ref_model_name_or_path: str | None = arg(
        default=None,
        help="the reference policy; default: the policy before training. Not loaded at --kl_coef 0",
    )
    critic_model_name_or_path: str | None = arg(
        default=None,
        help="what the critic starts from; default: the reward model, or else the policy",
    )
    rollout_batch_size: int = arg(
        default=1024, at_least=1, help="prompts of one rollout, over all processes"
    )

    kl_coef: float = arg(
        default=0.05, at_least=0, help="weight of the KL to the reference; 0: no reference"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = arg(
        default="k1", help="how the KL is estimated from the sampled tokens: docs/ppo.md"
    )
    kl_in: Literal["reward", "loss"] = arg(
        default="reward",
        help="reward: subtracted from each token's reward; loss: a term of the loss",
    )
    kl_target: float = arg(
        default=0.0,
        at_least=0,
        help="adapt --kl_coef to keep the mean KL of a response near this; 0: it stays fixed",
    )
    kl_horizon: float = arg(
        default=10000, help="in samples: the larger, the more slowly --kl_coef adapts"
    )
    reward_clip: float = arg(
        default=0.0, at_least=0, help="scores are clipped to plus and minus this; 0: no clipping"
    )
    missing_eos_penalty: float = arg(
        default=0.0,
        at_least=0,
        help="subtracted from the score of a response that does not end within --max_new_tokens",
    )
    gamma: float = arg(default=1.0, at_least=0, at_most=1, help="discount")
    gae_lambda: float = arg(
        default=1.0, at_least=0, at_most=1, help="lambda of generalised advantage estimation"
    )
    clip_range: float = arg(
        default=0.2, at_least=0, help="clipping of the ratio, below and above 1"
    )
    clip_range_high: float | None = arg(
        default=None, at_least=0, help="clipping of the ratio above 1; default: --clip_range"
    )
    dual_clip: float = arg(
        default=0.0,
        help="the largest ratio that counts where the advantage is negative; above 1, or 0: no "
        "bound",
    )
    value_clip_range: float = arg(
        default=0.2, at_least=0, help="clipping of the values around the old ones; 0: none"
    )
    vf_coef: float = arg(default=0.1, at_least=0, help="weight of the value loss")
    critic_warmup_rollouts: int = arg(
        default=0, at_least=0, help="rollouts at the start in which only the critic learns"
    )

    train_batch_size: int = arg(
        default=128, at_least=1, help="samples of one update, over all processes"
    )
    max_length: int = arg(
        default=1024,
        at_least=2,
        help="tokens of prompt and response together; prompts without room for --max_new_tokens "
        "are left out",
    )
    learning_rate: float = arg(
        default=1e-6, with_lora=1e-5, at_least=0, help="peak learning rate of the actor"
    )
    critic_learning_rate: float = arg(
        default=1e-5, with_lora=1e-4, at_least=0, help="peak learning rate of the critic"
    )
    max_grad_norm: float = arg(
        default=1.0, at_least=0, help="clipping of the joint norm of actor and critic; 0: none"
    )


# ============================================================ the algorithm
def kl_estimate(logps: torch.Tensor, ref_logps: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimates KL(policy || reference) of each token from the sampled token alone.

    "Unbiased" assumes that the policy itself sampled the tokens. With `--kl_in loss` this holds
    until the rollout's first update.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    difference = logps - ref_logps
    if estimator == "k1":  # unbiased, may be negative
        return difference
    if estimator == "k2":  # biased, never negative, little variance
        return difference**2 / 2
    return torch.exp(-difference) - 1 + difference  # k3: unbiased, never negative


def final_scores(
    scores: torch.Tensor, ended: torch.Tensor, reward_clip: float, missing_eos_penalty: float
) -> torch.Tensor:
    """Clips the scores `[samples]`, then subtracts a penalty where a response does not end."""
    if reward_clip:
        scores = scores.clamp(-reward_clip, reward_clip)
    return scores - missing_eos_penalty * ~ended


def token_rewards(
    scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float
) -> torch.Tensor:
    """Returns the reward of each token `[samples, length]`, zero past the end of each response.

    It is minus `kl_coef` times the KL of the token. The last token also gets the score `[samples]`
    of the response. Source: arXiv:1909.08593 eq. 2.
    """
    is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    return torch.where(mask, -kl_coef * kl, 0.0) + is_last * scores[:, None]


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns advantages and returns `[samples, length]`, zero past the end of each response.

    After the last token the value is zero. Tokens that an environment wrote are skipped: the state
    after an answer is the one in which the policy samples its next token. Sources: Generalised
    Advantage Estimation, arXiv:1506.02438 eq. 16; a return is advantage plus value, TD(lambda).
    """
    values = torch.where(mask, values, 0.0)
    advantages = torch.zeros_like(values)
    next_values = torch.zeros_like(values[:, 0])
    last_gae = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        is_token = mask[:, t]
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        last_gae = torch.where(is_token, delta + gamma * gae_lambda * last_gae, last_gae)
        next_values = torch.where(is_token, values[:, t], next_values)
        advantages[:, t] = torch.where(is_token, last_gae, 0.0)
    returns = torch.where(mask, advantages + values, 0.0)
    return advantages, returns


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns values with mean 0 and standard deviation 1 where `mask` is true; elsewhere 0."""
    kept = values[mask].double()
    whitened = (values - kept.mean()) * torch.rsqrt(kept.var(unbiased=False) + 1e-8)
    return torch.where(mask, whitened, 0.0).to(values.dtype)


def policy_losses(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the policy loss of each token, and whether clipping decided it.

    With `dual_clip`, the loss is at most `-A * dual_clip` where the advantage A is negative.
    Sources: arXiv:1707.06347 eq. 7; another range above 1: DAPO, arXiv:2503.14476 section 3.1;
    dual clip: arXiv:1912.09729.
    """
    ratios = torch.exp(logps - old_logps)
    unclipped = -advantages * ratios
    clipped = -advantages * ratios.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(unclipped, clipped)
    if dual_clip:
        bounded = torch.minimum(losses, -advantages * dual_clip)
        losses = torch.where(advantages < 0, bounded, losses)
    return losses, losses != unclipped


def value_losses(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss of each token's value, and whether clipping decided it.

    Source: the original PPO code, see arXiv:2403.17031.
    """
    clipped_values = values
    if clip:
        # Not old + clamp(values - old): its rounding would count as clipping.
        clipped_values = values.clamp(old_values - clip, old_values + clip)
    unclipped = (values - returns) ** 2
    clipped = (clipped_values - returns) ** 2
    return torch.maximum(unclipped, clipped) / 2, clipped > unclipped


def explained_variance(
    values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Returns the share of the returns' variance over tokens that the critic's values explain.

    It is 1 - Var(returns - values) / Var(returns): 1 if both agree up to a constant, 0 if a
    constant would predict the returns as well, below 0 if a constant would do better. NaN if the
    returns hardly differ.
    """
    kept = returns[mask].double()
    residuals = kept - values[mask].double()
    variance = kept.var(unbiased=False)
    return torch.where(variance > 1e-8, 1 - residuals.var(unbiased=False) / variance, torch.nan)


def next_kl_coef(kl_coef: float, kl: float, target: float, horizon: float, samples: int) -> float:
    """Returns the KL coefficient after a rollout whose responses had the KL `kl` on average.

    Source: arXiv:1909.08593 section 2.2 and its code.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * samples / horizon)


def losses_and_metrics(
    output: dict,
    old: dict,
    weights: torch.Tensor,
    args: Args,
    kl_coef: float,
    actor_learns: bool,
) -> tuple[torch.Tensor, torch.Tensor, list[Logged]]:
    """Returns the losses of response tokens, their weights, and what to log about them.

    Args:
        output: what `ActorCritic.forward` returned, with `entropy`.
        old: `Rollout.tokens` of the same samples.
        weights: `[samples]`, 0 for a padding row.
        kl_coef, actor_learns: those of the rollout.

    Returns:
        losses and weights `[samples, length]`; metrics.
    """
    logps = output["logps"]
    log_ratios = logps - old["logps"]
    clip_high = args.clip_range if args.clip_range_high is None else args.clip_range_high
    actor_losses, policy_clipped = policy_losses(
        logps,
        old["logps"],
        old["advantages"],
        clip_low=args.clip_range,
        clip_high=clip_high,
        dual_clip=args.dual_clip,
    )
    critic_losses, value_clipped = value_losses(
        output["values"], old["values"], old["returns"], args.value_clip_range
    )
    token_weights = old["mask"] * weights[:, None]
    actor_terms = actor_losses  # times the correction, plus the KL, where there are any
    sampler_metrics = []
    if args.vllm_url:
        # A server's log-probs differ from those of training, so the actor's losses are weighted.
        # The critic is not corrected: it fits the returns of these samples, whoever drew them.
        corrections, sampler_metrics = correction.importance_weights(old, token_weights, args)
        actor_terms = actor_terms * corrections
    if args.kl_in == "loss":  # then `check_kl` has seen to it that there is a reference
        kl = kl_estimate(logps, old["ref_logps"], args.kl_estimator)
        actor_terms = actor_terms + kl_coef * kl
    # While only the critic learns, the actor's gradient is zero. It must exist: engines expect it.
    losses = actor_terms * float(actor_learns) + args.vf_coef * critic_losses

    per_token = {
        "loss/policy_avg": actor_losses,  # without correction and KL
        "loss/value_avg": critic_losses,
        "loss": losses,
        "policy/approxkl_avg": log_ratios**2 / 2,
        "policy/clipfrac_avg": policy_clipped.float(),
        "policy/entropy_avg": output["entropy"],
        "val/clipfrac_avg": value_clipped.float(),
        "val/ratio": torch.exp(log_ratios),
    }
    return losses, token_weights, [Logged(per_token, token_weights), *sampler_metrics]


def first_pass_metrics(output: dict, stored: dict, weights: torch.Tensor) -> list[Logged]:
    """Returns what is logged while the policy is still the one that made the rollout.

        sampling/*          how far the sampler's log-probs are from those of this pass
        val/max_rounding    how far the ratios to the stored log-probs are from 1, since other
                            micro-batches rounded these differently

    Args:
        output: of this pass, with `logps`.
        stored: `Rollout.tokens` of the same samples.
        weights: `[samples]`, 0 for a padding row.
    """
    token_weights = stored["mask"] * weights[:, None]
    log_ratios = output["logps"].detach() - stored["logps"]
    rounding = {"val/max_rounding": log_ratios.expm1().abs()}
    return [
        *correction.sampler_differences(output, stored, token_weights),
        Logged(rounding, token_weights, reduce="max"),
    ]


# ============================================================ the rollout
@checkpoint.carried
@dataclass
class Rollout:
    """Samples and what their updates need to know about them; on the CPU of every process.

    Attributes:
        samples: prompts and responses.
        tokens: tensors `[samples, longest response]` by name: `mask logps sampler_logps values
            advantages returns`, and `ref_logps` where there is a reference.
        kl_coef: the coefficient of the KL when the rollout was made.
        actor_learns: false while only the critic does.
        started_at: `global_step` before the rollout's first update.
    """

    samples: Samples
    tokens: dict[str, torch.Tensor]
    kl_coef: float
    actor_learns: bool
    started_at: int


@checkpoint.carried
@dataclass
class State:
    """What a run carries from update to update.

    Attributes:
        position: where the run is in its prompts and rollouts.
        kl_coef: the coefficient of the KL for the next rollout.
        rollout: the one whose updates are being made; None: the next one is due.
    """

    position: Position
    kl_coef: float
    rollout: Rollout | None = None


def make_rollout(run: Run, judge: Judge, reference: Reference | None, packer: Packer) -> Rollout:
    """Samples responses, scores them, and estimates the advantage of each of their tokens."""
    args = run.args
    state: State = run.extra
    position = state.position
    prompts_of_rollout = position.take_prompts(run, args.rollout_batch_size)
    with run.metrics.timed("generate"):
        # Drawn for all processes, so that responses do not depend on how many there are.
        uniforms = position.draw_uniforms(args, len(prompts_of_rollout["row"]))
        samples = generation.sample(run, prompts_of_rollout, uniforms, args.temperature)
        vllm.sample_ahead(run)  # does nothing without --rollouts_ahead
    with run.metrics.timed("score"):
        scores = score(run, judge, samples, packer)
        computed = compute_logps_and_values(run, samples, reference, packer)
    # Checked now, because whitening would spread a single NaN to all samples.
    samples.check_finite(run, scores=scores.total[:, None], **computed)

    logps = computed["logps"]
    values = computed["values"]
    mask = samples.mask
    kl = torch.zeros_like(logps)
    if reference is not None:
        kl = kl_estimate(logps, computed["ref_logps"], args.kl_estimator).where(mask, 0.0)
    # With --kl_in loss the KL is not part of the rewards.
    reward_kl_coef = state.kl_coef if args.kl_in == "reward" else 0.0
    per_token_rewards = token_rewards(scores.total, kl, mask, reward_kl_coef)
    advantages, returns = gae(
        per_token_rewards, values, mask, gamma=args.gamma, gae_lambda=args.gae_lambda
    )
    rollout = Rollout(
        samples=samples,
        tokens={
            "mask": mask,
            **computed,
            "sampler_logps": samples.padded_sampler_logps,
            "returns": returns,
            "advantages": whiten(advantages, mask),
        },
        kl_coef=state.kl_coef,
        actor_learns=position.rollouts_seen >= args.critic_warmup_rollouts,
        started_at=run.progress.global_step,
    )
    log_rollout(run, rollout, scores, kl=kl, per_token_rewards=per_token_rewards)
    # While only the critic learns, the actor does not move: its KL tells nothing about the
    # coefficient.
    if args.kl_target and rollout.actor_learns:
        adapt_kl_coef(state, args, kl.sum(1))
    return rollout


def adapt_kl_coef(state: State, args: Args, kl_of_samples: torch.Tensor) -> None:
    """Sets the coefficient of the KL for the next rollout."""
    state.kl_coef = next_kl_coef(
        state.kl_coef,
        kl=kl_of_samples.mean().item(),
        target=args.kl_target,
        horizon=args.kl_horizon,
        samples=len(kl_of_samples),
    )


def score(run: Run, judge: Judge, samples: Samples, packer: Packer) -> Scores:
    """Returns the scores of responses, clipped, less the penalty of those that do not end."""
    args = run.args
    scores = judge.score(run, samples, packer)
    total = final_scores(scores.total, samples.ended, args.reward_clip, args.missing_eos_penalty)
    return scores.with_total(total)


@torch.no_grad()
def compute_logps_and_values(
    run: Run, samples: Samples, reference: Reference | None, packer: Packer
) -> dict[str, torch.Tensor]:
    """Returns `logps` and `values` of response tokens, and `ref_logps` if there is a reference.

    `logps` are computed by the training model, not taken from generation, which rounds differently.

    Returns:
        `[samples, longest response]` each, zero past the end of each response,
        the same on every process.
    """
    temperature = run.args.temperature
    collected = Collected(run.accelerator)
    with checks.evaluation_mode(run.model):
        for rows, batch in samples.scoring_batches(run, packer):
            output = run.model(batch, temperature)
            per_token = {"logps": output["logps"], "values": output["values"]}
            if reference is not None:
                per_token["ref_logps"] = reference.logps(batch, temperature)
            collected.add(rows, batch["mask"], **per_token)
    return collected.gather()


def log_rollout(
    run: Run,
    rollout: Rollout,
    scores: Scores,
    kl: torch.Tensor,
    per_token_rewards: torch.Tensor,
) -> None:
    """Adds a rollout's metrics to the next log line, and records its samples.

    Args:
        kl, per_token_rewards: `[samples, longest response]`, zero past the end of each response.
    """
    samples = rollout.samples
    tokens = rollout.tokens
    mask = tokens["mask"]
    response_lengths = mask.sum(1)
    rlhf_rewards = per_token_rewards.sum(1)
    explained = explained_variance(tokens["values"], tokens["returns"], mask)
    logged = {
        "objective/entropy": -tokens["logps"].sum(1),
        "objective/scores": scores.total,
        "objective/kl_coef": torch.full_like(scores.total, rollout.kl_coef),
        "objective/non_score_reward": rlhf_rewards - scores.total,
        "objective/rlhf_reward": rlhf_rewards,
        "val/explained_variance": explained.expand(len(samples)),
        "val/returns_avg": tokens["returns"].where(mask, torch.nan),  # NaN counts nowhere
        "responses/length": response_lengths,
        "responses/eos_rate": samples.ended,
        **samples.of_episodes,
    }
    if "ref_logps" in tokens:
        logged["objective/kl"] = kl.sum(1)
    for name, part in scores.parts.items():
        logged[f"rewards/{name}/mean"] = part
    run.metrics.add_rollout(logged)
    run.metrics.add_rollout({"responses/min_length": response_lengths}, reduce="min")
    run.metrics.add_rollout({"responses/max_length": response_lengths}, reduce="max")
    run.metrics.log_samples(scores.total, samples.examples(run.tokenizer, scores, "rollout"))


# ============================================================ the updates of a rollout
def updates_of(rollout: Rollout, args: Args) -> int:
    """Returns the number of updates that a rollout makes."""
    # Rounded up, because the last rollout of an epoch may be short.
    updates_per_pass = math.ceil(len(rollout.samples) / args.train_batch_size)
    return args.num_epochs_per_rollout * updates_per_pass


def rows_of_update(rollout: Rollout, position: Position, args: Args) -> np.ndarray:
    """Returns which samples of the rollout form its next update, in a seeded order.

    In the last rollout of an epoch, the last update of a pass may have fewer samples.
    """
    # The rollout is like a data set, and a pass over it like an epoch.
    return batches.rows_of_update(
        len(rollout.samples), args.train_batch_size, position.order_seed(args), position.update
    )


def advance_rollout(run: Run) -> None:
    """Counts an update. After the last one of its rollout, the next rollout is due."""
    state: State = run.extra
    state.position.update += 1
    if state.position.update == updates_of(state.rollout, run.args):
        state.position.end_rollout()
        state.rollout = None


def set_learning_rates(run: Run, rollout: Rollout) -> dict[str, float]:
    """Sets the learning rates of actor and critic for the next update; returns them as metrics.

    In the critic's warm-up the actor's is 0, so its weights do not decay either, and Adam does not
    count its steps, see `optim.hold_step_counts`.
    """
    held = [] if rollout.actor_learns else ["actor"]
    rates = optim.set_learning_rates(run, held)
    return {"learning_rate": rates["actor"], "critic_learning_rate": rates["critic"]}


def note_joint_clipping(run: Run, grad_norm: float) -> None:
    """Prints a note, once, if the joint norm of actor and critic is far above `--max_grad_norm`.

    Clipping then divides the actor's gradient by as much as the critic's. DeepSpeed can only clip
    by the joint norm of all parameters, so every engine does here.
    """
    args = run.args
    if args.max_grad_norm and grad_norm > 10 * args.max_grad_norm:
        run.metrics.note_once(
            "joint clipping",
            f"the gradient of update {run.progress.global_step} has norm {grad_norm:.3g}. Actor "
            f"and critic are clipped together to --max_grad_norm {args.max_grad_norm:g}, which "
            "divides both gradients by the same number. Usually the critic's is the large one, "
            "because scores are far from 0: scale them to about 1 (your reward function, "
            "--normalize_reward, --reward_clip), or lower --vf_coef in proportion",
        )


def make_actor_critic(tokenizer, args: Args) -> ActorCritic:
    """Loads actor and critic. `--critic_model_name_or_path` says what the critic starts from."""
    critic_name = (
        args.critic_model_name_or_path or args.reward_model_name_or_path or args.model_name_or_path
    )
    actor_model = load.causal_lm(args.model_name_or_path, tokenizer, args)
    critic_model = load.score_model(critic_name, tokenizer, args, new_head=True)
    return ActorCritic(actor_model, critic_model)


def parameter_groups(policy: ActorCritic, args: Args) -> list[dict]:
    """Returns the optimizer's groups: actor and critic have learning rates of their own."""
    actor_groups = optim.parameter_groups(
        policy.model, args.weight_decay, lr=args.learning_rate, name="actor"
    )
    critic_groups = optim.parameter_groups(
        policy.critic, args.weight_decay, lr=args.critic_learning_rate, name="critic"
    )
    return actor_groups + critic_groups


# TensorBoard's charts: title -> the metrics that it shows together.
CHARTS = {
    "scores": ["objective/scores", "eval/scores"],
    "right answers": ["eval/exact_match"],
    "KL to the reference": ["objective/kl"],
    "losses": ["loss/policy_avg", "loss/value_avg"],
    "entropy": ["objective/entropy"],
    "length": ["responses/length", "eval/length"],
}


def main():
    # ============================================================ accelerator
    args = arguments.parse(Args, demo=common.ASSETS / "ppo.yaml")
    check_settings(args)
    # This also fills in output_dir and the size of micro-batches.
    accelerator = launch.make_accelerator(args, "ppo")
    lora.complete_settings(accelerator, args)  # fills in lora_alpha

    # ============================================================ data
    tokenizer = load.tokenizer_of_run(accelerator, args)
    data = dataset.load_data(
        accelerator,
        args,
        tokenizer,
        function=prompts.prompt_row,
        max_new_tokens=args.max_new_tokens,
        tools=episodes.tools(args),
    )
    rewards.check_signatures(args, data)  # can the functions be called with these columns?
    preview.show(accelerator, args, data)  # with --preview: prints rows and exits
    plan = RolloutSchedule(args, n_prompts=data.mixture.samples)
    progress = Progress(
        data.mixture.samples,
        args.train_batch_size,
        args.max_epochs,
        args.max_steps,
        updates_per_epoch=plan.updates_per_epoch,
    )
    check_critic_warmup(args, plan, progress.total_steps)

    # ============================================================ model and optimizer
    policy = make_actor_critic(tokenizer, args)
    prepare.disable_dropout(policy)  # because responses are sampled without dropout
    prepare.choose_parameters(accelerator, policy, args)  # what is trained: all, or adapters
    optimizer = optim.adamw(accelerator, parameter_groups(policy, args), args)
    scheduler = optim.scheduler(optimizer, args, progress.total_steps)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer, args.debug_overflow)
    metrics = Metrics(
        accelerator,
        args,
        progress,
        bar_metric="objective/scores",
        bar_label=f"scores_at_temperature_{args.temperature:g}",
        charts=CHARTS,
        flop=lora.flop(policy),  # operations, for perf/mfu
    )
    run = Run(
        accelerator=accelerator,
        args=args,
        tokenizer=tokenizer,
        data=data,
        model=model,
        unwrapped=policy,
        optimizer=optimizer,
        scheduler=scheduler,
        progress=progress,
        metrics=metrics,
        models=lora.fingerprints(accelerator, policy),  # bases of adapters: a resume checks them
        extra=State(Position(), args.kl_coef),  # what the loop carries; saved in checkpoints
        saved_with_actor={"critic": policy.critic.model},
    )
    # Refuses a model whose architecture is not interpreted correctly.
    checks.check_logprobs(run, data.train[0]["prompt_ids"])
    vllm.connect(run)  # does nothing without --vllm_url
    episodes.start(run)  # does nothing without --environment

    # ============================================================ reference and rewards
    # Only the KL needs the reference. With LoRA it is the policy without its adapters, and then
    # `with_values=False` spares the critic's pass.
    reference = Reference(run, with_values=False) if args.kl_coef else None
    judge = Judge(run)
    models = [model, judge.model, reference.model if reference else None]
    packer = checks.make_packer(run, models, args.share_prompts)

    # ============================================================ the loop
    state = checkpoint.begin(run)  # `run.extra`, which a resume replaces
    console.begin(
        run,
        data=f"{len(data.train)} rows; {packer.describe('their responses', each='response')}",
        updates=plan.describe(progress.total_steps),
    )
    guard = guards.FiniteLosses(run)  # ends the run if a loss is not finite
    max_norm = args.max_grad_norm or math.inf  # inf: the norm is only measured
    if progress.updates_seen == 0:
        evaluate(run, judge, packer)
    while not progress.finished:
        if state.rollout is None:
            state.rollout = make_rollout(run, judge, reference, packer)
        rollout = state.rollout

        # All processes agree on the samples of this update. Each takes its share of them.
        update_rows = rows_of_update(rollout, state.position, args)
        update_tokens = int(rollout.samples.lengths[update_rows].sum())  # prompts and responses
        response_tokens = int(rollout.tokens["mask"][update_rows].sum())  # the loss is their mean
        micro_batches = batches.split_update(run, update_rows, rollout.samples.lengths)
        divisor = engine.begin_update(run, micro_batches)  # micro-batches x processes
        loss_scale = engine.loss_scale(run)  # for the log: the update may change it
        learning_rates = set_learning_rates(run, rollout)
        policy_has_moved = progress.global_step > rollout.started_at  # since it made the rollout

        for micro_batch in micro_batches:
            with metrics.timed("data"):
                data_rows = [rollout.samples.data_rows[row] for row in micro_batch.rows]
                weights = batches.send(micro_batch.weights, run.device)  # 0: a padding row
                batch, stored = rollout.samples.collate(micro_batch.rows, rollout.tokens, packer)

            with accelerator.accumulate(model):
                output = model(batch, args.temperature, extras=("entropy",))
                if policy_has_moved:
                    old = stored
                else:
                    metrics.pending.add(first_pass_metrics(output, stored, weights))
                    # The log-probs of this very pass are the old ones, so all ratios are exactly 1.
                    old = {**stored, "logps": output["logps"].detach()}
                losses, token_weights, logged = losses_and_metrics(
                    output,
                    old,
                    weights,
                    args=args,
                    kl_coef=rollout.kl_coef,
                    actor_learns=rollout.actor_learns,
                )
                guard.check(data_rows, losses, token_weights, old=old, new=output)
                # Part of the mean over the update's tokens; the engine divides by `divisor`.
                loss = (losses * token_weights).sum() * divisor / response_tokens
                accelerator.backward(loss)  # DeepSpeed clips and steps in here
                if accelerator.sync_gradients:  # true once, in the update's last micro-batch
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                # With DeepSpeed these do nothing; else they act in the last micro-batch only.
                optimizer.step()
                optimizer.zero_grad()
            metrics.pending.add(logged)
            metrics.count_flop(batch, micro_batch.weights)

        applied = not accelerator.optimizer_step_was_skipped  # skipped: gradients overflowed
        progress.update_done(applied, samples=len(update_rows), tokens=update_tokens)
        metrics.update_done(applied, grad_norm=grad_norm, **learning_rates, loss_scale=loss_scale)
        if applied:
            scheduler.step()
            note_joint_clipping(run, float(grad_norm))
        advance_rollout(run)  # a skipped update has used up its samples, too

        log_evaluate_save(run, judge, packer)

    actor.publish(run)
    metrics.close()
    console.end(run)
    hub.push(run)


def log_evaluate_save(run: Run, judge: Judge, packer: Packer) -> None:
    """Logs, evaluates and saves what is due, and ends the run if a signal asks for it."""
    args = run.args
    if run.progress.log_due(args.logging_steps):
        run.metrics.log()
    if run.progress.evaluation_due(args.eval_steps):
        evaluate(run, judge, packer)
    if run.progress.save_due(args.save_steps):
        checkpoint.save(run)
    if run.progress.save_due(args.save_actor_steps):
        actor.publish_step(run)
    checkpoint.stop_if_asked(run)


# ============================================================ evaluation
def evaluate(run: Run, judge: Judge, packer: Packer) -> None:
    """Logs how the policy responds to the held-out prompts, scored as in training."""
    evaluation.evaluate(run, lambda samples: score(run, judge, samples, packer))


# ============================================================ refusals
def check_settings(args: Args) -> None:
    """Refuses settings that would be ignored or cannot work."""
    rewards.check_settings(args)
    evaluation.check_settings(args)
    vllm.check_settings(args)
    check_rollout_size(args)
    check_kl(args)
    if args.environment_errors == "drop":
        sys.exit("--environment_errors drop: only for GRPO, whose groups can do without a response")
    if args.dual_clip and args.dual_clip <= 1:
        sys.exit(f"--dual_clip {args.dual_clip}: expected more than 1, or 0 for none")


def describe_rollout(args: Args) -> str:
    """Returns the arithmetic of a rollout's samples, for messages."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    return (
        f"--rollout_batch_size {args.rollout_batch_size} x --n_samples_per_prompt "
        f"{args.n_samples_per_prompt} = {samples} samples"
    )


def check_rollout_size(args: Args) -> None:
    """Refuses a rollout that is no whole number of updates, and names the nearest valid sizes."""
    # Valid sizes are the multiples of the fewest prompts whose samples make whole updates.
    samples_of_fewest = math.lcm(args.train_batch_size, args.n_samples_per_prompt)
    fewest_prompts = samples_of_fewest // args.n_samples_per_prompt
    if args.rollout_batch_size % fewest_prompts == 0:
        return
    below = args.rollout_batch_size // fewest_prompts * fewest_prompts
    nearest = " or ".join(str(size) for size in (below, below + fewest_prompts) if size)
    sys.exit(
        f"{describe_rollout(args)} are not a multiple of --train_batch_size "
        f"{args.train_batch_size}. Nearest valid sizes: --rollout_batch_size {nearest}."
    )


def check_critic_warmup(args: Args, plan: RolloutSchedule, total_steps: int) -> None:
    """Refuses a run in which the actor does not learn."""
    # By epochs, since the last rollout of an epoch may have fewer updates.
    epochs, rollouts_beyond = divmod(args.critic_warmup_rollouts, plan.rollouts_per_epoch)
    warmup_steps = epochs * plan.updates_per_epoch + rollouts_beyond * plan.updates_per_rollout
    if warmup_steps >= total_steps:
        sys.exit(
            f"--critic_warmup_rollouts {args.critic_warmup_rollouts}: that is {warmup_steps} "
            f"updates, and the run has only {total_steps}, so the actor would learn nothing"
        )


def check_kl(args: Args) -> None:
    """Refuses settings of the KL that would be ignored or cannot work."""
    if args.kl_coef == 0:
        of_kl = ["ref_model_name_or_path", "kl_estimator", "kl_in"]
        refuse_changed(args, of_kl, "not used, since there is no KL: give --kl_coef above 0, too")
    if args.kl_target == 0:
        refuse_changed(args, ["kl_horizon"], "not used: give --kl_target above 0, too")
    if args.kl_in == "loss" and args.kl_estimator == "k1":
        sys.exit(
            "--kl_in loss --kl_estimator k1: its mean gradient is zero. Use k2, or k3, whose mean "
            "gradient is that of KL(reference || policy)"
        )
    if args.kl_target and args.kl_coef <= 0:
        sys.exit(f"--kl_target {args.kl_target} needs --kl_coef above 0")
    # Otherwise one rollout could change the sign of the coefficient, see next_kl_coef.
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if args.kl_target and args.kl_horizon <= samples / 5:
        sys.exit(
            f"{describe_rollout(args)}: --kl_target needs --kl_horizon above a fifth of them "
            f"({samples / 5:g})"
        )


if __name__ == "__main__":
    errors.run(main)
