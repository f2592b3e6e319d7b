"""The policy that another one is held near: frozen weights, or the trained model as it began."""

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from torch import nn

from common import batches
from preference_recipes.models import load, prepare
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer


class Reference:
    """A reference policy; with adapters, unless another is named, the trained model without them.

    Attributes:
        model: reads batches as the policy does; None where all its log-probs are precomputed.
        fingerprints: of a model of its own, for the identity of a checkpoint.
    """

    def __init__(self, accelerator: Accelerator, args, tokenizer, model: nn.Module, **settings):
        """Loads what the arguments name. All processes must call it.

        Args:
            model: the trained one, prepared.
            settings: what each of its forward passes gets where it is the reference, such as
                `with_values=False` of PPO's.
        """
        self.accelerator = accelerator
        self.args = args
        self.fingerprints: dict[str, str] = {}
        self.model: nn.Module | None
        if args.lora_r and args.ref_model_name_or_path is None:
            from preference_recipes.models import lora

            self.model = lora.WithoutAdapters(model, **settings)
            return
        name = args.ref_model_name_or_path or args.model_name_or_path
        wrapper = LogProbModel(load.causal_lm(name, tokenizer, args, frozen=True))
        fingerprint = load.fingerprint(accelerator, name, wrapper.config)
        self.fingerprints["reference model"] = fingerprint
        self.model = prepare.frozen(accelerator, wrapper)

    @torch.no_grad()
    def logps(self, batch: dict, temperature: float = 1.0) -> torch.Tensor:
        """Returns the log-prob of each token of the answers, fp32 `[answers, longest]`."""
        return self.model(batch, temperature)["logps"]

    def precompute(
        self,
        sets: Sequence[batches.Rows],
        collate: Callable[[dict, Packer], dict],
        packer: Packer,
    ) -> None:
        """Adds the column `ref_logps` to data sets, `[rows, answers of a row]`; frees the model.

        All processes must call it.

        Args:
            collate: makes the batch of some rows from their columns: all their first answers, then
                all their second ones, and so on.
        """
        accelerator = self.accelerator
        sizes = (self.args.micro_train_batch_size, self.args.micro_train_tokens)
        for data in sets:
            table = None  # made at the first batch, which shows how many answers a row has
            numbers = range(len(data))
            for rows, weights in batches.split(accelerator, numbers, data.lengths, *sizes):
                # From all first answers, then all second ones, to `[rows, answers of a row]`.
                of_rows = self.logps(collate(data[rows], packer)).sum(1).view(-1, len(rows)).T
                if table is None:
                    table = torch.zeros(len(data), of_rows.shape[1], device=accelerator.device)
                is_real = weights > 0  # a padding row repeats a row that another process fills in
                places = torch.tensor(rows)[is_real].to(accelerator.device)
                table[places] = of_rows[is_real.to(accelerator.device)]
            # One process fills in a row, and it is zero on the others: the sum is the whole table.
            data.added["ref_logps"] = accelerator.reduce(table, reduction="sum").cpu().numpy()
        self.model = None
