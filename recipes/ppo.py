"""Proximal Policy Optimization: sample answers, make those better than expected more likely.

Schulman et al. 2017, arXiv:1707.06347; for language models Ziegler et al. 2019, arXiv:1909.08593,
and the details of Huang et al. 2024, arXiv:2403.17031. Loss of an update, over its response tokens,
with r_t = pi(a_t)/pi_old(a_t), A_t by GAE, whitened in the first term, and V clipped around V_old:

    loss = mean of -min(r_t A_t, clip(r_t, 1 - c, 1 + c) A_t)
                   + vf_coef * 1/2 max((V_t - G_t)^2, (clip(V_t) - G_t)^2),    G_t = A_t + V_old

By default the reward of a token is -kl_coef * KL_t, to which the last token adds the score of the
response.

The demo, offline:
    python recipes/ppo.py
Your own model and data on 8 GPUs; accelerate_configs/ has the other ways to launch:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 recipes/ppo.py \
        --model_name_or_path M --dataset_name D --reward_model_name_or_path R

Every metric: docs/ppo.md. Every argument: docs/arguments.md
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

import numpy as np
import torch

from common import arguments, batches, console, errors, launch, optim
from common.actor import Actor
from common.checkpoint import Checkpoint, carried
from common.metrics import Means
from common.run import Run
from common.shared_args import arg, refuse_changed
from preference_recipes.models import checks, cost, load, prepare
from preference_recipes.models.packing import Packer
from preference_recipes.models.reference import Reference
from preference_recipes.models.scores import ActorCritic, score_model
from preference_recipes.rollouts import correction, episodes, rewards, vllm
from preference_recipes.rollouts.args import RewardArgs
from preference_recipes.rollouts.rewards import Judge, Scores
from preference_recipes.rollouts.rollout import (
    Position,
    Rollout,
    State,
    compute_logps,
    describe_updates,
    held_out_results,
    n_updates,
    sample,
    sample_held_out,
)
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import Samples
from preference_recipes.tools import show_preview


# ============================================================ arguments
@dataclass
class Args(RewardArgs):
    ref_model_name_or_path: str | None = arg(None, "reference; default: the policy before training")
    critic_model_name_or_path: str | None = arg(
        None, "what the critic starts from; default: reward model, or else policy"
    )
    rollout_batch_size: int = arg(1024, "prompts of one rollout", at_least=1)
    kl_coef: float = arg(0.05, "weight of the KL to the reference; 0: no reference", at_least=0)
    kl_estimator: Literal["k1", "k2", "k3"] = arg("k1", "estimate of the KL")
    kl_in: Literal["reward", "loss"] = arg("reward", "what the KL is subtracted from or added to")
    kl_target: float = arg(0.0, "the KL that --kl_coef adapts to; 0: it stays fixed", at_least=0)
    kl_horizon: float = arg(10000, "in samples: the larger, the more slowly --kl_coef adapts")
    reward_clip: float = arg(0.0, "scores are clipped to plus and minus this; 0: not", at_least=0)
    missing_eos_penalty: float = arg(0.0, "off the score of a response without an end", at_least=0)
    gamma: float = arg(1.0, "discount", at_least=0, at_most=1)
    gae_lambda: float = arg(1.0, "lambda of GAE", at_least=0, at_most=1)
    clip_range: float = arg(0.2, "clipping of the ratio, below and above 1", at_least=0)
    clip_range_high: float | None = arg(
        None, "clipping of the ratio above 1; default: clip_range", at_least=0
    )
    dual_clip: float = arg(0.0, "largest ratio at a negative advantage; 0: no bound")
    value_clip_range: float = arg(0.2, "clipping around the old values; 0: none", at_least=0)
    vf_coef: float = arg(0.1, "weight of the value loss", at_least=0)
    train_batch_size: int = arg(128, "samples of one update", at_least=1)
    max_length: int = arg(1024, "tokens of prompt and --max_new_tokens together", at_least=2)
    learning_rate: float = arg(1e-6, "peak learning rate of the actor", with_lora=1e-5, at_least=0)
    critic_learning_rate: float = arg(
        1e-5, "peak learning rate of the critic", with_lora=1e-4, at_least=0
    )
    max_grad_norm: float = arg(1.0, "of actor and critic together; 0: no clipping", at_least=0)


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

    The last token also gets the score `[samples]` of the response. Source: arXiv:1909.08593 eq. 2.
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

    Below 0 a constant would do better. NaN if the returns hardly differ.
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


def token_losses(
    model: torch.nn.Module,
    batch: dict,
    stored: dict,
    rollout: "PPORollout",
    args: Args,
    policy_has_moved: bool,
) -> tuple[torch.Tensor, dict]:
    """Returns the losses of response tokens `[samples, length]`, and values to log about them.

    Args:
        stored: `rollout.tokens` of the same samples.
        policy_has_moved: whether an update was applied since the rollout was made. If not, the
            log-probs of this very pass are the old ones, so all ratios are exactly 1.
    """
    output = model(batch, args.temperature, extras=("entropy",))
    logps = output["logps"]
    mask = stored["mask"]
    old = stored
    values = {}
    if not policy_has_moved:
        old = {**stored, "logps": logps.detach()}
        values = correction.sampler_differences(output, stored, mask)
        # How far ratios to the stored log-probs are from 1: other micro-batches round differently.
        rounding = (old["logps"] - stored["logps"]).expm1().abs()
        values["val/max_rounding"] = (rounding, mask, "max")

    log_ratios = logps - old["logps"]
    clip_high = args.clip_range if args.clip_range_high is None else args.clip_range_high
    actor_losses, policy_clipped = policy_losses(
        logps, old["logps"], old["advantages"], args.clip_range, clip_high, args.dual_clip
    )
    critic_losses, value_clipped = value_losses(
        output["values"], old["values"], old["returns"], args.value_clip_range
    )
    actor_terms = actor_losses  # times the correction, plus the KL, where there are any
    if args.vllm_url:
        # A server's log-probs differ from those of training, so the actor's losses are weighted.
        # The critic is not corrected: it fits the returns of these samples, whoever drew them.
        corrections, of_sampler = correction.importance_weights(old, mask, args)
        actor_terms = actor_terms * corrections
        values |= of_sampler
    if args.kl_in == "loss":  # then `check_settings` has seen to it that there is a reference
        kl = kl_estimate(logps, old["ref_logps"], args.kl_estimator)
        actor_terms = actor_terms + rollout.kl_coef * kl
    losses = actor_terms + args.vf_coef * critic_losses
    return losses, values | {
        "loss/policy_avg": (actor_losses, mask),  # without correction and KL
        "loss/value_avg": (critic_losses, mask),
        "loss": (losses, mask),
        "policy/approxkl_avg": (log_ratios**2 / 2, mask),
        "policy/clipfrac_avg": (policy_clipped.float(), mask),
        "policy/entropy_avg": (output["entropy"], mask),
        "val/clipfrac_avg": (value_clipped.float(), mask),
        "val/ratio": (torch.exp(log_ratios), mask),
    }


# ============================================================ the rollout
@carried
@dataclass
class PPORollout(Rollout):
    """A rollout. All its samples are trained on, and its updates are cut like those of an epoch.

    `tokens` are `mask logps sampler_logps values advantages returns`, and `ref_logps` where there
    is a reference.
    """

    kl_coef: float  # when the rollout was made

    def rows_of_update(self, position: Position, args: Args) -> np.ndarray:
        """Returns which samples form the next update: a pass is like an epoch of a data set."""
        how = (args.train_batch_size, position.order_seed(args), position.updates_made)
        return batches.rows_of_update(len(self.samples), *how)


@carried
@dataclass
class PPOState(State):
    """What a run carries from update to update; `kl_coef` is that of the next rollout."""

    rollout: PPORollout | None = None
    kl_coef: float = 0.0


def make_rollout(
    run: Run,
    sampler: Sampler,
    state: PPOState,
    judge: Judge,
    reference: Reference | None,
    packer: Packer,
) -> PPORollout:
    """Samples responses, scores them, and estimates the advantage of each of their tokens."""
    args = run.args
    position = state.position
    prompts_of_rollout = position.take_prompts(sampler, args.rollout_batch_size)
    with run.timed("generate"):
        # Drawn for all processes, so that responses do not depend on how many there are.
        uniforms = position.draw_uniforms(args, len(prompts_of_rollout["row"]))
        samples = sample(sampler, prompts_of_rollout, uniforms, args.temperature)
        vllm.sample_ahead(sampler, position)  # does nothing without --rollouts_ahead
    with run.timed("score"):
        scores = score(sampler, judge, samples, packer)
        computed = compute_logps(sampler, samples, packer, ("logps", "values"), reference)
    # Checked now, because whitening would spread a single NaN to all samples.
    samples.check_finite(sampler, scores=scores.total[:, None], **computed)

    logps = computed["logps"]
    mask = samples.mask
    kl = torch.zeros_like(logps)
    if reference is not None:
        kl = kl_estimate(logps, computed["ref_logps"], args.kl_estimator).where(mask, 0.0)
    # With --kl_in loss the KL is not part of the rewards.
    reward_kl_coef = state.kl_coef if args.kl_in == "reward" else 0.0
    per_token_rewards = token_rewards(scores.total, kl, mask, reward_kl_coef)
    advantages, returns = gae(
        per_token_rewards, computed["values"], mask, gamma=args.gamma, gae_lambda=args.gae_lambda
    )
    rollout = PPORollout(
        samples=samples,
        is_trained=torch.ones(len(samples), dtype=torch.bool),
        tokens={
            "mask": mask,
            **computed,
            "sampler_logps": samples.padded_sampler_logps,
            "returns": returns,
            "advantages": whiten(advantages, mask),
        },
        started_at=run.global_step,
        kl_coef=state.kl_coef,
    )
    log_rollout(run, sampler, rollout, scores, kl, per_token_rewards)
    if args.kl_target:
        mean_kl = kl.sum(1).mean().item()
        state.kl_coef = next_kl_coef(
            state.kl_coef, mean_kl, args.kl_target, args.kl_horizon, len(samples)
        )
    return rollout


def score(sampler: Sampler, judge: Judge, samples: Samples, packer: Packer) -> Scores:
    """Returns the scores of responses, clipped, less the penalty of those that do not end."""
    args = sampler.args
    scores = judge.score(sampler, samples, packer)
    total = final_scores(scores.total, samples.ended, args.reward_clip, args.missing_eos_penalty)
    return scores._replace(total=total)


def log_rollout(
    run: Run,
    sampler: Sampler,
    rollout: PPORollout,
    scores: Scores,
    kl: torch.Tensor,
    per_token_rewards: torch.Tensor,
) -> None:
    """Adds a rollout's metrics to the next log line, and records its samples."""
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
    sampler.means.add_rollout(logged)
    sampler.means.add_rollout({"responses/min_length": response_lengths}, reduce="min")
    sampler.means.add_rollout({"responses/max_length": response_lengths}, reduce="max")
    run.write_samples(samples.examples(sampler.tokenizer, scores, "rollout"))


