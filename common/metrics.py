"""Exact means over all samples, and the log lines and progress bar that show them."""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from tqdm import tqdm

from common import board, errors, guards, record, trackers, transcript
from common.progress import Progress
from common.speed import Speed


class Logged(NamedTuple):
    """Values to log.

    Attributes:
        values: by tag, tensors of the shape of `weights`.
        weights: how much each value counts in a mean, such as 1 or a number of tokens; 0 for what
            counts nowhere: padding rows, masked tokens.
        reduce: whether a log line shows their weighted mean, their minimum or their maximum.
    """

    values: dict[str, torch.Tensor]
    weights: torch.Tensor
    reduce: Literal["mean", "min", "max"] = "mean"


class Sum(NamedTuple):
    """What this process has added under one tag.

    Attributes:
        reduce: see `Logged`.
        numbers: float64 `[2]` on the device: the weighted sum of the values, or their minimum, or
            their maximum; and the sum of their weights.
    """

    reduce: str
    numbers: torch.Tensor


# How two sums of values, two minima or two maxima become one.
JOIN = {"mean": torch.add, "min": torch.minimum, "max": torch.maximum}
# The neutral element of each.
NOTHING = {"mean": 0.0, "min": math.inf, "max": -math.inf}
# The tag of a process's operations, for `perf/mfu`; see `Metrics.add_flop`.
FLOP = "flop"


class Means:
    """Weighted means, minima and maxima by tag.

    Every process must add the same tags in the same order. Adding never makes a GPU wait: no value
    is read back from it, and no tensor is made of Python numbers, which would be a copy that waits.
    """

    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.sums: dict[str, Sum] = {}

    @torch.no_grad()
    def add(self, logged: Iterable[Logged]) -> None:
        """Adds values of samples or of tokens."""
        for values, weights, reduce in logged:
            weights = weights.double()
            counts = weights > 0
            for name, value in values.items():
                # The value of a padding row may be inf, and inf times its weight of 0 is NaN.
                counted = torch.where(counts, value.double(), NOTHING[reduce])
                if reduce == "mean":
                    number = (counted * weights).sum()
                else:
                    number = counted.amin() if reduce == "min" else counted.amax()
                self.join(name, Sum(reduce, torch.stack([number, weights.sum()])))

    def join(self, name: str, new: Sum) -> None:
        """Merges a sum into that of the same tag."""
        if name in self.sums:
            old = self.sums[name].numbers
            number = JOIN[new.reduce](old[0], new.numbers[0])
            new = Sum(new.reduce, torch.stack([number, old[1] + new.numbers[1]]))
        self.sums[name] = new

    def take(self, other: Means) -> None:
        """Adds all that another `Means` holds, and empties it."""
        for name, new in other.sums.items():
            self.join(name, new)
        other.sums = {}

    def reduce(self) -> dict[str, float]:
        """Returns the values over all processes, by one collective, and empties the sums.

        A tag under which nothing counted is left out. All processes must call it.
        """
        if not self.sums:
            return {}
        sums = self.sums
        self.sums = {}
        mine = torch.stack([of_tag.numbers for of_tag in sums.values()])  # [tags, 2]
        everyone = self.accelerator.gather(mine[None])  # [processes, tags, 2]
        numbers, weights = everyone.unbind(-1)
        weight = weights.sum(0)
        # All three are computed for each tag, and read at once, because a GPU waits at each
        # reading. Then the one that the tag asks for is taken.
        table = torch.stack([weight, numbers.sum(0) / weight, numbers.amin(0), numbers.amax(0)], 1)

        values = {}
        for (name, of_tag), row in zip(sums.items(), table.tolist()):
            total_weight, mean, least, greatest = row
            if total_weight > 0:
                values[name] = {"mean": mean, "min": least, "max": greatest}[of_tag.reduce]
        return values

    def state(self) -> dict[str, list]:
        """Returns the sums of this process for a checkpoint."""
        return {name: [reduce, *numbers.tolist()] for name, (reduce, numbers) in self.sums.items()}

    def load_state(self, state: dict[str, list], mine: bool) -> None:
        """Restores the sums that one process wrote to a checkpoint.

        Args:
            mine: whether this process takes over their values. All others take over the tags only,
                since all processes must hold the same tags.
        """
        for name, (reduce, number, count) in state.items():
            numbers = [number, count] if mine else [NOTHING[reduce], 0.0]
            sums = torch.tensor(numbers, dtype=torch.float64, device=self.accelerator.device)
            self.join(name, Sum(reduce, sums))


