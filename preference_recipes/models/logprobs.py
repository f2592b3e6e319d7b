"""A language model whose output is log-probabilities of given tokens instead of logits.

`LogProbModel.forward` is the whole path; the output layer works by chunks of positions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from common import refuse
from preference_recipes.models import architecture

# Logits held at once, in elements: 512 MiB in fp32.
CHUNK_ELEMENTS = 2**27
# Those that a thread of a CPU turns into log-probs at once: they stay in its cache.
BLOCK_ELEMENTS = 2**18


# ============================================================ the model
class ModelWrapper(nn.Module):
    """What the engine prepares: a module around a `transformers` model, which is its `model`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        architecture.backbone_of(model)  # refuses a model without one
        # What FSDP2 asks for: where to cut, and which weights are tied. It refuses names of modules
        # that are not there, such as the parts of a text tower in Gemma 3's list.
        classes = {type(module).__name__ for module in model.modules()}
        self._no_split_modules = sorted(classes & set(model._no_split_modules or []))
        self.tie_weights = model.tie_weights
        self.get_input_embeddings = model.get_input_embeddings
        self.get_output_embeddings = model.get_output_embeddings

    @property
    def config(self):
        return self.model.config

    @property
    def fingerprints(self) -> dict[str, str]:
        """Identifies the bases below adapters, which a checkpoint does not hold."""
        found = {}
        for path, model in architecture.whole_models(self).items():
            if hasattr(model, "base_fingerprint"):
                part = path.rpartition(".")[0]  # PPO's critic is `critic.model`, the actor `model`
                found[f"base model of {part}" if part else "base model"] = model.base_fingerprint
        return found


