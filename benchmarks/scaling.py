"""What 1, 8 and 64 GPUs should give, and the bytes that an update sends.

    python benchmarks/scaling.py                                       computed; docs/memory.md has a part of it
    python benchmarks/scaling.py --count [--configs YAML_OR_JSON ...] [--layers 6]    counted on two CPU processes
    python benchmarks/scaling.py --kernels [--layers 24]                              counted on one

The tables are computed from formulas and the assumptions below: nothing in them is measured. The window of an update is the same on any number of
GPUs, so the accumulation steps fall as GPUs are added. The time of an update is its compute and what of the communication does not hide behind
it: `worst` hides nothing, `best` everything that fits. A ring is as fast as its slowest link: NVLink within a node of 8 GPUs, each GPU's own
network card between nodes.

`--count` gives the bytes per parameter of every collective of an update, with 1 and with 4 micro-batches. Every call of torch's collectives,
from Python or C++, passes its dispatcher, and is counted there with the size of the whole tensor S. What each process sends for it, by the
usual ring, is `2 S (N - 1) / N` for an all-reduce and `S (N - 1) / N` for the others; the last column adds them up without `(N - 1) / N`. The
model and the configs are those of benchmarks/memory.py; the second update is counted, on rank 0.

`--kernels` gives what one decoding step asks of the device: kernels, and views of tensors, which only the host computes. It generates with
transformers' growing cache, as the recipes do, and with its static one, not compiled. The number does not depend on the sizes of a layer.
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
from memory import CONFIGS, DECAY, MODEL, REPOSITORY, bare_accelerator, small_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

PEAK = 989e12  # FLOP/s of an H100 SXM, dense bf16
UTILIZATION = 0.40  # of PEAK, in the matrix products of training and of long prompts: an assumption
MEMORY = 3.35e12  # bytes/s, H100 SXM
LINKS = {
    "NVLink": 360e9,
    "400 Gb/s": 40e9,
    "200 Gb/s": 20e9,
}  # bytes/s a GPU sends: 80 % of 450, 50 and 25 GB/s
MODELS = {
    "0.5 B": (0.5e9, 12e3, 24),
    "7 B": (7e9, 57e3, 32),
    "70 B": (70e9, 328e3, 80),
}  # parameters, bytes of keys and values a token, layers
# What the host takes to ask for the kernels of one layer, for one token of all responses. Measured on an H200 under autocast, where a step
# of 32 layers takes 24 ms for 64 responses and 27 ms for 256.
HOST_A_LAYER = 0.75e-3
ROWS, LENGTH, MICRO = (
    512,
    1024,
    8,
)  # sequences of a window, their tokens, sequences of a micro-batch
STEPS = (1, 4)  # micro-batches of an update whose bytes are counted
LIVE = 10**9  # the parameters that ZeRO-3 keeps gathered, DeepSpeed's default
LAUNCHES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2")


def compute_seconds(parameters: float, tokens: float, flops: float = 8) -> float:
    """`flops` a parameter and token: 2 forward, 4 backward (Kaplan et al. 2020, arXiv:2001.08361), 2 where the forward is run again."""
    return flops * parameters * tokens / (PEAK * UTILIZATION)


def sent_bytes(launch: str, parameters: float, processes: int, accumulation: int) -> float:
    """What each GPU sends for one update, in the proportions that `--count` finds."""
    gathers = (
        2 if parameters <= LIVE else 4
    )  # ZeRO-3 gathers once a micro-batch where all stays gathered until the backward
    each, once = {
        "DDP": (0, 8),
        "ZeRO-1": (0, 6),
        "ZeRO-2": (4, 2),
        "ZeRO-3": (gathers + 2, 0),
        "FSDP2": (4, 4),
    }[launch]
    return (each * accumulation + once) * parameters * (processes - 1) / processes


def update_seconds(
    launch: str, parameters: float, processes: int, link: str
) -> tuple[float, float]:
    """Best and worst time of one update of ROWS sequences."""
    work = compute_seconds(parameters, ROWS * LENGTH / processes)
    talk = sent_bytes(launch, parameters, processes, ROWS // (MICRO * processes)) / LINKS[link]
    return max(work, talk), work + talk


def decode_seconds(
    parameters: float, cache: float, layers: int, rows: int, tokens: int, prompt: int
) -> float:
    """At least this long to decode `tokens` tokens of `rows` responses at once: each reads all half weights and all keys and values, or
    computes, or waits for the host to launch its kernels, whichever takes longest."""
    read = 2 * parameters + rows * cache * (prompt + tokens / 2)
    work = max(read / MEMORY, compute_seconds(parameters, rows, 2))
    return tokens * max(work, layers * HOST_A_LAYER)


def print_computed() -> None:
    """Prints what is computed."""
    print(
        f"computed, not measured: {ROWS} sequences of {LENGTH} tokens an update, micro-batches of {MICRO}, gradient checkpointing\n"
    )
    print(
        "| model | launch | update, s: 1 GPU | 8 GPUs, NVLink | 64 GPUs, 400 Gb/s | 64 GPUs, 200 Gb/s | speed-up of 64, 400 Gb/s |"
    )
    print("|" + " --- |" * 7)
    for name, (parameters, *_) in MODELS.items():
        alone = compute_seconds(parameters, ROWS * LENGTH)
        for launch in LAUNCHES:
            times = [
                update_seconds(launch, parameters, n, link)
                for n, link in ((8, "NVLink"), (64, "400 Gb/s"), (64, "200 Gb/s"))
            ]
            cells = " | ".join(f"{best:.2f} to {worst:.2f}" for best, worst in times)
            print(
                f"| {name} | {launch} | {alone:.1f} | {cells} | {alone / times[1][1]:.0f} to {alone / times[1][0]:.0f} |"
            )

    print(
        "\n| launch | GB sent by a GPU for each billion parameters: 8 GPUs, 8 micro-batches | 64 GPUs, 1 micro-batch | 64 GPUs, 8 micro-batches |"
    )
    print("|" + " --- |" * 4)
    for launch in LAUNCHES:
        cells = " | ".join(
            f"{sent_bytes(launch, 1.001e9, n, steps) / 1.001e9:.1f}"
            for n, steps in ((8, 8), (64, 1), (64, 8))
        )
        print(f"| {launch} | {cells} |")

    print(
        "\n| model | responses at once | decode 512 tokens, s | score and learn, s | share of generation |\n|"
        + " --- |" * 5
    )
    for name, (parameters, cache, layers) in MODELS.items():
        for rows in (8, 32, 128):
            decode = decode_seconds(parameters, cache, layers, rows, 512, 512)
            # Actor and critic learn (8 each); before it policy, critic, reference and reward model read the responses once (2 each).
            learn = compute_seconds(parameters, rows * LENGTH, 2 * 8 + 4 * 2)
            print(
                f"| {name} | {rows} | {decode:.1f} | {learn:.1f} | {decode / (decode + learn):.0%} |"
            )

    print(
        "\n| model | whole actor, GB | gather it once, s: 8 GPUs, NVLink | 64 GPUs, 400 Gb/s | 64 GPUs, 200 Gb/s |\n|"
        + " --- |" * 5
    )
    for name, (parameters, *_) in MODELS.items():
        times = " | ".join(
            f"{2 * parameters * (n - 1) / n / LINKS[link]:.2f}"
            for n, link in ((8, "NVLink"), (64, "400 Gb/s"), (64, "200 Gb/s"))
        )
        print(f"| {name} | {2 * parameters / 1e9:.0f} | {times} |")


# ============================================================ counted
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
    from preference_recipes.models import packing, prepare
    from preference_recipes.models.logprobs import LogProbModel

    accelerator = bare_accelerator(steps)
    policy = LogProbModel(
        AutoModelForCausalLM.from_config(
            LlamaConfig(**MODEL, num_hidden_layers=layers), dtype=torch.float32
        )
    )
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in policy.parameters())
    optimizer = torch.optim.AdamW(optim.parameter_groups(policy, DECAY), lr=1e-4)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer)
    answer = torch.randint(0, MODEL["vocab_size"], (15,)).tolist()
    batch = packing.Packer(accelerator.device).make_batch([[1]], [answer])
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


def count(config: Path, steps: int, layers: int) -> dict:
    """Launches two processes with a config, and returns what `worker` printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", str(small_config(config, Path(folder)))),
            *("--num_processes", "2", "--main_process_port", "0", str(Path(__file__).resolve())),
            *("--worker", str(steps), "--layers", str(layers)),
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
    return json.loads(found[0].removeprefix("COUNTED "))


