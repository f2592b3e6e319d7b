"""Calls reward functions: what they are given, what they may return."""

import asyncio
import copy
import functools
import inspect
import json
import math
import numbers
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from preference_recipes.rollouts.samples import Samples

# What a function is given by name whatever the data holds.
OWN_KEYWORDS = ("response_ids", "truncated", "rendered_prompts", "step")
# And with `--environment`.
OF_EPISODES = ("messages", "environments")
# Columns of these names are not passed.
OWN_NAMES = ("prompt", "prompts", "responses", *OWN_KEYWORDS, *OF_EPISODES)
# The largest score that fp32 holds.
LARGEST = float(np.finfo(np.float32).max)


class Given(NamedTuple):
    """What a reward function is given."""

    prompts: list  # as the data has them, strings or lists of messages
    responses: list[str]  # of an episode its last answer
    keywords: dict[str, Any]  # columns of the data, and `OWN_KEYWORDS`
    data_rows: list[int]  # for messages
    columns: Sequence[str] = ()  # of the training data; in a mixture, these rows may lack some


def collect(
    tokenizer, samples: Samples, rows: list[int], step: int, columns: Sequence[str] = ()
) -> Given:
    """Collects what reward functions are given about these rows of the samples."""
    data = [json.loads(samples.row_texts[row]) for row in rows]
    keywords: dict[str, Any] = {
        name: [values.get(name) for values in data]
        for name in columns_of(data)
        if name not in OWN_NAMES
    }
    keywords["response_ids"] = [samples.responses[row] for row in rows]
    keywords["truncated"] = [not samples.ended[row].item() for row in rows]
    keywords["rendered_prompts"] = tokenizer.batch_decode([samples.prompts[row] for row in rows])
    keywords["step"] = step
    if samples.messages:
        keywords["messages"] = [samples.messages[row] for row in rows]
    responses = samples.answers(tokenizer)
    return Given(
        prompts=[values["prompt"] for values in data],
        responses=[responses[row] for row in rows],
        keywords=keywords,
        data_rows=[samples.data_rows[row] for row in rows],
        columns=columns,
    )


def columns_of(data: list[dict]) -> list[str]:
    """Returns the names of the columns of some rows: those of a mixture may differ."""
    return list(dict.fromkeys(name for row in data for name in row))


def call(name: str, function: Callable, given: Given) -> list[float]:
    """Calls a reward function `(prompts, responses, **columns) -> scores`, which may be async.

    Columns that its signature does not name are not passed, unless it takes `**columns`. It gets
    copies, so what it changes reaches neither the samples that are trained on nor other functions.

    Returns:
        A score for each sample, NaN where the function returned None.
    """
    signature = inspect.signature(function)
    keywords = accepted(signature, given.keywords)
    for parameter in list(signature.parameters.values())[2:]:
        # In a mixture, all of these rows may be from data sets that lack a column.
        if parameter.default is parameter.empty and parameter.name in given.columns:
            keywords.setdefault(parameter.name, [None] * len(given.responses))
    # Environments may hold connections: they are not copied.
    kept = {id(instance): instance for instance in given.keywords.get("environments", [])}
    copies = copy.deepcopy((given.prompts, given.responses, keywords), kept)
    prompts, responses, keywords = copies
    scores = function(prompts, responses, **keywords)
    if inspect.isawaitable(scores):
        scores = event_loop().run_until_complete(scores)
    return check(f"--reward_function {name}", scores, given.data_rows)


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the one event loop of this process: clients that functions keep are bound to it."""
    return asyncio.new_event_loop()


def check(source: str, scores: Any, data_rows: Sequence[int]) -> list[float]:
    """Returns scores that a user's code gave as a list of numbers, NaN where it gave None.

    Raises:
        SystemExit: they are not one number that fp32 holds, or None, for each of these rows.
    """
    if hasattr(scores, "tolist"):  # of torch or numpy
        scores = scores.tolist()
    expected = f"{source}: expected {len(data_rows)} numbers, one for each response"
    if not isinstance(scores, (list, tuple)) or len(scores) != len(data_rows):
        sys.exit(f"{expected}, got {scores!r:.200}")
    values = [value.item() if hasattr(value, "item") else value for value in scores]
    for data_row, value in zip(data_rows, values):
        is_number = isinstance(value, numbers.Real)
        # Compared, not converted: a whole number may be too large even for fp64.
        if value is not None and (not is_number or not abs(value) <= LARGEST):
            sys.exit(f"{expected}, that fp32 holds; got {value!r:.200} for data row {data_row}")
    return [math.nan if value is None else float(value) for value in values]


def accepted(signature: inspect.Signature, keywords: dict[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments that a function takes."""
    parameters = signature.parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(keywords)
    return {name: value for name, value in keywords.items() if name in parameters}
