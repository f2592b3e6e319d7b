"""How many weights an update moves, in the precision in which the forward pass reads them.

Half precision rounds each weight to a grid. A step that is smaller than half a cell of the grid
changes an fp32 weight, but usually not what the forward pass reads: see docs/precision.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from common import engine, shards, zero
from preference_recipes.models import rounding

if TYPE_CHECKING:
    from common.run import Run

# Of a larger tensor at most this many weights are compared, evenly spaced.
MOST_COMPARED = 2**16
# The run warns if after so many updates fewer than this share of the weights are read differently.
UPDATES_TO_WARN = 20
SHARE_TO_WARN = 0.05


def watch(run: Run) -> None:
    """Lets the run log `update/*`, unless it computes in fp32, which rounds nothing."""
    if engine.half_precision(run.accelerator) is not None:
        run.metrics.moved = Watch(run)


class Watch:
    """Compares some of the trained weights before and after each update.

    The compared weights of all parameters are copied into one tensor. On a GPU, comparing each
    parameter by itself would take a third of the time of an update. There are two such tensors:

        read      [ rounded | others ]    as the forward pass reads them
        masters   [ rounded | others ]    as the optimizer steps them, in fp32

    `rounded` are the weights that half precision rounds wherever they are used. `others` are read
    in fp32 somewhere: under autocast norms and embeddings are.

    Made once the engine has prepared the model, and has loaded a checkpoint if there is one.

    Args:
        run: not in fp32.

    Attributes:
        sampler, master_sampler: what takes `read` and `masters`.
        read: `[sampled]`, after the last update.
        masters: `[sampled]`, after the last update. Under ZeRO-1 and 2 a process has all of `read`,
            but masters of only a part of these weights.
        n_rounded: how many of `read` are `rounded`, on this process.
        is_any_rounded: whether any are, on any process.
        at_start: `[n_rounded]`, the rounded part of the first `read`; gone once it has served
            `warn_if_still`.
    """

    def __init__(self, run: Run):
        self.run = run
        self.half = engine.half_precision(run.accelerator)
        self.n_trained = engine.count_trained_parameters(run.unwrapped)
        self.updates = 0

        engine.reshard(run.unwrapped)  # a forward pass may have left the weights whole
        rounded, others = by_rounding(run)
        parameters = [*rounded, *others]
        self.sampler = Sampler(parameters, shards.part_of)
        self.master_sampler = Sampler(parameters, master_or_weight)
        self.n_rounded = sum(self.sampler.lengths[: len(rounded)])
        self.is_any_rounded = len(rounded) > 0

        self.read, self.masters = self.take_samples()
        # No copy is needed: each update makes another `read`, and writes nothing to this one.
        self.at_start = self.read[: self.n_rounded]

    def take_samples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `read` and `masters` of the weights as they are now."""
        engine.reshard(self.run.unwrapped)
        read = self.sampler.take()
        n = self.n_rounded
        read[:n] = read[:n].to(self.half)  # as the forward pass reads them
        return read, self.master_sampler.take()

    def update_done(self) -> dict[str, float]:
        """Returns what to log of an update that was applied. All processes must call it.

        Returns:
            `update/moved`: the share of the trained weights that are read differently than before.
            `update/norm`: the L2 norm of the change of the fp32 weights.
            `update/read_norm`: the L2 norm of the change of what is read.
        """
        read_before = self.read
        masters_before = self.masters
        self.read, self.masters = self.take_samples()
        moved, read_norm = self.compare(read_before, self.read, self.sampler.counts)
        _, norm = self.compare(masters_before, self.masters, self.master_sampler.counts)
        self.updates += 1
        if self.updates == UPDATES_TO_WARN:
            if self.is_any_rounded:
                self.warn_if_still()
            del self.at_start
        return {"update/moved": moved, "update/norm": norm, "update/read_norm": read_norm}

    def warn_if_still(self) -> None:
        """Warns if few of the rounded weights are read differently than when the run started.

        One collective; all processes must call it.
        """
        n = self.n_rounded
        moved, _ = self.compare(self.at_start, self.read[:n], self.sampler.counts[:n])
        # At a learning rate of 0 nothing is to move.
        is_wanted = self.run.args.learning_rate > 0 and self.run.accelerator.is_main_process
        if moved < SHARE_TO_WARN and is_wanted:
            self.run.metrics.warn(self.advice(moved))

    def compare(
        self, before: torch.Tensor, after: torch.Tensor, counts: torch.Tensor
    ) -> tuple[float, float]:
        """Returns which share of the weights differ, and the L2 norm of the difference.

        One collective; all processes must call it.

        Args:
            before, after: `[sampled]` of this process.
            counts: `[sampled]`, how many weights each stands for.
        """
        difference = after.double() - before.double()
        sums = torch.stack(
            [
                (counts * difference.ne(0)).sum(dtype=torch.float64),
                (counts * difference.square()).sum(),
                counts.sum(dtype=torch.float64),
            ]
        )
        of_all_processes = self.run.accelerator.reduce(sums.to(self.run.device))
        n_differ, squares, n_counted = of_all_processes.tolist()
        # Where several processes hold the same weights, all three sums count these equally often,
        # so only their ratios mean something.
        share = n_differ / n_counted
        norm = math.sqrt(squares * self.n_trained / n_counted)
        return share, norm

    def advice(self, moved: float) -> str:
        """Returns the warning that few weights are read differently than at the start."""
        name = str(self.half).removeprefix("torch.")
        magnitudes = self.read[: self.n_rounded].float().abs().cpu()
        nonzero = magnitudes[magnitudes > 0]  # half of a new adapter is zero
        how_slowly = ""
        if len(nonzero):  # of those that this process holds
            median = nonzero.median().item()
            rate = self.run.args.learning_rate
            how_slowly = (
                f" At --learning_rate {rate:g} a weight of median size, {median:.2g}, moves for "
                f"some {self.half_cell(median) / rate:,.0f} updates until {name} shows it."
            )
        ways = ["a higher learning rate", "fp16 or fp32" if self.half == torch.bfloat16 else "fp32"]
        if not self.run.args.spread_masters:
            ways.insert(0, "--spread_masters true")
        return (
            f"{UPDATES_TO_WARN} updates changed {moved:.1%} of the weights that the forward pass "
            f"reads in {name}: most steps are too small for it.{how_slowly} What helps: "
            f"{', '.join(ways)}. See docs/precision.md"
        )

    def half_cell(self, weight: float) -> float:
        """Returns how far a weight in the middle of its cell moves until it is read differently."""
        power_of_two = 2 ** math.floor(math.log2(weight))  # the grid gets coarser at each
        cell = power_of_two * torch.finfo(self.half).eps
        return cell / 2


