"""Exact means, log lines."""

import atexit
import contextlib
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from common.progress import Progress

# Dense products in half precision a second, by NVIDIA's data sheets; of other GPUs no utilisation is logged.
PEAK_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
}


NOTHING = (0.0, 0.0, math.inf, -math.inf)  # sum, count, minimum, maximum


class Means:
    """float64 sums, counts, minima and maxima by name. Every rank must add the same names in the same order."""

    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.sums: dict[str, torch.Tensor] = {}  # name -> (sum, count, minimum, maximum)

    @torch.no_grad()
    def add(self, values: dict[str, torch.Tensor], weights: torch.Tensor) -> None:
        """Adds per-sample (or per-token) values; weight zero (filler rows, masked tokens) counts nowhere.

        Args:
            values: tensors of the shape of `weights`.
            weights: 1 for what counts, 0 for what does not.
        """
        weights = weights.double()
        for name, value in values.items():
            low, high = (
                torch.where(weights > 0, value.double(), bound) for bound in (math.inf, -math.inf)
            )
            total = (
                torch.where(weights > 0, low, 0.0) * weights
            ).sum()  # a filler's inf must not become NaN
            self.merge(name, torch.stack([total, weights.sum(), low.amin(), high.amax()]))

    def merge(self, name: str, new: torch.Tensor) -> None:
        old = self.sums.get(name)  # a tensor made of `NOTHING` would make a GPU wait
        self.sums[name] = (
            new
            if old is None
            else torch.cat(
                [old[:2] + new[:2], torch.minimum(old, new)[2:3], torch.maximum(old, new)[3:]]
            )
        )

    def reduce(self) -> dict[str, float]:
        """The means over all processes, in one collective; a name whose last part begins with min_ or max_ gives the minimum or the
        maximum. Empties the sums. All ranks must call it."""
        if not self.sums:
            return {}
        table = self.accelerator.gather(
            torch.stack(list(self.sums.values()))[None]
        )  # [processes, names, 4]
        sums, low, high = table.sum(0).tolist(), table.amin(0).tolist(), table.amax(0).tolist()
        names, self.sums, result = list(self.sums), {}, {}
        for name, (total, count, *_), (_, _, least, _), (*_, most) in zip(names, sums, low, high):
            if count:
                result[name] = {"min_": least, "max_": most}.get(
                    name.rpartition("/")[2][:4], total / count
                )
        return result


