# /// script
# requires-python = ">=3.10"
# dependencies = ["preference-recipes[lora]==0.1.0"]
# ///
"""Supervised fine-tuning: raise the likelihood of demonstrated answers.

Ouyang et al. 2022, arXiv:2203.02155, section 3.5. Loss of an update, over its target tokens y_t:

    loss = mean over all target tokens of -log pi(y_t | y_<t)

The demo, offline:
    python recipes/sft.py
Your own model and data on 8 GPUs; accelerate_configs/ has the other ways to launch:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 recipes/sft.py \
        --model_name_or_path M --dataset_name D

Every metric: docs/sft.md. Every argument: docs/arguments.md
"""

# ============================================================ imports
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # in a clone: its root

import torch

import preference_recipes  # noqa: F401  so that `common` is this package's
from common import arguments, batches, console, errors, launch, optim
from common.actor import ActorSaver
from common.checkpoint import Checkpoint
from common.metrics import Means
from common.run import Run
from common.shared_args import SharedArgs, arg
from preference_recipes.data import chat, dataset, formats
from preference_recipes.data.messages import (
    BadRow,
    Conversation,
    LeftOut,
    is_learned,
    learned_turns,
)
from preference_recipes.data.sequences import Sequences
from preference_recipes.models import checks, cost, load, prepare
from preference_recipes.models.packing import Packer
from preference_recipes.tools.preview import show_preview


# ============================================================ arguments
@dataclass
class Args(SharedArgs):
    loss_on: Literal["assistant", "completion", "all"] = arg(
        "assistant", "every assistant turn; completion: the last one; all: every token"
    )
    loss_type: Literal["nll", "dft", "eaft"] = arg("nll", "dft, eaft: see docs/sft.md")
    train_vision: bool = arg(False, "also train what reads the images: docs/images.md")
    max_length: int = arg(1024, "tokens of a row; the rest is cut off", at_least=2)
    learning_rate: float = arg(2e-5, "peak learning rate", with_lora=2e-4, at_least=0)
    max_new_tokens: int = arg(256, "longest answer, for exact match", at_least=1)
    exact_match_rows: int | None = arg(None, "held-out rows to answer; 0: none", at_least=0)


# ============================================================ the algorithm
def encode_demonstration(
    tokenizer, conversation: Conversation, loss_on: str
) -> tuple[list[chat.TokenSequence], list[int], list[str]]:
    """Returns a row's sequences, the ids before its last answer, and notes.

    A string has one; for messages see `chat.encode_conversation`.
    """
    prompt, [answer], tools, is_text = conversation
    learn_all = loss_on == "all"
    messages = prompt + answer
    turns = learned_turns(messages, len(prompt))
    if learn_all and not all(map(is_learned, messages)):
        raise BadRow("--loss_on all learns every message, but one of them opts out")
    if not turns:
        raise LeftOut(formats.missing_answer(answer))
    if is_text:
        prompt_ids, [(ids, loss_mask)], notes = chat.encode_answers(tokenizer, *conversation)
        loss_mask = [learn_all] * len(prompt_ids) + loss_mask
        return [chat.TokenSequence(prompt_ids + ids, [False, *loss_mask[1:]])], prompt_ids, notes
    if loss_on == "completion":
        turns = turns[-1:]
    return chat.encode_conversation(tokenizer, messages, turns, tools, learn_all)


def sft_row(
    row: dict, tokenizer, max_length: int, loss_on: str, strings_as_messages: bool = False
) -> dict:
    """Returns the columns of a row, see `dataset.Converter`.

    `input_ids` and `loss_mask` hold the sequences of the row one after the other, whose lengths are
    `sequence_lengths`. The others are `prompt_ids length n_targets truncated notes`.
    """
    conversation = formats.read_chat(row, strings_as_messages)
    whole, prompt_ids, notes = encode_demonstration(tokenizer, conversation, loss_on)
    cut = [chat.TokenSequence(ids[:max_length], loss_mask[:max_length]) for ids, loss_mask in whole]
    sequences = [sequence for sequence in cut if any(sequence.loss_mask)]
    if not sequences:
        raise LeftOut("nothing to learn within max_length")
    ids = [token for sequence in sequences for token in sequence.ids]
    loss_mask = [flag for sequence in sequences for flag in sequence.loss_mask]
    return {
        "input_ids": ids,
        "loss_mask": loss_mask,
        "sequence_lengths": [len(sequence.ids) for sequence in sequences],
        "prompt_ids": prompt_ids,
        "length": len(ids),
        "n_targets": sum(loss_mask),
        "truncated": any(len(ids) > max_length for ids, _ in whole),
        "notes": notes,
    }


