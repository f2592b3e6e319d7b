"""What the engine does by itself, made visible: its stage, the scale of the loss, gradient norms, overflows."""

import os
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from tqdm import tqdm


def zero_stage(accelerator) -> int:
    """The ZeRO stage; 0 without DeepSpeed."""
    return (
        plugin.deepspeed_config["zero_optimization"]["stage"]
        if (plugin := accelerator.state.deepspeed_plugin)
        else 0
    )


def begin_window(accelerator, prepared: nn.Module, micro_batches: list) -> int:
    """Makes the engine's next update that of these micro-batches of each process; returns by what it divides their summed losses."""
    accelerator.step, accelerator.gradient_accumulation_steps = 0, len(micro_batches)
    if zero_stage(accelerator):
        prepared.set_train_batch_size(
            len(micro_batches)
            * prepared.train_micro_batch_size_per_gpu()
            * accelerator.num_processes
        )
    return len(micro_batches) * accelerator.num_processes


def hold_growth() -> None:
    """Lets DeepSpeed's loss scale grow between two windows. DeepSpeed 0.19.8 does so within an update, whose gradients it then divides
    by twice the scale that they were multiplied by: the update is halved, unless clipping decides its size.

    At the smallest scale it does not raise here: `Metrics.window_done` ends the run, and says where.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    def update_scale(scaler, overflow: bool) -> None:
        before, scaler.raise_error_at_min_scale = scaler.cur_scale, False
        update(scaler, overflow)
        if scaler.cur_scale > before:
            scaler.grown, scaler.cur_scale = scaler.cur_scale, before

    def scale_loss(scaler, loss: torch.Tensor) -> torch.Tensor:
        scaler.cur_scale = scaler.__dict__.pop("grown", scaler.cur_scale)
        return loss * scaler.cur_scale

    update = DynamicLossScaler.update_scale
    DynamicLossScaler.update_scale, DynamicLossScaler.scale_loss = update_scale, scale_loss


def loss_scale(accelerator, prepared: nn.Module) -> float | None:
    """The current scale of the loss under fp16; None where there is none."""
    if zero_stage(accelerator) and accelerator.mixed_precision == "fp16":
        return getattr(scaler := prepared.optimizer.loss_scaler, "grown", scaler.cur_scale)
    return accelerator.scaler.get_scale() if accelerator.scaler is not None else None


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


def innermost(optimizer) -> torch.optim.Optimizer:
    """The optimizer that updates: accelerate and DeepSpeed wrap it, and where it is offloaded to the CPU they put another in its place."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def record_group_norms(accelerator, optimizer):
    """Lets the gradient norm of each parameter group `name` be known in the update just made: the function returned gives them, up to
    one common factor. Call this after `prepare`, and it after every `optimizer.step()` that updates, on all ranks.

    The gradients are those that the optimizer itself is given: DeepSpeed has no others left by then, and gives each process a part.
    """
    squares = {group["name"]: 0.0 for group in optimizer.param_groups}

    def add(optimizer, *_):
        for group in optimizer.param_groups:
            grads = [
                getattr(p.grad, "_local_tensor", p.grad)
                for p in group["params"]
                if p.grad is not None
            ]
            squares[group["name"]] += float(nn.utils.get_total_norm(grads)) ** 2

    def group_norms() -> dict[str, float]:
        table = torch.tensor(
            list(squares.values()), device=accelerator.device
        )  # of this process's shards, or (DDP) of all
        squares.update(dict.fromkeys(squares, 0.0))
        return dict(zip(squares, accelerator.reduce(table).sqrt().tolist()))

    innermost(optimizer).register_step_pre_hook(add)
    return group_norms
