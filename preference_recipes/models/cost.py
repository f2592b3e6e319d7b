"""Counts the operations of training, for `perf/mfu`."""

import torch
from torch import nn
from transformers import PreTrainedConfig

from common import engine
from common.metrics import Flop
from preference_recipes.models import architecture

# Dense half-precision operations per second with fp32 sums, from NVIDIA's data sheets, by torch's
# name of the GPU. Other GPUs, and parts of a GPU (MIG), log no MFU.
PEAK_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "Tesla V100-SXM2-32GB": 125e12,
    "Tesla V100-SXM2-16GB": 125e12,
}


def flop(wrapper: nn.Module, processor=None) -> Flop:
    """Returns the operations of training for each token in the layers, and for each target.

    They count products with weights only, and are 0 where unknown. A trained parameter takes 2
    forward and 4 backward, a frozen one below an adapter 2 and 2.
    """
    per_token = 0.0
    per_target = 0.0
    for model in architecture.whole_models(wrapper).values():
        visited_share = share_of_experts(model.config.get_text_config())
        if visited_share is None or processor is not None:  # a vision tower is not counted
            return Flop(0.0, 0.0, None)
        per_frozen_weight = 4 if engine.has_adapter(model) else 0
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        for weight in model.get_decoder().parameters():
            if id(weight) not in embeddings:
                shape = getattr(weight, "ds_shape", weight.shape)  # ZeRO-3 empties the parameter
                share = visited_share if len(shape) == 3 else 1.0
                per_weight = 6 if weight.requires_grad else per_frozen_weight
                per_token += per_weight * engine.size_of(weight) * share
        head = model.get_output_embeddings()
        if head is not None:
            per_weight = 6 if head.weight.requires_grad else per_frozen_weight
            per_target += per_weight * engine.size_of(head.weight)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return Flop(per_token, per_target, PEAK_FLOPS.get(gpu))


def share_of_experts(config: PreTrainedConfig) -> float | None:
    """Returns the share of a mixture's stacked experts that a token visits; None: unknown."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = max(getattr(config, name, None) or 1 for name in names)
    if experts == 1:
        return 1.0
    visited = getattr(config, "num_experts_per_tok", None)
    return visited / experts if visited else None
