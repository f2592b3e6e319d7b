"""A running average of the trained weights, whatever the engine has cut them into."""

import contextlib

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from common import engine, zero


class Average:
    """A running average of the weights that are trained, in fp32; each process holds its part.

    A checkpoint holds the whole: give it to `Checkpoint` by a name of its own.

    Args:
        policy: the module that was prepared, as it was before.
        decay: what `follow` keeps of the average, below 1.
    """

    def __init__(self, accelerator: Accelerator, policy: nn.Module, decay: float):
        self.accelerator = accelerator
        self.policy = policy
        self.decay = decay
        engine.reshard(policy)  # else FSDP2 may show whole ones, which it frees
        self.trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self.parts = {name: part.float().clone() for name, part in self.parts_of_policy().items()}

    def parts_of_policy(self) -> dict[str, torch.Tensor]:
        """Returns what this process holds of each trained parameter: views that updates change."""
        engine.reshard(self.policy)  # an evaluation may have left them whole
        # ZeRO-3 has `ds_tensor`, FSDP2 a DTensor.
        return {name: getattr(p, "ds_tensor", p).detach() for name, p in self.trained.items()}

    @torch.no_grad()
    def follow(self) -> None:
        """Moves the average towards the weights. Call it after each update that was applied."""
        for name, part in self.parts_of_policy().items():
            self.parts[name].lerp_(part.float(), 1 - self.decay)

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the whole average, on the host. All processes must call it."""
        return {name: self.whole(name).cpu() for name in self.parts}

    def whole(self, name: str) -> torch.Tensor:
        """Returns the average of a parameter on every process. All processes must call it."""
        part = self.parts[name]
        parameter = self.trained[name]
        if hasattr(parameter, "ds_tensor"):
            # ZeRO-3 cuts the flattened parameter into equal pieces; the last one is padded.
            flat = self.accelerator.gather(part.to(self.accelerator.device))
            return flat[: parameter.ds_numel].view(parameter.ds_shape)
        return part.full_tensor() if isinstance(part, DTensor) else part

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Takes its part of what `state` returned. All processes must call it."""
        for name, whole in state.items():
            part = self.parts[name]
            if hasattr(self.trained[name], "ds_tensor"):
                start = self.accelerator.process_index * part.numel()
                mine = whole.flatten()[start : start + part.numel()]
                part[: mine.numel()] = mine
            elif isinstance(part, DTensor):
                whole = whole.to(self.accelerator.device)
                part.copy_(distribute_tensor(whole, part.device_mesh, part.placements))
            else:
                part.copy_(whole)

    @contextlib.contextmanager
    @torch.no_grad()
    def in_place_of_the_policy(self):
        """Lets the policy compute with the average inside the block, and then with its own weights.

        All processes must call it.
        """
        own = {name: part.clone() for name, part in self.parts_of_policy().items()}
        self.write(self.parts)
        try:
            yield
        finally:
            self.write(own)

    def write(self, parts: dict[str, torch.Tensor]) -> None:
        """Writes what each process holds of the parameters."""
        for name, held in self.parts_of_policy().items():
            held.copy_(parts[name])
            parameter = self.trained[name]
            if getattr(parameter, "ds_persist", False):  # a small one, whole on every process, too
                flat = self.accelerator.gather(held.to(self.accelerator.device))
                with zero.gathered([parameter]):
                    parameter.data.copy_(flat[: parameter.ds_numel].view(parameter.ds_shape))