# ============================================================ actor and critic
def make_actor_critic(accelerator, args: Args, tokenizer, data) -> ActorCritic:
    """Returns actor and critic, ready for `prepare.for_training`; see `prepare.policy`."""
    name = args.model_name_or_path
    critic_name = args.critic_model_name_or_path or args.reward_model_name_or_path or name
    readers = (critic_name, args.reward_model_name_or_path, args.ref_model_name_or_path)
    sizes = load.check_embeddings(data, name, *readers, draws=True)
    actor_model = load.causal_lm(name, tokenizer, args)
    critic_model = score_model(critic_name, tokenizer, args, new_head=True)
    policy = ActorCritic(actor_model, critic_model)
    policy.vocabulary = min(sizes.values())  # it draws what all can read
    prepare.disable_dropout(policy)  # because responses are sampled without dropout
    prepare.choose_parameters(accelerator, policy, args)  # what is trained: all, or adapters
    return policy


def parameter_groups(policy: ActorCritic, args: Args) -> list[dict]:
    """Returns the optimizer's groups: actor and critic have learning rates of their own."""
    of_actor = optim.parameter_groups(policy.model, args, lr=args.learning_rate)
    of_critic = optim.parameter_groups(policy.critic, args, lr=args.critic_learning_rate)
    return of_actor + of_critic


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
    # ============================================================ set-up
    args = arguments.parse(Args, demo="ppo.yaml")
    check_settings(args)
    accelerator = launch.make_accelerator(args, "ppo")  # it also makes the run's folder
    tokenizer = load.tokenizer_of_run(accelerator, args)
    data = rewards.load_prompts(accelerator, args, tokenizer)
    show_preview(accelerator, args, data)  # with --preview: prints rows and exits
    n_prompts = len(data.train)

    policy = make_actor_critic(accelerator, args, tokenizer, data)
    state = PPOState(Position(), kl_coef=args.kl_coef)  # what the loop carries
    run = Run(
        accelerator,
        args,
        n_prompts,
        flop=cost.flop(policy),
        bar_metric="objective/scores",
        charts=CHARTS,
        updates_per_epoch=n_updates(args, n_prompts),
    )
    optimizer = optim.build(accelerator, parameter_groups(policy, args), args)
    scheduler = optim.scheduler(optimizer, args, run.total_steps)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer)
    checks.check_logprobs(accelerator, model, data.train[0]["prompt_ids"])

    means = Means(accelerator)
    sampler = Sampler(accelerator, args, tokenizer, model, data, run, means)
    vllm.connect(sampler)  # does nothing without --vllm_url
    episodes.start(sampler)  # does nothing without --environment
    reference = None
    if args.kl_coef:  # with LoRA it is the model without adapters, whose critic need not run
        reference = Reference(accelerator, args, tokenizer, model, with_values=False)
    judge = Judge(sampler)
    models = [model, judge.model, reference.model if reference else None]
    packer = checks.make_packer(
        accelerator, models, max_length=args.max_length, share=args.share_prompts
    )
    actor = Actor(run, model, tokenizer, also={"critic": policy.critic.model})
    identity = {**data.fingerprints, **load.base_fingerprints(policy)}
    identity |= judge.fingerprints | (reference.fingerprints if reference else {})
    parts = dict(model=model, optimizer=optimizer, scheduler=scheduler, means=means, actor=actor)
    checkpoint = Checkpoint(run, identity=identity, **parts, rollout=state, ahead=sampler)
    checkpoint.resume()  # sets seeds, loads what --resume names, opens the log
    what = f"{len(data.train)} rows; {packer.describe()}"
    console.begin(checkpoint, data=what, updates=describe_updates(args, n_prompts, run.total_steps))

    # ============================================================ the loop
    max_norm = args.max_grad_norm or math.inf  # inf: the norm is only measured
    if run.updates_seen == 0:
        evaluate(run, actor, sampler, judge, packer)
    while not run.finished:
        if state.rollout is None:
            state.rollout = make_rollout(run, sampler, state, judge, reference, packer)
        rollout = state.rollout
        # All processes agree on the samples of this update. Each takes its share of them.
        all_rows = rollout.rows_of_update(state.position, args)
        update = run.update_of(all_rows, rollout.samples.lengths, rollout.n_tokens(all_rows))
        response_tokens = int(rollout.tokens["mask"][all_rows].sum())  # the loss is their mean
        policy_has_moved = run.global_step > rollout.started_at  # since it made the rollout
        for rows, weights in update.micro_batches:
            with run.timed("data"):
                data_rows = [rollout.samples.data_rows[row] for row in rows]
                batch, stored = rollout.samples.collate(rows, rollout.tokens, packer)
                token_weights = stored["mask"] * weights[:, None]
            with accelerator.accumulate(model):
                losses, values = token_losses(model, batch, stored, rollout, args, policy_has_moved)
                run.check_finite(update, data_rows, losses, token_weights, stored)
                # This micro-batch's part of the mean over tokens. The engine divides by the
                # micro-batches of a process and averages over processes: `divisor` undoes both.
                loss = (losses * token_weights).sum() * update.divisor / response_tokens
                accelerator.backward(loss)  # DeepSpeed clips and steps in here
                if accelerator.sync_gradients:  # true once, in the update's last micro-batch
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                # With DeepSpeed these do nothing; else they act only in the last micro-batch.
                optimizer.step()
                optimizer.zero_grad()
            means.add(values, weights)
            run.count_flop(batch, weights)

        applied = run.count(update, grad_norm)  # False: gradients overflowed, nothing was learned
        actor_rate, *_, critic_rate = scheduler.get_last_lr()  # of the parameter groups
        rates = dict(learning_rate=actor_rate, critic_learning_rate=critic_rate)
        means.close_update(applied, grad_norm=grad_norm, **rates, loss_scale=update.loss_scale)
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


