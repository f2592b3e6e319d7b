"""Products of wide models on a CPU: by oneDNN, and those of attention, which are small, by MKL."""

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common import patched

ONEDNN, MKL = "bf16", "ieee"  # values of torch's `fp32_precision` that choose them


def use_onednn() -> None:
    """Takes fp32 products on a CPU from oneDNN instead of MKL: on some of AMD's, half the time.

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
    """Computes transformers' attention by MKL, in the backward pass, too."""
    # The backward pass runs from the output to the inputs: to MKL first, and back at the end.
    query, key, value = SwitchInBackward.apply(ONEDNN, query, key, value)
    with patched((torch.backends.mkldnn.matmul, "fp32_precision", MKL)):
        output, weights = sdpa_attention_forward(module, query, key, value, *args, **kwargs)
    (output,) = SwitchInBackward.apply(MKL, output)
    return output, weights


class SwitchInBackward(torch.autograd.Function):
    """Returns tensors unchanged. A backward pass that reaches them sets what computes products."""

    @staticmethod
    def forward(ctx, precision: str, *tensors: torch.Tensor) -> tuple:
        ctx.precision = precision
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple:
        torch.backends.mkldnn.matmul.fp32_precision = ctx.precision
        return None, *gradients