def by_rounding(run: Run) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the trained parameters that half precision rounds in every use, and the others."""
    names = rounding.rounded_when_read(run.accelerator, run.unwrapped)
    trained = [(n, p) for n, p in run.unwrapped.named_parameters() if p.requires_grad]
    rounded = [parameter for name, parameter in trained if name in names]
    others = [parameter for name, parameter in trained if name not in names]
    return rounded, others


class Sampler:
    """Copies weights of some parameters, the same ones whenever it is asked.

    Args:
        parameters: at least one.
        held: returns what this process holds of a parameter.

    Attributes:
        lengths: how many weights of each parameter are sampled.
        counts: `[sampled]`, how many weights each sampled one stands for.
    """

    def __init__(
        self, parameters: list[nn.Parameter], held: Callable[[nn.Parameter], torch.Tensor]
    ):
        self.parameters = parameters
        self.held = held
        self.lengths = []
        counts = []
        for parameter in parameters:
            part = held(parameter)
            n_held = zero.without_padding(parameter, part).numel()
            n_sampled = len(evenly_spaced(parameter, part))
            self.lengths.append(n_sampled)
            counts.append(torch.full((n_sampled,), float(n_held)) / n_sampled)
        self.counts = torch.cat(counts).to(self.take().device)

    def take(self) -> torch.Tensor:
        """Returns a copy of the sampled weights as they are now, `[sampled]`."""
        parts = [evenly_spaced(parameter, self.held(parameter)) for parameter in self.parameters]
        # DeepSpeed's empty parts are on the CPU, so they cannot be joined with others.
        filled = [part for part in parts if len(part)]
        return torch.cat(filled) if filled else parts[0].clone()


def master_or_weight(parameter: nn.Parameter) -> torch.Tensor:
    """Returns what this process holds of a parameter in fp32: DeepSpeed's master, or itself."""
    master = zero.master_of(parameter)
    return shards.part_of(parameter) if master is None else master


def evenly_spaced(parameter: nn.Parameter, held: torch.Tensor) -> torch.Tensor:
    """Returns at most `MOST_COMPARED` evenly spaced weights of what a process holds, as a view.

    Args:
        held: what it holds of the parameter. ZeRO-3's padding after its last weight is left out.
    """
    flat = zero.without_padding(parameter, held).detach().reshape(-1)
    return flat[:: max(1, math.ceil(len(flat) / MOST_COMPARED))]
