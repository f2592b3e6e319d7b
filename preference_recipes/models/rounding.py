"""Which weights half precision rounds, and where they are within their rounding cells."""

import collections
import hashlib
from collections.abc import Iterator

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from common import engine, zero
from preference_recipes.models import architecture
from preference_recipes.models.logprobs import LogProbHead

# Random numbers are drawn for so many weights at once, each time from a seed of their own, so that
# a process can draw those of its shard alone.
AT_ONCE = 2**22


def rounded_when_read(accelerator, wrapper: nn.Module) -> set[str]:
    """Returns the names of the parameters that half precision rounds in every use.

    FSDP2 rounds all weights when it gathers them, DeepSpeed after each update.

    Args:
        wrapper: a `ModelWrapper`.
    """
    if zero.stage(accelerator) or accelerator.is_fsdp2:
        return {name for name, _ in wrapper.named_parameters()}
    return rounded_by_autocast(wrapper, accelerator.device.type)


def rounded_by_autocast(wrapper: nn.Module, device_type: str) -> set[str]:
    """Returns the names of the parameters that autocast rounds in every use: of linear layers.

    A weight that other modules have, too, such as the embeddings', is used in fp32 elsewhere. Score
    heads compute in fp32, output layers only on a CPU. Recurrent layers have kernels on a GPU that
    read the weights of linear layers in their own way, so models with such layers are left out.

    Args:
        wrapper: a `ModelWrapper`.
        device_type: where it will run.
    """
    if any(model._is_stateful for model in architecture.whole_models(wrapper).values()):
        return set()
    owners = collections.Counter(
        id(parameter)
        for module in wrapper.modules()
        for parameter in module.parameters(recurse=False)
    )
    found = set()
    for path, module in wrapper.named_modules():
        names = []
        if type(module) in (nn.Linear, Conv1D):
            names = ["weight", "bias"]
        elif isinstance(module, LogProbHead) and device_type != "cpu":
            names = ["weight"]  # its bias is added in fp32
        for name in names:
            parameter = getattr(module, name)
            if parameter is not None and owners[id(parameter)] == 1:
                found.add(f"{path}.{name}")
    return found


@torch.no_grad()
def spread_masters(accelerator, wrapper: nn.Module, args) -> None:
    """Draws each trained weight uniformly from the numbers that half precision rounds to it.

    A published model was saved in bf16, so each fp32 weight begins in the middle of its rounding
    cell, and steps smaller than half a cell show nowhere until they add up. Spread evenly, as many
    weights cross into the next cell as the step is long: what is read moves as far as the step on
    average. What the first forward pass reads does not change by a bit. docs/precision.md has
    figures. Weights that are zero, not on the grid, or read in fp32 stay as they are.

    Args:
        wrapper: a `ModelWrapper`, not prepared yet.
        args: needs `spread_masters seed`.
    """
    if not args.spread_masters:
        return
    half = engine.half_precision(accelerator)
    if half is None:
        accelerator.print("NOTE: --spread_masters changes nothing: this run computes in fp32")
        return
    for name, held, start in trained_and_rounded(accelerator, wrapper):
        uniforms = uniforms_of(f"{args.seed} {name}", start, len(held)).to(held.device)
        held.copy_(drawn_in_cells(held, uniforms, half))


def note_ties(accelerator, wrapper: nn.Module) -> None:
    """Prints a note if many trained weights are halfway between two bf16 numbers.

    One in eight fp16 numbers is. A step, however small, moves half of these by a whole rounding
    cell: docs/precision.md has figures.

    Args:
        wrapper: a `ModelWrapper`, not prepared yet.
    """
    if engine.half_precision(accelerator) is not torch.bfloat16:
        return
    ties = 0
    weights = 0
    for _, held, _ in trained_and_rounded(accelerator, wrapper):
        # bf16 drops the lower half of an fp32 number.
        lower_half = held[:4096].view(torch.int32) & 0xFFFF
        ties += int((lower_half == 0x8000).sum())
        weights += len(lower_half)
    if ties > weights / 20:
        accelerator.print(
            f"NOTE: {ties / weights:.0%} of the weights are halfway between two bf16 numbers, as "
            "in a model saved in fp16: the first update moves half of these by a whole step of "
            "bf16, however small the learning rate. Train it in fp16 or fp32, or start from a "
            "model saved in bf16 or fp32: docs/precision.md"
        )


def trained_and_rounded(accelerator, wrapper: nn.Module) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yields the trained parameters that half precision rounds in every use; no meta parameters.

    Yields:
        its name; what this process holds of it, fp32 `[weights]`, under ZeRO-3 a shard; and how
        many weights of the parameter come before these.
    """
    rounded = rounded_when_read(accelerator, wrapper)
    for name, parameter in wrapper.named_parameters():
        if not parameter.requires_grad or name not in rounded or parameter.is_meta:
            continue
        held = getattr(parameter, "ds_tensor", parameter).data.view(-1)
        start = len(held) * accelerator.process_index if hasattr(parameter, "ds_tensor") else 0
        yield name, held, start


def uniforms_of(seed: str, start: int, length: int) -> torch.Tensor:
    """Returns the random numbers of a parameter's weights from `start` on, `[length]`.

    They are the same whichever part of the parameter a process holds.
    """
    parts = []
    for block in range(start // AT_ONCE, (start + length - 1) // AT_ONCE + 1):
        digest = hashlib.sha256(f"{seed} {block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
        parts.append(torch.rand(AT_ONCE, generator=generator))
    offset = start % AT_ONCE
    return torch.cat(parts)[offset : offset + length]


def drawn_in_cells(
    weights: torch.Tensor, uniforms: torch.Tensor, half: torch.dtype
) -> torch.Tensor:
    """Returns fp32 numbers that round to the same half-precision ones as `weights`.

    Example: next to 1 bf16 has 1 - 1/256 and 1 + 1/128, so a weight of 1 is drawn from the numbers
    between 1 - 1/512 and 1 + 1/256.

    Args:
        weights: fp32. Those that are zero, or not half-precision numbers, are returned as they are.
        uniforms: between 0 and 1, of the same shape.
    """
    read = weights.to(half)
    infinity = torch.tensor(float("inf"), dtype=half, device=weights.device)
    low = (torch.nextafter(read, -infinity).float() + read.float()) / 2
    high = (torch.nextafter(read, infinity).float() + read.float()) / 2
    drawn = low + uniforms * (high - low)
    # The ends of a cell, half-way to the next number, may round to that.
    may_move = (weights != 0) & (read.float() == weights) & (drawn.to(half) == read)
    return torch.where(may_move, drawn, weights)
