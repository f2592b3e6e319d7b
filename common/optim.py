"""Parameter groups, AdamW, and the schedule of the learning rate."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from common.progress import share_of


def parameter_groups(model: nn.Module, args, **settings) -> list[dict]:
    """Returns parameter groups with weight decay on matrices only, not on biases and norms.

    Args:
        settings: further settings of all groups, such as `lr`.
    """
    matrices = {"params": [], "weight_decay": args.weight_decay, **settings}
    vectors = {"params": [], "weight_decay": 0.0, **settings}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        path, _, own_name = name.rpartition(".")
        owner = model.get_submodule(path)
        group = matrices if is_matrix(parameter, own_name, owner) else vectors
        group["params"].append(parameter)
    return [group for group in (matrices, vectors) if group["params"]]


def is_matrix(parameter: nn.Parameter, name: str, owner: nn.Module) -> bool:
    """Whether weight decay applies to a parameter. `name` is its name in its module, `owner`.

    Biases of experts, norms of heads and rates of state-space models also have two dimensions.
    """
    shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties the parameter
    if not isinstance(owner, nn.Linear):
        shape = [size for size in shape if size > 1]  # RWKV's vectors have leading ones
    is_norm = "norm" in type(owner).__name__.lower()
    return len(shape) >= 2 and "bias" not in name and name != "A_log" and not is_norm


def make_optimizer(accelerator, groups: list[dict], args) -> torch.optim.Optimizer:
    """Returns AdamW for the groups, fused on a GPU, which is faster.

    With torch's loss scaler for fp16 the fused kernel would skip updates unnoticed by accelerate.
    """
    is_fused = accelerator.device.type != "cpu" and accelerator.scaler is None
    fused = is_fused or None  # None: torch's default
    return torch.optim.AdamW(groups, lr=args.learning_rate, eps=args.adam_epsilon, fused=fused)


def warmup_updates(args, total_updates: int) -> int:
    """Returns the updates of warm-up: `--warmup_steps`; below 1, that share of all, rounded up.

    The first has a learning rate of 0, so a run of a single update has none: it could not learn.
    """
    if total_updates <= 1 or args.lr_scheduler_type == "constant":
        return 0
    if args.warmup_steps >= 1:
        return int(args.warmup_steps)
    return share_of(total_updates, args.warmup_steps)


def make_scheduler(optimizer: torch.optim.Optimizer, args, total_updates: int) -> LambdaLR:
    """Returns the schedule of the learning rates: warm-up, then `args.lr_scheduler_type`.

    The rates equal those of `transformers.get_scheduler`, whose module is slow to import. Do not
    prepare it: accelerate would step it `num_processes` times per update.
    """
    kind = args.lr_scheduler_type
    warmup = warmup_updates(args, total_updates)
    falling = max(1, total_updates - warmup)

    def share_of_peak(update: int) -> float:
        after_warmup = update - warmup
        if after_warmup < 0:
            return update / warmup
        if kind == "linear":
            return max(0, total_updates - update) / falling
        if kind == "cosine":
            return (1 + math.cos(math.pi * (after_warmup / falling))) / 2
        if kind == "inverse_sqrt":
            timescale = warmup or 10_000
            return 1 / math.sqrt((after_warmup + timescale) / timescale)
        return 1.0

    return LambdaLR(optimizer, share_of_peak)
