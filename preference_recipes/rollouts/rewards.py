"""Scores responses by a reward model, reward functions or both; has three such functions."""

import inspect
import json
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from common import arguments, distributed
from preference_recipes.data import answer_column, dataset, prompts
from preference_recipes.data.dataset import Data
from preference_recipes.models import load, prepare, scores
from preference_recipes.models.packing import Packer
from preference_recipes.rollouts import answers, environments, episodes, reward_calls
from preference_recipes.rollouts.environments import OF_ENVIRONMENT
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import Samples, share_of_groups

# The name of the reward model's part among those of the functions.
OF_MODEL = "reward_model"


class Scores(NamedTuple):
    """The scores of samples, fp32 `[samples]`, on the CPU, the same on every process."""

    total: torch.Tensor  # the weighted sum of the parts that a sample has
    # By the name of the function, or `reward_model`; NaN where a function returned None.
    parts: dict[str, torch.Tensor]


def check_settings(args) -> None:
    """Refuses settings of the rewards that cannot work."""
    if not weights_by_part(args):
        sys.exit(
            "nothing scores the responses: give --reward_model_name_or_path, --reward_function or "
            "an --environment with get_reward"
        )
    if args.environment and args.rollouts_ahead:
        sys.exit("--environment with --rollouts_ahead 1: not supported together")


def load_prompts(accelerator, args, tokenizer) -> Data:
    """Loads prompts to respond to, and checks that they have what the reward functions ask for."""
    data = dataset.load_data(
        accelerator,
        args,
        tokenizer,
        function=prompts.prompt_row,
        exact_match=True,
        max_new_tokens=args.max_new_tokens,
        tools=episodes.tools(args),
    )
    check_signatures(args, data)
    return data


class Judge:
    """What scores responses: a reward model, reward functions or both.

    Attributes:
        weights: of each part of the score, by its name; the reward model's is `reward_model`.
        fingerprints: of the reward model, for the identity of a checkpoint.
    """

    def __init__(self, sampler: Sampler):
        """Loads what the arguments name. All processes must call it."""
        args = sampler.args
        self.functions = load_functions(args.reward_function)
        self.weights = weights_by_part(args)
        self.columns = columns_by_set(sampler.data)["the training data"]
        self.fingerprints: dict[str, Any] = {}
        self.model: nn.Module | None = None  # prepared
        self.mean = 0.0  # these normalise its scores
        self.std = 1.0
        name = args.reward_model_name_or_path
        if name is None:
            return
        model = scores.ScoreModel(scores.score_model(name, sampler.tokenizer, args, frozen=True))
        if args.normalize_reward:
            if not getattr(model.config, "reward_std", None):
                sys.exit(
                    f"--normalize_reward: {name!r} has no reward_std in its config; "
                    "recipes/reward.py with --eval_dataset_name writes it"
                )
            self.mean = model.config.reward_mean
            self.std = model.config.reward_std
        found = load.fingerprint(sampler.accelerator, name, model.config)
        self.fingerprints["reward model"] = found
        self.model = prepare.frozen(sampler.accelerator, model)

    @torch.no_grad()
    def score(self, sampler: Sampler, samples: Samples, packer: Packer) -> Scores:
        """Returns the scores of the responses. All processes must call it."""
        parts = {}
        if self.model is not None:
            parts[OF_MODEL] = self.scores_of_model(sampler, samples, packer)
        if self.functions:
            parts |= self.scores_of_functions(sampler, samples)
        if OF_ENVIRONMENT in self.weights:
            parts[OF_ENVIRONMENT] = sampler.stage.rewards(sampler, samples)
        if sampler.stage is not None:
            sampler.stage.close()
        values = np.array([parts[name] for name in self.weights])  # [parts, samples]
        weights = np.array([[weight] for weight in self.weights.values()])
        is_there = ~np.isnan(values)
        # A part of weight 0 only measures: a response that it alone has scored has no reward.
        decides = is_there & (weights != 0) if weights.any() else is_there
        total = np.where(is_there, values * weights, 0.0).sum(0)
        for data_row, is_scored, reward in zip(samples.data_rows, decides.any(0), total):
            if not is_scored or not abs(reward) <= reward_calls.LARGEST:
                found = f"{reward:g}, which fp32 does not hold" if is_scored else "None"
                sys.exit(f"the reward of data row {data_row} is {found}; weights: {self.weights}")
        return Scores(
            total=torch.tensor(total, dtype=torch.float32),
            parts=dict(zip(self.weights, torch.tensor(values, dtype=torch.float32))),
        )

    def scores_of_model(self, sampler: Sampler, samples: Samples, packer: Packer) -> list[float]:
        """Returns the reward model's normalised score of each sample, on every process."""
        score_of_row = {}
        for rows, batch in samples.scoring_batches(sampler, packer):
            # It reads a padding row, too: other processes may wait for its forward pass.
            scores = self.model(batch).double().cpu().numpy()
            normalised = (scores - self.mean) / self.std
            score_of_row |= dict(zip(rows, normalised.tolist()))
        of_samples = distributed.gather_rows(score_of_row)
        for data_row, score in zip(samples.data_rows, of_samples):
            # Refused here: from now on NaN means that a function returned None.
            if not abs(score) <= reward_calls.LARGEST:
                sys.exit(
                    f"the reward model's score of data row {data_row} is {score}. fp16 activations "
                    "overflow where bf16's do not"
                )
        return of_samples

    def scores_of_functions(self, sampler: Sampler, samples: Samples) -> dict[str, list[float]]:
        """Returns each function's scores of all samples, NaN where it returned None.

        The processes share the samples, a prompt's samples all on one of them.
        """
        n_prompts = len(samples) // samples.per_prompt
        mine = share_of_groups(sampler.accelerator, n_prompts, samples.per_prompt)

        def call() -> list[list[float]]:
            if not mine:
                return []
            step = sampler.progress.global_step
            given = reward_calls.collect(sampler.tokenizer, samples, mine, step, self.columns)
            if sampler.stage is not None:
                given.keywords["environments"] = [sampler.stage.instances[row] for row in mine]
            return [reward_calls.call(name, f, given) for name, f in self.functions.items()]

        # If it ends the run on one process, the others would wait for its scores forever.
        scores_of_mine = distributed.all_or_none(sampler.accelerator, True, call)
        of_samples = distributed.gather_rows(dict(zip(mine, zip(*scores_of_mine))))
        return dict(zip(self.functions, map(list, zip(*of_samples))))


