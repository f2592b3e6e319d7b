"""Times a recipe of this tree beside the same recipe of another one, such as a worktree of an older commit.

    python benchmarks/trees.py ../older recipes/dpo.py [--updates 8] [--rounds 5] -- --model_name_or_path M --dataset_name D ...

What follows `--` are flags of the recipe that both trees know. In each round both trees run twice, in turn: one update, and one plus `--updates`.
`update` is the difference of the two runs for each update; `start` is what is left of the first one, from the command to the end of the process.
CPU time counts all processes of a run, in one thread each, so work of others on the machine changes it little. Ratios are ours / other.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

OURS = Path(__file__).resolve().parents[1]


def cpu_seconds(tree: Path, recipe: str, updates: int, flags: list[str]) -> float:
    """Returns the CPU seconds, of the user and the system, of a run with `updates` updates."""
    path = f"{tree}:{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, recipe, *flags, "--max_steps", str(updates)]
        command += ["--output_dir", f"{folder}/run"]
        subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path)
    parser.add_argument("recipe")
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    flags = words[end + 1 :]

    trees = [OURS, args.other.resolve()]
    for tree in trees:
        cpu_seconds(tree, args.recipe, 1, flags)  # the data is tokenised and cached
    starts = []
    updates = []
    for number in range(args.rounds):
        one = {}
        more = {}
        for tree in trees if number % 2 else reversed(trees):  # who is first changes
            one[tree] = cpu_seconds(tree, args.recipe, 1, flags)
            more[tree] = cpu_seconds(tree, args.recipe, 1 + args.updates, flags)
        updates.append([(more[tree] - one[tree]) / args.updates for tree in trees])
        starts.append([one[tree] - update for tree, update in zip(trees, updates[-1])])
        start = " ".join(f"{seconds:.2f}" for seconds in starts[-1])
        update = " ".join(f"{seconds:.3f}" for seconds in updates[-1])
        print(f"ours, other: start {start}, update {update}", flush=True)
    for name, pairs in (("start", starts), ("update", updates)):
        ratios = sorted(ours / other for ours, other in pairs)
        print(f"{name}: {statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}")


if __name__ == "__main__":
    main()
