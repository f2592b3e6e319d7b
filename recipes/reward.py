"""Reward model: a score for an answer, learned from which of two answers people preferred.

Stiennon et al. 2020, arXiv:2009.01325, section 3.4 (Bradley-Terry). Loss of one pair, r the score at the answer's last token:

    loss = -log sigmoid(r(chosen) - r(rejected))

Demo, offline:   python recipes/reward.py
One GPU:         accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/reward.py --model_name_or_path M --dataset_name D
N GPUs:          accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 recipes/reward.py --model_name_or_path M --dataset_name D
DeepSpeed fp16:  accelerate launch --config_file accelerate_configs/ds_fp16.yaml recipes/reward.py
Docs, metrics:   docs/reward.md
"""

# ============================================================ imports
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from transformers import get_scheduler
from transformers.hf_argparser import HfArg

import common
from common import actor, arguments, batches, checkpoint, engine, guards, launch, optim
from common.checkpoint import Run
from common.data import dataset, formats, tokens
from common.metrics import Means, Metrics
from common.models import checks, load, packing, prepare
from common.models.logprobs import ScoreModel
from common.progress import Progress

common.check_recipe(__file__)


# ============================================================ arguments
@dataclass
class Args:
    model_name_or_path: str | None = HfArg(
        default=None, help="model to start from, usually the SFT model: hub name or folder"
    )
    dataset_name: str | None = HfArg(
        default=None,
        help="pairs: hub name, hub name:config, file or folder; a column margin is used",
    )
    dataset_split: str = HfArg(default="train", help="split of --dataset_name")
    eval_dataset_name: list[str] | None = HfArg(
        default=None, help="held-out pairs, one or several sets"
    )
    eval_dataset_split: str = HfArg(
        default="train", help="split of --eval_dataset_name (a local file's is train)"
    )
    columns: list[str] | None = HfArg(
        default=None, help="where a format's column stands in the data, such as prompt=question"
    )
    output_dir: str | None = HfArg(default=None, help="default: runs/reward/<date-time>")

    center_coef: float = HfArg(
        default=0.0,
        help="weight of (r(chosen) + r(rejected))^2, which keeps scores around zero; 0.01 is usual",
    )

    share_prompts: bool = HfArg(
        default=True,
        help="a prompt computed once for both answers, where the architecture allows it",
    )
    train_batch_size: int = HfArg(default=64, help="pairs of one update, over all processes")
    micro_train_batch_size: int = HfArg(default=4, help="pairs one process runs at once")
    micro_train_tokens: int = HfArg(
        default=0, help="tokens of pairs, prompts twice, that it runs at once, instead; 0: not used"
    )
    max_epochs: int = HfArg(default=1, help="passes over the data")
    max_steps: int = HfArg(default=0, help="updates; 0: as many as the epochs hold")
    max_length: int = HfArg(
        default=1024, help="tokens of prompt and answer; what is longer is cut at the end"
    )
    learning_rate: float = HfArg(default=1e-5, help="peak learning rate")
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"
    ] = HfArg(default="linear", help="see transformers.get_scheduler")
    warmup_steps: float = HfArg(default=0.03, help="updates of warm-up; below 1 a share of all")
    weight_decay: float = HfArg(default=0.0, help="on matrices, not on biases and norms")
    adam_epsilon: float = HfArg(default=1e-8, help="Adam's epsilon")
    max_grad_norm: float = HfArg(default=1.0, help="gradient clipping; 0: none")
    gradient_checkpointing: bool = HfArg(default=False, help="less memory for more time")
    attn_implementation: str | None = HfArg(default=None, help="sdpa, eager, flash_attention_2 ...")
    seed: int = HfArg(default=0, help="data order, and a new head")

    logging_steps: float = HfArg(
        default=1, help="updates between log lines; below 1 a share of all"
    )
    eval_steps: float = HfArg(
        default=0, help="updates between evaluations; 0: only before and after"
    )
    save_steps: float = HfArg(default=0, help="updates between checkpoints to resume from; 0: none")
    save_total_limit: int = HfArg(default=2, help="checkpoints to keep; 0: all")
    save_actor_steps: float = HfArg(
        default=0, help="updates between saved actors; 0: only the last, in <output_dir>/actor"
    )
    save_actor_limit: int = HfArg(default=0, help="saved actors to keep; 0: all")
    resume: str = HfArg(
        default="never",
        help="never, auto (the newest whole checkpoint in --output_dir) or a checkpoint's path",
    )
    report_to: Literal["tensorboard", "none"] = HfArg(
        default="tensorboard", help="metrics.jsonl is always written"
    )
    debug_overflow: bool = HfArg(
        default=False, help="name the module and the tensor that overflow; slow"
    )


