"""AdamW as the recipes make it."""

import re
from types import SimpleNamespace

import pytest
import torch

from architectures import build
from common import optim
from preference_recipes.models.logprobs import LogProbModel

GPU = SimpleNamespace(device=torch.device("cuda"), scaler=None)
ARGS = SimpleNamespace(learning_rate=0.01, adam_epsilon=1e-6, weight_decay=0.1)


def test_it_is_fused_on_a_gpu_but_not_with_torchs_own_loss_scaler():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    cases = [
        (GPU, True),
        (SimpleNamespace(device=torch.device("cuda"), scaler=object()), None),
        (SimpleNamespace(device=torch.device("cpu"), scaler=None), None),
    ]
    for accelerator, fused in cases:
        optimizer = optim.build(accelerator, [{"params": [weight]}], ARGS)
        (group,) = optimizer.param_groups
        assert (group["fused"], group["lr"], group["eps"]) == (fused, 0.01, 1e-6)


# What is small by itself: norms, biases of experts, which have two dimensions, rates of decay.
STILL = re.compile(r"norm|ln|bias|A_log|\.D$|time_|sinks|recurrent_param")
DECAYING = ["llama", "gemma2", "cohere", "gpt2", "gpt_oss", "jamba", "recurrent_gemma", "rwkv"]
DECAYING += ["falcon", "qwen3_moe", "xlstm"]


@pytest.mark.parametrize("name", DECAYING)
def test_every_projection_decays_and_no_norm_bias_or_rate(name):
    """Cohere's norms of heads and Jamba's `A_log` are matrices; experts are one tensor of three dimensions."""
    model = LogProbModel(build(name))
    groups = optim.parameter_groups(model, ARGS)
    decay_of = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        own_name = ".".join(name.split(".")[-2:])
        assert decay_of[id(parameter)] == (0.0 if STILL.search(own_name) else 0.1), name
