"""Episodes: a model and an environment speak in turn, and sampled ids are kept as they are.

An episode's tokens are its prompt, an answer as it was sampled, what the chat template writes
between this answer and the next one, the next answer as it was sampled, and so on. Nothing is
tokenised again. `Samples.loss_mask` says which tokens the model drew.
"""

import contextlib
import dataclasses
import json
from typing import Any

import numpy as np
import torch

from common import distributed, refuse
from preference_recipes.data import chat, formats, rendering, replies
from preference_recipes.data.messages import as_messages
from preference_recipes.rollouts import environments
from preference_recipes.rollouts.context import Response, SamplingContext
from preference_recipes.rollouts.environments import UserClass
from preference_recipes.rollouts.samples import Samples, repeat_each, share_of_groups


@dataclasses.dataclass
class Episode:
    """One conversation. `ids` are its tokens after the prompt, from the model or the template."""

    prompt: list[int]  # token ids that the model reads first
    messages: list[dict]  # so far
    images: list[bytes] = dataclasses.field(default_factory=list)  # in the prompt
    ids: list[int] = dataclasses.field(default_factory=list)
    loss_mask: list[bool] = dataclasses.field(default_factory=list)  # whether the model drew it
    logps: list[float] = dataclasses.field(default_factory=list)  # the sampler's, else 0
    turns: int = 0  # answers of the model
    calls: int = 0  # calls of tools
    failed_calls: int = 0
    is_live: bool = True  # continues
    ended: bool = False  # ended by itself, not at a limit

    @property
    def n_sampled(self) -> int:
        return sum(self.loss_mask)

    def tokens_left(self, args) -> int:
        return args.max_length - len(self.prompt) - len(self.ids)

    def room(self, args) -> int:
        """Returns how many tokens the model may still draw."""
        return min(args.max_new_tokens - self.n_sampled, self.tokens_left(args))

    def add(self, ids: list[int], logps: list[float], is_sampled: bool) -> None:
        self.ids += ids
        self.loss_mask += [is_sampled] * len(ids)
        self.logps += logps


