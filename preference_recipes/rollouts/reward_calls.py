"""Calls reward functions: what they are given, what they may return."""

import asyncio
import copy
import functools
import inspect
import json
import math
import numbers
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


class Uncopied(list):
    """A list that functions get as it is, and not as a copy: of environments."""

    def __deepcopy__(self, _memo) -> "Uncopied":
        return self


@dataclass(frozen=True)
class Given:
    """What a reward function is given.

    Attributes:
        prompts: as the data has them, strings or lists of messages.
        responses: texts, see `decode_answers`; of an episode its last answer.
        keywords: columns of the data, and our own keywords, see `OWN_KEYWORDS`.
        data_rows: the number of each prompt's row in the data, for messages.
        columns: those of the training data; in a mixture, these rows may lack some of them.
    """

    prompts: list
    responses: list[str]
    keywords: dict[str, Any]
    data_rows: list[int]
    columns: Sequence[str] = ()

    def describe(self, sample: int) -> str:
        """Returns a sample's data row and its response, for messages."""
        return f"data row {self.data_rows[sample]}, response {cut(self.responses[sample])}"

    def describe_rows(self) -> str:
        """Returns the data rows of all samples, for messages."""
        first = min(self.data_rows)
        last = max(self.data_rows)
        return f"data row {first}" if first == last else f"data rows {first} to {last}"


def cut(value: Any) -> str:
    """Returns a value in Python's notation, as one line of limited length."""
    try:
        return one_line(repr(value))
    except Exception:  # of the user's class, or a whole number of thousands of digits
        return f"a {type(value).__name__}"


def one_line(text: str, most: int = 200) -> str:
    """Returns a text as one line of limited length."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}..."


def collect(
    tokenizer, samples: Samples, rows: list[int], step: int, columns: Sequence[str] = ()
) -> Given:
    """Collects what reward functions are given about some samples.

    Args:
        rows: of these samples.
        step: `global_step`.
        columns: see `Given`.
    """
    data = [json.loads(samples.row_texts[row]) for row in rows]
    response_ids = [samples.responses[row] for row in rows]
    keywords: dict[str, Any] = {
        name: [values.get(name) for values in data]
        for name in columns_of(data)
        if name not in OWN_NAMES
    }
    keywords["response_ids"] = response_ids
    keywords["truncated"] = [not samples.ended[row].item() for row in rows]
    keywords["rendered_prompts"] = samples.prompt_texts(tokenizer, rows)
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

    Args:
        name: for messages.

    Returns:
        A score for each sample, NaN where the function returned None.

    Raises:
        SystemExit: it raised, or returned something other than one number that fp32 holds or None
            for each response. The message names the function and the data rows.
        KeyboardInterrupt: the user's Ctrl-C, where no run handles it.
    """
    try:
        keywords = keywords_for(function, given)
        prompts, responses, keywords = copy.deepcopy((given.prompts, given.responses, keywords))
        scores = function(prompts, responses, **keywords)
        if inspect.isawaitable(scores):
            scores = event_loop().run_until_complete(scores)
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        message = one_line("".join(traceback.format_exception_only(error)))
        sys.exit(
            f"--reward_function {name} raised {message} ({place_of(error, function)}), "
            f"called with {given.describe_rows()}"
        )
    return check(name, scores, given)


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the one event loop of this process: clients that functions keep are bound to it."""
    return asyncio.new_event_loop()


def is_ctrl_c(error: BaseException) -> bool:
    """Whether an error may be the user's Ctrl-C.

    A run handles Ctrl-C by itself, see `stopping.Signals`. So in a run a
    KeyboardInterrupt is the function's own: it failed, and the other processes must learn of it.
    """
    is_handled = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    return isinstance(error, KeyboardInterrupt) and not is_handled


def place_of(error: BaseException, function: Callable) -> str:
    """Returns the file and line of an error, in the function's own file if it passed there."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(function, "__code__", None)
    own_frames = [frame for frame in frames if code and frame.filename == code.co_filename]
    frame = (own_frames or frames)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def keywords_for(function: Callable, given: Given) -> dict[str, Any]:
    """Returns the keyword arguments that a function's signature takes."""
    signature = signature_of(function)
    keywords = accepted(signature, given.keywords)
    for name in wanted_columns(signature):
        # In a mixture, all of these rows may be from data sets that lack the column.
        if name in given.columns:
            keywords.setdefault(name, [None] * len(given.responses))
    return keywords


