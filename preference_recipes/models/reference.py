"""The policy that another one is held near: frozen weights, or the trained model as it began."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from common import batches, engine
from preference_recipes.models import load, lora, prepare
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer


class Reference:
    """A reference policy, and its log-probs of answers.

    With adapters, unless the arguments name another one, it is the trained model with its adapters
    off: no second copy is held.

    Attributes:
        model: reads batches as the policy does; None where all its log-probs are precomputed.
        fingerprints: of a model of its own, for the identity of a checkpoint.
    """

    def __init__(self, accelerator: Accelerator, args, tokenizer, model: nn.Module, **settings):
        """Loads what the arguments name. All processes must call it.

        Args:
            args: `SharedArgs` with `ref_model_name_or_path`.
            model: the trained one, prepared.
            settings: where the reference is the trained model, each of its forward passes gets
                them, such as `with_values=False` of PPO's. A model of its own needs none.
        """
        self.accelerator = accelerator
        self.args = args
        self.name = args.ref_model_name_or_path or args.model_name_or_path
        self.fingerprints: dict[str, str] = {}
        self.model: nn.Module | None
        if args.lora_r and args.ref_model_name_or_path is None:
            self.module = engine.unwrapped(accelerator, model)
            self.model = lora.WithoutAdapters(model, **settings)
        else:
            self.module = LogProbModel(load.causal_lm(self.name, tokenizer, args, frozen=True))
            fingerprint = load.fingerprint(accelerator, self.name, self.module.config)
            self.fingerprints["reference model"] = fingerprint
            self.model = prepare.frozen(accelerator, self.module)

    @torch.no_grad()
    def logps(self, batch: dict, temperature: float = 1.0) -> torch.Tensor:
        """Returns the log-prob of each token of the answers, fp32 `[answers, longest]`.

        Args:
            batch: of `Packer.make_batch`.
        """
        return self.model(batch, temperature)["logps"]

    def precompute(
        self,
        sets: Sequence[batches.Rows],
        collate: Callable[[dict, Packer], dict],
        packer: Packer,
    ) -> None:
        """Adds the column `ref_logps` to data sets, `[rows, answers of a row]`; frees the model.

        It is computed once, or taken from the disk. All processes must call it.

        Args:
            collate: makes the batch of some rows from their columns: all their first answers, then
                all their second ones, and so on.
        """
        fingerprint = self.fingerprints.get("reference model")
        if fingerprint is None:  # it is the trained model without its adapters
            fingerprint = load.fingerprint(self.accelerator, self.name, self.module.config)
        # Other hardware and software rounds otherwise.
        identity = [self.name, fingerprint, engine.decides_values(self.accelerator, self.module)]
        for rows in sets:
            # Whether prompts are shared changes rounding.
            key = ["reference", *identity, packer.share, rows.dataset._fingerprint]
            compute = partial(self.table_of, rows, collate=collate, packer=packer)
            rows.added["ref_logps"] = computed_once(self.accelerator, key, compute)
        self.model = self.module = None

    def table_of(
        self, rows: batches.Rows, collate: Callable[[dict, Packer], dict], packer: Packer
    ) -> np.ndarray:
        """Returns the log-probs of all answers, fp32 `[rows, answers]`, on every process."""
        accelerator = self.accelerator
        table = None  # made at the first batch, which shows how many answers a row has
        numbers = range(len(rows))
        for some, weights in batches.split_update(accelerator, self.args, numbers, rows.lengths):
            # From all first answers, then all second ones, to `[rows, answers of a row]`.
            of_rows = self.logps(collate(rows[some], packer)).sum(1).view(-1, len(some)).T
            if table is None:
                table = torch.zeros(len(rows), of_rows.shape[1], device=accelerator.device)
            is_real = weights > 0  # a padding row repeats a row that another process fills in
            places = torch.tensor(some)[is_real].to(accelerator.device)
            table[places] = of_rows[is_real.to(accelerator.device)]
        # One process fills in a row, and it is zero on the others: the sum is the whole table.
        return accelerator.reduce(table, reduction="sum").cpu().numpy()


def computed_once(accelerator, key: list, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Returns `compute()`, or what an earlier run with the same key computed.

    All processes must call it, and all get the same array.

    Args:
        key: everything the array depends on, as JSON values.
        compute: collective; returns the whole array on every process.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:32]
    root = Path(datasets.config.HF_DATASETS_CACHE).expanduser()
    path = root / "computed" / f"{digest}.npy"
    # Processes may see different disks. `compute` is collective, so all read or all compute.
    if all(gather_object([path.is_file()])):
        accelerator.print(f"taken from the cache: {path}")
        return np.load(path)

    result = compute()
    if accelerator.is_local_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when it is whole, so that no reader meets half a file.
        temporary = path.with_name(f".{path.stem}.{os.getpid()}.npy")
        np.save(temporary, result)
        os.replace(temporary, path)
    accelerator.wait_for_everyone()
    return result
