"""Times a recipe of this tree beside the same recipe of another one, such as a worktree of an older commit.

    python benchmarks/trees.py ../older recipes/dpo.py [--updates 60] [--rounds 5] -- --model_name_or_path M --dataset_name D ...

What follows `--` are flags of the recipe that both trees know. In each round both trees run once, in turn, and end when so many updates are logged.
`start` is from the command to the first line of the log, `update` what each update takes after the first one; no evaluation should lie in between.
Both are CPU seconds of one thread, so work of others on the machine changes them little. Ratios are ours / other.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

OURS = Path(__file__).resolve().parents[1]


def cpu_seconds(tree: Path, recipe: str, updates: int, flags: list[str]) -> tuple[float, float]:
    """Returns the CPU seconds, of the user and the system, of a run's start and of an update."""
    path = f"{tree}:{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, recipe, *flags, "--logging_steps", "1"]
    at: dict[str, float] = {}  # CPU seconds at the first line, the first update and the last one
    with tempfile.TemporaryDirectory() as folder:
        command += ["--max_steps", str(updates + 1), "--output_dir", f"{folder}/run"]
        with open(f"{folder}/output", "w") as output:
            run = psutil.Popen(command, cwd=tree, env=environment, stdout=output, stderr=output)
        log = Path(folder, "run", "metrics.jsonl")
        while "last" not in at:
            if run.poll() is not None:
                sys.exit(Path(folder, "output").read_text())
            time.sleep(0.005)
            text = log.read_text() if log.exists() else ""
            logged = text.count('"loss":')
            reached = {"start": text != "", "first": logged > 0, "last": logged > updates}
            at = {name: sum(run.cpu_times()[:4]) for name, yes in reached.items() if yes} | at
        run.kill()
        run.wait()
    return at["start"], (at["last"] - at["first"]) / updates


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path)
    parser.add_argument("recipe")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    flags = words[end + 1 :]

    trees = [OURS, args.other.resolve()]
    for tree in trees:
        cpu_seconds(tree, args.recipe, 1, flags)  # the data is tokenised and cached
    rounds = []
    for number in range(args.rounds):
        seconds = {}
        for tree in trees if number % 2 else reversed(trees):  # who is first changes
            seconds[tree] = cpu_seconds(tree, args.recipe, args.updates, flags)
        rounds.append([seconds[tree] for tree in trees])
        (our_start, our_update), (start, update) = rounds[-1]
        line = f"start {our_start:.2f} {start:.2f}, update {our_update:.4f} {update:.4f}"
        print(f"ours, other: {line}", flush=True)
    for name, place in (("start", 0), ("update", 1)):
        ratios = sorted(ours[place] / other[place] for ours, other in rounds)
        print(f"{name}: {statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}")


if __name__ == "__main__":
    main()
