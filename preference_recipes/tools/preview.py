"""`--preview N`: what a run would make of the first rows of its data, without a model.

The rows go through the run's own `Converter`, so what is shown is what would be trained on.
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

SEPARATOR = "\u2502"  # a line that texts hardly hold


class Part(NamedTuple):
    """A part of a row as a model reads it, and for each of its tokens whether it is trained on."""

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
        some = rows.select(range(min(args.preview, len(rows))))
        for index, row in enumerate(some):
            values = replace(data.converter, folder=rows.folder).convert_row(row, index)
            print(f"\nrow {index + 1} of {name}")
            print("\n".join(describe_row(row, values, data.converter)))
    if getattr(args, "environment", None):
        print(
            f"\nNOTE: {args.environment} is not played here: what its `reset` adds to a prompt, "
            "and all that follows the first answer, is in samples.jsonl of a run"
        )


def describe_row(row: dict, values: dict, converter: Converter) -> list[str]:
    """Returns lines: a row as given, and what the converter made of it, as text and as tokens."""
    tokenizer = converter.tokenizer
    short = lambda value: f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)
    shown = json.dumps(row, ensure_ascii=False, default=short)
    lines = [f"  as given   {shown}"]
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
    """Returns the parts of a row, as any recipe's row function returned it, that a model reads."""
    if "loss_mask" in values:  # of SFT, whose rows may hold several sequences
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
        if is_reward_row and name != "prompt":  # the loss takes the score, read at the last token
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
    places = images.places_of(tokenizer.processor, part.ids)
    for number, file in enumerate(files, 1):
        [spelling] = images.spellings(tokenizer.processor, [file])
        n_tokens = images.count_tokens(tokenizer, spelling)
        width, height = images.opened(file).size
        size = f"{width} x {height} pixels, {pluralize(n_tokens, 'token')}"
        lines += [f"    image {number}  {size}, from token {n + 1} on" for n in places[:1]]
        places = places[n_tokens:]
    return lines


def marked(part: Part, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the tokens one by one, those trained on in brackets ⟦ ⟧."""
    words = []
    for token, is_trained in zip(part.ids, part.is_trained):
        text = json.dumps(rendering.decode(tokenizer, [token]), ensure_ascii=False)[1:-1]
        words.append(f"⟦{text}⟧" if is_trained else text)
    return SEPARATOR.join(words)
