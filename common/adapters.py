"""Adapters in checkpoints and saved actors: which weights they are, and peft's folder of them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

# The one adapter of a model, by the name that peft gives to a first one.
ADAPTER = "default"
# What peft's own file has no place for: mean and standard deviation of a reward model's scores.
MOMENTS_FILE = "reward_moments.json"
# Nor for the fingerprint of its base, see `preference_recipes.models.load`.
BASE_FILE = "base_model.json"


def has_adapter(module: nn.Module) -> bool:
    """Whether a model, or a module with models inside, has adapters."""
    return any(getattr(part, "_hf_peft_config_loaded", False) for part in module.modules())


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are trained, by name: of a model with adapters, those alone."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def save(model: PreTrainedModel, state_dict: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes a model's adapter, by its weights' names, as an ordinary folder of peft.

    `save_pretrained` would not take these weights of a model of 4 bits, but read the model's own.
    """
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
    base = {"fingerprint": model.base_fingerprint}
    (folder / BASE_FILE).write_text(json.dumps(base) + "\n", encoding="utf-8")
    if hasattr(model.config, "reward_mean"):
        moments = {name: getattr(model.config, name) for name in ("reward_mean", "reward_std")}
        (folder / MOMENTS_FILE).write_text(json.dumps(moments) + "\n", encoding="utf-8")
