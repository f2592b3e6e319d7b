#!/usr/bin/env bash
# DeepSpeed 0.19.8, bf16: the fp32 weights of the optimizer begin as rounded ones, though the model came in fp32.
#
# The good guess: the fp32 weights are those of the model that was given, and only the copies for the forward pass are
# rounded.
# What was seen: of a weight 1.001 the optimizer has 1.0 at ZeRO 1, 2 and 3, since the module is rounded first.
# Why it matters: each run that begins from an fp32 checkpoint loses it once; a run that ends, saves in fp32 and starts
# again is not the run that went on.
# Where: _configure_distributed_model in deepspeed/runtime/engine.py comes before the optimizer copies its weights.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.0 deepspeed==0.19.8
"$folder/env/bin/python" - <<'PYTHON'
import os

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", DEEPSPEED_LOG_LEVEL="error")
import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled for a minute


def master(stage: int) -> float:
    """The optimizer's own copy of a weight, before any update."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.001)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    weight = safe_get_full_fp32_param(engine.module.weight)
    assert weight.dtype == torch.float32
    return round(weight.item(), 4)


found = {stage: master(stage) for stage in (1, 2, 3)}
print(deepspeed.__version__, found)
assert found == {1: 1.0, 2: 1.0, 3: 1.0}
PYTHON
echo "as described"
