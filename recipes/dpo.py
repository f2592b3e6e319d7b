# /// script
# requires-python = ">=3.10"
# dependencies = ["preference-recipes[lora]==0.1.0"]
# ///
"""Direct Preference Optimization: prefer the chosen answer to the rejected, stay near a reference.

Rafailov et al. 2023, arXiv:2305.18290. Loss of one pair, with
h = log [pi(chosen)/ref(chosen)] - log [pi(rejected)/ref(rejected)]:

    loss = -log sigmoid(beta * h)

The demo, offline:
    python recipes/dpo.py
Your own model and data on 8 GPUs; accelerate_configs/ has the other ways to launch:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 recipes/dpo.py \
        --model_name_or_path M --dataset_name D

Every metric: docs/dpo.md. Every argument: docs/arguments.md
"""

# ============================================================ imports
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # in a clone: its root

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
from preference_recipes.models.reference import Reference, precompute
from preference_recipes.tools.preview import show_preview

# ============================================================ arguments
WITH_REFERENCE = "loss_type=sigmoid,hinge,ipo,robust"
WITH_SMOOTHING = "loss_type=sigmoid,robust"


@dataclass
class Args(SharedArgs):
    ref_model_name_or_path: str | None = arg(
        None, "reference; default: the policy before training", only_with=WITH_REFERENCE
    )
    beta: float = arg(
        0.1, "larger stays closer to the reference; simpo, orpo: docs/dpo.md", above=0
    )
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust", "simpo", "orpo"] = arg(
        "sigmoid", "sigmoid is DPO's own; for the others see docs/dpo.md"
    )
    gamma: float = arg(1.0, "SimPO's target margin", only_with="loss_type=simpo", at_least=0)
    label_smoothing: float = arg(
        0.0, "how likely a label is wrong", only_with=WITH_SMOOTHING, at_least=0, below=0.5
    )
    share_prompts: bool = arg(True, "compute a prompt once for both answers")
    train_vision: bool = arg(False, "also train what reads the images: docs/images.md")
    precompute_ref_log_probs: bool = arg(
        False, "compute the reference's log-probs before training", only_with=WITH_REFERENCE
    )
    learning_rate: float = arg(5e-7, "peak learning rate", with_lora=5e-6, at_least=0)
    warmup_steps: float = arg(0.1, "updates of warm-up; below 1: a share of all", at_least=0)
    max_new_tokens: int = arg(256, "longest answer, for exact match", at_least=1)
    exact_match_rows: int | None = arg(None, "held-out rows to answer; 0: none", at_least=0)

    # What a resumed run may change, on top of what it may change in all recipes.
    may_change: ClassVar[set[str]] = {"share_prompts", "precompute_ref_log_probs"}


