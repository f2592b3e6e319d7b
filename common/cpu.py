"""Half precision and exact gradient norms on a CPU."""

import contextlib

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_
from torch.overrides import TorchFunctionMode

from common import engine, print_once

# Elements whose norm is computed at once. Their copy in fp64 still fits into a processor's cache.
NORM_ELEMENTS = 2**20


def make_exact(accelerator: Accelerator) -> None:
    """Makes an Accelerator clip by exact norms, and makes half precision work on a CPU."""
    if not engine.zero_stage(accelerator):  # DeepSpeed clips gradients itself, by a norm in fp64
        accelerator.clip_grad_norm_ = clip_by_exact_norm
    if accelerator.mixed_precision != "no":
        HalfProductsInFp32().__enter__()  # for the life of the process
        print_once(
            f"NOTE: {accelerator.mixed_precision} is emulated on the CPU, for checking only "
            "(half weights, fp32 products)"
        )


class HalfProductsInFp32(TorchFunctionMode):
    """Computes half-precision products and attention in fp32 and rounds them, faster than torch."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_product = function in (F.linear, F.scaled_dot_product_attention)
        if not is_product or args[0].device.type != "cpu" or args[0].dtype.itemsize != 2:
            return function(*args, **kwargs)
        in_fp32 = [to_fp32(value) for value in args]
        kwargs_in_fp32 = {name: to_fp32(value) for name, value in kwargs.items()}
        return function(*in_fp32, **kwargs_in_fp32).to(args[0].dtype)


def contexts_of_checkpoint() -> tuple:
    """Returns contexts for a forward pass and its recomputation, for gradient checkpointing.

    torch leaves its function modes in a backward pass, so it would recompute without this one.
    """
    return contextlib.nullcontext(), HalfProductsInFp32()


def to_fp32(value):
    """Returns a half-precision tensor in fp32; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype.itemsize == 2:
        return value.float()
    return value


def clip_by_exact_norm(parameters, max_norm: float) -> torch.Tensor:
    """Clips gradients by their norm, as torch does, and returns the norm, summed in fp64.

    On a CPU torch sums squares in fp32: the norm of 1e8 numbers is 1 % too small.
    """
    parameters = list(parameters)
    norms = []
    for gradient in [p.grad for p in parameters if p.grad is not None]:
        is_shard = isinstance(gradient, DTensor)  # its norm is a collective, so it is not split
        parts = [gradient] if is_shard else gradient.flatten().split(NORM_ELEMENTS)
        norms += [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
