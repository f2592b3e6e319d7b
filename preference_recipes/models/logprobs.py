"""A language model whose output is log-probabilities of given tokens instead of logits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from common import refuse
from preference_recipes.models import architecture

# Elements of logits that are held at once: 512 MiB in fp32.
CHUNK_ELEMENTS = 2**27
# Elements that one CPU thread turns into log-probs at once, so that they stay in its cache.
BLOCK_ELEMENTS = 2**18


# ============================================================ the model
class ModelWrapper(nn.Module):
    """The module that the engine prepares. Its `model` is a `transformers` model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        # FSDP2 asks where to cut and which weights are tied. It refuses the names of missing
        # modules, such as the parts of a text tower in Gemma 3's list.
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
        """Identifies the base models below adapters, which a checkpoint does not hold."""
        return {
            f"base {path}": model.fingerprint  # PPO's critic is `critic.model`
            for path, model in architecture.whole_models(self).items()
            if hasattr(model, "fingerprint")
        }


class LogProbModel(ModelWrapper):
    """A causal language model whose forward returns log-probs of the tokens asked for.

    The backbone runs on whole rows, the output layer only where a log-prob is asked for. Only the
    first `vocab_size` tokens have a probability. `LogProbJob` explains `multiplier` and `softcap`.
    """

    def __init__(self, model: nn.Module):
        super().__init__(model)
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            problem = f"the output layer is {type(head).__name__}, only nn.Linear is supported"
            refuse(f"{type(model).__name__}: {problem}")
        head.__class__ = LogProbHead  # parameters keep their names, so saving still works
        self.vocab_size = head.out_features
        self.multiplier, self.softcap = architecture.logits_formula(model)

    def forward(
        self,
        batch: dict,
        temperature: float = 1.0,
        extra_outputs: tuple[str, ...] = (),
        check: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Returns the log-probs of a batch's targets, `logps`, and the `EXTRA_OUTPUTS` asked for.

        They are fp32 `[answers, longest answer]`, zero where `batch["loss_mask"]` is false.

        Args:
            batch: from `Packer.make_batch`.
            temperature: the logits are divided by it.
            check: adds `own_logps`, computed by the architecture's own forward, for `checks`.
        """
        # From token ids `[rows, row length]` to the input of the output layer, `[targets, h]`: the
        # hidden state of the token before each target.
        hidden = architecture.hidden_states(self.model, batch["inputs"])
        hidden = hidden.index_select(0, batch["predictor_index"])
        # (softcap * tanh(multiplier * x / softcap)) / T is the same formula with both divided by T.
        formula = (self.multiplier / temperature, self.softcap / temperature)
        job = LogProbJob(batch["targets"], *formula, extra_outputs)

        # The values of a `log_softmax` of all logits, in less memory: fp32 `[targets]` each.
        compute = lambda *layer: ChunkedHead.apply(*layer, job)
        values = self.model.get_output_embeddings()(hidden, compute, self.vocab_size)
        outputs = dict(zip(("logps", *extra_outputs), values))
        if check:
            logits = self.model(**batch["inputs"], use_cache=False).logits.flatten(0, 1)
            all_logps = logits[batch["predictor_index"], : self.vocab_size].float().log_softmax(-1)
            outputs["own_logps"] = all_logps.gather(1, batch["targets"][:, None]).squeeze(1)
        return {name: scatter_to_answers(value, batch) for name, value in outputs.items()}


def scatter_to_answers(values: torch.Tensor, batch: dict) -> torch.Tensor:
    """Returns the values of targets, `[targets]`, as `[answers, longest]`, zero elsewhere.

    It needs no `masked_scatter`, whose backward pass makes the host wait for a GPU.
    """
    mask = batch["loss_mask"]
    zeros = values.new_zeros(mask.numel())
    return zeros.index_copy(0, batch["target_slots"], values).view(mask.shape)


# ============================================================ the output layer, by chunks
class ChunkedHead(torch.autograd.Function):
    """A fused linear layer and log-softmax, or another function of the logits that a job computes.

    autograd would keep all logits, so the backward pass is written by hand. The forward pass keeps
    the inputs, and the logits' gradient for the last chunk. The backward pass computes the other
    chunks again, and adds up the weight's gradient in one fp32 matrix.

    A job, such as `LogProbJob`, has the logits' `multiplier`. A chunk is a slice of positions:

        forward_chunk(chunk, hidden, matrix, bias)   the state: the logits, or whatever it needs
        outputs(chunk, state)       fp32 `[n]` each; the first one has a gradient
        logit_grads(chunk, state)   d output / d (multiplier * product), in the state's memory
        n_matrices                  how many matrices `[n, v]` a state holds
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, job):
        """Returns the job's outputs; hidden is `[n, h]`, weight `[v, h]`, bias `[v]` or None."""
        ctx.job = job
        ctx.dtype = product_dtype(hidden)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.last_chunk_grad = None
        matrix = weight.to(ctx.dtype)
        chunk_size = max(1, CHUNK_ELEMENTS // (len(weight) * job.n_matrices))
        # The last chunk is a full one, since it is not computed again.
        ends = range(max(1, len(hidden)), 0, -chunk_size)
        ctx.chunks = [slice(max(0, end - chunk_size), end) for end in reversed(ends)]
        outputs = []
        for chunk in ctx.chunks:
            state = job.forward_chunk(chunk, hidden[chunk], matrix, bias)
            outputs.append(job.outputs(chunk, state))
            if chunk is ctx.chunks[-1] and any(ctx.needs_input_grad):
                ctx.last_chunk_grad = job.logit_grads(chunk, state)
            del state  # only one chunk is held at a time
        first, *extras = map(torch.cat, zip(*outputs))
        ctx.mark_non_differentiable(*extras)
        return first, *extras

    @staticmethod
    def backward(ctx, grad_first, *_):
        """Returns the gradients of hidden states, weight and bias, as for any linear layer."""
        hidden, weight, bias = ctx.saved_tensors
        matrix = weight.to(ctx.dtype)
        grad_hidden = torch.empty_like(hidden)
        # Below adapters the layer is frozen, and its gradient would cost a product.
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)

        # The kept gradient is overwritten here. A second backward pass computes it again.
        grad = ctx.last_chunk_grad
        ctx.last_chunk_grad = None
        for chunk in reversed(ctx.chunks):
            if grad is None:
                state = ctx.job.forward_chunk(chunk, hidden[chunk], matrix, bias)
                grad = ctx.job.logit_grads(chunk, state)
            grad *= grad_first[chunk, None] * ctx.job.multiplier  # for `hidden @ weight.T + bias`
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(ctx.dtype)
            grad_hidden[chunk] = (grad @ matrix).to(hidden.dtype)
            if grad_weight is not None and ctx.dtype == torch.float32:
                # In place: the product of a chunk is as large as the weight itself.
                grad_weight.addmm_(grad.T, hidden[chunk].float())
            elif grad_weight is not None:
                grad_weight += grad.T @ hidden[chunk].to(ctx.dtype)
            grad = None
        # autograd casts each to the dtype of its input.
        return grad_hidden, grad_weight, grad_bias, None