# ============================================================ the algorithm
def pairwise_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor, center_coef: float
) -> torch.Tensor:
    """Loss of each pair, fp32 `[pairs]`.

    Args:
        chosen, rejected: `[pairs]`, scores of the answers.
        margins: `[pairs]`, how far apart they should be; 0 where the data does not say.

    Sources: arXiv:2009.01325 section 3.4; margins Llama 2, arXiv:2307.09288 eq. 2; centring arXiv:2312.09244.
    """
    return -F.logsigmoid(chosen - rejected - margins) + center_coef * (chosen + rejected) ** 2


def preference_row(row: dict, tokenizer, max_length: int) -> dict:
    """`prompt_ids chosen_ids rejected_ids length reason truncated` of one pair; length is of both sequences together."""
    prompt, chosen, rejected = formats.preference(row)
    reason = (
        "empty prompt"
        if not formats.has_text(prompt)
        else ""
        if formats.has_text(chosen) and formats.has_text(rejected)
        else "empty answer"
    )
    ids, chosen_ids, rejected_ids = (
        ([], [], [])
        if reason
        else tokens.encode_preference(tokenizer, prompt, chosen, rejected, row.get("tools"))
    )
    longest, room = (
        len(ids) + max(len(chosen_ids), len(rejected_ids)),
        max(max_length - len(ids), 0),
    )
    chosen_ids, rejected_ids = chosen_ids[:room], rejected_ids[:room]
    if not reason and chosen_ids == rejected_ids:
        reason = "chosen equal to rejected" if room else "prompt fills max_length"
    return {
        "prompt_ids": ids[:max_length],
        "chosen_ids": chosen_ids,
        "rejected_ids": rejected_ids,
        "length": 2 * min(len(ids), max_length) + len(chosen_ids) + len(rejected_ids),
        "truncated": longest > max_length,
        "reason": reason,
    }


def reward_row(row: dict, tokenizer, max_length: int) -> dict:
    """`preference_row` and the row's `margin`, 0 where there is none."""
    margin = row.get("margin")
    try:
        number = 0.0 if margin in (None, "") else float(str(margin))  # the cells of a CSV are text
    except ValueError:
        number = math.nan
    formats.check(math.isfinite(number), row, "margin", "a finite number")
    return {**preference_row(row, tokenizer, max_length), "margin": number}


def collate(columns: dict, share: bool, device) -> dict:
    """Pairs as the model reads them, see `lay_out`: all chosen answers, then all rejected."""
    return packing.make_batch(
        columns["prompt_ids"] * 2, columns["chosen_ids"] + columns["rejected_ids"], share, device
    )


def compare(rewards: torch.Tensor, margins: list[float], weights: torch.Tensor, args: Args):
    """Losses `[pairs]`, metrics of pairs with the pairs' weights, metrics of answers with the answers' weights.

    Args:
        rewards: the scores `[2 * pairs]`, of all chosen answers, then all rejected.
        weights: `[pairs]`, 0 for a filler.
    """
    chosen, rejected = rewards.chunk(2)
    losses = pairwise_loss(
        chosen,
        rejected,
        torch.tensor(margins).to(rewards.device, non_blocking=True),
        args.center_coef,
    )
    pairs = {"loss": losses, "accuracy": (chosen > rejected).float(), "margin": chosen - rejected}
    answers = {"mean_reward": rewards, "min_reward": rewards, "max_reward": rewards}
    return losses, [(pairs, weights), (answers, weights.repeat(2))]


