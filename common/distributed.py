"""Collectives on Python objects."""

import sys

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object


def all_or_none(accelerator: Accelerator, mine: bool, function, *args):
    """What `function` returns on the processes where `mine` is true, None on the others. Where one leaves all leave, lest others wait for
    it, and one says why. All ranks must call it."""
    try:
        result, problem = function(*args) if mine else None, None
    except SystemExit as error:
        result, problem = None, error.code
    if any(problems := gather_object([problem])):
        sys.exit(next(filter(None, problems)) if accelerator.is_main_process else 1)
    return result


def on_main_process(accelerator: Accelerator, function, *args):
    """What `function` returns on the main process, on every rank; see `all_or_none`."""
    return broadcast_object_list(
        [all_or_none(accelerator, accelerator.is_main_process, function, *args)]
    )[0]


def gather_rows(mine: dict[int, object]) -> list:
    """What the processes have by row, as one list in the order of the rows, on every rank."""
    everyone = {row: value for part in gather_object([mine]) for row, value in part.items()}
    return [everyone[row] for row in range(len(everyone))]
