"""The counters of a run: updates applied and skipped, what is due after one, when the run ends."""

import dataclasses
import math
import sys
from typing import Any

from common import counted

RECENT_UPDATES = 50


@dataclasses.dataclass
class Progress:
    """The counters of a run. A checkpoint holds those of `checkpoint.COUNTERS`.

    Attributes:
        n_rows: of the training data; in GRPO, PPO and distillation, prompts.
        train_batch_size, max_epochs, max_steps: those of the run.
        updates_per_epoch: by default `n_rows / train_batch_size`, rounded up.
        global_step: updates applied; the one x-axis.
        skipped_steps: updates that the engine skipped because of gradients that are not finite.
        samples: trained on so far, in applied updates.
        tokens: real tokens of the samples (their `length`; in DPO and reward a pair's prompt counts
            twice), padding excluded, in applied updates.
        counts_sequences: whether a sample may hold several sequences, so that they are logged.
        sequences: trained on so far, in applied updates.
        position: the run's `rollouts.schedule.Position`, in a recipe whose updates do not tell how
            much of the data is used up. In GRPO a rollout that leaves groups out makes fewer.
        stopped_early: whether the run ends before its data: by `--stop_after`, or in GRPO because
            a whole epoch of prompts led to no update.
        idle: whether rows were used up since the latest update without leading to one.
        consecutive_skips: how many of the latest updates were skipped since the last applied one.
        recent_skips: which of the latest `RECENT_UPDATES` updates were skipped, counted from 1.
    """

    n_rows: int
    train_batch_size: int
    max_epochs: int
    max_steps: int
    updates_per_epoch: int = 0
    global_step: int = 0
    skipped_steps: int = 0
    samples: int = 0
    tokens: int = 0
    counts_sequences: bool = False
    sequences: int = 0
    position: Any = None
    stopped_early: bool = False
    idle: bool = False
    consecutive_skips: int = 0
    recent_skips: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        if self.max_steps < 0 or (self.max_steps == 0 and self.max_epochs < 1):
            sys.exit(
                f"--max_epochs {self.max_epochs} and --max_steps {self.max_steps}: "
                "give at least one epoch, or a number of updates"
            )
        if not self.updates_per_epoch:
            self.updates_per_epoch = math.ceil(self.n_rows / self.train_batch_size)

    @property
    def updates_seen(self) -> int:
        """Updates applied or skipped: the position in the data."""
        return self.global_step + self.skipped_steps

    @property
    def total_steps(self) -> int:
        """The horizon of the schedule: `max_steps`, else the updates of all epochs."""
        return self.max_steps or self.max_epochs * self.updates_per_epoch

    @property
    def finished(self) -> bool:
        """Whether all updates of `max_steps` or of the data are done, or the run stops early."""
        if self.stopped_early:
            return True
        if self.max_steps:
            return self.global_step >= self.max_steps
        if self.position is not None:
            prompts_taken = self.position.prompts_seen
            all_are_taken = prompts_taken >= self.max_epochs * self.n_rows
            return all_are_taken and self.position.prompts_done == prompts_taken
        return self.updates_seen >= self.max_epochs * self.updates_per_epoch

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        if self.position is not None:
            return self.position.prompts_seen / self.n_rows
        return self.updates_seen / self.updates_per_epoch

    def update_done(self, applied: bool, samples: int, tokens: int, sequences: int = 0) -> None:
        """Counts one update. The samples of a skipped update were not trained on."""
        self.idle = False
        if applied:
            self.global_step += 1
            self.samples += samples
            self.tokens += tokens
            self.sequences += sequences
            self.consecutive_skips = 0
        else:
            self.skipped_steps += 1
            self.consecutive_skips += 1
            self.recent_skips.append(self.updates_seen)
        recent = self.updates_seen - RECENT_UPDATES
        self.recent_skips = [update for update in self.recent_skips if update > recent]

    def counts(self) -> dict[str, int]:
        """Returns the counters as a log line shows them."""
        counts = {"samples": self.samples}
        if self.counts_sequences:
            counts["sequences"] = self.sequences
        return counts | {"tokens": self.tokens, "skipped_steps": self.skipped_steps}

    @property
    def was_just_applied(self) -> bool:
        """Whether an update was applied last: none was skipped and no rollout was idle since."""
        return self.consecutive_skips == 0 and not self.idle

    def save_due(self, interval: float) -> bool:
        """Whether to save now: after every `interval` applied updates, and at the end.

        Args:
            interval: a number of updates, or below 1 a share of all updates. 0: never.
        """
        return interval > 0 and self.evaluation_due(interval)

    def updates_in(self, interval: float) -> int:
        """Returns an interval in updates: below 1 it is a share of all, rounded up."""
        return share_of(self.total_steps, interval) if 0 < interval < 1 else int(interval)

    def evaluation_due(self, interval: float) -> bool:
        """Whether to evaluate now: after every `interval` applied updates, and at the end.

        Args:
            interval: as in `save_due`, but 0: at the end alone.
        """
        every = self.updates_in(interval)
        at_multiple = every > 0 and self.global_step % every == 0
        if self.was_just_applied:
            return at_multiple or self.finished
        # Nothing was applied, so the model is as it was. Only the end may still need an evaluation:
        # not if the last applied update was at a multiple, and not if there was none, since a run
        # evaluates before its first update.
        is_evaluated = at_multiple or self.global_step == 0
        return self.finished and not is_evaluated

    def log_due(self, interval: float) -> bool:
        """Whether to log now: when an evaluation would be due, and after the first update."""
        first_update = self.global_step == 1 and self.was_just_applied
        return first_update or self.evaluation_due(interval)

    def describe(self) -> str:
        """Returns the arithmetic of the updates in one line."""
        last_of_epoch = (self.n_rows - 1) % self.train_batch_size + 1
        return (
            f"{counted(self.n_rows, 'sample')} / train_batch_size {self.train_batch_size} = "
            f"{counted(self.updates_per_epoch, 'update')} per epoch, "
            f"the last of {counted(last_of_epoch, 'sample')}; "
            f"{counted(self.total_steps, 'update')} in all"
        )


def share_of(updates: int, share: float) -> int:
    """Returns a share of updates, rounded up: 7 for 0.07 of 100, which is 7.000000000000001."""
    return math.ceil(round(updates * share, 6))