class Metrics:
    """The metrics of a training run: sums pending until their update is applied, log lines, the progress bar.

    Args:
        output_dir: gets `metrics.jsonl` and `tensorboard/`.
        bar_metric: the recipe's key metric, shown in the bar beside the loss.

    Attributes:
        pending: the window's sums, until its update is applied; `open`, those of the next log line.
        parameters: trained, of all models; set before training, on the main process.
    """

    def __init__(self, accelerator, args, progress: Progress, bar_metric: str):
        self.accelerator, self.progress, self.bar_metric = accelerator, progress, bar_metric
        self.file = Path(args.output_dir) / "metrics.jsonl"
        self.open, self.pending = Means(accelerator), Means(accelerator)
        # By name: values of the last update alone; in the bar; see `timed`. The window of the last warning of skips.
        self.last_update, self.shown, self.seconds, self.warned = {}, {}, {}, -50
        self.parameters, self.board, self.with_board = (
            0,
            None,
            accelerator.is_main_process and args.report_to == "tensorboard",
        )

    def start(self, metrics_bytes: int = 0) -> None:
        """Opens the files: a new run's empty, a resumed one's cut to what its checkpoint knows. All ranks must call it."""
        if self.accelerator.is_main_process and self.file.exists():
            os.truncate(self.file, min(metrics_bytes, self.file.stat().st_size))
        if self.with_board:  # it hides what a killed run wrote beyond the step it resumes from
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(
                self.file.with_name("tensorboard"), purge_step=(self.progress.global_step or -1) + 1
            )
        self.bar = tqdm(
            total=self.progress.total_steps,
            initial=self.progress.global_step,
            desc="update",
            dynamic_ncols=True,
            disable=not self.accelerator.is_main_process,
            mininterval=0.5 if sys.stderr.isatty() else 10,
        )

    def start_interval(self) -> None:
        """Begins the clock of the next line's `perf/*`."""
        self.since, self.samples, self.tokens = (
            time.perf_counter(),
            self.progress.samples,
            self.progress.tokens,
        )
        self.seconds = dict.fromkeys(self.seconds, 0.0)  # what one line shows all show

    @contextlib.contextmanager
    def timed(self, name: str):
        """Adds the block's seconds to `perf/<name>_seconds` of the next line. `paused` (evaluation, saving) is not training time: `perf/*`
        leaves it out."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def update_done(self, applied: bool, **last_update: float | None) -> None:
        """Keeps the window's sums if its update was applied, drops them if it was skipped.

        Args:
            last_update: values of this update alone (`grad_norm`, `learning_rate`, `loss_scale`); None is left out.
        """
        if applied:
            if not math.isfinite(last_update.get("grad_norm") or 0.0):
                where = f"the gradient of update {self.progress.global_step} is not finite though its loss is"
                raise FloatingPointError(
                    f"{where}: the weights are lost. Lower --learning_rate, or resume from a checkpoint."
                )
            for name, sums in self.pending.sums.items():
                self.open.merge(name, sums)
            self.last_update = {
                name: float(value) for name, value in last_update.items() if value is not None
            }
            self.bar.update()
        else:
            self.explain_skip(
                last_update["loss_scale"]
            )  # DeepSpeed skips what overflows in fp32 as well
        self.pending.sums = {}

    def explain_skip(self, scale: float | None) -> None:
        """Ends a run whose second overflow in a row, or more, is at the smallest loss scale, or the hundredth; warns of more than a tenth."""
        progress, main, plugin = (
            self.progress,
            self.accelerator.is_main_process,
            self.accelerator.state.deepspeed_plugin,
        )
        least, recent = (
            plugin.deepspeed_config.get("fp16", {}).get("min_loss_scale", 1) if plugin else 0.0,
            len(progress.recent_skips),
        )
        where = (
            f"at loss scale {scale:g}, the smallest being {least:g}"
            if scale
            else "where no loss scale is to blame"
        )
        if progress.skips_in_a_row >= (2 if (scale or 0.0) <= least else 100):
            end = f"update {progress.global_step + 1} overflowed {progress.skips_in_a_row} times in a row, the last time {where}"
            sys.exit(
                f"{end}. Use bf16, a lower --learning_rate if the loss had grown; --debug_overflow names the module"
                if main
                else 1
            )
        if main and recent > 5 and progress.updates_seen > self.warned + 50:
            self.warned = progress.updates_seen
            self.bar.write(
                f"WARNING: {recent} of the last 50 updates overflowed, the last {where}. Raise loss_scale_window if the scale grows back "
                "into the overflow, hysteresis if single windows drive it down; near min_loss_scale use bf16. See docs/fp16.md."
            )

    def log(self) -> None:
        """Writes the training line of this `global_step`, if anything was applied since the last. All ranks must call it."""
        if "loss" not in self.open.sums:
            return
        elapsed = time.perf_counter() - self.since - self.seconds.pop("paused", 0.0)
        means, progress = self.open.reduce(), self.progress
        line = {
            "loss": means.pop("loss"),
            **self.last_update,
            "epoch": progress.updates_seen / progress.updates_per_epoch,
            **means,
            "samples": progress.samples,
            "tokens": progress.tokens,
            "skipped_steps": progress.skipped_steps,
            "perf/samples_per_second": (progress.samples - self.samples) / elapsed,
            "perf/tokens_per_second": (progress.tokens - self.tokens) / elapsed,
            **{f"perf/{name}_seconds": value for name, value in self.seconds.items()},
        }
        if self.accelerator.device.type == "cuda":
            line["perf/peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            if peak := PEAK_FLOPS.get(torch.cuda.get_device_name()):
                line["perf/mfu"] = (
                    6
                    * self.parameters
                    * line["perf/tokens_per_second"]
                    / (peak * self.accelerator.num_processes)
                )
        self.write(line)
        self.shown |= {
            name.split("/")[-1]: line[name]
            for name in ("loss", self.bar_metric, "perf/tokens_per_second")
            if name in line
        }
        self.bar.set_postfix(self.shown, refresh=False)
        self.start_interval()

    def log_rollout(self, scores: torch.Tensor, table: str) -> None:
        """Shows a rollout in TensorBoard, at the update it is made for: a histogram of its scores, a Markdown table of some responses."""
        if self.board and scores.abs().max() < 1e20:  # where TensorBoard's bins end
            self.board.add_histogram("objective/scores", scores, self.progress.global_step + 1)
            self.board.add_text("responses", table, self.progress.global_step + 1)

    def log_evaluation(self, values: dict[str, float], samples: list[str]) -> None:
        """Writes an evaluation as a line of its own, and shows it with a few answers. All ranks may call it."""
        if not values:
            return
        self.write(values)
        if self.accelerator.is_main_process:
            shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            self.bar.write(
                "\n".join([f"global_step {self.progress.global_step}: {shown}", *samples])
            )

    def write(self, values: dict[str, float]) -> None:
        """One JSON object a line, and the same to TensorBoard."""
        if self.accelerator.is_main_process:
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(json.dumps({"global_step": self.progress.global_step, **values}) + "\n")
        if self.board:
            for name, value in values.items():
                self.board.add_scalar(name, value, self.progress.global_step)
            self.board.flush()

    def close(self) -> None:
        """Writes a line still open, ends the bar and the processes' group. All ranks must call it."""
        self.log()
        self.bar.close()
        self.accelerator.end_training()
        if self.accelerator.num_processes > 1 and self.accelerator.device.type == "cpu":
            # torch 2.13: gloo's threads now and then abort a process that has finished, while the interpreter cleans up.
            atexit.register(lambda: (sys.stdout.flush(), os._exit(hasattr(sys, "last_value"))))
