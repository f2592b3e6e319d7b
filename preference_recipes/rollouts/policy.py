"""The policy whose responses are sampled, and what else decides them."""

import dataclasses
from typing import Any, NamedTuple

from accelerate import Accelerator
from torch import nn

from common import engine
from common.metrics import Means
from common.progress import Progress
from preference_recipes.data import rendering
from preference_recipes.data.dataset import Data
from preference_recipes.models.packing import Packer


class Response(NamedTuple):
    """One generated response."""

    ids: list[int]  # up to and including its first stop token
    # Under the distribution that each token was drawn from; none if it was chosen greedily.
    logps: list[float]


@dataclasses.dataclass
class Policy:
    """A model that responds to prompts, and what a run knows about it.

    `unwrapped` is the module inside the prepared model; its own `model` is the actor.
    """

    accelerator: Accelerator
    args: Any
    tokenizer: Any
    model: nn.Module  # the trained one, prepared
    # These are None where answers are generated for exact match alone.
    data: Data | None = None  # the run's sets
    progress: Progress | None = None  # of the run
    means: Means | None = None  # takes what is logged about sampling
    packer: Packer | None = None  # lays out samples for the models that read them

    def __post_init__(self):
        self.unwrapped = engine.unwrapped(self.accelerator, self.model)

    def stop_tokens(self) -> set[int]:
        """Returns the tokens that end a response."""
        return rendering.stop_tokens(self.tokenizer, self.unwrapped.model)

    def pad_token(self) -> int:
        """Returns what fills rows up: the pad token, unless it was added without an embedding."""
        most = self.unwrapped.model.get_input_embeddings().num_embeddings - 1
        return min(self.tokenizer.pad_token_id, most)

    def tokens_without_probability(self) -> list[int]:
        """Returns what is never drawn: beyond `LogProbModel.vocabulary`; placeholders of images."""
        n_logits = self.unwrapped.model.get_output_embeddings().out_features
        never = []
        if getattr(self.tokenizer, "processor", None) is not None:
            from preference_recipes.data import images  # only here: text needs none

            never = images.tokens_of(self.tokenizer.processor)
        return never + list(range(self.unwrapped.vocabulary, n_logits))
