"""The folder of a run: which one it is, that no other run has it, and that all processes see it."""

import atexit
import contextlib
import datetime
import fcntl
import os
import sys
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from common import distributed, folders, record

LOCK = ".run.lock"


def make(accelerator: Accelerator, args, recipe: str) -> None:
    """Decides `args.output_dir` once for all processes, and makes it; see `decide`.

    Raises:
        SystemExit: `decide` refuses, or another process does not see the folder.
    """
    args.output_dir = distributed.on_main_process(accelerator, decide, args, recipe)
    if not all(gather_object([Path(args.output_dir).is_dir()])):
        sys.exit(
            f"--output_dir {args.output_dir} is not visible to every process: "
            "several nodes need a shared file system"
        )


def decide(args, recipe: str) -> str:
    """Returns the folder that `--output_dir` and `--resume` ask for, made if it is not there.

    From then on it is this run's alone, until this process ends.

    Returns:
        `--output_dir`, the folder of the run that is resumed, or `runs/<recipe>/<date-time>`.

    Raises:
        SystemExit: nothing to resume, or a folder that holds another run, that another run uses
            now, or that cannot be made.
    """
    path, continues = choose(args, recipe)
    path = path.absolute()  # a user's code may change the working directory
    try:
        # A folder named after the time must be new: another run may begin in the same instant.
        path.mkdir(parents=True, exist_ok=bool(args.output_dir) or continues)
        lock(path)
    except OSError as error:  # also a file of that name, or no permission
        sys.exit(f"--output_dir {path} cannot be made: {error}")
    atexit.register(remove_if_empty, path)
    # A run that failed before its first update has left nothing to be kept from another one.
    if not continues and has_update(path):
        refuse_used(path)
    return str(path)


def lock(folder: Path) -> None:
    """Locks a run's folder until this process ends, however it ends.

    Raises:
        SystemExit: another process holds the lock.
    """
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)  # never closed
    try:
        # POSIX, not BSD (`flock`): what a reward function forks, which may outlive this run, does
        # not inherit it. It works on NFS, too.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        sys.exit(f"--output_dir {folder} is in use: two runs would write over each other")
    except OSError as error:
        print(f"NOTE: {folder} cannot be locked ({error}): let no other run write to it")


def choose(args, recipe: str) -> tuple[Path, bool]:
    """Returns the folder that the arguments ask for, and whether the run in it continues."""
    if args.resume == "never":
        now = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
        by_default = folders.unused(Path("runs", recipe, now), separator="-")
        return Path(args.output_dir or by_default), False
    if args.resume == "auto":
        if not args.output_dir:
            sys.exit("--resume auto looks for checkpoints in --output_dir: give it")
        return Path(args.output_dir), True
    path = folder_of_checkpoint(args)
    continues = path.resolve() / "checkpoints" == Path(args.resume).resolve().parent
    return path, continues


def folder_of_checkpoint(args) -> Path:
    """Returns `--output_dir`, or else the folder of the run whose checkpoint `--resume` names."""
    checkpoint = Path(args.resume)
    if not (checkpoint / "manifest.json").is_file():
        sys.exit(
            f"--resume {args.resume}: not a checkpoint, it holds no manifest.json. "
            "Give never, auto or .../global_step_..."
        )
    if args.output_dir:
        return Path(args.output_dir)
    folder = checkpoint.resolve().parent
    if folder.name != "checkpoints":
        sys.exit(
            f"--resume {args.resume} is not in the checkpoints of a run: give --output_dir, too"
        )
    return folder.parent


def refuse_used(folder: Path) -> None:
    """Ends the program because the folder of a new run is not free."""
    way_on = ": it has no checkpoint to go on from"
    if any(folder.glob("checkpoints/global_step_*")):
        way_on = ", or --resume auto to go on from its last checkpoint"
    sys.exit(f"--output_dir {folder} already holds another run. Take another{way_on}.")


def has_update(folder: Path) -> bool:
    """Whether a run's folder holds more than what is written before the first update."""
    if any(any(folder.glob(f"{name}/*")) for name in ("checkpoints", "actors", "actor")):
        return True
    return any(line.get("global_step") != 0 for line in record.ends_of_log(folder))


def remove_if_empty(folder: Path) -> None:
    """Removes the folder of a run that was refused before it wrote anything but its lock."""
    with contextlib.suppress(OSError):  # it is not empty, or gone
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
        folder.rmdir()
