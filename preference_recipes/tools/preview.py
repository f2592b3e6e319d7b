"""`--preview N`: what a run would make of the first rows of its data, without a model.

The rows go through the run's own `Converter`, so what is shown is what would be trained on.
"""

from __future__ import annotations

import collections
import json
import math
import os
import sys
from typing import NamedTuple

import datasets
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from common import as_list, counted, distributed
from preference_recipes.data import chat, files, thoughts
from preference_recipes.data.conversion import Converter
from preference_recipes.data.dataset import Data

GREEN = "\033[1;32m"
DIM = "\033[2m"
PLAIN = "\033[0m"
SEPARATOR = "\u2502"  # a line that texts hardly hold
BARS = 10
WIDTH = 40  # of the longest bar
# Columns in which data have a right answer; the first that is there is taken.
ANSWERS = ("answer", "completion", "solution", "output")
NO_ANSWER = "I do not know."


class Sequence(NamedTuple):
    """A part of a row as a model reads it.

    Attributes:
        name: what it is.
        ids: its tokens.
        is_trained: bool for each token, whether the loss has a term for it.
    """

    name: str
    ids: list[int]
    is_trained: list[bool]


def show(accelerator, args, data: Data) -> None:
    """With `--preview N`, prints the first N rows of each training set, and ends the run.

    All processes must call it, before any model is loaded.

    Raises:
        SystemExit: with status 0 after the preview; with a message if a row fits no format, or if a
            reward function fails.
    """
    if args.preview:
        distributed.on_main_process(accelerator, print_preview, args, data)
        sys.exit(0)


def print_preview(args, data: Data) -> None:
    """Prints rows, and how long all rows are."""
    for name in as_list(args.dataset_name):
        rows = files.load(name, args.dataset_split)
        for index, row in enumerate(rows.read(0, args.preview)):
            values = data.converter.convert_row(row, index)
            print(f"\nrow {index + 1} of {name}")
            print("\n".join(describe_row(row, values, data.converter)))
            if getattr(args, "reward_function", None):
                print("\n".join(describe_scores(args, values, data.converter.tokenizer)))
    if getattr(args, "environment", None):
        print(
            f"\nNOTE: {args.environment} is not played here: what its `reset` adds to a prompt, "
            "and all that follows the first answer, is in samples.jsonl of a run"
        )
    print("\n" + "\n".join(describe_lengths(data.train, args.max_length)))


# ============================================================ a row
def describe_row(row: dict, values: dict, converter: Converter) -> list[str]:
    """Returns lines: a row as given, as text, and token by token.

    Args:
        values: what `converter` made of it.
    """
    tokenizer = converter.tokenizer
    lines = [f"  as given   {json.dumps(row, ensure_ascii=False, default=str)}"]
    for part in sequences_of(values):
        n_trained = sum(part.is_trained)
        lines += [
            f"  {part.name}: {counted(len(part.ids), 'token')}, {n_trained} trained on",
            f"    text     {json.dumps(chat.decode(tokenizer, part.ids), ensure_ascii=False)}",
            f"    tokens   {marked(part, tokenizer)}",
            f"    ids      {' '.join(map(str, part.ids))}",
        ]
    if values["reason"]:
        lines.append(f"  LEFT OUT: {values['reason']}")
    elif values["truncated"]:
        lines.append(f"  CUT to --max_length {converter.settings['max_length']}")
    return lines + [f"  {note}" for note in values["notes"].splitlines()]


def sequences_of(values: dict) -> list[Sequence]:
    """Returns the parts of a row that a model reads, and which of their tokens are trained on.

    Args:
        values: what a row function returned; see `sft_row`, `preference_row`, `reward_row`,
            `prompt_row` and `taught_row`.
    """
    if "targets" in values:
        sequences = zip(split(values, "input_ids"), split(values, "targets"))
        return [
            Sequence("sequence", ids.tolist(), is_trained.tolist()) for ids, is_trained in sequences
        ]
    is_reward_row = "margin" in values
    parts = []
    for name in ("prompt", "teacher_prompt", "chosen", "rejected", "completion"):
        ids = list(values.get(f"{name}_ids", []))
        is_trained = list(values.get(f"{name}_targets", [False] * len(ids)))
        if is_reward_row and name != "prompt":  # the loss takes the score, read at the last token
            is_trained = [False] * (len(ids) - 1) + [True]
        if ids:
            parts.append(Sequence(name, ids, is_trained))
    return parts


