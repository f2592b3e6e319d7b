"""What each process holds of a model's parameters, and the whole made of such parts.

For values that a recipe keeps besides the parameters, such as a running average of them: each
process keeps its part, in `Run.per_process`, and the whole is made where it is saved.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common import engine


def parts_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns what this process holds of each trained parameter, by the parameter's name.

    Under ZeRO-3 and FSDP2 that is a shard, elsewhere the parameter itself. Under half precision in
    DeepSpeed it is the half-precision weights, which the forward pass uses.

    Args:
        model: the unwrapped module.

    Returns:
        views, without gradients, that the engine changes at each update: copy what must last.
    """
    engine.reshard(model)  # an evaluation may have left them whole
    return {
        name: part_of(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def part_of(parameter: nn.Parameter) -> torch.Tensor:
    """Returns what this process holds of one parameter, see `parts_of`."""
    if hasattr(parameter, "ds_tensor"):  # ZeRO-3
        return parameter.ds_tensor.detach()
    if isinstance(parameter, DTensor):  # FSDP2
        return parameter.detach().to_local()
    return parameter.detach()


def whole(accelerator, model: nn.Module, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns whole tensors from the parts that all processes hold, on the host.

    All processes must call it; all get the same.

    Args:
        model: the unwrapped module whose parameters the parts are of.
        parts: of each process, by the parameters' names, in the shape that `parts_of` gives.
    """
    parameters = dict(model.named_parameters())
    result = {}
    for name, part in parts.items():
        parameter = parameters[name]
        if hasattr(parameter, "ds_tensor"):
            # ZeRO-3 cuts the flattened parameter into equal pieces; the last one is padded.
            flat = accelerator.gather(part.contiguous().to(accelerator.device))
            tensor = flat[: parameter.ds_numel].view(parameter.ds_shape)
        elif isinstance(parameter, DTensor):
            tensor = DTensor.from_local(
                part,
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            ).full_tensor()
        else:
            tensor = part
        result[name] = tensor.cpu()
    return result
