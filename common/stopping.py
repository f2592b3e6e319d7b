"""Signals that end a run after its update, and a launcher that is gone: what a loop asks about."""

import functools
import os
import signal
import time

import torch
from accelerate import Accelerator

from common import launch

# Each ends a run after its update.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Stands for a launcher that is gone. Its number is the smallest, so a signal wins over it.
LAUNCHER_GONE = signal.SIGHUP
# A launcher passes on a signal that its processes may have received already. Only what comes more
# than this many seconds after the first one is a second signal.
SAME_SIGNAL_SECONDS = 3


class Signals:
    """SIGTERM, SIGINT or SIGUSR1, which end a run after its update; a second one does at once.

    Attributes:
        number: of the signal that came; 0 if none did.
    """

    def __init__(self) -> None:
        self.number = 0
        self.first_came_at: float | None = None
        for number in SIGNALS:
            signal.signal(number, self.handle)
        give_forks_their_own_signals()

    def handle(self, number: int, _frame) -> None:
        """Takes note of a signal."""
        now = time.monotonic()
        if self.first_came_at is None:
            self.first_came_at = now
        elif now - self.first_came_at > SAME_SIGNAL_SECONDS:
            os._exit(128 + number)
        self.number = number

    def of_any(self, accelerator: Accelerator) -> int:
        """Returns the signal that any process got, 0 if none did.

        It is `LAUNCHER_GONE` if a process has lost its launcher. The same on every process. All
        processes must call it.
        """
        mine = self.number
        if mine == 0 and launch.launcher_is_gone():
            mine = LAUNCHER_GONE
        number = torch.tensor(int(mine), device=accelerator.device)
        return int(accelerator.reduce(number, "max"))


@functools.cache
def give_forks_their_own_signals() -> None:
    """Keeps the run's handler from the processes that a reward function forks from now on.

    SIGTERM and SIGUSR1 end them at once. They ignore Ctrl-C, which reaches them, too: the update
    still needs them. They must not inherit the run's handler, because Python runs a handler only
    between two of its instructions: a worker that got SIGTERM just before it waits for a lock would
    never end, and neither would its pool. A signal that comes during the fork waits until the fork
    is over.
    """

    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def become_ordinary() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=become_ordinary)


def cause_of(number: int) -> str:
    """Returns in words why a run stops, such as `SIGTERM`."""
    if number == LAUNCHER_GONE:
        return "the end of its launcher"
    return signal.Signals(number).name
