"""How many weights an update moves, in the precision in which the forward pass reads them.

Half precision rounds each weight to a grid. A step that is smaller than half a cell of the grid
changes an fp32 weight, but not what the forward pass reads: see docs/precision.md.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from common import engine, shards, zero
from common.models import rounding

if TYPE_CHECKING:
    from common.run import Run

# A larger tensor is compared at this many of its numbers, evenly spaced.
NUMBERS = 2**16
# After so many updates the run warns if fewer than this share of the weights are read differently.
UPDATES = 20
SHARE = 0.05


def watch(run: Run) -> None:
    """Lets the run log `update/*`, unless it computes in fp32, which rounds nothing."""
    if engine.half_precision(run.accelerator) is not None:
        run.metrics.moved = Watch(run)


class Part(NamedTuple):
    """What this process holds of a parameter.

    Attributes:
        numbers: all of them, or `NUMBERS` evenly spaced ones.
        size: how many numbers they stand for.
    """

    numbers: torch.Tensor
    size: int


class Watch:
    """Compares the weights before and after each update.

    Made once the engine has prepared the model, and has loaded a checkpoint if there is one.

    Args:
        run: not in fp32.

    Attributes:
        read, masters: the trained weights after the last update, by name: as the forward pass reads
            them, and in fp32 as the optimizer steps them.
    """

    def __init__(self, run: Run):
        self.run = run
        self.half = engine.half_precision(run.accelerator)
        self.rounded = rounding.rounded_when_read(run.accelerator, run.unwrapped)
        self.updates = 0
        self.look()
        self.at_start = self.read

    def look(self) -> None:
        """Takes `read` and `masters` from the weights as they are now."""
        engine.reshard(self.run.unwrapped)  # an evaluation may have left them whole
        self.read: dict[str, Part] = {}
        self.masters: dict[str, Part] = {}
        for name, parameter in self.run.unwrapped.named_parameters():
            if not parameter.requires_grad:
                continue
            held = shards.part_of(parameter)
            master = zero.master_of(parameter)
            self.masters[name] = sampled(parameter, held if master is None else master)
            self.read[name] = sampled(parameter, held)
            if name in self.rounded:
                numbers, size = self.read[name]
                self.read[name] = Part(numbers.to(self.half), size)

    def update_done(self) -> dict[str, float]:
        """Returns what to log of an update that was applied. All processes must call it.

        Returns:
            `update/moved`, the share of the trained weights that are read differently than before
            the update; `update/norm`, of the difference of the fp32 weights; `update/read_norm`, of
            the difference of what is read.
        """
        read_before = self.read
        masters_before = self.masters
        self.look()
        moved, read_norm = self.compare(read_before, self.read)
        _, norm = self.compare(masters_before, self.masters)
        self.updates += 1
        if self.updates == UPDATES:
            self.warn_if_still()
        return {"update/moved": moved, "update/norm": norm, "update/read_norm": read_norm}

    def warn_if_still(self) -> None:
        """Warns if few of the weights that are rounded are read differently than at the start.

        Autocast reads norms and embeddings in fp32, so these do not count.
        """
        before = {name: part for name, part in self.at_start.items() if name in self.rounded}
        moved, _ = self.compare(before, {name: self.read[name] for name in before})
        self.at_start = {}
        if moved < SHARE and self.run.accelerator.is_main_process:
            self.run.metrics.warn(self.advice(moved))

    def compare(self, before: dict[str, Part], after: dict[str, Part]) -> tuple[float, float]:
        """Returns which share of the numbers differ, and the norm of the difference.

        One collective; all processes must call it.
        """
        device = self.run.device
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        for name, old in before.items():
            if old.size == 0:
                continue
            difference = after[name].numbers.double() - old.numbers.double()
            differ = difference.ne(0).double().mean()
            squares = difference.square().mean()
            sums += torch.stack([differ, squares, torch.ones_like(differ)]).to(device) * old.size
        differ, squares, size = self.run.accelerator.reduce(sums).tolist()
        # Where every process holds all weights, `size` counts them several times, as the sums do.
        n_trained = engine.count_trained_parameters(self.run.unwrapped)
        return differ / size, math.sqrt(squares * n_trained / size)

    def advice(self, moved: float) -> str:
        """Returns the warning that few weights are read differently after `UPDATES` updates."""
        rounded = [part.numbers for name, part in self.read.items() if name in self.rounded]
        sizes = torch.cat([numbers.float().abs().cpu() for numbers in rounded])
        median = sizes[sizes > 0].median().item()  # half of a new adapter is zero
        half_cell = 2 ** math.floor(math.log2(median)) * torch.finfo(self.half).eps / 2
        rate = self.run.args.learning_rate
        name = str(self.half).removeprefix("torch.")
        ways = [] if self.run.args.spread_masters else ["--spread_masters true"]
        ways += ["a higher rate", "fp16 or fp32" if self.half == torch.bfloat16 else "fp32"]
        return (
            f"{UPDATES} updates changed {moved:.1%} of the weights that the forward pass reads in "
            f"{name}: most steps are too small for it. At --learning_rate {rate:g} a weight of "
            f"median size, {median:.2g}, moves for some {half_cell / rate:,.0f} updates until "
            f"{name} shows it. Sooner: {', '.join(ways)}. See docs/precision.md"
        )


def sampled(parameter: nn.Parameter, held: torch.Tensor) -> Part:
    """Returns a copy of what a process holds of a parameter or, if that is much, of some of it.

    Args:
        held: under ZeRO-3 maybe with zeros after its last number, which are left out.
    """
    flat = zero.without_padding(parameter, held).detach().reshape(-1)
    stride = max(1, math.ceil(len(flat) / NUMBERS))
    return Part(flat[::stride].clone(), len(flat))