def print_counted(configs: list[Path], layers: int) -> None:
    """Prints a line for each config and number of micro-batches."""
    for config in configs:
        for steps in STEPS:
            counted = count(config, steps, layers)
            sizes = {name: size / counted["parameters"] for name, size in counted["bytes"].items()}
            volume = sum(size * (2 if "allreduce" in name else 1) for name, size in sizes.items())
            parts = ", ".join(
                f"{name} {size:.2f}" for name, size in sorted(sizes.items()) if size >= 0.005
            )
            print(
                f"{config.name:14} {counted['launch']:26} {steps} micro-batches: {parts}; "
                f"sent / ((N - 1) / N): {volume:.2f}",
                flush=True,
            )


# What returns another view of a tensor, and asks nothing of the device.
VIEWS = {
    "_unsafe_view",
    "alias",
    "as_strided",
    "chunk",
    "detach",
    "expand",
    "lift_fresh",
    "permute",
    "reshape",
    "select",
    "slice",
    "split",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
}


class CountOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations: Counter = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.operations["views" if name in VIEWS else "kernels"] += 1
        return function(*args, **(kwargs or {}))


def operations_of(model, new_tokens: int, **settings) -> Counter:
    """Counts what generating so many tokens for four prompts takes."""
    from preference_recipes.rollouts.generation import SampleByUniform

    prompts = torch.full((4, 20), 7)
    draws = SampleByUniform(torch.rand(4, new_tokens), temperature=1.0)
    with torch.no_grad(), CountOperations() as counted:
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            eos_token_id=[1],  # of 8192 tokens, so none is likely to be drawn
            logits_processor=[draws],
            **settings,
        )
    return counted.operations


def print_kernels(layers: int) -> None:
    """Prints by how much the counts grow with one more token."""
    torch.manual_seed(0)
    config = LlamaConfig(**MODEL, num_hidden_layers=layers)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, settings in (
        ("growing cache", {}),
        ("static cache", {"cache_implementation": "static", "disable_compile": True}),
    ):
        step = operations_of(model, 9, **settings) - operations_of(model, 8, **settings)
        print(f"{name}, {layers} layers, a step: {step['kernels']} kernels, {step['views']} views")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", action="store_true", help="count bytes, on two CPU processes")
    parser.add_argument(
        "--configs",
        nargs="+",
        type=Path,
        default=[REPOSITORY / "accelerate_configs" / name for name in CONFIGS[1:]],
    )
    parser.add_argument("--kernels", action="store_true", help="count those of a decoding step")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.layers, args.worker)
    elif args.count:
        print_counted(args.configs, args.layers or 6)
    elif args.kernels:
        print_kernels(args.layers or 24)
    else:
        print_computed()


if __name__ == "__main__":
    main()