# ============================================================ the algorithm
def preference_loss(
    chosen_log_ratios: torch.Tensor,
    rejected_log_ratios: torch.Tensor,
    chosen_lengths: torch.Tensor,
    rejected_lengths: torch.Tensor,
    beta: float,
    loss_type: str,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Returns the loss of each pair, fp32 `[pairs]`.

    Sources:
        sigmoid: arXiv:2305.18290 eq. 7; with label smoothing (cDPO): Mitchell 2023, eq. 3.
        robust: arXiv:2403.00409 section 3.1.
        hinge: arXiv:2309.06657, after SLiC.
        ipo: arXiv:2310.12036 eq. 17, on averages over tokens as its authors advise and TRL does.

    Args:
        chosen_log_ratios, rejected_log_ratios: `[pairs]`, log pi(answer) - log ref(answer).
        chosen_lengths, rejected_lengths: `[pairs]`, tokens of the answers; ipo divides by them.
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
    assert loss_type == "ipo", loss_type
    chosen_average = chosen_log_ratios / chosen_lengths
    rejected_average = rejected_log_ratios / rejected_lengths
    return (chosen_average - rejected_average - 1 / (2 * beta)) ** 2


# These losses have no reference, so none is loaded.
REFERENCE_FREE = ("simpo", "orpo")


def reference_free_loss(
    chosen_averages: torch.Tensor,
    rejected_averages: torch.Tensor,
    beta: float,
    loss_type: str,
    gamma: float,
) -> torch.Tensor:
    """Returns the loss of each pair, fp32 `[pairs]`.

    simpo: `-log sigmoid(beta * (chosen - rejected) - gamma)`; arXiv:2405.14734 eq. 6.
    orpo: `-chosen - beta * log sigmoid(log odds(chosen) - log odds(rejected))`, where
    odds = p / (1 - p); arXiv:2403.07691 eq. 6 and 7.
    """
    difference = chosen_averages - rejected_averages
    if loss_type == "simpo":
        return -F.logsigmoid(beta * difference - gamma)
    assert loss_type == "orpo", loss_type
    # At p = 1 the average is 0: log(1 - p) would be infinite, and its gradient NaN.
    chosen_rest = torch.log(-torch.expm1(chosen_averages.clamp(max=-1e-7)))  # log(1 - p)
    rejected_rest = torch.log(-torch.expm1(rejected_averages.clamp(max=-1e-7)))
    log_odds_ratio = difference - (chosen_rest - rejected_rest)
    return -chosen_averages - beta * F.logsigmoid(log_odds_ratio)


def collate(columns: dict, packer: Packer) -> dict:
    """Returns pairs as a model reads them: all chosen answers, then all rejected ones.

    `loss_mask` `[2 * pairs, tokens]` says which tokens of answers count; see `Packer.make_batch`.
    """
    prompts = columns["prompt_ids"] * 2  # for the chosen answers, then for the rejected ones
    ids = columns["chosen_ids"] + columns["rejected_ids"]
    loss_mask = columns["chosen_loss_mask"] + columns["rejected_loss_mask"]
    images = columns["images"] * 2 if "images" in columns else None
    batch = packer.make_batch(prompts, ids, loss_mask=loss_mask, images=images)
    if "ref_logps" in columns:  # with --precompute_ref_log_probs, `[pairs, 2]`
        batch["ref_logps"] = batches.to_device(columns["ref_logps"].T.reshape(-1), packer.device)
    return batch


def pair_losses(
    model: torch.nn.Module, reference: Reference | None, batch: dict, args: Args
) -> tuple[torch.Tensor, dict]:
    """Returns the losses of pairs `[pairs]`, and their metrics.

    Each value is `[pairs]`, or `[pairs, tokens]` with a mask of the tokens that count.

    Args:
        model: a `LogProbModel`, which returns the log-prob of each token of the answers.
    """
    output = model(batch, extra_outputs=("mean_logits",))
    logps = output["logps"].sum(1)  # zero after an answer's end
    mask = batch["loss_mask"]
    lengths = mask.sum(1)
    chosen_logps, rejected_logps = logps.chunk(2)
    if reference is None:
        chosen_averages, rejected_averages = (logps / lengths).chunk(2)
        losses = reference_free_loss(
            chosen_averages, rejected_averages, args.beta, args.loss_type, args.gamma
        )
        chosen_rewards = args.beta * chosen_averages
        rejected_rewards = args.beta * rejected_averages
    else:
        ref_logps = batch["ref_logps"] if "ref_logps" in batch else reference.logps(batch).sum(1)
        chosen_log_ratios, rejected_log_ratios = (logps - ref_logps).chunk(2)
        chosen_lengths, rejected_lengths = lengths.chunk(2)
        losses = preference_loss(
            chosen_log_ratios,
            rejected_log_ratios,
            chosen_lengths,
            rejected_lengths,
            args.beta,
            args.loss_type,
            args.label_smoothing,
        )
        chosen_rewards = args.beta * chosen_log_ratios
        rejected_rewards = args.beta * rejected_log_ratios
    chosen_logits, rejected_logits = output["mean_logits"].chunk(2)  # means over the vocabulary
    chosen_mask, rejected_mask = mask.chunk(2)
    return losses, {
        "loss": losses,
        "rewards/chosen": chosen_rewards,
        "rewards/rejected": rejected_rewards,
        "rewards/accuracies": (chosen_rewards > rejected_rewards).float(),
        "rewards/margins": chosen_rewards - rejected_rewards,
        "logps/chosen": chosen_logps,
        "logps/rejected": rejected_logps,
        "logits/chosen": (chosen_logits, chosen_mask),
        "logits/rejected": (rejected_logits, rejected_mask),
    }


# TensorBoard's charts: title -> the metrics that it shows together.
CHARTS = {
    "loss": ["loss"],
    "pairs ranked right": ["rewards/accuracies"],
    "right answers": ["eval/exact_match"],
    "chosen against rejected": ["rewards/chosen", "rewards/rejected", "rewards/margins"],
    "log-probs": ["logps/chosen", "logps/rejected"],
}


def main():
    # ============================================================ set-up
    args = arguments.parse(Args, demo="dpo.yaml")
    accelerator = launch.make_accelerator(args, "dpo")  # seeds, makes the run's folder
    tokenizer = load.tokenizer_of_run(accelerator, args)
    data = dataset.load_data(
        accelerator, args, tokenizer, function=formats.preference_row, reads_images=True
    )
    show_preview(accelerator, args, data)  # with --preview: prints rows and exits
    load.check_embeddings(data, args.model_name_or_path, args.ref_model_name_or_path)
    train = Rows(data.train)
    held_out = {prefix: Rows(eval_set) for prefix, eval_set in data.eval_sets.items()}

    # Without dropout, so that policy and reference differ only in their weights.
    policy = prepare.policy(accelerator, args, tokenizer, dropout=False)
    flop = cost.flop(policy, data.processor)
    run = Run(
        accelerator, args, len(train), flop=flop, bar_metric="rewards/accuracies", charts=CHARTS
    )
    optimizer = optim.make_optimizer(accelerator, optim.parameter_groups(policy, args), args)
    scheduler = optim.make_scheduler(optimizer, args, run.total_steps)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer)
    reference = None
    if args.loss_type not in REFERENCE_FREE:
        reference = Reference(accelerator, args, tokenizer, model)
    models = [model, reference.model if reference else None]
    packer = checks.make_packer(accelerator, args, models, data.processor)
    if args.precompute_ref_log_probs:
        precompute(accelerator, args, reference, train, held_out.values(), collate, packer)

    means = Means(accelerator, run.recorder("train", model))
    saver = ActorSaver(run, model, tokenizer)
    must_match = [data, policy, reference]  # a resumed run must have the same
    checkpoint = Checkpoint(run, saver, optimizer, scheduler, means, must_match)
    checkpoint.begin_or_resume()  # sets seeds, loads what --resume names, opens the log
    console.print_start(
        checkpoint,
        data=f"{len(train)} pairs of {int(train.lengths.sum())} tokens; {packer.describe()}",
    )

    # ============================================================ the loop
    max_norm = args.max_grad_norm or math.inf  # inf: the norm is only measured
    if run.updates_seen == 0:
        saver.save_if_best(evaluate(run, model, tokenizer, reference, packer, held_out))
    while not run.finished:
        update = run.begin_update(train)  # all processes agree on its samples; each takes its share
        for indices, sample_weights in update.micro_batches:
            with run.timed("data"):
                columns = train[indices]
                batch = collate(columns, packer)
            with accelerator.accumulate(model):
                losses, metrics = pair_losses(model, reference, batch, args)
                run.check_finite(update, columns["row"], losses, sample_weights)
                # This micro-batch's part of the mean over pairs. The engine will divide by its
                # `engine_divisor`, micro-batches times processes, so that is undone beforehand.
                loss = (losses * sample_weights).sum() * update.engine_divisor / update.n_samples
                accelerator.backward(loss)  # DeepSpeed clips and steps in here
                if accelerator.sync_gradients:  # true once, in the update's last micro-batch
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                # With DeepSpeed these do nothing; else they act only in the last micro-batch.
                optimizer.step()
                optimizer.zero_grad()
            means.add(metrics, sample_weights, columns["row"])
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
    reference: Reference | None,
    packer: Packer,
    held_out: dict[str, Rows],
) -> dict[str, float]:
    """Logs for each held-out set what training logs, and exact match where it has answers."""
    eval_metrics = {}
    examples = []
    with run.timed("excluded"), prepare.evaluation_mode(model):
        for prefix, eval_rows in held_out.items():
            means = Means(run.accelerator, run.recorder(prefix))
            for indices, sample_weights in run.split(range(len(eval_rows)), eval_rows.lengths):
                columns = eval_rows[indices]
                batch = collate(columns, packer)
                _, metrics = pair_losses(model, reference, batch, run.args)
                means.add(metrics, sample_weights, columns["row"])
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