class EpisodeRunner:
    """Plays the episodes of a run with the environment of `--environment`.

    Args:
        generator: draws tokens, see `sampler.LocalGenerator`.
    """

    def __init__(self, context: SamplingContext, generator: Any, user_class: UserClass):
        self.context = context
        self.generator = generator
        self.user_class = user_class
        # The environments of the latest samples by index; a process has those of its own prompts.
        self.instances: dict[int, Any] = {}

    def run(self, prompts: dict, uniforms: np.ndarray, temperature: float) -> Samples:
        """Plays an episode for each sample, see `Sampler.sample`. All processes must call it.

        The k-th number of an episode decides the k-th token that the model draws in it. With a
        server, the number at the start of an answer decides the whole answer.
        """
        self.close()
        context = self.context
        _, per_prompt, max_new_tokens = uniforms.shape
        # An episode's numbers are followed by zeros; `add_answer` cuts their tokens off.
        draws = np.pad(uniforms.reshape(-1, max_new_tokens), ((0, 0), (0, max_new_tokens)))

        def play() -> dict[int, Episode]:
            episodes = self.begin(prompts, per_prompt)
            while live := {n: episode for n, episode in episodes.items() if episode.is_live}:
                self.take_turn(live, draws, temperature)
            return episodes

        with self.generator.ready():
            own_episodes = distributed.all_or_none(context.accelerator, True, play)
        episodes = distributed.gather_by_index(own_episodes)
        return Samples(
            prompts=[episode.prompt for episode in episodes],
            responses=[episode.ids for episode in episodes],
            row_json=repeat_each(prompts["row_json"], per_prompt),
            row_numbers=repeat_each(prompts["row"], per_prompt),
            ended=torch.tensor([episode.ended for episode in episodes]),
            per_prompt=per_prompt,
            sampler_logps=[episode.logps if temperature else [] for episode in episodes],
            loss_mask=[episode.loss_mask for episode in episodes],
            # A checkpoint holds only plain values, not even subclasses of `str`.
            messages=json.loads(json.dumps([e.messages for e in episodes], default=str)),
            statistics=statistics(episodes),
            images=[episode.images for episode in episodes],
        )

    def begin(self, prompts: dict, per_prompt: int) -> dict[int, Episode]:
        """Makes and resets this process's environments; returns their episodes by index."""
        indices = share_of_groups(self.context.accelerator, len(prompts["row"]), per_prompt)
        self.instances = {index: self.user_class.make() for index in indices}
        calls = environments.Calls(self.context.args.environment_timeout)
        for index, instance in self.instances.items():
            columns = json.loads(prompts["row_json"][index // per_prompt])
            calls.start(index, instance.reset, **columns)
        return {
            index: self.opening(prompts, index // per_prompt, reset_result)
            for index, reset_result in calls.wait().items()
        }

    def opening(self, prompts: dict, index: int, reset_result: str | list[dict] | None) -> Episode:
        """Returns the episode of a prompt, with the text or messages that `reset` added."""
        args = self.context.args
        option = f"--environment {self.user_class.name}, data row {prompts['row'][index]}"
        columns = json.loads(prompts["row_json"][index])  # again: `reset` may have changed its copy
        prompt = columns["prompt"]
        if isinstance(prompt, str):
            if not args.strings_as_messages:
                refuse(f"{option}: the prompt is a string: give --strings_as_messages")
            prompt = formats.transcript_turns(prompt) or prompt
        messages = as_messages(prompt, "user")
        episode = Episode(prompts["prompt_ids"][index], messages)
        if "images" in prompts:
            episode.images = prompts["images"][index] or []
        if reset_result is None:
            return episode
        if isinstance(reset_result, str):
            *earlier, last = messages
            episode.messages = [*earlier, {**last, "content": last["content"] + reset_result}]
        else:
            episode.messages = [*messages, *as_messages(reset_result, "user")]
        tools = self.user_class.tools or columns.get("tools")
        episode.prompt = chat.encode_prompt(self.context.tokenizer, episode.messages, tools).ids
        if episode.tokens_left(args) <= 0:
            refuse(f"{option}: with what `reset` added, --max_length leaves no room to answer")
        return episode

    def take_turn(self, live: dict[int, Episode], draws: np.ndarray, temperature: float) -> None:
        """Generates an answer in each live episode, and lets the environment reply to it.

        Environments reply while other answers are still generated. `draws` are `[episodes,
        numbers]`; an answer's numbers follow those of the episode's last answer.
        """
        args = self.context.args
        indices = list(live)
        longest = max(episode.room(args) for episode in live.values())
        uniforms = np.stack([draws[n, e.n_sampled :][:longest] for n, e in live.items()])
        ids = [episode.prompt + episode.ids for episode in live.values()]
        calls = environments.Calls(args.environment_timeout)
        images = [episode.images for episode in live.values()]
        for place, response in self.generator.generate_own(ids, uniforms, temperature, images):
            index = indices[place]
            episode = live[index]
            self.add_answer(episode, response)
            if episode.is_live:
                calls.start(index, self.reply, self.instances[index], episode)
        for index, messages in calls.wait().items():
            self.continue_or_end(live[index], messages)

    def add_answer(self, episode: Episode, response: Response) -> None:
        """Adds an answer to an episode. Without a stop token it was cut, which ends the episode."""
        tokenizer = self.context.tokenizer
        tools = self.user_class.tools
        room = episode.room(self.context.args)
        ids = response.ids[:room]
        logps = response.logps[:room] or [0.0] * len(ids)  # greedy answers have none
        is_whole = ids[-1] in self.context.stop_tokens()
        text = rendering.decode(tokenizer, ids[:-1] if is_whole else ids)  # no stop token
        message = {"role": "assistant", "content": text}
        if is_whole and tools:  # a cut answer calls nothing
            before = rendering.decode(tokenizer, episode.prompt + episode.ids)
            message = environments.parsed(tokenizer, text, before, tools)
        episode.add(ids, logps, is_sampled=True)
        episode.turns += 1
        episode.messages.append(message)
        episode.is_live = is_whole

    def reply(self, instance: Any, episode: Episode) -> Any:
        """Passes the last answer to the environment, or calls the tools that it names."""
        message = episode.messages[-1]
        if not self.user_class.tools:
            return instance.step(message)
        messages, n_failed = environments.call_tools(instance, message)
        episode.calls += len(messages)
        episode.failed_calls += n_failed
        return messages

    def continue_or_end(self, episode: Episode, messages: list[dict] | None) -> None:
        """Adds the environment's messages to an episode; if there are none, it ends."""
        if not messages:  # or the answer called nothing
            episode.is_live = False
            episode.ended = True
            return
        args = self.context.args
        messages = as_messages(messages, "user")
        ids = replies.ids_after_answer(self.context.tokenizer, messages, self.user_class.tools)
        has_room = episode.room(args) > 0 and episode.tokens_left(args) > len(ids)
        if episode.turns >= args.max_turns or not has_room:
            episode.is_live = False  # truncated: the model would not read the reply
            return
        episode.add(ids, [0.0] * len(ids), is_sampled=False)
        episode.messages += messages

    def call(self, method: str) -> list:
        """Calls a method of this process's environments that have it; returns the results."""
        calls = environments.Calls(self.context.args.environment_timeout)
        for index, instance in self.instances.items():
            if hasattr(instance, method):
                calls.start(index, getattr(instance, method))
        return list(calls.wait().values())

    def close(self) -> None:
        """Closes the environments of the latest samples, and ignores any errors."""
        with contextlib.suppress(Exception, SystemExit):
            self.call("close")
        self.instances = {}


def statistics(episodes: list[Episode]) -> dict[str, torch.Tensor]:
    """Returns values of episodes to log, by tag, `[episodes]` each."""
    values = {
        "environment/turns": [episode.turns for episode in episodes],
        "environment/tool_calls": [episode.calls for episode in episodes],
        "environment/failed_calls": [episode.failed_calls for episode in episodes],
        "environment/model_tokens": [episode.n_sampled for episode in episodes],
        "environment/environment_tokens": [len(e.ids) - e.n_sampled for e in episodes],
    }
    return {name: torch.tensor(v, dtype=torch.float32) for name, v in values.items()}
