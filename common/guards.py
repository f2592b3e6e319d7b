"""Stops runs that cannot go on: values are not finite, or skipped updates do not end."""

import sys
from collections.abc import Sequence

import torch

from common import distributed
from common.progress import Progress

MANY = 100  # consecutive skips that end a run


def check_finite(
    progress: Progress,
    losses: Sequence[tuple[Sequence[int], torch.Tensor, torch.Tensor]],
    tensors: dict[str, torch.Tensor] | None = None,
) -> None:
    """Stops a run whose losses, or what they come from, are not finite: no loss scale cures that.

    An overflow of fp16 gradients is something else: the engine skips that update.

    Args:
        losses: of each micro-batch: the numbers of its rows in the data file; `[rows, ...]`; and
            weights of the same shape, 0 for what counts nowhere.
        tensors: what the losses come from: the message names those that are not finite.
    """
    rows_of_all = [row for rows, *_ in losses for row in rows]
    parts = [
        (torch.isfinite(values) | (weights == 0)).reshape(len(rows), -1).all(1)
        for rows, values, weights in losses
    ]
    is_finite = torch.cat(parts)
    if is_finite.all():
        return
    bad_rows = [str(row) for row, good in zip(rows_of_all, is_finite.tolist()) if not good]
    named = [name for name, tensor in (tensors or {}).items() if not tensor.isfinite().all()]
    raise FloatingPointError(
        f"update {progress.global_step + 1} (updates_seen {progress.updates_seen}) is not finite, "
        f"because of data rows {', '.join(bad_rows)}. Nothing was updated. "
        f"Not finite: {', '.join(named) or 'the loss'}. "
        "Look at these rows; lower --learning_rate if the loss had grown; "
        "fp16 activations overflow where bf16's do not."
    )


def check_skips(accelerator, progress: Progress, loss_scale: float | None) -> None:
    """Warns of an update that the engine skipped, and ends a run that only skips.

    In fp16 its gradients overflowed. DeepSpeed also skips updates in bf16 and fp32, where there is
    no loss scale.
    """
    why = "its gradients are not finite"
    if loss_scale:
        why += f" at loss scale {loss_scale:g}"
    if progress.consecutive_skips < MANY:
        distributed.warn(accelerator, f"update {progress.updates_seen} was skipped: {why}")
        return
    sys.exit(
        f"update {progress.global_step + 1} was skipped {MANY} times in a row: {why}. "
        "Lower --learning_rate if the loss had grown; see docs/fp16.md"
    )
