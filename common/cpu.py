"""Half precision and exact norms where there is no GPU."""

import contextlib

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

# Numbers whose norm is taken at once. Their copy in fp64 still fits into a processor's cache.
NORM_AT_ONCE = 2**20


class HalfProductsInFp32(TorchFunctionMode):
    """Computes half-precision products and attention in fp32 and rounds them, as tensor cores do.

    A CPU without half kernels does it many times faster than torch's own half products.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_product = function in (F.linear, F.scaled_dot_product_attention)
        if not is_product or args[0].device.type != "cpu" or args[0].dtype.itemsize != 2:
            return function(*args, **kwargs)
        in_fp32 = [to_fp32(value) for value in args]
        kwargs_in_fp32 = {name: to_fp32(value) for name, value in kwargs.items()}
        return function(*in_fp32, **kwargs_in_fp32).to(args[0].dtype)


def contexts_of_checkpoint() -> tuple:
    """Returns the contexts of a forward pass and of its recomputation, for gradient checkpointing.

    torch leaves its function modes during a backward pass, and would recompute without this one.
    """
    return contextlib.nullcontext(), HalfProductsInFp32()


def to_fp32(value):
    """Returns a half-precision tensor in fp32; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype.itemsize == 2:
        return value.float()
    return value


class NormsInFp64(TorchFunctionMode):
    """Computes the norms of tensors on a CPU in fp64.

    There torch adds up squares in fp32, one after the other: the norm of a hundred million numbers
    is too small by 1e-2 of it. A GPU takes many short sums side by side, and stays as it is.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.linalg.vector_norm and args[0].device.type == "cpu":
            return norm_in_fp64(*args, **kwargs)
        if function is torch._foreach_norm and args[0][0].device.type == "cpu":
            tensors, *order = args
            return [norm_in_fp64(tensor, *order, **kwargs) for tensor in tensors]
        return function(*args, **kwargs)


def norm_in_fp64(tensor: torch.Tensor, order: float = 2.0) -> torch.Tensor:
    """Returns the norm of all numbers of a tensor, as if they were one vector, in fp64."""
    if isinstance(tensor, DTensor):  # a collective: at once
        return torch.linalg.vector_norm(tensor, order, dtype=torch.float64)
    parts = tensor.flatten().split(NORM_AT_ONCE)
    norms = [torch.linalg.vector_norm(part, order, dtype=torch.float64) for part in parts]
    return torch.linalg.vector_norm(torch.stack(norms), order)


def clip_by_exact_norm(accelerator) -> None:
    """Lets `accelerator.clip_grad_norm_` clip by an exact norm, and return it, on a CPU.

    Under DeepSpeed it only returns what the engine clipped by, which is a norm in fp64.
    """
    clip_grad_norm_ = accelerator.clip_grad_norm_

    def clip_exactly(parameters, max_norm: float, norm_type: float = 2.0):
        with NormsInFp64():
            return clip_grad_norm_(parameters, max_norm, norm_type)

    accelerator.clip_grad_norm_ = clip_exactly
