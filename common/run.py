"""What a training loop asks: the samples of its next update, what is due, what is logged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from common import batches, engine, stopping
from common.log import Logger
from common.metrics import Speed
from common.progress import Progress


@dataclasses.dataclass
class Update:
    """One update, and the losses of its micro-batches so far.

    Attributes:
        rows: its samples, by row number, over all processes.
        micro_batches: those of this process.
        divisor: what the engine divides the summed losses by: micro-batches x processes.
        n_sequences, n_tokens: what its rows hold, over all processes.
        loss_scale: before the update, which may change it; None where there is none.
        losses: what `Run.check_finite` was given.
    """

    rows: np.ndarray
    micro_batches: list[batches.MicroBatch]
    divisor: int
    n_sequences: int
    n_tokens: int
    loss_scale: float | None
    losses: list[tuple] = dataclasses.field(default_factory=list)

    @property
    def n_samples(self) -> int:
        return len(self.rows)


class Run(Progress):
    """A run: its counters, those of `Progress`, with a clock and a log. It holds no model, no data.

    Args:
        args: `SharedArgs`.
        n_rows: of the training data; with the arguments it decides when the run ends.
        flop: operations for each token and each target, for `perf/mfu`.
        bar_metric: what the progress bar shows besides the loss.
        charts: TensorBoard's charts, title -> tags.
        progress: further fields of `Progress`, where a sample may hold several sequences, or in a
            recipe that samples.

    Attributes:
        logger: what writes lines and samples; `log_evaluation` is its own.
        timed, count_flop: see `Speed`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        args,
        n_rows: int,
        *,
        flop: tuple[float, float],
        bar_metric: str,
        charts: dict[str, list[str]],
        **progress: Any,
    ):
        of_args = (args.train_batch_size, args.max_epochs, args.max_steps)
        super().__init__(n_rows, *of_args, **progress)
        self.accelerator = accelerator
        self.args = args
        self.output_dir = Path(args.output_dir)
        self.logger = Logger(accelerator, args, self, bar_metric, charts)
        self.speed = Speed(accelerator, self, flop)
        self.timed = self.speed.timed
        self.count_flop = self.speed.count_flop
        self.log_evaluation = self.logger.log_evaluation

    # ============================================================ the next update

    def next_update(self, data: batches.Rows) -> Update:
        """Returns the next update. All processes agree on its samples; each takes its share.

        `data` may be another view of a data set, with the methods of `Rows`.
        """
        size = self.args.train_batch_size
        rows = batches.rows_of_update(self.n_rows, size, self.args.seed, self.updates_seen)
        numbers = data.of_rows(rows)
        n_tokens = int(data.lengths[numbers].sum())
        return self.update_of(rows, data.lengths, n_tokens, numbers)

    def update_of(
        self,
        rows: np.ndarray,
        lengths: np.ndarray,
        n_tokens: int,
        numbers: np.ndarray | None = None,
    ) -> Update:
        """Returns an update of chosen samples, and tells the engine how large it is.

        Args:
            lengths: by which they are sorted and cut into micro-batches.
            numbers: what is read of them, such as their sequences; None: the samples themselves.
        """
        numbers = rows if numbers is None else numbers
        micro_batches = self.split(numbers, lengths)
        return Update(
            rows=rows,
            micro_batches=micro_batches,
            divisor=engine.begin_update(self.accelerator, micro_batches),
            n_sequences=len(numbers) if self.counts_sequences else 0,
            n_tokens=n_tokens,
            loss_scale=engine.loss_scale(self.accelerator),
        )

    def split(self, numbers: Sequence[int], lengths: np.ndarray) -> list[batches.MicroBatch]:
        """Cuts rows into micro-batches of like length, and returns those of this process."""
        sizes = (self.args.micro_train_batch_size, self.args.micro_train_tokens)
        return [
            batches.MicroBatch(rows, batches.send(weights, self.accelerator.device))
            for rows, weights in batches.split(self.accelerator, numbers, lengths, *sizes)
        ]

    # ============================================================ an update

    def check_finite(
        self,
        update: Update,
        data_rows: Sequence[int],
        losses: torch.Tensor,
        weights: torch.Tensor,
        tensors: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Ends the run if a loss of the update is not finite; see `stopping.check_finite`.

        It looks once, at its last micro-batch. Call it before `backward`, where DeepSpeed steps.
        """
        update.losses.append((data_rows, losses.detach(), weights))
        if self.accelerator.sync_gradients:
            stopping.check_finite(self, update.losses, tensors)

    def count(self, update: Update, grad_norm: float | torch.Tensor) -> bool:
        """Counts an update, and returns whether it was applied; False: gradients overflowed."""
        applied = not self.accelerator.optimizer_step_was_skipped
        self.update_done(applied, update.n_samples, update.n_tokens, update.n_sequences)
        if not applied:
            stopping.check_skips(self.accelerator, self, update.loss_scale)
        elif not math.isfinite(float(grad_norm)):
            raise FloatingPointError(
                f"the gradient of update {self.global_step} is not finite though its loss is: "
                "the weights are lost. Lower --learning_rate, or resume from a checkpoint."
            )
        else:
            self.logger.bar.update()
        return applied

    # ============================================================ after an update

    def log(self, values: dict[str, float]) -> None:
        """Writes what `Means.reduce` returned as a training line. All processes must call it."""
        if not values:
            return
        line = dict(values)
        if "loss" in values:  # not where a rollout led to no update
            line |= self.counts() | self.speed.values()
            self.speed.restart()
        self.logger.write({**line, "epoch": self.epoch})
