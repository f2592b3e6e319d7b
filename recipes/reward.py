# /// script
# requires-python = ">=3.10"
# dependencies = ["preference-recipes[lora]==0.1.0"]
# ///
"""Reward model: a score for an answer, learned from which of two answers people preferred.

Stiennon et al. 2020, arXiv:2009.01325, section 3.4 (Bradley-Terry). Loss of one pair, with r the
score at the answer's last token:

    loss = -log sigmoid(r(chosen) - r(rejected))

The demo, offline:
    python recipes/reward.py
Your own model and data on 8 GPUs; accelerate_configs/ has the other ways to launch:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 \
        recipes/reward.py --model_name_or_path M --dataset_name D

Every metric: docs/reward.md. Every argument: docs/arguments.md
"""

# ============================================================ imports
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

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
from preference_recipes.data.messages import LOSS_KEYS, is_messages
from preference_recipes.models import checks, cost, load, prepare
from preference_recipes.models.packing import Packer
from preference_recipes.models.scores import ScoreModel, score_model, separate_pad
from preference_recipes.tools.preview import show_preview


# ============================================================ arguments
@dataclass
class Args(SharedArgs):
    center_coef: float = arg(0.0, "weight of a term that keeps scores around 0", at_least=0)
    pad_token: str | None = arg(None, "pads with it; default: the tokenizer's own, but not its EOS")
    share_prompts: bool = arg(True, "compute a prompt once for both answers")

    # What a resumed run may change, on top of what it may change in all recipes.
    may_change: ClassVar[set[str]] = {"share_prompts"}


# ============================================================ the algorithm
def pairwise_loss(
    chosen_scores: torch.Tensor,
    rejected_scores: torch.Tensor,
    margins: torch.Tensor,
    center_coef: float,
) -> torch.Tensor:
    """Returns the loss of each pair, fp32 `[pairs]`.

    Sources: arXiv:2009.01325 section 3.4; margins, Llama 2, arXiv:2307.09288 eq. 2; centring,
    arXiv:2312.09244.
    """
    ranking = -F.logsigmoid(chosen_scores - rejected_scores - margins)
    return ranking + center_coef * (chosen_scores + rejected_scores) ** 2


def without_loss_keys(value):
    """Returns messages without their `LOSS_KEYS`, and any other value as it is."""
    if not is_messages(value):
        return value
    return [{key: part[key] for key in part if key not in LOSS_KEYS} for part in value]


def reward_row(row: dict, tokenizer, max_length: int, strings_as_messages: bool = False) -> dict:
    """Returns the columns of `formats.preference_row`, and `margin`, 0 where the row has none."""
    margin = row.get("margin")
    try:
        # The cells of a CSV file are text.
        number = 0.0 if margin in (None, "") else float(str(margin))
    except ValueError:
        number = math.nan
    formats.refuse_unless(math.isfinite(number), row, "margin", "a finite number")
    # A score is for the whole answer, whichever parts of it a policy would learn.
    whole = {name: without_loss_keys(value) for name, value in row.items()}
    values = formats.preference_row(whole, tokenizer, max_length, strings_as_messages)
    return {**values, "margin": number}


def collate(columns: dict, packer: Packer) -> dict:
    """Returns pairs as a model reads them: all chosen answers, then all rejected ones."""
    prompts = columns["prompt_ids"] * 2  # a list: once for chosen, once for rejected answers
    batch = packer.make_batch(prompts, columns["chosen_ids"] + columns["rejected_ids"])
    batch["margins"] = batches.to_device(columns["margin"], packer.device)
    return batch


def pair_losses(model: torch.nn.Module, batch: dict, args: Args) -> tuple[torch.Tensor, dict]:
    """Returns the losses of pairs `[pairs]`, and their metrics.

    Each value is `[pairs]`, or `[pairs, 2]` with ones, where both answers count.
    """
    scores = model(batch)
    chosen_scores, rejected_scores = scores.chunk(2)
    losses = pairwise_loss(chosen_scores, rejected_scores, batch["margins"], args.center_coef)
    both_scores = scores.view(2, -1).T
    ones = torch.ones_like(both_scores)
    return losses, {
        "loss": losses,
        "accuracy": (chosen_scores > rejected_scores).float(),
        "margin": chosen_scores - rejected_scores,
        "mean_reward": (both_scores, ones),
        "min_reward": (both_scores, ones, "min"),
        "max_reward": (both_scores, ones, "max"),
    }


class Moments:
    """Mean and standard deviation of the held-out scores, in the config of the model.

    PPO normalises scores by them. They are None where the weights have not been evaluated.
    """

    def __init__(self, config):
        self.config = config

    def set(self, mean: float | None, std: float | None) -> None:
        self.config.update({"reward_mean": mean, "reward_std": std})

    def state(self) -> list[float | None]:
        """Returns what a checkpoint holds."""
        # The config lacks them until an evaluation or the first update.
        return [getattr(self.config, name, None) for name in ("reward_mean", "reward_std")]

    def load_state(self, state: list[float | None]) -> None:
        """Takes over what `state` returned."""
        self.set(*state)


