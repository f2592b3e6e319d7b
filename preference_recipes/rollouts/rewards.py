"""Scores of responses: by a reward model, reward functions and an environment."""

import contextlib
import copy
import inspect
import itertools
import json
import math
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from common import distributed, pluralize, refuse
from preference_recipes.data import dataset, prompts
from preference_recipes.data.dataset import Data
from preference_recipes.models import load, prepare, scores
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.rollouts import answers, environments
from preference_recipes.rollouts.sampler import Sampler
from preference_recipes.rollouts.samples import Samples, share_of_groups

# The names of the parts of a score that no function has: of the reward model and `get_reward`.
OF_MODEL = "reward_model"
OF_ENVIRONMENT = "environment"
# What reward functions may ask for besides the data's columns.
GIVEN = ["response_ids", "truncated", "rendered_prompts", "step"]
GIVEN_OF_EPISODES = ["messages", "environments"]
TEXTS = (str, bytes, bytearray)


class Scores(NamedTuple):
    """The scores of samples, fp32 `[samples]`, on the CPU, the same on every process."""

    total: torch.Tensor  # the weighted sum of the parts that a sample has
    # By the name of the function, or `reward_model`; NaN where a function returned None.
    parts: dict[str, torch.Tensor]

    def minus(self, penalties: torch.Tensor) -> "Scores":
        """Returns the scores less penalties, fp32 `[samples]`."""
        return self._replace(total=self.total - penalties)


def check_settings(args) -> None:
    if not weights_by_part(args):
        refuse(
            "nothing scores the responses: give --reward_model_name_or_path, --reward_function or "
            "an --environment with get_reward"
        )
    if args.environment and args.rollouts_ahead:
        refuse("--environment with --rollouts_ahead 1: not supported together")


def load_prompts(accelerator, args, tokenizer, reads_images: bool = False) -> Data:
    tools = environments.load(args.environment).tools if args.environment else []
    data = dataset.load_data(
        accelerator,
        args,
        tokenizer,
        function=prompts.prompt_row,
        reads_images=reads_images and not args.vllm_url,
        max_new_tokens=args.max_new_tokens,
        tools=tools or None,
    )
    columns = dict.fromkeys(columns_of(data))
    given = columns | dict.fromkeys(GIVEN + GIVEN_OF_EPISODES * (args.environment is not None))
    if has_processor(tokenizer):
        given["images"] = None
    for name, function in load_functions(args.reward_function).items():
        keywords = keywords_of(function, given)
        check_call(f"--reward_function {name}", inspect.signature(function), 2, keywords, columns)
    if args.environment:
        reset = environments.load(args.environment).reset
        check_call(f"--environment {args.environment}: `reset`", reset, 0, columns, columns)
    return data


def has_processor(tokenizer) -> bool:
    """Whether a model reads images; then reward functions get some of each row, maybe none."""
    return getattr(tokenizer, "processor", None) is not None


def check_call(name: str, signature, positional: int, keywords: dict, columns: dict) -> None:
    """Refuses a user's function that asks for a column that the data do not have."""
    try:
        signature.bind(*[None] * positional, **keywords)
    except TypeError as error:
        refuse(f"{name}: {error}; the data's columns: {', '.join(columns)}")


def columns_of(data: Data) -> list[str]:
    """Returns the columns of the training data that reward functions and environments may get."""
    # All rows of a set have the columns of its first one, with None for what is missing.
    firsts = data.train[data.starts]["columns"]
    return list(dict.fromkeys(itertools.chain.from_iterable(map(json.loads, firsts))))


def limit_vocabulary(policy: LogProbModel, args, data: Data, *others: str) -> None:
    """Lets a policy draw only tokens that all who read its samples have an embedding for.

    `others` read them besides the reference and the reward model.
    """
    readers = (args.ref_model_name_or_path, args.reward_model_name_or_path, *others)
    sizes = load.check_embeddings(data, args.model_name_or_path, *readers, draws=True)
    policy.vocabulary = min(sizes.values())


