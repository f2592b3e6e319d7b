"""Names of the files that a run appends to; TensorBoard and other trackers (`--report_to`)."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import folders
from common.values import COUNT

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
# TensorBoard's page of key charts. No tab smooths: that would bend the few points of evaluations.
PAGE = "http://localhost:6006/?smoothing=0#custom_scalars&_smoothingWeight=0"
# What trackers call the name of a run, where they take one.
NAMES = {"wandb": "name", "trackio": "name", "mlflow": "run_name", "clearml": "task_name"}
NAMES |= {"swanlab": "experiment_name"}
# Straight lines, which TensorBoard shows as `progress/...`, so that no tab begins with them.
STRAIGHT = ("epoch", "samples", "tokens", "skipped_steps")


def lines(output_dir: Path) -> Iterator[dict]:
    """Yields what a run has logged so far."""
    if (output_dir / METRICS).exists():
        with open(output_dir / METRICS, encoding="utf-8") as file:
            yield from map(json.loads, file)


def evaluations(output_dir: Path) -> list[dict]:
    """Returns those of the lines that hold an evaluation. Only lines of training have `epoch`."""
    return [line for line in lines(output_dir) if "epoch" not in line]


def changed_arguments(args) -> dict[str, Any]:
    """Returns the arguments that are not their defaults."""
    defaults = vars(type(args)())
    return {name: value for name, value in vars(args).items() if value != defaults.get(name)}


def open_trackers(run) -> "Board | None":
    """Opens what `--report_to` names. Returns TensorBoard, with a page of the key charts."""
    accelerator, args = run.accelerator, run.args
    trackers = [name for name in args.report_to if name not in ("tensorboard", "none")]
    if trackers:
        accelerator.log_with = trackers
        accelerator.project_configuration.set_directories(args.output_dir)
        config = dict(vars(args))  # a copy: that of MLflow deletes long values
        gpus = [] if accelerator.device.type == "cpu" else [accelerator.device]
        names = {tracker: {key: args.run_name} for tracker, key in NAMES.items() if args.run_name}
        with torch.random.fork_rng(gpus):  # that of ClearML sets a seed of its own
            accelerator.init_trackers(Path(sys.argv[0]).stem, config, names)
    if "tensorboard" not in args.report_to:
        return None
    board = Board(run)
    accelerator.trackers.append(board)
    return board


class Board:
    """A run in TensorBoard. Evaluations are a run of their own there, and lie over training."""

    name = "tensorboard"  # among accelerate's trackers

    def __init__(self, run):
        from torch.utils.tensorboard.summary import hparams

        args = run.args
        self.folder = run.output_dir / "tensorboard"
        self.purge_step = run.global_step + 1  # it hides what a killed run wrote from there on
        self.has_several_sets = len(args.eval_dataset_name or []) > 1
        self.writers = {}  # by their folders
        multiline = {}
        for title, tags in run.charts.items():  # in training, and in each held-out set's evaluation
            names = "|".join(re.escape(tag.removeprefix("eval/")) for tag in tags)
            multiline[title] = ["Multiline", [f"^({names})$"]]
        self.add_text("arguments", vars(args), run.global_step)
        changed = changed_arguments(args).items()
        plain = {k: v if isinstance(v, (int, float)) else str(v) for k, v in changed}
        self.writer("").add_custom_scalars({"key metrics": multiline})
        for summary in hparams(plain, {"loss": 0.0}):
            self.writer("").file_writer.add_summary(summary)

    def writer(self, folder: str):
        """Returns the writer of the run itself, or of its evaluations on a held-out set."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        if folder not in self.writers:
            path = str(self.folder / folder)
            self.writers[folder] = SummaryWriter(path, purge_step=self.purge_step)
        return self.writers[folder]

    def log(self, values: dict[str, float], step: int) -> None:
        """Writes a log line."""
        with folders.writing(self.folder):
            for name, value in values.items():
                depth = 2 if self.has_several_sets else 1  # of `eval/` or `eval/<name>/`
                *folder, tag = name.split("/", depth) if name.startswith("eval/") else [name]
                tag = f"progress/{tag}" if name in STRAIGHT else tag
                self.writer("/".join(folder)).add_scalar(tag, value, step)
            for writer in self.writers.values():
                writer.flush()

    def add_text(self, tag: str, values: dict | list, step: int) -> None:
        """Shows values as JSON."""
        text = json.dumps(values, indent=1, ensure_ascii=False)
        with folders.writing(self.folder):
            self.writer("").add_text(tag, "    " + text.replace("\n", "\n    "), step)

    def add_histograms(self, source: str, samples, step: int) -> None:
        """Shows a table of `values.Recorder` under tags such as `samples/loss`."""
        folder = source if source.startswith("eval") else ""
        for name in [name for name in samples.column_names if name + COUNT in samples.column_names]:
            numbers = samples[name].drop_null().to_numpy()
            if (finite := numbers[np.isfinite(numbers)]).size:
                with folders.writing(self.folder):
                    self.writer(folder).add_histogram(f"samples/{name}", finite, step)

    def finish(self) -> None:
        """Closes the writers."""
        for writer in self.writers.values():
            writer.close()
