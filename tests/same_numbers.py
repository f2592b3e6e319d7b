"""Whether this tree makes the numbers of another one: each recipe's demo, in both, on this machine.

    git worktree add ../before COMMIT
    python tests/same_numbers.py ../before [--recipes dpo sft] [--launchers plain ddp fp16]

Each run makes six updates with evaluations and a checkpoint after the third, and is made once more from that checkpoint.
Compared are the lines of metrics.jsonl but for `perf/*`, samples.jsonl, and the bytes of the actor. Not part of
`make test`: another processor rounds differently, so nothing can be stored.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
LAUNCH = ["-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]
LAUNCHERS = {
    "plain": [],
    "ddp": [*LAUNCH, "accelerate_configs/cpu.yaml", "--num_processes", "2"],
    "fp16": [*LAUNCH, "accelerate_configs/ds_fp16.yaml"],
}
SETTINGS = "--max_steps 6 --logging_steps 1 --eval_steps 3 --save_steps 3 --save_total_limit 5 --max_length 96"
SAMPLING = "--rollout_batch_size 16 --max_new_tokens 8"


def run(tree: Path, recipe: str, launcher: str, output: Path, *more: str) -> None:
    words = [*SETTINGS.split(), *(SAMPLING.split() if recipe in ("ppo", "grpo", "distill") else [])]
    words += ["--train_batch_size", "16", "--micro_train_batch_size", "8", *more]
    command = [sys.executable, *LAUNCHERS[launcher], f"recipes/{recipe}.py", "--output_dir", output]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*map(str, command), *words], cwd=tree, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{tree} {recipe} {launcher}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def written(output: Path, after: int = -1) -> dict:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    samples = output / "samples.jsonl"
    examples = samples.read_text().splitlines() if samples.exists() else []
    return {
        "metrics": [
            {name: value for name, value in line.items() if not name.startswith("perf/")}
            for line in lines
            if line["global_step"] > after
        ],
        "samples": [line for line in examples if json.loads(line)["global_step"] > after],
        "actor": {file.name: file.read_bytes() for file in output.glob("actor/*.safetensors")},
    }


def results(tree: Path, recipe: str, launcher: str, folder: Path) -> list[dict]:
    whole = folder / "whole"
    run(tree, recipe, launcher, whole)
    resumed = folder / "resumed"
    checkpoint = whole / "checkpoints" / "global_step_000003"
    run(tree, recipe, launcher, resumed, "--resume", str(checkpoint))
    # The logs of a checkpoint come along into another folder, of which older trees know nothing.
    return [written(whole), written(resumed, after=3)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument(
        "--recipes", nargs="+", default=["sft", "reward", "dpo", "kto", "ppo", "grpo", "distill"]
    )
    parser.add_argument("--launchers", nargs="+", default=list(LAUNCHERS), choices=LAUNCHERS)
    args = parser.parse_args()
    differences = 0
    for recipe in args.recipes:
        for launcher in args.launchers:
            with tempfile.TemporaryDirectory() as folder:
                before = results(args.before.resolve(), recipe, launcher, Path(folder) / "before")
                after = results(HERE, recipe, launcher, Path(folder) / "after")
            other = [
                f"{kind} of the {name} run"
                for name, one, two in zip(("whole", "resumed"), before, after)
                for kind in one
                if one[kind] != two[kind]
            ]
            differences += len(other)
            print(f"{recipe:8}{launcher:8}{', '.join(other) or 'equal'}", flush=True)
    sys.exit(differences > 0)


if __name__ == "__main__":
    main()
