"""The frozen policy that the KL is measured against: a model of its own, or the first policy."""

import itertools
from collections.abc import Callable, Iterable

import torch
from accelerate import Accelerator
from torch import nn

from common import batches
from preference_recipes.models import load, prepare
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer


class Reference:
    """A model of its own or, with adapters, the policy without them."""

    def __init__(self, accelerator: Accelerator, args, tokenizer, model: nn.Module, **settings):
        """Loads the reference that the arguments name. All processes must call it.

        Args:
            model: the trained one, prepared.
            settings: see `lora.WithoutAdapters`, such as PPO's `with_values=False`.
        """
        self.model: nn.Module | None  # None once its log-probs are precomputed
        self.fingerprints: dict[str, str] = {}  # for a checkpoint, if it is a model of its own
        if args.lora_r and args.ref_model_name_or_path is None:
            from preference_recipes.models import lora

            self.model = lora.WithoutAdapters(model, **settings)
            return
        name = args.ref_model_name_or_path or args.model_name_or_path
        wrapper = LogProbModel(load.causal_lm(name, tokenizer, args, frozen=True))
        self.fingerprints["reference model"] = wrapper.model.fingerprint
        self.model = prepare.frozen_model(accelerator, wrapper)

    @torch.no_grad()
    def logps(self, batch: dict, temperature: float = 1.0) -> torch.Tensor:
        """Returns the log-prob of each token of the answers, fp32 `[answers, longest]`."""
        return self.model(batch, temperature)["logps"]


def precompute(
    accelerator: Accelerator,
    args,
    reference: Reference,
    train: batches.Rows,
    held_out: Iterable[batches.Rows],
    collate: Callable[[dict, Packer], dict],
    packer: Packer,
) -> None:
    """Adds the column `ref_logps` to data sets of pairs, `[pairs, 2]`, and frees the model.

    All processes must call it. Pairs are read in the micro-batches of the first epoch, where the
    first policy then has the same log-probs bit for bit. Otherwise rounding would decide which of
    two equal rewards is larger. `collate` makes a batch of pairs, all chosen answers first.
    """
    sizes = (args.micro_train_batch_size, args.micro_train_tokens)
    order = batches.epoch_order(len(train), args.seed, epoch=0)
    starts = range(0, len(train), args.train_batch_size)
    updates = [order[start : start + args.train_batch_size] for start in starts]
    for data, parts in [(train, updates), *((data, [range(len(data))]) for data in held_out)]:
        table = torch.zeros(len(data), 2, device=accelerator.device)
        micro_batches = (batches.split(accelerator, part, data.lengths, *sizes) for part in parts)
        for indices, sample_weights in itertools.chain.from_iterable(micro_batches):
            logps = reference.logps(collate(data[indices], packer)).sum(1).view(2, -1).T
            # A padding row repeats one that another process fills in.
            is_real = sample_weights.bool()
            own_indices = torch.tensor(indices)[is_real].to(accelerator.device)
            table[own_indices] = logps[is_real.to(accelerator.device)]
        # Each row is filled in on one process and zero on the others: the sum is the whole table.
        data.added["ref_logps"] = accelerator.reduce(table, reduction="sum").cpu().numpy()
    reference.model = None
