#!/usr/bin/env bash
# DeepSpeed 0.19.8, ZeRO 1 to 3: weight decay shrinks parameters that the loss never touches.
#
# The good guess: as in torch, an optimizer leaves parameters whose gradient is None.
# What was seen: AdamW, learning rate 0.1, decay 0.5: the unused weights are 0.95 of what they were at each stage; 1 in
# torch.
# Why it matters: a part of a model that is switched off in a stage of the training, such as a vision tower or the
# experts of another task, fades in silence, and Adam counts steps of it.
# Where: deepspeed/runtime/zero/stage_1_and_2.py and stage3.py: a missing gradient is a part of zeros.
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


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = torch.nn.Linear(2, 2, bias=False)
        self.unused = torch.nn.Linear(2, 2, bias=False)

    def forward(self, states):
        return self.used(states)


def left_of_unused(stage: int) -> float:
    torch.manual_seed(0)
    model = Model()
    before = model.unused.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    if stage == 0:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return (model.unused.weight / before).mean().item()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    weight = engine.module.unused.weight
    with deepspeed.zero.GatheredParameters([weight], enabled=stage == 3):
        return (weight.detach() / before).mean().item()


found = {stage: round(left_of_unused(stage), 4) for stage in (0, 1, 2, 3)}
print(deepspeed.__version__, found, "(0: torch alone)")
assert found == {0: 1.0, 1: 0.95, 2: 0.95, 3: 0.95}
PYTHON
echo "as described"
