"""Direct Preference Optimization: prefer one answer to another, held near a reference policy.

Rafailov et al. 2023, arXiv:2305.18290. Loss of one pair, with
h = log pi(chosen)/ref(chosen) - log pi(rejected)/ref(rejected):

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

Every argument, every metric: docs/dpo.md
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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np
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
from common.data import cache, dataset, formats, pairs
from common.metrics import Means, Metrics
from common.models import architecture, checks, load, lora, merge, packing, prepare
from common.models.logprobs import LogProbModel
from common.progress import Progress
from common.rollout import answers


# ============================================================ arguments
@dataclass
class Args:
    model_name_or_path: str | None = HfArg(
        default=None, help="the policy to train: a hub name or a folder"
    )
    ref_model_name_or_path: str | None = HfArg(
        default=None, help="the reference policy; default: the policy before training"
    )
    dataset_name: list[str] | None = HfArg(
        default=None, help="pairs: one or several of hub name, hub name:config, file or folder"
    )
    dataset_weights: list[float] | None = HfArg(
        default=None,
        help="of several --dataset_name, one each. 2: each row twice an epoch; 0.5: half of the "
        "rows, the other half in the next epoch",
    )
    dataset_split: str = HfArg(default="train", help="split of --dataset_name")
    eval_dataset_name: list[str] | None = HfArg(
        default=None,
        help="held-out pairs, one or several sets; a column `answer` adds exact match",
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
    output_dir: str | None = HfArg(default=None, help="default: runs/dpo/<date-time>")

    beta: float = HfArg(default=0.1, help="strength of the pull towards the reference")
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust"] = HfArg(
        default="sigmoid", help="see preference_loss"
    )
    label_smoothing: float = HfArg(
        default=0.0,
        help="probability that a label is wrong; "
        "used by loss_type sigmoid (then called cDPO) and robust",
    )
    share_prompts: bool = HfArg(
        default=True, help="compute a prompt once for both answers, where the model allows it"
    )
    precompute_ref_log_probs: bool = HfArg(
        default=False,
        help="compute the reference's log-probs once, cache them on disk, and free the reference",
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
    learning_rate: float = HfArg(default=5e-7, help="peak learning rate")
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"
    ] = HfArg(default="linear", help="see transformers.get_scheduler")
    warmup_steps: float = HfArg(default=0.1, help="updates of warm-up; below 1: a share of all")
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
    seed: int = HfArg(default=0, help="of the data order")

    logging_steps: float = HfArg(
        default=1, help="updates between log lines; below 1: a share of all updates"
    )
    eval_steps: float = HfArg(
        default=0, help="updates between evaluations; 0: only before and after training"
    )
    max_new_tokens: int = HfArg(default=256, help="longest answer in evaluation by exact match")
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
    may_change: ClassVar[set[str]] = {
        "share_prompts",
        "precompute_ref_log_probs",
        "max_new_tokens",
    }


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
    """Returns the loss of each pair, fp32 `[pairs]`.

    Args:
        chosen_ratios, rejected_ratios: `[pairs]`, log pi(answer) - log ref(answer), summed over
            the answer's tokens.
        chosen_tokens, rejected_tokens: `[pairs]`, numbers of tokens, over which IPO averages.

    Sources:
        sigmoid: arXiv:2305.18290 eq. 7; with label smoothing (cDPO): Mitchell 2023, eq. 3.
        robust: arXiv:2403.00409 section 3.1.
        hinge: arXiv:2309.06657, after SLiC.
        ipo: arXiv:2310.12036 eq. 17, on averages over tokens as its authors advise and TRL does.
    """
    scaled = beta * (chosen_ratios - rejected_ratios)
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
    chosen_average = chosen_ratios / chosen_tokens
    rejected_average = rejected_ratios / rejected_tokens
    return (chosen_average - rejected_average - 1 / (2 * beta)) ** 2


def collate(columns: dict, share_prompts: bool, device) -> dict:
    """Returns pairs as the model reads them: all chosen answers, then all rejected ones."""
    prompts = columns["prompt_ids"] * 2
    both_answers = columns["chosen_ids"] + columns["rejected_ids"]
    return packing.make_batch(prompts, both_answers, share_prompts, device)


def compare(
    output: dict, mask: torch.Tensor, ref_logps: torch.Tensor, weights: torch.Tensor, args: Args
) -> tuple[torch.Tensor, list[tuple[dict, torch.Tensor]]]:
    """Returns the losses of pairs, and what is logged of them.

    Args:
        output: what `LogProbModel.forward` returned of the policy, with `mean_logits`.
        mask: `[2 * pairs, length]`, which tokens are real.
        ref_logps: `[2 * pairs]`, the reference's log-probs of the answers.
        weights: `[pairs]`, 0 for a padding row.

    Returns:
        losses `[pairs]`; metrics, each a dict of values with the weights of these values.
    """
    logps = output["logps"].sum(1)
    chosen_logps, rejected_logps = logps.chunk(2)
    chosen_ratios, rejected_ratios = (logps - ref_logps).chunk(2)
    chosen_tokens, rejected_tokens = mask.sum(1).chunk(2)
    losses = preference_loss(
        chosen_ratios,
        rejected_ratios,
        chosen_tokens,
        rejected_tokens,
        args.beta,
        args.loss_type,
        args.label_smoothing,
    )
    chosen_rewards = args.beta * chosen_ratios
    rejected_rewards = args.beta * rejected_ratios
    of_pairs = {
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
        (of_pairs, weights),
        ({"logits/chosen": chosen_logits}, chosen_mask * weights[:, None]),
        ({"logits/rejected": rejected_logits}, rejected_mask * weights[:, None]),
    ]


@torch.no_grad()
def reference_table(accelerator, reference, rows_of_data, args: Args) -> np.ndarray:
    """Returns the reference's log-probs of all answers, fp32 `[rows, 2]`, on every process."""
    table = torch.zeros(len(rows_of_data), 2, device=accelerator.device)
    for rows, columns, weights in batches.evaluation_batches(
        accelerator, rows_of_data, args.micro_train_batch_size, args.micro_train_tokens
    ):
        inputs = collate(columns, args.share_prompts, accelerator.device)
        chosen_logps, rejected_logps = reference(inputs)["logps"].sum(1).chunk(2)
        real = weights > 0  # a padding row repeats a row that another process fills in
        real_rows = torch.tensor(rows, device=accelerator.device)[real]
        table[real_rows] = torch.stack([chosen_logps, rejected_logps], 1)[real]
    return accelerator.reduce(table, reduction="sum").cpu().numpy()


