"""Matrix products of wide models on a CPU: by oneDNN, but the small ones of attention by MKL."""

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common import patched

ONEDNN, MKL = "bf16", "ieee"  # values of torch's `fp32_precision` that select each


def use_onednn() -> None:
    """Computes fp32 products by oneDNN instead of MKL: on some of AMD's CPUs, in half the time.

    Despite its name, the setting "bf16" only permits rounding to bf16, where a CPU has matrix units
    for it (AMX). On such a CPU everything stays as it was.
    """
    torch.backends.mkldnn.matmul.fp32_precision = ONEDNN
    # bf16 would round these elements to 1.
    product = torch.full((256, 256), 1 + 2**-12) @ torch.eye(256)
    if product.min() > 1:
        AttentionInterface.register("sdpa", attention_by_mkl)
    else:
        torch.backends.mkldnn.matmul.fp32_precision = MKL


def attention_by_mkl(module: nn.Module, query, key, value, *args, **kwargs):
    """Computes transformers' attention by MKL, also in the backward pass."""
    # The backward pass runs from output to inputs: it switches to MKL first, and back at the end.
    query, key, value = SwitchInBackward.apply(ONEDNN, query, key, value)
    with patched((torch.backends.mkldnn.matmul, "fp32_precision", MKL)):
        output, weights = sdpa_attention_forward(module, query, key, value, *args, **kwargs)
    (output,) = SwitchInBackward.apply(MKL, output)
    return output, weights


class SwitchInBackward(torch.autograd.Function):
    """Returns tensors unchanged. Its backward pass switches the library for products."""

    @staticmethod
    def forward(ctx, precision: str, *tensors: torch.Tensor) -> tuple:
        ctx.precision = precision
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        torch.backends.mkldnn.matmul.fp32_precision = ctx.precision
        return None, *gradients
