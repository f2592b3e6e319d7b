#!/usr/bin/env bash
# DeepSpeed 0.19.8: under ZeRO-3 a module is given copies of its positional inputs, without their attributes.
#
# The good guess: a hook that counts when weights may be released hands on what the caller gave, so that a mask or a
# batch that carries something, such as the lengths of its rows, arrives with it.
# What was seen: with stages 0 to 2 the module gets the very tensor. With stage 3 a positional tensor, also one in a
# list or a dict, arrives as a detached copy without the attribute; a dict's entries are replaced in the caller's own
# dict. A keyword argument arrives as it is.
# Why it matters: code of the form `getattr(mask, "lengths", None)` takes its other branch under ZeRO-3 alone, and trains
# on something else without a word.
# Where: deepspeed/runtime/zero/parameter_offload.py: PostBackwardFunctionModule, which returns output.detach().
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


class Reader(torch.nn.Module):
    """Says which of its inputs carry the lengths that they were given with."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, positional, batch, keyword):
        inputs = (positional, batch["in a dict"], keyword)
        self.seen = tuple(getattr(tensor, "lengths", None) for tensor in inputs)
        return self.layer(positional)


def with_lengths():
    tensor = torch.ones(3, 2)
    tensor.lengths = [2, 1, 2]
    return tensor


def seen(stage: int) -> tuple:
    """What the module sees, and whether the dict still holds the caller's tensor."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(config))
    model = Reader()
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    given = with_lengths()
    batch = {"in a dict": given}
    prepared(with_lengths(), batch, keyword=with_lengths())
    accelerator.free_memory()
    accelerator.state._reset_state(reset_partial_state=True)
    return (*model.seen, batch["in a dict"] is given)


lengths = [2, 1, 2]
found = {stage: seen(stage) for stage in (0, 2, 3)}
print(deepspeed.__version__, found)
assert found[0] == found[2] == (lengths, lengths, lengths, True)
assert found[3] == (None, None, lengths, False)
PYTHON
echo "as described"
