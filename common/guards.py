"""Stops runs that cannot go on: values are not finite, or skipped updates do not end."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

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
    output_dir: Path,
    losses: Sequence[tuple[Sequence[int], torch.Tensor, torch.Tensor]],
    tensors: dict[str, torch.Tensor] | None = None,
) -> None:
    """Stops a run whose losses, or what they come from, are not finite: no loss scale cures that.

    An overflow of fp16 gradients is something else: the engine skips that update.

    Args:
        losses: rows, losses and weights of each micro-batch, as in `RowLosses`.
        tensors: more tensors of the last micro-batch. If the run stops, their statistics and those
            of the losses are written to `not_finite_<rank>.json` in the output directory.

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
    described = dict(tensors or {})
    for number, part in enumerate(parts):
        described[f"loss of micro-batch {number}"] = part.losses
    stop(progress, output_dir, bad_rows, described)


def stop(
    progress: Progress, output_dir: Path, bad_rows: list[str], tensors: dict[str, torch.Tensor]
) -> None:
    """Writes a report and ends a run, because of rows that are not finite; see `check_finite`."""
    report = {
        "global_step": progress.global_step + 1,
        "updates_seen": progress.updates_seen,
        "rows": bad_rows,
        "tensors": {name: statistics(tensor) for name, tensor in tensors.items()},
    }
    file = output_dir / f"not_finite_{os.environ.get('RANK', 0)}.json"
    file.write_text(json.dumps(report, indent=1), encoding="utf-8")
    raise FloatingPointError(
        f"update {progress.global_step + 1} (updates_seen {progress.updates_seen}) is not finite, "
        f"because of data rows {', '.join(bad_rows)}. Nothing was updated. "
        f"Look at these rows and at {file}; lower --learning_rate if the loss had grown; "
        "fp16 activations overflow where bf16's do not."
    )


def finite_rows(part: RowLosses) -> torch.Tensor:
    """Returns bool `[rows]`: whether all losses of a row that have a weight are finite."""
    finite = torch.isfinite(part.losses) | (part.weights == 0)
    return finite.reshape(len(part.rows), -1).all(1)


def statistics(tensor: torch.Tensor) -> dict:
    """Returns the shape of a tensor, and the minimum, maximum and mean of its finite values."""
    finite = tensor[torch.isfinite(tensor)].double()
    summary = []
    if len(finite):
        summary = [finite.amin().item(), finite.amax().item(), finite.mean().item()]
    return {
        "shape": list(tensor.shape),
        "not_finite": tensor.numel() - finite.numel(),
        "min, max, mean": summary,
    }


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
        further, or if there is none. Otherwise the hundredth does.

        Raises:
            SystemExit: saying what helps, on the main process.
        """
        smallest = self.smallest_loss_scale()
        where = None
        if loss_scale:
            where = f"at loss scale {loss_scale:g}, the smallest being {smallest:g}"
        can_fall = bool(loss_scale) and loss_scale > smallest
        allowed = self.MANY if can_fall else 2
        if self.progress.consecutive_skips >= allowed:
            self.end_run(where)
        return self.warning(where)

    def end_run(self, where: str | None) -> None:
        """Ends the program, with the reason on the main process.

        Args:
            where: the loss scale in words; None without one.
        """
        update = f"update {self.progress.global_step + 1}"
        times = f"{self.progress.consecutive_skips} times in a row"
        if where:
            said = f"{update} overflowed {times}, the last time {where}. Use bf16, a lower"
        else:
            said = f"{update} had gradients that are not finite {times}. Use a lower"
        message = f"{said} --learning_rate if the loss had grown; --debug_overflow names the module"
        errors.tell_launcher(message)
        sys.exit(message if self.accelerator.is_main_process else 1)

    def warning(self, where: str | None) -> str | None:
        """Returns a warning if more than a tenth of the recent updates were skipped, else None.

        It is due again only after as many updates have passed. On the main process alone.

        Args:
            where: see `end_run`.
        """
        recent = len(self.progress.recent_skips)
        warned_recently = self.progress.updates_seen <= self.last_warning + RECENT_UPDATES
        if not self.accelerator.is_main_process or recent <= self.A_TENTH or warned_recently:
            return None
        self.last_warning = self.progress.updates_seen
        many = f"WARNING: {recent} of the last {RECENT_UPDATES} updates"
        if not where:
            return (
                f"{many} were skipped: their gradients are not finite. Use a lower --learning_rate "
                "if the loss had grown; --debug_overflow names the module."
            )
        return (
            f"{many} overflowed, the last {where}. "
            "Raise loss_scale_window if the scale grows back into the overflow, hysteresis "
            "if single updates drive it down; near min_loss_scale use bf16. See docs/fp16.md."
        )

    def smallest_loss_scale(self) -> float:
        """Returns DeepSpeed's `min_loss_scale`; 0 for torch's own scaler, which has none."""
        plugin = self.accelerator.state.deepspeed_plugin
        if plugin is None:
            return 0.0
        return plugin.deepspeed_config.get("fp16", {}).get("min_loss_scale", 1)


def watch_overflow(model: nn.Module) -> None:
    """Prints, in each process, the first tensor of a forward and backward pass that is not finite.

    It is the output of a module, its gradient, or the gradient of a weight. What overflows only in
    the sum over micro-batches or processes is not seen.
    """
    found = []

    def look(what: str, tensor: torch.Tensor) -> None:
        if found:
            return
        not_finite = ~torch.isfinite(tensor)
        if not_finite.any():
            found.append(what)
            tqdm.write(
                f"OVERFLOW in process {os.environ.get('RANK', 0)}: {what}, {tensor.dtype}, "
                f"{not_finite.sum()} of {tensor.numel()} elements"
            )

    def look_at_output(name: str, module: nn.Module, inputs, output) -> None:
        for leaf in tree_leaves(output):
            if not torch.is_tensor(leaf) or not leaf.is_floating_point():
                continue
            look(f"the output of {name}", leaf)
            if leaf.requires_grad:
                leaf.register_hook(partial(look, f"the gradient of the output of {name}"))

    def forget(*_) -> None:
        found.clear()

    model.register_forward_pre_hook(forget)
    for name, module in model.named_modules():
        module.register_forward_hook(partial(look_at_output, name or "the whole model"))
    for name, parameter in model.named_parameters():
        parameter.register_hook(partial(look, f"the gradient of {name}"))
