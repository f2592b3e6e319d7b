"""Frozen weights that half precision rounds in every use anyway, held rounded."""

import collections

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from common import zero
from common.models import architecture
from common.models.logprobs import LogProbHead

# Products that autocast computes in half precision. It rounds what they are given.
PRODUCTS = {nn.functional.linear, torch.addmm, torch.matmul}
# What reads no values, and no dtype.
HARMLESS = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "device", "requires_grad", "is_cuda", "is_cpu", "ndim")
} | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel}


class Uses(TorchFunctionMode):
    """Notes, by `id`, which tensors go into products that autocast rounds, and into anything else.

    Attributes:
        in_products: tensors that such products were given.
        elsewhere: tensors that other functions were given, or were asked for their dtype.
    """

    def __init__(self):
        super().__init__()
        self.in_products: set[int] = set()
        self.elsewhere: set[int] = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        if function in PRODUCTS and torch.is_autocast_enabled("cpu"):
            self.in_products |= given
        elif function not in HARMLESS:
            self.elsewhere |= given
        return function(*args, **kwargs)


def round_frozen(accelerator, wrapper: nn.Module) -> None:
    """Holds frozen weights in half precision where that changes no output by a single bit.

    Under autocast these are the weights that go into products alone: linear layers, but neither
    norms nor embeddings. FSDP2 rounds all weights when it gathers them. DeepSpeed rounds a model
    once, in `prepare`, and fp32 rounds nothing.

    Args:
        wrapper: a `ModelWrapper`, not prepared yet.
    """
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision)
    if half is None or zero.stage(accelerator):
        return
    if accelerator.is_fsdp2:
        rounded = {name for name, _ in wrapper.named_parameters()}
    else:
        rounded = rounded_by_autocast(wrapper, accelerator.device.type)
    for name, parameter in wrapper.named_parameters():
        # Packed weights of 4 bits are whole numbers.
        if name in rounded and parameter.dtype == torch.float32 and not parameter.requires_grad:
            parameter.data = parameter.data.to(half)


def rounded_by_autocast(wrapper: nn.Module, device_type: str) -> set[str]:
    """Returns the names of the parameters that autocast rounds in every use.

    A forward pass without values, see `architecture.without_values`, shows how each is used. Where
    it cannot be followed the set is empty.

    Args:
        wrapper: a `ModelWrapper`.
        device_type: where it will run. A CPU computes the output layer of `LogProbModel` in fp32.
    """
    models = architecture.whole_models(wrapper).values()
    if any(model._is_stateful for model in models):
        return set()  # on a GPU recurrent layers have kernels that read weights in their own way
    uses = Uses()
    with architecture.without_values(wrapper, architecture.SHORT_ROW) as (parameters, forward):
        try:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), uses:
                forward()
        except Exception:  # whatever an architecture may do with values
            return set()
    in_products_alone = uses.in_products - uses.elsewhere
    found = {name for name, parameter in parameters.items() if id(parameter) in in_products_alone}
    if device_type != "cpu":
        found |= weights_of_heads(wrapper)
    return found


def weights_of_heads(wrapper: nn.Module) -> set[str]:
    """Returns the names of the weights of output layers, which `ChunkedLogProbs` rounds on a GPU.

    Those that are the embeddings', too, are not among them. Nor is a bias: it is added in fp32.
    """
    owners = collections.Counter(
        id(weight) for module in wrapper.modules() for weight in module.parameters(recurse=False)
    )
    return {
        f"{name}.weight"
        for name, module in wrapper.named_modules()
        if isinstance(module, LogProbHead) and owners[id(module.weight)] == 1
    }
