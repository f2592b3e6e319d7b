"""Which weights half precision rounds in every use."""

import collections

from torch import nn
from transformers.pytorch_utils import Conv1D

from common import zero
from preference_recipes.models import architecture
from preference_recipes.models.logprobs import LogProbHead


def rounded_when_read(accelerator, wrapper: nn.Module) -> set[str]:
    """Returns the names of the parameters that half precision rounds in every use.

    FSDP2 rounds all weights when it gathers them, DeepSpeed after each update.

    Args:
        wrapper: a `ModelWrapper`.
    """
    if zero.stage(accelerator) or accelerator.is_fsdp2:
        return {name for name, _ in wrapper.named_parameters()}
    return rounded_by_autocast(wrapper, accelerator.device.type)


def rounded_by_autocast(wrapper: nn.Module, device_type: str) -> set[str]:
    """Returns the names of the parameters that autocast rounds in every use: of linear layers.

    A weight that other modules have, too, such as the embeddings', is used in fp32 elsewhere. Score
    heads compute in fp32, output layers only on a CPU. Recurrent layers have kernels on a GPU that
    read the weights of linear layers in their own way, so models with such layers are left out.

    Args:
        wrapper: a `ModelWrapper`.
        device_type: where it will run.
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
        elif isinstance(module, LogProbHead) and device_type != "cpu":
            names = ["weight"]  # its bias is added in fp32
        for name in names:
            parameter = getattr(module, name)
            if parameter is not None and owners[id(parameter)] == 1:
                found.add(f"{path}.{name}")
    return found
