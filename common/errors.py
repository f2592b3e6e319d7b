"""How a run that cannot go on ends: with one message, the last thing on the user's screen."""

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

# How long a process that fails after another one of its node lets the launcher see that one first.
SECONDS = 3
failed = False  # whether `run` is ending this process because of an error


def run(main: Callable[[], None]) -> None:
    """Runs a recipe's `main`. If it fails, says why, once, as the last thing on the screen.

    The report of a launcher ends with the message, so then the process itself prints nothing.
    """
    global failed
    try:
        main()
    except SystemExit as error:
        failed = bool(error.code)
        if isinstance(error.code, str):
            refuse(error.code)
        close_bars()
        raise
    except Exception:
        failed = True
        close_bars()
        if tell_launcher(traceback.format_exc()):
            sys.exit(1)
        raise


def refuse(message: str, status: int = 1) -> None:
    """Ends this process with a message, which the launcher shows if there is one."""
    close_bars()
    if not tell_launcher(message):
        print(message, file=sys.stderr, flush=True)
    sys.exit(status)


def close_bars() -> None:
    """Ends the lines of all progress bars. Python would draw them again below the message."""
    tqdm = sys.modules.get("tqdm")
    for bar in list(tqdm.tqdm._instances) if tqdm else []:
        bar.close()


def tell_launcher(message: str) -> bool:
    """Writes why this process ends to the file that torch's launcher reads, if there is one.

    Only the first process of a node that fails writes one. What the others would say is a
    consequence, or the same: they wait for the launcher, which ends them once it sees the first.
    """
    # It is `.../attempt_0/<local rank>/error.json`. A process may inherit the variable from one
    # that a launcher started.
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if file.parent.name != os.environ.get("LOCAL_RANK"):
        return False
    with contextlib.suppress(FileExistsError):
        open(file.parent.parent / "first_failure", "x").close()
        # The launcher prints `py_callstack`, with or without a call stack in it.
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        report = {"message": {"message": message, "extraInfo": extra}}
        file.write_text(json.dumps(report), encoding="utf-8")
    if not file.exists():
        time.sleep(SECONDS)
    return True
