"""What the engine prepares: the model that is trained, and models that are only read."""

import contextlib

import torch
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn

from common import guards, zero


def disable_dropout(model: nn.Module) -> None:
    """Turns dropout, and a router's jitter, off for good, also while the model trains.

    What is compared, policies or answers, must differ in nothing else.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_noise = "drop" in name or "jitter" in name
            is_noise = is_noise or (name == "p" and isinstance(module, nn.Dropout))
            if is_noise and isinstance(value, float):
                setattr(module, name, 0.0)


def for_training(
    accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, debug_overflow: bool = False
):
    """Prepares the model that is trained and its optimizer, and returns both.

    This is `accelerator.prepare`, and then puts back the fp32 buffers that DeepSpeed's
    `module.half()` rounds. Rotary frequencies are such buffers. If they stayed rounded, positions
    would drift. The saved actor computes them in fp32 when it is loaded, so it would not be the
    model that was trained.

    Args:
        debug_overflow: see `guards.watch_overflow`.
    """
    if debug_overflow:
        guards.watch_overflow(model)
    with exact_buffers(accelerator, model):
        return accelerator.prepare(model, optimizer)


def frozen(accelerator, model: nn.Module) -> nn.Module:
    """Prepares a model that is only read, such as a reference or a reward model.

    It is on the device, in evaluation mode and in the precision of the trained model. Under ZeRO-3
    and FSDP2 it is sharded like the trained model, not replicated.
    """
    model.eval().requires_grad_(False)
    if accelerator.is_fsdp2:
        return fsdp2_prepare_model(accelerator, model)
    stage = zero.stage(accelerator)
    if not stage:
        # Under autocast, like the trained model.
        return accelerator.prepare_model(model, evaluation_mode=True)
    with exact_buffers(accelerator, model):
        if stage == 3:
            return zero.shard_frozen(accelerator, model)
        half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision)
        return model.to(accelerator.device, half)  # None: it stays in fp32, as it was loaded


@contextlib.contextmanager
def exact_buffers(accelerator, model: nn.Module):
    """Restores the floating-point buffers that the block rounds to half precision."""
    before = {
        name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()
    }
    yield
    for name, buffer in model.named_buffers():
        if name in before and buffer.dtype != before[name].dtype:
            buffer.data = before[name].to(accelerator.device)
