"""Models whose output is log-probabilities of given tokens, or scores, instead of logits."""

import sys
from collections.abc import Callable

import torch
from torch import nn

from preference_recipes.models import architecture

# Logits held at once, in elements: 256 MiB in fp32, and as much again for their log-softmax.
CHUNK_ELEMENTS = 2**26


def mean_logits(logits, all_logps, targets) -> torch.Tensor:
    """Returns the mean of the logits over the vocabulary, fp32 `[n]`."""
    return logits.mean(-1, dtype=torch.float32)


def correct(logits, all_logps, targets) -> torch.Tensor:
    """Returns 1.0 where the target is the most probable token, fp32 `[n]`."""
    return (logits.argmax(-1) == targets).float()


def entropy(logits, all_logps, targets) -> torch.Tensor:
    """Returns the entropy of the distribution over the vocabulary, fp32 `[n]`."""
    return -all_logps.exp().mul_(all_logps).sum(-1)


def top_entropy(logits, all_logps, targets) -> torch.Tensor:
    """Returns the entropy among the 20 most probable tokens, as if there were no others, `[n]`."""
    top_logps = all_logps.topk(min(20, all_logps.shape[1])).values.log_softmax(-1)
    return entropy(logits, top_logps, targets)


# What else a caller may ask of positions. Each is given logits `[n, v]`, their log-softmax, and the
# targets `[n]`.
EXTRAS = {extra.__name__: extra for extra in (mean_logits, correct, entropy, top_entropy)}


class ChunkedLogProbs(torch.autograd.Function):
    """Log-probs of the targets under `softmax(hidden @ weight.T)`, a chunk of positions at a time.

    The logits of all positions are never held together. The forward pass keeps those of its last
    chunk only. The backward pass begins with that chunk and computes the others again. So the
    memory for logits does not grow with the number of positions.

    Under half precision the product is of halves. Its sums and everything after it are fp32.
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
        extras: tuple[str, ...],
    ):
        """Returns the log-prob of each target, and the extras.

        Args:
            hidden: `[n, h]`.
            weight: `[v, h]`.
            bias: `[v]` or None.
            targets: `[n]`.
            multiplier, softcap: the architecture's logits are
                `softcap * tanh(multiplier * raw / softcap)`; a softcap of 0 is none.
            extras: names of `EXTRAS`.

        Returns:
            fp32 `[n]` each: the log-probs, then the extras in their order.
        """
        ctx.dtype = product_dtype(hidden)
        ctx.multiplier = multiplier
        ctx.softcap = softcap
        ctx.vocabulary = weight.shape[0]
        ctx.chunk = max(1, CHUNK_ELEMENTS // ctx.vocabulary)
        ctx.save_for_backward(hidden, weight, bias, targets)

        logps = hidden.new_zeros(len(hidden), dtype=torch.float32)
        others = [torch.zeros_like(logps) for _ in extras]
        matrix = weight.to(ctx.dtype)
        ctx.kept = None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            ctx.kept = None  # frees the chunk before: only one is held at a time
            logits, all_logps = logits_of(
                hidden[part], matrix, bias, multiplier=multiplier, softcap=softcap
            )
            logps[part] = all_logps.gather(1, targets[part, None]).squeeze(1)
            for name, values in zip(extras, others):
                values[part] = EXTRAS[name](logits, all_logps, targets[part])
            # The gradient needs the logits themselves for the soft cap only.
            ctx.kept = (logits if softcap else None, all_logps)
            del logits, all_logps
        ctx.mark_non_differentiable(*others)
        return logps, *others

    @staticmethod
    def backward(ctx, grad_logps, *_):
        """Returns the gradients of hidden states, weight and bias."""
        return *head_gradients(ctx, grad_logps, gradient_of_logps), None, None, None, None


def gradient_of_logps(
    ctx, part: slice, matrix: torch.Tensor, kept: tuple | None, grad_logps: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of the products of some positions, see `head_gradients`."""
    hidden, _, bias, targets = ctx.saved_tensors
    if kept is None:
        kept = logits_of(hidden[part], matrix, bias, multiplier=ctx.multiplier, softcap=ctx.softcap)
    logits, all_logps = kept
    # d logp / d logits = one_hot(target) - softmax(logits). Its negative is made here, in the
    # memory of the log-softmax. The minus before the multiplier turns the sign.
    minus_one = -torch.ones_like(all_logps[:, :1])
    grad = all_logps.exp_().scatter_add_(1, targets[part, None], minus_one)
    grad *= grad_logps * -ctx.multiplier
    if ctx.softcap:
        # d tanh(x) / dx = 1 - tanh(x)^2, and tanh(x) = logits / softcap.
        grad *= 1 - (logits / ctx.softcap) ** 2
    return grad


