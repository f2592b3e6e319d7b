"""Direct Preference Optimization: prefer the chosen answer to the rejected, stay near a reference.

Rafailov et al. 2023, arXiv:2305.18290. Loss of one pair, with
h = log [pi(chosen)/ref(chosen)] - log [pi(rejected)/ref(rejected)]:

    loss = -log sigmoid(beta * h)

Demo, offline:
    python recipes/dpo.py
One GPU:
    accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/dpo.py \
        --model_name_or_path M --dataset_name D
N GPUs:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 recipes/dpo.py \
        --model_name_or_path M --dataset_name D
DeepSpeed fp16:
    accelerate launch --config_file accelerate_configs/ds_fp16.yaml recipes/dpo.py

Every metric: docs/dpo.md. Every argument: docs/arguments.md
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
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

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
from common.metrics import Logged, Means, Metrics
from common.progress import Progress
from common.run import Run
from common.shared_args import SharedArgs, arg
from preference_recipes.data import dataset, pairs
from preference_recipes.models import checks, load, lora, prepare
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer
from preference_recipes.models.reference import Reference
from preference_recipes.rollouts import answers
from preference_recipes.tools import preview


# ============================================================ arguments
@dataclass
class Args(SharedArgs):
    ref_model_name_or_path: str | None = arg(
        default=None, help="the reference policy; default: the policy before training"
    )
    beta: float = arg(default=0.1, above=0, help="strength of the pull towards the reference")
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust"] = arg(
        default="sigmoid", help="sigmoid is DPO's own; for the others see docs/dpo.md"
    )
    label_smoothing: float = arg(
        default=0.0,
        at_least=0,
        below=0.5,
        help="probability that a label is wrong; "
        "used by loss_type sigmoid (then called cDPO) and robust",
    )
    share_prompts: bool = arg(
        default=True, help="compute a prompt once for both answers, where the model allows it"
    )
    precompute_ref_log_probs: bool = arg(
        default=False,
        help="compute the reference's log-probs once, cache them on disk, and free the reference",
    )
    learning_rate: float = arg(default=5e-7, with_lora=5e-6, at_least=0, help="peak learning rate")
    warmup_steps: float = arg(
        default=0.1, at_least=0, help="warm-up updates; below 1: a share of all updates"
    )
    max_new_tokens: int = arg(
        default=256, at_least=1, help="longest answer in evaluation by exact match"
    )
    exact_match_rows: int | None = arg(
        default=None,
        at_least=0,
        help="evaluate exact match on at most this many prompts of each held-out set; 0: on none; "
        "default: on all that have an `answer`",
    )

    # What a resumed run may change, on top of what it may change in all recipes.
    may_change: ClassVar[set[str]] = {
        "share_prompts",
        "precompute_ref_log_probs",
        "max_new_tokens",
        "exact_match_rows",
    }


# ============================================================ the algorithm
def preference_loss(
    chosen_log_ratios: torch.Tensor,
    rejected_log_ratios: torch.Tensor,
    chosen_tokens: torch.Tensor,
    rejected_tokens: torch.Tensor,
    beta: float,
    loss_type: str,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Returns the loss of each pair, fp32 `[pairs]`.

    Args:
        chosen_log_ratios, rejected_log_ratios: `[pairs]`, log pi(answer) - log ref(answer), summed
            over the answer's tokens.
        chosen_tokens, rejected_tokens: `[pairs]`, token counts; only IPO uses them.

    Sources:
        sigmoid: arXiv:2305.18290 eq. 7; with label smoothing (cDPO): Mitchell 2023, eq. 3.
        robust: arXiv:2403.00409 section 3.1.
        hinge: arXiv:2309.06657, after SLiC.
        ipo: arXiv:2310.12036 eq. 17, on averages over tokens as its authors advise and TRL does.
    """
    scaled = beta * (chosen_log_ratios - rejected_log_ratios)
    right = -F.logsigmoid(scaled)  # the loss if the label is right
    wrong = -F.logsigmoid(-scaled)  # the loss if the label is wrong
    if loss_type == "sigmoid":
        return (1 - label_smoothing) * right + label_smoothing * wrong
    if loss_type == "robust":
        smoothed = (1 - label_smoothing) * right - label_smoothing * wrong
        return smoothed / (1 - 2 * label_smoothing)
    if loss_type == "hinge":
        return torch.relu(1 - scaled)
    # ipo
    chosen_average = chosen_log_ratios / chosen_tokens
    rejected_average = rejected_log_ratios / rejected_tokens
    return (chosen_average - rejected_average - 1 / (2 * beta)) ** 2


