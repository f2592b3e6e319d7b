"""Lays out prompts and answers as the rows that a model reads, with prompts shared."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from common import batches

# The most that the mask of packed rows may take, in bytes: one row of 16,384 tokens.
MOST_MASK = 2**28
# A mask is computed in parts of about so many elements, since what is compared takes as much again.
MASK_AT_ONCE = 2**24

NO_PIECE = -1


class Costs:
    """What sharing costs the models of this process.

    Attributes:
        attention_equals_rest: the row length at which causal attention takes about as long as all
            the rest of a model. `checks.can_pack` sets it to that of the models that it checks.
            Until then it is that of a hidden size of 340.
    """

    attention_equals_rest = 4096


costs = Costs()


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


def make_batch(
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    share: bool,
    device,
    scored: Sequence[list] | None = None,
    by_lengths: bool = False,
) -> dict:
    """Returns answers to prompts as tensors that a model reads.

    If prompts are shared, a prompt that several answers have in common is computed once, and a row
    holds several prompts where they fit. An answer still sees its own prompt and itself only, at
    the positions that it would have alone. Otherwise, and where sharing would cost more time or
    need too large a mask, each answer has its own row.

    Nothing here waits for a GPU: it computes one micro-batch while the next one is laid out.

    Args:
        prompts: token ids, one prompt for each answer; may be empty.
        answers: token ids.
        share: whether prompts and rows may be shared.
        scored: which tokens of each answer are targets; by default all. If the prompt is empty the
            first must be false: nothing predicts it.
        by_lengths: rows are shared as flash attention takes them: all answers one after the other
            in a single row without padding, each behind its own prompt. No prompt is shared.

    Returns:
        inputs: what a `transformers` model takes: `input_ids` `[rows, row length]`, padded on the
            right, and, if a row holds several answers, `position_ids` of the same shape and either
            the bool `attention_mask` `[rows, 1, row length, row length]` or, by lengths, what
            `lengths_of_pieces` returns.
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
    for number, (prompt, flags) in enumerate(zip(prompts, scored)):
        if not prompt and any(flags[:1]):
            raise ValueError(
                f"answer {number} has an empty prompt, so nothing predicts its first token: "
                "that token cannot be a target"
            )
    if share and by_lengths:
        groups = group_by_prompt(prompts, answers, share=False)
        rows = [[piece for group in groups for piece in group]]
    else:
        rows = arrange(prompts, answers, share)
    layout = lay_out(rows, len(answers))

    inputs = {"input_ids": batches.send(layout.ids, device)}
    if len(rows) < len(answers):
        inputs["position_ids"] = batches.send(layout.positions, device)
    if len(rows) < len(answers) and by_lengths:
        inputs |= lengths_of_pieces(prompts, answers, device)
    elif len(rows) < len(answers):
        inputs["attention_mask"] = attention_mask(
            batches.send(layout.numbers, device), batches.send(layout.prompts, device)
        )
    return {
        "inputs": inputs,
        "mask": batches.pad(scored, False, device).bool(),
        "places": batches.send(places_of_targets(scored), device),
        "targets": batches.send(of_targets(answers, scored), device),
        "before": batches.send(of_targets(layout.before, scored), device),
        "last": batches.send(layout.last, device),
        "tokens": sum(map(length_of, rows)),
    }


def arrange(
    prompts: Sequence[list[int]], answers: Sequence[list[int]], share: bool
) -> list[Pieces]:
    """Returns the rows: groups packed together where that pays, else a row for each answer."""
    groups = group_by_prompt(prompts, answers, share)
    groups.sort(key=length_of, reverse=True)
    if not share:
        return groups
    rows = first_fit(groups, row_length=length_of(groups[0]))
    mask_bytes = len(rows) * max(map(length_of, rows)) ** 2
    if mask_bytes > MOST_MASK or packing_costs_more(rows, prompts, answers):
        return arrange(prompts, answers, share=False)
    return rows


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


def packing_costs_more(
    rows: list[Pieces], prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> bool:
    """Returns whether packed rows cost more than a row for each answer.

    The cost of attention grows with the square of the row's length n, all other cost with n, and
    both are equal at a length e that depends on the model: together n * (n + e). Causal attention
    computes only the half of the square below the diagonal. A packed row needs a mask, and then the
    whole square is computed: n * (2 * n + e).
    """
    equal = costs.attention_equals_rest
    packed_length = max(map(length_of, rows))
    packed = len(rows) * packed_length * (2 * packed_length + equal)

    alone_length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers))
    alone = len(answers) * alone_length * (alone_length + equal)
    return packed > alone


def lay_out(rows: list[Pieces], n_answers: int) -> Layout:
    """Returns rows as arrays, padded on the right to the longest of them."""
    row_length = max(map(length_of, rows))
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
                # harmless: `make_batch` refuses such an answer if its first token is a target.
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
