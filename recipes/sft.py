"""Supervised fine-tuning: raise the likelihood of demonstrated answers.

Ouyang et al. 2022, arXiv:2203.02155, section 3.5. Loss of a window, over its target tokens y_t:

    loss = mean over all target tokens of -log pi(y_t | y_<t)

Demo, offline:   python recipes/sft.py
One GPU:         accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/sft.py --model_name_or_path M --dataset_name D
N GPUs:          accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 recipes/sft.py --model_name_or_path M --dataset_name D
DeepSpeed fp16:  accelerate launch --config_file accelerate_configs/ds_fp16.yaml recipes/sft.py
Docs, metrics:   docs/sft.md
"""

# ============================================================ imports
import math
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import get_scheduler
from transformers.hf_argparser import HfArg

import common
from common import actor, arguments, batches, checkpoint, engine, guards, launch, optim
from common.checkpoint import Run
from common.data import dataset, formats, tokens
from common.metrics import Means, Metrics
from common.models import checks, load, prepare
from common.models.logprobs import LogProbModel
from common.models.packing import make_batch
from common.progress import Progress
from common.rollout import answers, generation

common.check_recipe(__file__)


# ============================================================ arguments
@dataclass
class Args:
    model_name_or_path: str | None = HfArg(default=None, help="model to train: hub name or folder")
    dataset_name: str | None = HfArg(
        default=None, help="demonstrations: hub name, hub name:config, file or folder"
    )
    dataset_split: str = HfArg(default="train", help="split of --dataset_name")
    eval_dataset_name: list[str] | None = HfArg(
        default=None, help="held-out rows, one or several sets; a column answer adds exact match"
    )
    eval_dataset_split: str = HfArg(
        default="train", help="split of --eval_dataset_name (a local file's is train)"
    )
    columns: list[str] | None = HfArg(
        default=None, help="where a format's column stands in the data, such as prompt=question"
    )
    output_dir: str | None = HfArg(default=None, help="default: runs/sft/<date-time>")

    loss_on: Literal["assistant", "completion", "all"] = HfArg(
        default="assistant",
        help="assistant: every assistant turn, or the completion; completion: the last turn; all: every token",
    )

    train_batch_size: int = HfArg(default=64, help="rows of one update, over all processes")
    micro_train_batch_size: int = HfArg(default=4, help="rows one process runs at once")
    micro_train_tokens: int = HfArg(
        default=0, help="tokens with padding it runs at once, instead; 0: not used"
    )
    packing: bool = HfArg(
        default=False,
        help="short rows beside each other, blind to each other, where the architecture allows it",
    )
    max_epochs: int = HfArg(default=1, help="passes over the data")
    max_steps: int = HfArg(default=0, help="updates; 0: as many as the epochs hold")
    max_length: int = HfArg(default=1024, help="tokens of a row; what is longer is cut at the end")
    learning_rate: float = HfArg(default=2e-5, help="peak learning rate")
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"
    ] = HfArg(default="linear", help="see transformers.get_scheduler")
    warmup_steps: float = HfArg(default=0.03, help="updates of warm-up; below 1 a share of all")
    weight_decay: float = HfArg(default=0.0, help="on matrices, not on biases and norms")
    adam_epsilon: float = HfArg(default=1e-8, help="Adam's epsilon")
    max_grad_norm: float = HfArg(default=1.0, help="gradient clipping; 0: none")
    gradient_checkpointing: bool = HfArg(default=False, help="less memory for more time")
    attn_implementation: str | None = HfArg(default=None, help="sdpa, eager, flash_attention_2 ...")
    seed: int = HfArg(default=0, help="data order and dropout")

    logging_steps: float = HfArg(
        default=1, help="updates between log lines; below 1 a share of all"
    )
    eval_steps: float = HfArg(
        default=0, help="updates between evaluations; 0: only before and after"
    )
    max_new_tokens: int = HfArg(default=256, help="longest answer in evaluation by exact match")
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
def conversation(row: dict) -> tuple[list[dict] | str, list[dict] | str]:
    """An SFT row as (prompt, completion), both strings or both message lists; `messages` and `text` have an empty prompt."""
    if row.get("messages") is not None:
        formats.check(
            formats.is_messages(row["messages"]),
            row,
            "messages",
            "a list of messages with role and content",
        )
        return [], formats.as_messages(row["messages"], "user")
    if row.get("text") is not None:
        formats.check(isinstance(row["text"], str), row, "text", "a string")
        return "", row["text"]
    formats.require(
        row, "prompt", "completion", expected="'messages', or 'prompt' and 'completion', or 'text'"
    )
    if isinstance(row["prompt"], str) and isinstance(row["completion"], str):
        return row["prompt"], row["completion"]
    return formats.as_messages(row["prompt"], "user"), formats.as_messages(
        row["completion"], "assistant"
    )


