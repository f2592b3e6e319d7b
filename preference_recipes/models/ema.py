"""An exponential moving average of the trained weights, however the engine has sharded them."""

import contextlib

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from common import engine, zero


class EMA:
    """An average of the weights that are trained, in fp32; each process holds its part.

    A checkpoint holds the whole average: pass this to `Checkpoint` under a name of its own.

    Args:
        policy: the unwrapped module.
        decay: the share of the average that `follow` keeps, below 1.
    """

    def __init__(self, accelerator: Accelerator, policy: nn.Module, decay: float):
        self.accelerator = accelerator
        self.policy = policy
        self.decay = decay
        engine.reshard(policy)  # otherwise FSDP2 may show whole parameters, which it frees
        self.trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self.parts = {name: part.float().clone() for name, part in self.parts_of_policy().items()}

    def parts_of_policy(self) -> dict[str, torch.Tensor]:
        """Returns this process's part of each trained parameter: views that updates change."""
        engine.reshard(self.policy)  # an evaluation may have left parameters whole
        # ZeRO-3 has `ds_tensor`, FSDP2 a DTensor.
        return {name: getattr(p, "ds_tensor", p).detach() for name, p in self.trained.items()}

    @torch.no_grad()
    def follow(self) -> None:
        """Moves the average towards the weights. Call it after each applied update."""
        for name, part in self.parts_of_policy().items():
            self.parts[name].lerp_(part.float(), 1 - self.decay)

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the whole average, on the host. All processes must call it."""
        return {name: self.whole(name, part).cpu() for name, part in self.parts.items()}

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Puts the processes' parts of a parameter together. All processes must call it."""
        parameter = self.trained[name]
        if hasattr(parameter, "ds_tensor"):
            # ZeRO-3 splits the flattened parameter into equal parts and pads the last one.
            flat = self.accelerator.gather(part.to(self.accelerator.device))
            return flat[: parameter.ds_numel].view(parameter.ds_shape)
        return part.full_tensor() if isinstance(part, DTensor) else part

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Takes this process's part of what `state` returned. All processes must call it."""
        for name, average in state.items():
            part = self.parts[name]
            if hasattr(self.trained[name], "ds_tensor"):
                start = self.accelerator.process_index * part.numel()
                own_values = average.flatten()[start : start + part.numel()]
                part[: own_values.numel()] = own_values
            elif isinstance(part, DTensor):
                average = average.to(self.accelerator.device)
                part.copy_(distribute_tensor(average, part.device_mesh, part.placements))
            else:
                part.copy_(average)

    @contextlib.contextmanager
    @torch.no_grad()
    def in_place_of_the_policy(self):
        """Puts the average in place of the weights inside the block. All processes must call it."""
        policy_parts = {name: part.clone() for name, part in self.parts_of_policy().items()}
        self.write(self.parts)
        try:
            yield
        finally:
            self.write(policy_parts)

    def write(self, parts: dict[str, torch.Tensor]) -> None:
        """Writes each process's parts into the parameters."""
        for name, own_part in self.parts_of_policy().items():
            own_part.copy_(parts[name])
            parameter = self.trained[name]
            if getattr(parameter, "ds_persist", False):  # small: also whole on every process
                whole = self.whole(name, own_part)
                with zero.gathered([parameter]):
                    parameter.data.copy_(whole)
