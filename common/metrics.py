"""Exact means over all samples: of an update, of a log line, of an evaluation."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from accelerate import Accelerator

from common.values import IDENTITY, Recorder

Reduce = Literal["mean", "min", "max"]

# What one process has added, by tag: float64 `[2]` on the device, the weighted sum of the values,
# or their minimum or maximum, and the sum of their weights.
Sums = dict[str, tuple[Reduce, torch.Tensor]]
# How two sums of values, two minima or two maxima become one.
JOIN = {"mean": torch.add, "min": torch.minimum, "max": torch.maximum}


@torch.no_grad()
def weighted(value: torch.Tensor, weights: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    """Returns what `Sums` hold of values, with how much each counts, of the same shape."""
    weights = weights.double()
    # The value of a padding row may be inf, and inf times its weight of 0 is NaN.
    counted = torch.where(weights > 0, value.double(), IDENTITY[reduce])
    if reduce == "mean":
        number = (counted * weights).sum()
    else:
        number = counted.amin() if reduce == "min" else counted.amax()
    return torch.stack([number, weights.sum()])


def merge(sums: Sums, others: Sums) -> None:
    """Adds others to sums."""
    for name, (reduce, new) in others.items():
        if name in sums:
            _, old = sums[name]
            new = torch.stack([JOIN[reduce](old[0], new[0]), old[1] + new[1]])
        sums[name] = (reduce, new)


class Means:
    """Collects exact means for the next log line; an update's values join only once it is applied.

    `add` fills `pending`. An update that is applied moves it to `since_last_line`, of which
    `reduce_and_reset` makes a line. An evaluation has a `Means` of its own: it adds, and reduces.

    Every process must add the same tags in the same order. Adding never makes a GPU wait: no value
    is read back from it, and no tensor is made of Python numbers, which would be a copy that waits.

    Args:
        recorder: writes down the values of each sample, see `Run.recorder`; None: nothing does.
    """

    def __init__(self, accelerator: Accelerator, recorder: Recorder | None = None):
        self.accelerator = accelerator
        self.recorder = recorder
        self.pending: Sums = {}  # of the current update; dropped if it is skipped
        self.since_last_line: Sums = {}  # of the updates applied since the last line
        self.last_update: dict[str, float] = {}  # values of the last applied update alone

    def add(
        self,
        values: dict[str, Any],
        weights: torch.Tensor,
        row_numbers: Sequence[int] = (),
        response_numbers: Sequence[int] | None = None,
    ) -> None:
        """Adds values of the samples of a micro-batch.

        Args:
            values: by tag, `[samples]`. Or a tuple `(values, counts)` of any one shape, such as
                log-probs and a mask; or `(values, counts, "max")`, or "min", to log no mean.
            weights: `[samples]`, 0 for a padding row.
            row_numbers, response_numbers: for the recorder, of each sample: its row in the data
                file, and where responses are sampled the response to it, both from 1.
        """
        ones = torch.ones_like(weights)
        complete = {}
        for name, value in values.items():
            value, counts, *other = value if isinstance(value, tuple) else (value, ones)
            reduce: Reduce = other[0] if other else "mean"
            complete[name] = (value, counts, reduce)
            of_rows = weights.reshape(-1, *[1] * (counts.ndim - 1))
            merge(self.pending, {name: (reduce, weighted(value, counts * of_rows, reduce))})
        if self.recorder is not None:
            self.recorder.add(complete, weights, row_numbers, response_numbers)

    def add_rollout(self, values: dict[str, torch.Tensor], reduce: Reduce = "mean") -> None:
        """Adds values of a rollout to the next log line, even if its first update is skipped.

        Args:
            values: by tag, each of any shape, the same on every process. NaN counts nowhere.
        """
        for name, value in values.items():
            value = value.to(self.accelerator.device)
            # Every process holds the whole rollout: one of them counts it.
            counts = ~value.isnan() & self.accelerator.is_main_process
            merge(self.since_last_line, {name: (reduce, weighted(value, counts, reduce))})

    def close_update(self, applied: bool, update: Any, **values: float | torch.Tensor) -> None:
        """Keeps the values of an update that was applied, and drops those of a skipped one.

        `values` are those of this update alone, such as `grad_norm`; its loss scale is one, too.
        """
        if applied:
            merge(self.since_last_line, self.pending)
            self.last_update = {name: float(value) for name, value in values.items()}
            if update.loss_scale is not None:
                self.last_update["loss_scale"] = update.loss_scale
        self.pending = {}
        if self.recorder is not None:
            self.recorder.close_update(applied)

    def reduce_and_reset(self) -> dict[str, float]:
        """Returns the means over all processes, by one collective, and forgets them.

        A tag under which nothing counted is left out. If there is a `loss`, the values of the last
        applied update are among them. All processes must call it.
        """
        # An evaluation has left its sums there; in training `close_update` has emptied it.
        merge(self.since_last_line, self.pending)
        sums, self.since_last_line, self.pending = self.since_last_line, {}, {}
        if self.recorder is not None:
            self.recorder.close_update(applied=True)  # of an evaluation, or at the end
        if not sums:
            return {}
        mine = torch.stack([numbers for _, numbers in sums.values()])  # [tags, 2]
        everyone = self.accelerator.gather(mine[None])  # [processes, tags, 2]
        numbers, weights = everyone.unbind(-1)
        weight = weights.sum(0)
        # All three are computed for each tag, and read at once: a GPU waits at each reading.
        table = torch.stack([weight, numbers.sum(0) / weight, numbers.amin(0), numbers.amax(0)], 1)
        values = {}
        for (name, (reduce, _)), row in zip(sums.items(), table.tolist()):
            total_weight, mean, least, greatest = row
            if total_weight > 0:
                values[name] = {"mean": mean, "min": least, "max": greatest}[reduce]
        if "loss" not in values:
            return values
        return {"loss": values.pop("loss"), **self.last_update, **values}

    def state(self) -> dict[str, list]:
        """Returns the open sums of this process for a checkpoint; `load_state` takes them over."""
        return {
            name: [reduce, *numbers.tolist()]
            for name, (reduce, numbers) in self.since_last_line.items()
        }

    def load_state(self, state: dict[str, list]) -> None:
        for name, (reduce, *numbers) in state.items():
            tensor = torch.tensor(numbers, dtype=torch.float64, device=self.accelerator.device)
            self.since_last_line[name] = (reduce, tensor)


class Flop(NamedTuple):
    """What `perf/mfu` needs to know of a model and of the GPU that computes it."""

    per_token: float  # operations for a token that is read, forward and backward
    per_target: float  # and for one whose log-prob is computed
    peak: float | None  # operations a second at most; None: not known, so no MFU
