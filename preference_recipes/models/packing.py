"""Lays out prompts and answers as the rows of tokens that a model reads, in one of two ways.

    padded rows       each answer in a row of its own, after its prompt, padded on the right: under
                      causal attention no token sees the padding
    shared prompts    a prompt once, before all its answers, and several such groups in a row where
                      they fit; a mask and positions let each answer see its prompt and itself alone

Either way an answer is read as if it were alone. A place is a token's index in all rows, written
one after the other.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from common import batches

# The most bytes that the mask of shared rows may take: those of one row of 16,384 tokens.
MOST_MASK = 2**28
# A mask is computed in parts of about this many elements, since the comparisons double the memory.
MASK_AT_ONCE = 2**24

PADDING = -1  # the piece of padding


@dataclass(frozen=True)
class Packer:
    """Makes batches of prompts and answers; see `checks.make_packer`.

    Attributes:
        device: where the batches go.
        share: whether prompts are shared where that pays.
        attention_equals_rest: see `cost`.
    """

    device: torch.device
    share: bool = False
    attention_equals_rest: int = 4096

    def make_batch(
        self,
        prompts: Sequence[list[int]],
        answers: Sequence[list[int]],
        learned: Sequence[list] | None = None,
    ) -> dict:
        """Returns answers to prompts as tensors that a model reads.

        Example, in padded rows and where all tokens are targets:

            make_batch([[1, 2], [3]], [[4, 5], [6, 7, 8, 9]])

            input_ids   3  6  7  8  9 | 1  2  4  5  0    two rows, the longest first
            places      0  1  2  3  4 | 5  6  7  8  9

            targets     4  5 | 6  7  8  9    token ids of the answers
            predictors  6  7 | 0  1  2  3    places, of the token before each target
            last        8    | 4             places, of the last token of each answer
            cells       0  1 | 4  5  6  7    indices into the flattened `mask`

        Args:
            prompts: token ids, one prompt for each answer; may be empty.
            answers: token ids.
            learned: of each token of each answer, whether its log-prob is wanted; by default of
                all. If the prompt is empty the first must be false: nothing predicts it.

        Returns:
            inputs: what a `transformers` model takes: `input_ids` `[rows, row length]` and, if
                prompts are shared, `position_ids` of the same shape and the bool `attention_mask`
                `[rows, 1, row length, row length]`.
            targets, predictors, cells: see above, `[targets]`; last: `[answers]`.
            mask: `learned`, padded on the right, bool `[answers, longest answer]`.
            n_tokens: how many tokens the rows hold, a shared prompt once and padding not at all.
        """
        if learned is None:
            learned = [[True] * len(answer) for answer in answers]
        for number, (prompt, flags) in enumerate(zip(prompts, learned)):
            if not prompt and any(flags[:1]):
                raise ValueError(
                    f"answer {number} has an empty prompt, so nothing predicts its first token: "
                    "that token cannot be a target"
                )
        layout = self.lay_out(prompts, answers)
        ids = np.zeros(layout.shape, dtype=np.int64)
        predictors = []
        last = []
        for prompt, answer, prompt_start, start in zip(prompts, answers, *layout.starts):
            end = start + len(answer)
            ids.flat[prompt_start : prompt_start + len(prompt)] = prompt
            ids.flat[start:end] = answer
            # The prompt's last token predicts the first one; each token of the answer the next.
            # Without a prompt this is never read, since the first token is no target.
            last_of_prompt = prompt_start + len(prompt) - 1
            predictors.append([last_of_prompt, *range(start, end - 1)])
            last.append(end - 1)
        inputs = {"input_ids": batches.send(ids, self.device)}
        if layout.shares:
            inputs |= shared_inputs(layout, prompts, answers, self.device)
        mask = batches.pad(learned, False, "cpu").bool()
        # A GPU could find the cells, too, but the host would wait for their number.
        cells = mask.flatten().nonzero().squeeze(1)
        return {
            "inputs": inputs,
            "targets": batches.send(of_targets(answers, learned), self.device),
            "predictors": batches.send(of_targets(predictors, learned), self.device),
            "last": batches.send(last, self.device),
            "mask": batches.send(mask, self.device),
            "cells": batches.send(cells, self.device),
            "n_tokens": layout.n_tokens,
        }

    def lay_out(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> "Layout":
        """Returns padded rows, or shared prompts where they are wanted and cost no more.

        A row of length n costs about n * (n + e), where e is the length at which attention costs
        as much as the rest. Shared prompts need a mask, which doubles attention: n * (2 n + e).
        """
        padded = padded_rows(prompts, answers)
        if not self.share:
            return padded
        shared = shared_prompts(prompts, answers)
        n_rows, length = shared.shape

        def cost(layout: Layout, attention: int) -> int:
            n_rows, length = layout.shape
            return n_rows * length * (attention * length + self.attention_equals_rest)

        pays = cost(shared, attention=2) <= cost(padded, attention=1)
        return shared if pays and n_rows * length**2 <= MOST_MASK else padded

    def describe(self, answers: str, each: str) -> str:
        """Says whether prompts are shared, such as `prompts are computed once for both answers`."""
        if self.share:
            return f"prompts are computed once for {answers}"
        return f"prompts are computed for each {each}"


# ============================================================ where tokens go
class Layout(NamedTuple):
    """Where prompts and answers go in rows.

    Attributes:
        shape: rows, row length.
        starts: the places where prompts begin, one for each answer, and where answers begin.
        n_tokens: without padding.
    """

    shape: tuple[int, int]
    starts: tuple[list[int], list[int]]
    n_tokens: int

    @property
    def shares(self) -> bool:
        """Whether a row holds several answers."""
        return self.shape[0] < len(self.starts[0])


def padded_rows(prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> Layout:
    """Lays out each answer in a row of its own, after its prompt, the longest first."""
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers)]
    longest = max(lengths)
    order = sorted(range(len(answers)), key=lambda number: -lengths[number])
    prompt_starts = [0] * len(answers)
    for row, number in enumerate(order):
        prompt_starts[number] = row * longest
    answer_starts = [start + len(prompt) for start, prompt in zip(prompt_starts, prompts)]
    return Layout((len(answers), longest), (prompt_starts, answer_starts), sum(lengths))


def shared_prompts(prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> Layout:
    """Lays out each prompt once, before all its answers.

    The longest such group gives the length of all rows. Each goes, the longest first, into the
    first row that has room for it, else into a new one.
    """
    answers_after: dict[tuple[int, ...], list[int]] = {}  # by prompt, their numbers
    for number, prompt in enumerate(prompts):
        answers_after.setdefault(tuple(prompt), []).append(number)
    lengths = {
        prompt: len(prompt) + sum(len(answers[number]) for number in numbers)
        for prompt, numbers in answers_after.items()
    }
    longest = max(lengths.values())
    filled: list[int] = []  # tokens of each row
    prompt_starts = [0] * len(answers)
    answer_starts = [0] * len(answers)
    for shared, length in sorted(lengths.items(), key=lambda item: -item[1]):
        fitting = (row for row, tokens in enumerate(filled) if tokens + length <= longest)
        row = next(fitting, len(filled))
        if row == len(filled):
            filled.append(0)
        place = row * longest + filled[row]
        filled[row] += length
        start = place + len(shared)
        for number in answers_after[shared]:
            prompt_starts[number] = place
            answer_starts[number] = start
            start += len(answers[number])
    return Layout((len(filled), longest), (prompt_starts, answer_starts), sum(filled))


def of_targets(values: Sequence[Sequence[int]], learned: Sequence[Sequence]) -> np.ndarray:
    """Returns the values that belong to targets, answer after answer, int64 `[targets]`."""
    chosen: list[int] = []
    for values_of_answer, flags in zip(values, learned):
        chosen += itertools.compress(values_of_answer, flags)
    return np.array(chosen, dtype=np.int64)  # of this type without any target, too


# ============================================================ the mask of shared prompts
def shared_inputs(
    layout: Layout, prompts: Sequence[list[int]], answers: Sequence[list[int]], device
) -> dict[str, torch.Tensor]:
    """Returns `position_ids` and `attention_mask`, see `Packer.make_batch`.

    A prompt or an answer is a piece. Answer i is piece i, prompts are numbered after the answers.
    """
    positions = np.zeros(layout.shape, dtype=np.int64)
    pieces = np.full(layout.shape, PADDING)
    prompt_pieces = np.full(layout.shape, PADDING)  # of each token, that of its prompt
    for number, (prompt, answer) in enumerate(zip(prompts, answers)):
        prompt_start, start = (starts[number] for starts in layout.starts)
        prompt_piece = len(answers) + prompt_start
        for ids, place, position, piece in (
            (prompt, prompt_start, 0, prompt_piece),
            (answer, start, len(prompt), number),
        ):
            part = slice(place, place + len(ids))
            positions.flat[part] = np.arange(position, position + len(ids))
            pieces.flat[part] = piece
            prompt_pieces.flat[part] = prompt_piece
    mask = attention_mask(batches.send(pieces, device), batches.send(prompt_pieces, device))
    return {"position_ids": batches.send(positions, device), "attention_mask": mask}


def attention_mask(pieces: torch.Tensor, prompt_pieces: torch.Tensor) -> torch.Tensor:
    """Returns whether a query (third dimension) sees a key (fourth): its piece and its prompt.

    Padding belongs to no piece, so it sees only padding, and no piece sees it. It sees at least
    itself: attention over nothing would be NaN.
    """
    n_rows, length = pieces.shape
    key = pieces[:, None, None, :]
    mask = torch.empty(n_rows, 1, length, length, dtype=torch.bool, device=pieces.device)
    queries_at_once = max(1, MASK_AT_ONCE // (n_rows * length))
    for start in range(0, length, queries_at_once):
        part = slice(start, start + queries_at_once)
        query = pieces[:, None, part, None]
        prompt_of_query = prompt_pieces[:, None, part, None]
        is_related = (key == query) | (key == prompt_of_query)
        # Query i of this part is token start + i, which sees no token to its right.
        mask[:, :, part] = is_related.tril(start)
    return mask
