"""A reference's log-probs, computed once before training: then no reference is in memory."""

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator

from common import batches
from preference_recipes.models.packing import Packer
from preference_recipes.models.reference import Reference


def precompute(
    accelerator: Accelerator,
    args,
    reference: Reference,
    sets: Sequence[batches.Rows],
    collate: Callable[[dict, Packer], dict],
    packer: Packer,
) -> None:
    """Adds the column `ref_logps` to data sets, `[rows, answers of a row]`; frees the model.

    All processes must call it.

    Args:
        collate: makes the batch of some rows from their columns: all their first answers, then all
            their second ones, and so on.
    """
    sizes = (args.micro_train_batch_size, args.micro_train_tokens)
    for data in sets:
        table = None  # made at the first batch, which shows how many answers a row has
        for rows, weights in batches.split(accelerator, range(len(data)), data.lengths, *sizes):
            # From all first answers, then all second ones, to `[rows, answers of a row]`.
            logps = reference.logps(collate(data[rows], packer)).sum(1).view(-1, len(rows)).T
            if table is None:
                table = torch.zeros(len(data), logps.shape[1], device=accelerator.device)
            is_real = weights > 0  # a padding row repeats a row that another process fills in
            places = torch.tensor(rows)[is_real].to(accelerator.device)
            table[places] = logps[is_real.to(accelerator.device)]
        # One process fills in a row, and it is zero on the others: the sum is the whole table.
        data.added["ref_logps"] = accelerator.reduce(table, reduction="sum").cpu().numpy()
    reference.model = None
