"""Models that score: a reward model, or PPO's actor with its critic."""

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from common import print_once, refuse, zero
from preference_recipes.models import architecture, load
from preference_recipes.models.logprobs import LogProbModel, ModelWrapper, scatter_to_answers


class ScoreHead(nn.Linear):
    """A reward model's or critic's output layer, in fp32: half precision would round the scores."""

    def forward(self, hidden):
        """Returns fp32 scores `[n, 1]` of hidden states `[n, h]`."""
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.weight.float(), bias)


class ScoreModel(ModelWrapper):
    """A sequence classifier with one label whose forward returns scores; see `score_model`."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        model.score.__class__ = ScoreHead  # parameters keep their names, so saving still works

    def forward(self, batch: dict, token_index: torch.Tensor | None = None) -> torch.Tensor:
        """Returns fp32 scores of texts that end at these tokens, by default of the answers."""
        if token_index is None:
            token_index = batch["last_token_index"]
        hidden = architecture.hidden_states(self.model, batch["inputs"])
        return self.model.score(hidden.index_select(0, token_index)).squeeze(-1)


class ActorCritic(LogProbModel):
    """Actor (`model`) and critic in one module: one engine, one backward pass, one checkpoint."""

    def __init__(self, policy_model, critic):
        super().__init__(policy_model)
        self.critic = ScoreModel(critic)
        # FSDP2 gathers the critic separately, so that it stays sharded while the actor generates.
        units = {*self._no_split_modules, *self.critic._no_split_modules, "ScoreModel"}
        self._no_split_modules = sorted(units)

    def forward(self, batch: dict, *args, with_values: bool = True, **kwargs) -> dict:
        """Returns what `LogProbModel.forward` does and, unless told not to, `values`.

        A token's value is that of the state in which it was chosen: the text before it.
        """
        output = super().forward(batch, *args, **kwargs)
        if with_values:
            output["values"] = scatter_to_answers(
                self.critic(batch, batch["predictor_index"]), batch
            )
        return output


# ============================================================ loading
def score_model(name: str, tokenizer, args, frozen: bool = False) -> PreTrainedModel:
    """Loads a sequence classifier with one label in fp32: a reward model, or a critic.

    Args:
        tokenizer: the policy's, or that of `name` itself.
        frozen: see `load.causal_lm`. Otherwise a model without a score head gets a new one.
    """
    if load.load_tokenizer(name).get_vocab() != tokenizer.get_vocab():
        refuse(f"{name!r} has another tokenizer than {tokenizer.name_or_path!r}")
    model, missing, _ = load.load_model(
        AutoModelForSequenceClassification, name, args, frozen, num_labels=1
    )
    lacks_backbone = missing - {"score.weight"}
    if lacks_backbone or (missing and frozen):
        expected = "expected a reward model with one label, as recipes/reward.py saves it"
        refuse(f"{name!r} lacks weights, such as {min(missing)}: {expected}")
    if missing:
        print_once(f"{name!r} has no score head: a new one is drawn from the seed")
        draw_score_head(model)
    # transformers reads the score of the last token before the padding.
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model


def draw_score_head(model: PreTrainedModel) -> None:
    """Draws the weights of a new score head from N(0, 0.01 / (hidden size + 1)).

    A tenth of the usual deviation (arXiv:2009.01325; arXiv:2403.17031), because the hidden states
    of chat models are large, and scores should begin near zero.
    """
    size = model.score.in_features
    # From the seed alone: the engine may have used up random numbers while it loaded the model.
    generator = torch.Generator().manual_seed(torch.initial_seed())
    start = 0.1 * torch.randn(1, size, generator=generator) / (size + 1) ** 0.5
    with zero.gathered([model.score.weight], writer=0), torch.no_grad():
        model.score.weight.copy_(start)


def separate_pad(tokenizer, pad_token: str | None = None) -> None:
    """Gives a tokenizer that pads with its EOS another pad token, and prints which.

    transformers reads a saved reward model's score at the last token that is not the pad token. So
    any token will do that never ends an answer: that of `--pad_token`, else an unused one.
    """
    eos = tokenizer.eos_token
    unused = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special
        and token.content not in tokenizer.all_special_tokens
        and token.content not in str(tokenizer.chat_template or "")
    ]
    unused.sort(key=lambda token: "pad" not in token.lower())  # those for padding first
    candidates = [tokenizer.pad_token, *unused, tokenizer.unk_token]
    choices = candidates if pad_token is None else [pad_token]
    usable = [token for token in choices if token in tokenizer.get_vocab() and token != eos]
    if not usable:
        expected = "give --pad_token TOKEN: one of its vocabulary that never ends an answer"
        name = tokenizer.name_or_path
        refuse(
            f"{name!r}: none of {choices} is a pad token other than its EOS, {eos!r}: {expected}"
        )
    if usable[0] != tokenizer.pad_token:
        print_once(f"NOTE: padding with {usable[0]!r} instead of {tokenizer.pad_token!r}")
    tokenizer.pad_token = usable[0]
