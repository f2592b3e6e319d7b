"""How many weights an update moves, in the precision in which the forward pass reads them.

Half precision rounds each weight to a grid. A step that is smaller than half a cell of the grid
changes an fp32 weight, but not what the forward pass reads: see docs/precision.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from common import engine, shards, zero
from common.models import rounding

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
    """Compares a sample of the trained weights before and after each update.

    Each sample is one tensor: an operation for each parameter would take a third of the time of an
    update on a GPU. First come the weights that half precision rounds wherever they are used.
    Autocast reads norms and embeddings in fp32; they are among the others:

        read      [ rounded ........ | others .. ]    what the forward pass reads
        masters   [ the same, or a part of it    ]    what the optimizer steps, in fp32

    Made once the engine has prepared the model, and has loaded a checkpoint if there is one.

    Args:
        run: not in fp32.

    Attributes:
        sampler, master_sampler: what takes `read` and `masters`.
        read: `[sampled]`, as the forward pass reads them, after the last update.
        masters: `[sampled]`, in fp32, as the optimizer steps them. Under ZeRO-1 and 2 a process has
            all of `read`, and a part of these.
        at_start: `[rounded]`, the beginning of `read` when the run started; gone once compared.
        n_rounded: how many of `read`, from the first, half precision rounds in every use.
        is_any_rounded: whether there are such weights, on any process.
    """

    def __init__(self, run: Run):
        self.run = run
        self.half = engine.half_precision(run.accelerator)
        self.n_trained = engine.count_trained_parameters(run.unwrapped)
        self.updates = 0

        engine.reshard(run.unwrapped)  # a forward pass may have left the weights whole
        rounded, others = by_rounding(run)
        self.is_any_rounded = len(rounded) > 0
        self.sampler = Sampler([*rounded, *others], shards.part_of)
        self.master_sampler = Sampler([*rounded, *others], master_or_weight)
        self.n_rounded = sum(self.sampler.lengths[: len(rounded)])

        self.read, self.masters = self.take_samples()
        self.at_start = self.read[: self.n_rounded]  # a view: `read` is replaced, never written to

    def take_samples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `read` and `masters` of the weights as they are now."""
        engine.reshard(self.run.unwrapped)
        read = self.sampler.take()
        rounded = read[: self.n_rounded]
        rounded.copy_(rounded.to(self.half))  # as the forward pass reads them
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
        if self.updates == UPDATES_TO_WARN and self.is_any_rounded:
            self.warn_if_still()
        return {"update/moved": moved, "update/norm": norm, "update/read_norm": read_norm}

    def warn_if_still(self) -> None:
        """Warns if few of the weights that are rounded are read differently than at the start.

        Autocast reads norms and embeddings in fp32, so these do not count.
        """
        n = self.n_rounded
        moved, _ = self.compare(self.at_start, self.read[:n], self.sampler.counts[:n])
        del self.at_start
        if moved < SHARE_TO_WARN and self.run.accelerator.is_main_process:
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
        differ, squares, size = self.run.accelerator.reduce(sums.to(self.run.device)).tolist()
        # Where processes hold the same weights, all three sums count these equally often.
        return differ / size, math.sqrt(squares * self.n_trained / size)

    def advice(self, moved: float) -> str:
        """Returns the warning that few weights are read differently than at the start."""
        magnitudes = self.read[: self.n_rounded].float().abs().cpu()
        median = magnitudes[magnitudes > 0].median().item()  # half of a new adapter is zero
        # The grid of half precision has cells of this size at the median weight. A weight is read
        # differently after half of one.
        cell = 2 ** math.floor(math.log2(median)) * torch.finfo(self.half).eps
        half_cell = cell / 2
        rate = self.run.args.learning_rate
        name = str(self.half).removeprefix("torch.")
        ways = [] if self.run.args.spread_masters else ["--spread_masters true"]
        ways += ["a higher rate", "fp16 or fp32" if self.half == torch.bfloat16 else "fp32"]
        return (
            f"{UPDATES_TO_WARN} updates changed {moved:.1%} of the weights that the forward pass "
            f"reads in {name}: most steps are too small for it. At --learning_rate {rate:g} a "
            f"weight of median size, {median:.2g}, moves for some {half_cell / rate:,.0f} updates "
            f"until {name} shows it. Sooner: {', '.join(ways)}. See docs/precision.md"
        )


def by_rounding(run: Run) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the trained parameters that half precision rounds in every use, and the others."""
    names = rounding.rounded_when_read(run.accelerator, run.unwrapped)
    trained = [(n, p) for n, p in run.unwrapped.named_parameters() if p.requires_grad]
    rounded = [parameter for name, parameter in trained if name in names]
    others = [parameter for name, parameter in trained if name not in names]
    return rounded, others


class Sampler:
    """Copies the same weights of some parameters again and again.

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
        sizes = torch.tensor([zero.without_padding(p, held(p)).numel() for p in parameters])
        self.lengths = [len(evenly_spaced(p, held(p))) for p in parameters]
        lengths = torch.tensor(self.lengths)
        each = sizes / lengths.clamp(min=1)
        self.counts = torch.repeat_interleave(each, lengths).to(self.take().device)

    def take(self) -> torch.Tensor:
        """Returns a copy of the sampled weights as they are now, `[sampled]`."""
        parts = [evenly_spaced(parameter, self.held(parameter)) for parameter in self.parameters]
        # DeepSpeed's empty parts are on the CPU.
        return torch.cat([part for part in parts if len(part)] or parts[:1])


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