def main():
    # ============================================================ accelerator
    args = arguments.parse(Args, demo=common.ASSETS / "reward.yaml")
    accelerator = launch.make_accelerator(args, "reward")
    arguments.check_intervals(args)
    if args.center_coef < 0:
        raise SystemExit(f"--center_coef {args.center_coef}: expected 0 or more")

    # ============================================================ data
    tokenizer = load.tokenizer_of(args.model_name_or_path)
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise SystemExit(
            f"the tokenizer of {args.model_name_or_path!r} pads with its EOS, {tokenizer.eos_token!r}, or has no pad token: transformers would "
            "read a saved reward model's score before the EOS. Set tokenizer.pad_token to another token of its vocabulary and save it."
        )
    how = dict(
        function=reward_row,
        tokenizer=tokenizer,
        columns=formats.column_names(args.columns),
        max_length=args.max_length,
    )
    train_set = dataset.load(accelerator, args.dataset_name, args.dataset_split, **how)
    eval_sets = dataset.load_evaluation_sets(
        accelerator, args.eval_dataset_name, args.eval_dataset_split, **how
    )
    lengths = dataset.column(train_set, "length")
    progress = Progress(len(train_set), args.train_batch_size, args.max_epochs, args.max_steps)
    accelerator.print(progress.describe())

    # ============================================================ model and optimizer
    loading = args.attn_implementation, args.gradient_checkpointing
    scorer = ScoreModel(
        load.score_model(args.model_name_or_path, tokenizer, *loading, new_head=True)
    )
    prepare.disable_dropout(scorer)  # both answers are read by the same model
    optimizer = torch.optim.AdamW(
        optim.parameter_groups(scorer, args.weight_decay),
        lr=args.learning_rate,
        eps=args.adam_epsilon,
    )
    warmup = (
        args.warmup_steps
        if args.warmup_steps >= 1
        else math.ceil(args.warmup_steps * progress.total_steps)
    )
    scheduler = get_scheduler(
        args.lr_scheduler_type, optimizer, int(warmup), progress.total_steps
    )  # not prepared: ours to step
    model, optimizer = prepare.for_training(accelerator, scorer, optimizer, args.debug_overflow)
    args.share_prompts = args.share_prompts and checks.can_pack(
        [model], args.max_length, accelerator.device
    )
    accelerator.print(
        f"prompts are computed {'once for both answers' if args.share_prompts else 'for each answer'}"
    )

    # ============================================================ the loop
    metrics = Metrics(accelerator, args, progress, bar_metric="accuracy")
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
        extra={},
    )
    checkpoint.resume(run)
    scorer.config.update(run.extra)
    if progress.updates_seen == 0:
        metrics.log_evaluation(evaluate(accelerator, model, eval_sets, run.extra, args), [])
    model.train()
    metrics.start_interval()
    while not progress.finished:
        window = batches.rows_of_update(
            len(train_set), args.train_batch_size, args.seed, progress.updates_seen
        )
        micro_batches = batches.split(
            accelerator, window, lengths, args.micro_train_batch_size, args.micro_train_tokens
        )
        divisor = engine.begin_update(accelerator, model, micro_batches)
        scale, learning_rate, seen = (
            engine.loss_scale(accelerator, model),
            scheduler.get_last_lr()[0],
            [],
        )
        for rows, weights in micro_batches:
            with metrics.timed("data"):
                columns, weights = (
                    train_set[rows],
                    torch.tensor(weights).to(accelerator.device, non_blocking=True),
                )
                batch = collate(columns, args.share_prompts, accelerator.device)
            with accelerator.accumulate(model):
                losses, values = compare(model(batch), columns["margin"], weights, args)
                seen.append((columns["row"], losses.detach(), weights))
                if accelerator.sync_gradients:
                    guards.check_finite(seen, progress, args.output_dir)
                # The mean over the window's pairs: the engine divides by micro-batches and processes.
                accelerator.backward((losses * weights).sum() * divisor / len(window))
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(
                        model.parameters(), max(args.max_grad_norm, 0) or math.inf
                    )
                optimizer.step()
                optimizer.zero_grad()
            for part, part_weights in values:
                metrics.pending.add(part, part_weights)
        applied = not accelerator.optimizer_step_was_skipped
        progress.update_done(applied, samples=len(window), tokens=int(lengths[window].sum()))
        metrics.update_done(
            applied, grad_norm=grad_norm, learning_rate=learning_rate, loss_scale=scale
        )
        if applied:
            scheduler.step()
            run.extra = {
                "reward_mean": None,
                "reward_std": None,
            }  # those found before are of other weights
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
                actor.save(accelerator, model, scorer, tokenizer, folder, args.save_actor_limit)
        checkpoint.stop_if_asked(run)
    actor.save(accelerator, model, scorer, tokenizer, f"{args.output_dir}/actor")
    metrics.close()
    accelerator.print(
        f"done: {progress.global_step} updates, {progress.skipped_steps} skipped; reward model in {args.output_dir}/actor"
    )


# ============================================================ evaluation and saving
@torch.no_grad()
def evaluate(accelerator, model, eval_sets, moments: dict, args: Args) -> dict[str, float]:
    """The training metrics over each held-out set, exact over all processes.

    The mean and standard deviation of the scores of all held-out answers go into `moments` and the model's config, as `reward_mean`
    and `reward_std`: with them PPO can normalise.
    """
    training, line, all_sets = model.training, {}, Means(accelerator)
    model.eval()
    for prefix, eval_set in eval_sets.items():
        means = Means(accelerator)
        for _, columns, weights in batches.evaluation_batches(
            accelerator, eval_set, args.micro_train_batch_size, args.micro_train_tokens
        ):
            _, values = compare(
                model(collate(columns, args.share_prompts, accelerator.device)),
                columns["margin"],
                weights,
                args,
            )
            for part, part_weights in values:
                means.add(part, part_weights)
            rewards = values[1][0]["mean_reward"].double()
            all_sets.add({"mean": rewards, "mean of squares": rewards**2}, weights.repeat(2))
        line |= {prefix + name: value for name, value in means.reduce().items()}
    model.train(training)
    if found := all_sets.reduce():
        line["eval/std_reward"] = max(found["mean of squares"] - found["mean"] ** 2, 0.0) ** 0.5
        moments |= {"reward_mean": found["mean"], "reward_std": line["eval/std_reward"]}
        accelerator.unwrap_model(model).config.update(moments)
    return line


if __name__ == "__main__":
    main()
