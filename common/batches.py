"""Splits the samples of an update into micro-batches of similar length."""

import bisect
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class Rows:
    """A `datasets.Dataset` whose rows are read whole. `Sequences` reads parts of rows."""

    def __init__(self, dataset):
        self.dataset = dataset
        # Additional columns by name, one entry per row.
        self.added: dict[str, np.ndarray] = {}
        self.lengths = int_column(dataset, "length")  # tokens of each row

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: Sequence[int]) -> dict:
        """Returns the columns of some rows: lists, and arrays where they were added."""
        added = {name: column[indices] for name, column in self.added.items()}
        return {**self.dataset[indices], **added}

    def sequences_of(self, indices: np.ndarray) -> np.ndarray:
        """Returns the indices of what is read for these rows: those of the rows themselves."""
        return indices


def int_column(dataset, name: str) -> np.ndarray:
    """Returns a column of integers as one array, much faster than as a list of Python's."""
    return dataset.with_format("arrow")[name][:].to_numpy()


class MicroBatch(NamedTuple):
    """The samples that one process runs forward and backward at once."""

    indices: list[int]  # into the data set, its sequences (SFT) or the rollout
    sample_weights: torch.Tensor  # float32 `[indices]`: 1, or 0 for a padding row


def indices_of_update(
    n_rows: int, train_batch_size: int, seed: int | tuple[int, ...], index: int
) -> np.ndarray:
    """Returns the indices that update `index` takes, applied or skipped, from 0 over the run.

    Each epoch is a permutation of all indices, cut into updates; the last one may be short.
    """
    updates_per_epoch = math.ceil(n_rows / train_batch_size)
    epoch, index_in_epoch = divmod(index, updates_per_epoch)
    start = index_in_epoch * train_batch_size
    return epoch_order(n_rows, seed, epoch)[start : start + train_batch_size]


@functools.lru_cache(maxsize=2)  # sampling recipes alternate between two: of prompts, of samples
def epoch_order(n_rows: int, seed: int | tuple[int, ...], epoch: int) -> np.ndarray:
    """Returns the permutation of the indices in one epoch, which only seed and epoch decide."""
    return np.random.default_rng(np.append(seed, epoch)).permutation(n_rows)


def split(
    accelerator,
    indices: Sequence[int],
    lengths: np.ndarray,
    micro_batch_size: int,
    max_tokens: int = 0,
) -> list[MicroBatch]:
    """Splits samples into micro-batches of similar length and returns those of this process.

    There are as few as possible, equally many on every process. The order of the samples cannot
    change their update, so the longest come first: if memory is too small, the run fails at once.

    Args:
        indices: of the samples, the same on every process.
        lengths: tokens of each sample of the data set or the rollout.
        max_tokens: if above 0, the limit of a micro-batch instead of `micro_batch_size`, padding
            counted. A longer sample gets a micro-batch of its own.
    """
    processes = accelerator.num_processes
    indices = np.asarray(indices)
    longest_first = indices[np.argsort(-lengths[indices], kind="stable")]
    if max_tokens:
        parts = split_by_tokens(longest_first, lengths, max_tokens, processes)
    else:
        steps = math.ceil(len(indices) / (micro_batch_size * processes))
        parts = np.array_split(longest_first, steps * processes)

    # A process without samples must run something: the others wait for it in each collective.
    padding = MicroBatch(longest_first[-1:].tolist(), torch.zeros(1))
    # Neighbouring parts have similar lengths, so no process waits long for the others.
    own_parts = parts[accelerator.process_index :: processes]
    return [MicroBatch(p.tolist(), torch.ones(len(p))) if len(p) else padding for p in own_parts]


def split_by_tokens(
    indices: np.ndarray, lengths: np.ndarray, max_tokens: int, processes: int
) -> list[np.ndarray]:
    """Splits samples, longest first, into parts of about equally many tokens, at most `max_tokens`.

    The number of parts is the smallest multiple of `processes`; the last parts may be empty.
    """
    lengths_in_order = lengths[indices].tolist()

    def parts_within(limit: int) -> int:
        return len(starts_by_tokens(lengths_in_order, limit))

    n_parts = math.ceil(parts_within(max_tokens) / processes) * processes
    # At `max_tokens` the first parts are full and the last nearly empty. The smallest limit that
    # needs no more parts fills all about equally. A higher one never needs more: halve the range.
    limit = bisect.bisect_left(range(max_tokens), -n_parts, key=lambda limit: -parts_within(limit))
    parts = np.split(indices, starts_by_tokens(lengths_in_order, limit)[1:])
    return parts + [indices[:0]] * (n_parts - len(parts))


def starts_by_tokens(lengths: list[int], max_tokens: int) -> list[int]:
    """Returns where micro-batches start if each takes as many rows as `max_tokens` allows."""
    starts = [0]
    for index in range(1, len(lengths)):
        start = starts[-1]
        n_rows = index + 1 - start  # this row included, all padded to the first, the longest
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
    return to_device(padded, device)


def to_device(array: np.ndarray | torch.Tensor | list, device) -> torch.Tensor:
    """Copies an array, a list or a tensor from the host to the device.

    To a GPU it is copied from pinned memory: for any other copy the host would wait until the GPU
    has finished all queued work.
    """
    tensor = torch.as_tensor(array)
    if torch.device(device).type != "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
