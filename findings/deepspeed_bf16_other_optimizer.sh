#!/usr/bin/env bash
# DeepSpeed 0.19.8: "grad_accum_dtype": "fp32" gives ZeRO 1 another optimizer under bf16, and other checkpoints; not
# ZeRO 2.
#
# The good guess: the setting says in which dtype micro-batches are summed, and nothing else.
# What was seen: at stage 1 the class is BF16_Optimizer instead of DeepSpeedZeroOptimizer, and a checkpoint lacks its
# keys dynamic_loss_scale, loss_scaler, overflow, param_alignment_paddings and zero_stage. At stage 2 nothing changes.
# Why it matters: whoever follows the advice to sum in fp32 gets other code for the whole update, and tools that read
# checkpoints find others; nothing is printed.
# Where: _do_optimizer_sanity_check in deepspeed/runtime/engine.py.
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

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled for a minute

import pathlib
import tempfile


def optimizer_of(stage: int, sums: str) -> tuple[str, set[str]]:
    """The optimizer's class, and what a checkpoint holds of it."""
    model = torch.nn.Linear(4, 4, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": sums},
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
    engine.step()
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, tag="now")
        (file,) = pathlib.Path(folder, "now").glob("*optim_states.pt")
        state = torch.load(file, weights_only=False)["optimizer_state_dict"]
    return type(engine.optimizer).__name__, set(state)


found = {(stage, sums): optimizer_of(stage, sums) for stage in (1, 2) for sums in ("bf16", "fp32")}
names = {settings: name for settings, (name, _) in found.items()}
lost = sorted(found[1, "bf16"][1] - found[1, "fp32"][1])
print(deepspeed.__version__, names, lost)
assert names == {
    (1, "bf16"): "DeepSpeedZeroOptimizer",
    (1, "fp32"): "BF16_Optimizer",
    (2, "bf16"): "DeepSpeedZeroOptimizer",
    (2, "fp32"): "DeepSpeedZeroOptimizer",
}
assert lost == ["dynamic_loss_scale", "loss_scaler", "overflow", "param_alignment_paddings", "zero_stage"]
assert found[2, "bf16"][1] == found[2, "fp32"][1]
PYTHON
echo "as described"
