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

# Of a larger tensor, so many numbers are compared, evenly spaced.
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
    """Compares the weights before and after an update.

    Made once the engine has prepared the model. A hook of the optimizer looks at the weights before
    it steps, so that no copy of them is held while gradients are computed.

    Args:
        run: not in fp32.
    """

    def __init__(self, run: Run):
        self.run = run
        self.half = engine.half_precision(run.accelerator)
        self.rounded = rounding.rounded_when_read(run.accelerator, run.unwrapped)
        self.before: tuple[list[Part], list[Part]] | None = None
        self.at_start: list[Part] = []
        self.updates = 0
        engine.innermost_optimizer(run.optimizer).register_step_pre_hook(self.look)

    def look(self, *_) -> None:
        """Keeps the weights as they are before an update. A hook of the optimizer.

        ZeRO-3 steps in several parts: the hook is called before each, and looks before the first.
        """
        if self.updates == 0 and not self.at_start:
            self.at_start = self.read_rounded()
        if self.before is None:
            self.before = self.read(), self.masters()

    def update_done(self) -> dict[str, float]:
        """Returns what to log of an update that was applied. All processes must call it.

        Returns:
            `update/moved`, the share of the trained weights that are read differently than before
            the update; `update/norm`, of the difference of the fp32 weights; `update/read_norm`, of
            the difference of what is read.
        """
        self.updates += 1
        if self.updates == UPDATES:
            moved, _ = self.compare(self.at_start, self.read_rounded())
            self.at_start = []
            if moved < SHARE and self.run.accelerator.is_main_process:
                self.run.metrics.warn(self.advice(moved))
        read_before, masters_before = self.before
        self.before = None
        moved, read_norm = self.compare(read_before, self.read())
        _, norm = self.compare(masters_before, self.masters())
        return {"update/moved": moved, "update/norm": norm, "update/read_norm": read_norm}

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the trained parameters by name."""
        engine.reshard(self.run.unwrapped)  # an evaluation may have left them whole
        return [
            (name, parameter)
            for name, parameter in self.run.unwrapped.named_parameters()
            if parameter.requires_grad
        ]

    def read(self) -> list[Part]:
        """Returns the trained weights as the forward pass reads them."""
        parts = []
        for name, parameter in self.trained():
            part = spaced(zero.without_padding(parameter, shards.part_of(parameter)))
            if name in self.rounded:
                part = Part(part.numbers.to(self.half), part.size)
            parts.append(part)
        return parts

    def read_rounded(self) -> list[Part]:
        """Returns those that are read rounded: autocast reads norms and embeddings in fp32."""
        names = [name for name, _ in self.trained()]
        return [part for name, part in zip(names, self.read()) if name in self.rounded]

    def masters(self) -> list[Part]:
        """Returns the trained weights in fp32, as the optimizer steps them."""
        parts = []
        for _, parameter in self.trained():
            master = zero.master_of(parameter)
            if master is None:
                master = shards.part_of(parameter)
            parts.append(spaced(zero.without_padding(parameter, master)))
        return parts

    def compare(self, before: list[Part], after: list[Part]) -> tuple[float, float]:
        """Returns which share of the numbers differ, and the norm of the difference.

        One collective; all processes must call it.
        """
        device = self.run.device
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        for old, new in zip(before, after):
            if old.size == 0:
                continue
            difference = new.numbers.double() - old.numbers.double()
            differ = difference.ne(0).double().mean()
            squares = difference.square().mean()
            sums += torch.stack([differ, squares, torch.ones_like(differ)]).to(device) * old.size
        differ, squares, size = self.run.accelerator.reduce(sums).tolist()
        # Where every process holds all weights, `size` counts them several times, as the sums do.
        n_trained = engine.count_trained_parameters(self.run.unwrapped)
        return differ / size, math.sqrt(squares * n_trained / size)

    def advice(self, moved: float) -> str:
        """Returns the warning that few weights are read differently after `UPDATES` updates."""
        sizes = torch.cat([part.numbers.float().abs().cpu() for part in self.read_rounded()])
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


def spaced(numbers: torch.Tensor) -> Part:
    """Returns a copy of numbers or, if they are too many, of some of them."""
    flat = numbers.detach().reshape(-1)
    stride = max(1, math.ceil(len(flat) / NUMBERS))
    return Part(flat[::stride].clone(), len(flat))
