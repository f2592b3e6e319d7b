"""How far a student's distribution of each next token is from that of its teacher, exactly.

With s and t the student's and the teacher's probabilities of all tokens of the vocabulary, and the
mixture m = (1 - beta) s + beta t, the divergence at a position is

    beta = 0        KL(t || s), the forward KL
    beta = 1        KL(s || t), the reverse KL
    0 < beta < 1    beta KL(t || m) + (1 - beta) KL(s || m), the generalised Jensen-Shannon one

Source: Agarwal et al. 2023, arXiv:2306.13649 eq. 1. Of a teacher elsewhere only its most probable
tokens are known: see `TopLesson`.
"""

import math
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
    by_answer,
    product_dtype,
    scaled_products,
)

# What is computed of every position besides the divergence; see `compare`.
VALUES = (
    "reverse_kl",
    "forward_kl",
    "entropy",
    "teacher_entropy",
    "agreement",
    "logps",
    "teacher_logps",
)


@dataclass(frozen=True)
class Head:
    """An output layer: `softcap * tanh(multiplier * (hidden @ weight.T + bias) / softcap)`.

    The weight is `[v, h]`, the bias `[v]`. A tuple's tensors FSDP2 would round in a forward pass.
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
class Lesson:
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
        """Returns those of `VALUES` that what `read` returns does not tell."""
        return {}


@dataclass(frozen=True)
class TopLesson:
    """What is known of a teacher elsewhere: the log-probs of its k most probable tokens.

    All other tokens count as one. The divergence of such coarser distributions is at least 0, and
    at most that over all tokens (the data processing inequality). `read` divides the teacher's rest
    as the student does, so the divergence over all tokens, and its gradient, are the coarser ones.
    """

    ids: torch.Tensor  # of these tokens, the most probable first, int64 `[n, k]`
    logps: torch.Tensor  # of these tokens, fp32 `[n, k]`
    target_logps: torch.Tensor  # of the targets, fp32 `[n]`
    places: torch.Tensor  # see `Lesson`

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


# ============================================================ from log-probs to divergences
def compare(
    student: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor, beta: float | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the divergence at each position, and all `VALUES` by name, `[n]` each.

    Args:
        student, teacher: log-probs of all tokens, `[n, v]`.
        beta: None: in place of the divergence, the student's log-prob of the target.
    """
    p_student = student.exp()
    p_teacher = teacher.exp()
    gap = student - teacher
    values = {
        "reverse_kl": (p_student * gap).sum(-1),
        "forward_kl": -(p_teacher * gap).sum(-1),
        "entropy": -(p_student * student).sum(-1),
        "teacher_entropy": -(p_teacher * teacher).sum(-1),
        "agreement": (student.argmax(-1) == teacher.argmax(-1)).float(),
        "logps": student.gather(1, targets[:, None]).squeeze(1),
        "teacher_logps": teacher.gather(1, targets[:, None]).squeeze(1),
    }
    known: dict[float | None, str] = {None: "logps", 0: "forward_kl", 1: "reverse_kl"}
    if beta in known:
        return values[known[beta]], values
    student_gap, teacher_gap = gaps_to_mixture(gap, beta)
    divergence = beta * (p_teacher * teacher_gap).sum(-1)
    divergence += (1 - beta) * (p_student * student_gap).sum(-1)
    return divergence, values


