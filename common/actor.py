"""The trained model as an ordinary Hugging Face folder, or its adapter as a folder of peft."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from common import adapters, engine, folders, record, zero
from common.best import FOLDER, Best
from common.run import Run


class Actor:
    """The trained model as an ordinary folder: at intervals, the best one, and at the end.

    Args:
        model: what `accelerator.prepare` returned; the actor is the `model` of the module in it.
        also: other Hugging Face models in that module, such as PPO's critic, by the name of the
            folder in which a checkpoint holds each.

    Attributes:
        unwrapped: the module inside the prepared one.
        best: the best evaluation so far, see `--keep_best`.
    """

    def __init__(
        self, run: Run, model: nn.Module, tokenizer, also: Mapping[str, nn.Module] | None = None
    ):
        self.run = run
        self.model = model
        self.tokenizer = tokenizer
        self.also = dict(also or {})
        self.unwrapped = engine.unwrapped(run.accelerator, model)
        self.best = Best(run.accelerator, run.args, run.progress)

    def save_if_due(self) -> None:
        """Saves the actor of this update in `actors`, as often as `--save_actor_steps` says."""
        interval = self.run.args.save_actor_steps
        if interval > 0 and self.run.due(interval):
            folder = self.run.output_dir / "actors" / f"global_step_{self.run.global_step:06d}"
            self.save(folder, keep=self.run.args.save_actor_limit)

    def keep_best(self, line: dict[str, float]) -> None:
        """Saves the actor if an evaluation is the best so far; may end the run (`--stop_after`).

        All processes must call it, after each evaluation. The one before training counts, too.
        """
        if self.run.args.keep_best and self.best.note(line):
            self.save(self.run.output_dir / FOLDER)

    def save(
        self,
        directory: Path | None = None,
        keep: int = 0,
        weights: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Saves the actor in the dtype of `--save_dtype`.

        Without it its weights are those that the forward pass used, bit for bit. Of a
        model with adapters they are those of the adapters alone. All processes must call it.

        Args:
            directory: replaced as a whole if it is there; by default the run's `actor`.
            keep: how many `global_step_*` folders stay in the parent folder, the newest; 0: all.
            weights: other weights to save instead of the model's, by their names in `unwrapped`,
                such as a running average of them.
        """
        directory = directory or self.run.output_dir / "actor"
        with self.run.timed("paused"):
            save(
                self.run.accelerator,
                self.model,
                self.unwrapped,
                self.tokenizer,
                directory,
                keep=keep,
                dtype=self.run.args.save_dtype,
                weights=weights,
            )
        if self.run.accelerator.is_main_process:
            tqdm.write(f"saved the actor: {directory}")  # above the progress bar

    def write_into(self, parent: Path) -> None:
        """Writes the actor to `parent/actor`, and the models of `also` next to it.

        They stay in the dtype in which they are trained. All processes must call it.
        """
        accelerator = self.run.accelerator
        weights = gather_weights(accelerator, self.model, self.unwrapped)
        if accelerator.is_main_process:
            for name, model in {"actor": self.unwrapped.model, **self.also}.items():
                state_dict = weights_of(model, weights, self.unwrapped)
                write(model, state_dict, self.tokenizer, parent / name, card=name == "actor")
        accelerator.wait_for_everyone()


def save(
    accelerator: Accelerator,
    prepared: nn.Module,
    unwrapped: nn.Module,
    tokenizer,
    directory: Path,
    *,
    keep: int = 0,
    dtype: str | None = None,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Writes a trained model as `Actor.save` does.

    Args:
        dtype: floating-point weights are converted to it. None: they stay as they are.
    """
    of_model = gather_weights(accelerator, prepared, unwrapped)
    if accelerator.is_main_process:
        model = unwrapped.model
        state_dict = weights_of(model, {**of_model, **(weights or {})}, unwrapped)
        if dtype is not None:
            state_dict = {name: converted(name, x, dtype) for name, x in state_dict.items()}
        write(model, state_dict, tokenizer, directory, keep=keep)
    accelerator.wait_for_everyone()


def write(
    model: nn.Module,
    state_dict: dict[str, torch.Tensor],
    tokenizer,
    directory: Path,
    *,
    keep: int = 0,
    card: bool = True,
) -> None:
    """Writes a Hugging Face folder with these weights. For the main process."""
    temporary = directory.with_name(f".{directory.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    is_adapter = adapters.has_adapter(model)
    if is_adapter:
        adapters.save(model, state_dict, temporary)
    else:
        model.save_pretrained(temporary, state_dict=state_dict)
        largest = max(state_dict.values(), key=torch.Tensor.numel)
        write_dtype(temporary, str(largest.dtype).removeprefix("torch."))
    tokenizer.save_pretrained(temporary)
    if card:
        record.write_card(temporary, "peft" if is_adapter else "transformers")
    folders.replace(temporary, directory, keep)


def converted(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Returns a tensor in another floating-point dtype; one of integers stays as it is."""
    if not tensor.is_floating_point():
        return tensor
    result = tensor.to(getattr(torch, dtype))
    if tensor.isfinite().all() and not result.isfinite().all():
        tqdm.write(f"NOTE: values of {name} are too large for {dtype}: they are saved as inf")
    return result


def write_dtype(folder: Path, dtype: str) -> None:
    """Writes into a Hugging Face folder's config which dtype its weights have."""
    file = folder / "config.json"
    config = {**folders.read_json(file), "dtype": dtype}
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def gather_weights(
    accelerator: Accelerator, prepared: nn.Module, unwrapped: nn.Module
) -> dict[str, torch.Tensor]:
    """Returns the whole weights on the main process, by their names in `unwrapped`.

    With adapters they are those of the adapters alone. What other processes get has no meaning. All
    processes must call it.
    """
    engine.reshard(prepared)
    if adapters.has_adapter(unwrapped):
        return adapters.gather(unwrapped)
    if zero.stage(accelerator) == 3 or accelerator.is_fsdp2:
        return accelerator.get_state_dict(prepared)  # each process holds a part
    # Here every process has all weights. accelerate would copy them to the host on each process,
    # under the names that DDP and torch.compile give them.
    return unwrapped.state_dict()


def weights_of(
    model: nn.Module, weights: dict[str, torch.Tensor], unwrapped: nn.Module
) -> dict[str, torch.Tensor]:
    """Returns the weights of a model inside `unwrapped` under its own names, tied ones once."""
    (prefix,) = [f"{name}." for name, module in unwrapped.named_modules() if module is model]
    state_dict = {
        name.removeprefix(prefix): value
        for name, value in weights.items()
        if name.startswith(prefix)
    }
    # Gathered weights no longer share memory, so transformers would write tied ones twice.
    all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names_once = {name for name, _ in model.named_parameters()}
    for tied in all_names - names_once:
        state_dict.pop(tied, None)
    return state_dict
