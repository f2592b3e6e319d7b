"""Reward model: a score for an answer, learned from which of two answers people preferred.

Stiennon et al. 2020, arXiv:2009.01325, section 3.4 (Bradley-Terry). Loss of one pair, with r the
score at the answer's last token:

    loss = -log sigmoid(r(chosen) - r(rejected))

Demo, offline:
    python recipes/reward.py
One GPU:
    accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/reward.py \
        --model_name_or_path M --dataset_name D
N GPUs:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 \
        recipes/reward.py --model_name_or_path M --dataset_name D
DeepSpeed fp16:
    accelerate launch --config_file accelerate_configs/ds_fp16.yaml recipes/reward.py

Every metric: docs/reward.md. Every argument: docs/arguments.md
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
from typing import ClassVar

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
from preference_recipes.data import dataset, formats, pairs
from preference_recipes.models import checks, load, lora, prepare
from preference_recipes.models.logprobs import ScoreModel
from preference_recipes.models.packing import Packer
from preference_recipes.tools import preview


# ============================================================ arguments
@dataclass
class Args(SharedArgs):
    dataset_name: list[str] | None = arg(
        default=None,
        help="one or several of hub name, hub name:config, file or folder; "
        "a column `margin` is used",
    )
    eval_dataset_name: list[str] | None = arg(
        default=None, help="held-out pairs, one or several sets"
    )
    center_coef: float = arg(
        default=0.0,
        at_least=0,
        help="weight of (r(chosen) + r(rejected))^2, which keeps scores around zero; 0.01 is usual",
    )
    pad_token: str | None = arg(
        default=None,
        help="pads with this token of the vocabulary; by default, if the tokenizer pads with its "
        "EOS, with an unused special token",
    )
    share_prompts: bool = arg(
        default=True, help="compute a prompt once for both answers, where the model allows it"
    )

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

    Args:
        chosen_scores, rejected_scores: `[pairs]`, scores of the answers.
        margins: `[pairs]`, how far apart they should be; 0 where the data does not say.

    Sources:
        arXiv:2009.01325 section 3.4; margins: Llama 2, arXiv:2307.09288 eq. 2;
        centring: arXiv:2312.09244.
    """
    ranking = -F.logsigmoid(chosen_scores - rejected_scores - margins)
    return ranking + center_coef * (chosen_scores + rejected_scores) ** 2


def reward_row(row: dict, tokenizer, max_length: int, strings_as_messages: bool = False) -> dict:
    """Returns what `pairs.preference_row` returns, and the row's `margin`, 0 where it has none."""
    margin = row.get("margin")
    try:
        # The cells of a CSV file are text.
        number = 0.0 if margin in (None, "") else float(str(margin))
    except ValueError:
        number = math.nan
    formats.refuse_unless(math.isfinite(number), row, "margin", "a finite number")
    values = pairs.preference_row(row, tokenizer, max_length, strings_as_messages)
    return {**values, "margin": number}


def collate(columns: dict, packer: Packer) -> dict:
    """Returns pairs as the model reads them: all chosen answers, then all rejected ones."""
    prompts = columns["prompt_ids"] * 2
    both_answers = columns["chosen_ids"] + columns["rejected_ids"]
    return packer.make_batch(prompts, both_answers)


def losses_and_metrics(
    scores: torch.Tensor, margins: list[float], weights: torch.Tensor, args: Args
) -> tuple[torch.Tensor, list[Logged]]:
    """Returns the losses of pairs, and what to log about them.

    Args:
        scores: `[2 * pairs]`, of all chosen answers, then of all rejected ones.
        margins: one per pair, see `pairwise_loss`.
        weights: `[pairs]`, 0 for a padding row.

    Returns:
        losses `[pairs]`; metrics.
    """
    chosen_scores, rejected_scores = scores.chunk(2)
    margins_on_device = batches.send(margins, scores.device)
    losses = pairwise_loss(chosen_scores, rejected_scores, margins_on_device, args.center_coef)
    per_pair = {
        "loss": losses,
        "accuracy": (chosen_scores > rejected_scores).float(),
        "margin": chosen_scores - rejected_scores,
    }
    answer_weights = weights.repeat(2)
    return losses, [
        Logged(per_pair, weights),
        Logged({"mean_reward": scores}, answer_weights),
        Logged({"min_reward": scores}, answer_weights, reduce="min"),
        Logged({"max_reward": scores}, answer_weights, reduce="max"),
    ]


# TensorBoard's charts: title -> the metrics that it shows together.
CHARTS = {
    "loss": ["loss"],
    "pairs ranked right": ["accuracy"],
    "margin": ["margin"],
    "scores": ["mean_reward", "min_reward", "max_reward"],
}


