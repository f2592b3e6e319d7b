"""The counters of a run: updates applied and skipped, what is due after one, when the run ends."""

import dataclasses
import math

from common import checkpointable


@checkpointable
@dataclasses.dataclass
class PromptProgress:
    """The position in the prompts, over all epochs, where updates do not determine it."""

    prompts_taken: int = 0  # taken so far
    prompts_done: int = 0  # those of them whose updates are all made
    prompts_at_last_update: int = 0  # taken when the last update was made

    @property
    def prompts_without_update(self) -> int:
        """Prompts done since the last update."""
        return self.prompts_done - self.prompts_at_last_update


@dataclasses.dataclass
class Progress:
    """The counters of a run. A checkpoint holds those of `checkpoint.COUNTERS`."""

    n_rows: int  # of the training data; in GRPO, PPO and distillation, prompts
    train_batch_size: int
    max_epochs: int
    max_steps: int
    updates_per_epoch: int = 0
    global_step: int = 0  # updates applied; the one x-axis
    skipped_steps: int = 0  # updates skipped by the engine: their gradients are not finite
    n_samples: int = 0  # trained on so far, in applied updates
    n_tokens: int = 0  # in these samples, without padding; a pair's prompt counts twice
    prompt_progress: PromptProgress | None = None  # where rollouts may lead to no update
    stopped_early: bool = False  # by `--stop_after`
    last_was_applied: bool = True  # whether the last update was made, and applied
    consecutive_skips: int = 0  # since the last applied update

    def __post_init__(self):
        if not self.updates_per_epoch:
            self.updates_per_epoch = math.ceil(self.n_rows / self.train_batch_size)

    @property
    def updates_seen(self) -> int:
        """Updates applied or skipped: the position in the data, except in recipes that sample."""
        return self.global_step + self.skipped_steps

    @property
    def total_steps(self) -> int:
        """The horizon of the schedule: `max_steps`, else the updates of all epochs."""
        return self.max_steps or self.max_epochs * self.updates_per_epoch

    @property
    def finished(self) -> bool:
        """Whether all updates of `max_steps` or of the data are done, or the run stops early.

        It also stops after a whole epoch of prompts that led to no update.
        """
        prompts = self.prompt_progress
        if self.stopped_early:
            return True
        if prompts is not None and prompts.prompts_without_update >= self.n_rows:
            return True
        if self.max_steps:
            return self.global_step >= self.max_steps
        if prompts is not None:
            return prompts.prompts_done == prompts.prompts_taken >= self.max_epochs * self.n_rows
        return self.updates_seen >= self.max_epochs * self.updates_per_epoch

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        if self.prompt_progress is not None:
            return self.prompt_progress.prompts_taken / self.n_rows
        return self.updates_seen / self.updates_per_epoch

    def update_done(self, applied: bool, n_samples: int, n_tokens: int) -> None:
        """Counts one update. The samples of a skipped update were not trained on."""
        self.last_was_applied = applied
        if not applied:
            self.skipped_steps += 1
            self.consecutive_skips += 1
            return
        self.global_step += 1
        self.n_samples += n_samples
        self.n_tokens += n_tokens
        self.consecutive_skips = 0

    def skip_rollout(self) -> None:
        """Notes that a rollout was consumed without an update: the model is as it was."""
        self.last_was_applied = False

    def due(self, interval: float, first: bool = False) -> bool:
        """Whether something is due now: after every `interval` applied updates, and at the end.

        If the last updates were not applied, what was due after the last applied one is already
        done. Only what waits for the end is due then.

        Args:
            interval: a number of updates, or below 1 a share of all updates. 0: at the end alone.
            first: whether it is also due after the first update.
        """
        every = self.interval_in_updates(interval)
        at_multiple = every > 0 and self.global_step % every == 0
        if self.last_was_applied:
            return at_multiple or self.finished or (first and self.global_step == 1)
        return self.finished and not at_multiple and self.global_step > 0

    def interval_in_updates(self, interval: float) -> int:
        """Returns an interval, which may be a share of all updates, as a number of updates."""
        return share_of(self.total_steps, interval) if interval < 1 else int(interval)


def share_of(updates: int, share: float) -> int:
    """Returns a share of updates, rounded up: 7 for 0.07 of 100, which is 7.000000000000001."""
    return math.ceil(round(updates * share, 6))
