"""Scores responses by a reward model, by reward functions or by both; two functions are here."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from common import arguments, distributed
from common.data.mixture import Mixture
from common.models import load, prepare
from common.models.logprobs import ScoreModel
from common.rollout import answers, calls
from common.rollout.samples import Samples

# The name of the reward model's part among those of the functions.
OF_MODEL = "reward_model"


@dataclass
class Judge:
    """What scores responses: the weighted sum of its parts.

    Attributes:
        model: a prepared `ScoreModel`.
        mean, std: the model's scores are normalised by them.
        functions: reward functions by the names of their parts, see `calls.call`.
        weights: of each part, by its name; the reward model's is `reward_model`.
        timeout: seconds that a call of a function may take; 0: any.
        columns: of the training data; None is passed of those that a function wants and none of
            the rows of a call has.
    """

    model: nn.Module | None = None
    mean: float = 0.0
    std: float = 1.0
    functions: dict[str, Callable] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    timeout: float = 0.0
    columns: list[str] = field(default_factory=list)

    @property
    def parts(self) -> list[str]:
        """The names of the parts, the reward model's first."""
        of_model = [] if self.model is None else [OF_MODEL]
        return of_model + list(self.functions)


class Scores(NamedTuple):
    """The scores of samples, on the CPU, the same on every process.

    Attributes:
        total: fp32 `[samples]`, the weighted sum of the parts that a sample has.
        parts: fp32 `[samples]` by the name of the function, or `reward_model`; NaN where a function
            returned None.
    """

    total: torch.Tensor
    parts: dict[str, torch.Tensor]


def load_judge(
    accelerator,
    tokenizer,
    model_name: str | None,
    function_names: list[str] | None,
    weights: list[float] | None,
    normalize: bool,
    timeout: float,
    attn_implementation: str | None,
    columns: list[str],
) -> Judge:
    """Loads a reward model, reward functions `MODULE:NAME`, or both.

    Args:
        weights: see `weights_by_part`.
        normalize: use the mean and the standard deviation that the model's config holds.
        timeout, columns: see `Judge`.

    Raises:
        SystemExit: one of them cannot be loaded, the weights are not as many, or the config lacks
            what normalises.
    """
    functions = load_functions(function_names)
    judge = Judge(
        functions=functions,
        weights=weights_by_part(model_name, functions, weights),
        timeout=timeout,
        columns=columns,
    )
    if model_name:
        model = ScoreModel(load.score_model(model_name, tokenizer, attn_implementation))
        if normalize:
            if not getattr(model.config, "reward_std", None):
                sys.exit(
                    f"--normalize_reward: {model_name!r} has no reward_std in its config; "
                    "recipes/reward.py with --eval_dataset_name writes it"
                )
            judge.mean = model.config.reward_mean
            judge.std = model.config.reward_std
        judge.model = prepare.frozen(accelerator, model)
    return judge


def load_functions(names: list[str] | None) -> dict[str, Callable]:
    """Loads reward functions; returns them by their own names, or by MODULE:NAME if those collide.

    Raises:
        SystemExit: a function cannot be loaded, or is given twice.
    """
    names = names or []
    own_names = [name.partition(":")[2] for name in names]
    functions = {}
    for name, own_name in zip(names, own_names):
        function = arguments.load_function("reward_function", name)
        if names.count(name) > 1:
            sys.exit(f"--reward_function {name} is given twice; --reward_weights can count it more")
        is_unique = own_names.count(own_name) == 1 and own_name != OF_MODEL
        functions[own_name if is_unique else name] = function
    return functions


def weights_by_part(
    model_name: str | None, functions: dict[str, Callable], weights: list[float] | None
) -> dict[str, float]:
    """Returns the weight of each part.

    Args:
        weights: the reward model's, if there is one, then one for each function; default 1 each.

    Raises:
        SystemExit: the weights are not as many, or not finite.
    """
    names = [OF_MODEL] if model_name else []
    names += functions
    weights = [1.0] * len(names) if weights is None else weights
    if len(weights) != len(names) or not np.isfinite(weights).all():
        sys.exit(
            f"--reward_weights {' '.join(map(str, weights))}: expected {len(names)} finite "
            f"numbers, one for each of {', '.join(names)}"
        )
    return dict(zip(names, weights))


def check_signatures(
    functions: dict[str, Callable], train_set, mixture: Mixture, eval_sets: dict
) -> list[str]:
    """Refuses functions that cannot take what the data have, before a model is loaded.

    Args:
        train_set, mixture: of `dataset.load_mixture`.
        eval_sets: of `dataset.load_evaluation_sets`.

    Returns:
        the columns of all training sets.

    Raises:
        SystemExit: see `calls.check_signature`.
    """
    # The first row of a set tells: a column that a row lacks is None in it.
    starts = np.cumsum((0, *mixture.sizes[:-1])).tolist()
    first_rows = {"the training data": train_set[starts]["columns"]}
    first_rows |= {
        prefix.rstrip("/"): eval_set[:1]["columns"] for prefix, eval_set in eval_sets.items()
    }
    columns = {}
    for data, texts in first_rows.items():
        rows = [json.loads(text) for text in texts]
        columns[data] = list(dict.fromkeys(name for row in rows for name in row))
        has_messages = any(not isinstance(row["prompt"], str) for row in rows)
        for name, function in functions.items():
            calls.check_signature(name, function, data, columns[data], has_messages)
    return columns["the training data"]


