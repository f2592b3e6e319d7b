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

Every metric: docs/sft.md. Every argument: docs/arguments.md
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
from typing import ClassVar, Literal

import torch

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
from preference_recipes.data import chat, dataset, formats
from preference_recipes.data.sequences import Sequences
from preference_recipes.models import architecture, checks, load, lora, prepare
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer
from preference_recipes.rollouts import answers
from preference_recipes.tools import preview


# ============================================================ arguments
@dataclass
class Args(SharedArgs):
    loss_on: Literal["assistant", "completion", "all"] = arg(
        default="assistant",
        help="assistant: every assistant turn, or the completion; completion: the last turn; "
        "all: every token",
    )
    packing: bool = arg(
        default=False,
        help="put several short rows into one sequence, where they cannot see each other, "
        "if the model allows it",
    )
    max_length: int = arg(
        default=1024, at_least=2, help="tokens of a row; longer ones are cut at the end"
    )
    learning_rate: float = arg(default=2e-5, with_lora=2e-4, at_least=0, help="peak learning rate")
    max_new_tokens: int = arg(
        default=256, at_least=1, help="longest answer in evaluation by exact match"
    )
    exact_match_rows: int | None = arg(
        default=None,
        at_least=0,
        help="evaluate exact match on at most this many prompts of each held-out set; 0: on none; "
        "default: on all that have an `answer`",
    )

    # What a resumed run may change, on top of what it may change in all recipes.
    may_change: ClassVar[set[str]] = {"packing", "max_new_tokens", "exact_match_rows"}


# ============================================================ the algorithm
def encode_conversation(
    tokenizer,
    prompt: str | list[dict],
    completion: str | list[dict],
    loss_on: str,
    tools: list | str | None = None,
) -> tuple[list[chat.Sequence], list[int], list[str]]:
    """Returns a row's sequences, the ids before its last answer, and notes, see `chat.note`.

    There is no sequence where there is no answer, and one for a string; of messages see
    `chat.encode_conversation`.

    Args:
        loss_on: `assistant` (every assistant turn; of prompt and completion the completion),
            `completion` (the last turn only) or `all`.
        tools: what the conversation may call, see `chat.render`.
    """
    learn_contexts = loss_on == "all"
    if isinstance(completion, str):
        if not completion:
            return [], [], []
        prompt_ids, ids = chat.encode_plain(tokenizer, prompt, completion)
        targets = [learn_contexts] * len(prompt_ids) + [True] * len(ids)
        return [chat.Sequence(prompt_ids + ids, [False, *targets[1:]])], prompt_ids, []

    messages = prompt + completion
    turns = learned_turns(messages, len(prompt), loss_on)
    if learn_contexts and not all(map(formats.is_learned, messages)):
        raise formats.BadRow("--loss_on all learns every message, and one of them says no to it")
    return chat.encode_conversation(tokenizer, messages, turns, tools, learn_contexts)


def learned_turns(messages: list[dict], first: int, loss_on: str) -> list[int]:
    """Returns which messages, from number `first` on, are answers to learn."""
    turns = [
        number
        for number, message in enumerate(messages)
        if number >= first and message["role"] == "assistant"
        if formats.has_text([message]) and formats.is_learned(message)
    ]
    return turns[-1:] if loss_on == "completion" else turns


def sft_row(
    row: dict, tokenizer, max_length: int, loss_on: str, strings_as_messages: bool = False
) -> dict:
    """Returns the columns of a row, see `dataset.load`.

    `input_ids` and `targets` hold the sequences of the row one after the other, whose lengths are
    `sequence_lengths`. The others are `prompt_ids length n_targets truncated reason longest notes`.
    """
    prompt, completion = formats.conversation(row)
    if strings_as_messages:
        prompt, completion = formats.as_turns(prompt, completion)
    whole, prompt_ids, notes = encode_conversation(
        tokenizer, prompt, completion, loss_on, row.get("tools")
    )

    cut = [chat.Sequence(ids[:max_length], targets[:max_length]) for ids, targets in whole]
    sequences = [sequence for sequence in cut if any(sequence.targets)]
    reason = ""  # why the row cannot be used
    if not whole:
        reason = chat.why_left_out(notes) or formats.missing_answer(completion)
    elif not sequences:
        reason = "nothing to learn within max_length"
        sequences = cut[:1]
    ids = [token for sequence in sequences for token in sequence.ids]
    targets = [target for sequence in sequences for target in sequence.targets]
    return {
        "input_ids": ids,
        "targets": targets,
        "sequence_lengths": [len(sequence.ids) for sequence in sequences],
        "prompt_ids": prompt_ids,
        "length": len(ids),
        "n_targets": sum(targets),
        "truncated": any(len(ids) > max_length for ids, _ in whole),
        "reason": reason,
        "longest": max((len(ids) for ids, _ in whole), default=0),
        "notes": notes,
    }


def collate(columns: dict, packer: Packer) -> dict:
    """Returns each row as an answer to an empty prompt, learned at its targets only."""
    no_prompts = [[]] * len(columns["input_ids"])
    return packer.make_batch(no_prompts, columns["input_ids"], is_target=columns["targets"])


def losses_and_metrics(
    output: dict, mask: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[Logged]]:
    """Returns the losses of the target tokens, their weights, and what to log about them.

    Args:
        output: what `LogProbModel.forward` returned, with `correct`.
        mask: `[rows, length]`, which tokens are targets.
        weights: `[rows]`, 0 for a padding row.

    Returns:
        losses and weights `[rows, length]`; metrics.
    """
    losses = -output["logps"]
    token_weights = mask * weights[:, None]
    per_token = {"loss": losses, "mean_token_accuracy": output["correct"]}
    return losses, token_weights, [Logged(per_token, token_weights)]


