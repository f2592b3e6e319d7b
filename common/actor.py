"""The actor as a Hugging Face folder."""

import shutil
from pathlib import Path

from common import engine, folders, zero


def save(accelerator, prepared, unwrapped, tokenizer, directory: str | Path, keep: int = 0) -> None:
    """Writes `unwrapped.model` with the weights the forward pass used, bit for bit. All ranks must call it.

    Args:
        prepared: what `accelerator.prepare` returned for the `LogProbModel`.
        unwrapped: the `LogProbModel` itself.
        directory: replaced whole if it is there; killed while writing, the previous one stays (at worst under its name with `.old`).
        keep: how many `global_step_...` folders stay beside each other, the newest; 0 is all.
    """
    engine.reshard(prepared)
    # On every rank, as ZeRO-3 and FSDP2 gather them; elsewhere every process would copy all to the host, and the names would be those
    # that DDP and torch.compile make of them.
    weights = (
        accelerator.get_state_dict(prepared)
        if zero.stage(accelerator) == 3 or accelerator.is_fsdp2
        else unwrapped.state_dict()
    )
    if accelerator.is_main_process:
        weights = {
            name.removeprefix("model."): value
            for name, value in weights.items()
            if name.startswith("model.")
        }
        for tied in (
            dict(unwrapped.model.named_parameters(remove_duplicate=False)).keys()
            - dict(unwrapped.model.named_parameters()).keys()
        ):
            weights.pop(
                tied, None
            )  # gathered weights no longer share memory: tied ones would be written twice
        temporary = (directory := Path(directory)).with_name(f".{directory.name}.writing")
        shutil.rmtree(temporary, ignore_errors=True)
        unwrapped.model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        folders.replace(temporary, directory, keep)
    accelerator.wait_for_everyone()
