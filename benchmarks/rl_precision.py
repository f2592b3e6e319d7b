"""The same PPO and GRPO runs in fp32, bf16 and fp16: losses, gradient norms, and how far the trainer's probabilities are from the sampler's.

    python benchmarks/rl_precision.py [--recipes ppo grpo] [--updates 24] [--folder DIR] [FLAGS OF THE RECIPES ...]

Runs the demos of the recipes themselves by `accelerate launch`, and reads their metrics.jsonl: two minutes on two cores. Without a GPU
half precision is emulated: half weights and activations, products in fp32 that are rounded to half (common/cpu.py). fp32 has `cpu.yaml` there,
and on a GPU `single_gpu.yaml --mixed_precision no`; bf16 is `ds_zero2.yaml`, fp16 `ds_fp16.yaml`. With `--folder` the runs stay there, and the
same command takes those that are done from it.

|ratio - 1| compares a token's probability in training with that in the pass before it, by the same weights, so it is rounding alone:

    grpo   the sampler's, as generation drew the token (`sampling/sampling_logp_difference/*`)
    ppo    the scoring pass's, which has other micro-batches (`val/max_rounding`, the largest only)

The first update has the same samples in all precisions unless rounding moved a draw. Later ones have not.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = REPOSITORY / "accelerate_configs"
DIFFERENCE = "sampling/sampling_logp_difference/"


def launches() -> dict[str, list[str]]:
    """Returns the launcher's flags of each precision."""
    fp32 = ["cpu.yaml"]
    if torch.cuda.is_available():
        fp32 = ["single_gpu.yaml", "--mixed_precision", "no"]
    return {"fp32": fp32, "bf16": ["ds_zero2.yaml"], "fp16": ["ds_fp16.yaml"]}


def run(recipe: str, launcher: list[str], output_dir: Path, flags: list[str]) -> list[dict]:
    """Runs a demo, unless it is there already; returns the lines of its updates."""
    metrics = output_dir / "metrics.jsonl"
    if not (output_dir / "actor").is_dir():
        config, *more = launcher
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", str(CONFIGS / config), *more, "--num_processes", "1"),
            *("--main_process_port", "0", str(REPOSITORY / "recipes" / f"{recipe}.py")),
            *("--output_dir", str(output_dir), "--report_to", "none", "--eval_steps", "0"),
            *flags,
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "loss" in line]


def row(recipe: str, precision: str, lines: list[dict]) -> list[str]:
    """Returns the cells of one run."""
    first = lines[0]
    norms = [line["grad_norm"] for line in lines]
    means = [line[f"{DIFFERENCE}mean"] for line in lines if f"{DIFFERENCE}mean" in line]
    largest = [line["val/max_rounding"] for line in lines if "val/max_rounding" in line]
    # Of a difference of log-probs, the ratio's.
    largest += [
        math.expm1(line[f"{DIFFERENCE}max"])
        for line in lines
        if means and f"{DIFFERENCE}max" in line
    ]
    return [
        recipe,
        precision,
        f"{first['loss']:.6f}",
        f"{first['grad_norm']:.5f}",
        f"{statistics.mean(norms):.4f}",
        f"{statistics.mean(means):.1e}" if means else "-",
        f"{max(largest):.1e}" if largest else "-",
        f"{lines[-1]['skipped_steps']}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=["ppo", "grpo"], choices=["ppo", "grpo"])
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--folder", type=Path, help="where the runs are kept; default: nowhere")
    args, flags = parser.parse_known_args()
    flags = ["--max_steps", str(args.updates), "--logging_steps", "1", *flags]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        rows = [
            row(recipe, precision, run(recipe, launcher, folder / f"{recipe}-{precision}", flags))
            for recipe in args.recipes
            for precision, launcher in launches().items()
        ]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, halves emulated"
    print(f"{args.updates} updates; {device}; torch {torch.__version__}\n")
    header = (
        "recipe", "precision", "loss of update 1", "grad norm of update 1", "grad norm, mean of all",
        "ratio - 1, mean", "largest", "skipped",
    )  # fmt: skip
    print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    for cells in rows:
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