def head_gradients(ctx, grad_outputs: torch.Tensor, gradient_of_products: Callable) -> tuple:
    """Returns the gradients of hidden states, weight and bias, summed over chunks in fp32.

    Args:
        ctx: of a function that reads hidden states a chunk of positions at a time. `ctx.kept` is
            what its forward pass kept of the last chunk.
        grad_outputs: the gradient of what the function returned, `[n]`.
        gradient_of_products: returns fp32 `[chunk, v]` of the context, the chunk, the weight, what
            was kept or None, and the chunk's `grad_outputs`, `[chunk, 1]`.
    """
    hidden, weight, bias, _ = ctx.saved_tensors
    rows = slice(ctx.vocabulary)
    matrix = weight[rows].to(ctx.dtype)
    grad_hidden = torch.empty_like(hidden)
    # Below adapters the layer is frozen, and its gradient would cost a product.
    grad_weight = None
    if ctx.needs_input_grad[1]:
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
    grad_bias = None
    if bias is not None:
        grad_bias = torch.zeros_like(bias, dtype=torch.float32)

    # What the forward pass kept is overwritten here. A second backward pass computes it again.
    kept = ctx.kept
    ctx.kept = None
    for start in reversed(range(0, len(hidden), ctx.chunk)):
        part = slice(start, start + ctx.chunk)
        grad = gradient_of_products(ctx, part, matrix, kept, grad_outputs[part, None])
        kept = None
        if grad_bias is not None:
            grad_bias[rows] += grad.sum(0)
        grad = grad.to(ctx.dtype)
        grad_hidden[part] = (grad @ matrix).to(hidden.dtype)
        if grad_weight is not None and ctx.dtype == torch.float32:
            # In place: the product of a chunk is as large as the weight itself.
            grad_weight[rows].addmm_(grad.T, hidden[part].float())
        elif grad_weight is not None:
            grad_weight[rows] += grad.T @ hidden[part].to(ctx.dtype)
        del grad
    # autograd rounds each to the dtype of what it belongs to.
    return grad_hidden, grad_weight, grad_bias


def product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Returns the precision of the product of hidden states and output weights.

    autocast neither reaches into a custom function by itself, nor into its backward pass, so the
    precision is decided here.
    """
    device = hidden.device.type
    if device == "cpu":
        return torch.float32  # a CPU has no fast half product: fp32 is better and faster
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def logits_of(
    hidden, matrix, bias, multiplier: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits of some positions, and their log-softmax, fp32 `[n, v]` each."""
    logits = scaled_products(hidden, matrix, bias, multiplier)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    # On a CPU torch adds up a row number by number: with a vocabulary of 150,000 a log-prob can
    # be 5e-5 too high. `logsumexp` adds up better, and the head would be 10 to 18 % slower.
    return logits, logits.log_softmax(-1)


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


def by_answer(values: torch.Tensor, batch: dict) -> torch.Tensor:
    """Returns values of targets, `[targets]`, as `[answers, longest]`, zero where there is none.

    The host knows the cells, so it waits for no GPU. `masked_scatter` with the mask of the batch
    gives the same, but its backward pass waits.

    Args:
        batch: of `Packer.make_batch`.
    """
    mask = batch["mask"]
    empty = values.new_zeros(mask.numel())
    return empty.index_copy(0, batch["cells"], values).view(mask.shape)


class LogProbHead(nn.Linear):
    """A model's output layer that, given targets, returns their log-probs and no logits.

    It is called as the module that it is, once in a forward pass. So ZeRO-3 gathers its weight
    once, and on every process alike.
    """

    @torch.compiler.disable  # compiled once for each number of targets, it would be slower
    def forward(
        self,
        hidden,
        targets=None,
        multiplier: float = 1.0,
        softcap: float = 0.0,
        extras: tuple[str, ...] = (),
    ):
        """Returns logits, or, given targets, what `ChunkedLogProbs.forward` returns."""
        if targets is None:
            return super().forward(hidden)
        return ChunkedLogProbs.apply(
            hidden, self.weight, self.bias, targets, multiplier, softcap, extras
        )


class ScoreHead(nn.Linear):
    """A reward model's or critic's output layer, in fp32 whatever the model computes in.

    Half precision would round the scores.
    """

    def forward(self, hidden):
        """Returns fp32 scores `[n, 1]` of hidden states `[n, h]`."""
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.weight.float(), bias)


