"""Saves the actor as an ordinary Hugging Face folder."""

import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from common import engine, folders, zero


def save(
    accelerator: Accelerator,
    prepared: nn.Module,
    unwrapped: nn.Module,
    tokenizer,
    directory: str | Path,
    keep: int = 0,
) -> None:
    """Writes `unwrapped.model` with the weights that the forward pass used, bit for bit.

    All processes must call it.

    Args:
        prepared: what `accelerator.prepare` returned for `unwrapped`.
        unwrapped: the module that holds the Hugging Face model as its attribute `model`.
        directory: replaced as a whole if it is there. If the process is killed while it writes, the
            previous folder stays (at worst under its name with `.old`).
        keep: how many `global_step_*` folders stay beside each other, the newest; 0 keeps all.
    """
    engine.reshard(prepared)
    weights = gather_weights(accelerator, prepared, unwrapped)
    if accelerator.is_main_process:
        directory = Path(directory)
        temporary = directory.with_name(f".{directory.name}.writing")
        shutil.rmtree(temporary, ignore_errors=True)
        state_dict = weights_of_actor(weights, unwrapped)
        unwrapped.model.save_pretrained(temporary, state_dict=state_dict)
        tokenizer.save_pretrained(temporary)
        folders.replace(temporary, directory, keep)
    accelerator.wait_for_everyone()


def gather_weights(
    accelerator: Accelerator, prepared: nn.Module, unwrapped: nn.Module
) -> dict[str, torch.Tensor]:
    """Returns the whole weights on the main process, by their names in `unwrapped`.

    All processes must call it.
    """
    if zero.stage(accelerator) == 3 or accelerator.is_fsdp2:
        return accelerator.get_state_dict(prepared)  # each process holds a part
    # Here every process has all weights. accelerate would copy them to the host on each process,
    # under the names that DDP and torch.compile give them.
    return unwrapped.state_dict()


def weights_of_actor(
    weights: dict[str, torch.Tensor], unwrapped: nn.Module
) -> dict[str, torch.Tensor]:
    """Returns the weights of `unwrapped.model` under the names it has by itself, tied ones once."""
    state_dict = {
        name.removeprefix("model."): value
        for name, value in weights.items()
        if name.startswith("model.")
    }
    # Gathered weights no longer share memory, so transformers would write tied ones twice.
    all_names = {name for name, _ in unwrapped.model.named_parameters(remove_duplicate=False)}
    names_once = {name for name, _ in unwrapped.model.named_parameters()}
    for tied in all_names - names_once:
        state_dict.pop(tied, None)
    return state_dict
