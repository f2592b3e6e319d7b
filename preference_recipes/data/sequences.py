"""The sequences that a model reads, of which a row of the data may hold several."""

from collections.abc import Sequence

import numpy as np
import pyarrow.compute


class Sequences:
    """All sequences of a data set, indexed in the order of its rows.

    A row holds one sequence, or one for each answer. All sequences of a row are in one update.
    """

    def __init__(self, dataset):
        self.dataset = dataset  # with `input_ids loss_mask sequence_lengths row`
        lists = dataset.with_format("arrow")["sequence_lengths"][:]  # Python lists would take long
        self.lengths = pyarrow.compute.list_flatten(lists).to_numpy()  # one per sequence
        per_row = pyarrow.compute.list_value_length(lists).to_numpy()
        # The index of each row's first sequence, and at the end the number of sequences.
        self._starts = np.append(0, np.cumsum(per_row))

    def __len__(self) -> int:
        return len(self.lengths)

    def sequences_of(self, indices: Sequence[int]) -> np.ndarray:
        """Returns the indices of the sequences in the rows of these indices, row after row."""
        return np.concatenate(
            [np.arange(self._starts[i], self._starts[i + 1]) for i in np.asarray(indices)]
        )

    def __getitem__(self, indices: Sequence[int]) -> dict[str, list]:
        """Returns `input_ids loss_mask row`, and maybe `images`, of these sequences."""
        rows = np.searchsorted(self._starts, indices, side="right") - 1
        columns = self.dataset[rows]
        pieces = {"input_ids": [], "loss_mask": [], "row": columns["row"]}
        for position, index in enumerate(indices):
            before = self.lengths[self._starts[rows[position]] : index].sum()
            span = slice(before, before + self.lengths[index])
            pieces["input_ids"].append(columns["input_ids"][position][span])
            pieces["loss_mask"].append(columns["loss_mask"][position][span])
        if "images" in columns:  # each sequence reads the first images of its row
            counts = columns["images_of_sequence"]
            indices_in_row = np.asarray(indices) - self._starts[rows]
            pieces["images"] = [
                (files or [])[: count[index] if count else 0]
                for files, count, index in zip(columns["images"], counts, indices_in_row)
            ]
        return pieces