@dataclass(frozen=True)
class LogProbJob:
    """Lets `ChunkedHead` return the targets' log-probs `[n]`, then `extra_outputs`.

    The logits are `softcap * tanh(multiplier * product / softcap)`; a softcap of 0 means none.
    """

    targets: torch.Tensor
    multiplier: float = 1.0
    softcap: float = 0.0
    extra_outputs: tuple[str, ...] = ()
    n_matrices: ClassVar[int] = 1

    def forward_chunk(self, chunk: slice, hidden, matrix, bias) -> torch.Tensor:
        """Returns the logits of a chunk, fp32 `[n, v]`."""
        logits = scaled_products(hidden, matrix, bias, self.multiplier)
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def outputs(self, chunk: slice, logits: torch.Tensor) -> list[torch.Tensor]:
        # Small tensors of each block, between the large ones, would fragment the memory.
        outputs = logits.new_empty(len(logits), 1 + len(self.extra_outputs))
        for block, targets, output_rows in blocks(logits, self.targets[chunk], outputs):
            # On a CPU this sums one number after the other: with 150,000 tokens a log-prob may be
            # 5e-5 too high. `logsumexp` sums more exactly, but is slower.
            all_logps = block.log_softmax(-1)
            output_rows[:, :1] = all_logps.gather(1, targets[:, None])
            for column, name in enumerate(self.extra_outputs, 1):
                output_rows[:, column] = EXTRA_OUTPUTS[name](block, all_logps, targets)
        return list(outputs.unbind(1))

    def logit_grads(self, chunk: slice, logits: torch.Tensor) -> torch.Tensor:
        for block, targets in blocks(logits, self.targets[chunk]):
            # d logp / d logits = one_hot(target) - softmax(logits)
            grads = block.log_softmax(-1).exp_().neg_()
            grads.scatter_add_(1, targets[:, None], torch.ones_like(grads[:, :1]))
            if self.softcap:
                # d tanh(x) / dx = 1 - tanh(x)^2, and tanh(x) = logits / softcap.
                grads *= 1 - (block / self.softcap) ** 2
            block.copy_(grads)
        return logits


def blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields views of a few rows of the tensors at a time, so that intermediates stay small."""
    on_cpu = tensors[0].device.type == "cpu"
    elements = BLOCK_ELEMENTS * torch.get_num_threads() if on_cpu else CHUNK_ELEMENTS // 8
    rows = max(1, elements // tensors[0].shape[1])
    return zip(*(tensor.split(rows) for tensor in tensors))


def product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Returns the precision of the output layer: autocast does not reach custom functions."""
    device = hidden.device.type
    if device == "cpu":
        return torch.float32  # CPUs multiply halves slowly: fp32 is more exact and faster
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
        else:  # exact, too: fp32 holds the product of two halves
            products = hidden.to(matrix.dtype).float() @ matrix.float().T
        if bias is not None:
            products += bias.float()
        if multiplier != 1.0:
            products *= multiplier
        return products


class LogProbHead(nn.Linear):
    """A model's output layer that can also pass its weights to a function, inside its own call.

    Under ZeRO-3 the weights are whole only there.
    """

    @torch.compiler.disable  # slower if compiled: once for each number of targets
    def forward(self, hidden, compute: Callable | None = None, vocab_size: int = 0):
        """Returns logits, or `compute(hidden, weight, bias)` for the first `vocab_size` tokens."""
        if compute is None:
            return super().forward(hidden)
        if vocab_size == self.out_features:
            return compute(hidden, self.weight, self.bias)
        bias = None if self.bias is None else self.bias[:vocab_size]
        return compute(hidden, self.weight[:vocab_size], bias)


# ============================================================ extra outputs
# Each function takes logits `[n, v]`, their log-softmax and the targets `[n]`, and returns `[n]`.
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
