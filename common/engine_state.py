"""What a checkpoint holds of the engine: weights, optimizer, loss scale and random states."""

import random
import sys
from pathlib import Path

import accelerate
import numpy as np
import torch
from accelerate.utils import DistributedType
from accelerate.utils.constants import RNG_STATE_NAME

from common import engine
from common.run import Run
from preference_recipes.models import lora


def choose(run: Run) -> None:
    """Makes accelerate save and load the trained model alone, and no frozen one.

    Of a model with adapters these are the adapters alone; but DeepSpeed needs its whole engine.
    Names are without DDP's `module.`, so that another number of processes can load them.
    """
    engine.reshard(run.model)
    if run.accelerator.distributed_type == DistributedType.DEEPSPEED:
        saved = run.model
    elif lora.has_adapter(run.unwrapped):
        saved = lora.trained_part(run.unwrapped)
    elif engine.is_sharded(run.accelerator):
        saved = run.model
    else:
        saved = run.unwrapped
    run.accelerator._models = [saved]


def save(run: Run, folder: Path) -> None:
    """Writes the engine's state to a folder, which it makes. All processes must call it."""
    choose(run)
    settings = {}
    if run.accelerator.distributed_type == DistributedType.DEEPSPEED:
        settings["exclude_frozen_parameters"] = lora.has_adapter(run.unwrapped)
    run.accelerator.save_state(str(folder), **settings)


def load(run: Run, folder: Path) -> None:
    """Loads what `save` wrote. The settings of the optimizer's groups stay those of this run."""
    groups = run.optimizer.param_groups
    settings_of_groups = [
        {name: value for name, value in group.items() if name != "params"} for group in groups
    ]
    if engine.is_sharded(run.accelerator):
        run.accelerator.print(
            "NOTE: the state of DeepSpeed and FSDP2 is read as pickles, which can run code: "
            "resume from your own checkpoints only."
        )
    run.accelerator.load_state(str(folder), **loading_settings(run))

    # Some depend on the device, such as whether Adam is fused.
    for group, settings in zip(run.optimizer.param_groups, settings_of_groups):
        group.update(settings)
    place_step_counts(run.optimizer)


def loading_settings(run: Run) -> dict:
    """Returns the arguments of `accelerator.load_state`, by the engine."""
    if run.accelerator.distributed_type == DistributedType.DEEPSPEED:
        # The base below adapters is not in the checkpoint, see `Run.models`.
        return {"load_module_strict": not lora.has_adapter(run.unwrapped)}
    if engine.is_sharded(run.accelerator):
        return {}
    # Adam keeps its step counts on the CPU, unless it is fused. accelerate would load them onto the
    # GPU, and each update would wait to read them back, one for each parameter.
    return {"map_location": "cpu"}


def place_step_counts(optimizer: torch.optim.Optimizer) -> None:
    """Moves Adam's step counts to the GPU where it is fused, which reads them there."""
    if not optimizer.param_groups[0].get("fused"):
        return
    for parameter, moments in optimizer.state.items():
        if torch.is_tensor(moments.get("step")):
            moments["step"] = moments["step"].to(parameter.device, torch.float32)


def load_random_states(run: Run, folder: Path) -> None:
    """Sets the random states of this process once more, because accelerate ignores any error there.

    Args:
        folder: what as many processes wrote.

    Raises:
        SystemExit: they cannot be read.
    """
    file = folder / f"{RNG_STATE_NAME}_{run.accelerator.process_index}.pkl"
    try:
        states = accelerate.utils.load(file)
        random.setstate(states["random_state"])
        np.random.set_state(states["numpy_random_seed"])
        torch.set_rng_state(states["torch_manual_seed"])
        # A run that comes from a CPU has none.
        if run.device.type == "cuda" and "torch_cuda_manual_seed" in states:
            states_of_gpus = states["torch_cuda_manual_seed"]
            torch.cuda.set_rng_state(states_of_gpus[torch.cuda.current_device()])
    except Exception as error:  # whatever a pickle of other versions may raise
        cause = " ".join(str(error).partition(". ")[0].split())[:200]
        sys.exit(
            f"--resume: the random states in {file} cannot be read, so dropout would be drawn "
            f"otherwise ({type(error).__name__}: {cause}). Give --resume an older checkpoint"
        )
