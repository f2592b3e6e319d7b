#!/usr/bin/env bash
# torch 2.13.0: FlopCounterMode counts no attention on a CPU, neither forward nor backward, with a mask or without.
#
# The good guess: scaled_dot_product_attention is counted, since the table has its kernels: 4 * heads * rows^2 * width.
# What was seen: 0 on a CPU with or without a mask, also with its backward; on the device "meta" the right 524288.
# Why it matters: whoever measures the FLOPs of a step on a CPU misses all of the attention, a third of the work and
# more for long rows. The CPU has a kernel of its own, which the table lacks.
# Where: torch/utils/flop_counter.py registers no aten._scaled_dot_product_flash_attention_for_cpu.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.0
"$folder/env/bin/python" - <<'PYTHON'
import torch
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils.flop_counter import FlopCounterMode

heads, rows, width = 2, 64, 16


def flop(work) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


on_cpu = torch.randn(1, heads, rows, width, requires_grad=True)
on_meta = on_cpu.detach().to("meta")
mask = torch.ones(rows, rows, dtype=torch.bool)
found = {
    "cpu": flop(lambda: attend(on_cpu, on_cpu, on_cpu)),
    "cpu, with a mask": flop(lambda: attend(on_cpu, on_cpu, on_cpu, attn_mask=mask)),
    "cpu, with backward": flop(lambda: attend(on_cpu, on_cpu, on_cpu).sum().backward()),
    "meta": flop(lambda: attend(on_meta, on_meta, on_meta)),
}
print(torch.__version__, found)
exact = 4 * heads * rows * rows * width
assert list(found.values()) == [0, 0, 0, exact], f"expected 0, 0, 0, {exact}"
PYTHON
echo "as described"
