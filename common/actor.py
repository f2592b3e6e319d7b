"""The trained model as an ordinary Hugging Face folder, or its adapter as a folder of peft."""

import dataclasses
import json
import math
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from common import adapters, counted, engine, folders, record
from common.run import Run

BEST_FOLDER = "actor_best"
BEST_FILE = "best.json"


@dataclasses.dataclass
class Best:
    """The best evaluation so far, see `--keep_best`. A checkpoint holds it."""

    global_step: int | None = None  # None as long as there is none
    value: float | None = None
    since: int = 0  # evaluations that came after it


class Actor:
    """The trained model as an ordinary folder: at intervals, the best one, and at the end.

    Args:
        model: what `accelerator.prepare` returned; the actor is the `model` of the module in it.
        also: other Hugging Face models in that module, such as PPO's critic, by the name of the
            folder in which a checkpoint holds each.
    """

    def __init__(
        self, run: Run, model: nn.Module, tokenizer, also: Mapping[str, nn.Module] | None = None
    ):
        self.run = run
        self.model = model
        self.tokenizer = tokenizer
        self.also = dict(also or {})
        self.unwrapped = engine.unwrapped(run.accelerator, model)  # the module inside `model`
        self.best = Best()

    def save(
        self, directory: Path | None = None, weights: dict[str, torch.Tensor] | None = None
    ) -> None:
        """Saves the actor, or its adapters alone if it has any. All processes must call it.

        The weights are those that the forward pass used, bit for bit, or in `--save_dtype`.

        Args:
            directory: replaced as a whole if it is there; by default the run's `actor`.
            weights: other weights to save instead of the model's, by their names in `unwrapped`,
                such as a running average of them.
        """
        run = self.run
        directory = directory or run.output_dir / "actor"
        models = {directory: self.unwrapped.model}
        how = dict(dtype=run.args.save_dtype, weights=weights)
        with run.timed("paused"):
            save(run.accelerator, run.args, self.model, models, self.tokenizer, **how)
        if run.accelerator.is_main_process:
            tqdm.write(f"saved the actor: {directory}")  # above the progress bar

    def save_if_due(self) -> None:
        """Saves the actor of this update in `actors`, as often as `--save_actor_steps` says."""
        args = self.run.args
        if args.save_actor_steps > 0 and self.run.due(args.save_actor_steps):
            actors = self.run.output_dir / "actors"
            self.save(actors / f"global_step_{self.run.global_step:06d}")
            if self.run.accelerator.is_main_process:
                folders.rotate(actors, args.save_actor_limit)

    def write_into(self, parent: Path) -> None:
        """Writes the actor to `parent/actor`, and the models of `also` next to it.

        They stay in the dtype in which they are trained. All processes must call it.
        """
        run = self.run
        models = {parent / "actor": self.unwrapped.model}
        models |= {parent / name: model for name, model in self.also.items()}
        save(run.accelerator, run.args, self.model, models, self.tokenizer)

    def keep_best(self, line: dict[str, float]) -> None:
        """Saves the actor if an evaluation is the best so far; may end the run (`--stop_after`).

        All processes must call it, after each evaluation. The one before training counts, too.
        """
        run = self.run
        if not run.args.keep_best:
            return
        metric = run.args.keep_best.removesuffix(":min").removesuffix(":max")
        by_name = -1 if re.search(r"(loss|kl)$|/kl/(reverse|forward)(/|$)", metric) else 1
        sign = {":min": -1, ":max": 1}.get(run.args.keep_best[-4:], by_name)
        if metric not in line:
            sys.exit(
                f"--keep_best {run.args.keep_best}: this run's evaluations have no such metric; "
                f"they have {', '.join(line)}"
            )
        value = line[metric]
        before = -math.inf if self.best.value is None else sign * self.best.value
        self.best.since += 1
        if sign * value > before:  # NaN never is
            self.best = Best(run.global_step, value)
            # The file first: a run that is killed in between sees that they do not agree.
            if run.accelerator.is_main_process:
                values = {"metric": metric, "global_step": run.global_step, "value": value}
                folders.replace_file(run.output_dir / BEST_FILE, json.dumps(values) + "\n")
            self.save(run.output_dir / BEST_FOLDER)
        self.count_patience()

    def has_best(self) -> bool:
        """Whether the run's folder holds the actor of the best evaluation so far."""
        file = self.run.output_dir / BEST_FILE
        return file.is_file() and folders.read_json(file)["global_step"] == self.best.global_step

    def count_patience(self) -> None:
        """Ends the run if `--stop_after` evaluations in a row were no better than the best."""
        if 0 < self.run.args.stop_after <= self.best.since:
            self.run.stopped_early = True
            evaluations = counted(self.best.since, "evaluation")
            if self.run.accelerator.is_main_process:
                tqdm.write(f"stopped early: {evaluations} without a better one (--stop_after)")


