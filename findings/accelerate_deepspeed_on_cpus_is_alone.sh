#!/usr/bin/env bash
# accelerate 1.15.0 with DeepSpeed 0.19.8, without a GPU: each of two processes believes that it is the only one.
#
# The good guess: under a launcher with two processes, Accelerator(deepspeed_plugin=...).num_processes is 2.
# What was seen: it is 1 on both, and each is the main process, while torch.distributed has 2. With
# InitProcessGroupKwargs(backend="gloo") it is 2, and one of them is the main process.
# Why it matters: each process takes all the data and writes the same files, and a schedule is not that of the GPUs.
# Where: PartialState in accelerate/state.py takes a backend for CPUs alone where cpu=True, which excludes DeepSpeed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.0 deepspeed==0.19.8 accelerate==1.15.0 transformers==5.23.0
cat >"$folder/train.py" <<'PYTHON'
import os
import sys

os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", DEEPSPEED_LOG_LEVEL="error")
import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled for a minute

import accelerate
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

with_backend = sys.argv[1] == "gloo"
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(config),
    kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if with_backend else [],
)
model = torch.nn.Linear(1, 1)
accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
number = int(os.environ["RANK"])
found = [accelerator.num_processes, accelerator.is_main_process]
expected = [2, number == 0] if with_backend else [1, True]
print(accelerate.__version__, sys.argv[1], "process", number, "of", torch.distributed.get_world_size(), found)
assert found == expected and torch.distributed.get_world_size() == 2
PYTHON
for backend in none gloo; do
    "$folder/env/bin/torchrun" --standalone --nproc-per-node 2 "$folder/train.py" "$backend"
done
echo "as described"
