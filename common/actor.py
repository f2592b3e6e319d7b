"""Saves the actor as an ordinary Hugging Face folder, or its adapter as a folder of peft."""

import collections
import json
import shutil
import sys
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from common import best, engine, errors, folders, record, zero
from common.run import Run
from preference_recipes.models import lora


def publish_step(run: Run) -> None:
    """Saves the actor of this update, for its users; see `publish`."""
    folder = run.output_dir / "actors" / f"global_step_{run.progress.global_step:06d}"
    publish(run, folder, keep=run.args.save_actor_limit)


def keep_best(run: Run, line: dict[str, float]) -> None:
    """Saves the actor in `actor_best` if this evaluation is the best so far; see `--keep_best`.

    All processes must call it, after each evaluation. The one before training counts, too.

    Args:
        line: the evaluation's values, the same on all processes.

    Raises:
        SystemExit: the evaluation has no such metric.
    """
    if run.args.keep_best and best.note(run, line):
        publish(run, run.output_dir / best.FOLDER)


def publish(
    run: Run,
    directory: Path | None = None,
    keep: int = 0,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Saves the actor for its users in the dtype of `--save_dtype`, and prints in which one.

    The weights are those of `run.unwrapped.model`; if that has an adapter, those of the adapter
    alone, as an ordinary folder of peft. Without `--save_dtype` they are those that the forward
    pass used, bit for bit. All processes must call it.

    Args:
        directory: replaced as a whole if it is there; by default the run's `actor`. If the process
            is killed while it writes, the previous folder stays (at worst under its name with
            `.old`).
        keep: how many `global_step_*` folders stay in the parent folder, the newest; 0 keeps all.
        weights: other weights to save instead of the model's, by their names in `run.unwrapped`,
            such as a running average of them, see `shards.whole`.

    Raises:
        SystemExit: it could not be written, for example because the disk is full. What was written
            of it is removed; what was in its place is untouched.
    """
    directory = directory or run.output_dir / "actor"
    dtype = run.args.save_dtype
    try:
        with run.metrics.timed("paused"):
            written = save(run, directory, keep=keep, dtype=dtype, weights=weights)
    except Exception as error:
        if not errors.is_of_disk(error):
            raise
        shutil.rmtree(being_written(directory), ignore_errors=True)
        sys.exit(
            f"{directory} could not be written: {str(error)[:200]}. A checkpoint, if the run wrote "
            "one, holds the actor, too: see python -m preference_recipes.tools.export"
        )
    if run.accelerator.is_main_process:
        what = "the actor's adapter" if lora.has_adapter(run.unwrapped) else "the actor"
        how = "as trained" if dtype is None else "by --save_dtype"
        # Above the progress bar, if there is one.
        tqdm.write(f"saved {what} in {written} ({how}): {directory}")


def save(
    run: Run,
    directory: Path,
    *,
    keep: int = 0,
    dtype: str | None = None,
    weights: dict[str, torch.Tensor] | None = None,
) -> str | None:
    """Writes the actor as `publish` does, and returns its dtype on the main process.

    Args:
        dtype: floating-point weights are converted to it. None: they stay as they are.
    """
    of_run = gather_weights(run)
    written = None
    if run.accelerator.is_main_process:
        model = run.unwrapped.model
        state_dict = weights_of(model, {**of_run, **(weights or {})}, run.unwrapped)
        if dtype is not None:
            state_dict = {name: converted(name, x, dtype) for name, x in state_dict.items()}
        write(model, state_dict, run.tokenizer, directory, keep=keep, card=True)
        written = dtype_of(state_dict)
    run.accelerator.wait_for_everyone()
    return written


def save_all(run: Run, parent: Path) -> None:
    """Writes the actor to `parent/actor` and the models of `run.saved_with_actor` next to it.

    They stay in the dtype in which they are trained. All processes must call it.
    """
    weights = gather_weights(run)
    if run.accelerator.is_main_process:
        for name, model in {"actor": run.unwrapped.model, **run.saved_with_actor}.items():
            state_dict = weights_of(model, weights, run.unwrapped)
            write(model, state_dict, run.tokenizer, parent / name, card=name == "actor")
    run.accelerator.wait_for_everyone()


def write(
    model: nn.Module,
    state_dict: dict[str, torch.Tensor],
    tokenizer,
    directory: Path,
    *,
    keep: int = 0,
    card: bool = False,
) -> None:
    """Writes a Hugging Face folder with these weights. For the main process.

    Args:
        card: write a model card, too, see `record.write_card`.
    """
    temporary = being_written(directory)
    shutil.rmtree(temporary, ignore_errors=True)
    is_adapter = lora.has_adapter(model)
    if is_adapter:
        lora.save(model, state_dict, temporary)
    else:
        model.save_pretrained(temporary, state_dict=state_dict)
        write_dtype(temporary, dtype_of(state_dict))
    tokenizer.save_pretrained(temporary)
    if card:
        record.write_card(temporary, "peft" if is_adapter else "transformers")
    folders.replace(temporary, directory, keep)


def being_written(directory: Path) -> Path:
    """Returns the folder that is written before it takes the place of `directory`."""
    return directory.with_name(f".{directory.name}.writing")


def size_of(unwrapped: nn.Module, dtype: str | None) -> int:
    """Returns how many bytes the saved weights of an actor take; of an adapter its own.

    Args:
        dtype: the one that they are saved in; None: that of the model.
    """
    trained = next(p for p in unwrapped.model.parameters() if p.requires_grad)
    saved_dtype = getattr(torch, dtype) if dtype else trained.dtype
    return lora.count_saved_parameters(unwrapped.model) * saved_dtype.itemsize


def converted(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Returns a tensor in another floating-point dtype; one of integers stays as it is."""
    if not tensor.is_floating_point():
        return tensor
    result = tensor.to(getattr(torch, dtype))
    if tensor.isfinite().all() and not result.isfinite().all():
        tqdm.write(f"NOTE: values of {name} are too large for {dtype}: they are saved as inf")
    return result


def dtype_of(state_dict: dict[str, torch.Tensor]) -> str:
    """Returns the dtype of most of the floating-point weights, such as `bfloat16`."""
    sizes = collections.Counter()
    for tensor in state_dict.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] += tensor.numel()
    (dtype, _), *_ = sizes.most_common(1)
    return str(dtype).removeprefix("torch.")


def write_dtype(folder: Path, dtype: str) -> None:
    """Writes into a Hugging Face folder's config which dtype its weights have."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.get("dtype") != dtype:
        config["dtype"] = dtype
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def gather_weights(run: Run) -> dict[str, torch.Tensor] | None:
    """Returns the whole weights on the main process, by their names in `run.unwrapped`.

    With adapters they are those of the adapters alone. What other processes get has no meaning. All
    processes must call it.
    """
    engine.reshard(run.model)
    if lora.has_adapter(run.unwrapped):
        return lora.gather_adapters(run.unwrapped)
    if zero.stage(run.accelerator) == 3 or run.accelerator.is_fsdp2:
        return run.accelerator.get_state_dict(run.model)  # each process holds a part
    # Here every process has all weights. accelerate would copy them to the host on each process,
    # under the names that DDP and torch.compile give them.
    return run.unwrapped.state_dict()


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
