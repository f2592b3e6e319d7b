"""A student that learns from its teachers' distributions over the next token, and these.

The formula is a recipe's: `token_outputs` and `objective_gradient` in recipes/distill.py, functions
of both models' log-probs of all tokens. They are called for a chunk of positions at a time, inside
the student's own passes, so that the log-probs of all positions are never in memory.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from common import zero
from preference_recipes.models import architecture
from preference_recipes.models.logprobs import (
    ChunkedHead,
    LogProbModel,
    blocks,
    scaled_products,
    scatter_to_answers,
)


@dataclass(frozen=True)
class Head:
    """An output layer: `softcap * tanh(multiplier * (hidden @ weight.T + bias) / softcap)`.

    The weight is `[v, h]`, the bias `[v]`. It is no tuple, because FSDP2 rounds tensors in tuples.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    multiplier: float = 1.0
    softcap: float = 0.0

    def logps(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns log-probs of all tokens and the soft cap's derivative, if any; fp32 `[n, v]`."""
        logits = scaled_products(hidden, self.weight, self.bias, self.multiplier)
        cap_slope = None
        if self.softcap:
            capped = torch.tanh(logits / self.softcap)
            logits = self.softcap * capped
            cap_slope = 1 - capped**2
        # On a CPU `log_softmax` sums one number after the other. Over a vocabulary of 150,000 its
        # error would exceed a small divergence.
        for (block,) in blocks(logits):
            block -= block.logsumexp(-1, keepdim=True)
        return logits, cap_slope


@dataclass(frozen=True)
class TeacherOutput:
    """A teacher's distributions at some of a batch's targets."""

    hidden: torch.Tensor  # the input of its output layer before each target, `[n, h]`
    head: Head  # its output layer, whole
    target_index: torch.Tensor  # which of the batch's targets these are, int64 `[n]`

    def all_logps(self, chunk: slice, student_logps, dtype: torch.dtype) -> torch.Tensor:
        """Returns log-probs of all tokens at a chunk, fp32 `[n, v]`; products are of `dtype`."""
        head = replace(self.head, weight=self.head.weight.to(dtype))
        return head.logps(self.hidden[chunk])[0]

    def overrides(self, chunk: slice, student_logps: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns values that replace those which `token_outputs` makes of `all_logps`, by name."""
        return {}


@dataclass(frozen=True)
class TopKTeacherOutput:
    """A teacher of which only the log-probs of the k most probable tokens are known.

    All other tokens count as one. The divergence of such coarser distributions is at least 0, and
    at most that over all tokens (the data processing inequality). `all_logps` spreads the teacher's
    rest as the student does, so the divergence over all tokens and its gradient are the coarser's.
    """

    ids: torch.Tensor  # the top tokens, the most probable first, int64 `[n, k]`
    logps: torch.Tensor  # their log-probs, fp32 `[n, k]`
    target_logps: torch.Tensor  # the targets' log-probs, fp32 `[n]`
    target_index: torch.Tensor  # see `TeacherOutput`

    def all_logps(self, chunk: slice, student_logps, dtype: torch.dtype) -> torch.Tensor:
        ids = self.ids[chunk]
        student_rest = student_logps.scatter(1, ids, -math.inf).logsumexp(-1, keepdim=True)
        teacher_logps = student_logps + (self.rest(chunk) - student_rest)
        return teacher_logps.scatter_(1, ids, self.logps[chunk])

    def rest(self, chunk: slice) -> torch.Tensor:
        """Returns the log-prob of all other tokens together: log(1 - exp(total)), `[n, 1]`."""
        total = self.logps[chunk].logsumexp(-1, keepdim=True)
        # A rest below the rounding error of the total is unknown, and is set to that error.
        total = total.clamp(max=-torch.finfo(total.dtype).eps)
        # Each formula is precise where the other is not (Maechler 2012).
        for_small_total = total.exp().neg().log1p()
        return torch.where(total < -math.log(2), for_small_total, total.expm1().neg().log())

    def overrides(self, chunk: slice, student_logps: torch.Tensor) -> dict[str, torch.Tensor]:
        # The entropy is that of the coarser distribution.
        coarse = torch.cat([self.logps[chunk], self.rest(chunk)], 1)
        return {
            "teacher_entropy": -(coarse.exp() * coarse).sum(-1),
            "agreement": (student_logps.argmax(-1) == self.ids[chunk, 0]).float(),
            "teacher_logps": self.target_logps[chunk],
        }


@dataclass
class DistillJob:
    """Lets `ChunkedHead` return the values of a recipe's `token_outputs`; `names` are theirs."""

    targets: torch.Tensor  # `[n]`
    multiplier: float  # the student's
    softcap: float
    output: TeacherOutput | TopKTeacherOutput  # at exactly these targets
    token_outputs: Callable  # see `DistillModel.forward`
    objective_gradient: Callable
    names: tuple[str, ...] = ()  # filled in by `outputs`
    n_matrices: ClassVar[int] = 2

    def forward_chunk(self, chunk: slice, hidden, matrix, bias) -> tuple:
        """Returns both models' log-probs of all tokens, and the derivative of the student's cap."""
        student_logps, cap_slope = Head(matrix, bias, self.multiplier, self.softcap).logps(hidden)
        # Not the teacher's own precision: autocast does not reach a backward pass.
        teacher_logps = self.output.all_logps(chunk, student_logps, matrix.dtype)
        return student_logps, teacher_logps, cap_slope

    def outputs(self, chunk: slice, state: tuple) -> list[torch.Tensor]:
        student_logps, teacher_logps, _ = state
        inputs = (student_logps, teacher_logps, self.targets[chunk])
        parts = [self.token_outputs(*block) for block in blocks(*inputs)]
        outputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        outputs |= self.output.overrides(chunk, student_logps)
        self.names = tuple(outputs)
        return list(outputs.values())

    def logit_grads(self, chunk: slice, state: tuple) -> torch.Tensor:
        student_logps, teacher_logps, cap_slope = state
        for student_block, *others in blocks(student_logps, teacher_logps, self.targets[chunk]):
            student_block.copy_(self.objective_gradient(student_block, *others))
        if cap_slope is not None:
            student_logps *= cap_slope
        return student_logps


# ============================================================ the model
class DistillModel(LogProbModel):
    """A causal language model that learns from teachers, or that is one."""

    def forward(
        self,
        batch: dict,
        temperature: float = 1.0,
        *args,
        as_teacher: bool = False,
        teacher_outputs: list[TeacherOutput | TopKTeacherOutput] | None = None,
        token_outputs: Callable | None = None,
        objective_gradient: Callable | None = None,
        **kwargs,
    ):
        """Returns what `LogProbModel.forward` does, or what one of these arguments asks for.

        Args:
            as_teacher: returns the input of the output layer before each target, `[targets, h]`.
            teacher_outputs: one for each teacher; together they cover every target once. Then this
                returns what `token_outputs` does, by name: fp32 `[answers, longest]`, zero where
                there is no target.
            token_outputs: takes the log-probs of all tokens from student and teacher, `[n, v]`, and
                the targets `[n]`; returns values by name, `[n]`. Only the first has a gradient:
            objective_gradient: takes the same; returns it by the student's logits, `[n, v]`.
        """
        if teacher_outputs is None and not as_teacher:
            return super().forward(batch, temperature, *args, **kwargs)
        states = architecture.hidden_states(self.model, batch["inputs"])
        states = states.index_select(0, batch["predictor_index"])
        if as_teacher:
            return states
        formula = (self.multiplier / temperature, self.softcap / temperature)

        def learn(hidden, weight, bias) -> dict[str, torch.Tensor]:
            values_by_name: dict[str, torch.Tensor] = {}
            for output in teacher_outputs:
                target_index = output.target_index
                targets = batch["targets"][target_index]
                job = DistillJob(targets, *formula, output, token_outputs, objective_gradient)
                values = ChunkedHead.apply(hidden.index_select(0, target_index), weight, bias, job)
                for name, value in zip(job.names, values):
                    all_values = values_by_name.get(name, value.new_zeros(len(batch["targets"])))
                    values_by_name[name] = all_values.index_copy(0, target_index, value)
            return values_by_name

        values = self.model.get_output_embeddings()(states, learn, self.vocab_size)
        return {name: scatter_to_answers(value, batch) for name, value in values.items()}

    def whole_head(self, temperature: float) -> Head:
        """Returns the whole output layer at a temperature. All processes must call it."""
        layer = self.model.get_output_embeddings()
        bias = None if layer.bias is None else zero.whole(layer.bias)[: self.vocab_size]
        weight = zero.whole(layer.weight)[: self.vocab_size]
        return Head(weight, bias, self.multiplier / temperature, self.softcap / temperature)