@torch.no_grad()
def score(
    accelerator,
    tokenizer,
    judge: Judge,
    samples: Samples,
    batch_size: int,
    share_prompts: bool,
    step: int,
) -> Scores:
    """Returns the scores of the responses. All processes must call it.

    Args:
        batch_size, share_prompts: for the reward model, see `Samples.scoring_batches`.
        step: `global_step`, for the reward functions.

    Raises:
        SystemExit: on every process, if a function fails on any of them, see `calls.call`; if a
            score of the reward model, or a sum, is not finite in fp32; if a sample got no score.
    """
    parts = {}
    if judge.model is not None:
        parts[OF_MODEL] = scores_of_model(accelerator, judge, samples, batch_size, share_prompts)
        # Below, NaN means that a function returned None.
        distributed.all_or_none(
            accelerator,
            accelerator.is_main_process,
            check_model_scores,
            tokenizer,
            samples,
            parts[OF_MODEL],
        )
    if judge.functions:
        mine = samples.whole_groups(accelerator)
        # If a function fails on one process, the others would wait for its scores forever.
        of_mine = distributed.all_or_none(
            accelerator, True, scores_of_functions, judge, tokenizer, samples, mine, step
        )
        of_sample = dict(zip(mine, zip(*of_mine)))
        columns = zip(*distributed.gather_rows(of_sample))
        parts |= dict(zip(judge.functions, map(list, columns)))

    values = np.array([parts[name] for name in judge.parts])
    weights = np.array([[judge.weights[name]] for name in judge.parts])
    there = ~np.isnan(values)
    total = np.where(there, values * weights, 0.0).sum(0)
    distributed.all_or_none(
        accelerator, accelerator.is_main_process, check_totals, judge, samples, there, total
    )
    return Scores(
        total=torch.tensor(total, dtype=torch.float32),
        parts={name: torch.tensor(parts[name], dtype=torch.float32) for name in judge.parts},
    )


def scores_of_model(
    accelerator, judge: Judge, samples: Samples, batch_size: int, share_prompts: bool
) -> list[float]:
    """Returns the reward model's score of each sample, normalised, the same on every process."""
    score_of_sample = {}
    for numbers, inputs in samples.scoring_batches(accelerator, batch_size, share_prompts):
        # It reads a padding row, too: other processes may wait for its forward pass.
        scores = judge.model(inputs).double().cpu().numpy()
        normalised = (scores - judge.mean) / judge.std
        score_of_sample |= dict(zip(numbers, normalised.tolist()))
    return distributed.gather_rows(score_of_sample)


def check_model_scores(tokenizer, samples: Samples, scores: list[float]) -> None:
    """Refuses scores of the reward model that are not finite.

    Raises:
        SystemExit: naming the first such sample, with the statistics of all scores.
    """
    is_finite = np.abs(scores) <= calls.LARGEST
    if is_finite.all():
        return
    first = int(np.argmin(is_finite))
    response = tokenizer.decode(samples.responses[first], skip_special_tokens=True)
    finite = np.array(scores)[is_finite]
    others = ""
    if len(finite):
        others = f", the others from {finite.min():g} to {finite.max():g}, their mean "
        others += f"{finite.mean():g}"
    sys.exit(
        f"the reward model's score of data row {samples.rows[first]}, response "
        f"{calls.cut(response)}, is {scores[first]}; {len(scores) - len(finite)} of {len(scores)} "
        f"scores are not finite{others}. fp16 activations overflow where bf16's do not"
    )


def scores_of_functions(
    judge: Judge, tokenizer, samples: Samples, mine: list[int], step: int
) -> list[list[float]]:
    """Returns for each function its scores of this process's samples."""
    if not mine:
        return [[] for _ in judge.functions]
    given = calls.collect(tokenizer, samples, mine, step, judge.columns)
    return [
        calls.call(name, function, given, judge.timeout)
        for name, function in judge.functions.items()
    ]


def check_totals(judge: Judge, samples: Samples, there: np.ndarray, total: np.ndarray) -> None:
    """Refuses a sample that no part scored, or whose weighted sum fp32 does not hold.

    Args:
        there: bool `[parts, samples]`, which scores there are.
        total: `[samples]`.
    """
    for number, is_scored in enumerate(there.any(0)):
        if not is_scored:
            sys.exit(
                f"no reward for data row {samples.rows[number]}: "
                f"{', '.join(judge.parts)} returned None for one of its responses"
            )
        if not abs(total[number]) <= calls.LARGEST:
            weights = ", ".join(f"{judge.weights[name]:g} for {name}" for name in judge.parts)
            sys.exit(
                f"--reward_weights ({weights}): the reward of data row {samples.rows[number]} is "
                f"{total[number]:g}, expected none beyond {calls.LARGEST:.3g} (fp32)"
            )


# ============================================================ reward functions


def answer_reward(
    prompts: list, responses: list[str], answer: list, **columns
) -> list[float | None]:
    """Returns 1 if the response's final answer is the column `answer`, else 0.

    Returns None where the row has no answer: see `answers.is_right` for what is right.
    """
    return [
        float(answers.is_right(response, right)) if right not in (None, "") else None
        for response, right in zip(responses, answer)
    ]


# As in TRL's `think_format_reward`: thinking, once, and then an answer.
THINK_FORMAT = r"^<think>(?!.*<think>)(.*?)</think>.*$"


def format_reward(
    prompts: list, responses: list[str], format_pattern: list[str] | None = None, **columns
) -> list[float]:
    """Returns 1 if the response matches a regular expression from its beginning, else 0.

    The expression is the column `format_pattern`, where the data has one, else `THINK_FORMAT`. A
    dot matches line breaks, too.
    """
    patterns = format_pattern or [None] * len(responses)
    flags = re.DOTALL | re.MULTILINE
    return [
        float(re.match(pattern or THINK_FORMAT, response, flags) is not None)
        for pattern, response in zip(patterns, responses)
    ]
