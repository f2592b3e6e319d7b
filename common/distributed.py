"""Collectives on Python objects: runs a function on one process, gathers values by index."""

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from common import Refused, errors, refuse


def all_or_none(accelerator: Accelerator, is_caller: bool, function: Callable, *args) -> Any:
    """Returns `function(*args)` on the processes where `is_caller`, and None on the others.

    If one process refuses or exits, all do: they would wait forever. All processes must call it.
    """
    result = None
    problem = None
    if is_caller:
        try:
            with errors.exits_with_a_message():
                result = function(*args)
        except (SystemExit, Refused) as error:
            problem = error.args and error.args[0]
    problems = [problem for problem in gather_object([problem]) if problem]
    if problems:
        refuse(str(problems[0]))
    return result


def on_main_process(accelerator: Accelerator, function: Callable, *args) -> Any:
    """Returns the main process's `function(*args)` on every process; see `all_or_none`."""
    result = all_or_none(accelerator, accelerator.is_main_process, function, *args)
    return broadcast_object_list([result])[0]


def gather_by_index(own_values: dict[int, Any]) -> list:
    """Returns the values of indices 0, 1, 2 ... as a list; each process passes its own."""
    by_index = {}
    for part in gather_object([own_values]):
        by_index.update(part)
    return [by_index[index] for index in range(len(by_index))]
