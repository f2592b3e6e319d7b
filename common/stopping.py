"""What ends a run before its last update: values that are not finite, skips, signals."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from accelerate import Accelerator

from common import display, errors, refuse
from common.progress import Progress

MAX_CONSECUTIVE_SKIPS = 100  # so many end a run
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Losses(NamedTuple):
    """The losses of one micro-batch."""

    row_numbers: Sequence[int]  # the numbers of its rows in the data file
    values: torch.Tensor  # `[rows, ...]`
    weights: torch.Tensor  # of the same shape, 0 for what counts nowhere


def check_finite(
    progress: Progress,
    losses: Sequence[Losses],
    tensors: dict[str, torch.Tensor] | None = None,
) -> None:
    """Stops a run whose losses are not finite: unlike with fp16 gradients, no scale would help.

    Args:
        losses: of each micro-batch.
        tensors: what the losses come from: the message names those that are not finite.
    """
    parts = []
    for rows, values, weights in losses:
        parts.append((values.isfinite() | (weights == 0)).reshape(len(rows), -1).all(1))
    is_finite = torch.cat(parts)
    if is_finite.all():
        return
    all_rows = [row for rows, *_ in losses for row in rows]
    bad_rows = [str(row) for row, good in zip(all_rows, is_finite.tolist()) if not good]
    named = [name for name, tensor in (tensors or {}).items() if not tensor.isfinite().all()]
    raise FloatingPointError(
        f"update {progress.global_step + 1} (updates_seen {progress.updates_seen}) is not finite, "
        f"because of data rows {', '.join(bad_rows)}. Nothing was updated. "
        f"Not finite: {', '.join(named) or 'the loss'}. "
        "Look at these rows; lower --learning_rate if the loss had grown; "
        "fp16 activations overflow where bf16's do not."
    )


def check_skips(progress: Progress, loss_scale: float | None) -> None:
    """Warns of an update that the engine skipped, and ends a run that does nothing but skip."""
    why = "its gradients are not finite"
    if loss_scale:  # else DeepSpeed in bf16 or fp32
        why += f" at loss scale {loss_scale:g}"
    if progress.consecutive_skips < MAX_CONSECUTIVE_SKIPS:
        display.write(f"WARNING: update {progress.updates_seen} was skipped: {why}")
        return
    refuse(
        f"update {progress.global_step + 1} was skipped {MAX_CONSECUTIVE_SKIPS} times in a row: "
        f"{why}. Lower --learning_rate if the loss had grown; see docs/fp16.md"
    )


class Signals:
    """SIGTERM, SIGINT and SIGUSR1, which end a run after its update."""

    def __init__(self) -> None:
        self.number = 0  # of the signal that came; 0 if none did
        for number in SIGNALS:
            signal.signal(number, self.handle)
        # What comes during a fork waits until after it.
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS),
            after_in_child=reset_signals,
        )

    def handle(self, number: int, _frame) -> None:
        """Takes note of a signal, and says so."""
        if not self.number and os.environ.get("RANK", "0") == "0":
            name = signal.Signals(number).name
            os.write(2, f"\n{name}: ends after this update, and saves\n".encode())
        self.number = number

    def of_any(self, accelerator: Accelerator) -> int:
        """Returns the signal that any process got, 0 if none did. All processes must call it."""
        number = torch.tensor(self.number, device=accelerator.device)
        return int(accelerator.reduce(number, "max"))


def end(accelerator: Accelerator, number: int, message: str) -> NoReturn:
    """Ends a run that a signal stopped, and says where it is. All processes must call it."""
    if accelerator.is_main_process:
        message = f"stopped by {signal.Signals(number).name} {message}"
        print(message, flush=True)
        errors.repeat(message)
    sys.exit(128 + number)


def reset_signals() -> None:
    """Lets SIGTERM end what a reward function forks; with the run's handler, no pool would end.

    Ctrl-C reaches it, too, and is ignored: the update still needs it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
