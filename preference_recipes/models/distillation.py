"""A student that learns from what teachers say of each next token, and what they say.

The formula is a recipe's, see `compare` and `gradient` in recipes/distill.py: functions of both
models' log-probs of all tokens. They are called for a chunk of positions at a time, inside the
student's own forward and backward pass, so that no table of all of them is ever held.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from common import zero
from preference_recipes.models import architecture
from preference_recipes.models.logprobs import (
    ByChunks,
    LogProbModel,
    blocks,
    product_dtype,
    scaled_products,
    scatter_to_answers,
)


@dataclass(frozen=True)
class Head:
    """An output layer: `softcap * tanh(multiplier * (hidden @ weight.T + bias) / softcap)`.

    The weight is `[v, h]`, the bias `[v]`. It is no tuple, whose tensors FSDP2 would round.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    multiplier: float = 1.0
    softcap: float = 0.0

    def logps(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns log-probs of all tokens and the slope of the soft cap, if any; fp32 `[n, v]`."""
        logits = scaled_products(hidden, self.weight, self.bias, self.multiplier)
        slope = None
        if self.softcap:
            capped = torch.tanh(logits / self.softcap)
            logits = self.softcap * capped
            slope = 1 - capped**2
        # On a CPU `log_softmax` adds up a row number by number. Over a vocabulary of 150,000 its
        # sum would be off by more than a small divergence.
        for (block,) in blocks(logits):
            block -= block.logsumexp(-1, keepdim=True)
        return logits, slope


@dataclass(frozen=True)
class TeacherOutput:
    """What a teacher says at some targets of a batch."""

    hidden: torch.Tensor  # what its output layer reads before each of them, `[n, h]`
    head: Head  # its output layer, whole
    places: torch.Tensor  # which of the batch's targets these are, int64 `[n]`

    def read(self, part: slice, student: torch.Tensor) -> torch.Tensor:
        """Returns log-probs of all tokens at a part of the places, fp32 `[n, v]`."""
        weight = self.head.weight.to(product_dtype(self.hidden))
        teacher, _ = replace(self.head, weight=weight).logps(self.hidden[part])
        return teacher

    def known(self, part: slice, student: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns values of `compare` that what `read` returns does not tell, by name."""
        return {}


@dataclass(frozen=True)
class TopKTeacherOutput:
    """What is known of a teacher elsewhere: the log-probs of its k most probable tokens.

    All other tokens count as one. The divergence of such coarser distributions is at least 0, and
    at most that over all tokens (the data processing inequality). `read` divides the teacher's rest
    as the student does, so the divergence over all tokens, and its gradient, are the coarser ones.
    """

    ids: torch.Tensor  # of these tokens, the most probable first, int64 `[n, k]`
    logps: torch.Tensor  # of these tokens, fp32 `[n, k]`
    target_logps: torch.Tensor  # of the targets, fp32 `[n]`
    places: torch.Tensor  # see `TeacherOutput`

    def read(self, part: slice, student: torch.Tensor) -> torch.Tensor:
        ids = self.ids[part]
        own_rest = student.scatter(1, ids, -math.inf).logsumexp(-1, keepdim=True)
        teacher = student + (self.rest(part) - own_rest)
        return teacher.scatter_(1, ids, self.logps[part])

    def rest(self, part: slice) -> torch.Tensor:
        """Returns the log-prob of all other tokens together: log(1 - exp(total)), `[n, 1]`."""
        total = self.logps[part].logsumexp(-1, keepdim=True)
        # A rest below the rounding of the total is not known: it is taken to be that.
        total = total.clamp(max=-torch.finfo(total.dtype).eps)
        # Each way is precise where the other one is not (Maechler 2012).
        of_small_total = total.exp().neg().log1p()
        return torch.where(total < -math.log(2), of_small_total, total.expm1().neg().log())

    def known(self, part: slice, student: torch.Tensor) -> dict[str, torch.Tensor]:
        # The entropy is the coarser distribution's.
        coarse = torch.cat([self.logps[part], self.rest(part)], 1)
        return {
            "teacher_entropy": -(coarse.exp() * coarse).sum(-1),
            "agreement": (student.argmax(-1) == self.ids[part, 0]).float(),
            "teacher_logps": self.target_logps[part],
        }


@dataclass
class TeachingJob:
    """The job of `ByChunks` whose values are what a recipe's `compare` returns, by `names`."""

    targets: torch.Tensor  # `[n]`
    multiplier: float  # the student's
    softcap: float
    output: TeacherOutput | TopKTeacherOutput  # about exactly these targets
    compare: Callable  # see `DistillModel.forward`
    gradient: Callable
    names: tuple[str, ...] = ()  # known once values were computed
    n_matrices: ClassVar[int] = 2

    def read(self, part: slice, hidden, matrix, bias) -> tuple:
        """Returns both models' log-probs of all tokens, and the steepness of the student's cap."""
        student, slope = Head(matrix, bias, self.multiplier, self.softcap).logps(hidden)
        return student, self.output.read(part, student), slope

    def values(self, part: slice, state: tuple) -> list[torch.Tensor]:
        student, teacher, _ = state
        rows = [self.compare(*each) for each in blocks(student, teacher, self.targets[part])]
        found = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        found |= self.output.known(part, student)
        self.names = tuple(found)
        return list(found.values())

    def slopes(self, part: slice, state: tuple) -> torch.Tensor:
        student, teacher, slope = state
        slopes = [] if slope is None else [slope]
        targets = self.targets[part]
        for s, t, chosen, *slope_of_block in blocks(student, teacher, targets, *slopes):
            grad = self.gradient(s, t, chosen)
            for steepness in slope_of_block:
                grad *= steepness
            s.copy_(grad)
        return student


# ============================================================ the model
class DistillModel(LogProbModel):
    """A causal language model that learns from teachers, or that is one.

    Only the first `vocabulary` tokens have a probability; None: as many as the output layer has.
    """

    def __init__(self, model: nn.Module, vocabulary: int | None = None):
        super().__init__(model)
        self.vocabulary = vocabulary or self.vocabulary

    def forward(
        self,
        batch: dict,
        temperature: float = 1.0,
        *args,
        as_teacher: bool = False,
        teacher_outputs: list[TeacherOutput | TopKTeacherOutput] | None = None,
        compare: Callable | None = None,
        gradient: Callable | None = None,
        **kwargs,
    ):
        """Returns what `LogProbModel.forward` does, or what one of these arguments asks for.

        A teacher gives hidden states, and its output layer once for all: with it a student computes
        the teacher's distribution, chunk by chunk, inside its own forward and backward pass.

        Args:
            as_teacher: returns what the output layer reads before each target, `[targets, h]`.
            teacher_outputs: one of each teacher; together they are about every target once. Then
                this returns what `compare` does, by name: fp32 `[answers, longest]`, zero where
                there is no target.
            compare: given the log-probs of all tokens of student and teacher, `[n, v]`, and the
                targets `[n]`; returns values by name, `[n]` each. The first has a gradient,
            gradient: which is this function's, by the student's logits, `[n, v]`; given the same.
        """
        if teacher_outputs is None and not as_teacher:
            return super().forward(batch, temperature, *args, **kwargs)
        states = architecture.hidden_states(self.model, batch["inputs"])
        states = states.index_select(0, batch["predictor_index"])
        if as_teacher:
            return states
        formula = (self.multiplier / temperature, self.softcap / temperature)

        def learn(hidden, weight, bias) -> dict[str, torch.Tensor]:
            results: dict[str, torch.Tensor] = {}
            for output in teacher_outputs:
                places = output.places
                targets = batch["targets"][places]
                job = TeachingJob(targets, *formula, output, compare, gradient)
                values = ByChunks.apply(hidden.index_select(0, places), weight, bias, job)
                for name, value in zip(job.names, values):
                    whole = results.get(name, value.new_zeros(len(batch["targets"])))
                    results[name] = whole.index_copy(0, places, value)
            return results

        values = self.model.get_output_embeddings()(states, learn, self.vocabulary)
        return {name: scatter_to_answers(value, batch) for name, value in values.items()}

    def whole_head(self, temperature: float) -> Head:
        """Returns the whole output layer, its logits divided by a temperature.

        All processes must call it.
        """
        layer = self.model.get_output_embeddings()
        bias = None if layer.bias is None else zero.whole(layer.bias)[: self.vocabulary]
        weight = zero.whole(layer.weight)[: self.vocabulary]
        return Head(weight, bias, self.multiplier / temperature, self.softcap / temperature)
