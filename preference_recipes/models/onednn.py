"""Products of wide models on a CPU: by oneDNN, and those of attention, which are small, by MKL."""

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common import replaced

MKL = (torch.backends.mkldnn.matmul, "fp32_precision", "ieee")  # what `replaced` sets for it


def use_onednn() -> None:
    """Takes fp32 products on a CPU from oneDNN instead of MKL: on some of AMD's, half the time.

    Despite its name, the setting "bf16" only permits rounding to bf16, where a CPU has matrix units
    for it (AMX). On such a CPU everything stays as it was.
    """
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    # bf16 would round these elements to 1.
    product = torch.full((256, 256), 1 + 2**-12) @ torch.eye(256)
    if product.min() > 1:
        AttentionInterface.register("sdpa", attention_by_mkl)
    else:
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"


def attention_by_mkl(module: nn.Module, query, key, value, *args, **kwargs):
    """Computes transformers' attention by MKL, forward and backward."""
    # A backward pass comes to the end first, and goes through all of the attention at once.
    query, key, value = BackwardFrom.apply("bf16", query, key, value)
    with replaced(MKL):
        output, weights = sdpa_attention_forward(module, query, key, value, *args, **kwargs)
    (output,) = BackwardFrom.apply("ieee", output)
    return output, weights


class BackwardFrom(torch.autograd.Function):
    """Returns tensors as they are; a backward pass that comes by sets what computes products."""

    @staticmethod
    def forward(ctx, precision: str, *tensors: torch.Tensor) -> tuple:
        ctx.precision = precision
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        torch.backends.mkldnn.matmul.fp32_precision = ctx.precision
        return None, *gradients
