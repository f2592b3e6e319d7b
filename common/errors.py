"""How a run ends that cannot go on: one message, the last thing on the user's screen."""

import errno
import json
import os
import sys
import time
import traceback
from collections.abc import Callable

from common import speaks_for_all

# What no run can help, wherever it is noticed.
OF_DISKS = {
    errno.ENOSPC: "a disk is full",
    errno.EDQUOT: "a disk is full",
    errno.EROFS: "a disk can only be read now",
    errno.EIO: "a disk fails",
}


def run(main: Callable[[], None]) -> None:
    """Runs a recipe's `main`, and tells the launcher why it ended, if it failed.

    A launcher of several processes prints its own report below all that they wrote. What
    `tell_launcher` wrote stands at the end of that report.
    """
    try:
        main()
    except SystemExit as error:
        if isinstance(error.code, str):
            refuse(error.code)
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OF_DISKS:
            what = OF_DISKS[error.errno]
            refuse(f"{what}, that of --output_dir or of a cache (HF_HOME): {error}")
        tell_launcher(traceback.format_exc())
        raise


def refuse(message: str, status: int = 1) -> None:
    """Ends this process with a message; several processes with the same one print it once.

    Raises:
        SystemExit: with `status`.
    """
    told = tell_launcher(message)
    if not told or speaks_for_all():
        print(message, file=sys.stderr, flush=True)
    sys.exit(status)


def tell_launcher(message: str) -> bool:
    """Writes why this process ends to the file that torch's launcher reads, if there is one.

    The launcher shows the message of the process that failed first. The first message of a process
    stays, since what follows is its consequence.

    Returns:
        whether there is such a launcher.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return False
    if not os.path.exists(file):
        # The launcher prints `py_callstack`, with or without a call stack in it.
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with open(file, "w", encoding="utf-8") as report:
            json.dump({"message": {"message": message, "extraInfo": extra}}, report)
    return True
