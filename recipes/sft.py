"""Supervised fine-tuning: raise the likelihood of demonstrated answers.

Ouyang et al. 2022, arXiv:2203.02155, section 3.5. Loss of an update, over its target tokens y_t:

    loss = mean over all target tokens of -log pi(y_t | y_<t)

Demo, offline:
    python recipes/sft.py
One GPU:
    accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/sft.py \
        --model_name_or_path M --dataset_name D
N GPUs:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 recipes/sft.py \
        --model_name_or_path M --dataset_name D
DeepSpeed fp16:
    accelerate launch --config_file accelerate_configs/ds_fp16.yaml recipes/sft.py

Every argument, every metric: docs/sft.md
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
from typing import ClassVar, Literal, NamedTuple

import torch
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
from common.data import dataset, formats, templates, tokens
from common.data.sequences import Sequences
from common.metrics import Means, Metrics
from common.models import architecture, checks, load, lora, merge, packing, prepare
from common.models.logprobs import LogProbModel
from common.progress import Progress
from common.rollout import answers


# ============================================================ arguments
@dataclass
class Args:
    model_name_or_path: str | None = HfArg(
        default=None, help="the model to train: a hub name or a folder"
    )
    dataset_name: list[str] | None = HfArg(
        default=None,
        help="demonstrations: one or several of hub name, hub name:config, file or folder",
    )
    dataset_weights: list[float] | None = HfArg(
        default=None,
        help="of several --dataset_name, one each. 2: each row twice an epoch; 0.5: half of the "
        "rows, the other half in the next epoch",
    )
    dataset_split: str = HfArg(default="train", help="split of --dataset_name")
    eval_dataset_name: list[str] | None = HfArg(
        default=None,
        help="held-out rows, one or several sets; a column `answer` adds exact match",
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
    output_dir: str | None = HfArg(default=None, help="default: runs/sft/<date-time>")

    loss_on: Literal["assistant", "completion", "all"] = HfArg(
        default="assistant",
        help="assistant: every assistant turn, or the completion; completion: the last turn; "
        "all: every token",
    )

    train_batch_size: int = HfArg(default=64, help="rows of one update, over all processes")
    micro_train_batch_size: int | None = HfArg(
        default=None,
        help="rows that one process runs at once; without this and micro_train_tokens it is "
        "4, and on a GPU as many as fit 16384 tokens",
    )
    micro_train_tokens: int = HfArg(
        default=0,
        help="above 0: a micro-batch holds as many rows as fit into this many tokens, "
        "padding counted",
    )
    packing: bool = HfArg(
        default=False,
        help="put several short rows into one sequence, where they cannot see each other, "
        "if the model allows it",
    )
    max_epochs: int = HfArg(default=1, help="passes over the data")
    max_steps: int = HfArg(default=0, help="updates; 0: as many as the epochs hold")
    max_length: int = HfArg(default=1024, help="tokens of a row; longer ones are cut at the end")
    learning_rate: float = HfArg(default=2e-5, help="peak learning rate")
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
    seed: int = HfArg(default=0, help="of the data order and of dropout")

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
    may_change: ClassVar[set[str]] = {"packing", "max_new_tokens"}


# ============================================================ the algorithm
class Sequence(NamedTuple):
    """What the model reads at once: token ids, and which of them are targets."""

    ids: list[int]
    targets: list[bool]


def encode_conversation(
    tokenizer,
    prompt: str | list[dict],
    completion: str | list[dict],
    loss_on: str,
    tools: list | str | None = None,
) -> tuple[list[Sequence], list[int], list[str]]:
    """Returns a row's sequences, the ids before its last answer, and notes, see `tokens.note`.

    There is no sequence where there is no answer. There is one, unless the chat template writes
    earlier turns differently once later ones follow. Then each answer has its own sequence, with
    the history as the model reads it before that answer.

    Args:
        loss_on: `assistant` (every assistant turn; of prompt and completion the completion),
            `completion` (the last turn only) or `all`.
        tools: what the conversation may call, see `templates.render`.
    """
    learn_contexts = loss_on == "all"
    if isinstance(completion, str):
        if not completion:
            return [], [], []
        prompt_ids, ids = tokens.encode(tokenizer, [prompt, completion], plain=True)
        targets = [learn_contexts] * len(prompt_ids) + [True] * len(ids)
        return [Sequence(prompt_ids + ids, without_first(targets))], prompt_ids, []

    messages = prompt + completion
    turns = learned_turns(messages, len(prompt), loss_on)
    sequences = []
    prompt_ids = []
    notes = []
    last_learned = None
    for turn in turns:
        answer = tokens.encode_turn(tokenizer, messages, turn, turn + 1, tools)
        notes += answer.notes
        if not answer.ids:  # the template does not write it
            continue
        ids, targets = sequences.pop() if sequences else ([], [])
        new = len(answer.context) - len(ids)
        if answer.context[: len(ids)] != ids:
            # The template has rewritten the history, so this answer has a sequence of its own.
            sequences.append(Sequence(ids, targets))
            targets = [False] * len(answer.context)
            new = 0
            if learn_contexts:
                new = tokens.tokens_since(tokenizer, messages[:turn], last_learned, tools)
                targets = targets[new:]
        targets = targets + [learn_contexts] * new + [True] * len(answer.ids)
        sequences.append(Sequence(answer.context + answer.ids, without_first(targets)))
        prompt_ids = answer.prompt
        last_learned = turn
    if turns:
        notes += templates.unwritten_parts(tokenizer, messages[: turns[-1] + 1], tools)
    return sequences, prompt_ids, notes


def learned_turns(messages: list[dict], first: int, loss_on: str) -> list[int]:
    """Returns which messages, from number `first` on, are answers to learn."""
    turns = [
        number
        for number, message in enumerate(messages)
        if number >= first and message["role"] == "assistant"
        if formats.has_text([message])
    ]
    return turns[-1:] if loss_on == "completion" else turns


def without_first(targets: list[bool]) -> list[bool]:
    """Returns the targets of a sequence without its first token, which nothing predicts."""
    return [False, *targets[1:]]


def sft_row(
    row: dict, tokenizer, max_length: int, loss_on: str, strings_as_messages: bool = False
) -> dict:
    """Returns `input_ids targets prompt_ids length n_targets truncated reason` of one row.

    `input_ids` and `targets` hold the sequences of the row one after the other. A row of several
    has `sequence_lengths`, too, and a row with notes has `notes`, see `dataset.load`.
    """
    prompt, completion = formats.conversation(row)
    if strings_as_messages:
        prompt, completion = formats.as_turns(prompt, completion)
    whole, prompt_ids, notes = encode_conversation(
        tokenizer, prompt, completion, loss_on, row.get("tools")
    )

    cut = [Sequence(ids[:max_length], targets[:max_length]) for ids, targets in whole]
    sequences = [sequence for sequence in cut if any(sequence.targets)]
    reason = ""  # why the row cannot be used
    if not whole:
        reason = tokens.reason_of(notes) or formats.missing_answer(completion)
    elif not sequences:
        reason = "nothing to learn within max_length"
        sequences = cut[:1]
    ids = [token for sequence in sequences for token in sequence.ids]
    targets = [target for sequence in sequences for target in sequence.targets]
    values = {
        "input_ids": ids,
        "targets": targets,
        "prompt_ids": prompt_ids,
        "length": len(ids),
        "n_targets": sum(targets),
        "truncated": any(len(ids) > max_length for ids, _ in whole),
        "reason": reason,
    }
    if len(sequences) > 1:
        values["sequence_lengths"] = [len(sequence.ids) for sequence in sequences]
    if notes:
        values["notes"] = notes
    return values


def collate(columns: dict, args: Args, device) -> dict:
    """Returns each row as an answer to an empty prompt, learned at its targets only."""
    no_prompts = [[]] * len(columns["input_ids"])
    return packing.make_batch(
        no_prompts,
        columns["input_ids"],
        args.packing,
        device,
        scored=columns["targets"],
        by_lengths=architecture.takes_lengths(args.attn_implementation),
    )


def compare(
    output: dict, mask: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[dict, torch.Tensor]]]:
    """Returns the losses of the target tokens, their weights, and what is logged of them.

    Args:
        output: what `LogProbModel.forward` returned, with `correct`.
        mask: `[rows, length]`, which tokens are targets.
        weights: `[rows]`, 0 for a padding row.

    Returns:
        losses and weights `[rows, length]`; metrics, each a dict of values with their weights.
    """
    losses = -output["logps"]
    token_weights = mask * weights[:, None]
    of_tokens = {"loss": losses, "mean_token_accuracy": output["correct"]}
    return losses, token_weights, [(of_tokens, token_weights)]


def main():
    # ============================================================ accelerator
    args = arguments.parse(Args, demo=common.ASSETS / "sft.yaml")
    accelerator = launch.make_accelerator(args, "sft")
    arguments.check_intervals(args)
    lora.check_settings(accelerator, args)

    # ============================================================ data
    model_name = merge.name_to_load(accelerator, args.model_name_or_path, args.output_dir)
    tokenizer = load.tokenizer_of(
        model_name,
        args.chat_template,
        args.chat_template_kwargs,
        checkpoint.date_of_run(accelerator, args),
    )
    data_settings = dict(
        function=sft_row,
        tokenizer=tokenizer,
        columns=formats.column_names(args.columns),
        strings_as_messages=args.strings_as_messages,
        max_length=args.max_length,
        loss_on=args.loss_on,
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
    train_sequences = Sequences(train_set)
    lengths = train_sequences.lengths
    target_counts = dataset.column(train_set, "n_targets")
    progress = Progress(
        mixture.samples,
        args.train_batch_size,
        args.max_epochs,
        args.max_steps,
        counts_sequences=True,
    )

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
    (first_row,) = train_sequences[[0]]["input_ids"]
    checks.check_logprobs(model, first_row, accelerator.device, model_name)
    checks.check_positions([model], args.max_length)
    answers.check_room(model, eval_sets, args.max_new_tokens)
    args.packing = args.packing and checks.can_pack(
        [model],
        args.max_length,
        accelerator.device,
        by_lengths=architecture.takes_lengths(args.attn_implementation),
    )
    layout = "packed" if args.packing else "padded"

    # ============================================================ the loop
    metrics = Metrics(
        accelerator,
        args,
        progress,
        bar_metric="mean_token_accuracy",
        charts={
            "loss": ["loss"],
            "right tokens": ["mean_token_accuracy"],
            "right answers": ["exact_match"],
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
        models=lora.fingerprints(accelerator, policy),
    )
    checkpoint.resume(run)
    console.begin(
        run,
        data=f"{len(train_set)} rows of {int(lengths.sum())} tokens; rows are {layout}",
        updates=progress.describe(),
        schedule=schedule,
    )
    guard = guards.FiniteLosses(accelerator, progress, args.output_dir)
    max_grad_norm = args.max_grad_norm if args.max_grad_norm > 0 else math.inf
    if progress.updates_seen == 0:
        metrics.log_evaluation(*evaluate(accelerator, model, policy, tokenizer, eval_sets, args))
    model.train()
    metrics.start_interval()
    while not progress.finished:
        # All processes agree on the samples of this update. Each takes its share of them.
        update_rows = batches.rows_of_update(
            mixture, args.train_batch_size, args.seed, progress.updates_seen
        )
        # A row may hold several sequences. They are all in this update, wherever they are run.
        update_sequences = train_sequences.of_rows(update_rows)
        micro_batches = batches.split(
            accelerator,
            update_sequences,
            lengths,
            args.micro_train_batch_size,
            args.micro_train_tokens,
        )
        update_targets = int(target_counts[update_rows].sum())
        divisor = engine.begin_update(accelerator, model, micro_batches)
        loss_scale = engine.loss_scale(accelerator, model)
        learning_rate = scheduler.get_last_lr()[0]

        for micro_batch in micro_batches:
            with metrics.timed("data"):
                columns = train_sequences[micro_batch.rows]
                weights = batches.send(micro_batch.weights, accelerator.device)
                inputs = collate(columns, args, accelerator.device)

            with accelerator.accumulate(model):
                output = model(inputs, extras=("correct",))
                losses, token_weights, logged = compare(output, inputs["mask"], weights)
                guard.check(columns["row"], losses, token_weights)
                # The loss is the mean over the update's targets. The engine itself divides by
                # `divisor`, the number of micro-batches of all processes.
                accelerator.backward((losses * token_weights).sum() * divisor / update_targets)
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            for values, value_weights in logged:
                metrics.pending.add(values, value_weights)
            metrics.computed(inputs, micro_batch.weights)

        applied = not accelerator.optimizer_step_was_skipped  # skipped: an fp16 overflow
        progress.update_done(
            applied,
            samples=len(update_rows),
            sequences=len(update_sequences),
            tokens=int(lengths[update_sequences].sum()),
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
                    *evaluate(accelerator, model, policy, tokenizer, eval_sets, args)
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
            eval_sequences = Sequences(eval_set)
            for micro_batch in batches.split(
                accelerator,
                range(len(eval_sequences)),
                eval_sequences.lengths,
                args.micro_train_batch_size,
                args.micro_train_tokens,
            ):
                columns = eval_sequences[micro_batch.rows]
                weights = batches.send(micro_batch.weights, accelerator.device)
                inputs = collate(columns, args, accelerator.device)
                output = model(inputs, extras=("correct",))
                _, _, logged = compare(output, inputs["mask"], weights)
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
