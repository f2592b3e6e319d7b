"""Lays out prompts and answers as the rows that a model reads, with prompts shared."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from common import batches

# The most that the mask of packed rows may take, in bytes: one row of 16,384 tokens.
MOST_MASK = 2**28
# A mask is computed in parts of about so many elements, since what is compared takes as much again.
MASK_AT_ONCE = 2**24

PADDING = -1  # stands for a piece where there is none


class Group(NamedTuple):
    """A prompt, and the answers that follow it in a row.

    Attributes:
        prompt: token ids; may be empty.
        answers: the token ids of each answer, by the answer's number in the batch.
    """

    prompt: list[int]
    answers: dict[int, list[int]]

    @property
    def length(self) -> int:
        """Tokens of the prompt, once, and of all answers."""
        return len(self.prompt) + sum(map(len, self.answers.values()))


Row = list[Group]


class Layout:
    """Rows as arrays, in which each token has a place: its number, counted through all rows.

    A piece is a prompt or an answer. Answer i is piece i; the prompts are numbered from there on.

    Attributes:
        ids, positions: of each token, `[rows, row length]`.
        pieces, prompts: the piece that each token belongs to, and that piece's prompt, `[rows, row
            length]`; a prompt is its own.
        before: for each answer, the places of the tokens that predict its tokens.
        last: for each answer, the place of its last token.
    """

    def __init__(self, shape: tuple[int, int], n_answers: int):
        self.ids = np.zeros(shape, dtype=np.int64)
        self.positions = np.zeros(shape, dtype=np.int64)
        self.pieces = np.full(shape, PADDING)
        self.prompts = np.full(shape, PADDING)
        self.before: list[list[int]] = [[] for _ in range(n_answers)]
        self.last = [0] * n_answers
        self.prompt_pieces = itertools.count(n_answers)

    def add(self, group: Group, place: int) -> int:
        """Writes a group from a place on, and returns the place after it."""
        piece = next(self.prompt_pieces)
        end = self.write(group.prompt, place, position=0, piece=piece, prompt=piece)
        # An empty prompt has no last token, and this place then means nothing. That is harmless:
        # `refuse_unpredicted` refuses an answer whose first token needs it.
        last_of_prompt = end - 1
        for number, answer in group.answers.items():
            start = end
            position = len(group.prompt)  # as if the answer followed its prompt directly
            end = self.write(answer, start, position=position, piece=number, prompt=piece)
            # The prompt's last token predicts the first one; each token of the answer the next.
            self.before[number] = [last_of_prompt, *range(start, end - 1)]
            self.last[number] = end - 1
        return end

    def write(self, ids: list[int], place: int, *, position: int, piece: int, prompt: int) -> int:
        """Writes a piece from a place on, and returns the place after it.

        Args:
            position: that of its first token.
        """
        end = place + len(ids)
        self.ids.flat[place:end] = ids
        self.positions.flat[place:end] = np.arange(position, position + len(ids))
        self.pieces.flat[place:end] = piece
        self.prompts.flat[place:end] = prompt
        return end


@dataclass(frozen=True)
class Packer:
    """Makes batches of prompts and answers; see `checks.make_packer`.

    Attributes:
        device: where the batches go.
        share: whether prompts and rows may be shared. A prompt that several answers have in common
            is then computed once, and a row holds several prompts where they fit. An answer still
            sees its own prompt and itself only, at the positions that it would have alone.
        by_lengths: rows are shared as flash attention takes them: all answers one after the other
            in a single row without padding, each after its own prompt. No prompt is shared.
        attention_equals_rest: the row length at which causal attention takes about as long as all
            the rest of the models. Its default is that of a hidden size of 340.
    """

    device: torch.device
    share: bool = False
    by_lengths: bool = False
    attention_equals_rest: int = 4096

    def make_batch(
        self,
        prompts: Sequence[list[int]],
        answers: Sequence[list[int]],
        scored: Sequence[list] | None = None,
    ) -> dict:
        """Returns answers to prompts as tensors that a model reads.

        Three answers, the first two of them to one prompt, if prompts may be shared:

            make_batch([[1, 2], [1, 2], [3]], [[4, 5], [6], [7, 8, 9]])

            input_ids     1  2  4  5  6        place of each token     0  1  2  3  4
                          3  7  8  9  0                                5  6  7  8  9
            position_ids  0  1  2  3  2
                          0  1  2  3  0        the last is padding
            targets       4  5 | 6 | 7  8  9   all tokens of the answers
            before        1  2 | 1 | 5  6  7   the places of 2 4 | 2 | 3 7 8, which predict them
            last             3 | 4 |       8   the places of 5, 6 and 9
            mask          1  1  0              answer by answer, in the shape of what is returned
                          1  0  0              for the tokens of answers
                          1  1  1
            cells         0  1 | 3 | 6  7  8   where the targets are in the flattened mask

        Nothing here waits for a GPU: it computes one micro-batch while the next one is laid out.

        Args:
            prompts: token ids, one prompt for each answer; may be empty.
            answers: token ids.
            scored: which tokens of each answer are targets; by default all. If the prompt is empty
                the first must be false: nothing predicts it.

        Returns:
            inputs: what a `transformers` model takes: `input_ids` `[rows, row length]`, padded on
                the right, and, if a row holds several answers, `position_ids` of the same shape and
                either the bool `attention_mask` `[rows, 1, row length, row length]` or, by lengths,
                what `lengths_of_groups` returns.
            targets: ids of the targets, answer after answer, `[targets]`.
            before: the place of the token that predicts each target, `[targets]`.
            last: the place of each answer's last token, `[answers]`.
            mask: which tokens are targets, bool `[answers, longest answer]`.
            cells: where each target is in the flattened mask, `[targets]`.
            tokens: how many tokens the rows hold, a shared prompt once and padding not at all.

        Raises:
            ValueError: the first token of an answer to an empty prompt is to be a target.
        """
        if scored is None:
            scored = [[True] * len(answer) for answer in answers]
        refuse_unpredicted(prompts, scored)
        rows = self.arrange(prompts, answers)
        layout = lay_out(rows)
        mask = batches.pad(scored, False, "cpu").bool()
        # A GPU could find the cells, too, but the host would wait for their number.
        cells = mask.flatten().nonzero().squeeze(1)
        return {
            "inputs": self.inputs_of(rows, layout),
            "targets": batches.send(of_targets(answers, scored), self.device),
            "before": batches.send(of_targets(layout.before, scored), self.device),
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
        if self.share and self.by_lengths:
            return [groups]
        alone = [[group] for group in longest_first(groups)]
        if not self.share:
            return alone
        packed = first_fit(longest_first(share_prompts(groups)))
        return packed if self.pays(packed, alone) else alone

    def pays(self, packed: list[Row], alone: list[Row]) -> bool:
        """Returns whether packed rows cost no more than a row for each answer.

        The cost of attention grows with the square of the row length n, all other cost with n, and
        both are equal at a length e that depends on the model: together n * (n + e). Causal
        attention computes only the half of the square below the diagonal. A packed row needs a
        mask, and then the whole square is computed: n * (2 * n + e).
        """
        equal = self.attention_equals_rest
        length = longest_of(packed)
        if len(packed) * length**2 > MOST_MASK:
            return False
        cost_packed = len(packed) * length * (2 * length + equal)
        length = longest_of(alone)
        cost_alone = len(alone) * length * (length + equal)
        return cost_packed <= cost_alone

    def inputs_of(self, rows: list[Row], layout: Layout) -> dict:
        """Returns what a `transformers` model takes, see `make_batch`."""
        inputs = {"input_ids": batches.send(layout.ids, self.device)}
        if len(rows) == len(layout.last):  # each answer has a row of its own
            return inputs
        inputs["position_ids"] = batches.send(layout.positions, self.device)
        if self.by_lengths:
            return inputs | lengths_of_groups(rows[0], self.device)
        pieces = batches.send(layout.pieces, self.device)
        prompts = batches.send(layout.prompts, self.device)
        return inputs | {"attention_mask": attention_mask(pieces, prompts)}

    def describe(self, answers: str, each: str) -> str:
        """Returns in words how often a prompt is computed.

        Args:
            answers, each: what has a prompt in common, such as `both answers`, and one of them,
                such as `answer`.
        """
        if self.share:
            return f"prompts are computed once for {answers}"
        return f"prompts are computed for each {each}"


def refuse_unpredicted(prompts: Sequence[list[int]], scored: Sequence[list]) -> None:
    """Raises `ValueError` if the first token of an answer to an empty prompt is a target."""
    for number, (prompt, flags) in enumerate(zip(prompts, scored)):
        if not prompt and any(flags[:1]):
            raise ValueError(
                f"answer {number} has an empty prompt, so nothing predicts its first token: "
                "that token cannot be a target"
            )


# ============================================================ groups and rows
def share_prompts(groups: list[Group]) -> list[Group]:
    """Joins groups that have the same prompt.

    Answers without a prompt (SFT passes empty prompts) have nothing in common. As one group, which
    no two rows can divide, they would fill a single row.
    """
    joined: dict[object, Group] = {}
    for number, group in enumerate(groups):
        key = tuple(group.prompt) or number
        of_prompt = joined.setdefault(key, Group(group.prompt, {}))
        of_prompt.answers.update(group.answers)
    return list(joined.values())


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
        for row in rows:
            if tokens_of(row) + group.length <= row_length:
                row.append(group)
                break
        else:
            rows.append([group])
    return rows


def tokens_of(row: Row) -> int:
    """Returns the number of tokens of a row."""
    return sum(group.length for group in row)


def longest_of(rows: list[Row]) -> int:
    """Returns the number of tokens of the longest row."""
    return max(map(tokens_of, rows))


# ============================================================ from rows to arrays
def lay_out(rows: list[Row]) -> Layout:
    """Writes rows into arrays, padded on the right to the longest row; see `make_batch`."""
    row_length = longest_of(rows)
    n_answers = sum(len(group.answers) for row in rows for group in row)
    layout = Layout((len(rows), row_length), n_answers)
    for number, row in enumerate(rows):
        place = number * row_length
        for group in row:
            place = layout.add(group, place)
    return layout


def attention_mask(pieces: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
    """Returns which tokens see which: a token sees its own piece and its prompt, up to itself.

    Padding belongs to no piece, so it sees only padding, and no piece sees it. It sees at least
    itself: attention over nothing would be NaN.

    Args:
        pieces, prompts: of each token, `[rows, row length]`; see `Layout`.

    Returns:
        bool `[rows, 1, row length, row length]`: whether the query (third dimension) sees the key
        (fourth).
    """
    rows, length = pieces.shape
    key = pieces[:, None, None, :]
    mask = torch.empty(rows, 1, length, length, dtype=torch.bool, device=pieces.device)
    queries_at_once = max(1, MASK_AT_ONCE // (rows * length))
    for start in range(0, length, queries_at_once):
        part = slice(start, start + queries_at_once)
        query = pieces[:, None, part, None]
        prompt_of_query = prompts[:, None, part, None]
        mask[:, :, part] = ((key == query) | (key == prompt_of_query)).tril(start)
    return mask


def lengths_of_groups(row: Row, device) -> dict:
    """Returns where the groups of a row begin, as flash attention takes it.

    Returns:
        `cu_seq_lens_q` and `cu_seq_lens_k`: int32 `[groups + 1]`, the place of each beginning, and
        the row's length; `max_length_q` and `max_length_k`: tokens of the longest, as a number.
    """
    lengths = [group.length for group in row]
    beginnings = batches.send(np.cumsum([0, *lengths], dtype=np.int32), device)
    return {
        "cu_seq_lens_q": beginnings,
        "cu_seq_lens_k": beginnings,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def of_targets(values: Sequence[Sequence[int]], scored: Sequence[Sequence]) -> list[int]:
    """Returns the values that belong to targets, answer after answer."""
    chosen: list[int] = []
    for values_of_answer, flags in zip(values, scored):
        chosen += itertools.compress(values_of_answer, flags)
    return chosen
