"""A rollout: samples that several updates are made of, and what these know about their tokens."""

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from common import distributed
from common.checkpoint import carried
from preference_recipes.models import checks
from preference_recipes.models.packing import Packer
from preference_recipes.models.reference import Reference
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import Samples
from preference_recipes.rollouts.schedule import Position


@carried
@dataclasses.dataclass
class Rollout:
    """Samples and what their updates need to know about them; on the CPU of every process.

    Attributes:
        is_trained: bool `[samples]`, which are trained on.
        tokens: tensors by name, `[samples, longest response]`, or `[samples, 1]` where all tokens
            of a response have the same value.
        started_at: `global_step` before the rollout's first update.
    """

    samples: Samples
    is_trained: torch.Tensor
    tokens: dict[str, torch.Tensor]
    started_at: int

    def updates_per_pass(self, args) -> int:
        """Returns the number of updates of one pass over the samples that are trained on."""
        return math.ceil(int(self.is_trained.sum()) / args.train_batch_size)

    def n_updates(self, args) -> int:
        """Returns the number of updates that are made of the rollout."""
        return args.num_epochs_per_rollout * self.updates_per_pass(args)

    def rows_of_update(self, position: Position, args) -> np.ndarray:
        """Returns which samples form the next update, in a seeded order.

        The updates of a pass differ in size by at most one sample: a small leftover would get a
        whole optimizer step of its own.
        """
        n_updates = self.updates_per_pass(args)
        pass_number, update_of_pass = divmod(position.update, n_updates)
        rows = position.order_of_groups(args, self.samples, pass_number)
        trained = rows[self.is_trained[rows].numpy()]
        return np.array_split(trained, n_updates)[update_of_pass]

    def n_tokens(self, rows: np.ndarray) -> int:
        """Returns the tokens of some samples, prompts and responses."""
        return int(self.samples.lengths[rows].sum())


@carried
@dataclasses.dataclass
class State:
    """What a run that samples carries from update to update. A checkpoint holds it."""

    position: Position
    rollout: Rollout | None = None  # whose updates are being made; None: the next one is due

    def state(self) -> "State":
        """Returns what a checkpoint holds."""
        return self

    def load_state(self, saved: "State") -> None:
        """Goes to the saved state. The position stays one object, since the counters read it."""
        vars(self.position).update(vars(saved.position))
        vars(self).update({**vars(saved), "position": self.position})

    def advance(self, args) -> None:
        """Counts an update. After the last one of its rollout, the next rollout is due."""
        self.position.update += 1
        if self.position.update == self.rollout.n_updates(args):
            self.position.end_rollout()
            self.rollout = None


@torch.no_grad()
def compute_logps(
    sampler: Sampler,
    samples: Samples,
    packer: Packer,
    names: tuple[str, ...],
    reference: Reference | None,
) -> dict[str, Any]:
    """Returns what the model and the reference say of response tokens, before an update.

    They are computed by the training model, not taken from generation, which rounds differently.
    All processes must call it.

    Args:
        names: of the model's outputs, such as `logps`; a reference adds `ref_logps`.

    Returns:
        `[samples, longest response]` by name, zero past the end of each response, the same on every
        process; nothing if nothing is asked.
    """
    if not names and reference is None:
        return {}
    temperature = sampler.args.temperature
    of_sample = {}  # tensors [response length, names], on the CPU
    with checks.evaluation_mode(sampler.model):
        for rows, batch in samples.scoring_batches(sampler, packer):
            per_token = []
            if names:
                output = sampler.model(batch, temperature)
                per_token = [output[name] for name in names]
            if reference is not None:
                per_token.append(reference.logps(batch, temperature))
            of_places = torch.stack(per_token, 2).cpu()
            for row, values, is_token in zip(rows, of_places, batch["mask"].cpu()):
                # What an environment wrote keeps its places, with values of 0. Only places after
                # the last token of the model are left out.
                end = int(is_token.nonzero()[-1]) + 1
                of_sample[row] = torch.where(is_token[:end, None], values[:end], 0.0)
    padded = pad_sequence(distributed.gather_rows(of_sample), batch_first=True)
    all_names = names if reference is None else (*names, "ref_logps")
    return dict(zip(all_names, padded.unbind(2)))
