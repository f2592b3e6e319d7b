"""Kills runs with SIGKILL, at random instants and in the middle of saving, resumes them, and compares with runs never killed.

    python benchmarks/storm.py [--recipes sft dpo ...] [--ways plain ddp zero2 zero3 fsdp2 ds_fp16] [--kills 4]
        [--seed 0] [--lora_r 4]

For each recipe and way to launch it: a run never killed, then one killed `--kills` times, every second time while it writes a checkpoint, and
resumed each time with `--resume auto`. A line says whether the final weights and `metrics.jsonl` (timings apart) are the same, bit for
bit, where the kills fell, and whether a run ever began again though there was a checkpoint. Exits with 1 if anything differs.
"""

import argparse
import collections
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from recipes import ANSWER_REWARD, RECIPES, TAUGHT, TIES
from runs import LAUNCHERS, config_launcher, kill, recipe, start, timeless, tiny_inputs, weights

WAYS = {**LAUNCHERS, "ds_fp16": config_launcher("ds_fp16")}
STEPS = "--max_steps 40 --train_batch_size 8 --micro_train_batch_size 2 --learning_rate 0.01 --logging_steps 3"
STEPS += " --save_steps 2 --save_total_limit 2 --report_to none --resume auto"
SAMPLING = "--rollout_batch_size 16 --generate_batch_size 8 --max_new_tokens 6"
OF_RECIPE = {
    "ppo": [*SAMPLING.split(), "--reward_function", ANSWER_REWARD],
    "grpo": [*SAMPLING.split(), "--reward_function", TIES, "--n_samples_per_prompt", 4],
    "distill": [*SAMPLING.split(), *TAUGHT],
}


def begin(folder: Path, name: str, way: str, output: Path, lora_r: int) -> subprocess.Popen:
    return start(
        WAYS[way],
        recipe(name),
        *("--model_name_or_path", folder / "model", "--dataset_name", folder / f"{name}.jsonl"),
        *(*STEPS.split(), *OF_RECIPE.get(name, []), "--output_dir", output, "--lora_r", lora_r),
        env={"PYTHONUNBUFFERED": "1"},
        output=f"{output}.{len(logs(output))}.log",
        fresh=True,
    )


def logs(output: Path) -> list[str]:
    """What was printed by each process that was started for a folder."""
    return [file.read_text() for file in sorted(output.parent.glob(f"{output.name}.*.log"))]


def wait_and_kill(
    process: subprocess.Popen, output: Path, aimed: bool, chance: random.Random
) -> str:
    """Kills at a random instant after this process has come some checkpoints further; where it was then."""
    seen, wanted, last = set(), chance.randint(2, 4), time.time()
    while process.poll() is None and time.time() - last < 240:
        for path in (output / "checkpoints").glob(".global_step_*.writing"):
            seen.add(path.name)
        if len(seen) >= wanted:
            time.sleep(chance.uniform(0, 0.02 if aimed else 0.5))
            break
        time.sleep(0.0002)
    if process.poll() is not None:
        return "ended"
    kill(process)
    files = [len([*path.rglob("*")]) for path in (output / "checkpoints").glob(".global_step_*")]
    whole = sum(
        (path / "manifest.json").exists() for path in (output / "checkpoints").glob("global_step_*")
    )
    assert whole, f"{output}: killed after its first checkpoint, it has none"
    return f"{'in' if files else 'between'} saving"


def storm(
    folder: Path, name: str, way: str, kills: int, lora_r: int, chance: random.Random
) -> bool:
    reference, output = folder / f"{name}-{way}", folder / f"{name}-{way}-killed"
    if begin(folder, name, way, reference, lora_r).wait():
        sys.exit(f"the run never killed failed:\n{logs(reference)[0][-3000:]}")
    places = collections.Counter()
    for number in range(kills):
        process = begin(folder, name, way, output, lora_r)
        places[wait_and_kill(process, output, number % 2 == 0, chance)] += 1
    status = begin(folder, name, way, output, lora_r).wait()
    log = "".join(logs(output))
    resumed, anew = log.count("resumed from"), log.count("starting from the beginning")
    same = (
        not status
        and torch.equal(weights(output), weights(reference))
        and timeless(output) == timeless(reference)
    )
    good = same and anew == 1 and resumed == kills
    at = ", ".join(f"{count} {place}" for place, count in places.items())
    print(
        f"{'same' if good else 'DIFFERENT'}  {name:6} {way:8} killed {at}; resumed {resumed} times",
        flush=True,
    )
    if not good:
        print(log[-3000:], flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument(
        "--ways",
        nargs="+",
        default=["plain", "ddp", "zero2", "zero3", "fsdp2", "ds_fp16"],
        choices=WAYS,
    )
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lora_r", type=int, default=0, help="rank of adapters; 0: none")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        tiny_inputs(Path(folder))
        good = [
            storm(Path(folder), name, way, args.kills, args.lora_r, chance)
            for name in args.recipes
            for way in args.ways
        ]
    print(
        f"{sum(good)} of {len(good)} the same as if never killed, {args.kills} kills each: {args.kills * len(good)} in all"
    )
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
