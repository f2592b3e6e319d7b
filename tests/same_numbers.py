"""Whether this tree makes the numbers of another one: each recipe's demo, in both, on this machine.

    git worktree add ../before COMMIT
    python tests/same_numbers.py ../before [--recipes dpo sft] [--launchers plain ddp fp16]

Each run makes six updates, and is made once more from its checkpoint after the third. Compared are the lines of
metrics.jsonl but for `perf/*`, samples.jsonl, and the bytes of the actor. Another processor rounds differently.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import runs
from recipes import RECIPES

LAUNCHERS = {"plain": [], "ddp": runs.LAUNCHERS["ddp"], "fp16": runs.config_launcher("ds_fp16")}
SETTINGS = dict(max_steps=6, logging_steps=1, eval_steps=3, save_steps=3, save_total_limit=5)
SETTINGS |= dict(max_length=96, train_batch_size=16, micro_train_batch_size=8)
SAMPLING = dict(rollout_batch_size=16, max_new_tokens=8)


def run(tree: Path, recipe: str, launcher: str, output: Path, *more) -> None:
    settings = SETTINGS | (SAMPLING if RECIPES[recipe].generates else {})
    flags = runs.flags_of(settings | {"output_dir": output})
    words = [tree / f"recipes/{recipe}.py", *flags, *more]
    own = {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""}
    runs.launch(LAUNCHERS[launcher], *words, cwd=tree, env=own, timeout=1200)


def written(output: Path, after: int = -1) -> dict:
    """What a run wrote, its logs beyond an update."""
    found = {file.name: file.read_bytes() for file in output.glob("actor/*.safetensors")}
    logs = {"metrics.jsonl": runs.timeless(output), "samples.jsonl": runs.samples(output)}
    for name, lines in logs.items():
        found[name] = [line for line in lines if line["global_step"] > after]
    return found


def results(tree: Path, recipe: str, launcher: str, folder: Path) -> dict[str, dict]:
    whole, resumed = folder / "whole", folder / "resumed"
    run(tree, recipe, launcher, whole)
    run(tree, recipe, launcher, resumed, "--resume", whole / "checkpoints/global_step_000003")
    return {"whole": written(whole), "resumed": written(resumed, after=3)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("before", type=Path)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--launchers", nargs="+", default=list(LAUNCHERS), choices=LAUNCHERS)
    args = parser.parse_args()
    is_same = True
    for recipe in args.recipes:
        for launcher in args.launchers:
            with tempfile.TemporaryDirectory() as folder:
                one = results(args.before.resolve(), recipe, launcher, Path(folder, "before"))
                two = results(runs.REPOSITORY, recipe, launcher, Path(folder, "after"))
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
