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
    predictor_index 1  2  1           the places of the tokens before them, which predict them
    last_token_index  3  4            the place of the last token of each answer
    mask            x  x              which tokens of the answers are targets, padded:
                    x  .              `[answers, longest answer]`
    target_slots    0  1  2           where the targets are in the flattened `mask`

A place is a token's index in all rows, written one after the other. A row may hold several prompts,
each with its answers. Without sharing, each answer has a row of its own, after its prompt. Padding,
on the right, then needs no mask: under causal attention no token sees it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common import batches

# The most bytes that the mask of shared rows may take: those of one row of 16,384 tokens.
MAX_MASK = 2**28

# A prompt and its answers are a group: the numbers of the answers. A row holds some of them.
Row = list[list[int]]


@dataclass(frozen=True)
class Packer:
    """Makes batches of prompts and answers; see `checks.make_packer`."""

    device: torch.device  # where the batches go
    share: bool = False  # whether prompts are shared where that pays
    width: int = 512  # the hidden size of the models
    processor: Any = None  # makes pixels of the images of prompts; None: there are none
    # The tokens and the file of an image. A batch without images gets a row of it, where other
    # processes would wait for this one's vision tower.
    example: tuple[list[int], bytes] | None = None

    def make_batch(
        self,
        prompts: Sequence[list[int]],
        answers: Sequence[list[int]],
        loss_mask: Sequence[list] | None = None,
        images: Sequence[list[bytes] | None] | None = None,
    ) -> dict:
        """Returns answers to prompts as tensors that a model reads; the module shows them.

        Args:
            prompts: one for each answer; may be empty.
            loss_mask: of each token of each answer, whether its log-prob is wanted; by default of
                all. If the prompt is empty the first must be false: nothing predicts it.
            images: the files of each prompt, or of the answer; their pixels become inputs, too.

        Returns:
            inputs: what a `transformers` model takes; `attention_mask` is bool
                `[rows, 1, row length, row length]`, and there only if prompts are shared.
            n_tokens: how many tokens the rows hold, a shared prompt once and padding not at all.
        """
        if loss_mask is None:
            loss_mask = [[True] * len(answer) for answer in answers]
        files = [tuple(some or ()) for some in images or [None] * len(answers)]
        rows, length = self.lay_out(prompts, answers, files)
        in_order = [file for row in rows for group in row for file in files[group[0]]]
        if self.example is not None and not in_order:
            ids, file = self.example
            rows = [*rows, [[len(answers)]]]
            length = max(length, len(ids))
            prompts, answers, in_order = [*prompts, ids], [*answers, []], [file]
        tokens, prompt_ends, starts = place_tokens(rows, length, prompts, answers)
        ids, positions, pieces, prompt_pieces = tokens
        inputs = {"input_ids": batches.send(ids, self.device)}
        if in_order:
            from preference_recipes.data import images as pictures  # only here: text needs none

            inputs |= pictures.inputs_of(self.processor, ids, in_order, self.device)
        if len(rows) < len(answers):
            inputs["position_ids"] = batches.send(positions, self.device)
            numbers = [batches.send(array, self.device) for array in (pieces, prompt_pieces)]
            inputs["attention_mask"] = attention_mask(*numbers)

        targets: list[int] = []
        predictor_index: list[int] = []
        last = []
        for number, (answer, flags) in enumerate(zip(answers, loss_mask)):
            if not prompts[number] and any(flags[:1]):
                raise ValueError(f"answer {number} has an empty prompt: nothing predicts its start")
            end = starts[number] + len(answer)
            before = [prompt_ends[number] - 1, *range(starts[number], end - 1)]
            targets += itertools.compress(answer, flags)
            predictor_index += itertools.compress(before, flags)
            last.append(end - 1)
        mask = batches.pad(loss_mask, False, "cpu").bool()
        # A GPU could find the target_slots, too, but the host would wait for their number.
        target_slots = mask.flatten().nonzero().squeeze(1)
        return {
            "inputs": inputs,
            "targets": batches.send(np.array(targets, dtype=np.int64), self.device),
            "predictor_index": batches.send(np.array(predictor_index, dtype=np.int64), self.device),
            "last_token_index": batches.send(last, self.device),
            "mask": batches.send(mask, self.device),
            "target_slots": batches.send(target_slots, self.device),
            "n_tokens": int(np.count_nonzero(pieces)),
        }

    def lay_out(
        self, prompts: Sequence[list[int]], answers: Sequence[list[int]], files: Sequence[tuple]
    ) -> tuple[list[Row], int]:
        """Returns rows, and the length of all: shared prompts where they are wanted and pay.

        A row of n tokens costs a layer of width h about h n (12 h + n) multiplications. With a mask
        the second term costs 2.1 times as much: measured on a CPU, up to 16,384 tokens.
        """
        lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers)]
        longest = max(lengths)
        by_length = sorted(range(len(answers)), key=lambda number: -lengths[number])
        padded = [[[number]] for number in by_length]
        if not self.share:
            return padded, longest
        shared, length = shared_rows(prompts, answers, files)
        cost = len(shared) * length * (12 * self.width + 2.1 * length)
        cost_of_padded = len(padded) * longest * (12 * self.width + longest)
        if cost <= cost_of_padded and len(shared) * length**2 <= MAX_MASK:
            return shared, length
        return padded, longest

    def describe(self) -> str:
        """Returns in words whether prompts are shared."""
        return "prompts are computed once" if self.share else "prompts are computed for each answer"


