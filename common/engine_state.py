"""What a checkpoint holds of the engine: weights, optimizer, loss scale and random states."""

import random
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.constants import RNG_STATE_NAME
from torch import nn

from common import adapters, engine


def choose(accelerator: Accelerator, model: nn.Module, unwrapped: nn.Module) -> None:
    """Makes accelerate save and load the trained model alone, and no frozen one.

    Of a model with adapters these are the adapters alone; but DeepSpeed needs its whole engine.
    """
    engine.reshard(model)
    needs_all = accelerator.distributed_type == DistributedType.DEEPSPEED
    takes_part = adapters.has_adapter(unwrapped) and not needs_all
    accelerator._models = [adapters.trained_part(unwrapped) if takes_part else model]


def save(accelerator: Accelerator, model: nn.Module, unwrapped: nn.Module, folder: Path) -> None:
    """Writes the engine's state to a folder, which it makes. All processes must call it."""
    choose(accelerator, model, unwrapped)
    settings = {}
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        settings["exclude_frozen_parameters"] = adapters.has_adapter(unwrapped)
    accelerator.save_state(str(folder), **settings)


def load(accelerator: Accelerator, unwrapped: nn.Module, folder: Path) -> None:
    """Loads what `save` wrote."""
    settings: dict[str, Any] = {}
    if not engine.is_sharded(accelerator):
        # Adam keeps its step counts on the CPU, unless it is fused. accelerate would load them onto
        # the GPU, and each update would wait to read them back, one for each parameter.
        settings["map_location"] = "cpu"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # The base below adapters is not in the checkpoint, see `load.base_fingerprints`.
        settings["load_module_strict"] = not adapters.has_adapter(unwrapped)
    accelerator.load_state(str(folder), **settings)


def load_random_states(accelerator: Accelerator, folder: Path) -> None:
    """Sets the random states of this process once more: accelerate ignores any error there."""
    states = accelerate.utils.load(folder / f"{RNG_STATE_NAME}_{accelerator.process_index}.pkl")
    random.setstate(states["random_state"])
    np.random.set_state(states["numpy_random_seed"])
    torch.set_rng_state(states["torch_manual_seed"])
    if accelerator.device.type == "cuda":
        current = torch.cuda.current_device()
        torch.cuda.set_rng_state(states["torch_cuda_manual_seed"][current])
