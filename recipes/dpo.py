"""Direct Preference Optimization: raise the chosen answer over the rejected one, held near a reference policy.

Rafailov et al. 2023, arXiv:2305.18290. Loss of one pair, h = log pi(chosen)/ref(chosen) - log pi(rejected)/ref(rejected):

    loss = -log sigmoid(beta * h)

Demo, offline:   python recipes/dpo.py
One GPU:         accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/dpo.py --model_name_or_path M --dataset_name D
N GPUs:          accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 recipes/dpo.py --model_name_or_path M --dataset_name D
DeepSpeed fp16:  accelerate launch --config_file accelerate_configs/ds_fp16.yaml recipes/dpo.py
Docs, metrics:   docs/dpo.md
"""

# ============================================================ imports
import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from transformers import get_scheduler
from transformers.hf_argparser import HfArg

import common
from common import actor, arguments, batches, checkpoint, engine, guards, launch, optim
from common.checkpoint import Run
from common.data import dataset, formats
from common.data.tokens import encode_preference
from common.metrics import Means, Metrics
from common.models import checks, load, packing, prepare
from common.models.logprobs import LogProbModel
from common.progress import Progress
from common.rollout import answers, generation

common.check_recipe(__file__)


# ============================================================ arguments
@dataclass
class Args:
    model_name_or_path: str | None = HfArg(default=None, help="policy to train: hub name or folder")
    ref_model_name_or_path: str | None = HfArg(
        default=None, help="reference policy; default: the policy as it starts"
    )
    dataset_name: str | None = HfArg(
        default=None, help="pairs: hub name, hub name:config, file or folder"
    )
    dataset_split: str = HfArg(default="train", help="split of --dataset_name")
    eval_dataset_name: list[str] | None = HfArg(
        default=None, help="held-out pairs, one or several sets; a column answer adds exact match"
    )
    eval_dataset_split: str = HfArg(
        default="train", help="split of --eval_dataset_name (a local file's is train)"
    )
    columns: list[str] | None = HfArg(
        default=None, help="where a format's column stands in the data, such as prompt=question"
    )
    output_dir: str | None = HfArg(default=None, help="default: runs/dpo/<date-time>")

    beta: float = HfArg(default=0.1, help="strength of the pull to the reference")
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust"] = HfArg(
        default="sigmoid", help="see preference_loss"
    )
    label_smoothing: float = HfArg(
        default=0.0, help="probability that a label is wrong (sigmoid: cDPO; robust)"
    )
    share_prompts: bool = HfArg(
        default=True,
        help="compute a prompt once for both answers, where the architecture allows it",
    )
    precompute_ref_log_probs: bool = HfArg(
        default=False, help="reference log-probs once, cached on disk; no reference in memory"
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
    learning_rate: float = HfArg(default=5e-7, help="peak learning rate")
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"
    ] = HfArg(default="linear", help="see transformers.get_scheduler")
    warmup_steps: float = HfArg(default=0.1, help="updates of warm-up; below 1 a share of all")
    weight_decay: float = HfArg(default=0.0, help="on matrices, not on biases and norms")
    adam_epsilon: float = HfArg(default=1e-8, help="Adam's epsilon")
    max_grad_norm: float = HfArg(default=1.0, help="gradient clipping; 0: none")
    gradient_checkpointing: bool = HfArg(default=False, help="less memory for more time")
    attn_implementation: str | None = HfArg(default=None, help="sdpa, eager, flash_attention_2 ...")
    seed: int = HfArg(default=0, help="data order")

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
def preference_loss(
    chosen_ratios: torch.Tensor,
    rejected_ratios: torch.Tensor,
    chosen_tokens: torch.Tensor,
    rejected_tokens: torch.Tensor,
    beta: float,
    loss_type: str,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Loss of each pair, fp32 `[pairs]`.

    Args:
        chosen_ratios, rejected_ratios: `[pairs]`, log pi(answer) - log ref(answer), summed over the answer.
        chosen_tokens, rejected_tokens: `[pairs]`, tokens of the answers, over which IPO averages.

    Sources: sigmoid arXiv:2305.18290 eq. 7; its label smoothing (cDPO) Mitchell 2023, eq. 3; robust arXiv:2403.00409 section 3.1;
    hinge arXiv:2309.06657 after SLiC; ipo arXiv:2310.12036 eq. 17, on averages over tokens as its authors advise and TRL does.
    """
    scaled = beta * (chosen_ratios - rejected_ratios)
    right, wrong = -F.logsigmoid(scaled), -F.logsigmoid(-scaled)
    if loss_type == "sigmoid":
        return (1 - label_smoothing) * right + label_smoothing * wrong
    if loss_type == "robust":
        return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
    if loss_type == "hinge":
        return torch.relu(1 - scaled)
    return (
        chosen_ratios / chosen_tokens - rejected_ratios / rejected_tokens - 1 / (2 * beta)
    ) ** 2  # ipo


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
        else encode_preference(tokenizer, prompt, chosen, rejected, row.get("tools"))
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


def collate(columns: dict, share: bool, device) -> dict:
    """Pairs as the model reads them, see `lay_out`: all chosen answers, then all rejected."""
    return packing.make_batch(
        columns["prompt_ids"] * 2, columns["chosen_ids"] + columns["rejected_ids"], share, device
    )


def compare(scores: dict, mask: torch.Tensor, ref_logps: torch.Tensor, args: Args):
    """Losses and metrics of pairs.

    Args:
        scores: the policy's, see `LogProbModel.forward`; `mask` says which tokens are real, `[2 * pairs, length]`.
        ref_logps: `[2 * pairs]`, the reference's log-probs of the answers.

    Returns:
        losses `[pairs]`, metrics of pairs `[pairs]`, and for chosen and rejected the logits `[pairs, length]` with the
        mask of their tokens.
    """
    logps, tokens = scores["logps"].sum(1), mask.sum(1)
    (chosen, rejected), (chosen_tokens, rejected_tokens) = logps.chunk(2), tokens.chunk(2)
    chosen_ratios, rejected_ratios = (logps - ref_logps).chunk(2)
    losses = preference_loss(
        chosen_ratios,
        rejected_ratios,
        chosen_tokens,
        rejected_tokens,
        args.beta,
        args.loss_type,
        args.label_smoothing,
    )
    rewards = args.beta * chosen_ratios, args.beta * rejected_ratios
    metrics = {
        "loss": losses,
        "rewards/chosen": rewards[0],
        "rewards/rejected": rewards[1],
        "rewards/accuracies": (rewards[0] > rewards[1]).float(),
        "rewards/margins": rewards[0] - rewards[1],
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }
    halves = zip(
        ("logits/chosen", "logits/rejected"), scores["mean_logits"].chunk(2), mask.chunk(2)
    )
    return losses, metrics, list(halves)


@torch.no_grad()
def reference_logps(accelerator, reference, eval_set, args: Args) -> np.ndarray:
    """The reference's log-probs of every pair's answers, fp32 `[rows, 2]`, the same on every rank."""
    table = torch.zeros(len(eval_set), 2, device=accelerator.device)
    for rows, columns, weights in batches.evaluation_batches(
        accelerator, eval_set, args.micro_train_batch_size, args.micro_train_tokens
    ):
        logps = reference(collate(columns, args.share_prompts, accelerator.device))["logps"].sum(1)
        real = weights > 0  # a filler is another process's row
        table[torch.tensor(rows, device=accelerator.device)[real]] = torch.stack(logps.chunk(2), 1)[
            real
        ]
    return accelerator.reduce(table, reduction="sum").cpu().numpy()


def model_fingerprint(name: str, model) -> list:
    """What names a model's weights: the hub's commit, or path, size and time of each file of a local folder."""
    folder = Path(name)
    files = sorted(file for file in folder.glob("*") if file.is_file()) if folder.is_dir() else []
    stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return [
        str(folder.resolve()) if files else name,
        getattr(model.config, "_commit_hash", None),
        stats,
    ]


def cached_array(accelerator, key: list, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """`compute()` or what an earlier run with the same key computed. All ranks must call it, and get the same array.

    Args:
        key: everything the array depends on, as JSON values.
        compute: collective; returns the whole array on every rank.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:32]
    path = Path(datasets.config.HF_DATASETS_CACHE) / "computed" / f"{digest}.npy"
    if all(
        gather_object([path.is_file()])
    ):  # ranks may see different disks: all read it, or all compute
        accelerator.print(f"taken from the cache: {path}")
        return np.load(path)
    array = compute()
    if accelerator.is_local_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{digest}.{os.getpid()}.npy")
        np.save(temporary, array)
        os.replace(temporary, path)
    accelerator.wait_for_everyone()
    return array