def gaps_to_mixture(gap: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log s - log m and log t - log m, of log s - log t; all zero where s is t.

    Seen from the larger one nothing overflows: log m = log s + log(1 + beta (t/s - 1)).
    """
    share_of_smaller = torch.full_like(gap, 1 - beta).masked_fill_(gap > 0, beta)
    below_larger = torch.log1p(share_of_smaller * torch.expm1(-gap.abs()))
    return gap.clamp(max=0) - below_larger, -gap.clamp(min=0) - below_larger


def gradient(
    student: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor, beta: float | None
) -> torch.Tensor:
    """Returns the gradient of what `compare` returns first, of the student's logits, `[n, v]`."""
    p_student = student.exp()
    if beta is None:
        ones = torch.ones_like(p_student[:, :1])
        return p_student.neg_().scatter_add_(1, targets[:, None], ones)
    if beta == 0:
        return p_student.sub_(teacher.exp())
    gap = student - teacher
    if beta < 1:
        gap, _ = gaps_to_mixture(gap, beta)
    mean = (p_student * gap).sum(-1, keepdim=True)
    return gap.sub_(mean).mul_(p_student).mul_(1 if beta == 1 else 1 - beta)


@dataclass(frozen=True)
class Divergence:
    """The job of `ByChunks` whose values are what `compare` returns: one, then the `VALUES`."""

    targets: torch.Tensor  # `[n]`
    multiplier: float  # the student's
    softcap: float
    lesson: Lesson | TopLesson  # about exactly these targets
    beta: float | None
    n_matrices: ClassVar[int] = 2

    def read(self, part: slice, hidden, matrix, bias) -> tuple:
        """Returns both models' log-probs of all tokens, and the steepness of the student's cap."""
        student, slope = Head(matrix, bias, self.multiplier, self.softcap).logps(hidden)
        return student, self.lesson.read(part, student), slope

    def values(self, part: slice, state: tuple) -> list[torch.Tensor]:
        student, teacher, _ = state
        rows = []
        for s, t, targets in blocks(student, teacher, self.targets[part]):
            divergence, values = compare(s, t, targets, self.beta)
            rows.append([divergence, *map(values.get, VALUES)])
        found = dict(zip(("divergence", *VALUES), map(torch.cat, zip(*rows))))
        return list((found | self.lesson.known(part, student)).values())

    def slopes(self, part: slice, state: tuple) -> torch.Tensor:
        student, teacher, slope = state
        slopes = [] if slope is None else [slope]
        targets = self.targets[part]
        for s, t, chosen, *slope_of_block in blocks(student, teacher, targets, *slopes):
            grad = gradient(s, t, chosen, self.beta)
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
        lessons: list[Lesson | TopLesson] | None = None,
        beta: float | None = None,
        **kwargs,
    ):
        """Returns what `LogProbModel.forward` does, or what one of these arguments asks for.

        A teacher gives hidden states, and its output layer once for all: with it a student computes
        the teacher's distribution, chunk by chunk, inside its own forward and backward pass.

        Args:
            as_teacher: returns what the output layer reads before each target, `[targets, h]`.
            lessons: one of each teacher; together they are about every target once. Returns
                `VALUES` and, unless beta is None, `divergence` by name: fp32 `[answers, longest]`,
                zero where there is no target.
            beta: with lessons, see `compare`.
        """
        if lessons is None and not as_teacher:
            return super().forward(batch, temperature, *args, **kwargs)
        states = architecture.hidden_states(self.model, batch["inputs"])
        states = states.index_select(0, batch["predictors"])
        if as_teacher:
            return states
        name = "logps" if beta is None else "divergence"

        def learn(hidden, weight, bias) -> dict[str, torch.Tensor]:
            results: dict[str, torch.Tensor] = {}
            for lesson in lessons:
                places = lesson.places
                formula = (self.multiplier / temperature, self.softcap / temperature)
                job = Divergence(batch["targets"][places], *formula, lesson, beta)
                with_gradient, *others = ByChunks.apply(
                    hidden.index_select(0, places), weight, bias, job
                )
                values = {**dict(zip(VALUES, others)), name: with_gradient}
                for key, value in values.items():
                    whole = results.get(key, value.new_zeros(len(batch["targets"])))
                    results[key] = whole.index_copy(0, places, value)
            return results

        values = self.model.get_output_embeddings()(states, learn, self.vocabulary)
        return {key: by_answer(value, batch) for key, value in values.items()}

    def whole_head(self, temperature: float) -> Head:
        """Returns the whole output layer, its logits divided by a temperature, for `Lesson`s.

        All processes must call it.
        """
        layer = self.model.get_output_embeddings()
        bias = None if layer.bias is None else zero.whole(layer.bias)[: self.vocabulary]
        weight = zero.whole(layer.weight)[: self.vocabulary]
        return Head(weight, bias, self.multiplier / temperature, self.softcap / temperature)
