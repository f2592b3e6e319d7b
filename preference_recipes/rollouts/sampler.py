"""Draws the samples of a run by transformers or vLLM servers, maybe with an environment."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common import refuse
from preference_recipes.data import replies
from preference_recipes.data.messages import BadRow
from preference_recipes.rollouts import environments, generation
from preference_recipes.rollouts.context import Response, SamplingContext
from preference_recipes.rollouts.episodes import EpisodeRunner
from preference_recipes.rollouts.rollout_state import RolloutState
from preference_recipes.rollouts.samples import Samples, repeat_each
from preference_recipes.rollouts.vllm import Servers


@dataclass
class Sampler(SamplingContext):
    """Draws samples of a policy: an answer to each prompt or, with an environment, an episode.

    All processes must call its methods, and get the same samples. A checkpoint holds its `state`:
    samples that servers have drawn ahead.

    Attributes:
        generator: generates the tokens, here or on the servers of `--vllm_url`.
        episodes: plays the episodes; None: a sample is one answer.
    """

    environment: str | None = None  # MODULE:CLASS

    def __post_init__(self):
        super().__post_init__()
        self.generator: Any = Servers(self) if self.args.vllm_url else LocalGenerator(self)
        self.episodes: EpisodeRunner | None = None
        if self.environment is not None:
            user_class = environments.load(self.environment)
            try:
                replies.check_turns(self.tokenizer, user_class.tools)
            except BadRow as error:  # the chat template cannot write its turns
                refuse(f"--environment {self.environment}: {error}")
            self.episodes = EpisodeRunner(self, self.generator, user_class)

    def sample(self, prompts: dict, uniforms: np.ndarray, temperature: float) -> Samples:
        """Draws responses to prompts.

        Args:
            prompts: columns of the data, each prompt once: `prompt_ids`, `row_json` (the row as a
                JSON text), `row` (its number) and maybe `images`.
            uniforms: `[prompts, responses to each, max_new_tokens]` in [0, 1), see
                `SampleByUniform`; a server gets seeds that are made from them.
        """
        if self.episodes is not None:
            return self.episodes.run(prompts, uniforms, temperature)
        per_prompt = uniforms.shape[1]
        images = [files or [] for files in prompts.get("images", [])]
        responses = self.generator.generate(prompts["prompt_ids"], uniforms, temperature, images)
        stops = self.stop_tokens()
        return Samples(
            prompts=repeat_each(prompts["prompt_ids"], per_prompt),
            responses=[response.ids for response in responses],
            row_json=repeat_each(prompts["row_json"], per_prompt),
            row_numbers=repeat_each(prompts["row"], per_prompt),
            ended=torch.tensor([response.ids[-1] in stops for response in responses]),
            per_prompt=per_prompt,
            sampler_logps=[response.logps for response in responses],
            images=repeat_each(images, per_prompt),
        )

    def sample_rollout(self, state: RolloutState, prompts: dict, round_number: int = 0) -> Samples:
        """Draws the responses of a rollout to prompts that `state` has just taken.

        With `--rollouts_ahead` the servers then begin with the next rollout.
        """
        uniforms = state.draw_uniforms(self.args, len(prompts["row"]), round_number)
        samples = self.sample(prompts, uniforms, self.args.temperature)
        if self.args.rollouts_ahead:
            self.generator.sample_ahead(state)
        samples.check_finite(self)
        return samples

    def sample_held_out(self, eval_set) -> Samples:
        """Returns the policy's greedy responses to a held-out set."""
        unused = np.zeros((len(eval_set), 1, self.args.max_new_tokens))  # nothing is drawn
        return self.sample(eval_set[:], unused, temperature=0.0)

    def state(self) -> dict[str, Any] | None:
        return self.generator.state() if self.args.rollouts_ahead else None

    def load_state(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self.generator.load_state(state)


class LocalGenerator:
    """Generates in the run's own processes, by transformers; `Servers` has the same methods."""

    def __init__(self, context: SamplingContext):
        self.context = context

    def generate(
        self, prompts: list[list[int]], uniforms: np.ndarray, temperature: float, images: list
    ) -> list[Response]:
        """Returns the responses to each prompt in turn, see `Sampler.sample`."""
        _, per_prompt, max_new_tokens = uniforms.shape
        return generation.generate(
            self.context,
            repeat_each(prompts, per_prompt),
            max_new_tokens,
            temperature=temperature,
            uniforms=uniforms.reshape(-1, max_new_tokens),
            images=repeat_each(images, per_prompt),
        )

    def ready(self):
        """Returns a context in which each process may call `generate_own`."""
        return generation.ready_to_generate(self.context)

    def generate_own(
        self, prompts: list[list[int]], uniforms: np.ndarray, temperature: float, images: list
    ) -> Iterator[tuple[int, Response]]:
        """Yields the index of each prompt with its response, once that has ended.

        For this process alone. `uniforms` are `[prompts, tokens]`.
        """
        longest = uniforms.shape[1]
        batch_size = generation.responses_at_once(self.context, prompts, longest)
        lengths = np.array([len(prompt) for prompt in prompts])
        longest_first = np.argsort(-lengths, kind="stable")  # as in `batches.split`
        for indices in np.array_split(longest_first, math.ceil(len(prompts) / batch_size)):
            yield from generation.generate_some(
                self.context, prompts, indices.tolist(), longest, temperature, uniforms, images
            )