def check_settings(args: Args) -> None:
    """Refuses settings that would be ignored or mean nothing."""
    smooths = args.loss_type in ("sigmoid", "robust")
    if args.label_smoothing and not (0 < args.label_smoothing < 0.5 and smooths):
        raise SystemExit(
            f"--label_smoothing {args.label_smoothing}: expected 0 to below 0.5, "
            "and --loss_type sigmoid or robust"
        )
    if args.beta <= 0:
        raise SystemExit(f"--beta {args.beta}: expected more than 0")


def main():
    # ============================================================ accelerator
    args = arguments.parse(Args, demo=common.ASSETS / "dpo.yaml")
    accelerator = launch.make_accelerator(args, "dpo")
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
    data_settings = dict(
        function=pairs.preference_row,
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
    policy = LogProbModel(
        load.causal_lm(
            model_name,
            tokenizer,
            args.attn_implementation,
            args.gradient_checkpointing,
            lora.in_4bit(accelerator, args),
        )
    )
    prepare.disable_dropout(policy)  # the reference has none
    architecture.freeze_unreached(accelerator, policy, args.max_length)
    lora.add_adapters(accelerator, policy, args)
    parameter_groups = optim.parameter_groups(policy, args.weight_decay)
    optimizer = optim.adamw(accelerator, parameter_groups, args)
    # The scheduler is not prepared: accelerate would step it num_processes times per update.
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        optim.warmup_updates(args.warmup_steps, progress.total_steps),
        progress.total_steps,
    )
    schedule = optim.describe_schedule(optimizer, args, progress.total_steps)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer, args.debug_overflow)
    first_row = train_set[0]["prompt_ids"] + train_set[0]["chosen_ids"]
    checks.check_logprobs(model, first_row, accelerator.device, model_name)

    # ============================================================ reference
    # Of models whose change is noticed when a run is resumed.
    fingerprints = lora.fingerprints(accelerator, policy)
    ref_name = merge.name_to_load(
        accelerator, args.ref_model_name_or_path, args.output_dir, "base_reference"
    )
    if args.lora_r and ref_name is None:
        ref_name = model_name
        ref_fingerprint = fingerprints["base model"]
        decides_values = engine.decides_values(accelerator, policy)
        reference = lora.WithoutAdapters(model)  # the policy before training
    else:
        ref_name = ref_name or model_name
        reference = LogProbModel(load.causal_lm(ref_name, tokenizer, args.attn_implementation))
        ref_fingerprint = load.fingerprint(accelerator, ref_name, reference.config)
        fingerprints["reference model"] = ref_fingerprint
        decides_values = engine.decides_values(accelerator, reference)
        reference = prepare.frozen(accelerator, reference)
    checks.check_positions([model, reference], args.max_length)
    answers.check_room(model, eval_sets, args.max_new_tokens)
    args.share_prompts = args.share_prompts and checks.can_pack(
        [model, reference], args.max_length, accelerator.device
    )
    how_often = "once for both answers" if args.share_prompts else "for each answer"
    ref_tables = {}
    if args.precompute_ref_log_probs:
        for name, rows_of_data in {"train": train_set, **eval_sets}.items():
            ref_tables[name] = cache.array(
                accelerator,
                key=[
                    "dpo reference",
                    ref_name,
                    ref_fingerprint,
                    decides_values,
                    args.share_prompts,
                    rows_of_data._fingerprint,
                ],
                compute=partial(reference_table, accelerator, reference, rows_of_data, args),
            )
        reference = None

    def reference_logps(name: str, rows: list[int], inputs: dict) -> torch.Tensor:
        """Returns the reference's log-probs of the answers `[2 * pairs]`, of the set `name`."""
        if reference is None:
            chosen_then_rejected = ref_tables[name][rows].T.reshape(-1)
            return batches.send(chosen_then_rejected, accelerator.device)
        with torch.no_grad():
            return reference(inputs)["logps"].sum(1)

    # ============================================================ the loop
    metrics = Metrics(
        accelerator,
        args,
        progress,
        bar_metric="rewards/accuracies",
        charts={
            "loss": ["loss"],
            "pairs ranked right": ["rewards/accuracies"],
            "right answers": ["exact_match"],
            "chosen against rejected": ["rewards/chosen", "rewards/rejected"],
            "log-probs": ["logps/chosen", "logps/rejected"],
        },
        flop=lora.flop(policy),
    )
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
        models=fingerprints,
    )
    checkpoint.resume(run)
    console.begin(
        run,
        data=f"{len(train_set)} pairs of {int(lengths.sum())} tokens; "
        f"prompts are computed {how_often}",
        updates=progress.describe(),
        schedule=schedule,
    )
    guard = guards.FiniteLosses(accelerator, progress, args.output_dir)
    max_grad_norm = args.max_grad_norm if args.max_grad_norm > 0 else math.inf
    if progress.updates_seen == 0:
        metrics.log_evaluation(
            *evaluate(accelerator, model, policy, tokenizer, eval_sets, reference_logps, args)
        )
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
                ref_logps = reference_logps("train", micro_batch.rows, inputs)
                output = model(inputs, extras=("mean_logits",))
                losses, logged = compare(output, inputs["mask"], ref_logps, weights, args)
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

        if progress.log_due(args.logging_steps):
            metrics.log()
        if progress.due(args.eval_steps):
            with metrics.timed("paused"):
                metrics.log_evaluation(
                    *evaluate(
                        accelerator, model, policy, tokenizer, eval_sets, reference_logps, args
                    )
                )
        if args.save_steps and progress.due(args.save_steps):
            with metrics.timed("paused"):
                checkpoint.save(run)
        if args.save_actor_steps and progress.due(args.save_actor_steps):
            with metrics.timed("paused"):
                folder = f"{args.output_dir}/actors/global_step_{progress.global_step:06d}"
                actor.publish(
                    accelerator,
                    model,
                    policy,
                    tokenizer,
                    folder,
                    args.save_actor_limit,
                    args.save_dtype,
                )
        checkpoint.stop_if_asked(run)

    folder = f"{args.output_dir}/actor"
    actor.publish(accelerator, model, policy, tokenizer, folder, dtype=args.save_dtype)
    metrics.close()
    console.end(run)


