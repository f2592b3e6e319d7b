"""Half precision and fast products where there is no GPU."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


class HalfProductsInFp32(TorchFunctionMode):
    """Computes half-precision matrix products and attention in fp32 and rounds the result.

    This is what tensor cores do. A CPU without half kernels does it many times faster than torch's
    own half products.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_product = function in (F.linear, F.scaled_dot_product_attention)
        if not is_product or args[0].device.type != "cpu" or args[0].dtype.itemsize != 2:
            return function(*args, **kwargs)
        in_fp32 = [to_fp32(value) for value in args]
        kwargs_in_fp32 = {name: to_fp32(value) for name, value in kwargs.items()}
        return function(*in_fp32, **kwargs_in_fp32).to(args[0].dtype)


def to_fp32(value):
    """Returns a half-precision tensor in fp32; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype.itemsize == 2:
        return value.float()
    return value


def use_onednn() -> None:
    """Takes fp32 products on a CPU from oneDNN instead of MKL.

    oneDNN uses AVX-512 on every CPU that has it, MKL on Intel's only. On AMD's, products take half
    the time. oneDNN compiles itself for each new shape, which does not pay for small models.

    Despite its name, the setting "bf16" only permits rounding to bf16, where a CPU has matrix units
    for it (AMX). On such a CPU everything stays as it was.
    """
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    # bf16 would round these elements to 1.
    product = torch.full((256, 256), 1 + 2**-12) @ torch.eye(256)
    if product.min() > 1:
        AttentionInterface.register("sdpa", sdpa_of_short_rows)
    else:
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"


def sdpa_of_short_rows(module: nn.Module, query: torch.Tensor, *args, **kwargs):
    """Computes transformers' attention, without the flash kernel where rows are short.

    The flash kernel's products are too small for oneDNN there.

    Args:
        query: `[batch, heads, length, head dimension]`.
    """
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    if query.shape[2] < 256:
        backends = [SDPBackend.MATH]
    with sdpa_kernel(backends):
        return sdpa_attention_forward(module, query, *args, **kwargs)
