"""What one update sends, counted on two CPU processes: bytes per parameter of every collective, with 1 and with 4 micro-batches.

    python benchmarks/communication.py [--configs YAML_OR_JSON ...] [--layers 6]

Every call of torch's collectives, from Python or C++, passes its dispatcher, and is counted there with the size of the whole tensor S. What
each process sends for it, by the usual ring, is `2 S (N - 1) / N` for an all-reduce and `S (N - 1) / N` for the others; the last column
adds them up without `(N - 1) / N`. The model and the configs are those of benchmarks/memory.py; the second update is counted, on rank 0.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from memory import CONFIGS, MODEL, REPOSITORY, bare_accelerator, small_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

STEPS = (1, 4)


class CountCollectives(TorchDispatchMode):
    """Bytes of the largest tensor of each collective, which is the whole of it, by the collective's name."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function.overloadpacket.__name__.strip("_")
            groups = [
                [leaf for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor)]
                for arg in args
            ]
            self.bytes[name] += max(
                (sum(tensor.nbytes for tensor in group) for group in groups), default=0
            )
        return function(*args, **(kwargs or {}))


def worker(layers: int, steps: int) -> None:
    """Runs two updates of `steps` micro-batches, and prints the counts of the second as a line of JSON."""
    from common import engine, optim
    from common.models import packing, prepare
    from common.models.logprobs import LogProbModel

    accelerator = bare_accelerator(steps)
    policy = LogProbModel(
        AutoModelForCausalLM.from_config(
            LlamaConfig(**MODEL, num_hidden_layers=layers), dtype=torch.float32
        )
    )
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in policy.parameters())
    optimizer = torch.optim.AdamW(optim.parameter_groups(policy, 0.1), lr=1e-4)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer)
    batch = packing.make_batch(
        [[1]], [torch.randint(0, MODEL["vocab_size"], (15,)).tolist()], False, accelerator.device
    )
    for _update in range(2):
        with CountCollectives() as counted:
            for _ in range(steps):
                with accelerator.accumulate(model):
                    accelerator.backward(-model(batch)["logps"].mean())
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
    if accelerator.is_main_process:
        print(
            "COUNTED "
            + json.dumps(
                {
                    "launch": engine.describe(accelerator),
                    "parameters": parameters,
                    "bytes": counted.bytes,
                }
            ),
            flush=True,
        )
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--configs",
        nargs="+",
        type=Path,
        default=[REPOSITORY / "accelerate_configs" / name for name in CONFIGS[1:]],
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.layers, args.worker)
    for config in args.configs:
        for steps in STEPS:
            with tempfile.TemporaryDirectory() as folder:
                command = [
                    sys.executable,
                    "-m",
                    "accelerate.commands.launch",
                    "--config_file",
                    str(small_config(config, Path(folder))),
                    "--num_processes",
                    "2",
                    "--main_process_port",
                    "0",
                    str(Path(__file__).resolve()),
                    "--worker",
                    str(steps),
                    "--layers",
                    str(args.layers),
                ]
                environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(REPOSITORY)}
                result = subprocess.run(
                    command,
                    cwd=REPOSITORY,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=600,
                )
            found = [line for line in result.stdout.splitlines() if line.startswith("COUNTED ")]
            if not found:
                sys.exit(f"{' '.join(command)}\n{(result.stdout + result.stderr)[-4000:]}")
            counted = json.loads(found[0].removeprefix("COUNTED "))
            sizes = {name: size / counted["parameters"] for name, size in counted["bytes"].items()}
            volume = sum(size * (2 if "allreduce" in name else 1) for name, size in sizes.items())
            parts = ", ".join(
                f"{name} {size:.2f}" for name, size in sorted(sizes.items()) if size >= 0.005
            )
            print(
                f"{config.name:14} {counted['launch']:26} {steps} micro-batches: {parts}; sent / ((N - 1) / N): {volume:.2f}",
                flush=True,
            )
    return None


if __name__ == "__main__":
    main()
