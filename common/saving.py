"""Saving the actor as an ordinary Hugging Face folder: collective, whole or not there, right under every ZeRO stage."""

import os
import shutil
from pathlib import Path

from .models import reshard


def save_actor(accelerator, prepared, unwrapped, tokenizer, directory: str | Path) -> None:
    """Writes `unwrapped.model` with the weights the forward pass used, bit for bit. All ranks must call it.

    Args:
        prepared: what `accelerator.prepare` returned for the `LogProbModel`.
        unwrapped: the `LogProbModel` itself.
        directory: replaced whole if it is there; killed while writing, the previous one stays (at worst under its name with `.old`).
    """
    reshard(prepared)
    weights = accelerator.get_state_dict(prepared)  # every rank: under ZeRO-3 and FSDP2 it gathers
    if accelerator.is_main_process:
        prefix, directory = "model.", Path(directory)
        weights = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        names = [name for name, _ in unwrapped.model.named_parameters(remove_duplicate=False)]
        for tied in set(names) - {name for name, _ in unwrapped.model.named_parameters()}:
            weights.pop(tied, None)  # gathered weights no longer share memory: tied ones would be written twice
        temporary = directory.with_name(f".{directory.name}.writing")
        shutil.rmtree(temporary, ignore_errors=True)
        unwrapped.model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        replace_directory(temporary, directory)
    accelerator.wait_for_everyone()


def save_step_actor(accelerator, prepared, unwrapped, tokenizer, args, global_step: int) -> None:
    """`save_actor` into `<output_dir>/actors/global_step_...`, of which `--save_actor_limit` are kept. All ranks must call it."""
    folder = Path(args.output_dir) / "actors"
    save_actor(accelerator, prepared, unwrapped, tokenizer, folder / f"global_step_{global_step:06d}")
    if accelerator.is_main_process:
        rotate(folder, args.save_actor_limit)


def replace_directory(temporary: Path, directory: Path) -> None:
    """Flushes a written directory to disk and puts it in place of another."""
    flush(temporary)
    old = directory.with_name(f".{directory.name}.old")
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    temporary.rename(directory)
    flush_entry(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def flush(directory: Path) -> None:
    """fsync of every file and folder below a directory, and of itself."""
    for path in [*directory.rglob("*"), directory]:
        flush_entry(path)


def flush_entry(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def rotate(folder: Path, keep: int) -> None:
    """Deletes all but the newest `keep` of the `global_step_*` folders; 0 keeps all."""
    for path in by_step(folder)[:-keep] if keep else []:
        shutil.rmtree(path)


def by_step(folder: Path) -> list[Path]:
    """The `global_step_*` folders, the newest last."""
    return sorted(folder.glob("global_step_*"), key=lambda path: (len(path.name), path.name))
