"""What a training loop asks: the samples of its next update, what is due, what is logged."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from common import batches, display, engine, folders, log, stopping
from common.metrics import Flop
from common.progress import Progress, PromptProgress
from common.values import Recorder


@dataclasses.dataclass
class Update:
    """One optimizer step: which samples, cut how, and what the engine will divide by."""

    indices: np.ndarray  # of its samples over all processes, in the data set or the rollout
    micro_batches: list[batches.MicroBatch]  # those of this process
    engine_divisor: int  # what the engine divides the summed losses by: micro-batches x processes
    n_tokens: int  # over all processes
    loss_scale: float | None  # before the update, which may change it; None where there is none
    losses: list[stopping.Losses] = dataclasses.field(default_factory=list)  # so far

    @property
    def n_samples(self) -> int:
        return len(self.indices)


class Run(Progress):
    """A run: the counters of `Progress`, a clock and a log. It holds no model and no data.

    Args:
        n_rows: rows of the training data; with the arguments they decide when the run ends.
        bar_metric: the recipe's key metric, shown in the progress bar next to the loss.
        charts: TensorBoard's charts: the tags that each shows together, by its title.
        updates_per_epoch: by default those of `n_rows` samples.
        prompt_progress: where a rollout may yield no update, so that prompts end the run.

    From `Progress`: `global_step`, `updates_seen`, `total_steps`, `epoch`, `due`, `finished` ...
    """

    def __init__(
        self,
        accelerator: Accelerator,
        args,
        n_rows: int,
        *,
        flop: Flop,
        bar_metric: str,
        charts: dict[str, list[str]],
        updates_per_epoch: int = 0,
        prompt_progress: PromptProgress | None = None,
    ):
        limits = (args.train_batch_size, args.max_epochs, args.max_steps)
        super().__init__(n_rows, *limits, updates_per_epoch, prompt_progress=prompt_progress)
        self.accelerator = accelerator
        self.args = args
        self.output_dir = Path(args.output_dir)
        self.flop = flop
        self.bar_metrics = ("loss", bar_metric, "perf/tokens_per_second")
        self.charts = charts
        self.seconds: dict[str, float] = {}  # of the blocks that were timed, by name
        # Operations of this process; on the device, so that no GPU waits for them.
        self.operations = torch.zeros(1, dtype=torch.float64, device=accelerator.device)
        # From `start` on: TensorBoard, if it is asked for, on the main process; the progress bar.
        self.board: log.Board | None = None
        self.bar: display.Bar | None = None

    def start(self) -> None:
        """Opens the trackers and the bar, and starts the clock. All processes must call it."""
        accelerator = self.accelerator
        if accelerator.is_main_process:
            self.board = log.open_trackers(self)
        self.bar = display.Bar(self)
        self.restart_clock()

    def recorder(self, source: str, model: torch.nn.Module | None = None) -> Recorder | None:
        """Returns what records the values of a source, such as `eval/`; None: nothing does.

        With `--values_tokens` also the log-probs of the trained `model`.
        """
        if not self.args.values_steps:
            return None
        recorder = Recorder(self, source.rstrip("/"))
        if model is not None and self.args.values_tokens:
            engine.unwrapped(self.accelerator, model).register_forward_hook(recorder.keep_logps)
        return recorder

    # ============================================================ the next update

    def begin_update(self, data: batches.Rows) -> Update:
        """Returns the next update. All processes agree on its samples; each takes its share.

        `data` may be another view of a data set, with the methods of `Rows`.
        """
        size = self.args.train_batch_size
        indices = batches.indices_of_update(self.n_rows, size, self.args.seed, self.updates_seen)
        sequences = data.sequences_of(indices)
        n_tokens = int(data.lengths[sequences].sum())
        return self.plan_update(indices, data.lengths, n_tokens, sequences)

    def plan_update(
        self,
        indices: np.ndarray,
        lengths: np.ndarray,
        n_tokens: int,
        sequences: np.ndarray | None = None,
    ) -> Update:
        """Plans an update of these samples, and tells accelerate how many micro-batches it has.

        `lengths` sort and cut them. `sequences` are what the samples are cut into (SFT).
        """
        micro_batches = self.split(indices if sequences is None else sequences, lengths)
        return Update(
            indices=indices,
            micro_batches=micro_batches,
            engine_divisor=engine.begin_update(self.accelerator, micro_batches),
            n_tokens=n_tokens,
            loss_scale=engine.loss_scale(self.accelerator),
        )

    def split(self, indices: Sequence[int], lengths: np.ndarray) -> list[batches.MicroBatch]:
        """Cuts samples into micro-batches of like length, and returns those of this process."""
        sizes = (self.args.micro_train_batch_size, self.args.micro_train_tokens)
        return [
            batches.MicroBatch(part, batches.to_device(sample_weights, self.accelerator.device))
            for part, sample_weights in batches.split(self.accelerator, indices, lengths, *sizes)
        ]

    # ============================================================ an update

    def check_finite(
        self,
        update: Update,
        row_numbers: Sequence[int],
        losses: torch.Tensor,
        weights: torch.Tensor,
        tensors: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Keeps the losses of a micro-batch; ends the run if one of the update's is not finite.

        All are checked just before the last `backward`: the host waits for a GPU once, and
        DeepSpeed, which steps in `backward`, has not yet stepped.
        """
        update.losses.append(stopping.Losses(row_numbers, losses.detach(), weights))
        if self.accelerator.sync_gradients:
            stopping.check_finite(self, update.losses, tensors)

    def finish_update(self, update: Update, grad_norm: float | torch.Tensor) -> bool:
        """Counts an update, and returns whether it was applied; False: gradients overflowed."""
        applied = not self.accelerator.optimizer_step_was_skipped
        self.update_done(applied, update.n_samples, update.n_tokens)
        if not applied:
            stopping.check_skips(self, update.loss_scale)
        elif not math.isfinite(float(grad_norm)):
            raise FloatingPointError(
                f"the gradient of update {self.global_step} is not finite although its loss is: "
                "the weights are lost. Lower --learning_rate, or resume from a checkpoint."
            )
        else:
            self.bar.update()
        return applied

    # ============================================================ after an update

    def log(self, values: dict[str, float]) -> None:
        """Writes a training line: what `Means.reduce_and_reset` returned, and counters.

        All processes must call it.
        """
        if not values:
            return
        line = dict(values)
        if "loss" in values:  # not where a rollout led to no update
            line |= {"samples": self.n_samples, "tokens": self.n_tokens}
            line |= {"skipped_steps": self.skipped_steps, **self.speed()}
            self.restart_clock()
        self.write({**line, "epoch": self.epoch})

    def log_evaluation(self, eval_metrics: dict[str, float], samples: list[dict]) -> None:
        """Writes an evaluation as a line of its own, and prints it."""
        if not eval_metrics:
            return
        self.write(eval_metrics)
        self.write_samples(samples)
        if self.accelerator.is_main_process:
            evaluations = log.evaluations(self.output_dir)
            display.write(*display.describe_evaluation(evaluations, samples))

    def write(self, values: dict[str, float]) -> None:
        """Writes a line to `metrics.jsonl`, a JSON object; trackers and the bar show it, too."""
        self.append(log.METRICS, [values])
        self.accelerator.log(values, step=self.global_step)
        self.bar.show({name: values[name] for name in self.bar_metrics if name in values})

    def write_samples(self, samples: list[dict]) -> None:
        """Appends samples to `samples.jsonl`, with the updates that the model had made.

        Each has `source` (`eval`, `eval/<name>` or `rollout`), `row` (its number in the data, from
        1), `prompt`, `response`, and what is known of it: `right`, `answer`, `score`, `rewards`.
        """
        self.append(log.SAMPLES, samples)
        if self.board and samples:
            self.board.add_text(f"samples/{samples[0]['source']}", samples[:3], self.global_step)

    def append(self, name: str, lines: list[dict]) -> None:
        """Appends lines to one of the run's files, on the main process."""
        if not lines or not self.accelerator.is_main_process:
            return
        path = self.output_dir / name
        with folders.writing(path), open(path, "a", encoding="utf-8") as file:
            for line in lines:
                numbered = {"global_step": self.global_step, **line}
                file.write(json.dumps(numbered, ensure_ascii=False) + "\n")

    # ============================================================ the clock: perf/*
    def restart_clock(self) -> None:
        """Starts the clock again, after a line was logged."""
        # A name that was timed once is in every line, as 0 if nothing took time.
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.operations.zero_()
        self.since = time.perf_counter()
        self.n_samples_before = self.n_samples
        self.n_tokens_before = self.n_tokens

    @contextlib.contextmanager
    def timed(self, name: str):
        """Adds the seconds of a block to `perf/<name>_seconds` of the next line.

        `excluded` stands for evaluating and saving: `perf/*` leaves these seconds out.
        """
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def count_flop(self, batch: dict, weights: torch.Tensor) -> None:
        """Counts the operations of a batch of `Packer.make_batch`, for `perf/mfu`."""
        if self.flop.peak is not None:
            for_tokens = self.flop.per_token * batch["n_tokens"]
            for_targets = self.flop.per_target * len(batch["targets"])
            self.operations += (for_tokens + for_targets) * weights.amax()  # 0: padding alone

    def speed(self) -> dict[str, float]:
        """Returns `perf/*` of the time since the last line. All processes must call it."""
        seconds = dict(self.seconds)
        elapsed = time.perf_counter() - self.since - seconds.pop("excluded", 0.0)
        values = {
            "perf/samples_per_second": (self.n_samples - self.n_samples_before) / elapsed,
            "perf/tokens_per_second": (self.n_tokens - self.n_tokens_before) / elapsed,
        }
        values |= {f"perf/{name}_seconds": spent for name, spent in seconds.items()}
        if self.accelerator.device.type == "cuda":
            values["perf/peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if self.flop.peak is not None:
            mean_of_processes = self.accelerator.reduce(self.operations, "mean").item()
            if mean_of_processes:
                values["perf/mfu"] = mean_of_processes / elapsed / self.flop.peak
        return values