def save(
    accelerator: Accelerator,
    args,
    prepared: nn.Module,
    models: dict[Path, nn.Module],
    tokenizer,
    dtype: str | None = None,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Writes models inside a prepared one, with tokenizer and card. All processes must call it.

    Args:
        models: by the folder of each, which is replaced as a whole if it is there.
        dtype: floating-point weights are converted to it. None: they stay as they are.
        weights: see `Actor.save`.
    """
    unwrapped = engine.unwrapped(accelerator, prepared)
    gathered = gather_weights(accelerator, prepared, unwrapped)
    if accelerator.is_main_process:
        for folder, model in models.items():
            state_dict = weights_of(model, {**gathered, **(weights or {})}, unwrapped)
            state_dict = {name: converted(value, dtype) for name, value in state_dict.items()}
            temporary = folder.with_name(f".{folder.name}.writing")
            shutil.rmtree(temporary, ignore_errors=True)
            if adapters.has_adapter(model):
                adapters.save(model, state_dict, temporary)
            else:
                model.save_pretrained(temporary, state_dict=state_dict)
                largest = max(state_dict.values(), key=torch.Tensor.numel)
                write_config(temporary, str(largest.dtype).removeprefix("torch."))
            tokenizer.save_pretrained(temporary)
            record.write_card(temporary, args)
            folders.replace(temporary, folder)
    accelerator.wait_for_everyone()


def write_config(folder: Path, dtype: str) -> None:
    """Writes into a Hugging Face folder's config which dtype its weights have, and the rotary base
    and scaling as transformers 4 named them: mlx-lm 0.32 and others know no `rope_parameters`.
    """
    file = folder / "config.json"
    config = {**folders.read_json(file), "dtype": dtype}
    for part in (config, config.get("text_config", {})):
        rope = part.get("rope_parameters") or {}
        full = rope.get("full_attention", rope)
        former = {
            "rope_theta": full.get("rope_theta"),
            "rope_local_base_freq": rope.get("sliding_attention", {}).get("rope_theta"),
            "partial_rotary_factor": full.get("partial_rotary_factor"),
            "rope_scaling": None if full.get("rope_type") == "default" else full,
        }
        part.update({name: value for name, value in former.items() if value and name not in part})
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def converted(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """Returns a tensor in another floating-point dtype; one of integers stays as it is."""
    if dtype is None or not tensor.is_floating_point():
        return tensor
    result = tensor.to(getattr(torch, dtype))
    if tensor.isfinite().all() and not result.isfinite().all():
        tqdm.write(f"WARNING: weights are too large for {dtype}: they are saved as inf")
    return result


def gather_weights(
    accelerator: Accelerator, prepared: nn.Module, unwrapped: nn.Module
) -> dict[str, torch.Tensor]:
    """Returns the whole weights on the main process, by their names in `unwrapped`.

    With adapters they are those of the adapters alone. What other processes get has no meaning. All
    processes must call it.
    """
    engine.reshard(prepared)
    if adapters.has_adapter(unwrapped):
        from common import zero

        trained = adapters.trained_parameters(unwrapped)
        return {name: zero.whole(p).to("cpu", copy=True) for name, p in trained.items()}
    if engine.zero_stage(accelerator) == 3 or accelerator.is_fsdp2:
        return accelerator.get_state_dict(prepared)  # each process holds a part
    # Here every process has all weights. accelerate would copy them to the host on each process,
    # under the names that DDP and torch.compile give them.
    return unwrapped.state_dict()


def weights_of(
    model: nn.Module, weights: dict[str, torch.Tensor], unwrapped: nn.Module
) -> dict[str, torch.Tensor]:
    """Returns the weights of a model inside `unwrapped` under its own names, tied ones once."""
    (prefix,) = [f"{name}." for name, module in unwrapped.named_modules() if module is model]
    # Gathered weights no longer share memory, so transformers would write tied ones twice.
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied -= {name for name, _ in model.named_parameters()}
    own = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
    return {name: value for name, value in own.items() if name not in tied}
