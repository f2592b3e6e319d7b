"""How far a student's distribution of each next token is from that of its teacher, exactly.

With s and t the student's and the teacher's probabilities of all tokens of the vocabulary, and the
mixture m = (1 - beta) s + beta t, the divergence at a position is

    beta = 0        KL(t || s), the forward KL
    beta = 1        KL(s || t), the reverse KL
    0 < beta < 1    beta KL(t || m) + (1 - beta) KL(s || m), the generalised Jensen-Shannon one

Source: Agarwal et al. 2023, arXiv:2306.13649 eq. 1. Towards both ends the third vanishes; divided
by beta, or by 1 - beta, it becomes the KL.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from common import zero
from preference_recipes.models import architecture
from preference_recipes.models.logprobs import (
    ChunkedLogProbs,
    LogProbHead,
    LogProbModel,
    by_answer,
    head_gradients,
    product_dtype,
    scaled_products,
)

# Logits of each model that are held at once, in elements: 256 MiB in fp32. What is made of them
# takes about six times as much on a GPU.
CHUNK_ELEMENTS = 2**26
# Logits that are compared at once on a CPU. What is made of them stays in its cache.
BLOCK_ELEMENTS = 2**18

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


# ============================================================ what both models give
@dataclass(frozen=True)
class Head:
    """An output layer: `softcap * tanh(multiplier * (hidden @ weight.T + bias) / softcap)`.

    It is not a tuple, because FSDP2 rounds the tensors in tuples that a forward pass is given.

    Attributes:
        weight: `[v, h]`.
        bias: `[v]` or None.
        softcap: 0 is none.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    multiplier: float = 1.0
    softcap: float = 0.0

    def at(self, temperature: float) -> "Head":
        """Returns the layer whose logits are divided by a temperature."""
        return replace(
            self, multiplier=self.multiplier / temperature, softcap=self.softcap / temperature
        )

    def cut(self, vocabulary: int) -> "Head":
        """Returns the layer for the first tokens of its vocabulary alone."""
        bias = None if self.bias is None else self.bias[:vocabulary]
        return replace(self, weight=self.weight[:vocabulary], bias=bias)

    def logps(
        self, hidden: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the log-probs of all tokens, and how steep the soft cap is at their logits.

        Args:
            hidden: `[n, h]`.
            dtype: of the product.

        Returns:
            fp32 `[n, v]` each; None where there is no soft cap.
        """
        logits = scaled_products(hidden, self.weight.to(dtype), self.bias, self.multiplier)
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


def blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields views of the same rows of some tensors; on a CPU of few rows at once, else of all.

    Args:
        tensors: `[n, v]`, the others `[n, ...]`.
    """
    rows, vocabulary = tensors[0].shape
    if tensors[0].device.type == "cpu":
        rows = max(1, BLOCK_ELEMENTS // vocabulary)
    yield from zip(*(tensor.split(rows) for tensor in tensors))


@dataclass(frozen=True)
class Lesson:
    """What a teacher says at some targets of a batch.

    Attributes:
        hidden: what its output layer reads before each of them, `[n, h]`.
        head: its output layer, whole.
        places: which of the batch's targets these are, int64 `[n]`; None: all.
    """

    hidden: torch.Tensor
    head: Head
    places: torch.Tensor | None = None


# ============================================================ from log-probs to divergences
def compare(
    student: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor, beta: float | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns the divergence at each position, and all `VALUES` by name, `[n]` each.

    Args:
        student, teacher: log-probs of all tokens, `[n, v]`.
        targets: `[n]`.
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
    if beta is None:
        return values["logps"], values
    if beta == 0:
        return values["forward_kl"], values
    if beta == 1:
        return values["reverse_kl"], values
    student_gap, teacher_gap = gaps_to_mixture(gap, beta)
    divergence = beta * (p_teacher * teacher_gap).sum(-1)
    divergence += (1 - beta) * (p_student * student_gap).sum(-1)
    return divergence, values


def gaps_to_mixture(gap: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns log s - log m and log t - log m, of log s - log t; all zero where s is t.

    The mixture is seen from the larger of both, so that nothing overflows: where s is larger,
    log m = log s + log(1 + beta (t/s - 1)).
    """
    share_of_smaller = torch.full_like(gap, 1 - beta).masked_fill_(gap > 0, beta)
    below_larger = torch.log1p(share_of_smaller * torch.expm1(-gap.abs()))
    return gap.clamp(max=0) - below_larger, -gap.clamp(min=0) - below_larger


def gradient(
    student: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor, beta: float | None
) -> torch.Tensor:
    """Returns the gradient of what `compare` returns first, of the student's logits, `[n, v]`.

    A shift of all logits of a position changes no probability, so each row adds up to zero.
    """
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


class ChunkedDivergence(torch.autograd.Function):
    """The divergence of a student from its teacher, a chunk of positions at a time.

    The logits of all positions are never held together, neither the student's nor the teacher's.
    The forward pass keeps the gradient of the logits of its last chunk only. The backward pass
    begins with that chunk and computes the others again. So the memory for logits grows neither
    with the number of positions nor with the vocabulary.
    """

    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        bias,
        targets,
        multiplier: float,
        softcap: float,
        lesson: Lesson,
        beta: float | None,
    ):
        """Returns what `compare` does: first what has a gradient, then the `VALUES`.

        Args:
            hidden: the student's, `[n, h]`.
            weight, bias, multiplier, softcap: of the student's output layer, see `Head`. It is cut
                to the vocabulary of the teacher's.
            targets: `[n]`.
            lesson: at exactly these positions.
            beta: see `compare`.

        Returns:
            fp32 `[n]` each. The first has a gradient, for the student alone.
        """
        ctx.vocabulary = len(lesson.head.weight)
        ctx.formula = dict(multiplier=multiplier, softcap=softcap)
        ctx.lesson = lesson
        ctx.beta = beta
        ctx.dtype = product_dtype(hidden)
        ctx.teacher_dtype = product_dtype(lesson.hidden)
        ctx.chunk = max(1, CHUNK_ELEMENTS // ctx.vocabulary)
        ctx.save_for_backward(hidden, weight, bias, targets)

        head = Head(weight, bias, **ctx.formula).cut(ctx.vocabulary)
        first = hidden.new_zeros(len(hidden), dtype=torch.float32)
        others = [torch.zeros_like(first) for _ in VALUES]
        ctx.kept = None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            student, teacher, slope = logps_of_both(ctx, head, hidden[part], part)
            results = [tensor[part] for tensor in (first, *others)]
            for s, t, chosen, *block in blocks(student, teacher, targets[part], *results):
                divergence, values = compare(s, t, chosen, beta)
                for result, value in zip(block, [divergence, *map(values.get, VALUES)]):
                    result.copy_(value)
            is_last = start + ctx.chunk >= len(hidden)
            if is_last and any(ctx.needs_input_grad):
                ctx.kept = gradient_of_logits(ctx, student, teacher, slope, targets[part])
            del student, teacher, slope
        ctx.mark_non_differentiable(*others)
        return first, *others

    @staticmethod
    def backward(ctx, grad_first, *_):
        """Returns the gradients of hidden states, weight and bias."""
        gradients = head_gradients(ctx, grad_first, gradient_of_divergence)
        return *gradients, None, None, None, None, None


def gradient_of_divergence(
    ctx, part: slice, matrix: torch.Tensor, kept: torch.Tensor | None, grad_first: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of the products of some positions, see `head_gradients`."""
    hidden, _, bias, targets = ctx.saved_tensors
    if kept is None:
        head = Head(matrix, bias, **ctx.formula).cut(ctx.vocabulary)
        both = logps_of_both(ctx, head, hidden[part], part)
        kept = gradient_of_logits(ctx, *both, targets[part])
    return kept.mul_(grad_first)


def logps_of_both(
    ctx, head: Head, hidden: torch.Tensor, part: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns the log-probs of the student and of the teacher at some positions.

    Returns:
        fp32 `[n, v]` each, and how steep the student's soft cap is, see `Head.logps`.
    """
    student, slope = head.logps(hidden, ctx.dtype)
    teacher, _ = ctx.lesson.head.logps(ctx.lesson.hidden[part], ctx.teacher_dtype)
    return student, teacher, slope


def gradient_of_logits(
    ctx, student: torch.Tensor, teacher: torch.Tensor, slope: torch.Tensor | None, targets
) -> torch.Tensor:
    """Returns the gradient of what the output layer's product gives, `[n, v]`, in `student`."""
    slopes = [] if slope is None else [slope]
    for s, t, chosen, *slope_of_block in blocks(student, teacher, targets, *slopes):
        grad = gradient(s, t, chosen, ctx.beta)
        for steepness in slope_of_block:
            grad *= steepness
        s.copy_(grad.mul_(ctx.formula["multiplier"]))
    return student


# ============================================================ the model
class DivergenceHead(LogProbHead):
    """An output layer that can also compare itself with those of teachers.

    It is called as the module that it is, once in a forward pass, see `LogProbHead`.

    Attributes:
        vocabulary: the number of tokens, from the first, that have a probability.
    """

    vocabulary: int

    @torch.compiler.disable  # see `LogProbHead`
    def forward(
        self,
        hidden,
        targets=None,
        multiplier: float = 1.0,
        softcap: float = 0.0,
        extras: tuple[str, ...] = (),
        lessons: list[Lesson] | None = None,
        beta: float | None = None,
    ):
        """Returns what `LogProbHead.forward` does, or, given lessons, values of targets by name.

        Args:
            lessons: one of each teacher; together they are about every target once.
            beta: see `compare`.

        Returns:
            given lessons: `VALUES` and, unless beta is None, `divergence`, fp32 `[targets]` each.
        """
        if targets is None:
            return super().forward(hidden)
        if lessons is None:
            head = Head(self.weight, self.bias).cut(self.vocabulary)
            return ChunkedLogProbs.apply(
                hidden, head.weight, head.bias, targets, multiplier, softcap, extras
            )
        results: dict[str, torch.Tensor] = {}
        for lesson in lessons:
            values = self.compare(hidden, targets, multiplier, softcap, lesson, beta)
            if lesson.places is None:
                return values
            for name, value in values.items():
                whole = results.get(name, value.new_zeros(len(targets)))
                results[name] = whole.index_copy(0, lesson.places, value)
        return results

    def compare(
        self,
        hidden,
        targets,
        multiplier: float,
        softcap: float,
        lesson: Lesson,
        beta: float | None,
    ) -> dict[str, torch.Tensor]:
        """Returns values of the targets of one lesson by name, see `forward`."""
        if lesson.places is not None:
            hidden = hidden.index_select(0, lesson.places)
            targets = targets.index_select(0, lesson.places)
        with_gradient, *others = ChunkedDivergence.apply(
            hidden, self.weight, self.bias, targets, multiplier, softcap, lesson, beta
        )
        name = "logps" if beta is None else "divergence"
        return {**dict(zip(VALUES, others)), name: with_gradient}


class DistillModel(LogProbModel):
    """A causal language model that learns from teachers, or that is one.

    Where the output layers of both are padded to different sizes, only the tokens that they have in
    common have a probability.

    Args:
        vocabulary: the number of these tokens; None: as many as the output layer has.
    """

    def __init__(self, model: nn.Module, vocabulary: int | None = None):
        super().__init__(model)
        head = model.get_output_embeddings()
        head.__class__ = DivergenceHead
        self.vocabulary = head.vocabulary = vocabulary or head.out_features

    def forward(
        self,
        batch: dict,
        temperature: float = 1.0,
        extras: tuple[str, ...] = (),
        check: bool = False,
        *,
        as_teacher: bool = False,
        lessons: list[Lesson] | None = None,
        beta: float | None = None,
    ):
        """Returns what `LogProbModel.forward` does, or what one of these arguments asks for.

        A teacher gives hidden states, and its output layer once for all: with it a student computes
        the teacher's distribution, chunk by chunk, inside its own forward and backward pass. Their
        log-probs would be as many numbers as all targets have tokens to choose from.

        Args:
            as_teacher: returns what the output layer reads before each target, `[targets, h]`.
            lessons: returns how the targets' distributions differ from those of teachers: a dict of
                fp32 `[answers, longest]`, see `DivergenceHead.forward`; zero where there is no
                target. Their temperature is part of their heads.
            beta: with lessons, see `compare`.
        """
        if lessons is None and not as_teacher:
            return super().forward(batch, temperature, extras, check)
        hidden = architecture.hidden_states(self.model, batch["inputs"])
        hidden = hidden.index_select(0, batch["predictors"])
        if as_teacher:
            return hidden
        values = self.model.get_output_embeddings()(
            hidden,
            batch["targets"],
            self.multiplier / temperature,
            self.softcap / temperature,
            lessons=lessons,
            beta=beta,
        )
        return {name: by_answer(value, batch) for name, value in values.items()}

    def whole_head(self) -> Head:
        """Returns the output layer, whole on every process, for `Lesson`s.

        It must be frozen: nothing updates what is returned. All processes must call it.
        """
        layer = self.model.get_output_embeddings()
        bias = None if layer.bias is None else zero.whole(layer.bias)
        head = Head(zero.whole(layer.weight), bias, self.multiplier, self.softcap)
        return head.cut(self.vocabulary)
