# /// script
# requires-python = ">=3.10"
# dependencies = ["preference-recipes[lora]==0.1.0"]
# ///
"""Proximal Policy Optimization: sample answers, make those better than expected more likely.

Schulman et al. 2017, arXiv:1707.06347; for language models Ziegler et al. 2019, arXiv:1909.08593,
and the details of Huang et al. 2024, arXiv:2403.17031. The run makes one rollout after another:

    1. sample responses to prompts, and score them                          make_rollout
    2. reward of a token: -kl_coef * KL_t; the last one adds the score      token_rewards
    3. advantages A_t by GAE, returns G_t = A_t + V_old, A_t whitened       gae, whiten
    4. updates of train_batch_size samples, r_t = pi(a_t)/pi_old(a_t)       token_losses

    loss = mean over response tokens of -min(r_t A_t, clip(r_t, 1 - c, 1 + c) A_t)
                   + vf_coef * 1/2 max((V_t - G_t)^2, (clip(V_t) - G_t)^2), V clipped around V_old

Shapes: N samples of a rollout, T tokens in the longest response. Scores are [N], what belongs to
tokens is [N, T], and zero past the end of a response. An update reads some of the N rows.

The demo, offline:
    python recipes/ppo.py
Your own model and data on 8 GPUs; accelerate_configs/ has the other ways to launch:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 recipes/ppo.py \
        --model_name_or_path M --dataset_name D --reward_model_name_or_path R

Every metric: docs/ppo.md. Every argument: docs/arguments.md
"""

# ============================================================ imports
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # in a clone: its root

import torch

import preference_recipes  # noqa: F401  so that `common` is this package's
from common import arguments, batches, console, errors, launch, optim, refuse
from common.actor import ActorSaver
from common.checkpoint import Checkpoint
from common.metrics import Means
from common.run import Run
from common.shared_args import arg
from preference_recipes.models import checks, cost, load, prepare
from preference_recipes.models.reference import Reference
from preference_recipes.models.scores import ActorCritic, score_model
from preference_recipes.rollouts import correction, results, rewards, rollout_state
from preference_recipes.rollouts.args import RewardArgs
from preference_recipes.rollouts.rewards import Grader, Scores
from preference_recipes.rollouts.rollout_state import Rollout, RolloutState
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import Samples
from preference_recipes.tools.preview import show_preview


# ============================================================ arguments
@dataclass
class Args(RewardArgs):
    ref_model_name_or_path: str | None = arg(
        None, "reference; default: the policy before training", only_with="kl_coef"
    )
    critic_model_name_or_path: str | None = arg(
        None, "what the critic starts from; default: reward model, or else policy"
    )
    rollout_batch_size: int = arg(1024, "prompts of one rollout", at_least=1)
    kl_coef: float = arg(0.05, "weight of the KL to the reference; 0: no reference", at_least=0)
    kl_estimator: Literal["k1", "k2", "k3"] = arg("k1", "estimate of the KL", only_with="kl_coef")
    kl_in: Literal["reward", "loss"] = arg(
        "reward", "what the KL is subtracted from or added to", only_with="kl_coef"
    )
    reward_clip: float = arg(0.0, "scores are clipped to +- this; 0: off", at_least=0)
    missing_eos_penalty: float = arg(0.0, "subtracted if a response has no end", at_least=0)
    gamma: float = arg(1.0, "discount", at_least=0, at_most=1)
    gae_lambda: float = arg(1.0, "lambda of GAE", at_least=0, at_most=1)
    clip_range: float = arg(0.2, "clipping of the ratio, below and above 1", at_least=0)
    clip_range_high: float | None = arg(None, "the same above 1; default: clip_range", at_least=0)
    value_clip_range: float = arg(0.2, "clipping around the old values; 0: none", at_least=0)
    vf_coef: float = arg(0.1, "weight of the value loss", at_least=0)
    train_batch_size: int = arg(128, "samples of one update", at_least=1)
    max_length: int = arg(1024, "tokens of prompt and --max_new_tokens together", at_least=2)
    learning_rate: float = arg(1e-6, "peak learning rate of the actor", with_lora=1e-5, at_least=0)
    critic_learning_rate: float = arg(1e-5, "that of the critic", with_lora=1e-4, at_least=0)
    max_grad_norm: float = arg(1.0, "of actor and critic together; 0: no clipping", at_least=0)


