"""Products of wide models on a CPU by oneDNN."""

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common import replaced


def use_onednn() -> None:
    """Takes fp32 products on a CPU from oneDNN instead of MKL: on AMD's, half the time.

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

    Its products are too small for oneDNN there. For a single new token MKL computes them, because
    the math kernel would copy shared keys and values. `query`: `[rows, heads, length, head size]`.
    """
    if query.shape[2] == 1:
        with replaced((torch.backends.mkldnn.matmul, "fp32_precision", "ieee")):
            return sdpa_attention_forward(module, query, *args, **kwargs)
    backends = [SDPBackend.MATH]
    if query.shape[2] >= 256:
        backends.append(SDPBackend.FLASH_ATTENTION)
    with sdpa_kernel(backends):
        return sdpa_attention_forward(module, query, *args, **kwargs)
