# /// script
# requires-python = ">=3.10"
# dependencies = ["preference-recipes[lora]==0.1.0"]
# ///
"""Kahneman-Tversky Optimization: learn from single answers, each of them good or bad.

Ethayarajh et al. 2024, arXiv:2402.01306. Loss of one answer, with
r = log pi(answer)/ref(answer), and z the KL of the policy from the reference:

    good: loss = desirable_weight * (1 - sigmoid(beta * (r - z)))
    bad:  loss = undesirable_weight * (1 - sigmoid(beta * (z - r)))

The demo, offline:
    python recipes/kto.py
Your own model and data on 8 GPUs; accelerate_configs/ has the other ways to launch:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 recipes/kto.py \
        --model_name_or_path M --dataset_name D

Every metric: docs/kto.md. Every argument: docs/arguments.md
"""

# ============================================================ imports
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # in a clone: its root

import numpy as np
import torch
import torch.nn.functional as F

import preference_recipes  # noqa: F401  so that `common` is this package's
from common import arguments, batches, console, errors, launch, optim
from common.actor import ActorSaver
from common.batches import Rows
from common.checkpoint import Checkpoint
from common.metrics import Means
from common.run import Run
from common.shared_args import SharedArgs, arg
from preference_recipes.data import dataset, formats
from preference_recipes.models import checks, cost, load, prepare
from preference_recipes.models.packing import Packer
from preference_recipes.models.reference import Reference
from preference_recipes.tools.preview import show_preview


# ============================================================ arguments
@dataclass
class Args(SharedArgs):
    ref_model_name_or_path: str | None = arg(None, "reference; default: the policy before training")
    beta: float = arg(0.1, "strength of the KL to the reference", above=0)
    desirable_weight: float = arg(1.0, "weight of the losses of good answers", at_least=0)
    undesirable_weight: float = arg(1.0, "weight of the losses of bad answers", at_least=0)
    train_vision: bool = arg(False, "also train what reads the images: docs/images.md")
    share_prompts: bool = arg(True, "compute a prompt once for both answers")
    learning_rate: float = arg(5e-7, "peak learning rate", with_lora=5e-6, at_least=0)
    warmup_steps: float = arg(0.1, "updates of warm-up; below 1: a share of all", at_least=0)
    max_new_tokens: int = arg(256, "longest answer, for exact match", at_least=1)
    exact_match_rows: int | None = arg(None, "held-out rows to answer; 0: none", at_least=0)

    # What a resumed run may change, on top of what it may change in all recipes.
    may_change: ClassVar[set[str]] = {"share_prompts"}


# ============================================================ the algorithm
def kto_loss(
    log_ratios: torch.Tensor, is_good: torch.Tensor, kl: float, args: Args
) -> torch.Tensor:
    """Returns the loss of each answer, fp32 `[answers]`; arXiv:2402.01306 eq. 8.

    Args:
        log_ratios: `[answers]`, log pi(answer) - log ref(answer), summed over the answer's tokens.
        is_good: bool `[answers]`.
        kl: the KL of the policy from the reference; no gradient flows through it.
    """
    good = args.desirable_weight * (1 - F.sigmoid(args.beta * (log_ratios - kl)))
    bad = args.undesirable_weight * (1 - F.sigmoid(args.beta * (kl - log_ratios)))
    return torch.where(is_good, good, bad)


def collate(columns: dict, packer: Packer) -> dict:
    """Returns answers as a model reads them, the good ones first, and which row each belongs to."""
    good = [row for row, ids in enumerate(columns["chosen_ids"]) if ids]
    bad = [row for row, ids in enumerate(columns["rejected_ids"]) if ids]
    row_of_answer = good + bad  # in this micro-batch
    prompts = [columns["prompt_ids"][row] for row in row_of_answer]
    answers = [ids for ids in columns["chosen_ids"] + columns["rejected_ids"] if ids]
    loss_mask = [
        flags for flags in columns["chosen_loss_mask"] + columns["rejected_loss_mask"] if flags
    ]
    images = [columns["images"][row] for row in row_of_answer] if "images" in columns else None
    batch = packer.make_batch(prompts, answers, loss_mask=loss_mask, images=images)
    batch["is_good"] = batches.to_device([True] * len(good) + [False] * len(bad), packer.device)
    batch["row_of_answer"] = batches.to_device(row_of_answer, packer.device)
    batch["row_numbers"] = [columns["row"][row] for row in row_of_answer]
    return batch


