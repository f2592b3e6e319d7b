"""Saves models as ordinary Hugging Face folders, however the engine has sharded them."""

import json
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from common import display, engine, folders, record

# peft's name for a model's first adapter; here it is the only one.
ADAPTER = "default"
# Files added to peft's folder: a reward model's moments, and the base's fingerprint.
MOMENTS_FILE = "reward_moments.json"
BASE_FILE = "base_model.json"


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
        models: by folder; an existing folder is replaced as a whole.
        dtype: the dtype of saved floating-point weights. None: they stay as they are.
        weights: see `ActorSaver.save`.
    """
    unwrapped = engine.unwrapped(accelerator, prepared)
    gathered = gather_weights(accelerator, prepared, unwrapped)
    if accelerator.is_main_process:
        for folder, model in models.items():
            state_dict = weights_of(model, {**gathered, **(weights or {})}, unwrapped)
            state_dict = {name: converted(value, dtype) for name, value in state_dict.items()}
            temporary = folder.with_name(f".{folder.name}.writing")
            shutil.rmtree(temporary, ignore_errors=True)
            with folders.writing(temporary):
                if engine.has_adapter(model):
                    save_adapter(model, state_dict, temporary)
                else:
                    model.save_pretrained(temporary, state_dict=state_dict)
                    largest = max(state_dict.values(), key=torch.Tensor.numel)
                    write_config(temporary, str(largest.dtype).removeprefix("torch."))
                (getattr(tokenizer, "processor", None) or tokenizer).save_pretrained(temporary)
                record.write_card(temporary, args)
                folders.replace(temporary, folder)
    accelerator.wait_for_everyone()


def save_adapter(model: PreTrainedModel, state_dict: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes a model's adapter as peft does. `save_pretrained` takes no weights at 4 bits."""
    import peft

    weights = peft.get_peft_model_state_dict(
        model, state_dict=state_dict, adapter_name=ADAPTER, save_embedding_layers=False
    )
    weights = {f"base_model.model.{name}": value.contiguous() for name, value in weights.items()}
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config[ADAPTER].save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    base = {"fingerprint": model.fingerprint}
    (folder / BASE_FILE).write_text(json.dumps(base) + "\n", encoding="utf-8")
    if hasattr(model.config, "reward_mean"):
        moments = {name: getattr(model.config, name) for name in ("reward_mean", "reward_std")}
        (folder / MOMENTS_FILE).write_text(json.dumps(moments) + "\n", encoding="utf-8")


def write_config(folder: Path, dtype: str) -> None:
    """Writes into a Hugging Face folder's config the dtype of its weights, and the rotary base and
    scaling under transformers 4's names, because mlx-lm 0.32 and others ignore `rope_parameters`.
    """
    file = folder / "config.json"
    config = {**folders.read_json(file), "dtype": dtype}
    for part in (config, config.get("text_config", {})):
        rope = part.get("rope_parameters") or {}
        full = rope.get("full_attention", rope)
        legacy = {
            "rope_theta": full.get("rope_theta"),
            "rope_local_base_freq": rope.get("sliding_attention", {}).get("rope_theta"),
            "partial_rotary_factor": full.get("partial_rotary_factor"),
            "rope_scaling": None if full.get("rope_type") == "default" else full,
        }
        part.update({name: value for name, value in legacy.items() if value and name not in part})
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def converted(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """Returns a tensor in another floating-point dtype; tensors of integers stay as they are."""
    if dtype is None or not tensor.is_floating_point():
        return tensor
    result = tensor.to(getattr(torch, dtype))
    if tensor.isfinite().all() and not result.isfinite().all():
        display.write(f"WARNING: weights are too large for {dtype}: they are saved as inf")
    return result


def gather_weights(
    accelerator: Accelerator, prepared: nn.Module, unwrapped: nn.Module
) -> dict[str, torch.Tensor]:
    """Returns the whole weights by their names in `unwrapped`; only adapters if there are any.

    Only the main process gets all of them. All processes must call it.
    """
    engine.reshard(prepared)
    if engine.has_adapter(unwrapped):
        from common import zero

        trained = engine.trained_parameters(unwrapped)
        return {name: zero.whole(p).to("cpu", copy=True) for name, p in trained.items()}
    if engine.zero_stage(accelerator) == 3 or accelerator.is_fsdp2:
        return accelerator.get_state_dict(prepared)  # each process holds shards
    # accelerate would copy them to the host, with the names from DDP and torch.compile.
    return unwrapped.state_dict()


def weights_of(
    model: nn.Module, weights: dict[str, torch.Tensor], unwrapped: nn.Module
) -> dict[str, torch.Tensor]:
    """Returns the weights of a model inside `unwrapped` under its own names, tied ones once."""
    (prefix,) = [f"{name}." for name, module in unwrapped.named_modules() if module is model]
    # Gathered weights no longer share memory, so transformers would write tied weights twice.
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied -= {name for name, _ in model.named_parameters()}
    own = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
    return {name: value for name, value in own.items() if name not in tied}