def split(values: dict, column: str) -> list[np.ndarray]:
    """Returns a column of a row of SFT, sequence by sequence: a row may hold several."""
    ends = np.cumsum(values["sequence_lengths"][:-1], dtype=int)
    return np.split(np.asarray(values[column]), ends)


def marked(part: Sequence, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the tokens one by one; those trained on green in a terminal, else in brackets ⟦ ⟧."""
    in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    words = []
    for token, is_trained in zip(part.ids, part.is_trained):
        text = json.dumps(chat.decode(tokenizer, [token]), ensure_ascii=False)[1:-1]
        if in_colour:
            words.append(f"{GREEN if is_trained else DIM}{text}{PLAIN}")
        else:
            words.append(f"⟦{text}⟧" if is_trained else text)
    return SEPARATOR.join(words)


# ============================================================ rewards
def describe_scores(args, values: dict, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns lines: what reward functions get of a row, and how they score two responses.

    One is the data's own, if it has one, the other `NO_ANSWER`: do they tell them apart?

    Args:
        values: what the converter made of the row.
    """
    from preference_recipes.rollouts import (  # only recipes with rewards need it
        reward_calls,
        rewards,
    )
    from preference_recipes.rollouts.samples import Samples

    row = json.loads(values["columns"])
    of_data = [row[name] for name in ANSWERS if isinstance(row.get(name), str)]
    responses = [*of_data[:1], NO_ANSWER]
    _, closer = thoughts.opened_by(chat.decode(tokenizer, values["prompt_ids"]))
    responses = [closer + response for response in responses]
    n = len(responses)
    samples = Samples(
        prompts=[values["prompt_ids"]] * n,
        responses=[chat.encode(tokenizer, response) for response in responses],
        row_texts=[values["columns"]] * n,
        data_rows=[values["row"]] * n,
        ended=torch.ones(n, dtype=torch.bool),
        per_prompt=n,
    )
    given = reward_calls.collect(tokenizer, samples, list(range(n)), step=0, columns=list(row))
    lines = [f"  columns for a reward function: {', '.join(given.keywords)}"]
    for name, function in rewards.load_functions(args.reward_function).items():
        if reward_calls.takes_episodes(function):
            lines.append(f"  {name} is not called: it takes what only an episode gives")
            continue
        scores = reward_calls.call(name, function, given)
        for response, score in zip(given.responses, scores):
            lines.append(f"  {name} scores the response {reward_calls.cut(response)}: {score:g}")
    return lines


# ============================================================ all rows
def describe_lengths(train: datasets.Dataset, max_length: int) -> list[str]:
    """Returns a histogram of how long the usable rows are, as lines."""
    lengths = lengths_of(train)
    shortest = min(lengths)
    longest = max(lengths)
    width = (longest - shortest) // BARS + 1
    counts = collections.Counter((length - shortest) // width for length in lengths)
    n_cut = sum(train["truncated"])
    lines = [
        f"lengths of {counted(len(lengths), 'usable row')}, {n_cut} of them "
        f"({n_cut / len(lengths):.1%}) cut; --max_length {max_length}"
    ]
    for place in range(max(counts) + 1):
        low = shortest + place * width
        bar = "#" * math.ceil(WIDTH * counts[place] / max(counts.values()))
        high = min(low + width - 1, longest)
        lines.append(f"  {low:7,} to {high:<7,} tokens {counts[place]:9,} rows  {bar}")
    return lines


def lengths_of(train: datasets.Dataset) -> list[int]:
    """Returns the tokens of each row; of a pair, those of the prompt and the longer answer."""
    if "chosen_ids" not in train.column_names:
        return train["length"][:]
    pairs = train.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"])
    return [
        len(prompt) + max(len(chosen), len(rejected))
        for prompt, chosen, rejected in zip(
            pairs["prompt_ids"], pairs["chosen_ids"], pairs["rejected_ids"]
        )
    ]