class Grader:
    """What scores responses: a reward model, reward functions, an environment."""

    def __init__(self, accelerator, args, tokenizer, data: Data):
        self.functions = load_functions(args.reward_function)
        self.weights = weights_by_part(args)
        self.columns = columns_of(data)
        self.fingerprints: dict[str, Any] = {}  # part of a run's identity
        self.model: nn.Module | None = None  # prepared
        self.mean = 0.0  # these normalise its scores
        self.std = 1.0
        name = args.reward_model_name_or_path
        if name is not None:
            model = scores.score_model(name, tokenizer, args, frozen=True)
            if args.normalize_reward:  # recipes/reward.py with --eval_dataset_name writes these
                self.mean = model.config.reward_mean
                self.std = model.config.reward_std
            self.fingerprints["reward model"] = load.fingerprint(accelerator, name, model.config)
            self.model = prepare.frozen(accelerator, scores.ScoreModel(model))

    @torch.no_grad()
    def score(self, sampler: Sampler, samples: Samples) -> Scores:
        """Returns the scores of what a sampler drew last. All processes must call it."""
        parts = {}
        if self.model is not None:
            parts[OF_MODEL] = self.scores_of_model(sampler, samples)
        if self.weights.keys() - {OF_MODEL}:
            parts |= self.scores_of_functions(sampler, samples)
        if sampler.episodes is not None:
            sampler.episodes.close()
        values = np.array([parts[name] for name in self.weights])  # [parts, samples]
        weights = np.array([[weight] for weight in self.weights.values()])
        is_there = ~np.isnan(values)
        sums = np.where(is_there, values * weights, 0.0).sum(0)
        # A part of weight 0 only measures: a response that it alone has scored has no reward.
        decides = is_there & (weights != 0) if weights.any() else is_there
        sums[~decides.any(0)] = np.nan
        total = torch.tensor(sums, dtype=torch.float32)
        for data_row, reward in zip(samples.row_numbers, total.tolist()):
            if not math.isfinite(reward):
                refuse(
                    f"the reward of data row {data_row} is {reward}: nothing scored it (nan), or "
                    f"fp32 does not hold it (inf); weights: {self.weights}"
                )
        return Scores(total, dict(zip(self.weights, torch.tensor(values, dtype=torch.float32))))

    def scores_of_model(self, sampler: Sampler, samples: Samples) -> list[float]:
        """Returns the reward model's normalised score of each sample, on every process."""
        score_of_row = {}
        for rows, batch in samples.scoring_batches(sampler):
            # It reads a padding row, too: other processes may wait for its forward pass.
            scores = self.model(batch).double().cpu().numpy()
            score_of_row |= dict(zip(rows, ((scores - self.mean) / self.std).tolist()))
        return as_numbers("the reward model", distributed.gather_rows(score_of_row), len(samples))

    def scores_of_functions(self, sampler: Sampler, samples: Samples) -> dict[str, list[float]]:
        """Returns the scores of all samples by each function and by the environment.

        The processes share the samples, a prompt's samples all on one of them. NaN stands for None.
        """
        n_prompts = len(samples) // samples.per_prompt
        mine = share_of_groups(sampler.accelerator, n_prompts, samples.per_prompt)

        def call() -> list[list[float]]:
            if not mine:
                return []
            given = given_to_functions(sampler, samples, mine, self.columns)
            found = {
                f"--reward_function {name}": called(function, given)
                for name, function in self.functions.items()
            }
            if OF_ENVIRONMENT in self.weights:
                name = f"--environment {sampler.args.environment}: `get_reward`"
                found[name] = sampler.episodes.call("get_reward")
            return [as_numbers(name, scores, len(mine)) for name, scores in found.items()]

        # If it ends the run on one process, the others would wait for its scores forever.
        scores_of_mine = distributed.all_or_none(sampler.accelerator, True, call)
        scored = distributed.gather_rows(dict(zip(mine, zip(*scores_of_mine))))
        names = [name for name in self.weights if name != OF_MODEL]
        return dict(zip(names, map(list, zip(*scored))))


