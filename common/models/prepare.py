"""What the engine prepares."""

import contextlib

import torch
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn

from common import guards
from common.zero import stage


def disable_dropout(model: nn.Module) -> None:
    """Turns dropout, and a router's jitter, off for good, also while the model trains: what is compared, policies or answers, must
    differ in nothing else."""
    for module in model.modules():
        found = [
            n
            for n in vars(module)
            if "drop" in n or "jitter" in n or (n == "p" and isinstance(module, nn.Dropout))
        ]
        vars(module).update(
            {name: 0.0 for name in found if isinstance(getattr(module, name), float)}
        )


def for_training(
    accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, debug_overflow: bool = False
):
    """`accelerator.prepare`, then puts back the fp32 buffers that DeepSpeed's `module.half()` rounds.

    Rotary frequencies are such buffers: rounded, positions drift, and the saved actor, whose buffers are computed anew in
    fp32 when it is loaded, would not be the model that was trained.

    Args:
        debug_overflow: see `watch_overflow`.
    """
    if debug_overflow:
        guards.watch_overflow(model)
    with exact_buffers(accelerator, model):
        return accelerator.prepare(model, optimizer)


def frozen(accelerator, model: nn.Module) -> nn.Module:
    """A model that is only read (a reference, a reward model): on the device, in evaluation mode, in the precision of the
    trained one; under ZeRO-3 and FSDP2 sharded like it, not replicated."""
    model.eval().requires_grad_(False)
    if accelerator.is_fsdp2:
        return fsdp2_prepare_model(accelerator, model)
    if not stage(accelerator):
        return accelerator.prepare_model(
            model, evaluation_mode=True
        )  # under autocast as the trained one
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    with exact_buffers(accelerator, model):
        if stage(accelerator) < 3:
            # Where neither is asked for it stays as it was loaded, in fp32.
            return model.to(
                accelerator.device,
                {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision),
            )
        import deepspeed

        zero = {
            key: value
            for key, value in config["zero_optimization"].items()
            if key != "offload_optimizer"
        }
        return deepspeed.initialize(model=model, config={**config, "zero_optimization": zero})[0]


@contextlib.contextmanager
def exact_buffers(accelerator, model: nn.Module):
    """Restores floating-point buffers that the block rounds to half precision."""
    before = {
        name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()
    }
    yield
    for name, buffer in (
        (n, b) for n, b in model.named_buffers() if n in before and b.dtype != before[n].dtype
    ):
        buffer.data = before[name].to(accelerator.device)
