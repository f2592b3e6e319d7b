"""Lays out prompts and answers as the rows that a model reads, with prompts shared."""

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

NO_PIECE = -1


class Piece(NamedTuple):
    """A prompt or an answer, as it stands in a row.

    Attributes:
        ids: its tokens.
        position: the position of its first token, as if its prompt began the row.
        number: which piece it is: answer i has number i; prompts are numbered on from the number of
            answers.
        prompt: the `number` of the prompt it belongs to; a prompt belongs to itself.
    """

    ids: list[int]
    position: int
    number: int
    prompt: int

    @property
    def is_prompt(self) -> bool:
        return self.number == self.prompt


# A group is a prompt followed by its answers; a row is one or more groups.
Pieces = list[Piece]


class Layout(NamedTuple):
    """Rows as arrays.

    A place is the index of a token, counted through all rows one after the other.

    Attributes:
        ids, positions: of each token, `[rows, row length]`.
        numbers, prompts: of the piece that each token belongs to, `[rows, row length]`.
        before: for each answer, the places of the tokens that predict its tokens.
        last: for each answer, the place of its last token.
    """

    ids: np.ndarray
    positions: np.ndarray
    numbers: np.ndarray
    prompts: np.ndarray
    before: list[list[int]]
    last: list[int]


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
                what `lengths_of_pieces` returns.
            mask: which tokens are targets, bool `[answers, longest answer]`.
            places: where each target stands in `mask`, counted through its rows, `[targets]`.
            targets: their ids, `[targets]`, answer after answer.
            before: the place of the token that predicts each target, `[targets]`.
            last: the place of each answer's last token, `[answers]`.
            tokens: how many tokens the rows hold, a shared prompt once and padding not at all.

        Raises:
            ValueError: the first token of an answer to an empty prompt is to be a target.
        """
        if scored is None:
            scored = [[True] * len(answer) for answer in answers]
        refuse_unpredicted(prompts, scored)
        rows = self.arrange(prompts, answers)
        layout = lay_out(rows, len(answers))
        return {
            "inputs": self.inputs_of(layout, prompts, answers),
            "mask": batches.pad(scored, False, self.device).bool(),
            "places": batches.send(places_of_targets(scored), self.device),
            "targets": batches.send(of_targets(answers, scored), self.device),
            "before": batches.send(of_targets(layout.before, scored), self.device),
            "last": batches.send(layout.last, self.device),
            "tokens": sum(map(length_of, rows)),
        }

    def arrange(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[Pieces]:
        """Returns the rows: groups packed together where that pays, else a row for each answer."""
        alone = group_by_prompt(prompts, answers, share=False)
        if self.share and self.by_lengths:
            return [[piece for group in alone for piece in group]]
        alone.sort(key=length_of, reverse=True)
        if not self.share:
            return alone
        groups = group_by_prompt(prompts, answers, share=True)
        groups.sort(key=length_of, reverse=True)
        packed = first_fit(groups, row_length=length_of(groups[0]))
        needs_large_mask = len(packed) * longest_of(packed) ** 2 > MOST_MASK
        return alone if needs_large_mask or self.costs_more(packed, alone) else packed

    def costs_more(self, packed: list[Pieces], alone: list[Pieces]) -> bool:
        """Returns whether packed rows cost more than a row for each answer.

        The cost of attention grows with the square of the row's length n, all other cost with n,
        and both are equal at a length e that depends on the model: together n * (n + e). Causal
        attention computes only the half of the square below the diagonal. A packed row needs a
        mask, and then the whole square is computed: n * (2 * n + e).
        """
        equal = self.attention_equals_rest
        length = longest_of(packed)
        cost_packed = len(packed) * length * (2 * length + equal)
        length = longest_of(alone)
        cost_alone = len(alone) * length * (length + equal)
        return cost_packed > cost_alone

    def inputs_of(
        self, layout: Layout, prompts: Sequence[list[int]], answers: Sequence[list[int]]
    ) -> dict:
        """Returns what a `transformers` model takes, see `make_batch`."""
        inputs = {"input_ids": batches.send(layout.ids, self.device)}
        if len(layout.ids) == len(answers):  # each has a row of its own
            return inputs
        inputs["position_ids"] = batches.send(layout.positions, self.device)
        if self.by_lengths:
            return inputs | lengths_of_pieces(prompts, answers, self.device)
        numbers = batches.send(layout.numbers, self.device)
        prompt_numbers = batches.send(layout.prompts, self.device)
        return inputs | {"attention_mask": attention_mask(numbers, prompt_numbers)}

    def describe(self, answers: str) -> str:
        """Returns in words how often a prompt is computed.

        Args:
            answers: what has a prompt in common, such as `both answers`.
        """
        if self.share:
            return f"prompts are computed once for {answers}"
        return f"prompts are computed for each of {answers}"


def refuse_unpredicted(prompts: Sequence[list[int]], scored: Sequence[list]) -> None:
    """Raises `ValueError` if the first token of an answer to an empty prompt is a target."""
    for number, (prompt, flags) in enumerate(zip(prompts, scored)):
        if not prompt and any(flags[:1]):
            raise ValueError(
                f"answer {number} has an empty prompt, so nothing predicts its first token: "
                "that token cannot be a target"
            )


def group_by_prompt(
    prompts: Sequence[list[int]], answers: Sequence[list[int]], share: bool
) -> list[Pieces]:
    """Returns each prompt with the answers that share it, or a group for each answer."""
    numbers_by_prompt: dict[object, list[int]] = {}
    for number, prompt in enumerate(prompts):
        # A group cannot be divided among rows. Answers without a prompt (SFT passes empty prompts)
        # share nothing, so each is a group of its own: as one group they would fill a single row.
        key = tuple(prompt) if share and prompt else number
        numbers_by_prompt.setdefault(key, []).append(number)

    groups = []
    for prompt_number, numbers in enumerate(numbers_by_prompt.values(), start=len(answers)):
        prompt = prompts[numbers[0]]
        group = [Piece(prompt, position=0, number=prompt_number, prompt=prompt_number)]
        for number in numbers:
            answer = Piece(
                answers[number],
                position=len(prompt),
                number=number,
                prompt=prompt_number,
            )
            group.append(answer)
        groups.append(group)
    return groups


def length_of(pieces: Pieces) -> int:
    """Returns the number of tokens of a group or a row."""
    return sum(len(piece.ids) for piece in pieces)


def longest_of(rows: list[Pieces]) -> int:
    """Returns the number of tokens of the longest row."""
    return max(map(length_of, rows))


def first_fit(groups: list[Pieces], row_length: int) -> list[Pieces]:
    """Puts each group into the first row that has room for it, else into a new one."""
    rows: list[Pieces] = []
    for group in groups:
        for row in rows:
            if length_of(row) + length_of(group) <= row_length:
                row.extend(group)
                break
        else:
            rows.append(list(group))
    return rows


def lay_out(rows: list[Pieces], n_answers: int) -> Layout:
    """Returns rows as arrays, padded on the right to the longest of them."""
    row_length = longest_of(rows)
    shape = (len(rows), row_length)
    layout = Layout(
        ids=np.zeros(shape, dtype=np.int64),
        positions=np.zeros(shape, dtype=np.int64),
        numbers=np.full(shape, NO_PIECE),
        prompts=np.full(shape, NO_PIECE),
        before=[[] for _ in range(n_answers)],
        last=[0] * n_answers,
    )
    for index, row in enumerate(rows):
        row_start = index * row_length  # the place of the row's first token
        end = 0
        for piece in row:
            start = end
            end = start + len(piece.ids)
            layout.ids[index, start:end] = piece.ids
            layout.positions[index, start:end] = np.arange(end - start) + piece.position
            layout.numbers[index, start:end] = piece.number
            layout.prompts[index, start:end] = piece.prompt
            if piece.is_prompt:
                # An empty prompt has no last token, and this place then means nothing. That is
                # harmless: `refuse_unpredicted` refuses an answer whose first token needs it.
                last_of_prompt = row_start + end - 1
            else:
                # The prompt's last token predicts the answer's first token; each token of the
                # answer predicts the next.
                places = range(row_start + start, row_start + end)
                layout.before[piece.number] = [last_of_prompt, *places[:-1]]
                layout.last[piece.number] = row_start + end - 1
    return layout


def attention_mask(numbers: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
    """Returns which tokens see which: a token sees its own piece and its prompt, up to itself.

    Padding has the number of no piece, so it sees only padding, and no piece sees it. It sees at
    least itself: attention over nothing would be NaN.

    Args:
        numbers, prompts: of the piece of each token, `[rows, length]`; see `Piece`.

    Returns:
        bool `[rows, 1, length, length]`: whether the query (third dimension) sees the key (fourth).
    """
    rows, length = numbers.shape
    key = numbers[:, None, None, :]
    mask = torch.empty(rows, 1, length, length, dtype=torch.bool, device=numbers.device)
    queries_at_once = max(1, MASK_AT_ONCE // (rows * length))
    for start in range(0, length, queries_at_once):
        part = slice(start, start + queries_at_once)
        query = numbers[:, None, part, None]
        prompt_of_query = prompts[:, None, part, None]
        mask[:, :, part] = ((key == query) | (key == prompt_of_query)).tril(start)
    return mask


def lengths_of_pieces(prompts: Sequence[list[int]], answers: Sequence[list[int]], device) -> dict:
    """Returns where the answers of a row begin, each with its prompt, as flash attention takes it.

    Returns:
        `cu_seq_lens_q` and `cu_seq_lens_k`: int32 `[answers + 1]`, the place of each beginning, and
        the row's length; `max_length_q` and `max_length_k`: tokens of the longest, as a number.
    """
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers)]
    beginnings = batches.send(np.cumsum([0, *lengths], dtype=np.int32), device)
    return {
        "cu_seq_lens_q": beginnings,
        "cu_seq_lens_k": beginnings,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def places_of_targets(scored: Sequence[Sequence]) -> list[int]:
    """Returns the place of each target in answers padded to the longest, answer after answer.

    A GPU could find them in the mask, but the host would wait for their number.
    """
    longest = max(map(len, scored))
    rows = [range(number * longest, (number + 1) * longest) for number in range(len(scored))]
    return of_targets(rows, scored)


def of_targets(values: Sequence[Sequence[int]], scored: Sequence[Sequence]) -> list[int]:
    """Returns the values of the target tokens, answer after answer."""
    chosen = []
    for values_of_answer, flags in zip(values, scored):
        chosen += [value for value, flag in zip(values_of_answer, flags) if flag]
    return chosen