def with_prompts(columns: dict, others: dict, max_length: int) -> dict:
    """Returns the columns of rows with others' prompts, and their answers cut to `max_length`."""
    prompts = {name: others[name] for name in ("prompt_ids", "images") if name in others}
    cut = {
        name: [ids[: max_length - len(p)] for p, ids in zip(prompts["prompt_ids"], columns[name])]
        for name in ("chosen_ids", "rejected_ids", "chosen_loss_mask", "rejected_loss_mask")
    }
    return {**columns, **cut, **prompts}


@torch.no_grad()
def estimate_kl(
    run: Run,
    model: torch.nn.Module,
    reference: Reference,
    packer: Packer,
    data: Rows,
    rows: np.ndarray,
) -> float:
    """Returns the KL of the policy from the reference, estimated on all these rows; section 4.1.

    Each prompt is read with the answers of the next row. All processes must call it alike.
    """
    means = Means(run.accelerator)
    next_rows = np.roll(rows, -1)  # after the last row comes the first
    lengths = data.lengths[rows] + data.lengths[next_rows]  # prompt and answers are of two rows
    with prepare.evaluation_mode(model):
        for indices, sample_weights in run.split(range(len(rows)), lengths):
            mixed = with_prompts(data[next_rows[indices]], data[rows[indices]], run.args.max_length)
            batch = collate(mixed, packer)
            log_ratios = model(batch)["logps"].sum(1) - reference.logps(batch).sum(1)
            means.add({"kl": log_ratios}, sample_weights[batch["row_of_answer"]])
    return max(means.reduce_and_reset()["kl"], 0.0)


def answer_losses(
    model: torch.nn.Module, reference: Reference, batch: dict, kl: float, args: Args
) -> tuple[torch.Tensor, dict]:
    """Returns the losses of answers `[answers]`, and their metrics, some with a mask."""
    logps = model(batch)["logps"].sum(1)  # zero after an answer's end
    log_ratios = logps - reference.logps(batch).sum(1)
    is_good = batch["is_good"]
    losses = kto_loss(log_ratios, is_good, kl, args)
    rewards = args.beta * log_ratios
    return losses, {
        "loss": losses,
        "kl": torch.full_like(losses, kl),
        "rewards/chosen": (rewards, is_good),
        "rewards/rejected": (rewards, ~is_good),
        "logps/chosen": (logps, is_good),
        "logps/rejected": (logps, ~is_good),
    }


# TensorBoard's charts: title -> the metrics that it shows together.
CHARTS = {
    "loss": ["loss"],
    "KL from the reference": ["kl"],
    "right answers": ["eval/exact_match"],
    "good against bad answers": ["rewards/chosen", "rewards/rejected"],
    "log-probs": ["logps/chosen", "logps/rejected"],
}


