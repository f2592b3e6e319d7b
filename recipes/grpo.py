# /// script
# requires-python = ">=3.10"
# dependencies = ["preference-recipes[lora]==0.1.0"]
# ///
"""Group Relative Policy Optimization: sample groups of answers, make the better ones more likely.

Shao et al. 2024, arXiv:2402.03300. The run makes one rollout after another:

    1. sample n responses to each prompt, a group                       make_rollout
    2. score them, leave out groups whose advantages are all zero       groups_to_keep
    3. advantage A = (score - mean of its group) / standard deviation   advantages_of
    4. updates of train_batch_size samples, r_t = pi(a_t)/pi_old(a_t)   sample_losses

    loss = average of -min(r_t A, clip(r_t, 1 - c_low, 1 + c_high) A) + kl_coef * KL_t

Shapes: G groups of n responses, T tokens in the longest. Scores and advantages are [G, n]. What an
update reads is [samples, T], or [samples, 1] if all tokens of a response have the same.

By default with DAPO's clip range and average over tokens, and the standard deviation of the whole
rollout. The paper's own settings, Dr. GRPO, GSPO, RLOO, REINFORCE++ and CISPO: docs/grpo.md. DAPO's
resampling, SAPO, DPPO, GDPO, MaxRL and others are changes of this file: forks/README.md.

The demo, offline:
    python recipes/grpo.py
Your own model and data on 8 GPUs; accelerate_configs/ has the other ways to launch:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 \
        recipes/grpo.py --model_name_or_path M --dataset_name D --reward_function MODULE:NAME

Every metric: docs/grpo.md. Every argument: docs/arguments.md
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
from common import arguments, console, errors, launch, optim, refuse
from common.actor import ActorSaver
from common.checkpoint import Checkpoint
from common.metrics import Means
from common.run import Run
from common.shared_args import SchedulerType, arg
from preference_recipes.models import checks, cost, load, prepare
from preference_recipes.models.reference import Reference
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
    n_samples_per_prompt: int = arg(8, "responses per prompt, the size of a group", at_least=1)
    max_new_tokens: int = arg(1024, "longest response", at_least=1)
    loss_type: Literal["clip", "cispo"] = arg("clip", "clip is PPO's; cispo: see docs/grpo.md")
    ratio: Literal["token", "sequence"] = arg("token", "for each token, or for a response")
    average: Literal["token", "sequence", "constant"] = arg(
        "token", "how losses are averaged: docs/grpo.md"
    )
    clip_range: float = arg(0.2, "least ratio: 1 - this", only_with="loss_type=clip", at_least=0)
    clip_range_high: float = arg(0.28, "largest ratio: 1 + this", at_least=0)
    kl_coef: float = arg(0.0, "weight of the KL to the reference", at_least=0)
    kl_estimator: Literal["k3", "k2"] = arg("k3", "estimate of the KL", only_with="kl_coef")
    baseline: Literal["group", "rloo", "none"] = arg(
        "group", "subtracted from a score: the mean of its group, of the others, or 0"
    )
    advantage_std: Literal["batch", "group", "none"] = arg(
        "batch", "divides advantages by a standard deviation: of the rollout, of the group; none"
    )
    train_vision: bool = arg(False, "also train what reads the images: docs/images.md")
    drop_equal_groups: bool = arg(True, "leave out groups without any advantage")
    mask_truncated: bool = arg(False, "do not train on responses that were cut before their end")
    train_batch_size: int = arg(256, "samples of one update", at_least=1)
    max_length: int = arg(2048, "tokens of prompt and --max_new_tokens together", at_least=2)
    learning_rate: float = arg(1e-6, "peak learning rate", with_lora=1e-5, at_least=0)
    lr_scheduler_type: SchedulerType = arg("constant_with_warmup", "how it goes after the warm-up")


# ============================================================ the algorithm
EPSILON = 1e-4  # added to a standard deviation before dividing by it


def groups_to_keep(scores: torch.Tensor, args: Args) -> torch.Tensor:
    """Returns which groups are kept, bool `[G]`: those with an advantage other than zero.

    With a KL every group has a gradient. Source: DAPO, arXiv:2503.14476 section 3.2.
    """
    # Without a baseline, `batch` subtracts the mean of the rollout, which is not known yet.
    over_rollout = args.baseline == "none" and args.advantage_std == "batch"
    if args.kl_coef > 0 or not args.drop_equal_groups or over_rollout:
        return torch.ones(len(scores), dtype=torch.bool)
    if args.baseline == "none":
        return scores.ne(0).any(1)
    return scores.amax(1) > scores.amin(1)


def std_of_groups(scores: torch.Tensor) -> torch.Tensor:
    """Returns the standard deviation of each group, `[G, 1]`."""
    squares = (scores - scores.mean(1, keepdim=True)).square()
    return (squares.sum(1, keepdim=True) / (scores.shape[1] - 1)).sqrt()


def advantages_of(scores: torch.Tensor, in_update: torch.Tensor, args: Args) -> torch.Tensor:
    """Returns the advantage of each response, `[G, n]`; it is the same for all its tokens.

    A response that is not trained on (`in_update`, `[G, n]`) still counts in its group. With
    `batch` a single trained response is not divided: it has no deviation.

    Sources: baseline rloo, arXiv:2402.14740. Standard deviation: group, arXiv:2402.03300 section
    4.1.2; batch, REINFORCE++, arXiv:2501.03262; none, Dr. GRPO, arXiv:2503.20783.
    """
    advantages = scores.double()
    n = scores.shape[1]
    if args.baseline != "none":
        advantages = advantages - advantages.mean(1, keepdim=True)
    if args.baseline == "rloo":  # the mean of the others is subtracted, not that of all
        advantages = advantages * n / (n - 1)

    if args.advantage_std == "group":
        advantages = advantages / (std_of_groups(advantages) + EPSILON)
    elif args.advantage_std == "batch" and in_update.sum() > 1:
        if args.baseline == "none":
            advantages = advantages - advantages[in_update].mean()
        # Measured from zero: from their mean it would be 0 where those trained on are equal.
        deviation = advantages[in_update].norm() / math.sqrt(in_update.sum() - 1)
        advantages = advantages / (deviation + EPSILON)
    return advantages.to(scores.dtype)


def policy_losses(
    logps: torch.Tensor, ratios: torch.Tensor, advantages: torch.Tensor, args: Args
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the loss of each token, and whether it was clipped below 1, and above 1.

    clip: `-min(r A, clip(r, min_ratio, max_ratio) A)`, arXiv:2402.03300 eq. 3; a wider range above
    1: DAPO, arXiv:2503.14476 section 3.1.
    cispo: `-min(r, max_ratio) A log pi`, the first factor a constant, so that every token has a
    gradient; arXiv:2506.13585 eq. 4 and 5.
    """
    min_ratio = 1 - args.clip_range
    max_ratio = 1 + args.clip_range_high
    if args.loss_type == "cispo":
        losses = -ratios.clamp(max=max_ratio).detach() * advantages * logps
        return losses, torch.zeros_like(ratios, dtype=bool), (ratios > max_ratio) & advantages.ne(0)
    losses = -torch.minimum(ratios * advantages, ratios.clamp(min_ratio, max_ratio) * advantages)
    return losses, (ratios < min_ratio) & (advantages < 0), (ratios > max_ratio) & (advantages > 0)


