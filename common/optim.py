"""Parameter groups, the warm-up, the schedule in words, and step counts that are held at zero."""

import math

import torch
from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float, **settings) -> list[dict]:
    """Returns parameter groups with weight decay on matrices only, not on biases and norms.

    Args:
        settings: further settings of both groups, such as `lr`.
    """
    matrices = []
    vectors = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties the parameter
        if len(shape) < 2:
            vectors.append(parameter)
        else:
            matrices.append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay, **settings},
        {"params": vectors, "weight_decay": 0.0, **settings},
    ]
    return [group for group in groups if group["params"]]


def warmup_updates(warmup_steps: float, total_updates: int) -> int:
    """The updates of warm-up: `warmup_steps`, or, below 1, that share of all, rounded up.

    The first update of a warm-up has a learning rate of 0. So a run of a single update has none, or
    it would learn nothing.
    """
    if total_updates <= 1:
        return 0
    if warmup_steps >= 1:
        return int(warmup_steps)
    return math.ceil(warmup_steps * total_updates)


def describe_schedule(optimizer: torch.optim.Optimizer, args, total_updates: int) -> str:
    """Returns the peak learning rates and their schedule in one line.

    Args:
        optimizer: the one that `get_scheduler` was given.
        args: needs `lr_scheduler_type warmup_steps`.
    """
    rates = {group.get("name", ""): group["initial_lr"] for group in optimizer.param_groups}
    rates_by_name = ", ".join(f"{name} {rate:g}".strip() for name, rate in rates.items())
    updates = "1 update" if total_updates == 1 else f"{total_updates} updates"
    line = f"learning rate {rates_by_name}; {args.lr_scheduler_type}, {updates}"
    if args.lr_scheduler_type == "constant":
        return f"{line} without warm-up"
    if total_updates == 1 and args.warmup_steps > 0:
        return f"{line} without warm-up, which would take the only one"
    return f"{line}, {warmup_updates(args.warmup_steps, total_updates)} of them warm-up"


def hold_step_counts(optimizer: torch.optim.Optimizer, *_) -> None:
    """Keeps Adam's step count at zero in parameter groups whose `learns` is false.

    Register it with `register_step_post_hook`. The gradients of such a group are zero, and so are
    its moments. If its count went on, Adam would not correct the bias of the moments when the group
    begins to learn.
    """
    for group in optimizer.param_groups:
        if group["learns"]:
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if "step" in state:
                state["step"] = state["step"] * 0