def main():
    # ============================================================ accelerator
    args = arguments.parse(Args, demo=common.ASSETS / "reward.yaml")
    # This also fills in output_dir and the size of micro-batches.
    accelerator = launch.make_accelerator(args, "reward")
    lora.complete_settings(accelerator, args)  # fills in lora_alpha

    # ============================================================ data
    tokenizer = load.tokenizer_of_run(accelerator, args)
    load.separate_pad(tokenizer, args.pad_token)
    data = dataset.load_data(accelerator, args, tokenizer, function=reward_row)
    preview.show(accelerator, args, data)  # with --preview: prints rows and exits
    lengths = dataset.column(data.train, "length")  # tokens, a prompt once for each answer
    progress = Progress(
        data.mixture.samples, args.train_batch_size, args.max_epochs, args.max_steps
    )

    # ============================================================ model and optimizer
    scorer = ScoreModel(load.score_model(args.model_name_or_path, tokenizer, args, new_head=True))
    prepare.disable_dropout(scorer)  # both answers must be read by the same model
    prepare.choose_parameters(accelerator, scorer, args)  # what is trained: all, or adapters
    optimizer = optim.adamw(accelerator, optim.parameter_groups(scorer, args.weight_decay), args)
    scheduler = optim.scheduler(optimizer, args, progress.total_steps)
    model, optimizer = prepare.for_training(accelerator, scorer, optimizer, args.debug_overflow)
    metrics = Metrics(
        accelerator,
        args,
        progress,
        bar_metric="accuracy",
        charts=CHARTS,
        flop=lora.flop(scorer),  # operations, for perf/mfu
    )
    run = Run(
        accelerator=accelerator,
        args=args,
        tokenizer=tokenizer,
        data=data,
        model=model,
        unwrapped=scorer,
        optimizer=optimizer,
        scheduler=scheduler,
        progress=progress,
        metrics=metrics,
        models=lora.fingerprints(accelerator, scorer),  # bases of adapters: a resume checks them
        # Mean and standard deviation of the held-out scores of these weights, once evaluated.
        extra={},
    )
    packer = checks.make_packer(run, [model], args.share_prompts)

    # ============================================================ the loop
    checkpoint.begin(run)
    console.begin(
        run,
        data=f"{len(data.train)} pairs of {int(lengths.sum())} tokens; "
        f"{packer.describe('both answers', each='answer')}",
        updates=progress.describe(),
    )
    scorer.config.update(run.extra)
    guard = guards.FiniteLosses(run)  # ends the run if a loss is not finite
    max_norm = args.max_grad_norm or math.inf  # inf: the norm is only measured
    if progress.updates_seen == 0:
        evaluate(run, packer)
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
                scores = model(batch)
                losses, logged = losses_and_metrics(scores, columns["margin"], weights, args)
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
            # The moments found in the last evaluation are those of the weights before this update.
            run.extra = {"reward_mean": None, "reward_std": None}
            scorer.config.update(run.extra)

        log_evaluate_save(run, packer)

    actor.publish(run)
    metrics.close()
    console.end(run)
    hub.push(run)


def log_evaluate_save(run: Run, packer: Packer) -> None:
    """Logs, evaluates and saves what is due, and ends the run if a signal asks for it."""
    args = run.args
    if run.progress.log_due(args.logging_steps):
        run.metrics.log()
    if run.progress.evaluation_due(args.eval_steps):
        evaluate(run, packer)
    if run.progress.save_due(args.save_steps):
        checkpoint.save(run)
    if run.progress.save_due(args.save_actor_steps):
        actor.publish_step(run)
    checkpoint.stop_if_asked(run)


# ============================================================ evaluation
@torch.no_grad()
def evaluate(run: Run, packer: Packer) -> None:
    """Logs the training metrics of each held-out set, exactly over all processes.

    The run and the model's config get the mean and the standard deviation of the scores of all
    held-out answers, so that PPO can normalise scores.
    """
    line = {}
    all_sets = Means(run.accelerator)
    with run.metrics.timed("paused"), checks.evaluation_mode(run.model):
        for prefix, eval_set in run.data.eval_sets.items():
            means = Means(run.accelerator)
            for _, columns, weights in batches.evaluation_batches(run, eval_set):
                scores = run.model(collate(columns, packer))
                _, logged = losses_and_metrics(scores, columns["margin"], weights, run.args)
                means.add(logged)
                exact = scores.double()
                moments = {"mean": exact, "mean of squares": exact**2}
                all_sets.add([Logged(moments, weights.repeat(2))])
            line |= {prefix + name: value for name, value in means.reduce().items()}

    if found := all_sets.reduce():
        variance = max(found["mean of squares"] - found["mean"] ** 2, 0.0)
        line["eval/std_reward"] = variance**0.5
        run.extra = {"reward_mean": found["mean"], "reward_std": line["eval/std_reward"]}
        run.unwrapped.config.update(run.extra)
    run.metrics.log_evaluation(line, [])
    actor.keep_best(run, line)


if __name__ == "__main__":
    errors.run(main)