def encode_conversation(
    tokenizer, prompt, completion, loss_on: str, tools=None
) -> tuple[list[int], list[bool], list[int]]:
    """Ids of an SFT row, which of them are targets, and the ids before the last answer; all empty where there is none.

    Args:
        loss_on: `assistant` (every assistant turn; of prompt and completion the completion), `completion` (the last
            turn only) or `all`.
        tools: what the conversation's calls may be of, see `common.data.render`.
    """
    if not formats.has_text(completion):
        pieces = []
    elif isinstance(completion, str):
        pieces = tokens.encode(tokenizer, [prompt, completion], plain=True)
    else:
        messages = prompt + completion
        turns = [
            (i, i + 1)
            for i, m in enumerate(messages)
            if m["role"] == "assistant" and formats.has_text([m]) and i >= len(prompt)
        ]
        pieces = tokens.encode_turns(
            tokenizer, messages, turns[-1:] if loss_on == "completion" else turns, tools
        )
    prompt_ids, targets = [token for piece in pieces[:-1] for token in piece], []
    for context, answer in zip(pieces[::2], pieces[1::2]):
        learned = tokens.turn_length(tokenizer, answer) or len(answer)
        targets += (
            [loss_on == "all"] * len(context)
            + [True] * learned
            + [loss_on == "all"] * (len(answer) - learned)
        )
    targets[:1] = [False] * bool(targets)  # nothing predicts the first token
    ids = [*prompt_ids, *(pieces[-1][:learned] if pieces else [])]
    return ids, targets[: len(ids)], prompt_ids


def sft_row(row: dict, tokenizer, max_length: int, loss_on: str) -> dict:
    """`input_ids targets length n_targets reason truncated prompt_ids` of one SFT row."""
    prompt, completion = conversation(row)
    ids, targets, prompt_ids = encode_conversation(
        tokenizer, prompt, completion, loss_on, row.get("tools")
    )
    reason = (
        "empty answer"
        if not ids
        else ""
        if any(targets[:max_length])
        else "nothing to learn within max_length"
    )
    return {
        "input_ids": ids[:max_length],
        "targets": targets[:max_length],
        "prompt_ids": prompt_ids,
        "length": min(len(ids), max_length),
        "n_targets": sum(targets[:max_length]),
        "truncated": len(ids) > max_length,
        "reason": reason,
    }


def collate(columns: dict, pack: bool, device) -> dict:
    """Rows as the model reads them, see `lay_out`: answers without a prompt, `mask` the target tokens `[rows, longest]`."""
    return make_batch(
        [[]] * len(columns["input_ids"]), columns["input_ids"], pack, device, columns["targets"]
    )


def compare(
    scores: dict, mask: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, dict, torch.Tensor]:
    """Losses of the target tokens, their metrics, and their weights, each `[rows, length]`.

    Args:
        scores: the model's, see `LogProbModel.forward`; `mask` says which tokens are targets.
        weights: `[rows]`, 0 for a filler row.
    """
    losses = -scores["logps"]
    return (
        losses,
        {"loss": losses, "mean_token_accuracy": scores["correct"]},
        mask * weights[:, None],
    )


