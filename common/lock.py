"""One run at a time in an output directory: a lock that ends with the process that holds it."""

import datetime
import fcntl
import os
import socket
import sys
from pathlib import Path

FILE = ".run.lock"


def take(folder: Path) -> None:
    """Locks a run's folder until this process ends, however it ends.

    A file in the folder says who holds the lock. It stays there, and means nothing without a
    holder. On a file system without locks the run prints a note and goes on.

    Raises:
        SystemExit: another process holds the lock.
        OSError: nothing can be written to the folder.
    """
    file = folder / FILE
    while True:
        # Never closed: that would end the lock.
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # POSIX, not BSD (`flock`): processes that a reward function forks, which may outlive
            # this run, do not inherit it. It works on NFS, too.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(handle, 1000).decode(errors="replace").strip()
            sys.exit(
                f"--output_dir {folder} is in use by {holder or 'another process'}: two runs would "
                "write over each other. Wait until that one has ended, or end it"
            )
        except OSError as error:
            print(
                f"NOTE: {folder} is on a file system without locks ({error}): make sure yourself "
                "that no other run writes to it",
                flush=True,
            )
            return
        if is_still_there(handle, file):
            break
        os.close(handle)
    now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}, started {now}\n".encode())


def is_still_there(handle: int, file: Path) -> bool:
    """Whether an open file still has its name: a refused run may just have removed it."""
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False
