"""Log-probabilities."""

import sys

import torch
from torch import nn

CHUNK_ELEMENTS = (
    2**27
)  # logits held at once, in elements: 512 MiB in fp32, and as much again for their log-softmax


EXTRAS = {  # what else may be asked of positions: of their logits, the log-softmax of these, and the targets
    "mean_logits": lambda logits, logps, targets: logits.mean(
        -1, dtype=torch.float32
    ),  # over the vocabulary
    "correct": lambda logits, logps, targets: (
        logits.argmax(-1) == targets
    ).float(),  # 1.0 where the target is the most probable token
    "entropy": lambda logits, logps, targets: -logps.exp().mul_(logps).sum(-1),
}


class ChunkedLogProbs(torch.autograd.Function):
    """log-softmax of `hidden @ weight.T`, gathered at the targets, some positions at a time, in fp32.

    The logits are computed again in the backward pass but for the last of them, so the memory it needs is constant. Under half
    precision the product is half, everything after it fp32.
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
        """Args: hidden `[n, h]`, weight `[v, h]`, bias `[v]` or None, targets `[n]`; the architecture's logits are
        `softcap * tanh(multiplier * raw / softcap)`. Returns fp32 `[n]` each: log-prob of the target, and the `EXTRAS` asked for."""
        device = hidden.device.type
        # A custom function is not autocast by itself, and its backward runs outside of the context.
        half = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        )
        ctx.dtype = (
            torch.float32 if device == "cpu" else half
        )  # a CPU has no fast half product: fp32 is better and faster
        ctx.multiplier, ctx.softcap, ctx.chunk = (
            multiplier,
            softcap,
            max(1, CHUNK_ELEMENTS // weight.shape[0]),
        )
        ctx.save_for_backward(hidden, weight, bias, targets)
        logps, *others = (
            hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(1 + len(extras))
        )
        matrix = weight.to(ctx.dtype)
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            ctx.kept = logits = all_logps = None  # the chunk before: one is held at a time
            logits, all_logps = logits_of(ctx, hidden[part], matrix, bias)
            logps[part] = all_logps.gather(1, targets[part, None]).squeeze(1)
            for name, values in zip(extras, others):
                values[part] = EXTRAS[name](logits, all_logps, targets[part])
            ctx.kept = {start: (logits if softcap else None, all_logps)}
        ctx.mark_non_differentiable(*others)
        return logps, *others

    @staticmethod
    def backward(ctx, grad_logps, *_):
        hidden, weight, bias, targets = ctx.saved_tensors
        matrix = weight.to(ctx.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for start in reversed(range(0, len(hidden), ctx.chunk)):
            part = slice(start, start + ctx.chunk)
            logits, all_logps = ctx.kept.pop(start, None) or logits_of(
                ctx, hidden[part], matrix, bias
            )
            # d logp / d logits = one-hot(target) - softmax(logits)
            grad = all_logps.exp_().scatter_add_(
                1, targets[part, None], -torch.ones_like(all_logps[:, :1])
            )
            grad *= grad_logps[part, None] * -ctx.multiplier
            if ctx.softcap:
                grad *= 1 - (logits / ctx.softcap) ** 2
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(ctx.dtype)
            grad_hidden[part] = (grad @ matrix).to(hidden.dtype)
            grad_weight += grad.T @ hidden[part].to(ctx.dtype)
            del logits, all_logps, grad
        return (
            grad_hidden,
            grad_weight,
            grad_bias,
            None,
            None,
            None,
            None,
        )  # autograd rounds to the dtype of each


def logits_of(ctx, hidden, matrix, bias) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[n, v]` of some positions, and their log-softmax in fp32."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = hidden.to(ctx.dtype) @ matrix.T
        logits = logits if bias is None else logits.float() + bias.float()
        logits = logits if ctx.multiplier == 1.0 else logits.float() * ctx.multiplier
        logits = ctx.softcap * torch.tanh(logits.float() / ctx.softcap) if ctx.softcap else logits
        return logits, logits.log_softmax(-1, dtype=torch.float32)


class LogProbHead(nn.Linear):
    """A model's output layer that, given targets, returns their log-probs and no logits.

    It is called as the module it is, once a forward, so that ZeRO-3 gathers its weight once and on every rank alike.
    """

    @torch.compiler.disable  # a program of its own for each number of targets would be slower
    def forward(
        self,
        hidden,
        targets=None,
        multiplier: float = 1.0,
        softcap: float = 0.0,
        extras: tuple[str, ...] = (),
    ):
        if targets is None:
            return super().forward(hidden)
        return ChunkedLogProbs.apply(
            hidden, self.weight, self.bias, targets, multiplier, softcap, extras
        )


class ScoreHead(nn.Linear):
    """A reward model's or critic's output layer, in fp32 whatever the model computes in: half precision would round the scores."""

    def forward(self, hidden):
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(
                hidden.float(),
                self.weight.float(),
                None if self.bias is None else self.bias.float(),
            )


class ModelWrapper(nn.Module):
    """What the engine prepares, around a `transformers` model that is trained or read: its `model`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.config = model, model.config
        # What FSDP2 asks for: where to cut, and what is tied.
        self._no_split_modules, self.tie_weights = model._no_split_modules, model.tie_weights
        self.get_input_embeddings, self.get_output_embeddings = (
            model.get_input_embeddings,
            model.get_output_embeddings,
        )


