"""What a loop asks of its engine."""

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule

from common import zero


def describe(accelerator: Accelerator) -> str:
    """How the run computes, in words: `DeepSpeed ZeRO-2 fp16 on cpu`."""
    kinds = {
        DistributedType.DEEPSPEED: f"DeepSpeed ZeRO-{zero.stage(accelerator)}",
        DistributedType.FSDP: "FSDP2",
    }
    kind = kinds.get(
        accelerator.distributed_type, "DDP" if accelerator.num_processes > 1 else "one process"
    )
    return (
        f"{kind} {accelerator.mixed_precision.replace('no', 'fp32')} on {accelerator.device.type}"
    )


def is_sharded(accelerator) -> bool:
    """Whether the engine may hold only a part of the state in each process, and gathers or saves it by itself."""
    return accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)


def begin_update(accelerator, prepared: nn.Module, micro_batches: list) -> int:
    """Makes the engine's next update that of these micro-batches of each process; returns by what it divides their summed losses."""
    accelerator.step, accelerator.gradient_accumulation_steps = 0, len(micro_batches)
    if zero.stage(accelerator):
        prepared.set_train_batch_size(
            len(micro_batches)
            * prepared.train_micro_batch_size_per_gpu()
            * accelerator.num_processes
        )
    return len(micro_batches) * accelerator.num_processes


def loss_scale(accelerator, prepared: nn.Module) -> float | None:
    """The current scale of the loss under fp16; None where there is none."""
    if zero.stage(accelerator) and accelerator.mixed_precision == "fp16":
        return getattr(scaler := prepared.optimizer.loss_scaler, "grown", scaler.cur_scale)
    return accelerator.scaler.get_scale() if accelerator.scaler is not None else None


def innermost_optimizer(optimizer) -> torch.optim.Optimizer:
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

    innermost_optimizer(optimizer).register_step_pre_hook(add)
    return group_norms


def reshard(prepared: nn.Module) -> None:
    """Shards again what FSDP2 leaves whole after a forward that no backward followed: its state could not be saved or loaded."""
    for module in filter(lambda module: isinstance(module, FSDPModule), prepared.modules()):
        module.reshard()


def count_parameters(model: nn.Module) -> int:
    """How many numbers the model's parameters hold in all, also where ZeRO-3 leaves each process a part of them."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
