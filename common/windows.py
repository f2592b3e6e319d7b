"""Which samples form a window, and how a window is cut into the micro-batches of each process."""

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from accelerate.utils import gather_object


def window_rows(n_rows: int, train_batch_size: int, seed: int | tuple[int, ...], index: int) -> np.ndarray:
    """The rows of window `index`, counted over the whole run.

    A seeded permutation per epoch, cut into windows; the last of an epoch may be short. It depends on the seed and the
    epoch alone: not on processes, micro-batches or a resume.
    """
    epoch, window = divmod(index, math.ceil(n_rows / train_batch_size))
    return epoch_order(n_rows, seed, epoch)[window * train_batch_size : (window + 1) * train_batch_size]


@functools.lru_cache(maxsize=2)  # PPO goes through prompts and, within a rollout, through its samples
def epoch_order(n_rows: int, seed: int | tuple[int, ...], epoch: int) -> np.ndarray:
    return np.random.default_rng(np.append(seed, epoch)).permutation(n_rows)


def arrange(
    rows: Sequence[int], lengths: np.ndarray, micro_batch_size: int, processes: int, process: int, steps: int | None = None
) -> list[tuple[list[int], list[float]]]:
    """Cuts rows into micro-batches of like length, the same number on every process.

    Order inside a window cannot change its update, so rows are sorted by length, longest first: little padding, processes in
    step, and a micro-batch too large for memory fails at once. What is missing is filled with rows of weight zero.

    Args:
        rows: row numbers, the same on every process.
        lengths: tokens of every row of the data set.
        steps: micro-batches per process; default as few as hold the rows (evaluation).

    Returns:
        For this process, `steps` pairs of `micro_batch_size` rows and their weights, 1.0 or 0.0.
    """
    rows = np.asarray(rows)
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    steps = steps or math.ceil(len(rows) / (micro_batch_size * processes))
    room = steps * processes * micro_batch_size
    filled = np.concatenate([rows, np.full(room - len(rows), rows[-1])]).reshape(-1, micro_batch_size)
    weights = (np.arange(room) < len(rows)).astype(float).reshape(-1, micro_batch_size)
    return [(filled[i].tolist(), weights[i].tolist()) for i in range(process, len(filled), processes)]


def pad(sequences: Sequence[Sequence[int]], value: int, device, left: bool = False) -> torch.Tensor:
    """Sequences of ids as one tensor `[rows, longest]`, padded on the right (for generation on the left)."""
    longest = max(map(len, sequences))
    rows = [[value] * (longest - len(s)) + list(s) if left else list(s) + [value] * (longest - len(s)) for s in sequences]
    return torch.tensor(rows, device=device)


def evaluation_batches(accelerator, dataset, micro_batch_size: int) -> Iterator[tuple[list[int], dict, torch.Tensor]]:
    """Every row of a data set once, over all processes: row numbers, their columns, and weights `[rows]`, 0 for a filler."""
    share = np.arange(len(dataset)), np.array(dataset["length"][:]), micro_batch_size
    for rows, weights in arrange(*share, accelerator.num_processes, accelerator.process_index):
        yield rows, dataset[rows], torch.tensor(weights, device=accelerator.device)


def gather_rows(mine: dict[int, object]) -> list:
    """What the processes have by row, as one list in the order of the rows, on every rank."""
    everyone = {row: value for part in gather_object([mine]) for row, value in part.items()}
    return [everyone[row] for row in range(len(everyone))]
