"""How far two runs are from each other: their log lines and their weights."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from contracts.proof.bench import Finished, weights_of

# The bounds of the contracts, see docs/forking.md.
LOSS = 1e-6
LATER_LOSS = 3e-6  # of weights that may already differ by 1e-5
METRIC = 1e-5
WEIGHTS = 1e-5
LEARNING_RATE = 1e-9
SCHEDULE = 1e-6  # of the peak learning rate
# Gradients that sum up to a smaller norm are themselves larger, and round as larger ones do.
SMALL_NORM = 1e-2
# What must differ, such as another seed's lines, differs by this much.
UNLIKE = 1e-5
# Cumulative numbers.
COUNTERS = ("samples", "sequences", "tokens", "skipped_steps", "global_step")
# These are counted, not computed by a model, so nothing rounds them.
EXACT = (*COUNTERS, "epoch", "loss_scale")
# These and the learning rates are those of the last update alone.
OF_LAST_UPDATE = ("grad_norm", "loss_scale", "epoch", "global_step")


class Difference(NamedTuple):
    """A measured difference with its bound.

    Attributes:
        measured, bound: of the first metric beyond its bound; if there is none, of the one nearest
            to it.
        where: the metric and the update that it was measured at.
    """

    measured: float
    bound: float
    where: str = ""

    @property
    def green(self) -> bool:
        """Whether it is within its bound."""
        return self.measured <= self.bound


def first_or_nearest(differences: Iterable[Difference]) -> Difference:
    """Returns the first difference beyond its bound, else the one nearest to its bound."""
    nearest = Difference(0.0, 0.0)
    share = -1.0
    for difference in differences:
        if not difference.green:
            return difference
        if difference.measured > share * difference.bound:
            nearest = difference
            share = difference.measured / difference.bound if difference.bound else 0.0
    return nearest


def faults(found: list[str]) -> Difference:
    """Returns how many faults were found, of which there must be none."""
    return Difference(len(found), 0, "; ".join(found))


def lists(expected: list, found: list, what: str) -> Difference:
    """Counts the entries that only one of two lists has."""
    if expected == found:
        return Difference(0, 0)
    wrong = len(set(expected) ^ set(found)) or 1
    return Difference(wrong, 0, f"{what} at {found}, expected at {expected}")


# ============================================================ log lines
def lines(
    expected: list[dict], found: list[dict], only: set[str] | None = None, exact: bool = False
) -> Difference:
    """Compares log lines, in their order.

    Args:
        only: the tags to compare; default all.
        exact: bit for bit; else up to the bounds of the contracts.
    """
    return first_or_nearest(differences_of_lines(expected, found, only, exact))


def differences_of_lines(
    expected: list[dict], found: list[dict], only: set[str] | None, exact: bool
) -> Iterator[Difference]:
    """Yields the difference of each tag of each line, see `lines`."""
    for number, (line, other) in enumerate(zip(expected, found)):
        step = line["global_step"]
        tags = [tag for tag in {**line, **other} if only is None or tag in only]
        for tag in ["global_step", *tags]:
            where = f"{tag}, update {step}"
            if tag not in line or tag not in other:
                yield Difference(math.inf, 0.0, f"{where}: logged by one of them only")
                continue
            if is_rounding(tag, line):
                continue
            bound = 0.0 if exact else bound_of(tag, line, is_first=number == 0)
            measured = abs(line[tag] - other[tag])
            if not math.isfinite(measured) and line[tag] == other[tag]:
                measured = 0.0
            yield Difference(measured, bound, f"{where}: {line[tag]:.8g}, {other[tag]:.8g}")
    if not expected and not found:
        yield Difference(math.inf, 0.0, "the log: neither run has such a line")
    if len(expected) != len(found):
        yield Difference(math.inf, 0.0, f"{len(expected)} lines, {len(found)}")


def bound_of(tag: str, line: dict, is_first: bool) -> float:
    """Returns how much a metric may differ between two ways to compute the same update.

    Log-probs are sums over a response, and what is computed from them rounds as they do.
    """
    if tag in EXACT:
        return 0.0
    value = size_of(line[tag])
    if tag.endswith("learning_rate"):
        return LEARNING_RATE * value
    if tag == "grad_norm":
        return METRIC * max(value, SMALL_NORM)
    size = max(1.0, value)
    if tag.rpartition("/")[2] == "loss":
        return (LOSS if is_first else LATER_LOSS) * size
    sums = [size_of(other) for name, other in line.items() if "logps" in name]
    return METRIC * max([size, *sums])


def size_of(value: float) -> float:
    """Returns the absolute value; 0 if it is not finite, so that no bound is infinite."""
    return abs(value) if math.isfinite(value) else 0.0


def is_rounding(tag: str, line: dict) -> bool:
    """Whether a metric counts the signs of margins that are nothing but rounding.

    A policy that is still its own reference has such margins.
    """
    if not tag.endswith("accuracies"):
        return False
    margins = line.get(tag.replace("accuracies", "margins"), math.inf)
    return abs(margins) < 1e-4


def unlike(some: list[dict], others: list[dict]) -> Difference:
    """Returns whether log lines differ in one metric at least, as they must.

    Differences of large values count as a share of them. Without a metric in common nothing is
    known, which is a fault.
    """
    apart = [
        abs(line[tag] - value) / max(1.0, abs(value))
        for line, other in zip(some, others)
        for tag, value in other.items()
        if tag in line and tag not in EXACT and not tag.endswith("learning_rate")
    ]
    if not apart:
        return Difference(math.inf, 0, "the log: the two runs have no metric in common")
    largest = max(apart)
    if largest >= UNLIKE:
        return Difference(0, 0, f"{largest:.3g}")
    where = f"all metrics: they differ by {largest:.3g} at most, expected at least {UNLIKE:g}"
    return Difference(1, 0, where)


def is_of_last_update(tag: str) -> bool:
    """Whether a metric is that of the last update, and not of all since the last line."""
    return tag in OF_LAST_UPDATE or tag.endswith("learning_rate")


# ============================================================ weights
def models(expected: Finished, found: Finished, exact: bool = False) -> Difference:
    """Compares all models that two runs have saved, each as one vector, relative to its norm."""
    ours = expected.models
    theirs = found.models
    if not ours and not theirs:
        return Difference(math.inf, 0.0, "the output folders: neither run has saved a model")
    if ours.keys() != theirs.keys():
        one_only = ours.keys() ^ theirs.keys()
        return Difference(math.inf, 0.0, f"models of one run only: {' '.join(sorted(one_only))}")
    return first_or_nearest(
        weights(weights_of(folder), weights_of(theirs[name]), name, exact)
        for name, folder in ours.items()
    )


def weights(
    expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], name: str, exact: bool
) -> Difference:
    """Returns the norm of the difference over the norm, and names the tensor that differs most."""
    bound = 0.0 if exact else WEIGHTS
    if expected.keys() != found.keys():
        return Difference(math.inf, bound, f"{name}: other tensors")
    if not expected:
        return Difference(0.0, bound, name)
    squares = {}
    norm = 0.0
    for tensor_name, tensor in expected.items():
        other = found[tensor_name]
        if tensor.shape != other.shape:
            return Difference(math.inf, bound, f"{name}: another shape of {tensor_name}")
        squares[tensor_name] = float((tensor.double() - other.double()).square().sum())
        norm += float(tensor.double().square().sum())
    most = max(squares, key=squares.get)
    measured = math.sqrt(sum(squares.values()) / norm) if norm else 0.0
    if math.isnan(measured):
        measured = math.inf
    return Difference(measured, bound, f"{name}, most in {most}")
