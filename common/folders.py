"""Folders that are whole or not there."""

import json
import os
import shutil
import zlib
from pathlib import Path

import numpy as np


def replace(temporary: Path, directory: Path, keep: int = 0) -> None:
    """Flushes a written directory to disk and puts it in place of another; then deletes all but the newest `keep` of the
    `global_step_*` folders beside it, 0 keeps all."""
    flush(*temporary.rglob("*"), temporary)
    old = directory.with_name(f".{directory.name}.old")
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    temporary.rename(directory)
    flush(directory.parent)
    shutil.rmtree(old, ignore_errors=True)
    for path in by_step(directory.parent)[:-keep] if keep else []:
        shutil.rmtree(path, ignore_errors=True)  # what someone still reads (NFS) goes the next time


def flush(*paths: Path) -> None:
    """Files and folders, each itself, to the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def by_step(folder: Path) -> list[Path]:
    """The `global_step_*` folders, the newest last. A copy of one under a longer name is the user's: it is neither taken nor deleted."""
    return sorted(
        (path for path in folder.glob("global_step_*") if path.name[12:].isdigit()),
        key=lambda path: int(path.name[12:]),
    )


def checksum(path: Path) -> int:
    """CRC-32 of a file: finds what storage damages; it is no signature."""
    return zlib.crc32(np.memmap(path, mode="r")) if path.stat().st_size else 0


def fault_of(path: Path) -> str | None:
    """What keeps a folder from being a whole checkpoint; None if nothing does."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        for name, (size, crc) in manifest.items():
            if (found := ((path / name).stat().st_size, checksum(path / name))) != (size, crc):
                return f"{name} has {found[0]} bytes with checksum {found[1]}, it was written with {size} and {crc}"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return (
            f"{error.filename} is missing"
            if isinstance(error, FileNotFoundError)
            else f"manifest.json cannot be read: {error}"
        )
    return None if "state.json" in manifest else "its manifest does not name state.json"
