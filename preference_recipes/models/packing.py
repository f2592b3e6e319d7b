"""Lays out prompts and answers as the rows that a model reads, with prompts shared.

Three words for where a token is:

    place       its index in all rows, written one after the other
    piece       the prompt or answer that it belongs to: answer i is piece i, and the prompts are
                numbered after the answers
    predictor   the token before it in its prompt and answer, whose output predicts it
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from common import batches

# The most bytes that the mask of packed rows may take: those of one row of 16,384 tokens.
MOST_MASK = 2**28
# A mask is computed in parts of about this many elements, since the comparisons double the memory.
MASK_AT_ONCE = 2**24

PADDING = -1  # the piece number of padding


class Group(NamedTuple):
    """A prompt, which may be empty, and the answers after it, by their numbers in the batch."""

    prompt: list[int]
    answers: dict[int, list[int]]

    @property
    def length(self) -> int:
        """Tokens of the prompt, once, and of all answers."""
        return len(self.prompt) + sum(map(len, self.answers.values()))


Row = list[Group]


@dataclass(frozen=True)
class Packer:
    """Makes batches of prompts and answers; see `checks.make_packer`.

    In each of three layouts an answer sees only its prompt and itself, at the positions that it
    would have alone. Without `share` each answer has a row, after its prompt. With it a prompt
    stands once, before all its answers, and several such groups in a row where they fit, and where
    it `pays`. With `varlen`, too, one row holds all answers, each after its own prompt and without
    padding, as flash attention takes it.

    Attributes:
        device: where the batches go.
        attention_equals_rest: see `architecture`.
    """

    device: torch.device
    share: bool = False
    varlen: bool = False
    attention_equals_rest: int = 4096

    def make_batch(
        self,
        prompts: Sequence[list[int]],
        answers: Sequence[list[int]],
        is_target: Sequence[list] | None = None,
    ) -> dict:
        """Returns answers to prompts as tensors that a model reads.

        Example, where prompts may be shared and all tokens are targets:

            make_batch([[1, 2], [1, 2], [3]], [[4, 5], [6], [7, 8, 9]])

            places      0  1  2  3  4 | 5  6  7  8  9   of two rows; the last is padding
            input_ids   1  2  4  5  6 | 3  7  8  9  0
            pieces      3  3  0  0  1 | 4  2  2  2 -1
            positions   0  1  2  3  2 | 0  1  2  3  0

            targets     4  5 | 6 | 7  8  9   of each answer
            predictors  1  2 | 1 | 5  6  7   places
            last        3    | 4 | 8         places, too
            cells       0  1 | 3 | 6  7  8   indices into the flattened `mask`

        Args:
            prompts: token ids, one prompt for each answer; may be empty.
            answers: token ids.
            is_target: of each token of each answer, whether its log-prob is wanted; by default of
                all. If the prompt is empty the first must be false: nothing predicts it.

        Returns:
            inputs: what a `transformers` model takes: `input_ids` and, if a row holds several
                answers, `position_ids`, `[rows, row length]`, and either the bool `attention_mask`
                `[rows, 1, row length, row length]` or what `varlen_inputs` returns.
            targets, predictors, cells: see above, `[targets]`; last: `[answers]`.
            mask: `is_target`, padded on the right, bool `[answers, longest answer]`.
            tokens: how many tokens the rows hold, a shared prompt once and padding not at all.
        """
        if is_target is None:
            is_target = [[True] * len(answer) for answer in answers]
        for number, (prompt, flags) in enumerate(zip(prompts, is_target)):
            if not prompt and any(flags[:1]):
                raise ValueError(
                    f"answer {number} has an empty prompt, so nothing predicts its first token: "
                    "that token cannot be a target"
                )
        rows = self.arrange(prompts, answers)
        layout = lay_out(rows, len(answers))
        mask = batches.pad(is_target, False, "cpu").bool()
        # A GPU could find the cells, too, but the host would wait for their number.
        cells = mask.flatten().nonzero().squeeze(1)
        return {
            "inputs": self.inputs_of(rows, layout),
            "targets": batches.send(of_targets(answers, is_target), self.device),
            "predictors": batches.send(of_targets(layout.predictors, is_target), self.device),
            "last": batches.send(layout.last, self.device),
            "mask": batches.send(mask, self.device),
            "cells": batches.send(cells, self.device),
            "tokens": sum(map(tokens_of, rows)),
        }

    def arrange(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[Row]:
        """Returns the groups of each row: packed where that pays, else an answer in each row."""
        groups = [
            Group(prompt, {number: answer})
            for number, (prompt, answer) in enumerate(zip(prompts, answers))
        ]
        if self.share and self.varlen:
            return [groups]
        alone = [[group] for group in longest_first(groups)]
        if not self.share:
            return alone
        packed = first_fit(longest_first(share_prompts(groups)))
        return packed if self.pays(packed, alone) else alone

    def pays(self, packed: list[Row], alone: list[Row]) -> bool:
        """Whether packed rows cost no more than a row for each answer, and fit the mask's limit.

        A row of length n costs about n * (n + e), where e is the length at which attention costs
        as much as the rest. Packed rows need a mask, which doubles attention: n * (2 n + e).
        """
        if len(packed) * longest_of(packed) ** 2 > MOST_MASK:
            return False

        def cost(rows: list[Row], attention: int) -> int:
            length = longest_of(rows)
            return len(rows) * length * (attention * length + self.attention_equals_rest)

        return cost(packed, attention=2) <= cost(alone, attention=1)

    def inputs_of(self, rows: list[Row], layout: "Layout") -> dict:
        """Returns what a `transformers` model takes, see `make_batch`."""
        inputs = {"input_ids": batches.send(layout.ids, self.device)}
        one_answer_each = len(rows) == len(layout.last)  # since no row is without an answer
        if one_answer_each:  # plain causal attention
            return inputs
        inputs["position_ids"] = batches.send(layout.positions, self.device)
        if self.varlen:
            return inputs | varlen_inputs(rows[0], self.device)
        pieces = batches.send(layout.pieces, self.device)
        prompts = batches.send(layout.prompts, self.device)
        return inputs | {"attention_mask": attention_mask(pieces, prompts)}

    def describe(self, answers: str, each: str) -> str:
        """Says whether prompts are shared, such as `prompts are computed once for both answers`."""
        if self.share and not self.varlen:
            return f"prompts are computed once for {answers}"
        return f"prompts are computed for each {each}"


# ============================================================ groups and rows
def share_prompts(groups: list[Group]) -> list[Group]:
    """Joins groups that have the same prompt."""
    joined: list[Group] = []
    group_of: dict[tuple[int, ...], Group] = {}
    for group in groups:
        prompt = tuple(group.prompt)
        if prompt in group_of:
            group_of[prompt].answers.update(group.answers)
            continue
        first = Group(group.prompt, dict(group.answers))  # a copy, to which answers are added
        joined.append(first)
        if prompt:  # SFT has none: its answers, joined, would be one row that cannot be split
            group_of[prompt] = first
    return joined


def longest_first(groups: list[Group]) -> list[Group]:
    """Returns groups by length; those of the same length stay in their order."""
    return sorted(groups, key=lambda group: group.length, reverse=True)


def first_fit(groups: list[Group]) -> list[Row]:
    """Puts each group into the first row that has room for it, else into a new one.

    Args:
        groups: the longest first, which gives the length of all rows.
    """
    row_length = groups[0].length
    rows: list[Row] = []
    for group in groups:
        fitting = (row for row in rows if tokens_of(row) + group.length <= row_length)
        row = next(fitting, None)
        if row is None:
            rows.append([group])
        else:
            row.append(group)
    return rows


def tokens_of(row: Row) -> int:
    """Returns the number of tokens of a row."""
    return sum(group.length for group in row)


def longest_of(rows: list[Row]) -> int:
    """Returns the number of tokens of the longest row."""
    return max(map(tokens_of, rows))


# ============================================================ from rows to arrays
class Layout(NamedTuple):
    """The rows as arrays `[rows, row length]`, padded on the right, and places for each answer.

    `prompts` is the piece number of the prompt of each token's piece.
    """

    ids: np.ndarray
    positions: np.ndarray
    pieces: np.ndarray
    prompts: np.ndarray
    predictors: list[list[int]]
    last: list[int]


def lay_out(rows: list[Row], n_answers: int) -> Layout:
    """Writes rows into arrays; see the example of `Packer.make_batch`."""
    shape = (len(rows), longest_of(rows))
    layout = Layout(
        ids=np.zeros(shape, dtype=np.int64),
        positions=np.zeros(shape, dtype=np.int64),
        pieces=np.full(shape, PADDING),
        prompts=np.full(shape, PADDING),
        predictors=[[] for _ in range(n_answers)],
        last=[0] * n_answers,
    )

    def write(ids: list[int], place: int, position: int, piece: int, prompt: int) -> int:
        """Writes a piece, the first token at `place` and `position`; returns the next place."""
        end = place + len(ids)
        layout.ids.flat[place:end] = ids
        layout.positions.flat[place:end] = np.arange(position, position + len(ids))
        layout.pieces.flat[place:end] = piece
        layout.prompts.flat[place:end] = prompt
        return end

    prompt_pieces = itertools.count(n_answers)
    for number_of_row, row in enumerate(rows):
        place = number_of_row * shape[1]
        for group in row:
            prompt = next(prompt_pieces)
            place = write(group.prompt, place, 0, piece=prompt, prompt=prompt)
            # An empty prompt has no last token: this is then another group's place, or -1. It is
            # never read, since the first token of such an answer is no target.
            last_of_prompt = place - 1
            for number, answer in group.answers.items():
                end = write(answer, place, len(group.prompt), piece=number, prompt=prompt)
                # The prompt's last token predicts the first one; each token of the answer the next.
                layout.predictors[number] = [last_of_prompt, *range(place, end - 1)]
                layout.last[number] = end - 1
                place = end
    return layout


def attention_mask(pieces: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
    """Returns whether a query (third dimension) sees a key (fourth): its piece and its prompt.

    Padding belongs to no piece, so it sees only padding, and no piece sees it. It sees at least
    itself: attention over nothing would be NaN.
    """
    rows, length = pieces.shape
    key = pieces[:, None, None, :]
    mask = torch.empty(rows, 1, length, length, dtype=torch.bool, device=pieces.device)
    queries_at_once = max(1, MASK_AT_ONCE // (rows * length))
    for start in range(0, length, queries_at_once):
        part = slice(start, start + queries_at_once)
        query = pieces[:, None, part, None]
        prompt_of_query = prompts[:, None, part, None]
        is_related = (key == query) | (key == prompt_of_query)
        # Query i of this part is token start + i, which sees no token to its right.
        mask[:, :, part] = is_related.tril(start)
    return mask


def varlen_inputs(row: Row, device) -> dict:
    """Returns where the groups of a row begin and end, as flash attention's `varlen` takes it."""
    lengths = [group.length for group in row]
    beginnings = batches.send(np.cumsum([0, *lengths], dtype=np.int32), device)
    return {
        "cu_seq_lens_q": beginnings,
        "cu_seq_lens_k": beginnings,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def of_targets(values: Sequence[Sequence[int]], is_target: Sequence[Sequence]) -> np.ndarray:
    """Returns the values that belong to targets, answer after answer, int64 `[targets]`."""
    chosen: list[int] = []
    for values_of_answer, flags in zip(values, is_target):
        chosen += itertools.compress(values_of_answer, flags)
    return np.array(chosen, dtype=np.int64)  # of this type without any target, too