class ModelWrapper(nn.Module):
    """What the engine prepares: a module around a `transformers` model, which is its `model`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.config = model.config
        architecture.backbone_of(model)  # refuses a model without one
        # What FSDP2 asks for: where to cut, and which weights are tied. It refuses names of modules
        # that are not there, such as the parts of a text tower in Gemma 3's list.
        classes = {type(module).__name__ for module in model.modules()}
        self._no_split_modules = sorted(classes & set(model._no_split_modules or []))
        self.tie_weights = model.tie_weights
        self.get_input_embeddings = model.get_input_embeddings
        self.get_output_embeddings = model.get_output_embeddings


class ScoreModel(ModelWrapper):
    """A sequence classifier with one label whose forward returns scores; see `load.score_model`."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        model.score.__class__ = ScoreHead  # same parameters and names: saving does not notice

    def forward(self, batch: dict, places: torch.Tensor | None = None) -> torch.Tensor:
        """Scores what ends with certain tokens.

        Args:
            batch: of `Packer.make_batch`.
            places: of these tokens, counted through the rows one after the other; by default the
                last token of each answer.

        Returns:
            fp32 scores, of the shape of `places`.
        """
        if places is None:
            places = batch["last"]
        hidden = architecture.hidden_states(self.model, batch["inputs"])
        return self.model.score(hidden.index_select(0, places)).squeeze(-1)


class LogProbModel(ModelWrapper):
    """A causal language model whose forward returns log-probs of the tokens asked for.

    This is the model to train and prepare. The backbone runs on whole rows, the head on the asked
    positions only. Rows are padded on the right. Under causal attention that needs no mask: no real
    token sees a token to its right.
    """

    def __init__(self, model: nn.Module):
        super().__init__(model)
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            sys.exit(
                f"{type(model).__name__}: the output layer is {type(head).__name__}, "
                "only a plain nn.Linear is supported"
            )
        # Same parameters and names: saving and generation do not notice.
        head.__class__ = LogProbHead
        self.vocabulary = head.out_features  # the tokens that have a probability, from the first
        self.multiplier, self.softcap = architecture.logits_formula(model)

    def forward(
        self,
        batch: dict,
        temperature: float = 1.0,
        extras: tuple[str, ...] = (),
        check: bool = False,
    ) -> dict:
        """Returns the log-probs of the targets of a batch.

        Args:
            batch: of `Packer.make_batch`.
            temperature: the logits are divided by it.
            extras: names of `EXTRAS` to return as well.
            check: run the architecture's own forward too, for `checks.check_logprobs`; this adds
                `own_logps`, and `is_fp32`: 1 where both were computed in fp32.

        Returns:
            dict of fp32 `[answers, longest]`: `logps`, and the extras. They are zero where
            `batch["mask"]` is false.
        """
        hidden = architecture.hidden_states(self.model, batch["inputs"])
        hidden = hidden.index_select(0, batch["predictors"])
        head = self.model.get_output_embeddings()
        # (softcap * tanh(multiplier * x / softcap)) / T is the same formula with both divided by T.
        values = head(
            hidden,
            batch["targets"],
            multiplier=self.multiplier / temperature,
            softcap=self.softcap / temperature,
            extras=extras,
        )
        by_name = dict(zip(("logps", *extras), values))
        if check:
            by_name["own_logps"] = self.own_logps(batch)
            is_fp32 = not torch.is_autocast_enabled(hidden.device.type)
            is_fp32 = is_fp32 and hidden.dtype == head.weight.dtype == torch.float32
            by_name["is_fp32"] = torch.full_like(by_name["own_logps"], float(is_fp32))
        return {name: by_answer(value, batch) for name, value in by_name.items()}

    def own_logps(self, batch: dict) -> torch.Tensor:
        """Returns log-probs `[targets]` from the logits of the architecture's own forward."""
        logits = self.model(**batch["inputs"], use_cache=False).logits
        logits = logits.flatten(0, 1)[batch["predictors"], : self.vocabulary].float()
        return logits.log_softmax(-1).gather(1, batch["targets"][:, None]).squeeze(1)


class ActorCritic(LogProbModel):
    """Actor (`model`) and critic in one module.

    So there is one engine, one backward pass and one checkpoint under every strategy.
    """

    def __init__(self, policy_model, critic):
        super().__init__(policy_model)
        self.critic = ScoreModel(critic)
        # FSDP2 gathers the critic by itself, so that it stays in shards while the actor generates.
        units = {*self._no_split_modules, *self.critic._no_split_modules, "ScoreModel"}
        self._no_split_modules = sorted(units)

    def forward(
        self,
        batch: dict,
        temperature: float = 1.0,
        extras: tuple[str, ...] = (),
        check: bool = False,
        with_values: bool = True,
    ) -> dict:
        """Returns what `LogProbModel.forward` does, and `values`.

        The value of a token is that of the state in which it was chosen: the text before it.

        Args:
            with_values: without them the critic does not run.
        """
        output = super().forward(batch, temperature, extras, check)
        if not with_values:
            return output
        values = self.critic(batch, batch["predictors"])
        output["values"] = by_answer(values, batch)
        return output
