"""The schedule of the learning rate: warm-up never takes the only update."""

import types
import typing

import pytest
import torch
import transformers

from common import optim
from common.shared_args import SchedulerType

KINDS = typing.get_args(SchedulerType)


def rates_of(kind, warmup_steps, updates):
    """The learning rates of all updates."""
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.5)
    args = types.SimpleNamespace(lr_scheduler_type=kind, warmup_steps=warmup_steps)
    scheduler = optim.make_scheduler(optimizer, args, updates)
    rates = []
    for _ in range(updates):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup_steps", [0.03, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_never_takes_the_only_update(kind, warmup_steps):
    assert rates_of(kind, warmup_steps, 1) == [0.5]


@pytest.mark.parametrize("warmup_steps", [0, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rates_are_those_of_transformers(kind, warmup_steps):
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.5)
    reference = transformers.get_scheduler(kind, optimizer, warmup_steps, 12)
    expected = []
    for _ in range(12):
        expected.append(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()
    assert rates_of(kind, warmup_steps, 12) == expected
