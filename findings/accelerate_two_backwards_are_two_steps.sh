#!/usr/bin/env bash
# accelerate 1.15.0 with DeepSpeed 0.19.8: two calls of backward before optimizer.step() are two updates.
#
# The good guess: as without DeepSpeed, gradients of several calls add up, and optimizer.step() makes one update of
# them.
# What was seen: one update of Adam moves the weight by 1 without DeepSpeed; with it the engine counts 2 steps and the
# weight moves by 1.98: accelerate's backward steps the engine, and optimizer.step() does nothing.
# Why it matters: losses of two forward passes (policy and value, chosen and rejected) that are propagated one after the
# other train at twice the rate, each on half of its loss. One sum, one call.
# Where: DeepSpeedEngineWrapper.backward in accelerate/utils/deepspeed.py calls engine.step.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.0 deepspeed==0.19.8 accelerate==1.15.0 transformers==5.23.0
"$folder/env/bin/python" - <<'PYTHON'
import os

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(DS_ACCELERATOR="cpu", DEEPSPEED_LOG_LEVEL="error")
import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled for a minute

from accelerate import Accelerator, DeepSpeedPlugin


def train(with_deepspeed: bool) -> tuple[float, int]:
    """The weight after one optimizer.step(), and the engine's count of steps."""
    plugin = None
    if with_deepspeed:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 1},
        }
        plugin = DeepSpeedPlugin(config)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0)
    model, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((1, 1), 3.0)).sum())
        accelerator.backward(model(torch.full((1, 1), 5.0)).sum())
        optimizer.step()
        optimizer.zero_grad()
    weight = round(accelerator.unwrap_model(model).weight.item(), 2)
    accelerator.free_memory()
    accelerator.state._reset_state(reset_partial_state=True)
    return weight, getattr(model, "global_steps", 1)


found = {"torch": train(False), "DeepSpeed": train(True)}
print(deepspeed.__version__, found)
assert found == {"torch": (-1.0, 1), "DeepSpeed": (-1.98, 2)}
PYTHON
echo "as described"
