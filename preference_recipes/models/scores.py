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
        model.score.__class__ = ScoreHead  # same parameters and names: saving does not notice

    def forward(self, batch: dict, places: torch.Tensor | None = None) -> torch.Tensor:
        """Returns fp32 scores of what ends at some places of a batch, by default of the answers."""
        if places is None:
            places = batch["last_token_index"]
        hidden = architecture.hidden_states(self.model, batch["inputs"])
        return self.model.score(hidden.index_select(0, places)).squeeze(-1)


class ActorCritic(LogProbModel):
    """Actor (`model`) and critic in one module: one engine, one backward pass, one checkpoint."""

    def __init__(self, policy_model, critic):
        super().__init__(policy_model)
        self.critic = ScoreModel(critic)
        # FSDP2 gathers the critic by itself, so that it stays in shards while the actor generates.
        units = {*self._no_split_modules, *self.critic._no_split_modules, "ScoreModel"}
        self._no_split_modules = sorted(units)

    def forward(self, batch: dict, *args, with_values: bool = True, **kwargs) -> dict:
        """Returns what `LogProbModel.forward` does and, unless told not to, `values`.

        The value of a token is that of the state in which it was chosen: the text before it.
        """
        output = super().forward(batch, *args, **kwargs)
        if with_values:
            output["values"] = scatter_to_answers(
                self.critic(batch, batch["predictor_index"]), batch
            )
        return output


# ============================================================ loading
def score_model(
    name: str, tokenizer, args, frozen: bool = False, new_head: bool = False
) -> PreTrainedModel:
    """Loads a sequence classifier with one label in fp32: a reward model, or a critic.

    Args:
        tokenizer: that of the policy, or of `name` itself.
        frozen: see `load.causal_lm`.
        new_head: gives a model without a score head a new one.
    """
    if load.tokenizer_of(name).get_vocab() != tokenizer.get_vocab():
        refuse(f"{name!r} has another tokenizer than {tokenizer.name_or_path!r}")
    model, missing, _ = load.load(
        AutoModelForSequenceClassification, name, args, frozen, num_labels=1
    )
    lacks_backbone = missing - {"score.weight"}
    if lacks_backbone or (missing and not new_head):
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
    # From the seed alone, whatever random numbers the engine used up while it loaded the model.
    generator = torch.Generator().manual_seed(torch.initial_seed())
    start = 0.1 * torch.randn(1, size, generator=generator) / (size + 1) ** 0.5
    with zero.gathered([model.score.weight], writer=0), torch.no_grad():
        model.score.weight.copy_(start)


def separate_pad(tokenizer, pad_token: str | None = None) -> None:
    """Gives a tokenizer that pads with its EOS another pad token, and prints which.

    transformers reads a saved reward model's score at the last token that is not the pad token. So
    any token will do with which no answer ends: that of `--pad_token`, else an unused one.
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
    own = [tokenizer.pad_token, *unused, tokenizer.unk_token]
    tried = own if pad_token is None else [pad_token]
    found = [token for token in tried if token in tokenizer.get_vocab() and token != eos]
    if not found:
        expected = "give --pad_token TOKEN: one of its vocabulary that never ends an answer"
        name = tokenizer.name_or_path
        refuse(f"{name!r}: none of {tried} is a pad token other than its EOS, {eos!r}: {expected}")
    if found[0] != tokenizer.pad_token:
        print_once(f"NOTE: padding with {found[0]!r} instead of {tokenizer.pad_token!r}")
    tokenizer.pad_token = found[0]