class Metrics:
    """The metrics of a training run: its means, its log lines, TensorBoard and the progress bar.

    An update adds its values to `pending`. Once it is applied they join the open log line, which
    `log` writes when it is due:

        metrics.pending.add([Logged({"loss": losses}, weights)])
        metrics.update_done(applied=True, grad_norm=0.5, learning_rate=1e-5, loss_scale=None)
        metrics.log()  # {"global_step": 1, "loss": 2.25, "grad_norm": 0.5, ...}

    Args:
        args: `output_dir` gets `metrics.jsonl`, `samples.jsonl` and, if `report_to` says so,
            `tensorboard/`.
        bar_metric: the recipe's key metric, shown in the bar next to the loss.
        charts: the key metrics, by the title of the chart that shows them together; see
            `board.Board`.
        bar_label: what the bar calls `bar_metric`; by default the last part of its name.
        flop: the operations for each token and for each target, see `lora.flop`; they decide
            `perf/mfu`.

    Attributes:
        pending: the means of the current update, until it is applied or skipped.
        open: the means of the next log line. Those of a rollout are added to it directly.
        last_update: values of the last applied update only.
        speed: what becomes `perf/*`.
        board, bar, started: made by `start`, which also reads the clock.
        noted: the names of what `note_once` has printed.
    """

    def __init__(
        self,
        accelerator,
        args,
        progress: Progress,
        bar_metric: str,
        charts: dict[str, list[str]] | None = None,
        bar_label: str = "",
        flop: tuple[float, float] = (0.0, 0.0),
    ):
        self.accelerator = accelerator
        self.args = args
        self.output_dir = Path(args.output_dir)
        self.file = self.output_dir / "metrics.jsonl"
        self.progress = progress
        self.charts = charts or {}
        self.bar_labels = {
            "loss": "loss",
            bar_metric: bar_label or bar_metric.split("/")[-1],
            "perf/tokens_per_second": "tokens_per_second",
        }
        self.shown_in_bar: dict[str, float] = {}
        self.skip_watch = guards.SkipWatch(accelerator, progress)

        self.pending = Means(accelerator)
        self.open = Means(accelerator)
        self.last_update: dict[str, float] = {}
        self.speed = Speed(accelerator, progress, flop)
        self.board: board.Board | None = None
        self.bar: tqdm | None = None
        self.started = 0.0
        self.noted: set[str] = set()

    def start(self) -> None:
        """Opens TensorBoard, other trackers and the bar. All processes must call it."""
        if self.accelerator.is_main_process:
            report_to = self.args.report_to
            settings = record.plain_settings(self.args)
            trackers.start(self.accelerator, report_to, self.output_dir, settings)
            if "tensorboard" in report_to:
                folder = self.output_dir / "tensorboard"
                self.board = board.Board(
                    folder,
                    self.progress.global_step,
                    charts=self.charts,
                    settings=settings,
                    first=record.not_default(self.args),
                    has_held_out=bool(self.args.eval_dataset_name),
                )
        self.started = time.monotonic()
        self.speed.restart()
        self.bar = tqdm(
            total=self.progress.total_steps,
            initial=self.progress.global_step,
            desc="update",
            dynamic_ncols=True,
            disable=not self.accelerator.is_main_process,
            mininterval=0.5 if sys.stderr.isatty() else 10,
        )

    def timed(self, name: str) -> AbstractContextManager[None]:
        """Returns a context that adds its seconds to `perf/<name>_seconds` of the next line.

        The name `paused` stands for evaluating and saving: `perf/*` leaves these seconds out.
        """
        return self.speed.timed(name)

    def count_flop(self, batch: dict, weights: torch.Tensor) -> None:
        """Counts the operations of a micro-batch that was trained on, for `perf/mfu`.

        Args:
            batch: what `Packer.make_batch` returned.
            weights: of its samples, on the CPU. A micro-batch of padding alone counts nothing.
        """
        if weights.any():
            self.speed.count_flop(batch)

    def update_done(self, applied: bool, **of_update: float | None) -> None:
        """Adds the pending means to the open ones, or drops them if the update was skipped.

        To be called after `Progress.update_done`, whose counters it reads.

        Args:
            of_update: values of this update only: `grad_norm`, `learning_rate`, `loss_scale` and
                those of the recipe. A value of None is left out. Of a skipped update only
                `loss_scale` is read.
        """
        if applied:
            self.last_update = {
                name: float(value) for name, value in of_update.items() if value is not None
            }
            guards.check_gradient(self.last_update.get("grad_norm", 0.0), self.progress)
            self.open.take(self.pending)
            self.bar.update()
        else:
            warning = self.skip_watch.update_skipped(of_update.get("loss_scale"))
            if warning:
                self.bar.write(warning)
        self.pending.sums = {}
        self.speed.update_done(applied)

    def log(self) -> None:
        """Writes the training line of this `global_step`. All processes must call it.

        If no update was applied since the last line, only metrics of rollouts that led to no update
        are written, if there are any.
        """
        no_update_applied = "loss" not in self.open.sums  # every recipe logs a loss
        if no_update_applied:
            means = self.open.reduce()
            if means:
                self.write({"epoch": self.progress.epoch, **means})
            return
        line = self.training_line()
        self.write(line)
        for name, label in self.bar_labels.items():
            if name in line:
                self.shown_in_bar[label] = line[name]
        self.bar.set_postfix(self.shown_in_bar, refresh=False)
        self.speed.restart()

    def training_line(self) -> dict[str, float]:
        """Returns what is logged after an update, and forgets the open means."""
        elapsed = self.speed.elapsed()  # before processes wait for each other
        self.add_flop()
        means = self.open.reduce()
        flop = means.pop(FLOP)
        return {
            "loss": means.pop("loss"),
            **self.last_update,
            "epoch": self.progress.epoch,
            **means,
            **self.progress.counts(),
            **self.speed.values(elapsed, flop),
        }

    def add_flop(self) -> None:
        """Adds this process's operations to the open means; `training_line` takes them out again.

        Each process adds one number of weight 1. So `reduce` returns the mean over processes, as
        MFU needs it, without a collective of its own.
        """
        # Made on the device of another metric: a copy from the host would make a GPU wait.
        on_device = self.open.sums["loss"].numbers
        flop = on_device.new_full((1,), self.speed.flop)
        self.open.add([Logged({FLOP: flop}, weights=torch.ones_like(flop))])

    def add_rollout(
        self, values: dict[str, torch.Tensor], reduce: Literal["mean", "min", "max"] = "mean"
    ) -> None:
        """Adds values of a rollout to the next log line. NaN counts nowhere.

        They count even if the engine skips the rollout's first update, because the rollout was made
        all the same. All processes must call it.

        Args:
            values: by tag, each of any shape, the same on every process.
        """
        for name, value in values.items():
            value = value.to(self.accelerator.device)
            # Every process holds the whole rollout: one of them counts it.
            counts = ~value.isnan() & self.accelerator.is_main_process
            self.open.add([Logged({name: value}, counts, reduce)])

    def log_samples(self, scores: torch.Tensor | None, examples: list[dict]) -> None:
        """Writes the samples of a rollout. TensorBoard shows some at the first update made of it.

        All processes may call it.

        Args:
            scores: `[samples]`, shown as a histogram, NaN left out; None: nothing scores them.
            examples: see `common/transcript.py`.
        """
        if self.accelerator.is_main_process:
            transcript.write(self.output_dir, self.progress.global_step, examples)
        if self.board:
            next_update = self.progress.global_step + 1
            if scores is not None:
                # Not `scores`: TensorBoard cannot show a scalar and a histogram under one tag.
                self.board.add_histogram("rollout/scores", scores[~scores.isnan()], next_update)
            shown = transcript.as_markdown(examples)
            self.board.add_text("samples/rollout", shown, next_update)

    def warn(self, message: str) -> None:
        """Prints a line above the bar. All processes may call it."""
        if self.accelerator.is_main_process:
            self.bar.write(f"WARNING: {message}")

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
            if examples and self.board:
                text = transcript.as_markdown(examples)
                self.board.add_text("samples/evaluation", text, global_step)
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
        if self.board:
            self.board.add_scalars(values, global_step)
        self.accelerator.log(values, step=global_step)

    def close(self) -> None:
        """Writes the last line if it is still open, and ends trackers, bar and process group.

        All processes must call it.
        """
        self.log()
        self.bar.close()
        self.accelerator.end_training()
        if self.accelerator.num_processes > 1 and self.accelerator.device.type == "cpu":
            atexit.register(exit_without_cleaning_up)


def exit_without_cleaning_up() -> None:
    """Ends a process of a finished run before the interpreter cleans up.

    With torch 2.13, gloo's threads now and then abort a finished process during that cleanup.
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
