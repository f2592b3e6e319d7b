#!/usr/bin/env bash
# torch 2.13.0: FlopCounterMode counts no operation of a product that is added in place.
#
# The good guess: a += b @ c, torch.addmm(a, b, c) and a.addmm_(b, c) are the same products, so they count the same.
# What was seen: 2880 for the first two, 0 for the last, without a warning.
# Why it matters: whoever saves memory with addmm_, as in the gradient of an output layer, sees the measured FLOPs of
# training fall by a third of the head's, and with them an MFU that is too small.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.0
"$folder/env/bin/python" - <<'PYTHON'
import torch
from torch.utils.flop_counter import FlopCounterMode

rows, inner, columns = 30, 6, 8
left, right = torch.randn(rows, inner), torch.randn(inner, columns)


def flop(work) -> int:
    with FlopCounterMode(display=False) as counter:
        work(torch.zeros(rows, columns))
    return counter.get_total_flops()


found = {
    "total += left @ right": flop(lambda total: total.add_(left @ right)),
    "torch.addmm(total, left, right)": flop(lambda total: torch.addmm(total, left, right)),
    "total.addmm_(left, right)": flop(lambda total: total.addmm_(left, right)),
}
print(torch.__version__, found)
exact = 2 * rows * inner * columns
assert list(found.values()) == [exact, exact, 0], f"expected {exact}, {exact}, 0"
PYTHON
echo "as described"
