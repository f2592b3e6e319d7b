"""A plain training loop in torch, which recipes are compared with. It shares no code with them.

It reads one unpadded row at a time, in fp64. Schedules, the order of rows, clipping and AdamW are in
their textbook form.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

from runs import without_timings

BETAS = (0.9, 0.999)  # AdamW's own, which no argument changes


def schedule(kind: str, step: int, warmup: int, total: int, peak: float) -> float:
    """The learning rate of update `step`, counted from 0, when there are `total` updates."""
    if step < warmup:
        return peak * step / warmup
    done = (step - warmup) / (total - warmup)
    if kind == "constant_with_warmup":
        return peak
    if kind == "linear":
        return peak * (1 - done)
    if kind == "cosine":
        return peak * (1 + math.cos(math.pi * done)) / 2
    raise ValueError(kind)


def rows_of_updates(rows: int, batch: int, seed: int) -> Iterator[np.ndarray]:
    """The rows of each update: one seeded permutation an epoch, cut into batches."""
    for epoch in itertools.count():
        order = np.random.default_rng([seed, epoch]).permutation(rows)
        for start in range(0, rows, batch):
            yield order[start : start + batch]


def clip(parameters: list[torch.nn.Parameter], max_norm: float) -> float:
    """Clips gradients by their common norm; returns the norm before."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients))
    for gradient in gradients if norm > max_norm else []:
        gradient *= max_norm / norm
    return norm


class AdamW:
    """Adam with decoupled weight decay, on matrices only, as its paper writes it."""

    def __init__(self, model: torch.nn.Module, epsilon: float, weight_decay: float):
        self.parameters = list(model.parameters())
        self.epsilon = epsilon
        self.weight_decay = weight_decay
        self.first = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.second = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.steps = 0

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        self.steps += 1
        for parameter, first, second in zip(self.parameters, self.first, self.second):
            if parameter.grad is None:
                continue
            if parameter.ndim == 2:
                parameter -= learning_rate * self.weight_decay * parameter
            first.mul_(BETAS[0]).add_((1 - BETAS[0]) * parameter.grad)
            second.mul_(BETAS[1]).add_((1 - BETAS[1]) * parameter.grad**2)
            mean = first / (1 - BETAS[0] ** self.steps)
            variance = second / (1 - BETAS[1] ** self.steps)
            parameter -= learning_rate * mean / (variance.sqrt() + self.epsilon)


class Row(NamedTuple):
    """What the model makes of one row.

    Attributes:
        loss: summed over what the loss is averaged over, target tokens in SFT, pairs elsewhere.
        number: of those in the row.
        metrics: its values by tag. A line holds the mean of all, of a `min_` or `max_` the extreme.
        tokens: all that are read, those of a pair's prompt twice.
    """

    loss: torch.Tensor
    number: int
    metrics: dict[str, list[float]]
    tokens: int


def train(
    model: torch.nn.Module, rows: list, settings: dict, read: Callable[[object], Row]
) -> list[dict]:
    """Trains the model. Returns the log lines that the recipe should write."""
    optimizer = AdamW(model, settings["adam_epsilon"], settings["weight_decay"])
    batch_size = settings["train_batch_size"]
    updates_of_epoch = math.ceil(len(rows) / batch_size)
    total = settings.get("max_steps") or settings["max_epochs"] * updates_of_epoch
    warmup = settings["warmup_steps"]
    if warmup < 1:  # a share of all updates
        warmup = math.ceil(warmup * total)
    batches = rows_of_updates(len(rows), batch_size, settings["seed"])
    lines, since_last_line, samples, tokens = [], [], 0, 0
    for step in range(total):
        update = [read(rows[row]) for row in next(batches)]
        model.zero_grad()
        (sum(row.loss for row in update) / sum(row.number for row in update)).backward()
        norm = clip(optimizer.parameters, settings["max_grad_norm"])
        kind, peak = settings["lr_scheduler_type"], settings["learning_rate"]
        learning_rate = schedule(kind, step, warmup, total, peak)
        optimizer.step(learning_rate)

        samples += len(update)
        tokens += sum(row.tokens for row in update)
        since_last_line += update
        if step in (0, total - 1) or (step + 1) % settings.get("logging_steps", 1) == 0:
            line = {
                "global_step": step + 1,
                "grad_norm": norm,
                "learning_rate": learning_rate,
                "epoch": (step + 1) / updates_of_epoch,
                "samples": samples,
                "tokens": tokens,
                "skipped_steps": 0,
            }
            lines.append(line | means(since_last_line))
            since_last_line = []
    return lines


def means(rows: Iterable[Row]) -> dict[str, float]:
    """The loss and each metric over all values of all rows."""
    rows = list(rows)
    found = {"loss": sum(row.loss.item() for row in rows) / sum(row.number for row in rows)}
    for tag in rows[0].metrics:
        values = [value for row in rows for value in row.metrics[tag]]
        reduce = {"min": min, "max": max}.get(tag.partition("_")[0], np.mean)
        found[tag] = float(reduce(values))
    return found


def expect_lines(found: list[dict], expected: list[dict], rel: float, abs: float = 0) -> None:
    assert [line["global_step"] for line in found] == [line["global_step"] for line in expected]
    for line, other in zip(map(without_timings, found), expected):
        assert line.keys() == other.keys()
        for tag, value in line.items():
            where = (line["global_step"], tag)
            exactly = tag.endswith("learning_rate")
            near = pytest.approx(
                other[tag], rel=1e-9 if exactly else rel, abs=0 if exactly else abs
            )
            assert value == near, where


def vector(model: torch.nn.Module) -> torch.Tensor:
    """All parameters as one fp64 vector, in the order of their names."""
    parts = dict(model.named_parameters())
    return torch.cat([parts[name].detach().double().flatten() for name in sorted(parts)])


def expect_weights(found: torch.Tensor, model: torch.nn.Module, bound: float = 1e-6) -> None:
    expected = vector(model)
    assert (found - expected).norm() <= bound * expected.norm()
