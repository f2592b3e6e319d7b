"""What draws the samples of a run: transformers or vLLM servers, maybe with an environment."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from preference_recipes.rollouts import generation
from preference_recipes.rollouts.episodes import Stage, load_environment
from preference_recipes.rollouts.rollout import Position
from preference_recipes.rollouts.sampler import Response, Sampler
from preference_recipes.rollouts.samples import Samples, repeat_each
from preference_recipes.rollouts.vllm import Servers


class Source:
    """Draws samples: an answer to each prompt or, with an environment, an episode.

    All processes must call its methods, and get the same samples.

    Args:
        environment: MODULE:CLASS; None: there is none.

    Attributes:
        sampler: the policy, and what a run knows about it.
        generator: of the tokens: transformers, or the servers of `--vllm_url`.
        stage: plays episodes; None: a sample is one answer.
    """

    def __init__(self, sampler: Sampler, environment: str | None = None):
        self.sampler = sampler
        self.generator = Servers(sampler) if sampler.args.vllm_url else Transformers(sampler)
        self.stage: Stage | None = None
        if environment is not None:
            user_class = load_environment(environment, sampler.tokenizer)
            self.stage = Stage(sampler, self.generator, user_class)

    def sample(self, prompts: dict, uniforms: np.ndarray, temperature: float) -> Samples:
        """Draws responses to prompts.

        Args:
            prompts: columns of the data: `prompt_ids`, `columns` (the row as a JSON text), `row`
                (its number) and maybe `images`, each prompt once.
            uniforms: `[prompts, responses to each, max_new_tokens]` in [0, 1), see
                `SampleByUniform`; a server draws with seeds that are made from them.
        """
        if self.stage is not None:
            return self.stage.play(prompts, uniforms, temperature)
        per_prompt = uniforms.shape[1]
        images = [files or [] for files in prompts.get("images", [])]
        responses = self.generator.generate(prompts["prompt_ids"], uniforms, temperature, images)
        stops = self.sampler.stop_tokens()
        return Samples(
            prompts=repeat_each(prompts["prompt_ids"], per_prompt),
            responses=[response.ids for response in responses],
            row_texts=repeat_each(prompts["columns"], per_prompt),
            data_rows=repeat_each(prompts["row"], per_prompt),
            ended=torch.tensor([response.ids[-1] in stops for response in responses]),
            per_prompt=per_prompt,
            sampler_logps=[response.logps for response in responses],
            images=repeat_each(images, per_prompt),
        )

    def sample_round(self, position: Position, prompts: dict, round_number: int = 0) -> Samples:
        """Draws the responses of a rollout to prompts that `position` has just taken.

        With `--rollouts_ahead` the servers then begin with the next rollout.
        """
        args = self.sampler.args
        uniforms = position.draw_uniforms(args, len(prompts["row"]), round_number)
        samples = self.sample(prompts, uniforms, args.temperature)
        self.generator.sample_ahead(position)
        samples.check_finite(self.sampler)
        return samples

    def sample_held_out(self, eval_set) -> Samples:
        """Returns the policy's greedy responses to a held-out set."""
        unused = np.zeros((len(eval_set), 1, self.sampler.args.max_new_tokens))  # nothing is drawn
        return self.sample(eval_set[:], unused, temperature=0.0)

    def state(self) -> Any:
        """Returns what a checkpoint holds: a rollout that servers sampled ahead, or None."""
        return self.generator.state()

    def load_state(self, state: Any) -> None:
        self.generator.load_state(state)


class Transformers:
    """Generates in the run's own processes, by transformers. `Servers` has the same methods."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler

    def generate(
        self, prompts: list[list[int]], uniforms: np.ndarray, temperature: float, images: list
    ) -> list[Response]:
        """Returns the responses to each prompt in turn, see `Source.sample`."""
        _, per_prompt, max_new_tokens = uniforms.shape  # a number for each token of each response
        return generation.generate(
            self.sampler,
            repeat_each(prompts, per_prompt),
            max_new_tokens,
            temperature=temperature,
            uniforms=uniforms.reshape(-1, max_new_tokens),
            images=repeat_each(images, per_prompt),
        )

    def ready(self):
        """Returns a context in which each process may call `generate_own`."""
        return generation.ready_to_generate(self.sampler)

    def generate_own(
        self, prompts: list[list[int]], uniforms: np.ndarray, temperature: float, images: list
    ) -> Iterator[tuple[int, Response]]:
        """Yields the number of each prompt with its response, once that has ended.

        For this process alone. `uniforms` are `[prompts, tokens]`.
        """
        longest = uniforms.shape[1]
        at_once = generation.responses_at_once(self.sampler, prompts, longest)
        lengths = np.array([len(prompt) for prompt in prompts])
        longest_first = np.argsort(-lengths, kind="stable")  # as `batches.split`
        for numbers in np.array_split(longest_first, math.ceil(len(prompts) / at_once)):
            yield from generation.generate_some(
                self.sampler, prompts, numbers.tolist(), longest, temperature, uniforms, images
            )

    def sample_ahead(self, position: Position) -> None:
        """Does nothing: one process cannot sample and train at once."""

    def state(self) -> None:
        """Nothing is sampled ahead."""

    def load_state(self, state: None) -> None:
        """There is none."""
