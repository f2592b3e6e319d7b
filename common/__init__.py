"""Where our files are, and small helpers."""

import contextlib
import functools
import gc
import sys
from pathlib import Path
from typing import Any, NoReturn

# Imports make millions of objects that stay. At Python's own threshold the collector looks through
# them so often that start-up takes half as long again. `arguments.parse` undoes this.
GC_THRESHOLD = gc.get_threshold()
gc.set_threshold(10_000_000, 50, 50)

# Where recipes/, accelerate_configs/ and assets/ are: the repository, or the package in a wheel.
ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "assets"


class Refused(ValueError):
    """What was asked for cannot be done. A recipe ends with the message, which is one line."""


def refuse(message: str) -> NoReturn:
    """Raises `Refused`."""
    raise Refused(message)


@contextlib.contextmanager
def exit_on_refusal():
    """Lets a command end with what was refused, in place of a traceback: a decorator."""
    try:
        yield
    except Refused as refusal:
        sys.exit(str(refusal))


def pluralize(number: int, noun: str) -> str:
    """Returns a number of things in words, such as `1 update`, `2 updates` or `2 processes`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}es" if noun.endswith("s") else f"{number} {noun}s"


def one_line(error: BaseException, most: int = 300) -> str:
    """Returns an error's message as one line of limited length; its kind if there is none."""
    return " ".join(str(error).split())[:most] or type(error).__name__


@contextlib.contextmanager
def patched(*changes: tuple[Any, str, Any]):
    """Sets attributes inside the block, in order: of these objects, by name, to these values."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def checkpointable(dataclass: type) -> type:
    """Lets checkpoints hold the objects of a dataclass: they are read without running code."""
    import torch  # slow to import: not for those who only ask where files are

    torch.serialization.add_safe_globals([dataclass])
    return dataclass


@functools.cache
def print_once(text: str) -> None:
    """Prints a line once, on the main process."""
    from common import display

    display.write(text)
