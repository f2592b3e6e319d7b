"""Scores responses by a reward model, reward functions or both; has three such functions."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from common import arguments, as_list, distributed
from common.shared_args import refuse_changed
from preference_recipes.data import answer_column, dataset, prompts
from preference_recipes.data.chat import decode_answers
from preference_recipes.data.dataset import Data
from preference_recipes.models import load, prepare
from preference_recipes.models.logprobs import ScoreModel
from preference_recipes.models.packing import Packer
from preference_recipes.rollouts import answers, environments, episodes, reward_calls
from preference_recipes.rollouts.environments import OF_ENVIRONMENT
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import Samples

# The name of the reward model's part among those of the functions.
OF_MODEL = "reward_model"


class Scores(NamedTuple):
    """The scores of samples, on the CPU, the same on every process.

    Attributes:
        total: fp32 `[samples]`, the weighted sum of the parts that a sample has; NaN for an episode
            whose environment failed.
        parts: fp32 `[samples]` by the name of the function, or `reward_model`; NaN where a function
            returned None, and where the total is.
    """

    total: torch.Tensor
    parts: dict[str, torch.Tensor]

    def with_total(self, total: torch.Tensor) -> "Scores":
        """Returns the same parts with another total, such as one that is clipped."""
        return Scores(total, self.parts)


def check_settings(args) -> None:
    """Refuses settings of the rewards that would be ignored or cannot work.

    Args:
        args: `RewardArgs`.
    """
    if not weights_by_part(args):
        sys.exit(
            "nothing scores the responses: give --reward_model_name_or_path, --reward_function or "
            "an --environment with get_reward"
        )
    if args.normalize_reward and not args.reward_model_name_or_path:
        sys.exit(
            "--normalize_reward is for a reward model's scores: give --reward_model_name_or_path"
        )
    if args.environment is None:
        unused = ("max_turns", "environment_timeout", "environment_errors")
        refuse_changed(args, unused, "only an --environment needs it")
    elif args.rollouts_ahead:
        sys.exit("--environment with --rollouts_ahead 1: not supported together")


def load_prompts(accelerator, args, tokenizer) -> Data:
    """Loads prompts to respond to, and checks that they have what the reward functions ask for.

    Raises:
        SystemExit: see `dataset.load_data` and `check_signatures`.
    """
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
        model: a prepared `ScoreModel`, or None.
        functions: reward functions by the names of their parts, see `reward_calls.call`.
        weights: of each part of the score, by its name; the reward model's is `reward_model`.
        columns: those of the training data, see `reward_calls.Given`.
        fingerprints: of the reward model, and of the user's code, for the identity of a checkpoint.
    """

    def __init__(self, sampler: Sampler):
        """Loads what the arguments name. All processes must call it.

        Raises:
            SystemExit: one of them cannot be loaded, or the model's config lacks what normalises.
        """
        args = sampler.args
        self.functions = load_functions(args.reward_function)
        self.weights = weights_by_part(args)
        self.columns = reward_calls.columns_of(first_rows(sampler.data)["the training data"])
        self.model: nn.Module | None = None
        own = as_list(args.reward_function) + as_list(args.environment)
        sources = {name: arguments.source_of(name) for name in own}
        self.fingerprints: dict[str, Any] = {"source of the rewards": sources}
        # The model's scores are normalised by them.
        self.mean = 0.0
        self.std = 1.0
        if args.reward_model_name_or_path:
            self.load_model(sampler, args.reward_model_name_or_path)

    def load_model(self, sampler: Sampler, name: str) -> None:
        """Loads the reward model, and what normalises its scores."""
        model = ScoreModel(load.score_model(name, sampler.tokenizer, sampler.args, frozen=True))
        if sampler.args.normalize_reward:
            if not getattr(model.config, "reward_std", None):
                sys.exit(
                    f"--normalize_reward: {name!r} has no reward_std in its config; "
                    "recipes/reward.py with --eval_dataset_name writes it"
                )
            self.mean = model.config.reward_mean
            self.std = model.config.reward_std
        self.fingerprints["reward model"] = load.fingerprint(
            sampler.accelerator, name, model.config
        )
        self.model = prepare.frozen(sampler.accelerator, model)

    @torch.no_grad()
    def score(self, sampler: Sampler, samples: Samples, packer: Packer) -> Scores:
        """Returns the scores of the responses. All processes must call it.

        Raises:
            SystemExit: on every process, if a function fails on any of them, see
                `reward_calls.call`; if a score of the reward model, or a sum, is not finite in
                fp32; if a sample got no score.
        """
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
        failed = samples.failed.numpy()
        values[:, failed] = np.nan
        is_there = ~np.isnan(values)
        # A part of weight 0 only measures: a response that it alone has scored has no reward.
        decides = is_there & (weights != 0) if weights.any() else is_there
        total = np.where(is_there, values * weights, 0.0).sum(0)
        total[failed] = np.nan
        check = partial(self.check_totals, samples, decides, total)
        distributed.all_or_none(sampler.accelerator, sampler.accelerator.is_main_process, check)
        return Scores(
            total=torch.tensor(total, dtype=torch.float32),
            parts=dict(zip(self.weights, torch.tensor(values, dtype=torch.float32))),
        )

    def scores_of_model(self, sampler: Sampler, samples: Samples, packer: Packer) -> list[float]:
        """Returns the reward model's score of each sample, normalised, the same on all processes.

        Raises:
            SystemExit: on every process, if one is not finite.
        """
        score_of_row = {}
        for rows, batch in samples.scoring_batches(sampler, packer):
            # It reads a padding row, too: other processes may wait for its forward pass.
            scores = self.model(batch).double().cpu().numpy()
            normalised = (scores - self.mean) / self.std
            score_of_row |= dict(zip(rows, normalised.tolist()))
        scores = distributed.gather_rows(score_of_row)
        # Checked here: from now on NaN means that a function returned None.
        check = partial(check_model_scores, sampler.tokenizer, samples, scores)
        distributed.all_or_none(sampler.accelerator, sampler.accelerator.is_main_process, check)
        return scores

    def scores_of_functions(self, sampler: Sampler, samples: Samples) -> dict[str, list[float]]:
        """Returns each function's scores of all samples, NaN where it returned None.

        The processes share the samples, a prompt's samples all on one of them.
        """
        failed = samples.failed.tolist()
        mine = [row for row in samples.whole_groups(sampler.accelerator) if not failed[row]]
        call = partial(self.call_functions, sampler, samples, mine)
        # If a function fails on one process, the others would wait for its scores forever.
        scores_of_mine = distributed.all_or_none(sampler.accelerator, True, call)
        scores_of_row = distributed.gather_by_key(dict(zip(mine, zip(*scores_of_mine))))
        of_failed = (np.nan,) * len(self.functions)
        scores = [scores_of_row.get(row, of_failed) for row in range(len(samples))]
        return dict(zip(self.functions, map(list, zip(*scores))))

    def call_functions(
        self, sampler: Sampler, samples: Samples, rows: list[int]
    ) -> list[list[float]]:
        """Returns for each function its scores of these samples."""
        if not rows:
            return [[] for _ in self.functions]
        given = reward_calls.collect(
            sampler.tokenizer,
            samples,
            rows,
            step=sampler.progress.global_step,
            columns=self.columns,
        )
        if sampler.stage is not None:
            instances = [sampler.stage.instances[row] for row in rows]
            given.keywords["environments"] = reward_calls.Uncopied(instances)
        return [
            reward_calls.call(name, function, given) for name, function in self.functions.items()
        ]

    def check_totals(self, samples: Samples, decides: np.ndarray, total: np.ndarray) -> None:
        """Refuses a sample that no part which counts has scored, or a sum that fp32 does not hold.

        Args:
            decides: bool `[parts, samples]`, which scores there are that count.
            total: `[samples]`.
        """
        rows = zip(samples.data_rows, samples.failed.tolist(), decides.any(0), total)
        for data_row, has_failed, is_scored, reward in rows:
            if has_failed:
                continue
            if not is_scored:
                sys.exit(
                    f"no reward for data row {data_row}: {', '.join(self.weights)} returned None "
                    "for one of its responses"
                )
            if not abs(reward) <= reward_calls.LARGEST:
                weights = ", ".join(
                    f"{weight:g} for {part}" for part, weight in self.weights.items()
                )
                sys.exit(
                    f"--reward_weights ({weights}): the reward of data row {data_row} is "
                    f"{reward:g}, expected none beyond {reward_calls.LARGEST:.3g} (fp32)"
                )


