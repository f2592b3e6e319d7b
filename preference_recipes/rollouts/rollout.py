"""Where a run is in its prompts, what the updates of a rollout need, how many there are."""

import dataclasses
import math

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from common import batches, carried, counted, display, distributed, progress, refuse
from common.metrics import Means
from preference_recipes.models import checks
from preference_recipes.models.reference import Reference
from preference_recipes.rollouts.policy import Policy
from preference_recipes.rollouts.samples import Samples

# Random numbers are drawn from [seed, rollout, stream, ...]: each purpose has a stream of its own.
SAMPLING_STREAM = 1
ORDER_STREAM = 2


# ============================================================ what a run carries
@carried
@dataclasses.dataclass
class Position(progress.PromptProgress):
    """Where a run is in its prompts and rollouts."""

    rollouts_seen: int = 0  # finished ones: all their updates are made
    updates_made: int = 0  # of the current rollout

    def take_prompts(self, policy: Policy, max_prompts: int) -> dict:
        """Returns the columns of the next prompts, at most to the end of the epoch.

        The order is that of a data set's rows, see `batches.rows_of_update`.
        """
        train = policy.data.train
        epoch, place = divmod(self.prompts_seen, len(train))
        order = batches.epoch_order(len(train), policy.args.seed, epoch)
        rows = order[place : place + max_prompts]
        self.prompts_seen += len(rows)
        return train[rows]

    def draw_uniforms(self, args, n_prompts: int, round_number: int = 0) -> np.ndarray:
        """Returns the numbers that decide the tokens of the rollout, see `Sampler.sample`.

        `[prompts, responses to each, max_new_tokens]` in [0, 1). They depend on the seed, the
        rollout and its round alone, not on how many processes there are.
        """
        seeds = [args.seed, self.rollouts_seen, SAMPLING_STREAM, round_number]
        shape = (n_prompts, args.n_samples_per_prompt, args.max_new_tokens)
        return np.random.default_rng(seeds).random(shape)

    def order_seed(self, args) -> tuple[int, ...]:
        return (args.seed, self.rollouts_seen, ORDER_STREAM)

    def end_rollout(self) -> None:
        self.prompts_done = self.prompts_seen
        self.rollouts_seen += 1
        self.updates_made = 0


@carried
@dataclasses.dataclass
class Rollout:
    """Samples and what their updates need to know about them; on the CPU of every process."""

    samples: Samples
    started_at: int  # `global_step` before the rollout's first update
    # By name `[samples, longest response]`, or `[samples, 1]` if all tokens have the same value.
    stored: dict[str, torch.Tensor]
    is_trained: torch.Tensor  # bool `[samples]`

    def updates_per_pass(self, args) -> int:
        return math.ceil(int(self.is_trained.sum()) / args.train_batch_size)

    def n_updates(self, args) -> int:
        return args.num_epochs_per_rollout * self.updates_per_pass(args)

    def rows_of_update(self, position: Position, args) -> np.ndarray:
        """Returns which samples form the next update: groups in a seeded order, anew in each pass.

        Updates differ in size by at most one sample: a small leftover would get a whole optimizer
        step of its own.
        """
        n_updates = self.updates_per_pass(args)
        pass_number, update_of_pass = divmod(position.updates_made, n_updates)
        per_prompt = self.samples.per_prompt
        n_groups = len(self.samples) // per_prompt
        groups = batches.epoch_order(n_groups, position.order_seed(args), pass_number)
        rows = (groups[:, None] * per_prompt + np.arange(per_prompt)).flatten()
        trained = rows[self.is_trained[rows].numpy()]
        return np.array_split(trained, n_updates)[update_of_pass]

    def n_tokens(self, rows: np.ndarray) -> int:
        """Returns the tokens of some samples, prompts and responses."""
        return int(self.samples.lengths[rows].sum())


@carried
@dataclasses.dataclass
class State:
    """What a run that samples carries from update to update. A checkpoint holds it."""

    position: Position = dataclasses.field(default_factory=Position)
    rollout: Rollout | None = None  # whose updates are being made; None: the next one is due

    def state(self) -> "State":
        return self

    def load_state(self, saved: "State") -> None:
        """Goes to the saved state. The position stays one object, since the counters read it."""
        vars(self.position).update(vars(saved.position))
        vars(self).update({**vars(saved), "position": self.position})

    def advance(self, args) -> None:
        """Counts an update. After the last one of its rollout, the next rollout is due."""
        self.position.updates_made += 1
        self.position.prompts_at_last_update = self.position.prompts_seen
        if self.position.updates_made == self.rollout.n_updates(args):
            self.position.end_rollout()
            self.rollout = None