# ============================================================ calls of reward functions
def given_to_functions(
    sampler: Sampler, samples: Samples, rows: list[int], columns: list[str]
) -> dict[str, Any]:
    """Returns what reward functions may be given about these rows of the samples, by name.

    If there are several training sets, these rows may all lack some of the columns.
    """
    data = [json.loads(samples.row_json[row]) for row in rows]
    responses = samples.answers(sampler.tokenizer)
    names = dict.fromkeys([*columns, *itertools.chain.from_iterable(data)])
    given: dict[str, Any] = {name: [values.get(name) for values in data] for name in names}
    given["prompts"] = given.pop("prompt")  # strings or lists of messages
    given["responses"] = [responses[row] for row in rows]  # of an episode its last answer
    given["response_ids"] = [samples.responses[row] for row in rows]
    given["truncated"] = [not samples.ended[row].item() for row in rows]
    texts = sampler.tokenizer.batch_decode([samples.prompts[row] for row in rows])
    given["rendered_prompts"] = texts
    given["step"] = sampler.run.global_step
    if has_processor(sampler.tokenizer):
        from preference_recipes.data import images  # only here: text needs none

        files = samples.images or [[]] * len(samples)
        given["images"] = [list(map(images.opened, files[row])) for row in rows]
    if samples.messages:
        given["messages"] = [samples.messages[row] for row in rows]
        given["environments"] = [sampler.episodes.instances[row] for row in rows]
    return given


def called(function: Callable, given: dict[str, Any]) -> Any:
    """Returns what a function `(prompts, responses, **columns) -> scores` returns; it may be async.

    It gets copies, so that what it changes is neither trained on nor seen by other functions.
    """
    # Environments may hold connections: they are not copied.
    kept = {id(instance): instance for instance in given.get("environments", [])}
    keywords = copy.deepcopy(given, kept)
    prompts_and_responses = keywords.pop("prompts"), keywords.pop("responses")
    result = function(*prompts_and_responses, **keywords_of(function, keywords))
    return environments.awaited_result(result)


def keywords_of(function: Callable, given: dict[str, Any]) -> dict[str, Any]:
    """Returns those of the given values that a function takes, besides its first two arguments."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return given
    named = [parameter.name for parameter in parameters]
    return {name: given[name] for name in named[2:] if name in given}


def as_numbers(name: str, scores: Any, n: int) -> list[float]:
    """Returns scores that a user's code gave for n responses as numbers, NaN where it gave None."""
    # Keys, characters and the order of a set are no scores, though they may be numbers.
    is_list = not isinstance(scores, (Mapping, Set, *TEXTS)) and not hasattr(scores, "columns")
    values = None
    if is_list:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            numbers = [math.nan if isinstance(score, TEXTS) else score for score in scores]
            values = [None if number is None else float(number) for number in numbers]
    if values is None or len(values) != n or any(value != value for value in values):  # NaN
        got = " ".join(repr(scores).split())[:200]
        refuse(f"{name}: expected {n} numbers, one for each response, or None; got {got}")
    return [math.nan if value is None else value for value in values]


# ============================================================ what the arguments name
def load_functions(names: list[str] | None) -> dict[str, Callable]:
    """Returns reward functions by their own names, or by MODULE:NAME if those collide."""
    names = names or []
    own_names = [name.partition(":")[2] for name in names]
    taken = [OF_MODEL, OF_ENVIRONMENT, *own_names]
    functions = {}
    for name, own_name in zip(names, own_names):
        function = environments.load_function(name)
        first, second, *_ = [*inspect.signature(function).parameters, "", ""]
        if first in ("responses", "completions") or second == "prompts":
            # They would get prompts and responses in each other's place.
            refuse(f"--reward_function {name}: prompts and responses come first, in this order")
        functions[own_name if taken.count(own_name) == 1 else name] = function
    return functions


def weights_by_part(args) -> dict[str, float]:
    """Returns the weight of each part: the reward model, the functions, the environment."""
    names = [OF_MODEL] if args.reward_model_name_or_path else []
    names += load_functions(args.reward_function)
    if args.environment is not None and environments.load(args.environment).has_reward:
        names.append(OF_ENVIRONMENT)
    weights = [1.0] * len(names) if args.reward_weights is None else args.reward_weights
    if len(weights) != len(names) or not np.isfinite(weights).all():
        refuse(
            f"--reward_weights {' '.join(map(str, weights))}: expected "
            f"{pluralize(len(names), 'finite number')}, one for each of {', '.join(names)}"
        )
    return dict(zip(names, weights))


# ============================================================ a reward function
def answer_reward(prompts, responses, answer, rendered_prompts=None, **columns):
    """Returns 1 if the response's final answer is the column `answer`, else 0; None without one.

    Where the column holds a list, any of its entries is right. See `answers.is_right`.
    """
    prompts = rendered_prompts or [""] * len(responses)
    return [
        float(answers.is_right(response, right, prompt)) if dataset.answer_text(right) else None
        for prompt, response, right in zip(prompts, responses, answer)
    ]