def place_tokens(rows: list[Row], length: int, prompts: Sequence, answers: Sequence) -> tuple:
    """Writes prompts and answers into their rows, one after the other.

    Returns:
        int64 `[4, rows, row length]`: of each token its id; its position; the number of its piece,
            that is a prompt or an answer, 0 for padding; and that of its prompt.
        for each answer the place after its prompt, and that of its first token.
    """
    tokens = np.zeros((4, len(rows) * length), dtype=np.int64)
    prompt_ends = [0] * len(answers)
    starts = [0] * len(answers)

    def write(ids: list[int], place: int, position: int, piece: int, prompt_piece: int) -> int:
        end = place + len(ids)
        tokens[0, place:end] = ids
        tokens[1, place:end] = np.arange(position, position + len(ids))
        tokens[2, place:end] = piece
        tokens[3, place:end] = prompt_piece
        return end

    pieces = itertools.count(1)
    for row, groups in enumerate(rows):
        place = row * length
        for group in groups:
            prompt = prompts[group[0]]
            prompt_piece = next(pieces)
            place = write(prompt, place, 0, prompt_piece, prompt_piece)
            prompt_end = place
            for number in group:
                prompt_ends[number] = prompt_end
                starts[number] = place
                place = write(answers[number], place, len(prompt), next(pieces), prompt_piece)
    return tokens.reshape(4, len(rows), length), prompt_ends, starts


def attention_mask(pieces: torch.Tensor, prompt_pieces: torch.Tensor) -> torch.Tensor:
    """Returns whether a query (third dimension) sees a key (fourth): of its piece or its prompt.

    Padding sees padding, because attention over nothing would be NaN; no piece sees it.
    """
    keys = pieces[:, None, None, :]
    mask = keys == pieces[:, None, :, None]
    mask |= keys == prompt_pieces[:, None, :, None]
    return mask.tril_()  # and no token sees one to its right


def shared_rows(
    prompts: Sequence[list[int]], answers: Sequence[list[int]], files: Sequence[tuple]
) -> tuple[list[Row], int]:
    """Lays out each prompt once, before all its answers; returns rows and their length.

    Each group goes, the longest first, into the first row that has room for it.
    """
    groups: dict[tuple, list[int]] = {}  # by prompt and images: those of one size have the same ids
    for number, prompt in enumerate(prompts):
        groups.setdefault((tuple(prompt), files[number]), []).append(number)
    lengths = [
        len(prompt) + sum(len(answers[number]) for number in group)
        for (prompt, _), group in groups.items()
    ]
    longest = max(lengths)
    rows: list[Row] = []
    filled: list[int] = []  # tokens of each row
    for length, group in sorted(zip(lengths, groups.values()), key=lambda pair: -pair[0]):
        fitting = (row for row, tokens in enumerate(filled) if tokens + length <= longest)
        row = next(fitting, len(rows))
        if row == len(rows):
            rows.append([])
            filled.append(0)
        rows[row].append(group)
        filled[row] += length
    return rows, longest
