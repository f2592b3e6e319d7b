"""Signals that end a run after its update, and a launcher that is gone: what a loop asks about."""

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
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS),
            after_in_child=become_ordinary,
        )

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


def become_ordinary() -> None:
    """Lets SIGTERM end what a reward function forks; with the run's handler, no pool would end.

    Ctrl-C reaches it, too, and is ignored: the update still needs it. What comes during the fork
    waits until here.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def cause_of(number: int) -> str:
    """Returns in words why a run stops, such as `SIGTERM`."""
    return "the end of its launcher" if number == LAUNCHER_GONE else signal.Signals(number).name