class ScoreModel(ModelWrapper):
    """A sequence classifier with one label, see `load_score_model`."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        model.score.__class__ = ScoreHead

    def forward(self, batch: dict, places: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 scores, of the shape of `places`, of what precedes and includes the tokens there; by default the `last` of `lay_out`."""
        hidden = self.model.base_model(
            **batch["inputs"], use_cache=False
        ).last_hidden_state.flatten(0, 1)
        return self.model.score(
            hidden.index_select(0, batch["last"] if places is None else places)
        ).squeeze(-1)


class LogProbModel(ModelWrapper):
    """A causal language model whose forward returns log-probs of the tokens asked for: train and prepare this one.

    The backbone runs on whole rows, the head on the asked positions only. Rows are padded on the right, which under
    causal attention needs no mask: no real token sees a token to its right.
    """

    def __init__(self, model: nn.Module):
        super().__init__(model)
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            sys.exit(
                f"{type(model).__name__}: the output layer is {type(head).__name__}, only a plain nn.Linear is supported"
            )
        head.__class__ = (
            LogProbHead  # same parameters and names: saving and generation do not notice
        )
        text = model.config.get_text_config()
        self.softcap = getattr(text, "final_logit_softcapping", None) or 0.0  # Gemma
        self.multiplier = (getattr(text, "logit_scale", None) or 1.0) / (
            getattr(text, "logits_scaling", None) or 1.0
        )  # Cohere; Granite

    def forward(
        self,
        batch: dict,
        temperature: float = 1.0,
        extras: tuple[str, ...] = (),
        check: bool = False,
    ) -> dict:
        """Scores the targets of `lay_out` where its mask is true.

        Args:
            temperature: the logits are divided by it.
            extras: names of `EXTRAS` to return as well.
            check: run the architecture's own forward too, for `check_logprobs`: adds `own_logps`.

        Returns:
            dict of fp32 `[answers, longest]`, zero where not scored: `logps`, and the extras.
        """
        hidden = (
            self.model.base_model(**batch["inputs"], use_cache=False)
            .last_hidden_state.flatten(0, 1)
            .index_select(0, batch["before"])
        )
        head, targets = self.model.get_output_embeddings(), batch["targets"]
        values = dict(
            zip(
                ("logps", *extras),
                head(
                    hidden,
                    targets,
                    self.multiplier / temperature,
                    self.softcap / temperature,
                    extras,
                ),
            )
        )
        if check:
            own = (
                self.model(**batch["inputs"], use_cache=False)
                .logits.flatten(0, 1)[batch["before"]]
                .float()
                .log_softmax(-1)
            )
            values["own_logps"] = own.gather(1, targets[:, None]).squeeze(1)
        empty = hidden.new_zeros(batch["mask"].shape, dtype=torch.float32)
        return {name: empty.masked_scatter(batch["mask"], value) for name, value in values.items()}