# ============================================================ evaluation and saving
@torch.no_grad()
def evaluate(
    accelerator,
    model,
    policy,
    tokenizer,
    eval_sets: dict,
    reference_logps: Callable,
    args: Args,
) -> tuple[dict[str, float], list[dict]]:
    """Evaluates the policy on each held-out set, exactly over all processes.

    Returns:
        the training metrics, and exact match where the set has answers; the answers given.
    """
    line = {}
    all_examples = []
    with checks.evaluation_mode(model):
        for prefix, eval_set in eval_sets.items():
            means = Means(accelerator)
            for rows, columns, weights in batches.evaluation_batches(
                accelerator, eval_set, args.micro_train_batch_size, args.micro_train_tokens
            ):
                inputs = collate(columns, args.share_prompts, accelerator.device)
                ref_logps = reference_logps(prefix, rows, inputs)
                output = model(inputs, extras=("mean_logits",))
                _, logged = compare(output, inputs["mask"], ref_logps, weights, args)
                for values, value_weights in logged:
                    means.add(values, value_weights)
            line |= {prefix + name: value for name, value in means.reduce().items()}

            exact_match, examples = answers.exact_match(
                accelerator,
                model,
                policy,
                tokenizer,
                eval_set,
                prefix,
                batch_size=8 * args.micro_train_batch_size,
                max_new_tokens=args.max_new_tokens,
            )
            if exact_match is not None:
                line[f"{prefix}exact_match"] = exact_match
            all_examples += examples
    return line, all_examples


if __name__ == "__main__":
    errors.run(main)