# TensorBoard's charts: title -> the metrics that it shows together.
CHARTS = {
    "loss": ["loss"],
    "right tokens": ["mean_token_accuracy"],
    "right answers": ["eval/exact_match"],
}


def main():
    # ============================================================ accelerator
    args = arguments.parse(Args, demo=common.ASSETS / "sft.yaml")
    # This also fills in output_dir and the size of micro-batches.
    accelerator = launch.make_accelerator(args, "sft")
    lora.complete_settings(accelerator, args)  # fills in lora_alpha

    # ============================================================ data
    tokenizer = load.tokenizer_of_run(accelerator, args)
    data = dataset.load_data(accelerator, args, tokenizer, function=sft_row, loss_on=args.loss_on)
    preview.show(accelerator, args, data)  # with --preview: prints rows and exits
    train_sequences = Sequences(data.train)
    lengths = train_sequences.lengths
    target_counts = dataset.column(data.train, "n_targets")
    progress = Progress(
        data.mixture.samples,
        args.train_batch_size,
        args.max_epochs,
        args.max_steps,
        counts_sequences=True,
    )

    # ============================================================ model and optimizer
    policy = LogProbModel(load.causal_lm(args.model_name_or_path, tokenizer, args))
    prepare.choose_parameters(accelerator, policy, args)  # what is trained: all, or adapters
    optimizer = optim.adamw(accelerator, optim.parameter_groups(policy, args.weight_decay), args)
    scheduler = optim.scheduler(optimizer, args, progress.total_steps)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer, args.debug_overflow)
    metrics = Metrics(
        accelerator,
        args,
        progress,
        bar_metric="mean_token_accuracy",
        charts=CHARTS,
        flop=lora.flop(policy),  # operations, for perf/mfu
    )
    run = Run(
        accelerator=accelerator,
        args=args,
        tokenizer=tokenizer,
        data=data,
        model=model,
        unwrapped=policy,
        optimizer=optimizer,
        scheduler=scheduler,
        progress=progress,
        metrics=metrics,
        models=lora.fingerprints(accelerator, policy),  # bases of adapters: a resume checks them
    )
    # Refuses a model whose architecture is not interpreted correctly.
    checks.check_logprobs(run, train_sequences[[0]]["input_ids"][0])
    answers.check_room(run)  # do held-out prompts leave room for an answer?
    varlen = architecture.uses_varlen(args.attn_implementation)
    packer = checks.make_packer(run, [model], args.packing, varlen)

    # ============================================================ the loop
    checkpoint.begin(run)
    console.begin(
        run,
        data=f"{len(data.train)} rows of {int(lengths.sum())} tokens; "
        f"rows are {'packed' if packer.share else 'padded'}",
        updates=progress.describe(),
    )
    guard = guards.FiniteLosses(run)  # ends the run if a loss is not finite
    max_norm = args.max_grad_norm or math.inf  # inf: the norm is only measured
    if progress.updates_seen == 0:
        evaluate(run, packer)
    while not progress.finished:
        # All processes agree on the samples of this update. Each takes its share of them.
        update_rows = batches.rows_of_update(
            data.mixture, args.train_batch_size, args.seed, progress.updates_seen
        )
        # A row may hold several sequences. They are all in this update, wherever they are run.
        update_sequences = train_sequences.of_rows(update_rows)
        update_targets = int(target_counts[update_rows].sum())
        micro_batches = batches.split_update(run, update_sequences, lengths)
        divisor = engine.begin_update(run, micro_batches)  # micro-batches x processes
        loss_scale = engine.loss_scale(run)  # for the log: the update may change it
        learning_rate = scheduler.get_last_lr()[0]

        for micro_batch in micro_batches:
            with metrics.timed("data"):
                columns = train_sequences[micro_batch.rows]
                weights = batches.send(micro_batch.weights, run.device)  # 0: a padding row
                batch = collate(columns, packer)

            with accelerator.accumulate(model):
                output = model(batch, extras=("correct",))
                losses, token_weights, logged = losses_and_metrics(output, batch["mask"], weights)
                guard.check(columns["row"], losses, token_weights)
                # Part of the mean over the update's targets; the engine divides by `divisor`.
                loss = (losses * token_weights).sum() * divisor / update_targets
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

    If a set has a column `answer`, exact match is logged as well.
    """
    line = {}
    all_examples = []
    with run.metrics.timed("paused"), checks.evaluation_mode(run.model):
        for prefix, eval_set in run.data.eval_sets.items():
            means = Means(run.accelerator)
            sequences = Sequences(eval_set)
            numbers = range(len(sequences))
            for micro_batch in batches.split_update(run, numbers, sequences.lengths):
                weights = batches.send(micro_batch.weights, run.device)  # 0: a padding row
                batch = collate(sequences[micro_batch.rows], packer)
                output = run.model(batch, extras=("correct",))
                _, _, logged = losses_and_metrics(output, batch["mask"], weights)
                means.add(logged)
            line |= {prefix + name: value for name, value in means.reduce().items()}

            exact_match, examples = answers.exact_match(run, eval_set, prefix)
            line |= exact_match
            all_examples += examples
    run.metrics.log_evaluation(line, all_examples)
    actor.keep_best(run, line)


if __name__ == "__main__":
    errors.run(main)
