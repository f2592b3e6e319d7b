"""Frozen weights in half precision, where that changes no output by a single bit.

FSDP2 rounds all weights when it gathers them, autocast some.
"""

import collections

from torch import nn
from transformers.pytorch_utils import Conv1D

from common import engine
from preference_recipes.models import architecture
from preference_recipes.models.logprobs import LogProbHead


def round_frozen(accelerator, wrapper: nn.Module) -> None:
    """Holds frozen weights in half precision: all under FSDP2, else those that autocast rounds."""
    half = engine.half_precision(accelerator)
    if accelerator.is_fsdp2:
        weights = list(wrapper.parameters())
    else:
        weights = rounded_by_autocast(wrapper, accelerator.device.type == "cpu")
    for weight in weights:
        # Packed weights of 4 bits are whole numbers.
        if weight.is_floating_point() and not weight.requires_grad:
            weight.data = weight.data.to(half)


def rounded_by_autocast(wrapper: nn.Module, on_cpu: bool) -> list[nn.Parameter]:
    """Returns the weights of linear layers, which autocast rounds in every use.

    A weight that another module has, too, such as the embeddings', is used in fp32 there. Score
    heads compute in fp32, and output layers on a CPU. Recurrent layers have kernels on a GPU that
    read weights in their own way, so models with such layers are left out.
    """
    if any(model._is_stateful for model in architecture.whole_models(wrapper).values()):
        return []
    kinds = (nn.Linear, Conv1D) if on_cpu else (nn.Linear, Conv1D, LogProbHead)
    modules = list(wrapper.modules())
    owners = collections.Counter(id(p) for part in modules for p in part.parameters(recurse=False))
    weights = [module.weight for module in modules if type(module) in kinds]
    return [weight for weight in weights if owners[id(weight)] == 1]