def main():
    # ============================================================ set-up
    args = arguments.parse(Args, demo="kto.yaml")
    accelerator = launch.make_accelerator(args, "kto")  # seeds, makes the run's folder
    tokenizer = load.tokenizer_of_run(accelerator, args)
    data = dataset.load_data(
        accelerator, args, tokenizer, function=formats.labelled_row, reads_images=True
    )
    show_preview(accelerator, args, data)  # with --preview: prints rows and exits
    load.check_embeddings(data, args.model_name_or_path, args.ref_model_name_or_path)
    train = Rows(data.train)
    held_out = {prefix: Rows(eval_set) for prefix, eval_set in data.eval_sets.items()}
    answer_counts = batches.int_column(data.train, "n_answers")

    # Without dropout, so that policy and reference differ only in their weights.
    policy = prepare.policy(accelerator, args, tokenizer, dropout=False)
    flop = cost.flop(policy, data.processor)
    run = Run(accelerator, args, len(train), flop=flop, bar_metric="kl", charts=CHARTS)
    optimizer = optim.make_optimizer(accelerator, optim.parameter_groups(policy, args), args)
    scheduler = optim.make_scheduler(optimizer, args, run.total_steps)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer)
    reference = Reference(accelerator, args, tokenizer, model)
    models = [model, reference.model]
    packer = checks.make_packer(accelerator, args, models, data.processor)

    means = Means(accelerator, run.recorder("train", model))
    saver = ActorSaver(run, model, tokenizer)
    must_match = [data, policy, reference]  # a resumed run must have the same
    checkpoint = Checkpoint(run, saver, optimizer, scheduler, means, must_match)
    checkpoint.begin_or_resume()  # sets seeds, loads what --resume names, opens the log
    console.print_start(
        checkpoint,
        data=f"{len(train)} rows of {int(train.lengths.sum())} tokens; {packer.describe()}",
    )

    # ============================================================ the loop
    max_norm = args.max_grad_norm or math.inf  # inf: the norm is only measured
    if run.updates_seen == 0:
        saver.save_if_best(evaluate(run, model, tokenizer, reference, packer, held_out))
    while not run.finished:
        update = run.begin_update(train)  # all processes agree on its samples; each takes its share
        n_answers = int(answer_counts[update.indices].sum())
        kl = estimate_kl(run, model, reference, packer, train, update.indices)
        for indices, sample_weights in update.micro_batches:
            with run.timed("data"):
                batch = collate(train[indices], packer)
                answer_weights = sample_weights[batch["row_of_answer"]]
            with accelerator.accumulate(model):
                losses, metrics = answer_losses(model, reference, batch, kl, args)
                run.check_finite(update, batch["row_numbers"], losses, answer_weights)
                # This micro-batch's part of the mean over answers. The engine will divide by its
                # `engine_divisor`, micro-batches times processes, so that is undone beforehand.
                loss = (losses * answer_weights).sum() * update.engine_divisor / n_answers
                accelerator.backward(loss)  # DeepSpeed clips and steps in here
                if accelerator.sync_gradients:  # true once, in the update's last micro-batch
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                # With DeepSpeed these do nothing; else they act only in the last micro-batch.
                optimizer.step()
                optimizer.zero_grad()
            means.add(metrics, answer_weights, batch["row_numbers"])
            run.count_flop(batch, sample_weights)

        applied = run.finish_update(update, grad_norm)  # False: its gradients overflowed
        rate = scheduler.get_last_lr()[0]
        means.close_update(applied, update, grad_norm=grad_norm, learning_rate=rate)
        if applied:
            scheduler.step()

        if run.due(args.logging_steps, first=True):
            run.log(means.reduce_and_reset())
        if run.due(args.eval_steps):
            saver.save_if_best(evaluate(run, model, tokenizer, reference, packer, held_out))
        saver.save_if_due()
        checkpoint.save_if_due()  # ends the run if a signal asked for it

    run.log(means.reduce_and_reset())  # updates since the last log line
    saver.save()
    console.finish_run(saver)


# ============================================================ evaluation
@torch.no_grad()
def evaluate(
    run: Run,
    model: torch.nn.Module,
    tokenizer,
    reference: Reference,
    packer: Packer,
    held_out: dict[str, Rows],
) -> dict[str, float]:
    """Logs for each held-out set what training logs, and exact match where it has answers."""
    eval_metrics = {}
    examples = []
    with run.timed("excluded"), prepare.evaluation_mode(model):
        for prefix, eval_rows in held_out.items():
            means = Means(run.accelerator, run.recorder(prefix))
            # Shuffled, because in a file the next row may answer the same prompt.
            order = batches.epoch_order(len(eval_rows), run.args.seed, epoch=0)
            kl = estimate_kl(run, model, reference, packer, eval_rows, order)
            for indices, sample_weights in run.split(range(len(eval_rows)), eval_rows.lengths):
                batch = collate(eval_rows[indices], packer)
                _, metrics = answer_losses(model, reference, batch, kl, run.args)
                means.add(metrics, sample_weights[batch["row_of_answer"]], batch["row_numbers"])
            eval_metrics |= {prefix + tag: value for tag, value in means.reduce_and_reset().items()}

            if "answer" in eval_rows.dataset.column_names:
                from preference_recipes.rollouts import results  # only here: it loads generation

                exact_match, answered = results.exact_match(
                    run, model, tokenizer, eval_rows.dataset, prefix
                )
                eval_metrics |= exact_match
                examples += answered
    run.log_evaluation(eval_metrics, examples)
    return eval_metrics


if __name__ == "__main__":
    errors.run(main)
