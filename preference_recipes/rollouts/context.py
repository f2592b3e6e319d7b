"""What sampling needs to know: the model, its tokenizer, and its run."""

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


class SamplingContext:
    """A model that responds, its tokenizer, and its run.

    Args:
        run: a `Run`; its `accelerator` and `args` are enough to generate.
        model: the trained one, prepared.
        data: the run's sets. This and what follows are None for generating exact match alone.
        packer: lays out samples for the models that read them.
        means: receives values to log about sampling.

    Attributes:
        unwrapped: the module inside `model`; its own `model` is the transformers model.
    """

    def __init__(
        self,
        run: Any,
        model: nn.Module,
        tokenizer: Any,
        data: Data | None = None,
        packer: Packer | None = None,
        means: Means | None = None,
    ):
        self.run = run
        self.accelerator: Accelerator = run.accelerator
        self.args = run.args
        self.model = model
        self.tokenizer = tokenizer
        self.data = data
        self.packer = packer
        self.means = means
        self.unwrapped = engine.unwrapped(self.accelerator, model)

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
