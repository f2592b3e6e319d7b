"""`--preview N`: shows how a run would read the first rows of its data, without a model.

The rows go through the run's own `Converter`, so the output shows what would be trained on.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from common import distributed, pluralize
from preference_recipes.data import files, rendering
from preference_recipes.data.dataset import Converter, Data

SEPARATOR = "\u2502"  # a character that texts hardly contain


class Part(NamedTuple):
    """A part of a row as a model reads it, and which of its tokens are trained on."""

    name: str
    ids: list[int]
    is_trained: list[bool]


def show_preview(accelerator, args, data: Data) -> None:
    """With `--preview N`, prints the first N rows of each training set, and ends the run.

    All processes must call it, before any model is loaded.
    """
    if args.preview:
        distributed.on_main_process(accelerator, print_preview, args, data)
        sys.exit(0)


def print_preview(args, data: Data) -> None:
    for name in args.dataset_name:
        rows = files.find(name, args.dataset_split)
        first_rows = rows.select(range(min(args.preview, len(rows))))
        for index, row in enumerate(first_rows):
            values = replace(data.converter, folder=rows.folder).convert_row(row, index)
            print(f"\nrow {index + 1} of {name}")
            print("\n".join(describe_row(row, values, data.converter)))


def describe_row(row: dict, values: dict, converter: Converter) -> list[str]:
    """Returns lines: a row as given, and its conversion, as text and as tokens."""
    tokenizer = converter.tokenizer
    as_string = lambda value: f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)
    given = json.dumps(row, ensure_ascii=False, default=as_string)
    lines = [f"  as given   {given}"]
    for part in sequences_of(values):
        lines += [
            f"  {part.name}: {pluralize(len(part.ids), 'token')}, "
            f"{sum(part.is_trained)} trained on",
            f"    text     {json.dumps(rendering.decode(tokenizer, part.ids), ensure_ascii=False)}",
            f"    tokens   {marked(part, tokenizer)}",
            f"    ids      {' '.join(map(str, part.ids))}",
        ]
        lines += images_in(part, values.get("images", []), tokenizer)
    if values["reason"]:
        lines.append(f"  LEFT OUT: {values['reason']}")
    elif values["truncated"]:
        lines.append(f"  CUT to --max_length {converter.settings['max_length']}")
    return lines + [f"  {note}" for note in values["notes"]]


def sequences_of(values: dict) -> list[Part]:
    """Returns the parts that a model reads, of a row from any recipe's row function."""
    if "loss_mask" in values:  # SFT, whose rows may hold several sequences
        ends = np.cumsum(values["sequence_lengths"][:-1], dtype=int)
        columns = (np.split(np.asarray(values[name]), ends) for name in ("input_ids", "loss_mask"))
        return [
            Part("sequence", ids.tolist(), is_trained.tolist()) for ids, is_trained in zip(*columns)
        ]
    is_reward_row = "margin" in values
    parts = []
    for name in ("prompt", "teacher_prompt", "chosen", "rejected", "completion"):
        ids = list(values.get(f"{name}_ids", []))
        is_trained = list(values.get(f"{name}_loss_mask", [False] * len(ids)))
        if is_reward_row and name != "prompt":  # the loss reads the score at the last token
            is_trained = [False] * (len(ids) - 1) + [True]
        if ids:
            parts.append(Part(name, ids, is_trained))
    return parts


def images_in(part: Part, files: list[bytes], tokenizer) -> list[str]:
    """Returns a line about each image of a part."""
    if not files:
        return []
    from preference_recipes.data import images  # only here: text needs none

    lines = []
    positions = images.image_positions(tokenizer.processor, part.ids)
    for number, file in enumerate(files, 1):
        [spelling] = images.spellings(tokenizer.processor, [file])
        n_tokens = images.count_tokens(tokenizer, spelling)
        width, height = images.opened(file).size
        size = f"{width} x {height} pixels, {pluralize(n_tokens, 'token')}"
        lines += [f"    image {number}  {size}, from token {at + 1} on" for at in positions[:1]]
        positions = positions[n_tokens:]
    return lines


def marked(part: Part, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the tokens one by one, those trained on in brackets ⟦ ⟧."""
    words = []
    for token, is_trained in zip(part.ids, part.is_trained):
        text = json.dumps(rendering.decode(tokenizer, [token]), ensure_ascii=False)[1:-1]
        words.append(f"⟦{text}⟧" if is_trained else text)
    return SEPARATOR.join(words)
