"""Half precision and fast products where there is no GPU."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


class HalfProductsInFp32(TorchFunctionMode):
    """Computes half-precision matrix products and attention in fp32 and rounds the result: what tensor cores do, and on a CPU
    without half kernels many times faster than the library's own."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if (
            function in (F.linear, F.scaled_dot_product_attention)
            and args[0].device.type == "cpu"
            and args[0].dtype.itemsize == 2
        ):
            single = lambda value: (
                value.float()
                if isinstance(value, torch.Tensor) and value.dtype.itemsize == 2
                else value
            )
            return function(
                *map(single, args),
                **{name: single(value) for name, value in (kwargs or {}).items()},
            ).to(args[0].dtype)
        return function(*args, **(kwargs or {}))


def use_onednn() -> None:
    """Takes fp32 products on a CPU from oneDNN, which uses AVX-512 on all that have it, not from MKL, which does on Intel's: on AMD's they
    take half the time. It compiles itself for each new shape, which small models would not pay back.

    The setting's name is that of a permission, to round to bf16 where a CPU has matrix units for it (AMX): there all stays as it was.
    """
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    if (torch.full((256, 256), 1 + 2**-12) @ torch.eye(256)).min() > 1:  # bf16 would make 1 of it
        AttentionInterface.register("sdpa", sdpa_of_short_rows)
    else:
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"


def sdpa_of_short_rows(module: nn.Module, query: torch.Tensor, *args, **kwargs):
    """transformers' attention; the flash kernel's products are too small for oneDNN where rows are short: there without it."""
    with sdpa_kernel(
        [SDPBackend.MATH] if query.shape[2] < 256 else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    ):
        return sdpa_attention_forward(module, query, *args, **kwargs)
