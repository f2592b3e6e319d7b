"""Stops runs that cannot go on: values are not finite, or skipped updates do not end."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from common import errors
from common.progress import RECENT_UPDATES, Progress


class RowLosses(NamedTuple):
    """The losses of a micro-batch.

    Attributes:
        rows: the numbers of the rows in the data file.
        losses: `[rows, ...]`.
        weights: of the same shape, 0 for what counts nowhere.
    """

    rows: Sequence[int]
    losses: torch.Tensor
    weights: torch.Tensor


def check_finite(
    progress: Progress,
    losses: Sequence[tuple[Sequence[int], torch.Tensor, torch.Tensor]],
    tensors: dict[str, torch.Tensor] | None = None,
) -> None:
    """Stops a run whose losses, or what they come from, are not finite: no loss scale cures that.

    An overflow of fp16 gradients is something else: the engine skips that update.

    Args:
        losses: rows, losses and weights of each micro-batch, as in `RowLosses`.
        tensors: what the losses of the last micro-batch come from: the message names those that
            are not finite.

    Raises:
        FloatingPointError: naming the update and the rows.
    """
    parts = [RowLosses(*part) for part in losses]
    finite = [finite_rows(part) for part in parts]
    if torch.cat(finite).all():
        return
    bad_rows = []
    for part, part_is_finite in zip(parts, finite):
        for row, row_is_finite in zip(part.rows, part_is_finite.tolist()):
            if not row_is_finite:
                bad_rows.append(str(row))
    named = [name for name, tensor in (tensors or {}).items() if not tensor.isfinite().all()]
    raise FloatingPointError(
        f"update {progress.global_step + 1} (updates_seen {progress.updates_seen}) is not finite, "
        f"because of data rows {', '.join(bad_rows)}. Nothing was updated. "
        f"Not finite: {', '.join(named) or 'the loss'}. "
        "Look at these rows; lower --learning_rate if the loss had grown; "
        "fp16 activations overflow where bf16's do not."
    )


def finite_rows(part: RowLosses) -> torch.Tensor:
    """Returns bool `[rows]`: whether all losses of a row that have a weight are finite."""
    finite = torch.isfinite(part.losses) | (part.weights == 0)
    return finite.reshape(len(part.rows), -1).all(1)


def check_gradient(grad_norm: float, progress: Progress) -> None:
    """Stops a run after an update that was applied with a gradient that is not finite.

    Raises:
        FloatingPointError: the losses were finite, but now the weights are not.
    """
    if not math.isfinite(grad_norm):
        raise FloatingPointError(
            f"the gradient of update {progress.global_step} is not finite though its loss is: "
            "the weights are lost. Lower --learning_rate, or resume from a checkpoint."
        )


class SkipWatch:
    """Watches the updates that the engine skips because their gradients are not finite.

    In fp16 they overflowed. DeepSpeed also skips them in bf16 and fp32, without a loss scale.
    """

    MANY = 100  # consecutive skips that end a run at any loss scale
    A_TENTH = RECENT_UPDATES // 10  # recent skips up to this number need no warning

    def __init__(self, accelerator, progress: Progress):
        self.accelerator = accelerator
        self.progress = progress
        self.last_warning = -RECENT_UPDATES  # `updates_seen` at the last warning

    def update_skipped(self, loss_scale: float | None) -> str | None:
        """Ends a run that does nothing but skip. Returns a warning to print, or None.

        A second consecutive skip ends the run if the loss scale is at its smallest and cannot fall
        further, or if there is none. Otherwise the hundredth does. A warning is due if more than a
        tenth of the recent updates were skipped, and again only after as many updates.

        Raises:
            SystemExit: saying what helps, on the main process.
        """
        progress = self.progress
        smallest = self.smallest_loss_scale()
        can_fall = bool(loss_scale) and loss_scale > smallest
        why = "their gradients are not finite"
        if loss_scale:
            why += f" at loss scale {loss_scale:g}, the smallest being {smallest:g}"
        why += ": lower --learning_rate if the loss had grown; see docs/fp16.md"
        if progress.consecutive_skips >= (self.MANY if can_fall else 2):
            times = f"{progress.consecutive_skips} updates in a row were skipped, {why}"
            message = f"update {progress.global_step + 1}: {times}"
            errors.tell_launcher(message)
            sys.exit(message if self.accelerator.is_main_process else 1)
        recent = len(progress.recent_skips)
        warned_recently = progress.updates_seen <= self.last_warning + RECENT_UPDATES
        if recent <= self.A_TENTH or warned_recently or not self.accelerator.is_main_process:
            return None
        self.last_warning = progress.updates_seen
        return f"WARNING: {recent} of the last {RECENT_UPDATES} updates were skipped, {why}"

    def smallest_loss_scale(self) -> float:
        """Returns DeepSpeed's `min_loss_scale`; 0 for torch's own scaler, which has none."""
        plugin = self.accelerator.state.deepspeed_plugin
        if plugin is None:
            return 0.0
        return plugin.deepspeed_config.get("fp16", {}).get("min_loss_scale", 1)
