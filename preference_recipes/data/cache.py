"""Keeps files from run to run: checks that they are whole, and computes an array only once."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import numpy as np
from accelerate.utils import gather_object

from common import folders


def root() -> Path:
    """Returns the folder in which `datasets` and this module keep what they made."""
    return Path(os.path.expanduser(datasets.config.HF_DATASETS_CACHE))


def check_root() -> None:
    """Exits if nothing can be written there."""
    try:
        if root().parts[0] == "~":
            raise OSError(errno.ENOENT, "there is no HOME")
        root().mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root()).close()
    except OSError as error:
        sys.exit(
            f"{root()}, where data sets are kept once they are read, cannot be written "
            f"({error.strerror}): set the environment variable HF_HOME to a folder that can"
        )


class Record:
    """Sizes and checksums of files that one run makes, so that later runs use them only if whole.

    Attributes:
        file: where the record is.
    """

    def __init__(self, name: str):
        """
        Args:
            name: changes with everything that the files depend on.
        """
        self.file = root() / "checksums" / f"{name}.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lets one process at a time check and make these files; others wait until it is done."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file.with_suffix(".lock"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(
                    f"waiting for another process, which reads the same data ({lock.name})",
                    flush=True,
                )
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:  # a file system without locks: both make the same files
                pass
            yield

    def entries(self) -> dict[Path, list[int]]:
        """Returns size and checksum of each file; nothing if there is no record of this module."""
        try:
            entries = dict(json.loads(self.file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}
        if any(".." in Path(name).parts for name in entries):
            return {}
        return {root() / name: entry for name, entry in entries.items()}

    def is_true(self) -> bool:
        """Whether there are files, all as they were recorded; prints which one is damaged."""
        entries = self.entries()
        if not all(file.is_file() for file in entries):
            return False
        for file, entry in entries.items():
            if describe(file) != entry:
                print(f"NOTE: {file} is damaged, so it is made again", flush=True)
                return False
        return bool(entries)

    def write(self, files: list[Path]) -> None:
        """Records files as they are."""
        entries = {os.path.relpath(file, root()): describe(file) for file in files}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(entries), encoding="utf-8")

    def remove_files(self) -> None:
        """Removes the recorded files, and the folders that are empty without them."""
        for file in self.entries():
            file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other files are in it
                file.parent.rmdir()


def describe(file: Path) -> list[int]:
    """Returns a file's size in bytes and its checksum."""
    return [file.stat().st_size, folders.checksum(file)]


def array(accelerator, key: list, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Returns `compute()`, or what an earlier run with the same key computed.

    All processes must call it, and all get the same array.

    Args:
        key: everything the array depends on, as JSON values.
        compute: collective; returns the whole array on every process.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:32]
    path = root() / "computed" / f"{digest}.npy"
    record = Record(digest)
    # One process of each machine looks for damage, and it alone prints what it found.
    is_first = accelerator.is_local_main_process
    is_there = record.is_true() if is_first else path.is_file()
    # Processes may see different disks. `compute` is collective, so all read or all compute.
    if all(gather_object([is_there])):
        accelerator.print(f"taken from the cache: {path}")
        return np.load(path)

    result = compute()
    if is_first:
        write(path, result)
        record.write([path])
    accelerator.wait_for_everyone()
    return result


def write(path: Path, result: np.ndarray) -> None:
    """Writes an array under a temporary name, then renames it: no reader meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.npy")
    np.save(temporary, result)
    os.replace(temporary, path)
