"""How much of what fp32 learns is learned in half precision, by learning rate: loss after so many updates, and the weights that moved.

    python benchmarks/moved.py [--model FOLDER] [--recipes sft dpo grpo] [--rates 1e-6 1e-5 1e-4] [--updates 100] [--seeds 0 1 2] [--results demo]

The model's weights are rounded to bf16 first, as those of published models are. Each run sees the same rows in every update, other rows for
each seed, at a constant learning rate, so that the loss of update k + 1 is that of the model after k updates. GRPO samples 8 answers to each
of the same prompts, and its reward is compared. The ways:

    fp32          nothing is rounded
    bf16          bf16 autocast over fp32 weights (single_gpu.yaml)
    bf16, spread  the same from a folder in which each weight that autocast rounds was drawn uniformly from the cell that rounds to it: what the
                  first forward pass reads is the same, bit for bit
    bf16, ZeRO-2  bf16 weights, fp32 masters (ds_zero2.yaml)
    fp16          fp16 weights, fp32 masters (ds_fp16.yaml)

Without a GPU half precision is emulated: products are summed in fp32. By default the model is the embedded one. With `--folder` the runs stay
there, and the same command takes those that are done from it.
"""

import argparse
import datetime
import gzip
import hashlib
import itertools
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from preference_recipes.models import rounding

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = REPOSITORY / "accelerate_configs"
RESULTS = REPOSITORY / "benchmarks" / "results" / "moved"
AFTER = (1, 3, 10, 30, 100)
WAYS = {
    "fp32": ("cpu.yaml", "rounded"),
    "bf16": ("single_gpu.yaml", "rounded"),
    "bf16, spread": ("single_gpu.yaml", "spread"),
    "bf16, ZeRO-2": ("ds_zero2.yaml", "rounded"),
    "fp16": ("ds_fp16.yaml", "rounded"),
}
DATA = {
    "sft": "sft_train.jsonl",
    "dpo": "preferences_train.jsonl.gz",
    "grpo": "prompts_train.jsonl",
}


# ============================================================ models
def write_model(source: Path, folder: Path, change) -> Path:
    """Copies a model's folder with other weights."""
    shutil.copytree(source, folder)
    for file in folder.glob("*.safetensors"):
        weights = {name: weight.float() for name, weight in load_file(file).items()}
        changed = {name: change(name, weight).contiguous() for name, weight in weights.items()}
        save_file(changed, file, metadata={"format": "pt"})
    return folder


def rounded(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Returns the weight on the grid of bf16."""
    return weight.bfloat16().float()


def spread(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Returns each number drawn uniformly from the cell that bf16 rounds to the same value."""
    read = weight.bfloat16()
    if "_proj" not in name:  # norms and embeddings, which autocast reads in fp32
        return read.float()
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
    uniform = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed))
    return rounding.drawn_in_cells(read.float(), uniform, torch.bfloat16)


# ============================================================ runs
def run(recipe: str, way: str, rate: float, seed: int, options) -> list[dict]:
    """Runs a recipe, unless it is there already; returns the lines of its updates."""
    config, model = WAYS[way]
    output_dir = options.folder / f"{recipe} {way} {rate:g} {seed}".replace(" ", "_")
    metrics = output_dir / "metrics.jsonl"
    if not (output_dir / "actor").is_dir():
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", str(CONFIGS / config), "--num_processes", "1"),
            *("--main_process_port", "0", str(REPOSITORY / "recipes" / f"{recipe}.py")),
            *("--model_name_or_path", str(options.folder / model)),
            *("--dataset_name", str(options.folder / f"{recipe}_{seed}.jsonl")),
            *("--output_dir", str(output_dir), "--report_to", "none", "--seed", str(seed)),
            *("--train_batch_size", str(options.rows)),
            *("--micro_train_batch_size", str(options.micro)),
            *("--max_length", str(options.max_length), "--max_epochs", "1000000"),
            *("--max_steps", str(options.updates + 1), "--learning_rate", str(rate)),
            *("--lr_scheduler_type", "constant", "--warmup_steps", "0", "--logging_steps", "1"),
            *("--eval_steps", "0", "--save_steps", "0", "--save_actor_steps", "0"),
        ]
        if recipe == "grpo":
            command += ["--reward_function", "preference_recipes.rollouts.rewards:answer_reward"]
            command += ["--rollout_batch_size", str(options.rows), "--max_new_tokens", "8"]
            command += ["--train_batch_size", str(8 * options.rows)]  # a whole rollout
            command += ["--micro_train_batch_size", str(8 * options.rows)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "loss" in line]