def kl_losses(
    logps: torch.Tensor, ref_logps: torch.Tensor, ratios: torch.Tensor, estimator: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the estimated KL(policy || reference) of each token, and its term in the loss.

    The old policy sampled the tokens, so the term of each is weighted by its ratio of new to old.
    k3: the mean of ratio * k3 is the KL, so the gradient also goes through the ratio.
    k2: the mean of ratio * k2 is not the KL, but with a constant ratio its gradient is the KL's.

    Sources: Schulman 2020, http://joschu.net/blog/kl-approx.html; DeepSeek-V3.2, arXiv:2512.02556
    eq. 7.
    """
    difference = logps - ref_logps
    if estimator == "k2":
        kl = difference**2 / 2
        return kl, kl * ratios.detach()
    kl = torch.exp(-difference) - 1 + difference
    return kl, kl * ratios


def average_tokens(losses: torch.Tensor, mask: torch.Tensor, args: Args) -> torch.Tensor:
    """Returns the loss of each sample, `[samples]`; `averaging_weights` says how much each counts.

    Sources: token, DAPO, arXiv:2503.14476 section 3.3; sequence, arXiv:2402.03300 eq. 3; constant,
    Dr. GRPO, arXiv:2503.20783.
    """
    sums = (losses * mask).sum(1)
    if args.average == "constant":
        return sums / args.max_new_tokens
    return sums / mask.sum(1).clamp(min=1)


def averaging_weights(mask: torch.Tensor, args: Args) -> torch.Tensor:
    """Returns the weight of each sample in the mean over an update, `[samples]`.

    With `--average token` it is the number of its tokens, so that each token counts the same.
    """
    n_tokens = mask.sum(1)
    return n_tokens if args.average == "token" else torch.ones_like(n_tokens)


def sample_losses(
    model: torch.nn.Module, batch: dict, experience: dict, args: Args, is_first_update: bool
) -> tuple[torch.Tensor, dict]:
    """Returns the losses of samples, `[samples]`, and their metrics.

    Args:
        experience: `Rollout.experience` of the same samples.
        is_first_update: whether no update of the rollout was applied yet. Then the log-probs of
            this very pass are the old ones, so all ratios are exactly 1.
    """
    output = model(batch, args.temperature, extra_outputs=("entropy",))
    logps = output["logps"]
    mask = experience["loss_mask"].to(logps.dtype)
    old_logps = logps.detach() if is_first_update else experience["old_logps"]
    log_ratios = logps - old_logps
    token_ratios = torch.exp(log_ratios)
    ratios = token_ratios
    if args.ratio == "sequence":  # the geometric mean over its tokens: GSPO, arXiv:2507.18071 eq. 7
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        ratios = torch.exp((log_ratios * mask).sum(1, keepdim=True) / lengths)

    losses, clipped_low, clipped_high = policy_losses(logps, ratios, experience["advantages"], args)
    # With --vllm_url they are weighted: a server's log-probs differ from those of training. The KL
    # is not: its own ratios correct for the old policy, and the server's difference is ignored.
    losses, metrics = correction.for_sampler(losses, old_logps, experience, args, is_first_update)
    if args.kl_coef:
        kl, terms = kl_losses(logps, experience["ref_logps"], token_ratios, args.kl_estimator)
        losses = losses + args.kl_coef * terms
        metrics["kl"] = (kl, mask)
    averaged = average_tokens(losses, mask, args)
    metrics |= {
        "loss": (averaged, averaging_weights(mask, args)),
        "clip_ratio/low_mean": (clipped_low.expand_as(mask).float(), mask),
        "clip_ratio/high_mean": (clipped_high.expand_as(mask).float(), mask),
        "entropy": (output["entropy"], mask),
        "policy/approxkl_avg": (log_ratios**2 / 2, mask),
        "val/ratio": (ratios.expand_as(mask), mask),
    }
    return averaged, metrics


# ============================================================ the rollout
def make_rollout(
    run: Run, sampler: Sampler, grader: Grader, reference: Reference | None, state: RolloutState
) -> Rollout | None:
    """Samples groups, scores them, and computes what their updates read.

    Returns None if there is no response to train on.
    """
    args = run.args
    prompts = state.take_prompts(sampler.data.train, args.seed, args.rollout_batch_size)
    with run.timed("generate"):
        samples = sampler.sample_rollout(state, prompts)
    with run.timed("score"):
        scores = grader.score(sampler, samples)
    group_scores = scores.total.view(-1, args.n_samples_per_prompt)  # [G, n]
    is_kept = groups_to_keep(group_scores, args)
    log_rollout(run, sampler, samples, scores, is_kept)
    samples = samples.select_groups(is_kept)
    group_scores = group_scores[is_kept]

    # With --mask_truncated responses without an end count in their group's statistics alone.
    in_update = samples.ended if args.mask_truncated else torch.ones_like(samples.ended)
    if not in_update.any():
        return None
    advantages = advantages_of(group_scores, in_update.view_as(group_scores), args)
    experience = {"advantages": advantages.view(-1, 1), "loss_mask": samples.padded_loss_mask}
    experience["sampler_logps"] = samples.padded_sampler_logps
    rollout = Rollout(samples, run.global_step, experience, in_update)
    with run.timed("score"):
        # The first update takes the log-probs of its own pass as the old ones, later ones these.
        names = ("logps",) if rollout.n_updates(args) > 1 else ()
        rollout.experience |= samples.compute_outputs(sampler, names, reference)
    return rollout


def log_rollout(
    run: Run, sampler: Sampler, samples: Samples, scores: Scores, is_kept: torch.Tensor
) -> None:
    """Adds the metrics of sampled groups to the next log line, and records the samples."""
    grouped = scores.total.double().view(-1, run.args.n_samples_per_prompt)
    metrics = {
        "reward": scores.total,
        "frac_groups_dropped": ~is_kept,
        "completions/mean_length": samples.padded_loss_mask.sum(1),
        "completions/clipped_ratio": ~samples.ended,
    }
    if run.args.n_samples_per_prompt > 1:
        metrics["frac_reward_zero_std"] = grouped.amax(1) == grouped.amin(1)
        metrics["reward_std"] = std_of_groups(grouped)
    results.add_rollout_metrics(sampler, samples, scores, "completions", metrics)
    run.write_samples(samples.examples(sampler.tokenizer, scores, "rollout"))


# TensorBoard's charts: title -> the metrics that it shows together.
CHARTS = {
    "reward: sampled in training, greedy in evaluations": ["reward", "eval/scores"],
    "right answers": ["eval/exact_match"],
    "entropy, KL to the reference": ["entropy", "kl"],
    "length": ["completions/mean_length", "eval/length"],
}


def main():
    # ============================================================ set-up
    args = arguments.parse(Args, demo="grpo.yaml")
    check_settings(args)
    accelerator = launch.make_accelerator(args, "grpo")  # seeds, makes the run's folder
    tokenizer = load.tokenizer_of_run(accelerator, args)
    data = rewards.load_prompts(accelerator, args, tokenizer, reads_images=True)
    show_preview(accelerator, args, data)  # with --preview: prints rows and exits

    policy = prepare.policy(accelerator, args, tokenizer, dropout=False)  # sampling has none
    rewards.limit_vocab_size(policy, args, data)
    state = RolloutState()  # where the run is in its prompts, and its rollout
    run = Run(
        accelerator,
        args,
        len(data.train),
        flop=cost.flop(policy, data.processor),
        bar_metric="reward",
        charts=CHARTS,
        updates_per_epoch=rollout_state.count_updates(args, len(data.train)),  # at most
        prompt_progress=state,
    )
    optimizer = optim.make_optimizer(accelerator, optim.parameter_groups(policy, args), args)
    scheduler = optim.make_scheduler(optimizer, args, run.total_steps)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer)

    reference = Reference(accelerator, args, tokenizer, model) if args.kl_coef else None
    grader = Grader(accelerator, args, tokenizer, data)
    models = [model, grader.model, reference.model if reference else None]
    packer = checks.make_packer(accelerator, args, models, data.processor)
    means = Means(accelerator, run.recorder("rollout", model))
    sampler = Sampler(run, model, tokenizer, data, packer, means, environment=args.environment)
    saver = ActorSaver(run, model, tokenizer)
    must_match = [data, policy, grader, reference]  # a resumed run must have the same
    checkpoint = Checkpoint(
        run, saver, optimizer, scheduler, means, must_match, rollout=state, sampler=sampler
    )
    checkpoint.begin_or_resume()  # sets seeds, loads what --resume names, opens the log
    console.print_start(
        checkpoint,
        data=f"{len(data.train)} rows; {packer.describe()}",
        updates=rollout_state.describe_updates(args, run, may_be_fewer=args.drop_equal_groups),
    )

    # ============================================================ the loop
    max_norm = args.max_grad_norm or math.inf  # inf: the norm is only measured
    if state.prompts_taken == 0:  # a rollout may have led to no update
        saver.save_if_best(evaluate(run, sampler, grader))
    while not run.finished:
        state.rollout = state.rollout or make_rollout(run, sampler, grader, reference, state)
        if state.rollout is None:
            rollout_state.skip_rollout(run, state, means)  # an epoch of these ends the run
        else:
            samples = state.rollout.samples
            # All processes agree on the samples of this update. Each takes its share of them.
            update_indices = state.rollout.next_indices(state, args)
            lengths = samples.lengths_for_split(packer)
            update = run.plan_update(update_indices, lengths, samples.n_tokens(update_indices))
            # The loss is the weighted mean over these samples.
            mask = state.rollout.experience["loss_mask"][update_indices]
            total_weight = int(averaging_weights(mask, args).sum())
            is_first_update = run.global_step == state.rollout.step_at_start
            for indices, sample_weights in update.micro_batches:
                with run.timed("data"):
                    batch, experience = samples.collate(indices, state.rollout.experience, packer)
                    row_numbers = [samples.row_numbers[index] for index in indices]
                with accelerator.accumulate(model):
                    losses, metrics = sample_losses(model, batch, experience, args, is_first_update)
                    weights = averaging_weights(experience["loss_mask"], args) * sample_weights
                    run.check_finite(update, row_numbers, losses, weights)
                    # This micro-batch's part of the weighted mean. The engine will divide by its
                    # `engine_divisor`, micro-batches times processes, so that is undone beforehand.
                    loss = (losses * weights).sum() * update.engine_divisor / total_weight
                    accelerator.backward(loss)  # DeepSpeed clips and steps in here
                    if accelerator.sync_gradients:  # true once, in the update's last micro-batch
                        grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                    # With DeepSpeed these do nothing; else they act only in the last micro-batch.
                    optimizer.step()
                    optimizer.zero_grad()
                means.add(metrics, sample_weights, row_numbers, samples.response_numbers(indices))
                run.count_flop(batch, sample_weights)

            applied = run.finish_update(update, grad_norm)  # False: its gradients overflowed
            rate = scheduler.get_last_lr()[0]
            means.close_update(applied, update, grad_norm=grad_norm, learning_rate=rate)
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
            scores = grader.score(sampler, samples)
            metrics, shown = results.held_out_results(sampler, samples, scores, eval_set, prefix)
            eval_metrics |= metrics
            examples += shown
    run.log_evaluation(eval_metrics, examples)
    return eval_metrics


# ============================================================ refusals
def check_settings(args: Args) -> None:
    """Refuses settings that contradict each other."""
    rewards.check_settings(args)
    if args.n_samples_per_prompt == 1 and args.baseline != "none":
        group = f"--n_samples_per_prompt 1 --baseline {args.baseline}"
        refuse(f"{group}: there is nothing to compare with. Take 2 or more, or --baseline none")
    if args.baseline == "none" and args.advantage_std == "group":
        refuse("--baseline none --advantage_std group divides equal scores by almost zero")
    rollout_state.check_rollout_size(args)


if __name__ == "__main__":
    errors.run(main)
