"""The counters of a run."""

import dataclasses
import math
import sys


@dataclasses.dataclass
class Progress:
    """The counters of a run. A checkpoint holds all but those of skips in a row and of late.

    Attributes:
        global_step: optimizer updates applied; the one x-axis.
        skipped_steps: updates that an fp16 overflow made the engine skip.
        updates_seen: windows consumed, applied or skipped: the position in the data.
        samples, tokens: trained on so far, in applied updates.
        recent_skips: which of the last 50 windows were skipped, the first of a run being 1.
        updates_per_epoch: windows of one pass over the rows; by default `n_rows / train_batch_size` rounded up.
    """

    n_rows: int
    train_batch_size: int
    max_epochs: int
    max_steps: int
    global_step: int = 0
    skipped_steps: int = 0
    updates_seen: int = 0
    samples: int = 0
    tokens: int = 0
    skips_in_a_row: int = 0
    updates_per_epoch: int = 0
    recent_skips: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        if self.max_steps < 0 or (self.max_steps == 0 and self.max_epochs < 1):
            sys.exit(
                f"--max_epochs {self.max_epochs} and --max_steps {self.max_steps}: give at least one epoch, or a number of updates"
            )
        self.updates_per_epoch = self.updates_per_epoch or math.ceil(
            self.n_rows / self.train_batch_size
        )

    @property
    def total_steps(self) -> int:
        """The horizon of the schedule: `max_steps`, else the windows of all epochs."""
        return self.max_steps or self.max_epochs * self.updates_per_epoch

    @property
    def finished(self) -> bool:
        """`max_steps` counts applied updates; an epoch run ends when its windows end."""
        return (
            self.global_step >= self.max_steps
            if self.max_steps
            else self.updates_seen >= self.max_epochs * self.updates_per_epoch
        )

    def update_done(self, applied: bool, samples: int, tokens: int) -> None:
        """Counts one window; what a skipped one held was not trained on."""
        self.updates_seen += 1
        self.global_step += applied
        self.skipped_steps += not applied
        self.samples += samples * applied
        self.tokens += tokens * applied
        self.skips_in_a_row = 0 if applied else self.skips_in_a_row + 1
        self.recent_skips = [
            w
            for w in self.recent_skips + [self.updates_seen] * (not applied)
            if w > self.updates_seen - 50
        ]

    def due(self, interval: float) -> bool:
        """Whether to evaluate or save now: after an update at a multiple of the interval, and at the end (once, also where its last
        window was skipped). An interval below 1 is a share of all updates; 0 is the end only."""
        every = math.ceil(interval * self.total_steps) if 0 < interval < 1 else int(interval)
        multiple = every > 0 and self.global_step % every == 0
        return (
            (multiple or self.finished)
            if self.skips_in_a_row == 0
            else (self.finished and not multiple)
        )

    def log_due(self, interval: float) -> bool:
        """Whether to log now: after the first update, too."""
        return (self.global_step == 1 and self.skips_in_a_row == 0) or self.due(interval)

    def describe(self) -> str:
        each = f"{self.updates_per_epoch} updates an epoch, the last of {(self.n_rows - 1) % self.train_batch_size + 1} samples"
        return f"{self.n_rows} samples / train_batch_size {self.train_batch_size} = {each}; {self.total_steps} updates in all"
