"""The sequences that a model reads, where a row of the data may hold several."""

from collections.abc import Sequence

import numpy as np
import pyarrow.compute


class Sequences:
    """All sequences of a data set, numbered in the order of its rows.

    A row holds one, or one for each answer. Those of a row are all in one update.
    """

    def __init__(self, dataset):
        self.dataset = dataset  # with `input_ids loss_mask sequence_lengths row`
        lists = dataset.with_format("arrow")["sequence_lengths"][:]  # Python lists would take long
        self.lengths = pyarrow.compute.list_flatten(lists).to_numpy()  # of each sequence
        per_row = pyarrow.compute.list_value_length(lists).to_numpy()
        # The number of each row's first sequence, and at the end the number of all sequences.
        self._starts = np.append(0, np.cumsum(per_row))

    def __len__(self) -> int:
        return len(self.lengths)

    def sequences_of(self, rows: Sequence[int]) -> np.ndarray:
        """Returns the numbers of the sequences of some rows, row after row."""
        return np.concatenate(
            [np.arange(self._starts[row], self._starts[row + 1]) for row in np.asarray(rows)]
        )

    def __getitem__(self, numbers: Sequence[int]) -> dict[str, list]:
        """Returns `input_ids loss_mask row`, and maybe `images`, of some sequences."""
        rows = np.searchsorted(self._starts, numbers, side="right") - 1
        columns = self.dataset[rows]
        cut = {"input_ids": [], "loss_mask": [], "row": columns["row"]}
        for place, number in enumerate(numbers):
            before = self.lengths[self._starts[rows[place]] : number].sum()
            span = slice(before, before + self.lengths[number])
            cut["input_ids"].append(columns["input_ids"][place][span])
            cut["loss_mask"].append(columns["loss_mask"][place][span])
        if "images" in columns:  # each reads the first ones of its row
            counts = columns["images_of_sequence"]
            numbers_in_row = np.asarray(numbers) - self._starts[rows]
            cut["images"] = [
                (files or [])[: count[number] if count else 0]
                for files, count, number in zip(columns["images"], counts, numbers_in_row)
            ]
        return cut
