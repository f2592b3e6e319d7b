"""Log-probabilities of chosen positions, without a `[batch, length, vocabulary]` tensor, inside the prepared module's forward."""

import sys

import torch
from torch import nn

CHUNK_ELEMENTS = 2**24  # logits held at once, in elements: 64 MiB in fp32


class ChunkedLogProbs(torch.autograd.Function):
    """log-softmax of `hidden @ weight.T`, gathered at the targets, some positions at a time, in fp32.

    The logits are computed again in the backward pass, so the memory it needs is constant. Under half precision the
    product is half, everything after it fp32.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, multiplier: float, softcap: float, entropy: bool):
        """Args: hidden `[n, h]`, weight `[v, h]`, bias `[v]` or None, targets `[n]`; the architecture's logits are
        `softcap * tanh(multiplier * raw / softcap)`. Returns fp32 `[n]` each: log-prob of the target, mean of the
        logits over the vocabulary, 1.0 where the target is the most probable token, and, if asked for, the entropy."""
        device = hidden.device.type
        # A custom function is not autocast by itself, and its backward runs outside of the context.
        half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.dtype = torch.float32 if device == "cpu" else half  # a CPU has no fast half product: fp32 is better and faster
        ctx.multiplier, ctx.softcap = multiplier, softcap
        ctx.chunk = max(1, CHUNK_ELEMENTS // weight.shape[0])
        ctx.save_for_backward(hidden, weight, bias, targets)
        logps, means, correct, entropies = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(4))
        matrix = weight.to(ctx.dtype)
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = logits_of(ctx, hidden[part], matrix, bias)
            chosen = logits.gather(1, targets[part, None]).squeeze(1)
            logps[part] = chosen - logits.logsumexp(-1)
            means[part] = logits.mean(-1)
            correct[part] = (logits.argmax(-1) == targets[part]).float()
            if entropy:
                entropies[part] = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
        ctx.mark_non_differentiable(means, correct, entropies)
        return logps, means, correct, entropies

    @staticmethod
    def backward(ctx, grad_logps, *_):
        hidden, weight, bias, targets = ctx.saved_tensors
        matrix = weight.to(ctx.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = logits_of(ctx, hidden[part], matrix, bias)
            # d logp / d logits = one-hot(target) - softmax(logits)
            grad = logits.softmax(-1).neg_()
            grad.scatter_add_(1, targets[part, None], torch.ones_like(grad[:, :1]))
            grad *= grad_logps[part, None]
            if ctx.softcap:
                grad *= 1 - (logits / ctx.softcap) ** 2
            grad *= ctx.multiplier
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(ctx.dtype)
            grad_hidden[part] = (grad @ matrix).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part].to(ctx.dtype)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def logits_of(ctx, hidden, matrix, bias) -> torch.Tensor:
    """fp32 logits `[n, v]` of some positions."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = (hidden.to(ctx.dtype) @ matrix.T).float()
    logits = logits if bias is None else logits + bias.float()
    logits = logits if ctx.multiplier == 1.0 else logits * ctx.multiplier
    return ctx.softcap * torch.tanh(logits / ctx.softcap) if ctx.softcap else logits


class ScoringHead(nn.Linear):
    """A model's output layer that, given targets, returns their log-probs and no logits.

    It is called as the module it is, once a forward, so that ZeRO-3 gathers its weight once and on every rank alike.
    """

    def forward(self, hidden, targets=None, multiplier: float = 1.0, softcap: float = 0.0, entropy: bool = False):
        if targets is None:
            return super().forward(hidden)
        return ChunkedLogProbs.apply(hidden, self.weight, self.bias, targets, multiplier, softcap, entropy)


class ScoreHead(nn.Linear):
    """A reward model's or critic's output layer, in fp32 whatever the model computes in: half precision would round the scores."""

    def forward(self, hidden):
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.weight.float(), None if self.bias is None else self.bias.float())


