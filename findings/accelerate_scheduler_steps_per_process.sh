#!/usr/bin/env bash
# accelerate 1.15.0: a prepared scheduler steps once for each process, so that a schedule ends early.
#
# The good guess: scheduler.step() after each update goes one step on, on two processes as on one.
# What was seen: LinearLR over 10 updates is at 0.5 after 5 updates on one process, and at its end, 0, on two.
# Why it matters: a schedule whose length is counted in updates is over after 1/n of the run with n processes; the rest
# has the last learning rate, often 0. The default means that a length is counted in batches of single processes
# (split_batches=False); step_scheduler_with_optimizer=False, or a scheduler that is not prepared, is right.
# Where: AcceleratedScheduler.step in accelerate/scheduler.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.0 accelerate==1.15.0
cat >"$folder/train.py" <<'PYTHON'
import sys

import accelerate
import torch

accelerator = accelerate.Accelerator(cpu=True)
assert accelerator.num_processes == int(sys.argv[1])
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
for _ in range(5):
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
rate = round(scheduler.get_last_lr()[0], 4)
expected = {1: 0.5, 2: 0.0}[accelerator.num_processes]
accelerator.print(accelerate.__version__, f"{sys.argv[1]} processes, after 5 of 10 updates: {rate}")
assert rate == expected, f"expected {expected}"
PYTHON
for processes in 1 2; do
    "$folder/env/bin/torchrun" --standalone --nproc-per-node "$processes" "$folder/train.py" "$processes"
done
echo "as described"