# ============================================================ the algorithm
def kl_estimate(logps: torch.Tensor, ref_logps: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimates KL(policy || reference) of each token from the sampled token alone.

    k1 and k3 are unbiased if the policy itself sampled the tokens. With `--kl_in loss` that holds
    up to the rollout's first update.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    difference = logps - ref_logps
    if estimator == "k1":  # unbiased, may be negative
        return difference
    if estimator == "k2":  # biased, never negative, little variance
        return difference**2 / 2
    return torch.exp(-difference) - 1 + difference  # k3: unbiased, never negative


def adjust_scores(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the policy loss of each token, and whether clipping decided it.

    Sources: arXiv:1707.06347 eq. 7; another range above 1: DAPO, arXiv:2503.14476 section 3.1.
    """
    ratios = torch.exp(logps - old_logps)
    unclipped = -advantages * ratios
    clipped = -advantages * ratios.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(unclipped, clipped)
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


def token_losses(
    model: torch.nn.Module, batch: dict, experience: dict, args: Args, is_first_update: bool
) -> tuple[torch.Tensor, dict]:
    """Returns the losses of response tokens `[samples, T]`, and their metrics.

    Args:
        experience: `Rollout.experience` of the same samples.
        is_first_update: whether no update of the rollout was applied yet. Then the log-probs of
            this very pass are the old ones, so all ratios are exactly 1.
    """
    output = model(batch, args.temperature, extra_outputs=("entropy",))
    logps = output["logps"]
    mask = experience["loss_mask"]
    old_logps = logps.detach() if is_first_update else experience["old_logps"]
    log_ratios = logps - old_logps
    clip_high = args.clip_range if args.clip_range_high is None else args.clip_range_high
    actor_losses, policy_clipped = policy_losses(
        logps, old_logps, experience["advantages"], args.clip_range, clip_high
    )
    critic_losses, value_clipped = value_losses(
        output["values"], experience["old_values"], experience["returns"], args.value_clip_range
    )
    # With --vllm_url they are weighted: a server's log-probs differ from those of training. The
    # critic needs no weight: it fits the returns of these samples, whoever drew them.
    losses, metrics = correction.for_sampler(
        actor_losses, old_logps, experience, args, is_first_update
    )
    if args.kl_in == "loss":
        kl = kl_estimate(logps, experience["ref_logps"], args.kl_estimator)
        losses = losses + args.kl_coef * kl
    losses = losses + args.vf_coef * critic_losses
    if is_first_update:
        # How far ratios to the rollout's log-probs are from 1: micro-batches round differently.
        rounding = (old_logps - experience["old_logps"]).expm1().abs()
        metrics["val/max_rounding"] = (rounding, mask, "max")
    return losses, metrics | {
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
def make_rollout(
    run: Run, sampler: Sampler, grader: Grader, reference: Reference | None, state: RolloutState
) -> Rollout:
    """Samples responses, scores them, and estimates the advantage of each of their tokens."""
    args = run.args
    prompts = state.take_prompts(sampler.data.train, args.seed, args.rollout_batch_size)
    with run.timed("generate"):
        samples = sampler.sample_rollout(state, prompts)
    with run.timed("score"):
        scores = score_responses(sampler, grader, samples)
        computed = samples.compute_outputs(sampler, ("logps", "values"), reference)
    # Checked before whitening, which would spread a single NaN to all samples.
    samples.check_finite(sampler, scores=scores.total[:, None])

    mask = samples.padded_loss_mask
    kl = torch.zeros_like(computed["old_logps"])
    if reference is not None:
        estimate = kl_estimate(computed["old_logps"], computed["ref_logps"], args.kl_estimator)
        kl = estimate.where(mask, 0.0)
    kl_coef = args.kl_coef if args.kl_in == "reward" else 0.0
    per_token_rewards = token_rewards(scores.total, kl, mask, kl_coef)
    advantages, returns = gae(
        per_token_rewards, computed["old_values"], mask, args.gamma, args.gae_lambda
    )
    experience = {"loss_mask": mask, "sampler_logps": samples.padded_sampler_logps, **computed}
    experience |= {"returns": returns, "advantages": whiten(advantages, mask)}
    log_rollout(run, sampler, samples, scores, experience, kl, per_token_rewards)
    in_update = torch.ones(len(samples), dtype=torch.bool)
    return Rollout(samples, run.global_step, experience, in_update)


def score_responses(sampler: Sampler, grader: Grader, samples: Samples) -> Scores:
    """Returns the scores of responses, clipped, less the penalty of those that do not end."""
    args = sampler.args
    scores = grader.score(sampler, samples)
    total = adjust_scores(scores.total, samples.ended, args.reward_clip, args.missing_eos_penalty)
    return scores._replace(total=total)


def log_rollout(
    run: Run,
    sampler: Sampler,
    samples: Samples,
    scores: Scores,
    experience: dict[str, torch.Tensor],
    kl: torch.Tensor,
    per_token_rewards: torch.Tensor,
) -> None:
    """Adds a rollout's metrics to the next log line, and records its samples.

    Args:
        experience: as in `Rollout.experience`.
        kl: to the reference, `[N, T]`.
        per_token_rewards: `[N, T]`.
    """
    mask = experience["loss_mask"]
    rlhf_rewards = per_token_rewards.sum(1)
    explained = explained_variance(experience["old_values"], experience["returns"], mask)
    metrics = {
        "objective/entropy": -experience["old_logps"].sum(1),
        "objective/scores": scores.total,
        "objective/kl_coef": torch.full_like(scores.total, run.args.kl_coef),
        "objective/non_score_reward": rlhf_rewards - scores.total,
        "objective/rlhf_reward": rlhf_rewards,
        "val/explained_variance": explained.expand(len(samples)),
        "val/returns_avg": experience["returns"].where(mask, torch.nan),  # NaN counts nowhere
        "responses/length": mask.sum(1),
        "responses/eos_rate": samples.ended,
    }
    if "ref_logps" in experience:
        metrics["objective/kl"] = kl.sum(1)
    results.add_rollout_metrics(sampler, samples, scores, "responses", metrics)
    run.write_samples(samples.examples(sampler.tokenizer, scores, "rollout"))


# ============================================================ actor and critic
def make_actor_critic(accelerator, args: Args, tokenizer, data) -> ActorCritic:
    """Returns actor and critic, ready for `prepare.for_training`; see `prepare.policy`."""
    name = args.model_name_or_path
    critic_name = args.critic_model_name_or_path or args.reward_model_name_or_path or name
    actor_model = load.causal_lm(name, tokenizer, args)
    critic_model = score_model(critic_name, tokenizer, args)
    policy = ActorCritic(actor_model, critic_model)
    rewards.limit_vocab_size(policy, args, data, critic_name)
    prepare.disable_dropout(policy)  # because responses are sampled without dropout
    prepare.choose_parameters(accelerator, policy, args)  # what is trained: all, or adapters
    return policy


def parameter_groups(policy: ActorCritic, args: Args) -> list[dict]:
    """Returns the optimizer's groups: actor and critic have learning rates of their own."""
    actor_groups = optim.parameter_groups(policy.model, args, lr=args.learning_rate)
    critic_groups = optim.parameter_groups(policy.critic, args, lr=args.critic_learning_rate)
    return actor_groups + critic_groups


# TensorBoard's charts: title -> the metrics that it shows together.
CHARTS = {
    "scores: sampled in training, greedy in evaluations": ["objective/scores", "eval/scores"],
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
    accelerator = launch.make_accelerator(args, "ppo")  # seeds, makes the run's folder
    tokenizer = load.tokenizer_of_run(accelerator, args)
    data = rewards.load_prompts(accelerator, args, tokenizer)
    show_preview(accelerator, args, data)  # with --preview: prints rows and exits

    policy = make_actor_critic(accelerator, args, tokenizer, data)
    state = RolloutState()  # where the run is in its prompts, and its rollout
    run = Run(
        accelerator,
        args,
        len(data.train),
        flop=cost.flop(policy),
        bar_metric="objective/scores",
        charts=CHARTS,
        updates_per_epoch=rollout_state.count_updates(args, len(data.train)),
    )
    optimizer = optim.make_optimizer(accelerator, parameter_groups(policy, args), args)
    scheduler = optim.make_scheduler(optimizer, args, run.total_steps)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer)

    reference = None
    if args.kl_coef:  # with LoRA it is the model without adapters, whose critic need not run
        reference = Reference(accelerator, args, tokenizer, model, with_values=False)
    grader = Grader(accelerator, args, tokenizer, data)
    models = [model, grader.model, reference.model if reference else None]
    packer = checks.make_packer(accelerator, args, models)
    means = Means(accelerator, run.recorder("rollout", model))
    sampler = Sampler(run, model, tokenizer, data, packer, means, environment=args.environment)
    saver = ActorSaver(run, model, tokenizer, others={"critic": policy.critic.model})
    must_match = [data, policy, grader, reference]  # a resumed run must have the same
    checkpoint = Checkpoint(
        run, saver, optimizer, scheduler, means, must_match, rollout=state, sampler=sampler
    )
    checkpoint.begin_or_resume()  # sets seeds, loads what --resume names, opens the log
    console.print_start(
        checkpoint,
        data=f"{len(data.train)} rows; {packer.describe()}",
        updates=rollout_state.describe_updates(args, run),
    )

    # ============================================================ the loop
    max_norm = args.max_grad_norm or math.inf  # inf: the norm is only measured
    if run.updates_seen == 0:
        saver.save_if_best(evaluate(run, sampler, grader))
    while not run.finished:
        state.rollout = state.rollout or make_rollout(run, sampler, grader, reference, state)
        samples = state.rollout.samples
        # All processes agree on the samples of this update. Each takes its share of them. A pass
        # over a rollout is like an epoch of a data set: samples are shuffled one by one.
        update_indices = batches.indices_of_update(
            len(samples), args.train_batch_size, state.order_seed(args), state.updates_made
        )
        update = run.plan_update(update_indices, samples.lengths, samples.n_tokens(update_indices))
        # The loss is the mean over these tokens.
        response_tokens = int(state.rollout.experience["loss_mask"][update_indices].sum())
        is_first_update = run.global_step == state.rollout.step_at_start
        for indices, sample_weights in update.micro_batches:
            with run.timed("data"):
                batch, experience = samples.collate(indices, state.rollout.experience, packer)
                row_numbers = [samples.row_numbers[index] for index in indices]
                token_weights = experience["loss_mask"] * sample_weights[:, None]
            with accelerator.accumulate(model):
                losses, metrics = token_losses(model, batch, experience, args, is_first_update)
                run.check_finite(update, row_numbers, losses, token_weights, experience)
                # This micro-batch's part of the mean over tokens. The engine will divide by its
                # `engine_divisor`, micro-batches times processes, so that is undone beforehand.
                loss = (losses * token_weights).sum() * update.engine_divisor / response_tokens
                accelerator.backward(loss)  # DeepSpeed clips and steps in here
                if accelerator.sync_gradients:  # true once, in the update's last micro-batch
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                # With DeepSpeed these do nothing; else they act only in the last micro-batch.
                optimizer.step()
                optimizer.zero_grad()
            means.add(metrics, sample_weights, row_numbers, samples.response_numbers(indices))
            run.count_flop(batch, sample_weights)

        applied = run.finish_update(update, grad_norm)  # False: its gradients overflowed
        actor_rate, *_, critic_rate = scheduler.get_last_lr()  # of the parameter groups
        rates = dict(learning_rate=actor_rate, critic_learning_rate=critic_rate)
        means.close_update(applied, update, grad_norm=grad_norm, **rates)
        if applied:
            scheduler.step()
        state.advance(args)  # a skipped update has used up its samples, too

        if run.due(args.logging_steps, first=True):
            run.log(means.reduce_and_reset())
        if run.due(args.eval_steps):
            saver.save_if_best(evaluate(run, sampler, grader))
        saver.save_if_due()
        checkpoint.save_if_due()  # ends the run if a signal asked for it

    run.log(means.reduce_and_reset())  # updates since the last log line
    saver.save()
    console.finish_run(saver)


# ============================================================ evaluation
@torch.no_grad()
def evaluate(run: Run, sampler: Sampler, grader: Grader) -> dict[str, float]:
    """Logs how the policy responds to the held-out prompts, scored as in training."""
    eval_metrics = {}
    examples = []
    with run.timed("excluded"):
        for prefix, eval_set in sampler.data.eval_sets.items():
            samples = sampler.sample_held_out(eval_set)
            scores = score_responses(sampler, grader, samples)
            metrics, shown = results.held_out_results(sampler, samples, scores, eval_set, prefix)
            eval_metrics |= metrics
            examples += shown
    run.log_evaluation(eval_metrics, examples)
    return eval_metrics


# ============================================================ refusals
def check_settings(args: Args) -> None:
    """Refuses settings that contradict each other."""
    rewards.check_settings(args)
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    arithmetic = (
        f"--rollout_batch_size {args.rollout_batch_size} x --n_samples_per_prompt "
        f"{args.n_samples_per_prompt} = {samples} samples"
    )
    # Sizes whose samples make whole updates are the multiples of this one.
    fewest = math.lcm(args.train_batch_size, args.n_samples_per_prompt) // args.n_samples_per_prompt
    if args.rollout_batch_size % fewest:
        refuse(
            f"{arithmetic} are not a multiple of --train_batch_size {args.train_batch_size}: "
            f"give a --rollout_batch_size of {fewest}, or a multiple of that"
        )
    if args.kl_in == "loss" and args.kl_estimator == "k1":
        refuse("--kl_in loss --kl_estimator k1: its mean gradient is zero. Use k2, or k3")


if __name__ == "__main__":
    errors.run(main)