class Wrapper(nn.Module):
    """What the engine prepares, around a `transformers` model that is trained or read: its `model`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.config = model, model.config
        # What FSDP2 asks for: where to cut, and what is tied.
        self._no_split_modules, self.tie_weights = model._no_split_modules, model.tie_weights
        self.get_input_embeddings, self.get_output_embeddings = model.get_input_embeddings, model.get_output_embeddings


class ScoreModel(Wrapper):
    """A sequence classifier with one label, see `load_score_model`."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        model.score.__class__ = ScoreHead

    def forward(self, input_ids, **sharing) -> torch.Tensor:
        """fp32 `[rows, length]`: the score of each row up to and including that token. Padding on the right changes none of them.

        Args:
            sharing: `position_ids` and `attention_mask` of `pad_shared`.
        """
        return self.model.score(self.model.base_model(input_ids=input_ids, use_cache=False, **sharing).last_hidden_state).squeeze(-1)


class LogProbModel(Wrapper):
    """A causal language model whose forward returns log-probs of the positions asked for: train and prepare this one.

    The backbone runs on the whole sequence, the head on the asked positions only. Rows are padded on the right, which under
    causal attention needs no mask: no real token sees a token to its right.
    """

    def __init__(self, model: nn.Module):
        super().__init__(model)
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            sys.exit(f"{type(model).__name__}: the output layer is {type(head).__name__}, only a plain nn.Linear is supported")  # fmt: skip
        head.__class__ = ScoringHead  # same parameters and names: saving and generation do not notice
        text = model.config.get_text_config()
        self.softcap = getattr(text, "final_logit_softcapping", None) or 0.0  # Gemma
        self.multiplier = getattr(text, "logit_scale", None) or 1.0  # Cohere
        self.multiplier /= getattr(text, "logits_scaling", None) or 1.0  # Granite

    def forward(self, input_ids, scored, temperature: float = 1.0, entropy: bool = False, check: bool = False):
        """Scores the tokens where `scored` is true.

        Args:
            input_ids: `[rows, length]`, padded on the right with any id.
            scored: bool `[rows, length]`; the first column must be false, nothing predicts it.
            temperature: the logits are divided by it.
            entropy: compute `entropy`, too.
            check: run the architecture's own forward too, for `check_logprobs`: adds `own_logps`.

        Returns:
            dict of fp32 `[rows, length - 1]`, entry t for token t + 1, zero where not scored:
            `logps`, `mean_logits` (over the vocabulary), `correct` (1.0 where the token is the most probable); `entropy` if asked for.
        """
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
        mask = scored[:, 1:]
        values = self.model.get_output_embeddings()(
            hidden[mask], input_ids[:, 1:][mask], self.multiplier / temperature, self.softcap / temperature, entropy
        )
        values = dict(zip(("logps", "mean_logits", "correct", *["entropy"] * entropy), values))
        if check:
            own = self.model(input_ids=input_ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
            values["own_logps"] = own.gather(2, input_ids[:, 1:, None]).squeeze(2)[mask]
        empty = hidden.new_zeros(mask.shape, dtype=torch.float32)
        return {name: empty.masked_scatter(mask, value) for name, value in values.items()}


@torch.no_grad()
def check_logprobs(prepared: nn.Module, ids: list[int], device, model_name: str) -> None:
    """Compares our log-probs with those of the architecture's own logits on one short row, inside the prepared forward. Leaves the
    model in evaluation mode.

    Raises:
        SystemExit: the architecture does something to its logits that `LogProbModel` does not know.
    """
    input_ids = torch.tensor([(ids * 2)[:16]], device=device)  # a prompt may be one token, which nothing predicts
    scored = torch.arange(input_ids.shape[1], device=device)[None] > 0
    prepared.eval()
    scores = prepared(input_ids, scored, check=True)
    worst = (scores["logps"] - scores["own_logps"]).abs().max().item()
    if not worst <= 0.01 * (1 + scores["own_logps"].abs().max().item()):
        sys.exit(f"{model_name}: its head's log-probs differ from its own logits' by {worst:.3g}: this architecture is not supported yet")
