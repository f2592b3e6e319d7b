#!/usr/bin/env bash
# transformers 5.23.0, RWKV: in a batch, the second generated token of a row depends on the other rows.
#
# The good guess: a row of a batch is continued as it is alone, at least where all rows are equally long.
# What was seen: the logits for the first new token are those of the prompt alone. Those for the second are off by 1.2
# of their standard deviation; by 0 if the cache is off, or the batch has one row.
# Why it matters: responses of a batch come from no policy at all, and nothing tells.
# Where: RwkvSelfAttention and RwkvFeedForward in models/rwkv/modeling_rwkv.py: the state of one token [rows, width]
# meets hidden states [rows, 1, width], and torch makes [rows, rows, width] of them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.0 transformers==5.23.0
"$folder/env/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import RwkvConfig, RwkvForCausalLM

torch.manual_seed(0)
config = RwkvConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, context_length=64)
model = RwkvForCausalLM(config).eval()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(3)  # else the logits are nearly equal
prompts = torch.tensor([[5, 6, 7, 8], [50, 60, 70, 80]])
next_tokens = torch.tensor([[9], [90]])


@torch.no_grad()
def logits(rows: slice, use_cache: bool) -> list[torch.Tensor]:
    """Of the first row, after its prompt and after one token more."""
    first = model(prompts[rows], use_cache=use_cache)
    if use_cache:
        second = model(next_tokens[rows], state=first.state, use_cache=True)
    else:
        second = model(torch.cat([prompts[rows], next_tokens[rows]], 1), use_cache=False)
    return [first.logits[0, -1], second.logits[0, -1]]


alone = logits(slice(1), use_cache=False)
found = {}
for name, rows, use_cache in [("alone", slice(1), True), ("two", slice(2), True), ("no cache", slice(2), False)]:
    pairs = zip(logits(rows, use_cache), alone)
    found[name] = [round(((one - other).abs().mean() / other.std()).item(), 1) for one, other in pairs]
print(transformers.__version__, found)
assert found == {"alone": [0, 0], "two": [0, 1.2], "no cache": [0, 0]}
PYTHON
echo "as described"
