"""Whether this tree makes the numbers of another one: each recipe's demo, in both, on this machine.

    git worktree add ../before COMMIT
    python tests/same_numbers.py ../before [--recipes dpo sft] [--launchers plain ddp fp16]

Each run makes six updates, and is made once more from its checkpoint after the third. Compared are the lines of
metrics.jsonl but for `perf/*`, samples.jsonl, and the bytes of the actor. Another processor rounds differently.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
LAUNCH = "-m accelerate.commands.launch --main_process_port 0 --config_file accelerate_configs"
LAUNCHERS = {
    "plain": "",
    "ddp": f"{LAUNCH}/cpu.yaml --num_processes 2",
    "fp16": f"{LAUNCH}/ds_fp16.yaml",
}
RECIPES = ["sft", "reward", "dpo", "kto", "ppo", "grpo", "distill"]
SETTINGS = (
    "--max_steps 6 --logging_steps 1 --eval_steps 3 --save_steps 3 --save_total_limit 5 "
    "--max_length 96 --train_batch_size 16 --micro_train_batch_size 8"
)
SAMPLING = "--rollout_batch_size 16 --max_new_tokens 8"


def run(tree: Path, recipe: str, launcher: str, output: Path, *more) -> None:
    flags = SETTINGS + f" {SAMPLING}" * (recipe in ("ppo", "grpo", "distill"))
    words = f"{LAUNCHERS[launcher]} recipes/{recipe}.py {flags}".split()
    own = {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, *words, "--output_dir", output, *more],
        cwd=tree,
        env={**os.environ, **own, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )


def written(output: Path, after: int = -1) -> dict:
    """What a run wrote, its logs beyond an update."""
    found = {file.name: file.read_bytes() for file in output.glob("actor/*.safetensors")}
    for log in output.glob("*s.jsonl"):
        lines = map(json.loads, log.read_text().splitlines())
        found[log.name] = [
            {tag: value for tag, value in line.items() if not tag.startswith("perf/")}
            for line in lines
            if line["global_step"] > after
        ]
    return found


def results(tree: Path, recipe: str, launcher: str, folder: Path) -> dict[str, dict]:
    whole, resumed = folder / "whole", folder / "resumed"
    run(tree, recipe, launcher, whole)
    run(tree, recipe, launcher, resumed, "--resume", whole / "checkpoints/global_step_000003")
    return {"whole": written(whole), "resumed": written(resumed, after=3)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("before", type=Path)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--launchers", nargs="+", default=list(LAUNCHERS), choices=LAUNCHERS)
    args = parser.parse_args()
    is_same = True
    for recipe in args.recipes:
        for launcher in args.launchers:
            with tempfile.TemporaryDirectory() as folder:
                one = results(args.before.resolve(), recipe, launcher, Path(folder, "before"))
                two = results(HERE, recipe, launcher, Path(folder, "after"))
            other = [
                f"{file} of the {name} run"
                for name in one
                for file in {**one[name], **two[name]}
                if one[name].get(file) != two[name].get(file)
            ]
            is_same &= not other
            print(f"{recipe:8}{launcher:8}{', '.join(other) or 'equal'}", flush=True)
    sys.exit(not is_same)


if __name__ == "__main__":
    main()
