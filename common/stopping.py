"""Signals that end a run after its update."""

import os
import signal

import torch
from accelerate import Accelerator

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Signals:
    """SIGTERM, SIGINT and SIGUSR1, which end a run after its update.

    Attributes:
        number: of the signal that came; 0 if none did.
    """

    def __init__(self) -> None:
        self.number = 0
        for number in SIGNALS:
            signal.signal(number, self.handle)
        # What comes during a fork waits until after it.
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS),
            after_in_child=become_ordinary,
        )

    def handle(self, number: int, _frame) -> None:
        """Takes note of a signal."""
        self.number = number

    def of_any(self, accelerator: Accelerator) -> int:
        """Returns the signal that any process got, 0 if none did. All processes must call it."""
        number = torch.tensor(self.number, device=accelerator.device)
        return int(accelerator.reduce(number, "max"))


def become_ordinary() -> None:
    """Lets SIGTERM end what a reward function forks; with the run's handler, no pool would end.

    Ctrl-C reaches it, too, and is ignored: the update still needs it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
