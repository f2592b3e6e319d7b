"""A rollout and its updates: a run's position in its prompts, and the samples of an update."""

import dataclasses
import math

import numpy as np
import torch

from common import batches, checkpointable, display, pluralize, progress, refuse
from common.metrics import Means
from preference_recipes.rollouts.samples import Samples

# Random numbers are seeded by [seed, rollout, stream, ...], with one stream for each purpose.
SAMPLING_STREAM = 1
ORDER_STREAM = 2


# ============================================================ the state of a run
@checkpointable
@dataclasses.dataclass
class Rollout:
    """Samples, and the values that their updates need, on the CPU of every process."""

    samples: Samples
    step_at_start: int  # `global_step` before the rollout's first update
    # By name: `[samples, longest response]`, or `[samples, 1]` if all tokens have the same value.
    experience: dict[str, torch.Tensor]
    in_update: torch.Tensor  # bool `[samples]`

    def updates_per_pass(self, args) -> int:
        return math.ceil(int(self.in_update.sum()) / args.train_batch_size)

    def n_updates(self, args) -> int:
        return args.num_epochs_per_rollout * self.updates_per_pass(args)

    def next_indices(self, state: "RolloutState", args) -> np.ndarray:
        """Returns the indices of the next update. Each pass has a new seeded order of the groups.

        Updates differ by at most one sample: a small leftover would get a whole optimizer step.
        """
        updates_per_pass = self.updates_per_pass(args)
        pass_number, update_of_pass = divmod(state.updates_made, updates_per_pass)
        per_prompt = self.samples.per_prompt
        n_groups = len(self.samples) // per_prompt
        groups = batches.epoch_order(n_groups, state.order_seed(args), pass_number)
        indices = (groups[:, None] * per_prompt + np.arange(per_prompt)).flatten()
        trained = indices[self.in_update[indices].numpy()]
        return np.array_split(trained, updates_per_pass)[update_of_pass]


@checkpointable
@dataclasses.dataclass
class RolloutState(progress.PromptProgress):
    """A run's position in its prompts and rollouts. A checkpoint holds it."""

    rollouts_seen: int = 0  # finished rollouts, whose updates are all made
    updates_made: int = 0  # in the current rollout
    rollout: Rollout | None = None  # the current one; None: the next one is due

    def state(self) -> "RolloutState":
        return self

    def load_state(self, saved: "RolloutState") -> None:
        vars(self).update(vars(saved))

    def take_prompts(self, train, seed: int, max_prompts: int) -> dict:
        """Returns the columns of the next prompts, at most up to the end of the epoch.

        The order is that of a data set's rows, see `batches.indices_of_update`.
        """
        epoch, start = divmod(self.prompts_taken, len(train))
        order = batches.epoch_order(len(train), seed, epoch)
        indices = order[start : start + max_prompts]
        self.prompts_taken += len(indices)
        return train[indices]

    def draw_uniforms(self, args, n_prompts: int, round_number: int = 0) -> np.ndarray:
        """Returns the numbers that decide the tokens of the rollout, see `Sampler.sample`.

        They are `[prompts, responses to each, max_new_tokens]` in [0, 1), and depend only on the
        seed, the rollout and its round, not on how many processes there are.
        """
        seeds = [args.seed, self.rollouts_seen, SAMPLING_STREAM, round_number]
        shape = (n_prompts, args.n_samples_per_prompt, args.max_new_tokens)
        return np.random.default_rng(seeds).random(shape)

    def order_seed(self, args) -> tuple[int, ...]:
        return (args.seed, self.rollouts_seen, ORDER_STREAM)

    def advance(self, args) -> None:
        """Counts an update. After the last one of its rollout, the next rollout is due."""
        self.updates_made += 1
        self.prompts_at_last_update = self.prompts_taken
        if self.updates_made == self.rollout.n_updates(args):
            self.end_rollout()

    def end_rollout(self) -> None:
        self.prompts_done = self.prompts_taken
        self.rollouts_seen += 1
        self.updates_made = 0
        self.rollout = None


def skip_rollout(run, state: RolloutState, means: Means) -> None:
    """Skips a rollout that has nothing to train on, with a warning.

    The run ends after a whole epoch of such prompts. If it ends without any update, it fails.
    """
    state.end_rollout()
    run.skip_rollout()  # the model has not changed, so nothing is due until the next update
    message = (
        f"no update: rollout {state.rollouts_seen} has no response to train on (the advantages "
        "of all groups are zero, or all responses are truncated)"
    )
    if state.prompts_without_update >= run.n_rows:
        message += (
            f". The last {state.prompts_without_update} prompts, a whole epoch, led to no "
            "update, so the run ends here"
        )
    if run.finished and run.global_step == 0:
        run.log(means.reduce_and_reset())  # the rewards belong in the log
        refuse(f"{message}. The run has applied no update")
    display.write(f"WARNING: {message}")


# ============================================================ how many updates
def count_updates(args, n_prompts: int) -> int:
    """Returns how many updates these prompts make, in rollouts of which the last may be short."""
    n_full, rest = divmod(n_prompts, args.rollout_batch_size)
    rollouts = [args.rollout_batch_size] * n_full + [rest]
    updates = [math.ceil(n * args.n_samples_per_prompt / args.train_batch_size) for n in rollouts]
    return args.num_epochs_per_rollout * sum(updates)


def describe_updates(args, run: progress.Progress, may_be_fewer: bool = False) -> str:
    """Describes how many updates a run makes. They `may_be_fewer` if groups are left out."""
    n_prompts = run.n_rows
    prompts = args.rollout_batch_size
    samples = prompts * args.n_samples_per_prompt
    at_most = "at most " if may_be_fewer else ""
    return (
        f"a rollout: {pluralize(prompts, 'prompt')}, {pluralize(samples, 'sample')}, "
        f"{at_most}{pluralize(count_updates(args, prompts), 'update')}; "
        f"an epoch: {pluralize(math.ceil(n_prompts / prompts), 'rollout')}, "
        f"{at_most}{pluralize(count_updates(args, n_prompts), 'update')}; "
        f"{'' if args.max_steps else at_most}{pluralize(run.total_steps, 'update')} in all"
    )


def check_rollout_size(args) -> None:
    """Refuses a rollout of fewer samples than an update: `--train_batch_size` would be ignored."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if samples < args.train_batch_size and not args.preview:
        smallest = math.ceil(args.train_batch_size / args.n_samples_per_prompt)
        refuse(
            f"a rollout has {samples} samples, fewer than --train_batch_size "
            f"{args.train_batch_size}. Smallest valid size: --rollout_batch_size {smallest}"
        )
