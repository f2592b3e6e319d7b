"""Limits the time and the memory that a chat template takes: anyone may have written it."""

import contextlib
import functools
import resource
import signal
from pathlib import Path
from typing import NoReturn

# What a template may take for one conversation, a thousand times as much as those that people use.
MOST_SECONDS = 5
MOST_BYTES = 2**30


class TooMuch(SystemExit):
    """A chat template takes too much time or memory; the message says so.

    It is no `Exception`, because the template did not refuse what it was given.
    """


@contextlib.contextmanager
def time_limit():
    """Limits how long a template may compute.

    The time is that of the CPU, so a machine that is busy or asleep changes nothing. The block must
    run in the main thread, which alone takes signals.

    Raises:
        TooMuch: the block takes more than `MOST_SECONDS`.
    """
    take_alarms()
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@functools.cache
def take_alarms() -> None:
    """Lets the alarm of `time_limit` interrupt this process; no library of ours uses SIGVTALRM."""
    signal.signal(signal.SIGVTALRM, interrupt)


def interrupt(*_) -> NoReturn:
    raise TooMuch(f"the chat template computes for more than {MOST_SECONDS} seconds")


@contextlib.contextmanager
def memory_limit():
    """Limits how much memory a template may take, on Linux.

    To set the limit takes as long as to render, so it is set only for a template's first texts.

    Raises:
        TooMuch: the block takes more than `MOST_BYTES`.
    """
    counted = Path("/proc/self/statm")
    if not counted.exists():
        yield
        return
    held = int(counted.read_text().split()[5]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = held + MOST_BYTES
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    except MemoryError:
        raise TooMuch(
            f"the chat template takes more than {MOST_BYTES >> 20} MiB of memory"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
