"""How far two runs may be from each other: their log lines and their weights.

What is further ends the test, and says what, at which update, by how much, and the bound.
"""

import math

import pytest
import torch

from contracts.proof.bench import Finished, weights_of

# The bounds of the contracts, see docs/forking.md.
LOSS = 1e-6
LATER_LOSS = 3e-6  # of weights that may already differ by 1e-5
METRIC = 1e-5
WEIGHTS = 1e-5
LEARNING_RATE = 1e-9
# Gradients that sum up to a smaller norm are themselves larger, and round as larger ones do.
SMALL_NORM = 1e-2
# What must differ, such as another seed's lines, differs by this much.
UNLIKE = 1e-5
# These are counted, not computed by a model, so nothing rounds them.
COUNTERS = {"samples", "tokens", "skipped_steps", "global_step"}
EXACT = {*COUNTERS, "epoch", "loss_scale"}


def within(what: str, apart: float, bound: float) -> None:
    """Ends the test where two values are further apart than a bound, or one is not a number."""
    if not apart <= bound:
        pytest.fail(f"{what}: {apart:.2g} apart, bound {bound:.2g}", pytrace=False)


# ============================================================ log lines


def same_lines(
    what: str,
    expected: list[dict],
    found: list[dict],
    only: set[str] | None = None,
    exact: bool = False,
) -> None:
    """Compares log lines, in their order.

    Args:
        only: the tags to compare; default all.
        exact: bit for bit; else up to the bounds of the contracts.
    """
    for line, other in zip(expected, found):
        tags = {**line, **other}.keys() if only is None else {"global_step", *only}
        for tag in tags & {**line, **other}.keys():
            where = f"{what}: {tag}, update {line['global_step']}"
            if tag not in line or tag not in other:
                pytest.fail(f"{where}: logged by one of them only", pytrace=False)
            bound = 0.0 if exact else bound_of(tag, line)
            if line[tag] != other[tag]:
                within(where, abs(line[tag] - other[tag]), bound)
    if len(expected) != len(found):
        pytest.fail(f"{what}: {len(found)} log lines, expected {len(expected)}", pytrace=False)


def bound_of(tag: str, line: dict) -> float:
    """Returns how much a metric may differ between two ways to compute the same update."""
    value = abs(line[tag])
    if tag in EXACT:
        return 0.0
    if tag.endswith("learning_rate"):
        return LEARNING_RATE * value
    if tag == "grad_norm":
        return METRIC * max(value, SMALL_NORM)
    if tag.endswith("loss"):
        return (LOSS if line["global_step"] < 2 else LATER_LOSS) * max(1.0, value)
    if tag == "sampling/sampling_logp_difference/max":
        return 10 * METRIC  # all rounding: that of the least probable token's log-prob
    if tag.endswith("accuracies") and abs(line[tag.replace("accuracies", "margins")]) < 1e-4:
        return 1.0  # the signs of margins of a policy that is still its reference: all rounding
    sums = [abs(other) for name, other in line.items() if "logps" in name]
    return METRIC * max([1.0, value, *sums])


def unlike(what: str, lines: list[dict], others: list[dict]) -> None:
    """Ends the test where no metric of log lines differs, as one must."""
    apart = [
        abs(line[tag] - other[tag]) / max(1.0, abs(line[tag]))
        for line, other in zip(lines, others)
        for tag in line.keys() & other.keys() - EXACT
        if not tag.endswith("learning_rate")
    ]
    most = max(apart, default=0.0)
    if most < UNLIKE:
        pytest.fail(f"{what}: all metrics are alike: {most:.2g}, bound {UNLIKE}", pytrace=False)


# ============================================================ weights


def same_models(what: str, expected: Finished, found: Finished, exact: bool = False) -> None:
    """Compares all models that two runs have saved."""
    ours, theirs = expected.models, found.models
    assert ours and ours.keys() == theirs.keys(), f"{what}: other models"
    for name in ours:
        same_weights(f"{what}: {name}", weights_of(ours[name]), weights_of(theirs[name]), exact)


def same_weights(
    what: str,
    expected: dict[str, torch.Tensor],
    found: dict[str, torch.Tensor],
    exact: bool = False,
) -> None:
    """Compares tensors as one vector, relative to its norm, and names the one that differs most."""
    shapes = [{name: part.shape for name, part in parts.items()} for parts in (expected, found)]
    assert shapes[0] and shapes[0] == shapes[1], f"{what}: other tensors"
    square = lambda part: float(part.double().square().sum())
    apart = {name: square(part.double() - found[name].double()) for name, part in expected.items()}
    norm = sum(map(square, expected.values()))
    most = max(apart, key=apart.get)
    measured = math.sqrt(sum(apart.values()) / norm)
    within(f"{what}, most in {most}", measured, 0.0 if exact else WEIGHTS)
