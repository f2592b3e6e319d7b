"""What a run writes while it trains: log lines, samples, TensorBoard, trackers, progress bar."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from tqdm import tqdm

from common import errors, trackers, transcript
from common.progress import Progress


class Logger:
    """Writes `metrics.jsonl` and `samples.jsonl`, and shows them on TensorBoard and in the bar.

    Args:
        args: `output_dir` gets the files and, if `report_to` says so, `tensorboard/`.
        bar_metric: the recipe's key metric, shown in the bar next to the loss.
        charts: the key metrics, by the title of the chart that shows them together; see
            `trackers.start`.

    Attributes:
        bar, started: made by `start`, which also reads the clock.
        noted: the names of what `note_once` has printed.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        args,
        progress: Progress,
        bar_metric: str,
        charts: dict[str, list[str]],
    ):
        self.accelerator = accelerator
        self.args = args
        self.output_dir = Path(args.output_dir)
        self.file = self.output_dir / "metrics.jsonl"
        self.progress = progress
        self.charts = charts
        self.bar_labels = {
            "loss": "loss",
            bar_metric: bar_metric.split("/")[-1],
            "perf/tokens_per_second": "tokens_per_second",
        }
        self.shown_in_bar: dict[str, float] = {}
        self.bar: tqdm | None = None
        self.started = 0.0
        self.noted: set[str] = set()

    def start(self) -> None:
        """Opens TensorBoard, other trackers and the bar. All processes must call it."""
        if self.accelerator.is_main_process:
            trackers.start(self.accelerator, self.args, self.charts, self.progress.global_step)
        self.started = time.monotonic()
        self.bar = tqdm(
            total=self.progress.total_steps,
            initial=self.progress.global_step,
            desc="update",
            dynamic_ncols=True,
            disable=not self.accelerator.is_main_process,
            mininterval=0.5 if sys.stderr.isatty() else 10,
        )

    def log_samples(self, scores: torch.Tensor | None, examples: list[dict]) -> None:
        """Writes the samples of a rollout. TensorBoard shows some at the first update made of it.

        All processes may call it.

        Args:
            scores: `[samples]`, shown as a histogram, NaN left out; None: nothing scores them.
            examples: see `common/transcript.py`.
        """
        if self.accelerator.is_main_process:
            transcript.write(self.output_dir, self.progress.global_step, examples)
        writer = trackers.writer_of(self.accelerator)
        if writer:
            next_update = self.progress.global_step + 1
            if scores is not None:
                # Not `scores`: TensorBoard cannot show a scalar and a histogram under one tag.
                scored = scores[~scores.isnan()]
                trackers.add_histogram(writer, "rollout/scores", scored, next_update)
            writer.add_text("samples/rollout", transcript.as_markdown(examples), next_update)

    def note_once(self, name: str, message: str) -> None:
        """Prints a line above the bar, the first time that it is called with this name.

        All processes may call it.
        """
        if name not in self.noted and self.accelerator.is_main_process:
            self.bar.write(f"NOTE: {message}")
        self.noted.add(name)

    def log_evaluation(self, values: dict[str, float], examples: list[dict]) -> None:
        """Writes an evaluation as a line of its own, and prints it with some of its samples.

        All processes may call it.

        Args:
            examples: see `common/transcript.py`.
        """
        if not values:
            return
        self.write(values)
        if self.accelerator.is_main_process:
            global_step = self.progress.global_step
            if examples:
                transcript.write(self.output_dir, global_step, examples)
            writer = trackers.writer_of(self.accelerator)
            if examples and writer:
                text = transcript.as_markdown(examples)
                writer.add_text("samples/evaluation", text, global_step)
            lines = [f"evaluation at global_step {global_step}:", *in_columns(values)]
            lines += transcript.on_console(examples)
            self.bar.write("\n".join(lines))

    def write(self, values: dict[str, float]) -> None:
        """Writes one line to `metrics.jsonl`, a JSON object, and the same values to trackers."""
        global_step = self.progress.global_step
        if self.accelerator.is_main_process:
            line = {"global_step": global_step, **values}
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self.accelerator.log(values, step=global_step)

    def show_in_bar(self, line: dict[str, float]) -> None:
        """Shows a line's key values in the bar."""
        for name, label in self.bar_labels.items():
            if name in line:
                self.shown_in_bar[label] = line[name]
        self.bar.set_postfix(self.shown_in_bar, refresh=False)

    def close(self) -> None:
        """Ends trackers, bar and process group. All processes must call it."""
        self.bar.close()
        if self.accelerator.num_processes > 1 and self.accelerator.device.type == "cpu":
            atexit.register(exit_without_cleaning_up, torch.distributed.group.WORLD)
        self.accelerator.end_training()


def exit_without_cleaning_up(group=None) -> None:
    """Ends a process of a finished run before the interpreter cleans up.

    With torch 2.13, gloo's threads now and then abort a finished process during that cleanup.

    Args:
        group: the process group, which must live until here. If DDP were the last to hold it, it
            would delete the group without letting go of Python's lock. A thread of gloo may wait
            for that lock, and the process would hang.
    """
    sys.stdout.flush()
    # `last_value` is set by an exception that nobody caught, outside `errors.run`.
    failed = errors.failed or hasattr(sys, "last_value")
    os._exit(int(failed))


def in_columns(values: dict[str, float]) -> list[str]:
    """Returns names and values as lines, two of each in a line.

    Example, for three values:

          eval/loss           0.6931    eval/accuracies        0.5
          eval/margins             0
    """
    width = max(len(name) for name in values)
    cells = [f"{name:{width}} {value:>10.4g}" for name, value in values.items()]
    pairs = [cells[start : start + 2] for start in range(0, len(cells), 2)]
    return ["  " + "    ".join(pair) for pair in pairs]
