"""What the output layer takes: peak memory and CPU time, ours by chunks beside a plain one.

    python benchmarks/head.py [--vocabulary 151936] [--width 896] [--positions 1024] [--rounds 3]

The plain one holds the logits of all positions at once and adds up its gradient by
`grad_weight += grad.T @ hidden`. Both compute the log-probs of the same targets and the gradients of
hidden states and weight in fp32, in turn, each in a process of its own with one thread. The memory is
what a process holds at most beyond hidden states and weight. At the end: how far the two are apart.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch

from preference_recipes.models.logprobs import ChunkedHead, LogProbJob


class Plain(torch.autograd.Function):
    """Log-probs of the targets, all logits in one piece."""

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        all_logps = (hidden @ weight.T).log_softmax(-1)
        ctx.save_for_backward(hidden, weight, targets, all_logps)
        return all_logps.gather(1, targets[:, None]).squeeze(1)

    @staticmethod
    def backward(ctx, grad_logps):
        hidden, weight, targets, all_logps = ctx.saved_tensors
        grad = -all_logps.exp()
        grad[torch.arange(len(targets)), targets] += 1
        grad *= grad_logps[:, None]
        grad_weight = torch.zeros_like(weight)
        grad_weight += grad.T @ hidden
        return grad @ weight, grad_weight, None


def resident(field: str) -> float:
    """Returns MiB of this process: `VmRSS`, or `VmHWM`, the most so far."""
    with open("/proc/self/status", encoding="utf-8") as file:
        (line,) = [line for line in file if line.startswith(field)]
    return int(line.split()[1]) / 1024


def measure(way: str, vocabulary: int, width: int, positions: int) -> dict:
    """Runs one way, forward and backward, and returns what it took and what it gave."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, width, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).div_(width**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (positions,), generator=generator)
    held = resident("VmRSS")
    start = time.process_time()
    if way == "plain":
        logps = Plain.apply(hidden, weight, targets)
    else:
        (logps,) = ChunkedHead.apply(hidden, weight, None, LogProbJob(targets))
    logps.mean().backward()
    return {
        "seconds": time.process_time() - start,
        "MiB": resident("VmHWM") - held,
        "logps": logps.sum().item(),
        "norms": [hidden.grad.double().norm().item(), weight.grad.double().norm().item()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=["ours", "plain"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.way, args.vocabulary, args.width, args.positions)))
        return
    found: dict[str, list[dict]] = {"ours": [], "plain": []}
    for _ in range(args.rounds):
        for way, results in found.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            said = subprocess.check_output(command, env=environment, text=True)
            results.append(json.loads(said.splitlines()[-1]))
    for unit in ("seconds", "MiB"):
        ours, plain = (
            statistics.median(one[unit] for one in results) for results in found.values()
        )
        print(f"{unit}: ours {ours:.1f}, plain {plain:.1f}, ratio {ours / plain:.2f}")
    one, other = (results[0] for results in found.values())
    pairs = zip([one["logps"], *one["norms"]], [other["logps"], *other["norms"]])
    print(f"apart: {max(abs(a - b) / abs(b) for a, b in pairs):.1e}")


if __name__ == "__main__":
    main()
