"""What is kept on disk from run to run: its checksums, and arrays that are computed once."""

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

import numpy as np
from accelerate.utils import gather_object

from common import folders, lazily

datasets = lazily("datasets")

WHOLE = "whole"
DAMAGED = "damaged"
UNKNOWN = "unknown"


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


class Kept:
    """Files that one run makes and later runs use, if their checksums are those of a record.

    Attributes:
        record: the file with the size and the checksum of each, by its path from `root`.
    """

    def __init__(self, name: str):
        """
        Args:
            name: changes with everything that the files depend on.
        """
        self.record = root() / "checksums" / f"{name}.json"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Lets one process at a time check and make these files; others wait until it is done."""
        self.record.parent.mkdir(parents=True, exist_ok=True)
        with open(self.record.with_suffix(".lock"), "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(
                    f"waiting for another process, which reads the same data ({file.name})",
                    flush=True,
                )
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:  # a file system without locks: both make the same files
                pass
            yield

    def files(self) -> list[Path]:
        """Returns the files of the record."""
        return [root() / name for name in self.entries()]

    def entries(self) -> dict[str, list[int]]:
        """Returns the record; nothing if there is none, or none that this module wrote."""
        try:
            entries = dict(json.loads(self.record.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}
        return {} if any(".." in Path(name).parts for name in entries) else entries

    def state(self) -> str:
        """Compares the files with the record, and says so if they are damaged.

        Returns:
            `WHOLE`, `DAMAGED`, or `UNKNOWN`: without a record, or without some of its files.
        """
        entries = self.entries()
        if not entries or not all(file.is_file() for file in self.files()):
            return UNKNOWN
        for name, entry in entries.items():
            if describe(root() / name) != entry:
                print(f"NOTE: {root() / name} is damaged, so it is made again", flush=True)
                return DAMAGED
        return WHOLE

    def write(self, files: list[Path]) -> None:
        """Records files as they are."""
        entries = {os.path.relpath(file, root()): describe(file) for file in files}
        self.record.parent.mkdir(parents=True, exist_ok=True)
        self.record.write_text(json.dumps(entries), encoding="utf-8")

    def remove(self) -> None:
        """Removes the files, and the folders that are empty without them."""
        for file in self.files():
            file.unlink()
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
    kept = Kept(digest)
    # One process of each machine looks for damage.
    is_first = accelerator.is_local_main_process
    is_there = kept.state() == WHOLE if is_first else path.is_file()
    # Processes may see different disks. `compute` is collective, so all read or all compute.
    if all(gather_object([is_there])):
        accelerator.print(f"taken from the cache: {path}")
        return np.load(path)

    result = compute()
    if is_first:
        write(path, result)
        kept.write([path])
    accelerator.wait_for_everyone()
    return result


def write(path: Path, result: np.ndarray) -> None:
    """Writes an array under a temporary name, then renames it: no reader meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.npy")
    np.save(temporary, result)
    os.replace(temporary, path)
