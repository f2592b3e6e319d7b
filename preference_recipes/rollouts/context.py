"""What sampling needs to know: the model, its tokenizer, and its run."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from accelerate import Accelerator
from torch import nn

from common import engine
from common.metrics import Means
from preference_recipes.data import rendering
from preference_recipes.data.dataset import Data
from preference_recipes.models.packing import Packer


class Response(NamedTuple):
    """One generated response."""

    ids: list[int]  # up to and including its first stop token
    # Each token's log-prob in the distribution that it was drawn from; empty if greedy.
    logps: list[float]


@dataclass
class SamplingContext:
    """A model that responds, its tokenizer, and its run.

    Attributes:
        unwrapped: the module inside `model`; its own `model` is the transformers model.
    """

    run: Any  # a `Run`; its `accelerator` and `args` are enough to generate
    model: nn.Module  # the trained one, prepared
    tokenizer: Any
    # None where exact match alone is measured.
    data: Data | None = None  # the run's sets
    packer: Packer | None = None  # lays out samples for the models that read them
    means: Means | None = None  # receives values to log about sampling

    def __post_init__(self):
        self.accelerator: Accelerator = self.run.accelerator
        self.args = self.run.args
        self.unwrapped = engine.unwrapped(self.accelerator, self.model)

    def stop_tokens(self) -> set[int]:
        """Returns the tokens that end a response."""
        return rendering.stop_tokens(self.tokenizer, self.unwrapped.model)

    def pad_token(self) -> int:
        """Returns the token for padding: the pad token, unless that has no embedding."""
        last_token = self.unwrapped.model.get_input_embeddings().num_embeddings - 1
        return min(self.tokenizer.pad_token_id, last_token)

    def tokens_without_probability(self) -> list[int]:
        """Returns tokens that are never drawn: beyond `vocab_size`, and placeholders of images."""
        n_logits = self.unwrapped.model.get_output_embeddings().out_features
        placeholders = []
        if getattr(self.tokenizer, "processor", None) is not None:
            from preference_recipes.data import images  # only here: text needs none

            placeholders = images.tokens_of(self.tokenizer.processor)
        return placeholders + list(range(self.unwrapped.vocab_size, n_logits))
