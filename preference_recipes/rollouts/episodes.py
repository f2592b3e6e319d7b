"""Episodes: a model and an environment speak in turn, and sampled ids are kept as they are.

An episode's tokens are its prompt, an answer as it was sampled, what the chat template writes
between this answer and the next one, the next answer as it was sampled, and so on. Nothing is
tokenised again. `Samples.is_sampled` says which tokens the model drew.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from common import distributed
from preference_recipes.data import chat
from preference_recipes.data.chat import decode
from preference_recipes.data.messages import BadRow, as_messages
from preference_recipes.rollouts import environments, generation
from preference_recipes.rollouts.environments import Failure, ToolResults, UserClass
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import FAILED, Response, Samples, share_of_groups


def start(sampler: Sampler) -> None:
    """Lets a run's samples be episodes with the environment of `--environment`, if it has one.

    Raises:
        SystemExit: see `environments.load`; the chat template cannot continue a conversation.
    """
    name = sampler.args.environment
    if name is None:
        return
    user_class = environments.load(name)
    try:
        chat.check_turns(sampler.tokenizer, user_class.tools)
    except BadRow as error:
        sys.exit(f"--environment {name}: {error}")
    sampler.stage = Stage(user_class)


def tools(args) -> list[dict] | None:
    """Returns JSON schemas of what the environment lets the model call; None without any."""
    if args.environment is None:
        return None
    return environments.load(args.environment).tools or None


@dataclasses.dataclass
class Episode:
    """One conversation.

    Attributes:
        data_row: the number of the prompt's row in the data.
        prompt: token ids of what the model reads first.
        messages: the conversation so far.
        variables: of the chat template, by name, as the row gives them.
        ids: the tokens after the prompt, drawn by the model or written by the template.
        is_sampled: for each of `ids`, whether the model drew it.
        logps: for each of `ids`, the sampler's log-prob; 0 where nothing was drawn.
        turns: how many answers the model gave.
        calls, failed_calls: how many tools it called, and how many of these calls failed.
        is_live: whether it continues.
        ended: whether it ended by itself, and not at a limit.
        failure: how its environment failed, in words; "" if it did not.
    """

    data_row: int
    prompt: list[int]
    messages: list[dict]
    variables: dict | str | None = None
    ids: list[int] = dataclasses.field(default_factory=list)
    is_sampled: list[bool] = dataclasses.field(default_factory=list)
    logps: list[float] = dataclasses.field(default_factory=list)
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    is_live: bool = True
    ended: bool = False
    failure: str = ""

    def fail(self, failure: str) -> None:
        """Ends an episode whose environment failed: it counts as not sampled.

        Models still read it together with the others, so one token stands for it. It is not trained
        on, see `Samples.failed`.
        """
        self.failure = failure
        self.is_live = False
        self.ids = self.prompt[-1:]
        self.is_sampled = [True]
        self.logps = [0.0]

    @property
    def n_sampled(self) -> int:
        return sum(self.is_sampled)

    def places_left(self, args) -> int:
        """Returns how many tokens of any kind still fit into `--max_length`."""
        return args.max_length - len(self.prompt) - len(self.ids)

    def room(self, args) -> int:
        """Returns how many tokens the model may still draw."""
        return min(args.max_new_tokens - self.n_sampled, self.places_left(args))

    def add(self, ids: list[int], logps: list[float], is_sampled: bool) -> None:
        self.ids += ids
        self.is_sampled += [is_sampled] * len(ids)
        self.logps += logps


class Stage:
    """Plays the episodes of a run.

    Attributes:
        user_class: that of `--environment`.
        instances: the environments of the latest samples, by the sample's row. Each process has
            those of its own prompts, see `Samples.whole_groups`.
        stops: the tokens that end an answer. They are looked up before a rollout, since while the
            model generates its generation config is set aside.
    """

    def __init__(self, user_class: UserClass):
        self.user_class = user_class
        self.instances: dict[int, Any] = {}
        self.stops: set[int] = set()

    # ======================================================== playing
    def play(
        self, sampler: Sampler, prompts: dict, uniforms: np.ndarray, temperature: float
    ) -> Samples:
        """Plays an episode for each sample, see `generation.sample`. All processes must call it.

        The k-th token that a model draws in an episode is decided by its k-th number (a server: all
        of an answer by the number at its start), whatever other episodes there are. So an episode
        depends on nothing but its own prompt, numbers, weights and environment. Each process plays
        its share.
        """
        self.close()
        self.stops = chat.stop_tokens(sampler.tokenizer, sampler.unwrapped.model)
        _, per_prompt, max_new_tokens = uniforms.shape
        draws = uniforms.reshape(-1, max_new_tokens)
        with generation.local_generator(sampler) as generate:
            mine = partial(self.play_mine, sampler, prompts, draws, temperature, generate)
            by_number = self.on_all(sampler, mine)
        episodes = [by_number[number] for number in range(len(draws))]
        failures = [episode.failure for episode in episodes if episode.failure]
        self.warn_of(sampler, failures, len(episodes))
        return Samples(
            prompts=[episode.prompt for episode in episodes],
            responses=[episode.ids for episode in episodes],
            row_texts=generation.repeat_each(prompts["columns"], per_prompt),
            data_rows=[episode.data_row for episode in episodes],
            ended=torch.tensor([episode.ended for episode in episodes]),
            per_prompt=per_prompt,
            sampler_logps=[episode.logps if temperature else [] for episode in episodes],
            is_sampled=[episode.is_sampled for episode in episodes],
            messages=[episode.messages for episode in episodes],
            of_episodes=statistics(episodes),
        )

    def play_mine(
        self,
        sampler: Sampler,
        prompts: dict,
        draws: np.ndarray,
        temperature: float,
        generate: generation.LocalGenerator,
    ) -> dict[int, Episode]:
        """Plays this process's episodes, and returns them by their numbers among all.

        Args:
            draws: `[episodes, max_new_tokens]`, of all processes.
        """
        episodes = self.begin(sampler, prompts, len(draws) // len(prompts["row"]))
        while live := {n: episode for n, episode in episodes.items() if episode.is_live}:
            self.take_turn(sampler, live, draws[list(live)], temperature, generate)
        return episodes

    def begin(self, sampler: Sampler, prompts: dict, per_prompt: int) -> dict[int, Episode]:
        """Makes and resets the environments of this process, and returns their episodes."""
        mine = share_of_groups(sampler.accelerator, len(prompts["row"]), per_prompt)
        self.instances = {}
        failures: dict[int, Any] = {}
        for number in mine:
            try:
                self.instances[number] = self.user_class.make()
            except Exception as error:
                reason = environments.described(error)
                failures[number] = Failure(
                    f"was not called: making the environment raised {reason}"
                )
        # A value for each episode, at the episode's number.
        columns = {name: generation.repeat_each(c, per_prompt) for name, c in prompts.items()}
        calls = environments.Calls(sampler.args.environment_timeout)
        for number, instance in self.instances.items():
            row = json.loads(columns["columns"][number])
            calls.start(number, partial(instance.reset, **row))
        given = calls.wait() | failures
        return {number: self.opening(sampler, columns, number, given[number]) for number in mine}

    def opening(self, sampler: Sampler, columns: dict, number: int, given: Any) -> Episode:
        """Returns an episode that has not begun, or has failed.

        Args:
            columns: with a value for each episode.
            number: of the episode.
            given: what `reset` returned, or a `Failure`.
        """
        data_row = columns["row"][number]
        # Parsed again: `reset` may have changed what it was given.
        row = json.loads(columns["columns"][number])
        prompt = row["prompt"]
        if isinstance(prompt, str) and not sampler.args.strings_as_messages:
            sys.exit(
                f"--environment {self.user_class.name}: the prompt of data row {data_row} is a "
                "string, and a conversation needs messages: give --strings_as_messages"
            )
        messages = as_messages(prompt, "user")
        variables = row.get("chat_template_kwargs")
        episode = Episode(data_row, columns["prompt_ids"][number], messages, variables)
        added = environments.checked_reset(given)
        failure = self.failure_of(sampler, added, data_row, "reset")
        if failure:
            episode.fail(failure)
        elif added is not None:
            self.add_to_prompt(sampler, episode, added)
        return episode

    def add_to_prompt(self, sampler: Sampler, episode: Episode, added: str | list[dict]) -> None:
        """Appends a text that `reset` returned to the last message, or messages after it."""
        if isinstance(added, str):
            *earlier, last = episode.messages
            episode.messages = [*earlier, {**last, "content": last["content"] + added}]
        else:
            episode.messages = [*episode.messages, *added]
        option = f"--environment {self.user_class.name}"
        try:
            tokenizer = chat.with_variables(sampler.tokenizer, episode.variables)
            ids = chat.encode_prompt(tokenizer, episode.messages, self.user_class.tools).ids
        except BadRow as error:
            sys.exit(f"{option}: after `reset` of data row {episode.data_row}, {error}")
        if len(ids) >= sampler.args.max_length:
            sys.exit(
                f"{option}: with what `reset` added, the prompt of data row {episode.data_row} has "
                f"{len(ids)} tokens; --max_length {sampler.args.max_length} leaves no room for a "
                "response"
            )
        episode.prompt = ids

    def take_turn(
        self,
        sampler: Sampler,
        live: dict[int, Episode],
        draws: np.ndarray,
        temperature: float,
        generate: generation.LocalGenerator,
    ) -> None:
        """Generates an answer in each live episode, and lets the environment reply to it.

        An environment replies while answers are still generated in other episodes.

        Args:
            draws: `[live episodes, max_new_tokens]`.
        """
        # All answers of a turn get as many random numbers as the longest may need. Those of an
        # episode begin where its last answer ended; a shorter rest is filled with zeros. What these
        # draw is beyond the episode's room, and `add_answer` cuts it off.
        longest = max(episode.room(sampler.args) for episode in live.values())
        uniforms = np.zeros((len(live), longest))
        for row, episode in enumerate(live.values()):
            rest = draws[row, episode.n_sampled :][:longest]
            uniforms[row, : len(rest)] = rest
        ids = [episode.prompt + episode.ids for episode in live.values()]
        numbers = list(live)  # of the episodes, by row
        calls = environments.Calls(sampler.args.environment_timeout)
        for row, response in generate(ids, uniforms, temperature):
            number = numbers[row]
            episode = live[number]
            self.add_answer(sampler, episode, response, temperature)
            if episode.is_live:
                calls.start(number, partial(self.reply, self.instances[number], episode))
        for number, reply in sorted(calls.wait().items()):
            self.continue_or_end(sampler, live[number], reply)

    def add_answer(
        self, sampler: Sampler, episode: Episode, response: Response, temperature: float
    ) -> None:
        """Adds an answer to an episode. One without a stop token was cut, and ends the episode."""
        room = episode.room(sampler.args)
        ids = response.ids[:room]
        logps = response.logps[:room] if temperature else [0.0] * len(ids)
        is_whole = ids[-1] in self.stops
        text = decode(sampler.tokenizer, ids[:-1] if is_whole else ids)  # without the stop token
        message = {"role": "assistant", "content": text}
        if is_whole and self.user_class.tools:  # a cut answer calls nothing
            before = decode(sampler.tokenizer, episode.prompt + episode.ids)
            message = environments.parsed(sampler.tokenizer, text, before, self.user_class.tools)
        episode.add(ids, logps, is_sampled=True)
        episode.turns += 1
        episode.messages.append(message)
        episode.is_live = is_whole

    def reply(self, instance: Any, episode: Episode) -> Any:
        """Passes the last answer to the environment, or calls the tools that it asks for."""
        message = episode.messages[-1]
        if self.user_class.has_step:
            return instance.step(message)
        return environments.call_tools(instance, message)

    def ids_between(self, sampler: Sampler, messages: list[dict], episode: Episode) -> list[int]:
        """Returns what the template writes for messages that come back, up to the next answer."""
        if sum(len(message["content"]) for message in messages) > 100 * sampler.args.max_length:
            # Too long for the episode: so many ids end it, and no text is tokenised in vain.
            return [0] * sampler.args.max_length
        try:
            tokenizer = chat.with_variables(sampler.tokenizer, episode.variables)
            return chat.ids_after_answer(tokenizer, messages, self.user_class.tools)
        except BadRow as error:
            sys.exit(f"--environment {self.user_class.name}, data row {episode.data_row}: {error}")

    def continue_or_end(self, sampler: Sampler, episode: Episode, given: Any) -> None:
        """Adds what the environment said to an episode, or ends it.

        Args:
            given: what `reply` returned, or a `Failure`.
        """
        if isinstance(given, ToolResults):
            episode.calls += len(given.messages)
            episode.failed_calls += given.n_failed
            given = given.messages or None  # an answer that calls nothing ends the episode
        messages = environments.checked_step(given)
        method = "step" if self.user_class.has_step else "a tool"
        failure = self.failure_of(sampler, messages, episode.data_row, method, episode.turns)
        if failure:
            episode.fail(failure)
            return
        if messages is None:
            episode.is_live = False
            episode.ended = True
            return
        ids = self.ids_between(sampler, messages, episode)
        has_room = episode.room(sampler.args) > 0 and episode.places_left(sampler.args) > len(ids)
        if episode.turns >= sampler.args.max_turns or not has_room:
            episode.is_live = False  # truncated: nobody reads the reply
            return
        episode.add(ids, [0.0] * len(ids), is_sampled=False)
        episode.messages += messages

    # ======================================================== the end of episodes
    def rewards(self, sampler: Sampler, samples: Samples) -> list[float]:
        """Returns `get_reward` of each sample, the same on every process; NaN of those that failed.

        If an environment fails now, its sample counts as failed, too.
        """
        found = self.on_all(sampler, partial(self.my_rewards, sampler, samples))
        rewards = [math.nan] * len(samples)
        failures = []
        for number, reward in sorted(found.items()):
            if isinstance(reward, Failure):
                failures.append(reward.says)
            else:
                rewards[number] = reward
        self.warn_of(sampler, failures, len(samples))
        samples.of_episodes = with_failed(samples.of_episodes, torch.tensor(rewards).isnan())
        return rewards

    def my_rewards(self, sampler: Sampler, samples: Samples) -> dict[int, float | Failure]:
        """Returns `get_reward` of this process's episodes that have not failed, by number."""
        failed = samples.failed.tolist()
        calls = environments.Calls(sampler.args.environment_timeout)
        for number, instance in self.instances.items():
            if not failed[number]:
                calls.start(number, instance.get_reward)
        found: dict[int, float | Failure] = {}
        for number, given in calls.wait().items():
            reward = environments.checked_reward(given)
            failure = self.failure_of(sampler, reward, samples.data_rows[number], "get_reward")
            found[number] = Failure(failure) if failure else reward
        return found

    def close(self) -> None:
        """Closes all environments of the latest samples."""
        environments.close(self.instances.values())
        self.instances = {}

    def failure_of(
        self, sampler: Sampler, value: Any, data_row: int, method: str, turn: int = 0
    ) -> str:
        """Returns how a call of an environment failed, or ""; ends the run unless it may go on.

        Args:
            value: what the call gave.
            turn: of the episode, from 1; 0 for calls before the first and after the last.
        """
        if not isinstance(value, Failure):
            return ""
        where = f"turn {turn}, " if turn else ""
        what = f"--environment {self.user_class.name}: `{method}` {value.says}"
        failure = f"{what}; {where}data row {data_row}"
        if sampler.args.environment_errors == "stop":
            sys.exit(failure)
        return failure

    def warn_of(self, sampler: Sampler, failures: list[str], n_episodes: int) -> None:
        """Warns of episodes whose environment failed, with how the first of them did."""
        if failures:
            distributed.warn(
                sampler.accelerator,
                f"{len(failures)} of {n_episodes} episodes failed: {failures[0]}",
            )

    def on_all(self, sampler: Sampler, function: Callable[[], dict[int, Any]]) -> dict[int, Any]:
        """Calls it on every process, and returns the results of all by the episode's number."""
        found = distributed.all_or_none(sampler.accelerator, True, function)
        return distributed.gather_by_key(found)


def statistics(episodes: list[Episode]) -> dict[str, torch.Tensor]:
    """Returns what is logged of episodes, by tag, `[episodes]` each."""
    values = {
        "environment/turns": [episode.turns for episode in episodes],
        "environment/tool_calls": [episode.calls for episode in episodes],
        "environment/failed_calls": [episode.failed_calls for episode in episodes],
        "environment/model_tokens": [episode.n_sampled for episode in episodes],
        "environment/environment_tokens": [len(e.ids) - e.n_sampled for e in episodes],
    }
    of_episodes = {name: torch.tensor(v, dtype=torch.float32) for name, v in values.items()}
    return with_failed(of_episodes, torch.tensor([bool(episode.failure) for episode in episodes]))


def with_failed(
    of_episodes: dict[str, torch.Tensor], failed: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Returns values of episodes with `FAILED` among them, NaN for those that failed.

    Args:
        failed: bool `[episodes]`.
    """
    values = {name: v.masked_fill(failed, torch.nan) for name, v in of_episodes.items()}
    return {**values, FAILED: failed.float()}