def collate(columns: dict, packer: Packer) -> dict:
    """Returns pairs as the model reads them: all chosen answers, then all rejected ones."""
    prompts = columns["prompt_ids"] * 2  # a list: once for chosen, once for rejected answers
    both_answers = columns["chosen_ids"] + columns["rejected_ids"]
    return packer.make_batch(prompts, both_answers)


def losses_and_metrics(
    output: dict, mask: torch.Tensor, ref_logps: torch.Tensor, weights: torch.Tensor, args: Args
) -> tuple[torch.Tensor, list[Logged]]:
    """Returns the losses of pairs, and what to log about them.

    Args:
        output: of the policy, `logps` and `mean_logits` (means over the vocabulary), each
            `[2 * pairs, longest answer]`, zero past an answer's end; all chosen answers, then all
            rejected ones, as `collate` has them.
        mask: `[2 * pairs, longest answer]`, where an answer has a token.
        ref_logps: `[2 * pairs]`, the reference's log-probs of the answers.
        weights: `[pairs]`, 0 for a padding row.

    Returns:
        losses `[pairs]`; metrics.
    """
    logps = output["logps"].sum(1)
    chosen_logps, rejected_logps = logps.chunk(2)
    chosen_log_ratios, rejected_log_ratios = (logps - ref_logps).chunk(2)
    chosen_tokens, rejected_tokens = mask.sum(1).chunk(2)
    losses = preference_loss(
        chosen_log_ratios,
        rejected_log_ratios,
        chosen_tokens,
        rejected_tokens,
        beta=args.beta,
        loss_type=args.loss_type,
        label_smoothing=args.label_smoothing,
    )
    chosen_rewards = args.beta * chosen_log_ratios
    rejected_rewards = args.beta * rejected_log_ratios
    per_pair = {
        "loss": losses,
        "rewards/chosen": chosen_rewards,
        "rewards/rejected": rejected_rewards,
        "rewards/accuracies": (chosen_rewards > rejected_rewards).float(),
        "rewards/margins": chosen_rewards - rejected_rewards,
        "logps/chosen": chosen_logps,
        "logps/rejected": rejected_logps,
    }
    chosen_logits, rejected_logits = output["mean_logits"].chunk(2)
    chosen_mask, rejected_mask = mask.chunk(2)
    return losses, [
        Logged(per_pair, weights),
        Logged({"logits/chosen": chosen_logits}, chosen_mask * weights[:, None]),
        Logged({"logits/rejected": rejected_logits}, rejected_mask * weights[:, None]),
    ]


# TensorBoard's charts: title -> the metrics that it shows together.
CHARTS = {
    "loss": ["loss"],
    "pairs ranked right": ["rewards/accuracies"],
    "right answers": ["eval/exact_match"],
    "chosen against rejected": ["rewards/chosen", "rewards/rejected", "rewards/margins"],
    "log-probs": ["logps/chosen", "logps/rejected"],
}