def main():
    # ============================================================ accelerator
    args = arguments.parse(Args, demo=common.ASSETS / "sft.yaml")
    accelerator = launch.make_accelerator(args, "sft")
    arguments.check_intervals(args)

    # ============================================================ data
    tokenizer = load.tokenizer_of(args.model_name_or_path)
    how = dict(
        function=sft_row,
        tokenizer=tokenizer,
        columns=formats.column_names(args.columns),
        max_length=args.max_length,
        loss_on=args.loss_on,
    )
    train_set = dataset.load(accelerator, args.dataset_name, args.dataset_split, **how)
    eval_sets = dataset.load_evaluation_sets(
        accelerator, args.eval_dataset_name, args.eval_dataset_split, **how
    )
    lengths, targets = dataset.column(train_set, "length"), dataset.column(train_set, "n_targets")
    progress = Progress(len(train_set), args.train_batch_size, args.max_epochs, args.max_steps)
    accelerator.print(progress.describe())

    # ============================================================ model and optimizer
    policy = LogProbModel(
        load.causal_lm(
            args.model_name_or_path,
            tokenizer,
            args.attn_implementation,
            args.gradient_checkpointing,
        )
    )
    optimizer = torch.optim.AdamW(
        optim.parameter_groups(policy, args.weight_decay),
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
    model, optimizer = prepare.for_training(accelerator, policy, optimizer, args.debug_overflow)
    checks.check_logprobs(
        model, train_set[0]["input_ids"], accelerator.device, args.model_name_or_path
    )
    args.packing = args.packing and checks.can_pack([model], args.max_length, accelerator.device)
    accelerator.print(f"rows are {'packed' if args.packing else 'padded'}")

    # ============================================================ the loop
    metrics = Metrics(accelerator, args, progress, bar_metric="mean_token_accuracy")
    run = Run(
        accelerator=accelerator,
        args=args,
        model=model,
        unwrapped=policy,
        optimizer=optimizer,
        scheduler=scheduler,
        tokenizer=tokenizer,
        progress=progress,
        metrics=metrics,
        data_fingerprint=train_set._fingerprint,
    )
    checkpoint.resume(run)
    if progress.updates_seen == 0:
        metrics.log_evaluation(*evaluate(accelerator, model, policy, tokenizer, eval_sets, args))
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
                batch = collate(columns, args.packing, accelerator.device)
            with accelerator.accumulate(model):
                losses, values, token_weights = compare(
                    model(batch, extras=("correct",)), batch["mask"], weights
                )
                seen.append((columns["row"], losses.detach(), token_weights))
                if accelerator.sync_gradients:
                    guards.check_finite(seen, progress, args.output_dir)
                # The mean over the window's target tokens: the engine divides by micro-batches and processes.
                accelerator.backward(
                    (losses * token_weights).sum() * divisor / int(targets[window].sum())
                )
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(
                        model.parameters(), max(args.max_grad_norm, 0) or math.inf
                    )
                optimizer.step()
                optimizer.zero_grad()
            metrics.pending.add(values, token_weights)
        applied = not accelerator.optimizer_step_was_skipped
        progress.update_done(applied, samples=len(window), tokens=int(lengths[window].sum()))
        metrics.update_done(
            applied, grad_norm=grad_norm, learning_rate=learning_rate, loss_scale=scale
        )
        if applied:
            scheduler.step()
        if progress.log_due(args.logging_steps):
            metrics.log()
        if progress.due(args.eval_steps):
            with metrics.timed("paused"):
                metrics.log_evaluation(
                    *evaluate(accelerator, model, policy, tokenizer, eval_sets, args)
                )
        if args.save_steps and progress.due(args.save_steps):
            with metrics.timed("paused"):
                checkpoint.save(run)
        if args.save_actor_steps and progress.due(args.save_actor_steps):
            with metrics.timed("paused"):
                folder = f"{args.output_dir}/actors/global_step_{progress.global_step:06d}"
                actor.save(accelerator, model, policy, tokenizer, folder, args.save_actor_limit)
        checkpoint.stop_if_asked(run)
    actor.save(accelerator, model, policy, tokenizer, f"{args.output_dir}/actor")
    metrics.close()
    accelerator.print(
        f"done: {progress.global_step} updates, {progress.skipped_steps} skipped; actor in {args.output_dir}/actor"
    )


# ============================================================ evaluation and saving
@torch.no_grad()
def evaluate(
    accelerator, model, policy, tokenizer, eval_sets, args: Args
) -> tuple[dict[str, float], list[str]]:
    """The training metrics over each held-out set, exact over all processes, exact match where it has answers; samples."""
    training, line, samples = model.training, {}, []
    model.eval()
    for prefix, eval_set in eval_sets.items():
        means = Means(accelerator)
        for _, columns, weights in batches.evaluation_batches(
            accelerator, eval_set, args.micro_train_batch_size, args.micro_train_tokens
        ):
            batch = collate(columns, args.packing, accelerator.device)
            _, values, token_weights = compare(
                model(batch, extras=("correct",)), batch["mask"], weights
            )
            means.add(values, token_weights)
        line |= {prefix + name: value for name, value in means.reduce().items()}
        if "answer" in eval_set.column_names:
            rows = eval_set.select_columns(["prompt_ids", "answer"])[
                [i for i, answer in enumerate(eval_set["answer"][:]) if answer]
            ]
            sizes = 8 * args.micro_train_batch_size, args.max_new_tokens
            responses = generation.generate(
                accelerator, model, policy.model, tokenizer, rows["prompt_ids"], *sizes
            )
            texts, asked = (
                tokenizer.batch_decode(ids, skip_special_tokens=True)
                for ids in (responses, rows["prompt_ids"])
            )
            right = [answers.is_right(text, answer) for text, answer in zip(texts, rows["answer"])]
            line[f"{prefix}exact_match"] = sum(right) / len(right)
            samples += [
                f"{'right' if ok else 'wrong'}: {ask[-80:]!r} -> {text[-80:]!r}"
                for ok, ask, text in zip(right, asked, texts)
            ][:4]
    model.train(training)
    return line, samples


if __name__ == "__main__":
    main()
