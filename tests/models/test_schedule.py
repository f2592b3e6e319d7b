"""The schedule of the learning rate: warm-up never takes the only update."""

import types
import typing

import pytest
import torch
import transformers

from common import optim
from common.shared_args import SchedulerType

KINDS = typing.get_args(SchedulerType)


def rates_of(make_scheduler, updates: int) -> list[float]:
    """The learning rates of all updates."""
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = make_scheduler(optimizer)
    rates = []
    for _ in range(updates):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def our_rates(kind: str, warmup_steps: float, updates: int) -> list[float]:
    args = types.SimpleNamespace(lr_scheduler_type=kind, warmup_steps=warmup_steps)
    return rates_of(lambda optimizer: optim.make_scheduler(optimizer, args, updates), updates)


@pytest.mark.parametrize("warmup_steps", [0.03, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_never_takes_the_only_update(kind, warmup_steps):
    assert our_rates(kind, warmup_steps, 1) == [0.5]


@pytest.mark.parametrize("warmup_steps", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rates_are_those_of_transformers(kind, warmup_steps):
    reference = lambda optimizer: transformers.get_scheduler(kind, optimizer, warmup_steps, 12)
    assert our_rates(kind, warmup_steps, 12) == rates_of(reference, 12)
