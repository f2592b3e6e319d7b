"""What a training loop needs from its engine: accumulation, the loss scale, shards, counts."""

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule


def zero_stage(accelerator: Accelerator) -> int:
    """Returns DeepSpeed's ZeRO stage; 0 without DeepSpeed."""
    plugin = accelerator.state.deepspeed_plugin
    return 0 if plugin is None else plugin.deepspeed_config["zero_optimization"]["stage"]


def describe(accelerator: Accelerator) -> str:
    """Returns in words how the run computes, such as `DeepSpeed ZeRO-2 fp16 on cpu`."""
    names = {
        DistributedType.NO: "one process",
        DistributedType.FSDP: "FSDP2",
        DistributedType.DEEPSPEED: f"DeepSpeed ZeRO-{zero_stage(accelerator)}",
    }
    engine = names.get(accelerator.distributed_type, "DDP")
    precision = accelerator.mixed_precision.replace("no", "fp32")
    return f"{engine} {precision} on {accelerator.device.type}"


def unwrapped(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Returns the module inside a prepared one, as it was before DDP, DeepSpeed and compilation."""
    if accelerator.distributed_type == DistributedType.NO:  # accelerate would import DeepSpeed
        return getattr(model, "_orig_mod", model)  # of torch.compile
    return accelerator.unwrap_model(model, keep_torch_compile=False)


def half_precision(accelerator) -> torch.dtype | None:
    """Returns the half precision in which a model computes; None: fp32."""
    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision)


def is_sharded(accelerator) -> bool:
    """Whether a process may hold only a part of the training state."""
    return accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)


def begin_update(accelerator: Accelerator, micro_batches: list) -> int:
    """Tells accelerate and DeepSpeed how many micro-batches a process has in the next update.

    Returns the number by which they divide the summed losses: micro-batches times processes.
    """
    accelerator.step = 0  # so that gradients sync at the last micro-batch
    accelerator.gradient_accumulation_steps = len(micro_batches)
    divisor = len(micro_batches) * accelerator.num_processes
    if zero_stage(accelerator):
        engine = accelerator.deepspeed_engine_wrapped.engine
        engine.set_train_batch_size(divisor * engine.train_micro_batch_size_per_gpu())
        scaler = engine.optimizer.loss_scaler
        scaler.cur_scale = vars(scaler).pop("grown", scaler.cur_scale)  # `zero.delay_scale_growth`
    return divisor


def loss_scale(accelerator: Accelerator) -> float | None:
    """Returns the current scale of the loss under fp16; None where there is none."""
    if zero_stage(accelerator) and accelerator.mixed_precision == "fp16":
        return accelerator.deepspeed_engine_wrapped.engine.optimizer.cur_scale
    if accelerator.scaler is not None:
        return accelerator.scaler.get_scale()
    return None


def reshard(prepared: nn.Module) -> None:
    """Reshards weights that FSDP2 leaves whole after a forward pass alone, and could not save."""
    for module in prepared.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def size_of(parameter: nn.Parameter) -> int:
    """Counts the elements of a parameter, wherever they are and however packed."""
    quant_state = getattr(parameter, "quant_state", None)  # bitsandbytes: two elements in a byte
    if quant_state is not None:
        return quant_state.shape.numel()
    return getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 leaves a process only a part


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Counts the elements of all parameters, tied ones once, and of the trained parameters."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return sum(map(size_of, parameters)), sum(map(size_of, trained))


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained parameters by name; in a model with adapters only theirs are trained."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def has_adapter(module: nn.Module) -> bool:
    """Whether a model, or any model inside a module, has adapters."""
    return any(getattr(part, "_hf_peft_config_loaded", False) for part in module.modules())
