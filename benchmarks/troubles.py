"""Draws how common faults look in TensorBoard: pairs of short runs of the demo, one as it should be, one with the fault.

python benchmarks/troubles.py [NAME ...] [--runs runs/troubles] [--images docs/img]

A fault of the code is planted into a copy of the recipe. The others are settings. Needs matplotlib, see curves.py.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
ASSETS = REPOSITORY / "assets"
LAUNCHER = [
    sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(REPOSITORY / "accelerate_configs/cpu.yaml"),
    "--num_processes", "1", "--main_process_port", "0",
]  # fmt: skip


class Trouble(NamedTuple):
    """A fault and the two runs that show it.

    Attributes:
        tags: what is drawn, a panel each.
        flags: of both runs.
        wrong: flags of the run with the fault.
        fault: pieces of the recipe, and what takes their place in the run with the fault.
    """

    recipe: str
    tags: str
    flags: dict[str, object]
    wrong: dict[str, object]
    fault: dict[str, str] | None = None


PAIRS = {
    "dataset_name": ASSETS / "preferences_train.jsonl.gz",
    "beta": 0.5,
    "max_steps": 48,
    "max_length": 64,
    "learning_rate": 2e-4,
}
SUMS = {
    "dataset_name": ASSETS / "sft_train.jsonl",
    "eval_dataset_name": ASSETS / "sft_eval.jsonl",
    "max_length": 64,
    "max_new_tokens": 8,
    "train_batch_size": 128,
    "micro_train_batch_size": 64,
}
TROUBLES = {
    # `--logging_steps 1` beside a rule that looks at micro-batches: 8 make an update.
    "log_rule": Trouble(
        recipe="dpo",
        tags="loss,rewards/margins",
        flags={**PAIRS, "micro_train_batch_size": 8},
        wrong={},
        fault={
            "run.due(args.logging_steps, first=True)": (
                "run.due(args.logging_steps, first=True) and run.updates_seen % 8 == 0"
            )
        },
    ),
    # What the main process logs of its last micro-batch, where all of the update should count.
    "one_device": Trouble(
        recipe="dpo",
        tags="rewards/accuracies,rewards/margins",
        flags={**PAIRS, "micro_train_batch_size": 2},
        wrong={},
        fault={
            'means.add(values, weights, columns["row"])\n            run': (
                "means.add(values, weights * (rows is update.micro_batches[-1].rows))\n"
                "            run"
            )
        },
    ),
    # Eight micro-batches, each a mean, added up and never divided by their number.
    "summed_loss": Trouble(
        recipe="dpo",
        tags="loss,grad_norm",
        flags={**PAIRS, "micro_train_batch_size": 8},
        wrong={},
        fault={
            "update.engine_divisor / update.n_samples": "update.engine_divisor * 8 / update.n_samples",
            'means.add(values, weights, columns["row"])\n            run': (
                "means.add({**values, 'loss': values['loss'] * 8}, weights)\n            run"
            ),
        },
    ),
    "learning_rate": Trouble(
        recipe="sft",
        tags="loss,grad_norm,eval/exact_match",
        flags={**SUMS, "max_steps": 80, "eval_steps": 20, "learning_rate": 5e-4},
        wrong={"learning_rate": 2e-2},
    ),
    # Few rows, many times: what is learned is these rows.
    "overfitting": Trouble(
        recipe="sft",
        tags="loss,eval/loss,eval/exact_match",
        flags={**SUMS, "max_steps": 80, "eval_steps": 10, "learning_rate": 5e-4},
        wrong={"dataset_name": "few.jsonl"},
    ),
}  # fmt: skip


def run(trouble: Trouble, output_dir: Path, with_fault: bool) -> None:
    """Runs the demo once, on the CPU in fp32."""
    script = REPOSITORY / f"recipes/{trouble.recipe}.py"
    if with_fault and trouble.fault:
        text = script.read_text(encoding="utf-8")
        for piece, other in trouble.fault.items():
            assert text.count(piece) == 1, f"{script} has this not once: {piece}"
            text = text.replace(piece, other)
        script = output_dir.with_suffix(".py")
        script.write_text(text, encoding="utf-8")
    flags = {**trouble.flags, **(trouble.wrong if with_fault else {})}
    if flags["dataset_name"] == "few.jsonl":
        few = output_dir.with_name("few.jsonl")
        rows = (ASSETS / "sft_train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        few.write_text("".join(rows[:128]), encoding="utf-8")
        flags |= {"dataset_name": few, "max_epochs": 1000}
    flags |= {"model_name_or_path": ASSETS / "model", "output_dir": output_dir}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run([*LAUNCHER, str(script), *words], env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(TROUBLES)}; default: all"
    )
    parser.add_argument("--runs", type=Path, default=REPOSITORY / "runs/troubles")
    parser.add_argument("--images", type=Path, default=REPOSITORY / "docs/img")
    args = parser.parse_args()
    for name in args.names or TROUBLES:
        trouble = TROUBLES[name]
        folder = args.runs / name
        folder.mkdir(parents=True, exist_ok=True)
        for kind in ("right", "wrong"):
            run(trouble, folder / kind, with_fault=kind == "wrong")
        image = args.images / f"trouble_{name}.png"
        curves = [
            sys.executable,
            str(REPOSITORY / "benchmarks/curves.py"),
            str(image),
            trouble.tags,
        ]
        subprocess.run([*curves, f"right={folder}/right", f"wrong={folder}/wrong"], check=True)
        print(f"drew {image}")


if __name__ == "__main__":
    main()
