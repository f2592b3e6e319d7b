"""Parameter groups, the length of the warm-up, and step counts that are held at zero."""

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
    """The updates of warm-up: `warmup_steps`, or, below 1, that share of all, rounded up."""
    if warmup_steps >= 1:
        return int(warmup_steps)
    return math.ceil(warmup_steps * total_updates)


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
