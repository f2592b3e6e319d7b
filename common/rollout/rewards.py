"""Scores responses by a reward model, a reward function or both; one such function is here."""

import json
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from common import arguments, distributed
from common.models import load, prepare
from common.models.logprobs import ScoreModel
from common.rollout import answers
from common.rollout.samples import Samples


class Judge(NamedTuple):
    """What scores responses. Where there are a model and a function, their scores are added.

    Attributes:
        model: a prepared `ScoreModel`.
        function: `(prompts, responses, **columns) -> scores`, see `function_scores`.
        function_name: as the user gave it, for messages.
        mean, std: the model's scores are normalised by them.
    """

    model: nn.Module | None = None
    function: Callable | None = None
    function_name: str | None = None
    mean: float = 0.0
    std: float = 1.0


def load_judge(
    accelerator,
    tokenizer,
    model_name: str | None,
    function_name: str | None,
    normalize: bool,
    attn_implementation: str | None,
) -> Judge:
    """Loads a reward model, a reward function `MODULE:NAME`, or both.

    Args:
        normalize: use the mean and the standard deviation that the model's config holds.

    Raises:
        SystemExit: one of them cannot be loaded, or the config lacks what normalises.
    """
    judge = Judge(function_name=function_name)
    if function_name:
        function = arguments.load_function("reward_function", function_name)
        judge = judge._replace(function=function)
    if model_name:
        model = ScoreModel(load.score_model(model_name, tokenizer, attn_implementation))
        if normalize:
            if not getattr(model.config, "reward_std", None):
                sys.exit(
                    f"--normalize_reward: {model_name!r} has no reward_std in its config; "
                    "recipes/reward.py with --eval_dataset_name writes it"
                )
            judge = judge._replace(mean=model.config.reward_mean, std=model.config.reward_std)
        judge = judge._replace(model=prepare.frozen(accelerator, model))
    return judge


@torch.no_grad()
def score(
    accelerator,
    tokenizer,
    judge: Judge,
    samples: Samples,
    scoring_batches: Iterable[tuple[list[int], dict]],
) -> torch.Tensor:
    """Returns the score of each response, fp32 `[samples]` on the CPU, the same on every process.

    All processes must call it.

    Args:
        scoring_batches: this process's share of the samples, see `Samples.scoring_batches`.

    Raises:
        ValueError: the function returned other than one finite score for each response.
    """
    score_of_sample = {}
    for numbers, inputs in scoring_batches:
        # The model reads a padding row, too: other processes may wait for its forward pass.
        if judge.model is not None:
            of_model = judge.model(inputs).double().cpu().numpy()
        if not numbers:
            continue
        scores = np.zeros(len(numbers))
        if judge.model is not None:
            scores += (of_model - judge.mean) / judge.std
        if judge.function is not None:
            scores += function_scores(judge, tokenizer, samples, numbers)
        score_of_sample |= dict(zip(numbers, scores.tolist()))
    return torch.tensor(distributed.gather_rows(score_of_sample))


def function_scores(judge: Judge, tokenizer, samples: Samples, numbers: list[int]) -> np.ndarray:
    """Calls the reward function for some samples and returns its scores, float64.

    The function gets the prompts as the data has them, the responses as texts without special
    tokens, and every other column of the data by its name. A column named `prompts` or `responses`
    is not passed: those names stand for what the function is given anyway.

    Raises:
        ValueError: it returned other than one finite score for each response.
    """
    rows = [json.loads(samples.row_texts[number]) for number in numbers]
    prompts = [row["prompt"] for row in rows]
    responses = tokenizer.batch_decode(
        [samples.responses[number] for number in numbers], skip_special_tokens=True
    )
    given = ("prompt", "prompts", "responses")
    # Mixed data sets may have different columns.
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names if name not in given}

    scores = judge.function(prompts, responses, **columns)
    if len(scores) != len(rows) or not np.isfinite(np.array(scores, dtype=float)).all():
        raise ValueError(
            f"--reward_function {judge.function_name}: expected {len(rows)} finite scores, "
            f"got {scores!r:.200}"
        )
    return np.array(scores, dtype=float)


def answer_reward(prompts: list, responses: list[str], answer: list[str], **columns) -> list[float]:
    """Returns 1 if the response's final answer is the column `answer`, else 0."""
    return [float(answers.is_right(response, right)) for response, right in zip(responses, answer)]
