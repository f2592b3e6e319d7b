"""Lays out prompts and answers as the rows of tokens that a model reads.

A prompt is read once, before all its answers, where that costs no more than to read it for each.
Positions and a mask let each answer see its prompt and itself alone, so that it is read as if
nothing else were there. Two answers, [4, 5] and [6], to the prompt [1, 2] are laid out as:

    input_ids       1  2  4  5  6     one row, `[rows, row length]`
    position_ids    0  1  2  3  2     each answer goes on from its prompt
    attention_mask  x                 what each token sees, from the first one down
                    x  x
                    x  x  x
                    x  x  x  x
                    x  x  .  .  x     the second answer does not see the first

    targets         4  5  6           the tokens whose log-probs are wanted, answer after answer
    predictor_index 1  2  1           the index of the token that predicts each target
    last_token_index  3  4            the index of the last token of each answer
    mask            x  x              which tokens of the answers are targets, padded:
                    x  .              `[answers, longest answer]`
    target_slots    0  1  2           the index of each target in the flattened `mask`

A token's index counts over all rows, one row after the other. A row may hold several prompts, each
with its answers. Without sharing, each answer has a row of its own, after its prompt. Padding is on
the right and then needs no mask: under causal attention no token sees it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common import batches

# Largest attention mask of shared rows, in bytes: enough for one row of 16,384 tokens.
MAX_MASK = 2**28

# The groups in one row. A group is a prompt with its answers, given as the answers' indices.
PackedRow = list[list[int]]


@dataclass(frozen=True)
class Packer:
    """Makes batches of prompts and answers; see `checks.tested_packer`."""

    device: torch.device  # where the batches go
    share: bool = False  # whether prompts are shared where that pays
    width: int = 512  # the hidden size of the models
    processor: Any = None  # turns the images of prompts into pixels; None: there are none
    # The tokens and the file of an image. A batch without images gets it as an extra row where
    # other processes would otherwise wait for this one's vision tower.
    example: tuple[list[int], bytes] | None = None

    def make_batch(
        self,
        prompts: Sequence[list[int]],
        answers: Sequence[list[int]],
        loss_mask: Sequence[list] | None = None,
        images: Sequence[list[bytes] | None] | None = None,
    ) -> dict:
        """Returns answers to prompts as tensors that a model reads, see the module's docstring.

        Args:
            prompts: one for each answer; may be empty.
            loss_mask: whether the log-prob of each token of each answer is wanted; by default all.
                After an empty prompt the first must be false: nothing predicts that token.
            images: the image files of each answer or its prompt; their pixels become inputs, too.

        Returns:
            inputs: what a `transformers` model takes; `attention_mask` is bool
                `[rows, 1, row length, row length]`, and there only if prompts are shared.
            n_tokens: how many tokens the rows hold, a shared prompt once and padding not at all.
        """
        if loss_mask is None:
            loss_mask = [[True] * len(answer) for answer in answers]
        files = [tuple(image_files or ()) for image_files in images or [None] * len(answers)]
        rows, length = self.lay_out(prompts, answers, files)
        row_files = [file for row in rows for group in row for file in files[group[0]]]
        if self.example is not None and not row_files:
            example_ids, example_file = self.example
            rows = [*rows, [[len(answers)]]]
            length = max(length, len(example_ids))
            prompts, answers, row_files = [*prompts, example_ids], [*answers, []], [example_file]
        tokens, prompt_ends, starts = place_tokens(rows, length, prompts, answers)
        ids, positions, pieces, prompt_pieces = tokens
        inputs = {"input_ids": batches.to_device(ids, self.device)}
        if row_files:
            from preference_recipes.data import images as pictures  # only here: text needs none

            inputs |= pictures.inputs_of(self.processor, ids, row_files, self.device)
        if len(rows) < len(answers):
            inputs["position_ids"] = batches.to_device(positions, self.device)
            piece_ids = [batches.to_device(array, self.device) for array in (pieces, prompt_pieces)]
            inputs["attention_mask"] = attention_mask(*piece_ids)

        targets: list[int] = []
        predictor_index: list[int] = []
        last_token_index = []
        for index, (answer, flags) in enumerate(zip(answers, loss_mask)):
            if not prompts[index] and any(flags[:1]):
                raise ValueError(f"answer {index} has an empty prompt: nothing predicts its start")
            end = starts[index] + len(answer)
            predictors = [prompt_ends[index] - 1, *range(starts[index], end - 1)]
            targets += itertools.compress(answer, flags)
            predictor_index += itertools.compress(predictors, flags)
            last_token_index.append(end - 1)
        mask = batches.pad(loss_mask, False, "cpu").bool()
        # The CPU finds them: with a GPU the host would have to wait for their number.
        target_slots = mask.flatten().nonzero().squeeze(1)
        return {
            "inputs": inputs,
            "targets": batches.to_device(np.array(targets, np.int64), self.device),
            "predictor_index": batches.to_device(np.array(predictor_index, np.int64), self.device),
            "last_token_index": batches.to_device(last_token_index, self.device),
            "mask": batches.to_device(mask, self.device),
            "target_slots": batches.to_device(target_slots, self.device),
            "n_tokens": int(np.count_nonzero(pieces)),
        }

    def lay_out(
        self, prompts: Sequence[list[int]], answers: Sequence[list[int]], files: Sequence[tuple]
    ) -> tuple[list[PackedRow], int]:
        """Returns rows and their common length; prompts are shared if that is wanted and pays off.

        A row of n tokens costs a layer of width h about h n (12 h + n) multiplications. With a mask
        the second term costs 2.1 times as much: measured on a CPU, up to 16,384 tokens.
        """
        lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers)]
        longest = max(lengths)
        longest_first = sorted(range(len(answers)), key=lambda index: -lengths[index])
        unshared = [[[index]] for index in longest_first]
        if not self.share:
            return unshared, longest
        shared, length = shared_rows(prompts, answers, files)
        shared_cost = len(shared) * length * (12 * self.width + 2.1 * length)
        unshared_cost = len(unshared) * longest * (12 * self.width + longest)
        if shared_cost <= unshared_cost and len(shared) * length**2 <= MAX_MASK:
            return shared, length
        return unshared, longest

    def describe(self) -> str:
        """Returns in words whether prompts are shared."""
        return "prompts are computed once" if self.share else "prompts are computed for each answer"


def place_tokens(rows: list[PackedRow], length: int, prompts: Sequence, answers: Sequence) -> tuple:
    """Writes prompts and answers into their rows, one after the other.

    Returns:
        int64 `[4, rows, row length]`: each token's id; its position; the number of its piece, which
            is a prompt or an answer (0: padding); and the number of its prompt's piece.
        for each answer the index after its prompt, and the index of its first token.
    """
    tokens = np.zeros((4, len(rows) * length), dtype=np.int64)
    prompt_ends = [0] * len(answers)
    starts = [0] * len(answers)

    def write(ids: list[int], start: int, position: int, piece: int, prompt_piece: int) -> int:
        end = start + len(ids)
        tokens[0, start:end] = ids
        tokens[1, start:end] = np.arange(position, position + len(ids))
        tokens[2, start:end] = piece
        tokens[3, start:end] = prompt_piece
        return end

    pieces = itertools.count(1)
    for row, groups in enumerate(rows):
        offset = row * length
        for group in groups:
            prompt = prompts[group[0]]
            prompt_piece = next(pieces)
            offset = write(prompt, offset, 0, prompt_piece, prompt_piece)
            prompt_end = offset
            for index in group:
                prompt_ends[index] = prompt_end
                starts[index] = offset
                offset = write(answers[index], offset, len(prompt), next(pieces), prompt_piece)
    return tokens.reshape(4, len(rows), length), prompt_ends, starts


def attention_mask(pieces: torch.Tensor, prompt_pieces: torch.Tensor) -> torch.Tensor:
    """Returns whether a query (third dimension) sees a key (fourth) of its piece or its prompt.

    Padding sees padding, because attention over nothing would be NaN. No piece sees padding.
    """
    keys = pieces[:, None, None, :]
    mask = keys == pieces[:, None, :, None]
    mask |= keys == prompt_pieces[:, None, :, None]
    return mask.tril_()  # and no token sees one to its right


def shared_rows(
    prompts: Sequence[list[int]], answers: Sequence[list[int]], files: Sequence[tuple]
) -> tuple[list[PackedRow], int]:
    """Lays out each prompt once, before all its answers; returns rows and their length.

    Groups are placed longest first, each into the first row that has room for it.
    """
    groups: dict[tuple, list[int]] = {}  # keyed by images, too: different ones may have equal ids
    for index, prompt in enumerate(prompts):
        groups.setdefault((tuple(prompt), files[index]), []).append(index)
    lengths = [
        len(prompt) + sum(len(answers[index]) for index in group)
        for (prompt, _), group in groups.items()
    ]
    longest = max(lengths)
    rows: list[PackedRow] = []
    row_lengths: list[int] = []
    for length, group in sorted(zip(lengths, groups.values()), key=lambda pair: -pair[0]):
        with_room = (row for row, used in enumerate(row_lengths) if used + length <= longest)
        row = next(with_room, len(rows))
        if row == len(rows):
            rows.append([])
            row_lengths.append(0)
        rows[row].append(group)
        row_lengths[row] += length
    return rows, longest
