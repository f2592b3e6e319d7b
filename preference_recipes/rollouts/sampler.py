"""What draws responses: the policy, and what else decides them."""

import dataclasses
from typing import Any, NamedTuple

from accelerate import Accelerator
from torch import nn

from common import engine
from preference_recipes.data import rendering


class Response(NamedTuple):
    """One generated response."""

    ids: list[int]  # up to and including its first stop token
    # Of each token under the distribution that it was drawn from; none if it was chosen greedily.
    logps: list[float]


@dataclasses.dataclass
class Sampler:
    """A policy that responds to prompts, from transformers, vLLM servers or with an environment.

    `unwrapped` is the module inside the prepared model; its own `model` is the actor.
    """

    accelerator: Accelerator
    args: Any
    tokenizer: Any
    model: nn.Module  # the trained one, prepared
    data: Any = None  # the run's sets, as `dataset.load_data` returned them
    progress: Any = None  # the `Progress` of the run; a sampler only reads it
    means: Any = None  # the `Means` that take what is logged about sampling
    stage: Any = None  # plays episodes with `--environment`; None: a sample is one answer
    servers: Any = None  # of `--vllm_url`; None: transformers generates

    def __post_init__(self):
        self.unwrapped = engine.unwrapped(self.accelerator, self.model)

    def stop_tokens(self) -> set[int]:
        """Returns the tokens that end a response."""
        return rendering.stop_tokens(self.tokenizer, self.unwrapped.model)

    def pad_token(self) -> int:
        """Returns what fills rows up; of a pad token that was only added there is no embedding."""
        most = self.unwrapped.model.get_input_embeddings().num_embeddings - 1
        return min(self.tokenizer.pad_token_id, most)

    def tokens_without_probability(self) -> list[int]:
        """Returns the rows of the output layer that are never drawn: `LogProbModel.vocabulary`."""
        n_logits = self.unwrapped.model.get_output_embeddings().out_features
        return list(range(self.unwrapped.vocabulary, n_logits))

    def state(self) -> Any:
        """A rollout that servers sampled ahead, or None, for a checkpoint."""
        return None if self.servers is None else self.servers.state()

    def load_state(self, state: Any) -> None:
        if self.servers is not None and state is not None:
            self.servers.load_state(state)
