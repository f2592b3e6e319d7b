"""How a run that cannot go on ends: with one message, the last thing on the user's screen."""

import errno
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

LAUNCHER = os.getppid()  # or whoever else started this process
# How long a process waits for its launcher to end it, before it ends by itself.
PATIENCE_SECONDS = 30
failed = False  # whether `run` is ending this process because of an error

# Errors of disks, which no run can prevent, wherever they appear.
OF_DISKS = {
    errno.ENOSPC: "a disk is full",
    errno.EDQUOT: "a disk is full",
    errno.EFBIG: "a file may not grow further (ulimit -f, or a limit of the disk)",
    errno.EROFS: "a disk can only be read now",
    errno.EIO: "a disk fails",
}
OUT_OF_MEMORY = (
    "To need less memory: a smaller --micro_train_batch_size or --micro_train_tokens, "
    "--gradient_checkpointing, ZeRO-2 or ZeRO-3; where it samples, a smaller "
    "--generate_batch_size and --score_batch_size. docs/memory.md says what a run takes."
)


def is_of_disk(error: Exception) -> bool:
    """Whether an error says that something could not be written.

    Libraries in Rust raise a bare Exception, such as `File too large (os error 27)`.
    """
    return isinstance(error, (OSError, SafetensorError)) or "(os error " in str(error)


def why_not_written(error: Exception, folder: Path) -> str:
    """Returns in words why something could not be written below a folder.

    torch says only where in its own code it noticed that a file is shorter than it should be.
    """
    text = str(error)[:200]
    if "inline_container" not in text and "PytorchStreamWriter" not in text:
        return text
    free = shutil.disk_usage(folder).free / 2**20
    return f"the disk is full, or a quota or limit is reached ({free:,.0f} MiB are free; {text})"


def run(main: Callable[[], None]) -> None:
    """Runs a recipe's `main`. If it fails, says why, once, as the last thing on the screen.

    A launcher of several processes prints its own report below all that they wrote. That report
    ends with the message, see `tell_launcher`, so the process itself prints nothing.
    """
    global failed
    try:
        main()
    except SystemExit as error:
        failed = bool(error.code)
        if isinstance(error.code, str):
            refuse(error.code)
        close_bars()
        if error.code:
            wait_for_launcher()
        raise
    except Exception as error:
        failed = True
        if isinstance(error, OSError) and error.errno in OF_DISKS:
            what = OF_DISKS[error.errno]
            refuse(f"{what}, that of --output_dir or of a cache (HF_HOME): {error}")
        if type(error).__name__ == "OutOfMemoryError":  # torch's
            error.args = (f"{error}\n{OUT_OF_MEMORY}",)  # the last thing that is printed of it
        close_bars()
        if tell_launcher(traceback.format_exc()):
            sys.exit(1)
        if error_file():  # another process failed before, and this is mostly a consequence
            traceback.print_exc()
            wait_for_launcher()
            sys.exit(1)
        raise


def refuse(message: str, status: int = 1) -> None:
    """Ends this process with a message, which the launcher shows if there is one.

    Raises:
        SystemExit: with `status`.
    """
    close_bars()
    if not error_file():
        print(message, file=sys.stderr, flush=True)
    elif not tell_launcher(message):
        wait_for_launcher()
    sys.exit(status)


def close_bars() -> None:
    """Ends the lines of all progress bars. Python would draw them again below the message."""
    tqdm = sys.modules.get("tqdm")
    for bar in list(tqdm.tqdm._instances) if tqdm else []:
        bar.close()


def error_file() -> Path | None:
    """Returns the file that torch's launcher reads if this process fails; None without one."""
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    # It is `.../attempt_0/<local rank>/error.json`. A process may inherit the variable from one
    # that a launcher started.
    is_mine = file.parent.name == os.environ.get("LOCAL_RANK")
    launcher_lives = os.getppid() == LAUNCHER
    return file if is_mine and launcher_lives else None


def tell_launcher(message: str) -> bool:
    """Writes why this process ends to the file that torch's launcher reads, if there is one.

    The launcher shows the messages of all processes that have failed when it looks. So only the
    first of a node writes one, and the others wait to be ended. The first message of a process
    stays, since what follows is its consequence.

    Returns:
        whether the launcher shows a message of this process.
    """
    file = error_file()
    if not file:
        return False
    try:
        with open(file.parent.parent / "first_failure", "x", encoding="utf-8"):
            pass
    except FileExistsError:
        return file.exists()
    # The launcher prints `py_callstack`, with or without a call stack in it.
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    report = {"message": {"message": message, "extraInfo": extra}}
    file.write_text(json.dumps(report), encoding="utf-8")
    return True


def wait_for_launcher() -> None:
    """Waits to be ended, if another process of this node has told the launcher why.

    The launcher ends all processes once one has failed. One that fails in the meantime would be
    in its report, too, maybe below the message, and so would one that its signal ends.
    """
    file = error_file()
    if file and not file.exists() and (file.parent.parent / "first_failure").exists():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(PATIENCE_SECONDS)
