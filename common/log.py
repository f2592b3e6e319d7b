"""What a run writes while it trains: log lines, samples, TensorBoard, trackers, the progress bar.

A sample is a dict: `source` (`eval`, `eval/<name>` or `rollout`), `row` (its number in the data,
from 1), `prompt`, `response`, and what is known of the response: `right` and the right `answer`,
`score`, `rewards`.
"""

import atexit
import json
import os
import re
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from tqdm import tqdm

from common import errors
from common.progress import Progress

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"


class Logger:
    """Writes `metrics.jsonl` and `samples.jsonl`, and shows lines on trackers and in the bar.

    Args:
        bar_metric: the recipe's key metric, shown in the bar next to the loss.
        charts: the key metrics, by the title of the chart that shows them together.
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
        self.charts = charts
        self.bar: tqdm | None = None

    def start(self) -> None:
        """Opens TensorBoard, other trackers and the bar. All processes must call it."""
        if self.accelerator.is_main_process:
            self.open_trackers()
        self.bar = tqdm(
            total=self.progress.total_steps,
            initial=self.progress.global_step,
            desc="update",
            dynamic_ncols=True,
            disable=not self.accelerator.is_main_process,
            mininterval=0.5 if sys.stderr.isatty() else 10,
        )

    def open_trackers(self) -> None:
        """Opens what `--report_to` names; TensorBoard also gets a page of the key charts."""
        names = self.args.report_to
        trackers = [name for name in names if name not in ("tensorboard", "none")]
        if trackers:
            self.accelerator.log_with = trackers
            self.accelerator.project_configuration.set_directories(str(self.output_dir))
            config = dict(vars(self.args))  # a copy: that of MLflow deletes long values
            self.accelerator.init_trackers(Path(sys.argv[0]).stem, config=config)
        if "tensorboard" in names:
            # It hides what a killed run wrote after this update.
            purge_step = self.progress.global_step + 1
            board = TensorBoardTracker("tensorboard", str(self.output_dir), purge_step=purge_step)
            board.start()
            self.accelerator.trackers.append(board)
            charts = {title: ["Multiline", [pattern(tags)]] for title, tags in self.charts.items()}
            board.writer.add_custom_scalars({"key metrics": charts})

    def write(self, values: dict[str, float]) -> None:
        """Writes a line to `metrics.jsonl`, a JSON object; trackers and the bar show it, too."""
        self.append(METRICS, [values])
        self.accelerator.log(values, step=self.progress.global_step)
        shown = {name.split("/")[-1]: values[name] for name in self.bar_metrics if name in values}
        if shown:
            self.bar.set_postfix(shown, refresh=False)

    def write_samples(self, samples: list[dict]) -> None:
        """Appends samples to `samples.jsonl`, with the updates that the model had made."""
        self.append(SAMPLES, samples)

    def append(self, name: str, lines: list[dict]) -> None:
        """Appends lines to one of the logs. All processes may call it."""
        if not lines or not self.accelerator.is_main_process:
            return
        with open(self.output_dir / name, "a", encoding="utf-8") as file:
            for line in lines:
                numbered = {"global_step": self.progress.global_step, **line}
                file.write(json.dumps(numbered, ensure_ascii=False) + "\n")

    def log_evaluation(self, values: dict[str, float], samples: list[dict]) -> None:
        """Writes an evaluation as a line of its own, and prints it. All processes may call it."""
        if not values:
            return
        self.write(values)
        self.write_samples(samples)
        if self.accelerator.is_main_process:
            width = max(len(name) for name in values)
            rows = [f"  {name:{width}} {value:>10.4g}" for name, value in values.items()]
            title = f"evaluation at global_step {self.progress.global_step}:"
            self.bar.write("\n".join([title, *rows]))

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