def check(name: str, scores: Any, given: Given) -> list[float]:
    """Returns what a function returned as a list of numbers, NaN where it returned None.

    Raises:
        SystemExit: it is something other than one number that fp32 holds or None for each response.
    """
    scores = as_plain(scores, "tolist")  # of torch or numpy
    expected = (
        f"expected {len(given.responses)} numbers, one for each response (None: no score), "
        f"none beyond {LARGEST:.3g} (fp32)"
    )
    if not isinstance(scores, (list, tuple)) or len(scores) != len(given.responses):
        kind = type(scores).__name__
        length = f" of {len(scores)}" if isinstance(scores, (list, tuple)) else ""
        sys.exit(f"--reward_function {name}: {expected}, got a {kind}{length}: {cut(scores)}")
    values = [as_plain(value, "item") for value in scores]
    for sample, value in enumerate(values):
        if value is None:
            continue
        is_number = isinstance(value, numbers.Real)
        # Compared, not converted: a whole number may be too large even for fp64.
        if not is_number or not abs(value) <= LARGEST:
            sys.exit(
                f"--reward_function {name}: {expected}, got {cut(value)} for "
                f"{given.describe(sample)}"
            )
    return [math.nan if value is None else float(value) for value in values]


def as_plain(value: Any, method: str) -> Any:
    """Returns what `tolist` or `item` of a value gives, or the value itself if that fails.

    It fails if there is no such method, and as `item` does for a tensor of several numbers.
    """
    try:
        return getattr(value, method)()
    except Exception:
        return value


# ============================================================ signatures


def check_signature(
    name: str, function: Callable, data: str, columns: Sequence[str], also: Sequence[str] = ()
) -> None:
    """Refuses a function that cannot be called with the columns of some data, see `call`.

    Args:
        name: for messages, as `data` is.
        also: names of what is passed besides columns and `OWN_KEYWORDS`.

    Raises:
        SystemExit: with what the function wants, and what there is.
    """
    signature = signature_of(function)
    passed = [column for column in columns if column not in OWN_NAMES] + [*OWN_KEYWORDS, *also]
    first, second, *_ = [*signature.parameters, "", ""]
    # These would be called, with prompts and responses in each other's place.
    is_swapped = first in ("responses", "completions") or second == "prompts"
    try:
        signature.bind([], [], **accepted(signature, dict.fromkeys(passed)))
        error = "prompts and responses come first, in this order" if is_swapped else None
    except TypeError as reason:
        error = str(reason)
    if error:
        sys.exit(
            f"--reward_function {name} takes {signature}: {error}. It is called with prompts, "
            f"responses and, by name, what it takes of {', '.join(passed)} (of {data})"
        )


def signature_of(function: Callable) -> inspect.Signature:
    """Returns a function's signature; if it has none, that of a function that takes anything."""
    try:
        return inspect.signature(function)
    except ValueError:  # a built-in
        return inspect.signature(lambda *places, **names: None)


def accepted(signature: inspect.Signature, keywords: dict[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments that a function takes."""
    parameters = signature.parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(keywords)
    return {name: value for name, value in keywords.items() if name in parameters}


def takes_episodes(function: Callable) -> bool:
    """Whether a function cannot be called without what `--environment` gives it."""
    return any(name in OF_EPISODES for name in wanted_columns(signature_of(function)))


def wanted_columns(signature: inspect.Signature) -> list[str]:
    """Returns the names of what a function must be given besides prompts and responses."""
    return [
        parameter.name
        for parameter in list(signature.parameters.values())[2:]
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
