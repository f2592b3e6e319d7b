"""How many lines a reader of one DPO update meets: those that Python runs in it, ours and TRL's counted alike.

    python benchmarks/lines.py ours
    python benchmarks/lines.py trl      # needs the extra `peers`

Counted are the different lines that run from the beginning of the second update to that of the third, evaluation and
saving left out: for ours in `recipes/`, `common/` and `preference_recipes/`, for TRL in `trl/` and in transformers'
trainer and collators. The model, torch, accelerate and DeepSpeed are left out of both. The table also has the lines of
all files that were met.
"""

import argparse
import runpy
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ASSETS = REPOSITORY / "assets"


class LinesRun:
    """Notes which lines of some files run while it is active.

    Args:
        roots: folders or files whose lines count.
    """

    def __init__(self, *roots: Path):
        self.roots = tuple(str(root) for root in roots)
        self.active = False
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.updates = 0

    def next_update(self) -> None:
        """Counts the beginning of an update: the second one is noted."""
        self.updates += 1
        self.active = self.updates == 2

    def __call__(self, frame, event: str, _):
        """For `sys.settrace`."""
        name = frame.f_code.co_filename
        if not name.startswith(self.roots):
            return None
        if self.active:
            self.lines[name].add(frame.f_lineno)
        return self

    def table(self) -> str:
        """Returns the lines run and the lines there are, file by file and in all."""
        rows = [
            (len(lines), len(Path(name).read_text(encoding="utf-8").splitlines()), name)
            for name, lines in sorted(self.lines.items())
        ]
        total = (sum(row[0] for row in rows), sum(row[1] for row in rows), "in all")
        return "\n".join(f"{run:6} of {there:6}  {name}" for run, there, name in [*rows, total])


def run_ours() -> LinesRun:
    """Three updates of recipes/dpo.py on the embedded pairs."""
    from common import engine

    folders = ("recipes", "common", "preference_recipes")
    lines = LinesRun(*(REPOSITORY / folder for folder in folders))
    begin_update = engine.begin_update

    def noted(*arguments):
        lines.next_update()
        return begin_update(*arguments)

    engine.begin_update = noted
    with tempfile.TemporaryDirectory() as folder:
        recipe = str(REPOSITORY / "recipes/dpo.py")
        sys.argv = [recipe, "--max_steps", "3", "--output_dir", f"{folder}/run", "--report_to", "none",
                    "--eval_dataset_name="]  # fmt: skip
        sys.settrace(lines)
        runpy.run_path(recipe, run_name="__main__")
        sys.settrace(None)
    return lines


def run_trl() -> LinesRun:
    """Three updates of TRL's DPOTrainer on the same pairs."""
    import transformers
    import trl
    from datasets import load_dataset

    package = Path(transformers.__file__).parent
    trainers = [package / "trainer", package / "data/data_collator.py", package / "training_args"]
    lines = LinesRun(Path(trl.__file__).parent, *trainers)

    class Noted(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            lines.next_update()

    with tempfile.TemporaryDirectory() as folder:
        config = trl.DPOConfig(
            output_dir=folder, max_steps=3, per_device_train_batch_size=32, gradient_accumulation_steps=2,
            logging_steps=1, report_to="none", use_cpu=True, bf16=False, save_strategy="no",
        )  # fmt: skip
        pairs = load_dataset(
            "json", data_files=str(ASSETS / "preferences_train.jsonl.gz"), split="train"
        )
        trainer = trl.DPOTrainer(
            str(ASSETS / "model"), args=config, train_dataset=pairs, callbacks=[Noted()]
        )
        sys.settrace(lines)
        trainer.train()
        sys.settrace(None)
    return lines


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", choices=["ours", "trl"])
    program = parser.parse_args().program
    lines = run_ours() if program == "ours" else run_trl()
    print(lines.table())


if __name__ == "__main__":
    main()