def main():
    # ============================================================ accelerator
    args = arguments.parse(Args, demo=common.ASSETS / "dpo.yaml")
    accelerator = launch.make_accelerator(args, "dpo")
    arguments.check_intervals(args)
    if args.label_smoothing and not (
        0 < args.label_smoothing < 0.5 and args.loss_type in ("sigmoid", "robust")
    ):
        raise SystemExit(
            f"--label_smoothing {args.label_smoothing}: expected 0 to below 0.5, and --loss_type sigmoid or robust"
        )
    if args.beta <= 0:
        raise SystemExit(f"--beta {args.beta}: expected more than 0")

    # ============================================================ data
    tokenizer = load.tokenizer_of(args.model_name_or_path)
    how = dict(
        function=preference_row,
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
    policy = LogProbModel(
        load.causal_lm(
            args.model_name_or_path,
            tokenizer,
            args.attn_implementation,
            args.gradient_checkpointing,
        )
    )
    prepare.disable_dropout(policy)  # the reference has none
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
        model,
        train_set[0]["prompt_ids"] + train_set[0]["chosen_ids"],
        accelerator.device,
        args.model_name_or_path,
    )

    # ============================================================ reference
    ref_name = args.ref_model_name_or_path or args.model_name_or_path
    reference = LogProbModel(load.causal_lm(ref_name, tokenizer, args.attn_implementation))
    key = ["dpo reference", model_fingerprint(ref_name, reference), accelerator.mixed_precision]
    reference = prepare.frozen(accelerator, reference)
    args.share_prompts = args.share_prompts and checks.can_pack(
        [model, reference], args.max_length, accelerator.device
    )
    accelerator.print(
        f"prompts are computed {'once for both answers' if args.share_prompts else 'for each answer'}"
    )
    ref_tables = {}
    if args.precompute_ref_log_probs:
        for name, eval_set in {"train": train_set, **eval_sets}.items():
            ref_tables[name] = cached_array(
                accelerator,
                [*key, eval_set._fingerprint],
                partial(reference_logps, accelerator, reference, eval_set, args),
            )
        reference = None

    def reference_of(name: str, rows: list[int], batch: dict) -> torch.Tensor:
        """`[2 * pairs]`: the reference's log-probs of the answers, from the table or the model."""
        if reference is None:
            return torch.from_numpy(ref_tables[name][rows].T.reshape(-1)).to(
                accelerator.device, non_blocking=True
            )
        with torch.no_grad():
            return reference(batch)["logps"].sum(1)

    # ============================================================ the loop
    metrics = Metrics(accelerator, args, progress, bar_metric="rewards/accuracies")
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
        metrics.log_evaluation(
            *evaluate(accelerator, model, policy, tokenizer, eval_sets, reference_of, args)
        )
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
                ref_logps = reference_of("train", rows, batch)
                losses, values, logits = compare(
                    model(batch, extras=("mean_logits",)), batch["mask"], ref_logps, args
                )
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
            metrics.pending.add(values, weights)
            for name, value, mask in logits:
                metrics.pending.add({name: value}, mask * weights[:, None])
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
                    *evaluate(accelerator, model, policy, tokenizer, eval_sets, reference_of, args)
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
    accelerator, model, policy, tokenizer, eval_sets, reference_of, args: Args
) -> tuple[dict[str, float], list[str]]:
    """The training metrics over each held-out set, exact over all processes, exact match where it has answers; samples."""
    training, line, samples = model.training, {}, []
    model.eval()
    for prefix, eval_set in eval_sets.items():
        means = Means(accelerator)
        for rows, columns, weights in batches.evaluation_batches(
            accelerator, eval_set, args.micro_train_batch_size, args.micro_train_tokens
        ):
            batch = collate(columns, args.share_prompts, accelerator.device)
            ref_logps = reference_of(prefix, rows, batch)
            _, values, logits = compare(
                model(batch, extras=("mean_logits",)), batch["mask"], ref_logps, args
            )
            means.add(values, weights)
            for name, value, mask in logits:
                means.add({name: value}, mask * weights[:, None])
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
