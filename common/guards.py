"""Runs that cannot go on."""

import json
import os
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from common.progress import Progress


def check_finite(
    losses: list[tuple],
    progress: Progress,
    output_dir: str,
    tensors: dict[str, torch.Tensor] | None = None,
) -> None:
    """Stops a run whose loss, or what it comes from, is not a number: no loss scale cures that. An overflow of fp16 gradients is another thing: the
    engine skips that update.

    Args:
        losses: (row numbers, losses `[rows, ...]`, weights of the same shape) of each micro-batch of the window.
        tensors: of the last of them, whose statistics are written to `not_finite_<rank>.json` in `output_dir`.

    Raises:
        FloatingPointError: with the step and the rows.
    """
    finite = [
        (torch.isfinite(values) | (weights == 0)).reshape(len(rows), -1).all(1)
        for rows, values, weights in losses
    ]
    if torch.cat(finite).all():
        return
    bad = [
        str(row)
        for (rows, *_), good in zip(losses, finite)
        for row, ok in zip(rows, good.tolist())
        if not ok
    ]
    report = {
        "global_step": progress.global_step + 1,
        "window": progress.updates_seen,
        "rows": bad,
        "tensors": {},
    }
    for name, tensor in {
        **(tensors or {}),
        **{f"loss of micro-batch {i}": values for i, (_, values, _) in enumerate(losses)},
    }.items():
        good = tensor[torch.isfinite(tensor)].double()
        report["tensors"][name] = {
            "shape": list(tensor.shape),
            "not_finite": tensor.numel() - good.numel(),
            "min, max, mean": [f(good).item() for f in (torch.amin, torch.amax, torch.mean)]
            if len(good)
            else [],
        }
    file = Path(output_dir) / f"not_finite_{os.environ.get('RANK', 0)}.json"
    file.write_text(json.dumps(report, indent=1), encoding="utf-8")
    where = f"update {progress.global_step + 1} (window {progress.updates_seen}) is not finite, because of data rows {', '.join(bad)}"
    raise FloatingPointError(
        f"{where}. Nothing was updated. Look at these rows and at {file}; lower --learning_rate if the loss had grown; "
        "fp16 activations overflow where bf16's do not."
    )


def watch_overflow(model: nn.Module) -> None:
    """Prints, in each process, the first tensor of a forward and backward pass that is not finite: the output of a module, its gradient,
    or the gradient of a weight. (What overflows only in the sum over micro-batches or processes is not seen.)"""
    found = []

    def look(what: str, tensor: torch.Tensor) -> None:
        if not found and (bad := ~torch.isfinite(tensor)).any():
            found.append(what)
            tqdm.write(
                f"OVERFLOW in process {os.environ.get('RANK', 0)}: {what}, {tensor.dtype}, {bad.sum()} of {bad.numel()} elements"
            )

    def hook(name: str, module, inputs, output) -> None:
        for tensor in (
            leaf
            for leaf in tree_leaves(output)
            if torch.is_tensor(leaf) and leaf.is_floating_point()
        ):
            look(f"the output of {name}", tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(look, f"the gradient of the output of {name}"))

    model.register_forward_pre_hook(lambda *_: found.clear())
    for name, module in model.named_modules():
        module.register_forward_hook(partial(hook, name or "the whole model"))
    for name, parameter in model.named_parameters():
        parameter.register_hook(partial(look, f"the gradient of {name}"))