def collate(columns: dict, packer: Packer) -> dict:
    """Returns each row as an answer to an empty prompt, only its learned tokens targets."""
    no_prompts = [[]] * len(columns["input_ids"])
    images = columns.get("images")
    return packer.make_batch(no_prompts, columns["input_ids"], columns["loss_mask"], images)


def token_losses(model: torch.nn.Module, batch: dict, loss_type: str) -> tuple[torch.Tensor, dict]:
    """Returns the losses of tokens `[rows, length]`, and their metrics.

    nll: `-log p`. dft: `-p log p`, the first p a constant, so that unlikely tokens have no huge
    gradient; Dynamic Fine-Tuning, arXiv:2508.05629 eq. 9. eaft: `-H / 3 log p`. H is the entropy
    among the 20 most probable tokens, a constant of at most about 3, so that a model learns little
    where it is sure of another token; Entropy-Adaptive Fine-Tuning, arXiv:2601.02151.

    Each value is `[rows, length]`, with the mask of the targets.
    """
    extra_outputs = ("correct", "top_entropy") if loss_type == "eaft" else ("correct",)
    output = model(batch, extra_outputs=extra_outputs)
    losses = -output["logps"]
    if loss_type == "dft":
        losses = losses * output["logps"].detach().exp()
    elif loss_type == "eaft":
        losses = losses * output["top_entropy"] / 3
    mask = batch["loss_mask"]
    return losses, {
        "loss": (losses, mask),
        "mean_token_accuracy": (output["correct"], mask),
    }


# TensorBoard's charts: title -> the metrics that it shows together.
CHARTS = {
    "loss": ["loss"],
    "right tokens": ["mean_token_accuracy"],
    "right answers": ["eval/exact_match"],
}


def main():
    # ============================================================ set-up
    args = arguments.parse(Args, demo="sft.yaml")
    accelerator = launch.make_accelerator(args, "sft")  # seeds, makes the run's folder
    tokenizer = load.tokenizer_of_run(accelerator, args)
    data = dataset.load_data(
        accelerator, args, tokenizer, function=sft_row, reads_images=True, loss_on=args.loss_on
    )
    show_preview(accelerator, args, data)  # with --preview: prints rows and exits
    load.check_embeddings(data, args.model_name_or_path)
    train = Sequences(data.train)
    held_out = {prefix: Sequences(eval_set) for prefix, eval_set in data.eval_sets.items()}
    target_counts = batches.int_column(data.train, "n_targets")

    policy = prepare.policy(accelerator, args, tokenizer)
    run = Run(
        accelerator,
        args,
        len(data.train),
        flop=cost.flop(policy, data.processor),
        bar_metric="mean_token_accuracy",
        charts=CHARTS,
    )
    optimizer = optim.make_optimizer(accelerator, optim.parameter_groups(policy, args), args)
    scheduler = optim.make_scheduler(optimizer, args, run.total_steps)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer)
    packer = checks.make_packer(accelerator, args, [model], data.processor)

    means = Means(accelerator, run.recorder("train", model))
    saver = ActorSaver(run, model, tokenizer)
    must_match = [data, policy]  # a resumed run must have the same
    checkpoint = Checkpoint(run, saver, optimizer, scheduler, means, must_match)
    checkpoint.begin_or_resume()  # sets seeds, loads what --resume names, opens the log
    size = f"{len(data.train)} rows of {int(train.lengths.sum())} tokens"
    console.print_start(checkpoint, data=size)

    # ============================================================ the loop
    max_norm = args.max_grad_norm or math.inf  # inf: the norm is only measured
    if run.updates_seen == 0:
        saver.save_if_best(evaluate(run, model, tokenizer, packer, held_out))
    while not run.finished:
        update = run.begin_update(train)  # all processes agree on its samples; each takes its share
        n_targets = int(target_counts[update.indices].sum())
        for indices, sample_weights in update.micro_batches:
            with run.timed("data"):
                columns = train[indices]
                batch = collate(columns, packer)
                token_weights = batch["loss_mask"] * sample_weights[:, None]
            with accelerator.accumulate(model):
                losses, metrics = token_losses(model, batch, args.loss_type)
                run.check_finite(update, columns["row"], losses, token_weights)
                # This micro-batch's part of the mean over targets. The engine will divide by its
                # `engine_divisor`, micro-batches times processes, so that is undone beforehand.
                loss = (losses * token_weights).sum() * update.engine_divisor / n_targets
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
            saver.save_if_best(evaluate(run, model, tokenizer, packer, held_out))
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
    packer: Packer,
    held_out: dict[str, Sequences],
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
                _, metrics = token_losses(model, batch, run.args.loss_type)
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