def load_functions(names: list[str] | None) -> dict[str, Callable]:
    """Returns reward functions by their own names, or by MODULE:NAME if those collide.

    Raises:
        SystemExit: a function cannot be loaded, or is given twice.
    """
    names = names or []
    own_names = [name.partition(":")[2] for name in names]
    functions = {}
    for name, own_name in zip(names, own_names):
        function = arguments.load_function(name)
        if names.count(name) > 1:
            sys.exit(f"--reward_function {name} is given twice; --reward_weights can count it more")
        is_unique = own_names.count(own_name) == 1 and own_name not in (OF_MODEL, OF_ENVIRONMENT)
        functions[own_name if is_unique else name] = function
    return functions


def weights_by_part(args) -> dict[str, float]:
    """Returns the weight of each part of the score; default 1 each.

    The reward model's is the first, an environment's `get_reward` the last.

    Raises:
        SystemExit: there are more or fewer weights than parts, or one is not finite; a function
            cannot be loaded.
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
    """Refuses functions that cannot take what the data has, before a model is loaded.

    Raises:
        SystemExit: see `reward_calls.check_signature` and `environments.check_columns`.
    """
    functions = load_functions(args.reward_function).values()
    if math_reward in functions:
        importlib.import_module("math_verify")  # not first after a rollout
    if answer_reward in functions or math_reward in functions:
        answer_column.refuse_objects(" ".join(as_list(args.dataset_name)), data.train)
    for name_of_data, rows in first_rows(data).items():
        if args.environment:
            columns = reward_calls.columns_of(rows)
            environments.check_columns(args.environment, name_of_data, columns)
        for name, function in load_functions(args.reward_function).items():
            reward_calls.check_signature(
                name,
                function,
                name_of_data,
                reward_calls.columns_of(rows),
                also=reward_calls.OF_EPISODES if args.environment else (),
            )


def first_rows(data: Data) -> dict[str, list[dict]]:
    """Returns the first row of each set, by the name that messages give to the data.

    It tells the columns of its set: all its rows have the same, with None for what is missing.
    """
    starts = np.cumsum((0, *data.mixture.sizes[:-1])).tolist()
    texts = {"the training data": data.train[starts]["columns"]}
    texts |= {
        prefix.rstrip("/"): eval_set[:1]["columns"] for prefix, eval_set in data.eval_sets.items()
    }
    return {name: [json.loads(row) for row in rows] for name, rows in texts.items()}


def check_model_scores(tokenizer, samples: Samples, scores: list[float]) -> None:
    """Refuses scores of the reward model that are not finite.

    Raises:
        SystemExit: naming the first such sample, with statistics of all scores.
    """
    is_finite = np.abs(scores) <= reward_calls.LARGEST
    if is_finite.all():
        return
    first = int(np.argmin(is_finite))
    (response,) = decode_answers(tokenizer, [samples.responses[first]])
    finite = np.array(scores)[is_finite]
    others = ""
    if len(finite):
        others = f", the others from {finite.min():g} to {finite.max():g}, their mean "
        others += f"{finite.mean():g}"
    sys.exit(
        f"the reward model's score of data row {samples.data_rows[first]}, response "
        f"{reward_calls.cut(response)}, is {scores[first]}; {len(scores) - len(finite)} of "
        f"{len(scores)} scores are not finite{others}. fp16 activations overflow where bf16's do "
        "not"
    )


# ============================================================ reward functions


def answer_reward(
    prompts: list,
    responses: list[str],
    answer: list,
    rendered_prompts: list[str] | None = None,
    **columns,
) -> list[float | None]:
    """Returns 1 if the response's final answer is the column `answer`, else 0.

    Of a column of lists it is any of their entries. Returns None if the row has no answer.
    `answers.is_right` decides what is right.
    """
    return judged(answers.is_right, rendered_prompts or prompts, responses, answer)


def math_reward(
    prompts: list,
    responses: list[str],
    answer: list,
    rendered_prompts: list[str] | None = None,
    **columns,
) -> list[float | None]:
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


def format_reward(
    prompts: list, responses: list[str], format_pattern: list[str] | None = None, **columns
) -> list[float]:
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
