"""What a run writes while it trains: log lines, samples, TensorBoard, trackers, the progress bar.

A sample is a dict: `source` (`eval`, `eval/<name>` or `rollout`), `row` (its number in the data,
from 1), `prompt`, `response`, and what is known of the response: `right` and the right `answer`,
`score`, `rewards`.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from tqdm import tqdm

from common import errors
from common.progress import Progress

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"


class Logger:
    """Writes `metrics.jsonl` and `samples.jsonl`, and shows them on TensorBoard and in the bar.

    Args:
        bar_metric: the recipe's key metric, shown in the bar next to the loss.
        charts: the key metrics, by the title of the chart that shows them together.

    Attributes:
        board: TensorBoard's writer; None where there is none.
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
        self.progress = progress
        self.bar_metrics = ("loss", bar_metric, "perf/tokens_per_second")
        self.shown_in_bar: dict[str, float] = {}
        self.charts = charts
        self.bar: tqdm | None = None
        self.board: Any = None
        self.started = 0.0

    def start(self) -> None:
        """Opens TensorBoard, other trackers and the bar. All processes must call it."""
        names = self.args.report_to
        trackers = [name for name in names if name not in ("tensorboard", "none")]
        if trackers and self.accelerator.is_main_process:
            self.accelerator.log_with = trackers
            self.accelerator.project_configuration.set_directories(str(self.output_dir))
            config = dict(vars(self.args))  # a copy: that of MLflow deletes long values
            self.accelerator.init_trackers(Path(sys.argv[0]).stem, config=config)
        if "tensorboard" in names and self.accelerator.is_main_process:
            self.start_tensorboard()
        self.started = time.monotonic()
        self.bar = tqdm(
            total=self.progress.total_steps,
            initial=self.progress.global_step,
            desc="update",
            dynamic_ncols=True,
            disable=not self.accelerator.is_main_process,
            mininterval=0.5 if sys.stderr.isatty() else 10,
        )

    def start_tensorboard(self) -> None:
        """Opens TensorBoard's files. What a killed run wrote after this update is hidden."""
        is_new = not (self.output_dir / "tensorboard").is_dir()
        # A new run starts at 0, the step of the evaluation before the first update.
        step = self.progress.global_step
        purge_step = step + 1 if step else 0
        tracker = TensorBoardTracker("tensorboard", str(self.output_dir), purge_step=purge_step)
        tracker.start()
        self.accelerator.trackers.append(tracker)
        self.board = tracker.writer
        if is_new:  # the page of key charts
            charts = {title: ["Multiline", [pattern(tags)]] for title, tags in self.charts.items()}
            self.board.add_custom_scalars({"key metrics": charts})

    def write(self, values: dict[str, float]) -> None:
        """Writes one line to `metrics.jsonl`, a JSON object, and the same values to trackers."""
        global_step = self.progress.global_step
        if self.accelerator.is_main_process:
            line = {"global_step": global_step, **values}
            with open(self.output_dir / METRICS, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self.accelerator.log(values, step=global_step)

    def show_in_bar(self, line: dict[str, float]) -> None:
        """Shows a line's key values in the bar."""
        for name in self.bar_metrics:
            if name in line:
                self.shown_in_bar[name.split("/")[-1]] = line[name]
        self.bar.set_postfix(self.shown_in_bar, refresh=False)

    def log_samples(self, scores: torch.Tensor | None, samples: list[dict]) -> None:
        """Writes the samples of a rollout. TensorBoard shows some at the first update made of it.

        All processes may call it.

        Args:
            scores: `[samples]`, shown as a histogram, NaN left out; None: nothing scores them.
        """
        self.write_samples(samples)
        if not self.board:
            return
        next_update = self.progress.global_step + 1
        self.board.add_text("samples/rollout", as_markdown(samples), next_update)
        if scores is not None:
            scored = scores[scores.abs() < 1e20]  # no NaN either; TensorBoard's bins end there
            # Not `scores`: TensorBoard cannot show a scalar and a histogram under one tag.
            if len(scored):
                self.board.add_histogram("rollout/scores", scored, next_update)

    def log_evaluation(self, values: dict[str, float], samples: list[dict]) -> None:
        """Writes an evaluation as a line of its own, and prints it with some of its samples.

        All processes may call it.
        """
        if not values:
            return
        self.write(values)
        self.write_samples(samples)
        step = self.progress.global_step
        if self.board and samples:
            self.board.add_text("samples/evaluation", as_markdown(samples), step)
        width = max(len(name) for name in values)
        lines = [f"evaluation at global_step {step}:"]
        lines += [f"  {name:{width}} {value:>10.4g}" for name, value in values.items()]
        for sample in first_of_each(samples, most=4):
            prompt = sample["prompt"][-80:]
            lines.append(f"  {verdict(sample)}: {prompt!r} -> {sample['response'][-80:]!r}")
        if self.accelerator.is_main_process:
            self.bar.write("\n".join(lines))

    def write_samples(self, samples: list[dict]) -> None:
        """Appends samples to `samples.jsonl`, with the updates that the model had made."""
        if not samples or not self.accelerator.is_main_process:
            return
        with open(self.output_dir / SAMPLES, "a", encoding="utf-8") as file:
            for sample in samples:
                line = {"global_step": self.progress.global_step, **sample}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Ends trackers, bar and process group. All processes must call it."""
        self.bar.close()
        if self.accelerator.num_processes > 1 and self.accelerator.device.type == "cpu":
            # If DDP were the last to hold the group, it would delete it without letting go of
            # Python's lock. A thread of gloo may wait for that lock, and the process would hang.
            atexit.register(exit_without_cleaning_up, torch.distributed.group.WORLD)
        self.accelerator.end_training()


def exit_without_cleaning_up(_group=None) -> None:
    """Ends a process before the interpreter cleans up: there gloo's threads may abort (2.13)."""
    sys.stdout.flush()
    # `last_value` is set by an exception that nobody caught, outside `errors.run`.
    os._exit(int(errors.failed or hasattr(sys, "last_value")))


def pattern(tags: list[str]) -> str:
    """Returns the regular expression of tags, in training and in each held-out set's evaluation."""
    names = "|".join(re.escape(tag.removeprefix("eval/")) for tag in tags)
    return f"(eval/([^/]+/)?)?({names})$"


# ============================================================ samples
def first_of_each(samples: list[dict], most: int) -> list[dict]:
    """Returns the first samples of each source, `most` of each."""
    by_source: dict[str, list[dict]] = {}
    for sample in samples:
        by_source.setdefault(sample["source"], []).append(sample)
    return [sample for own in by_source.values() for sample in own[:most]]


def as_markdown(samples: list[dict]) -> str:
    """Returns the first samples as Markdown, each prompt and response as an indented block.

    What is indented is shown as it is: `2*3*4` shows its stars, and no image is fetched from an
    address that a model wrote.
    """
    parts = []
    for sample in first_of_each(samples, most=8):
        # `predicate`: also lines of blanks, such as U+2028.
        prompt, response = [
            textwrap.indent(sample[name], "    ", predicate=lambda line: True)
            for name in ("prompt", "response")
        ]
        head = f"{sample['source']}, row {sample['row']}:"
        parts += [head, prompt, f"{verdict(sample)}:", response]
    return "\n\n".join(parts)


def verdict(sample: dict) -> str:
    """Returns what is known of a response, such as `wrong (right: '25')` or `score 0.25`."""
    if "score" in sample:
        return f"score {sample['score']:.4g}"
    if "right" in sample:
        # An answer may be a whole solution that ends with it.
        return "right" if sample["right"] else f"wrong (right: {sample['answer'][-40:]!r})"
    return "drawn" if sample["source"] == "rollout" else "answered"