def measure(recipe: str, way: str, rate: float, options) -> dict:
    """Returns the loss that each seed's run has gained after `AFTER` updates, and what moved."""
    after = [number for number in AFTER if number <= options.updates]
    runs = [run(recipe, way, rate, seed, options) for seed in options.seeds]
    moved = {}
    if "update/moved" in runs[0][0]:
        moved = {
            str(number): statistics.mean(lines[number - 1]["update/moved"] for lines in runs)
            for number in after
        }
    return {
        "recipe": recipe,
        "way": way,
        "learning_rate": rate,
        "gained": {str(number): [gained(lines, number) for lines in runs] for number in after},
        "moved": moved,
    }


def gained(lines: list[dict], number: int) -> float:
    """Returns by how much the loss has fallen after some updates, or the reward has risen.

    Rewards are those of the ten rollouts up to there, because samples are drawn.
    """
    if "reward" in lines[0]:
        recent = [line["reward"] for line in lines[max(0, number - 9) : number + 1]]
        return statistics.mean(recent) - lines[0]["reward"]
    return lines[0]["loss"] - lines[number]["loss"]


def first_lines(path: Path, start: int, number: int) -> str:
    """Returns some lines of a file, from the one numbered `start` on."""
    open_text = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "rt", encoding="utf-8") as file:
        lines = list(itertools.islice(file, start, start + number))
    return "".join(lines)


# ============================================================ tables
def table(measured: list[dict]) -> str:
    """Returns the results as Markdown: the mean over seeds, and of all that fp32 gains."""
    fp32 = {
        (each["recipe"], each["learning_rate"]): each["gained"]
        for each in measured
        if each["way"] == "fp32"
    }
    numbers = list(measured[0]["gained"])
    header = ["recipe", "learning rate", "way", *(f"after {number}" for number in numbers)]
    lines = [[*header, "moved by update 1"], ["---"] * (len(header) + 1)]
    for each in measured:
        cells = [each["recipe"], f"{each['learning_rate']:g}", each["way"]]
        for number in numbers:
            gained = statistics.mean(each["gained"][number])
            of_fp32 = statistics.mean(fp32[each["recipe"], each["learning_rate"]][number])
            share = "" if each["way"] == "fp32" else f" ({gained / of_fp32:.0%})"
            cells.append(f"{gained:.2g}{share}")
        cells.append(f"{each['moved']['1']:.1%}" if each["moved"] else "-")
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=REPOSITORY / "assets" / "model")
    parser.add_argument("--data", type=Path, help="rows for all recipes, instead of the demos'")
    parser.add_argument("--recipes", nargs="+", default=["sft", "dpo"], choices=DATA)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rows", type=int, default=16, help="rows of every update")
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--folder", type=Path)
    parser.add_argument(
        "--results", metavar="NAME", help="writes benchmarks/results/moved/NAME.json"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        options.folder = options.folder or Path(scratch) / "runs"
        options.folder.mkdir(parents=True, exist_ok=True)
        for name, change in {"rounded": rounded, "spread": spread}.items():
            if not (options.folder / name).is_dir():
                write_model(options.model, options.folder / name, change)
        for recipe in options.recipes:
            source = options.data or REPOSITORY / "assets" / DATA[recipe]
            for seed in options.seeds:
                rows = first_lines(source, options.rows * seed, options.rows)
                (options.folder / f"{recipe}_{seed}.jsonl").write_text(rows, encoding="utf-8")
        measured = [
            measure(recipe, way, rate, options)
            for recipe in options.recipes
            for rate in options.rates
            for way in options.ways
        ]
    print(table(measured))
    if options.results:
        about = {
            "command": "python benchmarks/moved.py " + " ".join(sys.argv[1:]),
            "date": datetime.date.today().isoformat(),
            "model": options.model.name,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
        (RESULTS / f"{options.results}.json").write_text(
            json.dumps(about | {"runs": measured}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
