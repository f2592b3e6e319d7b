"""The policy that another one is held near: frozen weights, or the trained model as it began."""

import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import torch
from accelerate.utils import gather_object

from common import batches, engine
from common.run import Run
from preference_recipes.models import load, lora, prepare
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer


class Reference:
    """A reference policy, and its log-probs of answers.

    With adapters, unless the arguments name another one, it is the trained model with its adapters
    off: no second copy is held.

    Attributes:
        model: reads batches as the policy does; None where all its log-probs are precomputed.
        identity: what tells its log-probs from those of another reference, and of other hardware or
            software, which rounds otherwise.
        tables: its log-probs of the answers of whole data sets, `[rows, answers of a row]`, by the
            names of the sets.
    """

    def __init__(self, run: Run, **settings):
        """Loads what the arguments name, and adds its fingerprint to the run.

        Args:
            settings: where the reference is the trained model, each of its forward passes gets
                them, such as `with_values=False` of PPO's. A model of its own needs none.
        """
        args = run.args
        name = args.ref_model_name_or_path or args.model_name_or_path
        is_trained_model = args.lora_r and args.ref_model_name_or_path is None
        if is_trained_model:
            module = run.unwrapped
            fingerprint = run.models["base model"]
            self.model = lora.WithoutAdapters(run.model, **settings)
        else:
            module = LogProbModel(load.causal_lm(name, run.tokenizer, args, frozen=True))
            fingerprint = load.fingerprint(run.accelerator, name, module.config)
            run.models["reference model"] = fingerprint
            self.model = prepare.frozen(run.accelerator, module)
        self.identity = [name, fingerprint, engine.decides_values(run.accelerator, module)]
        self.tables: dict[str, np.ndarray] = {}

    @torch.no_grad()
    def logps(self, batch: dict, temperature: float = 1.0) -> torch.Tensor:
        """Returns the log-prob of each token of the answers, fp32 `[answers, longest]`.

        Args:
            batch: of `Packer.make_batch`.
        """
        return self.model(batch, temperature)["logps"]

    def answer_logps(self, batch: dict, name: str, rows: list[int]) -> torch.Tensor:
        """Returns the log-prob of each answer, fp32 `[answers]`, from a table if there is one.

        Args:
            batch: of some rows: all their first answers, then all their second ones, and so on.
            name, rows: the name of the data set, see `precompute`, and the numbers of these rows.
        """
        if name not in self.tables:
            return self.logps(batch).sum(1)
        of_rows = self.tables[name][rows]  # [rows, answers of a row]
        in_batch_order = of_rows.T.reshape(-1)  # the first answers, then the second ones
        return batches.send(in_batch_order, batch["mask"].device)

    def precompute(
        self, run: Run, sets: dict, collate: Callable[[dict, Packer], dict], packer: Packer
    ) -> None:
        """Computes the log-probs of all answers once, or takes them from the disk; frees the model.

        All processes must call it.

        Args:
            sets: data sets by the names that `answer_logps` is given.
            collate: makes the batch of some rows, as `answer_logps` takes it, from their columns.
        """
        for name, dataset in sets.items():
            # Whether prompts are shared changes rounding.
            key = ["reference", *self.identity, packer.share, dataset._fingerprint]
            compute = partial(self.table_of, run, dataset, collate=collate, packer=packer)
            self.tables[name] = computed_once(run.accelerator, key, compute)
        self.model = None

    def table_of(
        self, run: Run, dataset, collate: Callable[[dict, Packer], dict], packer: Packer
    ) -> np.ndarray:
        """Returns the log-probs of all answers, fp32 `[rows, answers]`, on every process."""
        table = None  # made at the first batch, which shows how many answers a row has
        for rows, columns, weights in batches.evaluation_batches(run, dataset):
            answer_logps = self.logps(collate(columns, packer)).sum(1)
            # From all first answers, then all second ones, to `[rows, answers of a row]`.
            of_rows = answer_logps.view(-1, len(rows)).T
            if table is None:
                table = torch.zeros(len(dataset), of_rows.shape[1], device=run.device)
            is_real = weights > 0  # a padding row repeats a row that another process fills in
            places = torch.tensor(rows, device=run.device)
            table[places[is_real]] = of_rows[is_real]
        # One process fills in a row, and it is zero on the others: the sum is the whole table.
        return run.accelerator.reduce(table, reduction="sum").cpu().numpy()


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
