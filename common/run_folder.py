"""The folder of a run: which one it is, that no other run has it, and that all processes see it."""

import datetime
import fcntl
import os
import sys
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from common import distributed, folders


def make(accelerator: Accelerator, args, recipe: str) -> None:
    """Decides `args.output_dir` once for all processes, and makes it; see `decide`."""
    args.output_dir = distributed.on_main_process(accelerator, decide, args, recipe)
    if not all(gather_object([Path(args.output_dir).is_dir()])):
        sys.exit(
            f"--output_dir {args.output_dir} is not visible to every process: "
            "several nodes need a shared file system"
        )


def decide(args, recipe: str) -> str:
    """Returns `--output_dir`, the folder of a resumed run, or `runs/<recipe>/<date-time>`.

    It is made if it is not there. From then on it is this run's alone, until this process ends.
    """
    own = None  # the folder of the run that goes on
    if args.resume == "auto":
        if not args.output_dir:
            sys.exit("--resume auto looks for checkpoints in --output_dir: give it")
        own = Path(args.output_dir).resolve()
    elif args.resume != "never":
        checkpoints = Path(args.resume).resolve().parent
        if checkpoints.name == "checkpoints":
            own = checkpoints.parent
        elif not args.output_dir:
            sys.exit(
                f"--resume {args.resume} is not in the checkpoints of a run: give --output_dir, too"
            )
    now = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    path = args.output_dir or own or folders.unused(Path("runs", recipe, now), separator="-")
    path = Path(path).absolute()  # a user's code may change the working directory
    # A folder named after the time must be new: another run may begin in the same instant.
    path.mkdir(parents=True, exist_ok=bool(args.output_dir or own))
    lock(path)
    if path.resolve() != own and has_update(path):
        sys.exit(
            f"--output_dir {path} already holds another run. Take another, "
            "or --resume auto to go on from its last checkpoint."
        )
    return str(path)


def lock(folder: Path) -> None:
    """Locks a run's folder until this process ends, however it ends."""
    handle = os.open(folder / ".run.lock", os.O_RDWR | os.O_CREAT, 0o666)  # never closed
    try:
        # POSIX, not BSD (`flock`): what a reward function forks, which may outlive this run, does
        # not inherit it. It works on NFS, too.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        sys.exit(f"--output_dir {folder} is in use: two runs would write over each other")
    except OSError as error:
        print(f"NOTE: {folder} cannot be locked ({error}): let no other run write to it")


def has_update(folder: Path) -> bool:
    """Whether a run's folder holds more than what is written before the first update."""
    if any(any(folder.glob(f"{name}/*")) for name in ("checkpoints", "actors", "actor")):
        return True
    log = folder / "metrics.jsonl"
    if not log.is_file():
        return False
    with open(log, encoding="utf-8") as lines:
        return any(not line.startswith('{"global_step": 0,') for line in lines)