def skip(run, state: State, means: Means) -> None:
    """Goes past a rollout that has nothing to train on, with a warning.

    The run ends after a whole epoch of such prompts. If it ends without any update, it fails.
    """
    position = state.position
    position.end_rollout()
    run.used_up()  # the model has not changed, so nothing is due until the next update
    message = (
        f"no update: rollout {position.rollouts_seen} has no response to train on (the advantages "
        "of all groups are zero, or all responses are truncated)"
    )
    if position.prompts_without_update >= run.n_rows:
        message += (
            f". The last {position.prompts_without_update} prompts, a whole epoch, led to no "
            "update, so the run ends here"
        )
    if run.finished and run.global_step == 0:
        run.log(means.reduce_and_reset())  # so that the rewards are in the log
        refuse(f"{message}. The run has applied no update")
    display.write(f"WARNING: {message}")


# ============================================================ what the updates need
@torch.no_grad()
def compute_logps(
    policy: Policy, samples: Samples, names: tuple[str, ...], reference: Reference | None
) -> dict[str, torch.Tensor]:
    """Returns the model's outputs of these names, and with a reference `ref_logps`.

    Each is `[samples, longest response]`, zero where the model drew nothing, the same on every
    process. All processes must call it.
    """
    all_names = [*names, "ref_logps"] if reference else list(names)
    if not all_names:
        return {}
    temperature = policy.args.temperature
    outputs = {}  # by sample, tensors [response length, names], on the CPU
    with checks.evaluation_mode(policy.model):
        for rows, batch in samples.scoring_batches(policy):
            per_token = []
            if names:
                output = policy.model(batch, temperature)
                per_token = [output[name] for name in names]
            if reference is not None:
                per_token.append(reference.logps(batch, temperature))
            stacked = torch.stack(per_token, 2).cpu()
            for row, values, is_token in zip(rows, stacked, batch["mask"].cpu()):
                # What an environment wrote before the model's last token keeps its places.
                end = int(is_token.nonzero()[-1]) + 1
                outputs[row] = torch.where(is_token[:end, None], values[:end], 0.0)
    padded = pad_sequence(distributed.gather_rows(outputs), batch_first=True)
    return dict(zip(all_names, padded.unbind(2)))


# ============================================================ how many updates
def n_updates(args, n_prompts: int) -> int:
    """Returns the updates of so many prompts, cut into rollouts, of which the last may be short."""
    n_full, rest = divmod(n_prompts, args.rollout_batch_size)

    def in_rollout(prompts: int) -> int:
        samples = prompts * args.n_samples_per_prompt
        return args.num_epochs_per_rollout * math.ceil(samples / args.train_batch_size)

    return n_full * in_rollout(args.rollout_batch_size) + in_rollout(rest)


def describe_updates(args, run: progress.Progress, may_be_fewer: bool = False) -> str:
    """Returns the arithmetic of a run's updates, in words; with left out groups `may_be_fewer`."""
    n_prompts = run.n_rows
    prompts = args.rollout_batch_size
    samples = prompts * args.n_samples_per_prompt
    most = "at most " if may_be_fewer else ""
    return (
        f"a rollout: {counted(prompts, 'prompt')}, {counted(samples, 'sample')}, "
        f"{most}{counted(n_updates(args, prompts), 'update')}; "
        f"an epoch: {counted(math.ceil(n_prompts / prompts), 'rollout')}, "
        f"{most}{counted(n_updates(args, n_prompts), 'update')}; "
        f"{'' if args.max_steps else most}{counted(run.total_steps, 'update')} in all"
    )


def check_rollout_size(args) -> None:
    """Refuses a rollout of fewer samples than an update: `--train_batch_size` would be ignored."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if samples < args.train_batch_size and not args.preview:
        least = math.ceil(args.train_batch_size / args.n_samples_per_prompt)
        refuse(
            f"a rollout has {samples} samples, fewer than --train_batch_size "
            f"{args.train_batch_size}. Smallest valid size: --rollout_batch_size {least}"
        )
