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

Every argument, every metric: docs/reward.md
"""

# ============================================================ imports
import common

# Somebody else's package of this name may be found first.
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
from transformers import get_scheduler
from transformers.hf_argparser import HfArg

from common import (
    actor,
    arguments,
    batches,
    checkpoint,
    console,
    engine,
    errors,
    guards,
    launch,
    optim,
)
from common.checkpoint import Run
from common.data import dataset, formats, pairs
from common.metrics import Means, Metrics
from common.models import architecture, checks, load, lora, merge, packing, prepare
from common.models.logprobs import ScoreModel
from common.progress import Progress


# ============================================================ arguments
@dataclass
class Args:
    model_name_or_path: str | None = HfArg(
        default=None, help="the model to start from, usually the SFT model: a hub name or a folder"
    )
    dataset_name: list[str] | None = HfArg(
        default=None,
        help="pairs: one or several of hub name, hub name:config, file or folder; "
        "a column `margin` is used",
    )
    dataset_weights: list[float] | None = HfArg(
        default=None,
        help="of several --dataset_name, one each. 2: each row twice an epoch; 0.5: half of the "
        "rows, the other half in the next epoch",
    )
    dataset_split: str = HfArg(default="train", help="split of --dataset_name")
    eval_dataset_name: list[str] | None = HfArg(
        default=None, help="held-out pairs, one or several sets"
    )
    eval_dataset_split: str = HfArg(
        default="train", help="split of --eval_dataset_name; a local file is the split train"
    )
    columns: list[str] | None = HfArg(
        default=None, help="FORMAT=YOURS for columns with other names, such as prompt=question"
    )
    chat_template: str | None = HfArg(
        default=None, help="a Jinja file that replaces the model's own chat template"
    )
    chat_template_kwargs: str | None = HfArg(
        default=None,
        help="variables of the chat template as a JSON object, such as "
        '{"enable_thinking": false}; saved in the template of the actor',
    )
    strings_as_messages: bool = HfArg(
        default=False,
        help="make prompts and answers that are strings turns of user and assistant",
    )
    output_dir: str | None = HfArg(default=None, help="default: runs/reward/<date-time>")

    center_coef: float = HfArg(
        default=0.0,
        help="weight of (r(chosen) + r(rejected))^2, which keeps scores around zero; 0.01 is usual",
    )
    share_prompts: bool = HfArg(
        default=True, help="compute a prompt once for both answers, where the model allows it"
    )

    train_batch_size: int = HfArg(default=64, help="pairs of one update, over all processes")
    micro_train_batch_size: int | None = HfArg(
        default=None,
        help="pairs that one process runs at once; without this and micro_train_tokens it is "
        "4, and on a GPU as many as fit 16384 tokens",
    )
    micro_train_tokens: int = HfArg(
        default=0,
        help="above 0: a micro-batch holds as many pairs as fit into this many tokens, "
        "padding and both copies of the prompt counted",
    )
    max_epochs: int = HfArg(default=1, help="passes over the data")
    max_steps: int = HfArg(default=0, help="updates; 0: as many as the epochs hold")
    max_length: int = HfArg(
        default=1024, help="tokens of prompt and answer; longer ones are cut at the end"
    )
    learning_rate: float = HfArg(default=1e-5, help="peak learning rate")
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"
    ] = HfArg(default="linear", help="see transformers.get_scheduler")
    warmup_steps: float = HfArg(default=0.03, help="updates of warm-up; below 1: a share of all")
    weight_decay: float = HfArg(default=0.0, help="on matrices only, not on biases and norms")
    adam_epsilon: float = HfArg(default=1e-8, help="Adam's epsilon")
    max_grad_norm: float = HfArg(default=1.0, help="gradient clipping; 0: none")
    lora_r: int = HfArg(
        default=0, help="rank of low-rank adapters, such as 16; 0: train all weights"
    )
    lora_alpha: float | None = HfArg(
        default=None, help="adapters are scaled by alpha / r; default: 2 * lora_r"
    )
    lora_dropout: float = HfArg(default=0.0, help="dropout before the adapters")
    lora_target_modules: list[str] = HfArg(
        default_factory=lambda: ["all-linear"],
        help="names of the layers that get an adapter, such as q_proj v_proj",
    )
    load_in_4bit: bool = HfArg(
        default=False, help="pack the frozen weights below the adapters (QLoRA); one GPU or DDP"
    )
    gradient_checkpointing: bool = HfArg(default=False, help="saves memory, costs time")
    attn_implementation: str | None = HfArg(default=None, help="sdpa, eager, flash_attention_2 ...")
    seed: int = HfArg(default=0, help="of the data order and of a new score head")

    logging_steps: float = HfArg(
        default=1, help="updates between log lines; below 1: a share of all updates"
    )
    eval_steps: float = HfArg(
        default=0, help="updates between evaluations; 0: only before and after training"
    )
    save_steps: float = HfArg(default=0, help="updates between checkpoints to resume from; 0: none")
    save_total_limit: int = HfArg(default=2, help="checkpoints to keep; 0: all")
    save_actor_steps: float = HfArg(
        default=0, help="updates between saved actors; 0: only the last, in <output_dir>/actor"
    )
    save_actor_limit: int = HfArg(default=0, help="saved actors to keep; 0: all")
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = HfArg(
        default=None, help="dtype of saved actors; default: as trained. Checkpoints stay exact"
    )
    resume: str = HfArg(
        default="never",
        help="never, auto (the newest whole checkpoint in --output_dir) or a checkpoint's path",
    )
    report_to: list[str] = HfArg(
        default_factory=lambda: ["tensorboard"],
        help="tensorboard, wandb, trackio, mlflow ... or none; metrics.jsonl is always written",
    )
    debug_overflow: bool = HfArg(
        default=False, help="name the module and the tensor that overflow; slow"
    )

    # Besides what all recipes share, a resumed run may change these.
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
    formats.check(math.isfinite(number), row, "margin", "a finite number")
    values = pairs.preference_row(row, tokenizer, max_length, strings_as_messages)
    return {**values, "margin": number}


def collate(columns: dict, share_prompts: bool, device) -> dict:
    """Returns pairs as the model reads them: all chosen answers, then all rejected ones."""
    prompts = columns["prompt_ids"] * 2
    both_answers = columns["chosen_ids"] + columns["rejected_ids"]
    return packing.make_batch(prompts, both_answers, share_prompts, device)


def compare(
    scores: torch.Tensor, margins: list[float], weights: torch.Tensor, args: Args
) -> tuple[torch.Tensor, list[tuple[dict, torch.Tensor]]]:
    """Returns the losses of pairs, and what is logged of them.

    Args:
        scores: `[2 * pairs]`, of all chosen answers, then of all rejected ones.
        margins: one per pair, see `pairwise_loss`.
        weights: `[pairs]`, 0 for a padding row.

    Returns:
        losses `[pairs]`; metrics, each a dict of values with the weights of these values.
    """
    chosen_scores, rejected_scores = scores.chunk(2)
    margins_on_device = batches.send(margins, scores.device)
    losses = pairwise_loss(chosen_scores, rejected_scores, margins_on_device, args.center_coef)
    of_pairs = {
        "loss": losses,
        "accuracy": (chosen_scores > rejected_scores).float(),
        "margin": chosen_scores - rejected_scores,
    }
    of_answers = {"mean_reward": scores, "min_reward": scores, "max_reward": scores}
    return losses, [(of_pairs, weights), (of_answers, weights.repeat(2))]


def check_settings(args: Args) -> None:
    """Refuses settings that mean nothing."""
    if args.center_coef < 0:
        raise SystemExit(f"--center_coef {args.center_coef}: expected 0 or more")


def main():
    # ============================================================ accelerator
    args = arguments.parse(Args, demo=common.ASSETS / "reward.yaml")
    accelerator = launch.make_accelerator(args, "reward")
    arguments.check_intervals(args)
    lora.check_settings(accelerator, args)
    check_settings(args)

    # ============================================================ data
    model_name = merge.name_to_load(accelerator, args.model_name_or_path, args.output_dir)
    tokenizer = load.tokenizer_of(
        model_name,
        args.chat_template,
        args.chat_template_kwargs,
        checkpoint.date_of_run(accelerator, args),
    )
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise SystemExit(
            f"the tokenizer of {model_name!r} has no pad token of its own, or pads "
            f"with its EOS, {tokenizer.eos_token!r}: transformers would read a saved reward "
            "model's score before the EOS. Set tokenizer.pad_token to another token of its "
            "vocabulary and save it."
        )
    data_settings = dict(
        function=reward_row,
        tokenizer=tokenizer,
        columns=formats.column_names(args.columns),
        strings_as_messages=args.strings_as_messages,
        max_length=args.max_length,
    )
    train_set, mixture = dataset.load_mixture(
        accelerator,
        args.dataset_name,
        args.dataset_weights,
        args.dataset_split,
        **data_settings,
    )
    eval_sets = dataset.load_evaluation_sets(
        accelerator, args.eval_dataset_name, args.eval_dataset_split, **data_settings
    )
    lengths = dataset.column(train_set, "length")
    progress = Progress(mixture.samples, args.train_batch_size, args.max_epochs, args.max_steps)

    # ============================================================ model and optimizer
    scorer = ScoreModel(
        load.score_model(
            model_name,
            tokenizer,
            args.attn_implementation,
            args.gradient_checkpointing,
            lora.in_4bit(accelerator, args),
            new_head=True,
        )
    )
    prepare.disable_dropout(scorer)  # both answers must be read by the same model
    architecture.freeze_unreached(accelerator, scorer, args.max_length)
    lora.add_adapters(accelerator, scorer, args)
    parameter_groups = optim.parameter_groups(scorer, args.weight_decay)
    optimizer = optim.adamw(accelerator, parameter_groups, args)
    # The scheduler is not prepared: accelerate would step it num_processes times per update.
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        optim.warmup_updates(args.warmup_steps, progress.total_steps),
        progress.total_steps,
    )
    schedule = optim.describe_schedule(optimizer, args, progress.total_steps)
    model, optimizer = prepare.for_training(accelerator, scorer, optimizer, args.debug_overflow)
    checks.check_positions([model], args.max_length)
    args.share_prompts = args.share_prompts and checks.can_pack(
        [model], args.max_length, accelerator.device
    )
    how_often = "once for both answers" if args.share_prompts else "for each answer"

    # ============================================================ the loop
    metrics = Metrics(
        accelerator,
        args,
        progress,
        bar_metric="accuracy",
        charts={
            "loss": ["loss"],
            "pairs ranked right": ["accuracy"],
            "margin": ["margin"],
            "scores": ["mean_reward", "min_reward", "max_reward"],
        },
        flop=lora.flop(scorer),
    )
    run = Run(
        accelerator=accelerator,
        args=args,
        model=model,
        unwrapped=scorer,
        optimizer=optimizer,
        scheduler=scheduler,
        tokenizer=tokenizer,
        progress=progress,
        metrics=metrics,
        data_fingerprint=train_set._fingerprint,
        models=lora.fingerprints(accelerator, scorer),
        # Mean and standard deviation of the held-out scores of these weights, once evaluated.
        extra={},
    )
    checkpoint.resume(run)
    console.begin(
        run,
        data=f"{len(train_set)} pairs of {int(lengths.sum())} tokens; "
        f"prompts are computed {how_often}",
        updates=progress.describe(),
        schedule=schedule,
    )
    scorer.config.update(run.extra)
    guard = guards.FiniteLosses(accelerator, progress, args.output_dir)
    max_grad_norm = args.max_grad_norm if args.max_grad_norm > 0 else math.inf
    if progress.updates_seen == 0:
        metrics.log_evaluation(evaluate(accelerator, model, eval_sets, run.extra, args), [])
    model.train()
    metrics.start_interval()
    while not progress.finished:
        # All processes agree on the samples of this update. Each takes its share of them.
        update_rows = batches.rows_of_update(
            mixture, args.train_batch_size, args.seed, progress.updates_seen
        )
        micro_batches = batches.split(
            accelerator,
            update_rows,
            lengths,
            args.micro_train_batch_size,
            args.micro_train_tokens,
        )
        divisor = engine.begin_update(accelerator, model, micro_batches)
        loss_scale = engine.loss_scale(accelerator, model)
        learning_rate = scheduler.get_last_lr()[0]

        for micro_batch in micro_batches:
            with metrics.timed("data"):
                columns = train_set[micro_batch.rows]
                weights = batches.send(micro_batch.weights, accelerator.device)
                inputs = collate(columns, args.share_prompts, accelerator.device)

            with accelerator.accumulate(model):
                scores = model(inputs)
                losses, logged = compare(scores, columns["margin"], weights, args)
                guard.check(columns["row"], losses, weights)
                # The loss is the mean over the update's pairs. The engine itself divides by
                # `divisor`, the number of micro-batches of all processes.
                accelerator.backward((losses * weights).sum() * divisor / len(update_rows))
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            for values, value_weights in logged:
                metrics.pending.add(values, value_weights)
            metrics.computed(inputs, micro_batch.weights)

        applied = not accelerator.optimizer_step_was_skipped  # skipped: an fp16 overflow
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

        if progress.log_due(args.logging_steps):
            metrics.log()
        if progress.due(args.eval_steps):
            with metrics.timed("paused"):
                metrics.log_evaluation(evaluate(accelerator, model, eval_sets, run.extra, args), [])
        if args.save_steps and progress.due(args.save_steps):
            with metrics.timed("paused"):
                checkpoint.save(run)
        if args.save_actor_steps and progress.due(args.save_actor_steps):
            with metrics.timed("paused"):
                folder = f"{args.output_dir}/actors/global_step_{progress.global_step:06d}"
                actor.publish(
                    accelerator,
                    model,
                    scorer,
                    tokenizer,
                    folder,
                    args.save_actor_limit,
                    args.save_dtype,
                )
        checkpoint.stop_if_asked(run)

    folder = f"{args.output_dir}/actor"
    actor.publish(accelerator, model, scorer, tokenizer, folder, dtype=args.save_dtype)
    metrics.close()
    console.end(run)


# ============================================================ evaluation and saving
@torch.no_grad()
def evaluate(accelerator, model, eval_sets: dict, moments: dict, args: Args) -> dict[str, float]:
    """Returns the training metrics over each held-out set, exactly over all processes.

    Args:
        moments: gets the mean and the standard deviation of the scores of all held-out answers, as
            `reward_mean` and `reward_std`. The model's config gets them too, so that PPO can
            normalise scores.
    """
    line = {}
    all_sets = Means(accelerator)
    with checks.evaluation_mode(model):
        for prefix, eval_set in eval_sets.items():
            means = Means(accelerator)
            for _, columns, weights in batches.evaluation_batches(
                accelerator, eval_set, args.micro_train_batch_size, args.micro_train_tokens
            ):
                scores = model(collate(columns, args.share_prompts, accelerator.device))
                _, logged = compare(scores, columns["margin"], weights, args)
                for values, value_weights in logged:
                    means.add(values, value_weights)
                exact = scores.double()
                all_sets.add({"mean": exact, "mean of squares": exact**2}, weights.repeat(2))
            line |= {prefix + name: value for name, value in means.reduce().items()}

    if found := all_sets.reduce():
        variance = max(found["mean of squares"] - found["mean"] ** 2, 0.0)
        line["eval/std_reward"] = variance**0.5
        # In place: the caller keeps it.
        moments |= {"reward_mean": found["mean"], "reward_std": line["eval/std_reward"]}
        accelerator.unwrap_model(model).config.update(moments)
    return line


if __name__ == "__main__":
    errors.run(main)
