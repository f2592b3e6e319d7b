"""Products of wide models on a CPU: by oneDNN, and those of attention, which are small, by MKL."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common import replaced

MKL = (torch.backends.mkldnn.matmul, "fp32_precision", "ieee")  # what `replaced` sets for it


def use_onednn() -> None:
    """Takes fp32 products on a CPU from oneDNN instead of MKL: on AMD's, half the time.

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
    """Computes transformers' attention by MKL."""

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        output, _ = sdpa_attention_forward(module, *inputs, *args, **kwargs)
        return output

    return ByMKL.apply(attend, query, key, value), None


class ByMKL(torch.autograd.Function):
    """A function of tensors that takes its products from MKL, in the backward pass, too."""

    @staticmethod
    def forward(ctx, function: Callable, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.inputs = [each.detach().requires_grad_(each.requires_grad) for each in inputs]
        with replaced(MKL), torch.enable_grad():
            ctx.output = function(*ctx.inputs)
        return ctx.output.detach()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        inputs, output = ctx.inputs, ctx.output
        del ctx.inputs, ctx.output  # else they would live as long as the loss
        with replaced(MKL):
            output.backward(gradient)
        return None, *(each.grad for each in inputs)
