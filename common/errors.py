"""How a process ends. A run that cannot go on says why in one message, printed last."""

import atexit
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm


def run(main: Callable[[], None]) -> None:
    """Runs a recipe's `main`. If it fails, says why, once, as the last thing on the screen.

    torch's launcher ends its report with what it finds in a process's `error.json`. Only the first
    process of a node that fails writes one. What the others would say is a consequence, or the
    same: they wait for the launcher, which ends them once it sees the first.
    """
    try:
        main()
    except (SystemExit, Exception) as error:
        message = error.code if isinstance(error, SystemExit) else traceback.format_exc()
        for bar in list(tqdm._instances):
            bar.close()  # or Python would draw it again below the message
        if "TORCHELASTIC_ERROR_FILE" not in os.environ or not isinstance(message, str):
            raise  # Python prints it
        file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])  # .../attempt_0/<local rank>/error.json
        try:
            open(file.parent.parent / "first_failure", "x").close()
        except FileExistsError:
            time.sleep(3)
        else:
            # The launcher prints `py_callstack`, with or without a call stack in it.
            extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
            report = {"message": {"message": message, "extraInfo": extra}}
            file.write_text(json.dumps(report), encoding="utf-8")
        sys.exit(1)
    if torch.distributed.is_initialized():
        atexit.register(leave)


@contextlib.contextmanager
def exits_with_a_message():
    """Runs a user's code: where it exits without a word, the message is the line that did."""
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
