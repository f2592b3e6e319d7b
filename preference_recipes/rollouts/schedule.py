"""Where a run is in its prompts and rollouts; how many rollouts and updates there are."""

import math
import sys
from dataclasses import dataclass

import numpy as np

from common import batches, counted
from common.checkpoint import carried
from common.shared_args import RolloutArgs
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import Samples

# Random numbers are drawn from [seed, rollout, stream, ...]. Each purpose has a stream of its own:
# these do not share numbers. (Mixed sets draw their order from [seed, pass, set, 1], which may be
# the same for a refill: harmless.) All evaluations draw as for rollout 0, so that they compare.
SAMPLING_STREAM = 1
ORDER_STREAM = 2
EVALUATION_STREAM = 3


def check_settings(args) -> None:
    """Refuses a rollout of fewer samples than an update: `--train_batch_size` would be ignored."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if samples < args.train_batch_size:
        least = math.ceil(args.train_batch_size / args.n_samples_per_prompt)
        sys.exit(
            f"a rollout has {samples} samples, fewer than --train_batch_size "
            f"{args.train_batch_size}. Smallest valid size: --rollout_batch_size {least}"
        )


@carried
@dataclass
class Position:
    """Where a run is in its prompts and rollouts."""

    prompts_seen: int = 0  # taken so far, over all epochs
    prompts_done: int = 0  # those of them whose rollouts are finished
    rollouts_seen: int = 0  # finished ones: all their updates are made
    update: int = 0  # how many updates of the current rollout are made

    def take_prompts(self, sampler: Sampler, most: int) -> dict:
        """Returns the columns of the next prompts, at most to the end of the epoch."""
        rows = batches.rows_from(sampler.data.mixture, sampler.args.seed, self.prompts_seen, most)
        self.prompts_seen += len(rows)
        return sampler.data.train[rows]

    def draw_uniforms(self, args, n_prompts: int, round_number: int = 0) -> np.ndarray:
        """Returns the numbers that decide the tokens of the rollout, see `generation.sample`.

        They depend on the seed, the rollout and the round alone: not on the number of processes,
        nor on what was drawn before. A rollout may sample in several rounds.
        """
        seeds = [args.seed, self.rollouts_seen, SAMPLING_STREAM, round_number]
        shape = (n_prompts, args.n_samples_per_prompt, args.max_new_tokens)
        return np.random.default_rng(seeds).random(shape)

    def order_of_groups(self, args, samples: Samples, pass_number: int) -> np.ndarray:
        """Returns the samples of the rollout, by number, in the order of one pass over them.

        The groups come in a seeded order. The samples of a group are side by side, so that most of
        them are in the same update and can share the prompt.
        """
        n_groups = len(samples) // samples.per_prompt
        groups = batches.epoch_order(n_groups, self.order_seed(args), pass_number)
        return (groups[:, None] * samples.per_prompt + np.arange(samples.per_prompt)).flatten()

    def order_seed(self, args) -> tuple[int, ...]:
        """Returns what seeds the order of the rollout's samples, see `batches.epoch_order`."""
        return (args.seed, self.rollouts_seen, ORDER_STREAM)

    def end_rollout(self) -> None:
        """Goes on to the next rollout."""
        self.prompts_done = self.prompts_seen
        self.rollouts_seen += 1
        self.update = 0


@dataclass(frozen=True)
class RolloutSchedule:
    """How one pass over the prompts is cut into rollouts, and a rollout into updates.

    The last rollout of an epoch may be short.
    """

    args: RolloutArgs
    n_prompts: int  # of the whole data set

    @property
    def rollouts_per_epoch(self) -> int:
        return math.ceil(self.n_prompts / self.args.rollout_batch_size)

    @property
    def prompts_of_last(self) -> int:
        """Prompts of the last rollout of an epoch."""
        return self.n_prompts - (self.rollouts_per_epoch - 1) * self.args.rollout_batch_size

    @property
    def updates_per_rollout(self) -> int:
        """Updates of a full rollout."""
        return self.updates_of(self.args.rollout_batch_size)

    @property
    def updates_per_epoch(self) -> int:
        full_rollouts = self.rollouts_per_epoch - 1
        return full_rollouts * self.updates_per_rollout + self.updates_of(self.prompts_of_last)

    def updates_of(self, prompts: int) -> int:
        """Returns the number of updates of a rollout of `prompts` prompts."""
        samples = prompts * self.args.n_samples_per_prompt
        return self.args.num_epochs_per_rollout * math.ceil(samples / self.args.train_batch_size)

    def describe(self, total_steps: int) -> str:
        """Returns the arithmetic in one line; `total_steps` are the updates of the whole run."""
        prompts = self.args.rollout_batch_size
        responses = self.args.n_samples_per_prompt
        return (
            f"a rollout: {counted(prompts, 'prompt')} x {counted(responses, 'response')} "
            f"= {counted(prompts * responses, 'sample')}, "
            f"{counted(self.updates_per_rollout, 'update')}; "
            f"{counted(self.rollouts_per_epoch, 'rollout')} and "
            f"{counted(self.updates_per_epoch, 'update')} per epoch; "
            f"{counted(total_steps, 'update')} in all"
        )
