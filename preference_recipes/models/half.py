"""Frozen weights in half precision, where that changes no output by a single bit.

FSDP2 rounds all weights when it gathers them, autocast some.
"""

import collections

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from common import engine
from preference_recipes.models import architecture
from preference_recipes.models.logprobs import LogProbHead


def round_frozen(accelerator, wrapper: nn.Module) -> None:
    """Holds frozen weights in half precision: all under FSDP2, else those that autocast rounds."""
    half = engine.half_precision(accelerator)
    rounded = None if accelerator.is_fsdp2 else rounded_by_autocast(wrapper, accelerator.device)
    for name, parameter in wrapper.named_parameters():
        # Packed weights of 4 bits are whole numbers.
        is_held_in_fp32 = parameter.dtype == torch.float32 and not parameter.requires_grad
        if is_held_in_fp32 and (rounded is None or name in rounded):
            parameter.data = parameter.data.to(half)


def rounded_by_autocast(wrapper: nn.Module, device: torch.device) -> set[str]:
    """Returns the names of the parameters that autocast rounds in every use: of linear layers.

    A weight that other modules have, too, such as the embeddings', is used in fp32 elsewhere. Score
    heads compute in fp32, output layers only on a CPU. Recurrent layers have kernels on a GPU that
    read the weights of linear layers in their own way, so models with such layers are left out.
    """
    if any(model._is_stateful for model in architecture.whole_models(wrapper).values()):
        return set()
    owners = collections.Counter(
        id(parameter)
        for module in wrapper.modules()
        for parameter in module.parameters(recurse=False)
    )
    found = set()
    for path, module in wrapper.named_modules():
        names = []
        if type(module) in (nn.Linear, Conv1D):
            names = ["weight", "bias"]
        elif isinstance(module, LogProbHead) and device.type != "cpu":
            names = ["weight"]  # its bias is added in fp32
        for name in names:
            parameter = getattr(module, name)
            if parameter is not None and owners[id(parameter)] == 1:
                found.add(f"{path}.{name}")
    return found