class LogProbModel(ModelWrapper):
    """A causal language model whose forward returns log-probs of the tokens asked for.

    The backbone runs on whole rows, the output layer on the asked positions only. The first
    `vocabulary` tokens have a probability; `multiplier` and `softcap` are of `LogProbJob`.
    """

    def __init__(self, model: nn.Module):
        super().__init__(model)
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            found = f"the output layer is {type(head).__name__}, only nn.Linear is supported"
            refuse(f"{type(model).__name__}: {found}")
        head.__class__ = LogProbHead  # same parameters and names: saving does not notice
        self.vocabulary = head.out_features
        self.multiplier, self.softcap = architecture.logits_formula(model)

    def forward(
        self,
        batch: dict,
        temperature: float = 1.0,
        extra_outputs: tuple[str, ...] = (),
        check: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Returns the log-probs of a batch's targets, `logps`, and the `EXTRA_OUTPUTS` asked for.

        They are fp32 `[answers, longest answer]`, zero where `batch["mask"]` is false.

        Args:
            batch: of `Packer.make_batch`.
            temperature: the logits are divided by it.
            check: adds `own_logps`, by the architecture's own forward, for `checks`.
        """
        # From token ids `[rows, row length]` to what the output layer reads, `[targets, h]`: for
        # each target the state of the token before it.
        hidden = architecture.hidden_states(self.model, batch["inputs"])
        hidden = hidden.index_select(0, batch["predictor_index"])
        # (softcap * tanh(multiplier * x / softcap)) / T is the same formula with both divided by T.
        formula = (self.multiplier / temperature, self.softcap / temperature)
        job = LogProbJob(batch["targets"], *formula, extra_outputs)

        # As `log_softmax` of all logits, in less memory: fp32 `[targets]` each.
        by_chunks = lambda *layer: ByChunks.apply(*layer, job)
        values = self.model.get_output_embeddings()(hidden, by_chunks, self.vocabulary)
        named = dict(zip(("logps", *extra_outputs), values))
        if check:
            logits = self.model(**batch["inputs"], use_cache=False).logits.flatten(0, 1)
            all_logps = logits[batch["predictor_index"], : self.vocabulary].float().log_softmax(-1)
            named["own_logps"] = all_logps.gather(1, batch["targets"][:, None]).squeeze(1)
        return {name: scatter_to_answers(value, batch) for name, value in named.items()}


def scatter_to_answers(values: torch.Tensor, batch: dict) -> torch.Tensor:
    """Returns values of targets, `[targets]`, as `[answers, longest]`, zero where there is none.

    `target_slots` come from the CPU: the backward pass of `masked_scatter` would wait for a GPU.
    """
    mask = batch["mask"]
    empty = values.new_zeros(mask.numel())
    return empty.index_copy(0, batch["target_slots"], values).view(mask.shape)


# ============================================================ the output layer, by chunks
class ByChunks(torch.autograd.Function):
    """A linear layer, and what a job makes of its logits, such as log-probs: see `LogProbJob`.

    autograd would keep all logits. So the backward pass is written by hand: the forward pass keeps
    the inputs, and of the last chunk the gradient of its logits; the backward pass computes those
    of the other chunks again, and adds up the weight's gradient in one fp32 matrix.

    A job has the logits' `multiplier`, and works on a `part` of the positions, a slice:

        read(part, hidden, matrix, bias)   their state: the logits, or what else it needs
        values(part, state)                fp32 `[n]` each, of which the first has a gradient
        slopes(part, state)                d value / d (multiplier * product), in the state's memory
        n_matrices                         how many `[n, v]` a state holds
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, job):
        """Returns the job's values; hidden is `[n, h]`, weight `[v, h]`, bias `[v]` or None."""
        ctx.job = job
        ctx.dtype = product_dtype(hidden)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.kept = None
        matrix = weight.to(ctx.dtype)
        size = max(1, CHUNK_ELEMENTS // (len(weight) * job.n_matrices))
        # The last one is whole, since it is the one that is not computed again.
        ends = range(max(1, len(hidden)), 0, -size)
        ctx.chunks = [slice(max(0, end - size), end) for end in reversed(ends)]
        values = []
        for part in ctx.chunks:
            state = job.read(part, hidden[part], matrix, bias)
            values.append(job.values(part, state))
            if part is ctx.chunks[-1] and any(ctx.needs_input_grad):
                ctx.kept = job.slopes(part, state)
            del state  # only one chunk is held at a time
        first, *others = map(torch.cat, zip(*values))
        ctx.mark_non_differentiable(*others)
        return first, *others

    @staticmethod
    def backward(ctx, grad_first, *_):
        """Returns the gradients of hidden states, weight and bias, as of any linear layer."""
        hidden, weight, bias = ctx.saved_tensors
        matrix = weight.to(ctx.dtype)
        grad_hidden = torch.empty_like(hidden)
        # Below adapters the layer is frozen, and its gradient would cost a product.
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)

        # What the forward pass kept is overwritten here. A second backward pass computes it again.
        grad = ctx.kept
        ctx.kept = None
        for part in reversed(ctx.chunks):
            if grad is None:
                grad = ctx.job.slopes(part, ctx.job.read(part, hidden[part], matrix, bias))
            grad *= grad_first[part, None] * ctx.job.multiplier  # now of `hidden @ weight.T + bias`
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(ctx.dtype)
            grad_hidden[part] = (grad @ matrix).to(hidden.dtype)
            if grad_weight is not None and ctx.dtype == torch.float32:
                # In place: the product of a chunk is as large as the weight itself.
                grad_weight.addmm_(grad.T, hidden[part].float())
            elif grad_weight is not None:
                grad_weight += grad.T @ hidden[part].to(ctx.dtype)
            grad = None
        # autograd rounds each to the dtype of what it belongs to.
        return grad_hidden, grad_weight, grad_bias, None


