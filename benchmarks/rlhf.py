"""The whole loop on the embedded demo, offline: SFT, then a reward model, then PPO against it, and DPO beside them; one table.

    python benchmarks/rlhf.py [accelerate_configs/ds_fp16.yaml] [OUTPUT_DIR]

`make rlhf` does the same. Each line of the table is a recipe's own held-out evaluation, before its first update and after its last.
"""

import datetime
import json
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ASSETS = REPOSITORY / "assets"


def run(config: str, recipe: str, output_dir: Path, *flags: str) -> tuple[dict, dict, float]:
    """Runs a recipe with its demo's arguments and these flags; the first and the last evaluation, and the seconds it took."""
    start = time.time()
    defaults = [str(ASSETS / f"{recipe}.yaml"), *flags, "--output_dir", str(output_dir)]
    launcher = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        config,
        str(REPOSITORY / "recipes" / f"{recipe}.py"),
    ]
    subprocess.run(
        [*launcher, *(arg.replace("{assets}", str(ASSETS)) for arg in defaults)], check=True
    )
    lines = [
        json.loads(line)
        for line in (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    evaluations = [line for line in lines if any(name.startswith("eval/") for name in line)]
    return evaluations[0], evaluations[-1], time.time() - start


def main() -> None:
    config = (
        sys.argv[1]
        if len(sys.argv) > 1
        else str(REPOSITORY / "accelerate_configs" / "ds_fp16.yaml")
    )
    folder = Path(
        sys.argv[2] if len(sys.argv) > 2 else f"runs/rlhf/{datetime.datetime.now():%Y%m%d-%H%M%S}"
    )
    sft, reward = folder / "sft", folder / "reward"
    # SFT is stopped early, so that rewards and preferences have room to win.
    stages = {
        "sft": run(config, "sft", sft, "--max_steps", "20", "--warmup_steps", "0"),
        "reward": run(config, "reward", reward),
        "ppo": run(
            config,
            "ppo",
            folder / "ppo",
            "--model_name_or_path",
            f"{sft}/actor",
            "--reward_function",
            "",
            "--reward_model_name_or_path",
            f"{reward}/actor",
            "--normalize_reward",
        ),
        "dpo": run(config, "dpo", folder / "dpo", "--model_name_or_path", f"{sft}/actor"),
    }
    print("\n| recipe | held-out | before | after | seconds |\n| --- | --- | --- | --- | --- |")
    for recipe, (before, after, seconds) in stages.items():
        name = "eval/accuracy" if recipe == "reward" else "eval/exact_match"
        print(f"| {recipe} | {name} | {before[name]:.1%} | {after[name]:.1%} | {seconds:.0f} |")


if __name__ == "__main__":
    main()
