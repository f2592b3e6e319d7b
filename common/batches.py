"""The rows of an update, cut into micro-batches of like length; the batches of an evaluation."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class Rows:
    """A `datasets.Dataset` whose rows are read as they are. `Sequences` is one that cuts them."""

    def __init__(self, dataset):
        self.dataset = dataset
        # Further columns by name, with one entry for each row.
        self.added: dict[str, np.ndarray] = {}
        self.lengths = column(dataset, "length")  # tokens of each row

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, numbers: Sequence[int]) -> dict:
        """Returns the columns of some rows: lists, and arrays where they were added."""
        added = {name: column[numbers] for name, column in self.added.items()}
        return {**self.dataset[numbers], **added}

    def sequences_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns the numbers of what is read of some rows: the rows themselves."""
        return rows


def column(dataset, name: str) -> np.ndarray:
    """Returns a column of numbers as one array; Python's numbers would take long."""
    return dataset.with_format("arrow")[name][:].to_numpy()


class MicroBatch(NamedTuple):
    """What one process runs forward and backward at once."""

    rows: list[int]  # numbers in the data set, or in the rollout
    is_real: torch.Tensor  # float32 `[rows]`: 1, or 0 for a padding row


def rows_of_update(
    n_rows: int, train_batch_size: int, seed: int | tuple[int, ...], index: int
) -> np.ndarray:
    """Returns the rows of update `index`, applied or skipped, from 0 over the whole run.

    Each epoch is a permutation of the rows, cut into updates; the last one may be short.
    """
    updates_per_epoch = math.ceil(n_rows / train_batch_size)
    epoch, index_in_epoch = divmod(index, updates_per_epoch)
    start = index_in_epoch * train_batch_size
    return epoch_order(n_rows, seed, epoch)[start : start + train_batch_size]


@functools.lru_cache(maxsize=2)  # recipes that sample have two in turn: prompts, and their samples
def epoch_order(n_rows: int, seed: int | tuple[int, ...], epoch: int) -> np.ndarray:
    """Returns the permutation of the rows of one epoch. Only seed and epoch decide it."""
    return np.random.default_rng(np.append(seed, epoch)).permutation(n_rows)


def split(
    accelerator,
    rows: Sequence[int],
    lengths: np.ndarray,
    micro_batch_size: int,
    max_tokens: int = 0,
) -> list[MicroBatch]:
    """Splits rows into micro-batches of like length and returns those of this process.

    There are as few as possible, equally many on every process. The order of the samples cannot
    change their update, so the longest come first: what does not fit into the memory fails at once.

    Args:
        rows: their numbers, the same on every process.
        lengths: tokens of every row of the data set.
        max_tokens: if above 0, it limits a micro-batch in place of `micro_batch_size`, padding
            counted. A longer row is alone.
    """
    processes = accelerator.num_processes
    rows = np.asarray(rows)
    longest_first = rows[np.argsort(-lengths[rows], kind="stable")]
    if max_tokens:
        parts = split_by_tokens(longest_first, lengths, max_tokens, processes)
    else:
        steps = math.ceil(len(rows) / (micro_batch_size * processes))
        parts = np.array_split(longest_first, steps * processes)

    # A process without rows must run something: the others wait for it in each collective.
    padding = MicroBatch(longest_first[-1:].tolist(), torch.zeros(1))
    # Neighbouring parts are about equally long: no process waits long for the others.
    mine = parts[accelerator.process_index :: processes]
    return [MicroBatch(p.tolist(), torch.ones(len(p))) if len(p) else padding for p in mine]


def split_by_tokens(
    rows: np.ndarray, lengths: np.ndarray, max_tokens: int, processes: int
) -> list[np.ndarray]:
    """Splits rows, the longest first, into parts of about as many tokens, `max_tokens` at most.

    They are a multiple of `processes`, as few as possible; the last may be empty.
    """
    lengths_of_rows = lengths[rows].tolist()

    def parts_within(limit: int) -> int:
        return len(starts_by_tokens(lengths_of_rows, limit))

    wanted = math.ceil(parts_within(max_tokens) / processes) * processes
    # At `max_tokens` the first parts are full and the last nearly empty. The smallest limit that
    # needs no more parts fills all about equally. A higher one never needs more: halve the range.
    limit = bisect.bisect_left(range(max_tokens), -wanted, key=lambda limit: -parts_within(limit))
    parts = np.split(rows, starts_by_tokens(lengths_of_rows, limit)[1:])
    return parts + [rows[:0]] * (wanted - len(parts))


def starts_by_tokens(lengths: list[int], max_tokens: int) -> list[int]:
    """Returns where micro-batches start if each takes as many rows as fit into `max_tokens`."""
    starts = [0]
    for index in range(1, len(lengths)):
        start = starts[-1]
        n_rows = index + 1 - start  # with this one, all padded to the first, the longest
        if n_rows * lengths[start] > max_tokens:
            starts.append(index)
    return starts


def pad(sequences: Sequence[Sequence[int]], value: int, device, left: bool = False) -> torch.Tensor:
    """Returns sequences of ids as int64 `[sequences, longest]`, padded with `value`."""
    padded = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(sequence, dtype=torch.long) for sequence in sequences],
        batch_first=True,
        padding_value=value,
        padding_side="left" if left else "right",
    )
    return send(padded, device)


def send(array: np.ndarray | torch.Tensor | list, device) -> torch.Tensor:
    """Returns an array, a list or a tensor of the host on the device.

    To a GPU it is copied from pinned memory: for other copies the host would wait until all work
    that was queued before is done.
    """
    tensor = torch.as_tensor(array)
    if torch.device(device).type != "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