@dataclass(frozen=True)
class LogProbJob:
    """The job of `ByChunks` whose values are the targets' log-probs `[n]`, then `extra_outputs`.

    The logits are `softcap * tanh(multiplier * product / softcap)`; a softcap of 0 is none.
    """

    targets: torch.Tensor
    multiplier: float = 1.0
    softcap: float = 0.0
    extra_outputs: tuple[str, ...] = ()
    n_matrices: ClassVar[int] = 1

    def read(self, part: slice, hidden, matrix, bias) -> torch.Tensor:
        """Returns the logits of a part, fp32 `[n, v]`."""
        logits = scaled_products(hidden, matrix, bias, self.multiplier)
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def values(self, part: slice, logits: torch.Tensor) -> list[torch.Tensor]:
        # Small tensors of each block would lie between the large ones, and split the memory up.
        found = logits.new_empty(len(logits), 1 + len(self.extra_outputs))
        for block, targets, row in blocks(logits, self.targets[part], found):
            # On a CPU a log-prob may be 5e-5 too high with 150,000 tokens: the sum is taken number
            # by number. `logsumexp` adds up better, and takes longer.
            all_logps = block.log_softmax(-1)
            row[:, :1] = all_logps.gather(1, targets[:, None])
            for place, name in enumerate(self.extra_outputs, 1):
                row[:, place] = EXTRA_OUTPUTS[name](block, all_logps, targets)
        return list(found.unbind(1))

    def slopes(self, part: slice, logits: torch.Tensor) -> torch.Tensor:
        for block, targets in blocks(logits, self.targets[part]):
            # d logp / d logits = one_hot(target) - softmax(logits)
            slopes = block.log_softmax(-1).exp_().neg_()
            slopes.scatter_add_(1, targets[:, None], torch.ones_like(slopes[:, :1]))
            if self.softcap:
                # d tanh(x) / dx = 1 - tanh(x)^2, and tanh(x) = logits / softcap.
                slopes *= 1 - (block / self.softcap) ** 2
            block.copy_(slopes)
        return logits


def blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields views of a few rows of some tensors at a time: what is made of them stays small."""
    on_cpu = tensors[0].device.type == "cpu"
    at_once = BLOCK_ELEMENTS * torch.get_num_threads() if on_cpu else CHUNK_ELEMENTS // 8
    rows = max(1, at_once // tensors[0].shape[1])
    return zip(*(tensor.split(rows) for tensor in tensors))


def product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Returns the precision of the output layer: autocast reaches into no custom function."""
    device = hidden.device.type
    if device == "cpu":
        return torch.float32  # a CPU has no fast half product: fp32 is better and faster
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def scaled_products(hidden, matrix, bias, multiplier: float) -> torch.Tensor:
    """Returns `multiplier * (hidden @ matrix.T + bias)` in fp32, `[n, v]`.

    Products of halves are added up in fp32, and are not rounded to half again: docs/fp16.md.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        if matrix.is_cuda and matrix.dtype != torch.float32:
            products = torch.mm(hidden.to(matrix.dtype), matrix.T, out_dtype=torch.float32)
        else:  # exact, too: a product of two halves is a number of fp32
            products = hidden.to(matrix.dtype).float() @ matrix.float().T
        if bias is not None:
            products += bias.float()
        if multiplier != 1.0:
            products *= multiplier
        return products


class LogProbHead(nn.Linear):
    """A model's output layer that also hands its weights to a function, inside its own call.

    Only there they are whole under ZeRO-3.
    """

    @torch.compiler.disable  # compiled once for each number of targets, it would be slower
    def forward(self, hidden, compute: Callable | None = None, vocabulary: int = 0):
        """Returns logits, or `compute(hidden, weight, bias)`, cut to so many tokens."""
        if compute is None:
            return super().forward(hidden)
        if vocabulary == self.out_features:
            return compute(hidden, self.weight, self.bias)
        bias = None if self.bias is None else self.bias[:vocabulary]
        return compute(hidden, self.weight[:vocabulary], bias)


# ============================================================ what else is said of a token
# Each function is given logits `[n, v]`, their log-softmax and the targets `[n]`; returns `[n]`.
def mean_logits(logits, all_logps, targets) -> torch.Tensor:
    """Returns the mean over the vocabulary."""
    return logits.mean(-1, dtype=torch.float32)


def correct(logits, all_logps, targets) -> torch.Tensor:
    """Returns 1.0 where the target is the most probable token."""
    return (logits.argmax(-1) == targets).float()


def entropy(logits, all_logps, targets) -> torch.Tensor:
    """Returns the entropy of the distribution over the vocabulary."""
    return -all_logps.exp().mul_(all_logps).sum(-1)


def top_entropy(logits, all_logps, targets) -> torch.Tensor:
    """Returns the entropy among the 20 most probable tokens, as if there were no others."""
    top_logps = all_logps.topk(min(20, all_logps.shape[1])).values.log_softmax(-1)
    return entropy(logits, top_logps, targets)


EXTRA_OUTPUTS = {extra.__name__: extra for extra in (mean_logits, correct, entropy, top_entropy)}
