"""Checks promises of one recipe at once, and says of each what was measured."""

import traceback
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from contracts.proof.bench import Bench, RunFailed, Unchecked
from contracts.proof.compare import Check
from contracts.proof.promises import PROMISES, Promise


class Outcome(NamedTuple):
    """What became of a promise.

    Attributes:
        checks: what was measured.
        failure: the error that ended the checks, if one did.
        unchecked: why there are no further checks, if something is missing.
    """

    checks: list[Check]
    failure: str = ""
    unchecked: str = ""

    @property
    def is_red(self) -> bool:
        """Whether the promise is broken, as far as it was checked."""
        return bool(self.failure) or not all(check.difference.green for check in self.checks)

    def __str__(self) -> str:
        lines = [line_of(check) for check in self.checks]
        return "\n".join([*lines, *self.failure.splitlines()])


def line_of(check: Check) -> str:
    """Returns a line of what was measured, and where if it is beyond its bound."""
    difference = check.difference
    measured = f"{number(difference.measured)}, bound {number(difference.bound)}"
    if difference.green:
        return f"green  {check.what}: off by {measured}"
    return f"RED    {check.what}: off by {measured}. First in {difference.where}"


def number(value: float) -> str:
    """Returns a whole number as it is, any other with two digits."""
    if value == round(value, 0):
        return f"{value:g}"
    return f"{value:.1e}"


def judge(promise: Promise, bench: Bench) -> Outcome:
    """Checks one promise. Whatever goes wrong in its runs makes it red."""
    checks: list[Check] = []
    try:
        for check in promise(bench):
            checks.append(check)
    except Unchecked as reason:
        return Outcome(checks, unchecked=str(reason))
    except RunFailed as error:
        return Outcome(checks, failure=str(error))
    except Exception:  # such as a log line without what the contracts say
        return Outcome(checks, failure=traceback.format_exc(limit=-2).strip())
    return Outcome(checks)


class Proof:
    """Promises of one recipe, which are all checked at once, because they wait for shared runs.

    Args:
        names: the promises to check.
    """

    def __init__(self, bench: Bench, names: Iterable[str]):
        self.bench = bench
        self.threads = ThreadPoolExecutor(len(PROMISES))
        self.futures = {name: self.threads.submit(judge, PROMISES[name], bench) for name in names}

    def outcome(self, name: str) -> Outcome:
        """Waits until a promise has been checked."""
        return self.futures[name].result()

    def stop(self) -> None:
        """Kills the runs that still go on, as after Ctrl-C."""
        self.bench.stop()
        self.threads.shutdown(cancel_futures=True)