# ============================================================ evaluation
@torch.no_grad()
def evaluate(run: Run, actor: Actor, sampler: Sampler, judge: Judge, packer: Packer) -> None:
    """Logs how the policy responds to the held-out prompts, scored as in training."""
    line = {}
    examples = []
    with run.timed("paused"):
        for prefix, eval_set in sampler.data.eval_sets.items():
            samples = sample_held_out(sampler, eval_set)
            scores = score(sampler, judge, samples, packer)
            values, shown = held_out_results(sampler, samples, scores, eval_set, prefix)
            line |= values
            examples += shown
    run.log_evaluation(line, examples)
    actor.keep_best(line)  # may end the run, see --stop_after


# ============================================================ refusals
def check_settings(args: Args) -> None:
    """Refuses settings that would be ignored or cannot work."""
    rewards.check_settings(args)
    if args.kl_coef == 0:
        of_kl = ["ref_model_name_or_path", "kl_estimator", "kl_in"]
        refuse_changed(args, of_kl, "not used, since there is no KL: give --kl_coef above 0, too")
    if args.kl_target == 0:
        refuse_changed(args, ["kl_horizon"], "not used: give --kl_target above 0, too")

    samples = args.rollout_batch_size * args.n_samples_per_prompt
    arithmetic = (
        f"--rollout_batch_size {args.rollout_batch_size} x --n_samples_per_prompt "
        f"{args.n_samples_per_prompt} = {samples} samples"
    )
    # Sizes whose samples make whole updates are the multiples of this one.
    fewest = math.lcm(args.train_batch_size, args.n_samples_per_prompt) // args.n_samples_per_prompt
    below = args.rollout_batch_size // fewest * fewest
    nearest = " or ".join(str(size) for size in (below, below + fewest) if size)
    if args.rollout_batch_size != below:
        sys.exit(
            f"{arithmetic} are not a multiple of --train_batch_size {args.train_batch_size}. "
            f"Nearest valid sizes: --rollout_batch_size {nearest}."
        )
    if args.kl_in == "loss" and args.kl_estimator == "k1":
        sys.exit("--kl_in loss --kl_estimator k1: its mean gradient is zero. Use k2, or k3")
    if args.kl_target and args.kl_coef <= 0:
        sys.exit(f"--kl_target {args.kl_target} needs --kl_coef above 0")
    # Otherwise one rollout could change the sign of the coefficient, see next_kl_coef.
    if args.kl_target and args.kl_horizon <= samples / 5:
        least = f"--kl_horizon above a fifth of them ({samples / 5:g})"
        sys.exit(f"{arithmetic}: --kl_target needs {least}")
    if args.dual_clip and args.dual_clip <= 1:
        sys.exit(f"--dual_clip {args.dual_clip}: expected more than 1, or 0 for none")


if __name__ == "__main__":
    errors.run(main)
