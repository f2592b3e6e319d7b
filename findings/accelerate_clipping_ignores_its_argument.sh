#!/usr/bin/env bash
# accelerate 1.15.0 with DeepSpeed 0.19.8: clip_grad_norm_ ignores its argument, and clips at 1.0 where nothing was set.
#
# The good guess: accelerator.clip_grad_norm_(parameters, 100.0) clips at 100, and no call of it and no setting clip
# nothing.
# What was seen: with a gradient of 8 and SGD the weight moves by 8 without DeepSpeed, and by 1 with it. Only
# "gradient_clipping": 0.0 in the JSON switches it off; "auto", or a JSON without the key, is 1.0. The norm that comes
# back is 8, that before clipping, so that a log shows nothing.
# Why it matters: a script that asks for another bound, or for none, trains with 1.0.
# Where: accelerate/accelerator.py: "gradient_clipping": 1.0 in the place of "auto", and clip_grad_norm_.
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


def train(**settings) -> tuple[float, float]:
    """How far the weight went, and the norm that was returned."""
    plugin = None
    if settings:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        }
        plugin = DeepSpeedPlugin(config | settings["deepspeed"])
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.full((1, 1), 8.0)).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
    moved = -round(accelerator.unwrap_model(model).weight.item(), 4)
    accelerator.free_memory()
    accelerator.state._reset_state(reset_partial_state=True)
    return moved, float(norm)


found = {
    "torch": train(),
    "no key": train(deepspeed={}),
    "auto": train(deepspeed={"gradient_clipping": "auto"}),
    "0.0": train(deepspeed={"gradient_clipping": 0.0}),
}
print(deepspeed.__version__, found)
assert found == {"torch": (8.0, 8.0), "no key": (1.0, 8.0), "auto": (1.0, 8.0), "0.0": (8.0, 8.0)}
PYTHON
echo "as described"
