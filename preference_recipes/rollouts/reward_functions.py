"""The reward functions that the arguments name: loading, checking and calling them."""

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np

from common import pluralize, refuse
from preference_recipes.rollouts import environments

# The parts of a score that come from no function: the reward model, and `get_reward`.
REWARD_MODEL = "reward_model"
ENVIRONMENT = "environment"
# Arguments of reward functions besides the data's columns.
ARGUMENTS = ["response_ids", "truncated", "rendered_prompts", "step"]
ARGUMENTS += ["messages", "environments", "images"]  # only with episodes, only with images
TEXTS = (str, bytes, bytearray)


def load_functions(names: list[str] | None) -> dict[str, Callable]:
    """Returns reward functions by their own names, or by MODULE:NAME if those collide."""
    names = names or []
    short_names = [name.partition(":")[2] for name in names]
    all_names = [REWARD_MODEL, ENVIRONMENT, *short_names]
    functions = {}
    for name, short_name in zip(names, short_names):
        function = environments.load_function(name)
        first, second, *_ = [*inspect.signature(function).parameters, "", ""]
        if first in ("responses", "completions") or second == "prompts":
            refuse(f"--reward_function {name}: prompts and responses come first, in this order")
        functions[short_name if all_names.count(short_name) == 1 else name] = function
    return functions


def weights_by_part(args) -> dict[str, float]:
    """Returns the weight of each part: the reward model, the functions, the environment."""
    names = [REWARD_MODEL] if args.reward_model_name_or_path else []
    names += load_functions(args.reward_function)
    if args.environment is not None and environments.load(args.environment).has_reward:
        names.append(ENVIRONMENT)
    weights = [1.0] * len(names) if args.reward_weights is None else args.reward_weights
    if len(weights) != len(names) or not np.isfinite(weights).all():
        refuse(
            f"--reward_weights {' '.join(map(str, weights))}: expected "
            f"{pluralize(len(names), 'finite number')}, one for each of {', '.join(names)}"
        )
    return dict(zip(names, weights))


def check_calls(args, columns: list[str]) -> None:
    """Refuses a reward function that asks for a column that the data do not have."""
    arguments = dict.fromkeys([*columns, *ARGUMENTS])
    for name, function in load_functions(args.reward_function).items():
        try:
            inspect.signature(function).bind(None, None, **keywords_of(function, arguments))
        except TypeError as error:
            refuse(f"--reward_function {name}: {error}; the data's columns: {', '.join(columns)}")


def call_function(function: Callable, arguments: dict[str, Any]) -> Any:
    """Returns the result of `function(prompts, responses, **columns)`, which may be async.

    It gets copies, so that its changes are neither trained on nor seen by other functions.
    """
    # Environments are not copied: they may hold connections.
    uncopied = {id(instance): instance for instance in arguments.get("environments", [])}
    keywords = copy.deepcopy(arguments, uncopied)
    prompts_and_responses = keywords.pop("prompts"), keywords.pop("responses")
    result = function(*prompts_and_responses, **keywords_of(function, keywords))
    return environments.awaited_result(result)


def keywords_of(function: Callable, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a function takes besides its first two."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = [parameter.name for parameter in parameters]
    return {name: arguments[name] for name in names[2:] if name in arguments}


def as_numbers(name: str, scores: Any, n: int) -> list[float]:
    """Returns a user's scores of n responses as numbers, with NaN in place of None."""
    # Keys, characters and the elements of a set are no scores, even if they are numbers.
    is_list = not isinstance(scores, (Mapping, Set, *TEXTS)) and not hasattr(scores, "columns")
    values = None
    if is_list:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            numbers = [math.nan if isinstance(score, TEXTS) else score for score in scores]
            values = [None if number is None else float(number) for number in numbers]
    if values is None or len(values) != n or any(value != value for value in values):  # NaN
        shown = " ".join(repr(scores).split())[:200]
        refuse(f"{name}: expected {n} numbers, one for each response, or None; got {shown}")
    return [math.nan if value is None else value for value in values]