# TensorBoard's charts: title -> the metrics that it shows together.
CHARTS = {
    "loss": ["loss"],
    "pairs ranked right": ["accuracy"],
    "margin": ["margin"],
    "scores": ["mean_reward", "min_reward", "max_reward"],
}


def main():
    # ============================================================ set-up
    args = arguments.parse(Args, demo="reward.yaml")
    accelerator = launch.make_accelerator(args, "reward")  # seeds, makes the run's folder
    tokenizer = load.tokenizer_of_run(accelerator, args)
    separate_pad(tokenizer, args.pad_token)
    data = dataset.load_data(accelerator, args, tokenizer, function=reward_row)
    show_preview(accelerator, args, data)  # with --preview: prints rows and exits
    load.check_embeddings(data, args.model_name_or_path)
    train = Rows(data.train)
    held_out = {prefix: Rows(eval_set) for prefix, eval_set in data.eval_sets.items()}

    classifier = score_model(args.model_name_or_path, tokenizer, args)
    scorer = ScoreModel(classifier)
    prepare.disable_dropout(scorer)  # both answers must be read by the same model
    prepare.choose_parameters(accelerator, scorer, args)  # what is trained: all, or adapters
    flop = cost.flop(scorer)
    run = Run(accelerator, args, len(train), flop=flop, bar_metric="accuracy", charts=CHARTS)
    optimizer = optim.make_optimizer(accelerator, optim.parameter_groups(scorer, args), args)
    scheduler = optim.make_scheduler(optimizer, args, run.total_steps)
    model, optimizer = prepare.for_training(accelerator, scorer, optimizer)
    packer = checks.make_packer(accelerator, args, [model])

    means = Means(accelerator, run.recorder("train", model))
    saver = ActorSaver(run, model, tokenizer)
    moments = Moments(scorer.config)
    must_match = [data, scorer]  # a resumed run must have the same
    checkpoint = Checkpoint(run, saver, optimizer, scheduler, means, must_match, moments=moments)
    checkpoint.begin_or_resume()  # sets seeds, loads what --resume names, opens the log
    console.print_start(
        checkpoint,
        data=f"{len(train)} pairs of {int(train.lengths.sum())} tokens; {packer.describe()}",
    )

    # ============================================================ the loop
    max_norm = args.max_grad_norm or math.inf  # inf: the norm is only measured
    if run.updates_seen == 0:
        saver.save_if_best(evaluate(run, model, moments, packer, held_out))
    while not run.finished:
        update = run.begin_update(train)  # all processes agree on its samples; each takes its share
        for indices, sample_weights in update.micro_batches:
            with run.timed("data"):
                columns = train[indices]
                batch = collate(columns, packer)
            with accelerator.accumulate(model):
                losses, metrics = pair_losses(model, batch, args)
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
            moments.set(None, None)  # those of the last evaluation belong to other weights

        if run.due(args.logging_steps, first=True):
            run.log(means.reduce_and_reset())
        if run.due(args.eval_steps):
            saver.save_if_best(evaluate(run, model, moments, packer, held_out))
        saver.save_if_due()
        checkpoint.save_if_due()  # ends the run if a signal asked for it

    run.log(means.reduce_and_reset())  # updates since the last log line
    saver.save()
    console.finish_run(saver)


# ============================================================ evaluation
@torch.no_grad()
def evaluate(
    run: Run, model: torch.nn.Module, moments: Moments, packer: Packer, held_out: dict[str, Rows]
) -> dict[str, float]:
    """Logs for each held-out set what training logs, and finds the moments of all scores."""
    eval_metrics = {}
    all_sets = Means(run.accelerator)
    with run.timed("excluded"), prepare.evaluation_mode(model):
        for prefix, eval_rows in held_out.items():
            means = Means(run.accelerator, run.recorder(prefix))
            for indices, sample_weights in run.split(range(len(eval_rows)), eval_rows.lengths):
                columns = eval_rows[indices]
                batch = collate(columns, packer)
                _, metrics = pair_losses(model, batch, run.args)
                means.add(metrics, sample_weights, columns["row"])
                scores, ones = metrics["mean_reward"]
                squares = scores.double() ** 2
                all_sets.add(
                    {"mean": (scores, ones), "mean of squares": (squares, ones)}, sample_weights
                )
            eval_metrics |= {prefix + tag: value for tag, value in means.reduce_and_reset().items()}

    if found := all_sets.reduce_and_reset():
        variance = max(found["mean of squares"] - found["mean"] ** 2, 0.0)
        eval_metrics["eval/std_reward"] = variance**0.5
        moments.set(found["mean"], eval_metrics["eval/std_reward"])
    run.log_evaluation(eval_metrics, [])
    return eval_metrics


if __name__ == "__main__":
    errors.run(main)
