"""Says which rows of which data set an epoch takes, where several sets are mixed with weights."""

from typing import NamedTuple

import numpy as np


class Mixture(NamedTuple):
    """Data sets whose rows are numbered one after the other, and how often an epoch takes them.

    Attributes:
        sizes: usable rows of each set.
        weights: one for each set, above 0. With 2 an epoch takes each row twice; with 0.5 half of
            the rows, and the next epoch the other half.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def counts(self) -> list[int]:
        """The samples of each set in an epoch, the same number in every epoch."""
        return [max(round(size * weight), 1) for size, weight in zip(self.sizes, self.weights)]

    @property
    def samples(self) -> int:
        """The samples of an epoch."""
        return sum(self.counts)

    def describe(self, names: list[str]) -> str:
        """Returns the arithmetic of an epoch in one line."""
        parts = [
            f"{name} {size} rows x {weight:g} = {count}"
            for name, size, weight, count in zip(names, self.sizes, self.weights, self.counts)
        ]
        return f"mixed: {'; '.join(parts)}; {self.samples} samples an epoch"

    def rows_of_epoch(self, seed: int | tuple[int, ...], epoch: int) -> np.ndarray:
        """Returns the rows that an epoch takes, set by set, numbered over all sets.

        Each set is passed through in one seeded permutation after another, and each epoch goes on
        where the one before it stopped. So no row comes twice before every other came once.
        """
        taken = []
        first_row = 0
        for number, (size, count) in enumerate(zip(self.sizes, self.counts)):
            start = epoch * count
            first_pass = start // size
            last_pass = (start + count - 1) // size
            passes = [
                np.random.default_rng(np.append(seed, [index, number, 1])).permutation(size)
                for index in range(first_pass, last_pass + 1)
            ]
            offset = start - first_pass * size
            taken.append(first_row + np.concatenate(passes)[offset : offset + count])
            first_row += size
        return np.concatenate(taken)


def mixture_of(rows: int | Mixture) -> Mixture:
    """Returns the mixture of one set with this number of rows, or the mixture itself."""
    return rows if isinstance(rows, Mixture) else Mixture((rows,), (1.0,))
