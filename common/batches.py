"""The rows of an update, and its micro-batches."""

import bisect
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from common.data.dataset import column


def rows_of_update(
    n_rows: int, train_batch_size: int, seed: int | tuple[int, ...], index: int
) -> np.ndarray:
    """The rows of window `index`, counted over the whole run.

    A seeded permutation per epoch, cut into windows; the last of an epoch may be short. It depends on the seed and the
    epoch alone: not on processes, micro-batches or a resume.
    """
    epoch, window = divmod(index, math.ceil(n_rows / train_batch_size))
    return epoch_order(n_rows, seed, epoch)[
        window * train_batch_size : (window + 1) * train_batch_size
    ]


@functools.lru_cache(
    maxsize=2
)  # PPO goes through prompts and, within a rollout, through its samples
def epoch_order(n_rows: int, seed: int | tuple[int, ...], epoch: int) -> np.ndarray:
    return np.random.default_rng(np.append(seed, epoch)).permutation(n_rows)


def split(
    accelerator,
    rows: Sequence[int],
    lengths: np.ndarray,
    micro_batch_size: int,
    max_tokens: int = 0,
) -> list[tuple]:
    """Cuts rows into micro-batches of like length, the same number on every process and as few as hold the rows.

    Order inside a window cannot change its update, so rows are sorted by length, longest first: little padding, processes in
    step, and a micro-batch too large for memory fails at once. A process that would have none gets a row of weight zero.

    Args:
        rows: row numbers, the same on every process.
        lengths: tokens of every row of the data set.
        max_tokens: where not 0, a micro-batch holds as many rows as fit into so many tokens, padding counted, instead of
            `micro_batch_size`, and all hold about as many; a longer row stands alone.

    Returns:
        This process's micro-batches: `list[int]` of rows and `list[float]` of their weights, 1 or 0.
    """
    rows, processes = np.asarray(rows), accelerator.num_processes
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    parts = np.array_split(rows, math.ceil(len(rows) / (micro_batch_size * processes)) * processes)
    if max_tokens:
        cut = functools.partial(cut_by_tokens, lengths[rows].tolist())
        number = math.ceil(len(cut(max_tokens)) / processes) * processes
        least = bisect.bisect_left(
            range(max_tokens), True, key=lambda tokens: len(cut(tokens)) <= number
        )
        parts = np.split(rows, cut(least)[1:])
        parts += [rows[:0]] * (number - len(parts))
    filler, mine = (rows[-1:].tolist(), [0.0]), parts[accelerator.process_index :: processes]
    return [(part.tolist(), [1.0] * len(part)) if len(part) else filler for part in mine]


def cut_by_tokens(lengths: list[int], max_tokens: int) -> list[int]:
    """Where micro-batches begin that hold at most so many tokens, padding counted; `lengths` from the longest on."""
    cuts = []
    for i in range(len(lengths)):
        if not cuts or (i + 1 - cuts[-1]) * lengths[cuts[-1]] > max_tokens:
            cuts.append(i)
    return cuts


def pad(sequences: Sequence[Sequence[int]], value: int, device, left: bool = False) -> torch.Tensor:
    """Sequences of ids as one tensor `[rows, longest]`, padded on the right (for generation on the left)."""
    rows, side = (
        [torch.tensor(sequence, dtype=torch.long) for sequence in sequences],
        "left" if left else "right",
    )
    return torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=value, padding_side=side
    ).to(device, non_blocking=True)


def evaluation_batches(
    accelerator, dataset, *sizes: int
) -> Iterator[tuple[list[int], dict, torch.Tensor]]:
    """Every row of a data set once, over all processes, in micro-batches of these sizes (see `arrange`): row numbers, their columns,
    and weights `[rows]`, 0 for a filler."""
    for rows, weights in split(
        accelerator, np.arange(len(dataset)), column(dataset, "length"), *sizes
    ):
        yield rows, dataset[rows], torch.tensor(weights, device=accelerator.device)
