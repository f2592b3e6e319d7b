"""Parameter groups."""

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float, **settings) -> list[dict]:
    """Parameter groups with weight decay on matrices only, as is usual: not on biases and norms."""
    groups = [{"params": [], "weight_decay": decay, **settings} for decay in (weight_decay, 0.0)]
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        groups[len(getattr(p, "ds_shape", p.shape)) < 2]["params"].append(
            p
        )  # ZeRO-3 hides the shape
    return [group for group in groups if group["params"]]
