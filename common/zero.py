"""DeepSpeed's internals: its settings, its loss scale and its shards, with corrections."""

import contextlib
import os
from pathlib import Path

import torch
from accelerate import DeepSpeedPlugin
from torch import nn
from torch.distributed.tensor import DTensor

from common import ROOT, refuse


def make_plugin(accumulation: int, args) -> DeepSpeedPlugin:
    """Returns the launcher's DeepSpeed settings, with the run's sizes and clipping added."""
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    import deepspeed  # slow to import: only where it is used

    if not torch.cuda.is_available():
        # On first use it compiles C++ for more than a minute. gloo does the same work.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # fp16 is emulated, see `cpu.HalfProductsInFp32`.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    path = os.path.expanduser(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", ""))
    if path and not Path(path).is_file():
        path = str(ROOT / path)  # recipes may be started from any directory
    plugin = DeepSpeedPlugin(path or None)
    config = plugin.deepspeed_config

    sizes = {
        "gradient_accumulation_steps": accumulation,
        "train_micro_batch_size_per_gpu": args.micro_train_batch_size,
        "gradient_clipping": float(args.max_grad_norm),
    }
    for key, value in sizes.items():
        if config.get(key, "auto") not in ("auto", value):
            refuse(f'the DeepSpeed config sets "{key}": {config[key]}: write "auto" there')
        config[key] = value
    if "scheduler" in config:  # accelerate itself refuses an "optimizer"
        refuse('the DeepSpeed config has "scheduler": remove it and use --lr_scheduler_type')
    if not config["zero_optimization"].get("stage"):
        refuse("the DeepSpeed config has ZeRO stage 0: take 1, 2 or 3, or launch with ddp.yaml")
    # Otherwise DeepSpeed waits for the GPU before each forward pass, to measure the time.
    config.setdefault("timers", {"throughput": {"enabled": False}})
    if any(config.get(half, {}).get("enabled") for half in ("fp16", "bf16")):
        # Otherwise it sums micro-batches in half precision, where small values vanish.
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        # For that DeepSpeed 0.19.8 would use another optimizer under ZeRO-1 in bf16, which does not
        # skip updates that are not finite, and writes other checkpoints.
        deepspeed.runtime.engine.BFLOAT16 = deepspeed.runtime.engine.ZERO_OPTIMIZATION
    # Actors are saved from the gathered weights.
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    delay_scale_growth()
    return plugin


def delay_scale_growth() -> None:
    """Delays growth of DeepSpeed's loss scale to `engine.begin_update`, as the scaler's `grown`.

    DeepSpeed 0.19.8 lets it grow within an update, and divides gradients by the new scale.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    original_update_scale = DynamicLossScaler.update_scale

    def update_scale(scaler, overflow: bool) -> None:
        before = scaler.cur_scale
        original_update_scale(scaler, overflow)
        if scaler.cur_scale > before:
            scaler.grown = scaler.cur_scale
            scaler.cur_scale = before

    DynamicLossScaler.update_scale = update_scale


def gathered(parameters: list[nn.Parameter], writer: int | None = None):
    """Returns a context in which every process has the whole of parameters that ZeRO-3 shards.

    Changes by the process of rank `writer` persist after the block.
    """
    if not hasattr(parameters[0], "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=writer)


def whole(parameter: nn.Parameter) -> torch.Tensor:
    """Returns the whole values of a parameter; they are a copy only if it is sharded."""
    if isinstance(parameter, DTensor):
        return parameter.detach().full_tensor()
    with gathered([parameter]):
        return parameter.detach().clone() if hasattr(parameter, "ds_id") else parameter.detach()


@contextlib.contextmanager
def gathered_for_generation(prepared: nn.Module, model: nn.Module):
    """Gathers `model` inside the block, without the hooks that would gather it for every token."""
    offload = prepared.optimizer.parameter_offload
    with gathered(list(model.parameters())):
        offload._remove_module_hooks()
        offload.forward_hooks = []
        offload.backward_hooks = []
        try:
            yield
        finally:
            offload.setup_zero_stage3_hooks()