def load_functions(names: list[str] | None) -> dict[str, Callable]:
    """Returns reward functions by their own names, or by MODULE:NAME if those collide."""
    names = names or []
    own_names = [name.partition(":")[2] for name in names]
    taken = [OF_MODEL, OF_ENVIRONMENT, *own_names]
    return {
        own_name if taken.count(own_name) == 1 else name: arguments.load_function(name)
        for name, own_name in zip(names, own_names)
    }


def weights_by_part(args) -> dict[str, float]:
    """Returns the weight of each part of the score; default 1 each.

    The reward model's is the first, an environment's `get_reward` the last.
    """
    names = [OF_MODEL] if args.reward_model_name_or_path else []
    names += load_functions(args.reward_function)
    if args.environment is not None and environments.load(args.environment).has_reward:
        names.append(OF_ENVIRONMENT)
    weights = [1.0] * len(names) if args.reward_weights is None else args.reward_weights
    if len(weights) != len(names) or not np.isfinite(weights).all():
        sys.exit(
            f"--reward_weights {' '.join(map(str, weights))}: expected {len(names)} finite "
            f"numbers, one for each of {', '.join(names)}"
        )
    return dict(zip(names, weights))


def check_signatures(args, data: Data) -> None:
    """Refuses functions that cannot take what the data has, before a model is loaded."""
    of_episodes = reward_calls.OF_EPISODES if args.environment else ()
    for name_of_data, columns in columns_by_set(data).items():
        passed = [column for column in columns if column not in reward_calls.OWN_NAMES]
        passed += [*reward_calls.OWN_KEYWORDS, *of_episodes]
        for name, function in load_functions(args.reward_function).items():
            signature = inspect.signature(function)
            first, second, *_ = [*signature.parameters, "", ""]
            error = ""
            if first in ("responses", "completions") or second == "prompts":
                # These would be called, with prompts and responses in each other's place.
                error = "prompts and responses come first, in this order"
            try:
                signature.bind([], [], **reward_calls.accepted(signature, dict.fromkeys(passed)))
            except TypeError as reason:
                error = str(reason)
            if error:
                sys.exit(
                    f"--reward_function {name} takes {signature}: {error}. It is called with "
                    "prompts, responses and, by name, what it takes of "
                    f"{', '.join(passed)} (of {name_of_data})"
                )


def columns_by_set(data: Data) -> dict[str, list[str]]:
    """Returns the columns of each set, by the name that messages give to the data.

    All rows of a set have the columns of its first one, with None for what is missing.
    """
    starts = np.cumsum((0, *data.mixture.sizes[:-1])).tolist()
    texts = {"the training data": data.train[starts]["columns"]}
    for prefix, eval_set in data.eval_sets.items():
        texts[prefix.rstrip("/")] = eval_set[:1]["columns"]
    return {name: reward_calls.columns_of(list(map(json.loads, t))) for name, t in texts.items()}


# ============================================================ reward functions


def answer_reward(prompts, responses, answer, rendered_prompts=None, **columns):
    """Returns 1 if the response's final answer is the column `answer`, else 0.

    Of a column of lists it is any of their entries. Returns None if the row has no answer.
    `answers.is_right` decides what is right.
    """
    return judged(answers.is_right, rendered_prompts or prompts, responses, answer)


def math_reward(prompts, responses, answer, rendered_prompts=None, **columns):
    """As `answer_reward`, by `answers.is_equal`. It needs the package math-verify."""
    return judged(answers.is_equal, rendered_prompts or prompts, responses, answer)


def judged(is_right: Callable, prompts: list, responses: list, answer: list) -> list[float | None]:
    """Returns what a function says of each response and answer, None where there is no answer."""
    scores: list[float | None] = []
    for prompt, response, right in zip(prompts, responses, answer):
        right = answer_column.to_text(right)
        if right == answer_column.OBJECT:
            raise ValueError(f"the column answer holds an object, at the prompt {prompt!r:.80}")
        if right == "":
            scores.append(None)
            continue
        if isinstance(prompt, str):
            response = answers.with_opened_thought(prompt, response)
        scores.append(float(is_right(response, right)))
    return scores


# As in TRL's `think_format_reward`: thinking, once, and then an answer.
THINK_FORMAT = r"^<think>(?!.*<think>)(.*?)</think>.*$"


def format_reward(prompts, responses, format_pattern=None, **columns):
    """Returns 1 if the response matches a regular expression from its beginning, else 0.

    The expression is the column `format_pattern`, if the row has one, else `THINK_FORMAT`. A dot
    also matches line breaks.
    """
    patterns = format_pattern or [None] * len(responses)
    flags = re.DOTALL | re.MULTILINE
    return [
        float(re.match(pattern or THINK_FORMAT, response, flags) is not None)
        for pattern, response in zip(patterns, responses)
    ]
