"""Parameter groups, AdamW and Muon, the schedule and its words, step counts held at zero."""

import sys
from collections.abc import Collection

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from common import counted, engine
from common.progress import share_of


def parameter_groups(model: nn.Module, args, **settings) -> list[dict]:
    """Returns parameter groups with weight decay on matrices only, not on biases and norms.

    With `--optimizer muon` the weights of hidden layers are a group with `adjust_lr_fn`. They are
    told by their type: output layers and score heads have types of their own.

    Args:
        args: needs `weight_decay optimizer`.
        settings: further settings of all groups, such as `lr`.
    """
    hidden = []
    matrices = []
    vectors = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        path, _, own_name = name.rpartition(".")
        owner = model.get_submodule(path)
        is_hidden = type(owner) in (nn.Linear, Conv1D) and "lora_" not in path
        if not is_matrix(parameter, own_name, owner):
            vectors.append(parameter)
        elif args.optimizer == "muon" and is_hidden:
            hidden.append(parameter)
        else:
            matrices.append(parameter)
    decays = {"weight_decay": args.weight_decay, **settings}
    groups = [
        {"params": matrices, **decays},
        {"params": vectors, "weight_decay": 0.0, **settings},
        # Updates as large as AdamW's, for AdamW's learning rate and weight decay.
        {"params": hidden, "adjust_lr_fn": "match_rms_adamw", **decays},
    ]
    return [group for group in groups if group["params"]]


def is_matrix(parameter: nn.Parameter, name: str, owner: nn.Module) -> bool:
    """Whether a parameter is one that weight decay holds small.

    The biases of experts and the norms of heads have two dimensions, too: those of the experts or
    heads, and their own. So has the logarithm of the decay rates of a state-space model.

    Args:
        name: its name in `owner`, the module that it belongs to.
    """
    shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties the parameter
    if not isinstance(owner, nn.Linear):
        shape = [size for size in shape if size > 1]  # RWKV's vectors have leading ones
    is_norm = "norm" in type(owner).__name__.lower()
    return len(shape) >= 2 and "bias" not in name and name != "A_log" and not is_norm


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon for the groups that have `adjust_lr_fn`, and AdamW for the others, as one."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW):
        super().__init__(adamw.param_groups + muon.param_groups, {})
        self.muon = muon
        self.adamw = adamw

    def step(self, closure=None) -> None:
        # Loading a checkpoint replaces groups and state.
        self.muon.state = self.adamw.state = self.state
        self.muon.param_groups = [group for group in self.param_groups if "adjust_lr_fn" in group]
        self.adamw.param_groups = [group for group in self.param_groups if "betas" in group]
        self.muon.step()
        self.adamw.step()


def build(accelerator, groups: list[dict], args) -> torch.optim.Optimizer:
    """Returns the optimizer. AdamW is fused on a GPU: one kernel reads and writes all at once.

    Not with torch's own loss scaler for fp16. It would call a fused optimizer in each update and
    let the kernel skip, and accelerate would not notice that an update was skipped. And not on a
    CPU, where runs keep the rounding that they had, so that stored values and resumed runs agree.

    Args:
        groups: of `parameter_groups`.
        args: needs `optimizer learning_rate adam_epsilon`.
    """
    fused = None  # torch's default, which is not fused
    if accelerator.device.type != "cpu" and accelerator.scaler is None:
        fused = True
    for_muon = [group for group in groups if "adjust_lr_fn" in group]
    others = [group for group in groups if "adjust_lr_fn" not in group]
    adamw = torch.optim.AdamW(others, lr=args.learning_rate, eps=args.adam_epsilon, fused=fused)
    if args.optimizer == "adamw":
        return adamw
    if engine.is_sharded(accelerator):
        sys.exit(
            "--optimizer muon: DeepSpeed and FSDP2 give an optimizer pieces of matrices, and Muon "
            "needs them whole: launch with accelerate_configs/ddp.yaml, or use adamw"
        )
    if not for_muon:
        sys.exit("--optimizer muon: no hidden layer is trained; AdamW steps adapters and heads")
    return MuonAndAdamW(torch.optim.Muon(for_muon, lr=args.learning_rate), adamw)


def warmup_updates(warmup_steps: float, total_updates: int) -> int:
    """The updates of warm-up: `warmup_steps`, or, below 1, that share of all, rounded up.

    The first update of a warm-up has a learning rate of 0. So a run of a single update has none, or
    it would learn nothing.
    """
    if total_updates <= 1:
        return 0
    if warmup_steps >= 1:
        return int(warmup_steps)
    return share_of(total_updates, warmup_steps)


def scheduler(optimizer: torch.optim.Optimizer, args, total_updates: int):
    """Returns the schedule of the learning rates, a `LambdaLR`.

    It is not prepared: accelerate would step it `num_processes` times per update.

    Args:
        args: needs `lr_scheduler_type warmup_steps`.
    """
    from transformers import get_scheduler  # slow to import

    warmup = warmup_updates(args.warmup_steps, total_updates)
    return get_scheduler(args.lr_scheduler_type, optimizer, warmup, total_updates)


def describe_schedule(args, total_updates: int, scheduler) -> str:
    """Returns the peak learning rates and their schedule in one line."""
    groups = scheduler.optimizer.param_groups
    rates = {group.get("name", ""): rate for group, rate in zip(groups, scheduler.base_lrs)}
    rates_by_name = ", ".join(f"{name} {rate:g}".strip() for name, rate in rates.items())
    updates = counted(total_updates, "update")
    line = f"learning rate {rates_by_name}; {args.lr_scheduler_type}, {updates}"
    if args.lr_scheduler_type == "constant":
        return f"{line} without warm-up"
    if total_updates == 1 and args.warmup_steps > 0:
        return f"{line} without warm-up, which would take the only one"
    return f"{line}, {warmup_updates(args.warmup_steps, total_updates)} of them warm-up"


def set_learning_rates(optimizer, scheduler, held: Collection[str]) -> dict[str, float]:
    """Gives each parameter group its scheduled learning rate, or zero if it is held still.

    For recipes whose groups have names. `prepare.for_training` sees to it that the step counts of
    such groups can be held, too.

    Args:
        held: the names of the groups that do not learn in this update.

    Returns:
        The learning rate of each group by its name.
    """
    for group, learning_rate in zip(optimizer.param_groups, scheduler.get_last_lr()):
        group["learns"] = group["name"] not in held
        # At a rate of zero, weight decay moves nothing either.
        group["lr"] = learning_rate if group["learns"] else 0.0
    return {group["name"]: group["lr"] for group in optimizer.param_groups}


def hold_step_counts(optimizer: torch.optim.Optimizer, *_) -> None:
    """Keeps Adam's step count at zero in parameter groups whose `learns` is false.

    A hook after the optimizer's step, see `set_learning_rates`. The gradients of such a group are
    zero, and so are its moments. If its count went on, Adam would not correct the bias of the
    moments when the group begins to learn.
    """
    for group in optimizer.param_groups:
        if group.get("learns", True):
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if "step" in state:
                state["step"] = state["step"] * 0