def main():
    # ============================================================ accelerator
    args = arguments.parse(Args, demo=common.ASSETS / "dpo.yaml")
    check_settings(args)
    # This also fills in output_dir and the size of micro-batches.
    accelerator = launch.make_accelerator(args, "dpo")
    lora.complete_settings(accelerator, args)  # fills in lora_alpha

    # ============================================================ data
    tokenizer = load.tokenizer_of_run(accelerator, args)
    data = dataset.load_data(accelerator, args, tokenizer, function=pairs.preference_row)
    preview.show(accelerator, args, data)  # with --preview: prints rows and exits
    lengths = dataset.column(data.train, "length")  # tokens, a prompt once for each answer
    progress = Progress(
        data.mixture.samples, args.train_batch_size, args.max_epochs, args.max_steps
    )

    # ============================================================ model and optimizer
    policy = LogProbModel(load.causal_lm(args.model_name_or_path, tokenizer, args))
    prepare.disable_dropout(policy)  # so that policy and reference differ only in their weights
    prepare.choose_parameters(accelerator, policy, args)  # what is trained: all, or adapters
    optimizer = optim.adamw(accelerator, optim.parameter_groups(policy, args.weight_decay), args)
    scheduler = optim.scheduler(optimizer, args, progress.total_steps)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer, args.debug_overflow)
    metrics = Metrics(
        accelerator,
        args,
        progress,
        bar_metric="rewards/accuracies",
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
    )
    # Refuses a model whose architecture is not interpreted correctly.
    checks.check_logprobs(run, data.train[0]["prompt_ids"] + data.train[0]["chosen_ids"])
    answers.check_room(run)  # do held-out prompts leave room for an answer?

    # ============================================================ reference
    reference = Reference(run)
    packer = checks.make_packer(run, [model, reference.model], args.share_prompts)
    if args.precompute_ref_log_probs:
        sets = {"train": data.train, **data.eval_sets}
        reference.precompute(run, sets, collate, packer)

    # ============================================================ the loop
    checkpoint.begin(run)
    console.begin(
        run,
        data=f"{len(data.train)} pairs of {int(lengths.sum())} tokens; "
        f"{packer.describe('both answers', each='answer')}",
        updates=progress.describe(),
    )
    guard = guards.FiniteLosses(run)  # ends the run if a loss is not finite
    max_norm = args.max_grad_norm or math.inf  # inf: the norm is only measured
    if progress.updates_seen == 0:
        evaluate(run, packer, reference)
    while not progress.finished:
        # All processes agree on the samples of this update. Each takes its share of them.
        update_rows = batches.rows_of_update(
            data.mixture, args.train_batch_size, args.seed, progress.updates_seen
        )
        micro_batches = batches.split_update(run, update_rows, lengths)
        divisor = engine.begin_update(run, micro_batches)  # micro-batches x processes
        loss_scale = engine.loss_scale(run)  # for the log: the update may change it
        learning_rate = scheduler.get_last_lr()[0]

        for micro_batch in micro_batches:
            with metrics.timed("data"):
                columns = data.train[micro_batch.rows]
                weights = batches.send(micro_batch.weights, run.device)  # 0: a padding row
                batch = collate(columns, packer)

            with accelerator.accumulate(model):
                ref_logps = reference.answer_logps(batch, "train", micro_batch.rows)
                output = model(batch, extras=("mean_logits",))
                losses, logged = losses_and_metrics(
                    output, batch["mask"], ref_logps, weights, args=args
                )
                guard.check(columns["row"], losses, weights)
                # Part of the mean over the update's pairs; the engine divides by `divisor`.
                loss = (losses * weights).sum() * divisor / len(update_rows)
                accelerator.backward(loss)  # DeepSpeed clips and steps in here
                if accelerator.sync_gradients:  # true once, in the update's last micro-batch
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                # With DeepSpeed these do nothing; else they act in the last micro-batch only.
                optimizer.step()
                optimizer.zero_grad()
            metrics.pending.add(logged)
            metrics.count_flop(batch, micro_batch.weights)

        applied = not accelerator.optimizer_step_was_skipped  # skipped: gradients overflowed
        progress.update_done(
            applied, samples=len(update_rows), tokens=int(lengths[update_rows].sum())
        )
        metrics.update_done(
            applied, grad_norm=grad_norm, learning_rate=learning_rate, loss_scale=loss_scale
        )
        if applied:
            scheduler.step()

        log_evaluate_save(run, packer, reference)

    actor.publish(run)
    metrics.close()
    console.end(run)
    hub.push(run)


def log_evaluate_save(run: Run, packer: Packer, reference: Reference) -> None:
    """Logs, evaluates and saves what is due, and ends the run if a signal asks for it."""
    args = run.args
    if run.progress.log_due(args.logging_steps):
        run.metrics.log()
    if run.progress.evaluation_due(args.eval_steps):
        evaluate(run, packer, reference)
    if run.progress.save_due(args.save_steps):
        checkpoint.save(run)
    if run.progress.save_due(args.save_actor_steps):
        actor.publish_step(run)
    checkpoint.stop_if_asked(run)


# ============================================================ evaluation
@torch.no_grad()
def evaluate(run: Run, packer: Packer, reference: Reference) -> None:
    """Logs for each held-out set what training logs, exactly over all processes.

    If a set has a column `answer`, exact match is logged as well.
    """
    line = {}
    all_examples = []
    with run.metrics.timed("paused"), checks.evaluation_mode(run.model):
        for prefix, eval_set in run.data.eval_sets.items():
            means = Means(run.accelerator)
            for rows, columns, weights in batches.evaluation_batches(run, eval_set):
                batch = collate(columns, packer)
                ref_logps = reference.answer_logps(batch, prefix, rows)
                output = run.model(batch, extras=("mean_logits",))
                _, logged = losses_and_metrics(
                    output, batch["mask"], ref_logps, weights, args=run.args
                )
                means.add(logged)
            line |= {prefix + name: value for name, value in means.reduce().items()}

            exact_match, examples = answers.exact_match(run, eval_set, prefix)
            line |= exact_match
            all_examples += examples
    run.metrics.log_evaluation(line, all_examples)
    actor.keep_best(run, line)


# ============================================================ refusals
def check_settings(args: Args) -> None:
    """Refuses settings that would be ignored."""
    if args.label_smoothing and args.loss_type not in ("sigmoid", "robust"):
        raise SystemExit(
            f"--label_smoothing {args.label_smoothing}: expected 0, "
            "or --loss_type sigmoid or robust"
        )


if __name__ == "__main__":
    errors.run(main)
