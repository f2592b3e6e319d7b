"""How a process ends. A run that cannot go on says why in one message, printed last."""

import atexit
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from common import Refused

LAUNCHER = os.getppid()  # if a launcher started this process
IN_LAUNCHER = "TORCHELASTIC_ERROR_FILE"  # what torch's launcher sets for each of its processes


def run(main: Callable[[], None]) -> None:
    """Runs a recipe's `main`. If it fails, says why, as the last thing on the screen.

    Of several processes of a node only the first that fails says so. What the others would say is a
    consequence, or the same: they wait for the launcher, which ends them once it sees the first.
    """
    try:
        main()
    except (SystemExit, KeyboardInterrupt, Exception) as error:
        message = traceback.format_exc()
        if isinstance(error, KeyboardInterrupt):
            message = "stopped by Ctrl-C before the first update"
        elif isinstance(error, (SystemExit, Refused)):
            message = error.args[0] if error.args else None
        for bar in list(tqdm._instances):
            bar.close()  # or Python would draw it again below the message
        if not isinstance(message, str):
            raise  # a number
        try:
            if IN_LAUNCHER in os.environ:  # .../attempt_0/<local rank>/error.json
                folder = Path(os.environ[IN_LAUNCHER]).parent.parent
                open(folder / "first_failure", "x").close()
        except FileExistsError:
            time.sleep(3)
            sys.exit(1)
        repeat(message)
        sys.exit(message)
    if torch.distributed.is_initialized():
        atexit.register(leave)


def repeat(message: str) -> None:
    """Prints a message once more below all that a launcher prints, if one started this process."""
    launcher = Path(f"/proc/{LAUNCHER}/cmdline")
    words = launcher.read_bytes() if launcher.exists() else b""
    is_launched = b"accelerate" in words or b"preference-recipes" in words
    if not (is_launched or IN_LAUNCHER in os.environ) or os.fork():
        return
    try:
        os.setsid()  # the launcher ends the groups of the processes that it started
        with contextlib.suppress(OSError):  # it is gone
            while launcher.read_bytes():  # nothing any more while it ends: before the prompt
                time.sleep(0.01)
        os.write(2, f"{message}\n".encode())
    finally:
        os._exit(0)  # also where nobody reads any more


@contextlib.contextmanager
def exits_with_a_message():
    """Runs a user's code. If it exits without a message, the message quotes the line that did."""
    try:
        yield
    except SystemExit as end:
        if isinstance(end.code, str) and end.code:
            raise
        frames = traceback.extract_tb(end.__traceback__)
        *_, place = [frame for frame in frames if "sitebuiltins" not in frame.filename]  # `exit`
        sys.exit(f"{place.filename}, line {place.lineno}, ended the run: {place.line}")


def leave() -> None:
    """Ends a process after its threads, but before the interpreter cleans up.

    While it does, gloo's threads may abort the process, or let it hang (torch 2.13).
    """
    sys.stdout.flush()
    os._exit(int(hasattr(sys, "last_value")))  # set by an exception that nobody caught
