"""Folders that are whole or not there: written aside, flushed, renamed, verified by a manifest."""

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from common import one_line, refuse

LOCK = ".run.lock"
LEAST_PART = 2**16  # of a log, in bytes


def replace(temporary: Path, directory: Path) -> None:
    """Flushes a written folder to the disk and puts it in the place of another beside it.

    Killed at any instant, this leaves one of them whole: at worst the old one as `.<name>.old`.
    """
    flush(*temporary.rglob("*"), temporary)
    old = directory.with_name(f".{directory.name}.old")
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    temporary.rename(directory)
    flush(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_if_unused(folder: Path) -> None:
    """Removes the folder of a run that failed before it wrote anything."""
    if folder.is_dir() and os.listdir(folder) == [LOCK]:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def writing(path: Path):
    """Turns a failed write into a refusal that names the path; what is temporary (`.name`) goes."""
    try:
        yield
    except Exception as error:
        if path.name.startswith("."):
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):  # it was a folder
                path.unlink()
        reason = one_line(error)
        if re.search("inline_container|iostream error", reason):  # torch's, which names none
            reason = "the disk or its quota is full"
        elif not isinstance(error, (OSError, SafetensorError)):
            raise
        refuse(f"{path} cannot be written: {reason}")


def rotate(parent: Path, keep: int) -> None:
    """Deletes `global_step_*` folders of a folder but the newest ones; 0 keeps all."""
    for path in by_step(parent)[:-keep] if keep else []:
        # Renamed first: a kill leaves no part under this name. `Checkpoint.find` deletes the rest.
        old = path.rename(unused(path.with_name(f".{path.name}.deleting"), separator="."))
        shutil.rmtree(old, ignore_errors=True)


def replace_file(path: Path, text: str) -> None:
    """Writes a file whole, or leaves the one that was there."""
    temporary = path.with_name(f".{path.name}.writing")
    with writing(temporary):
        temporary.write_text(text, encoding="utf-8")
        flush(temporary)
        temporary.rename(path)


def flush(*paths: Path) -> None:
    """Flushes files and folders to the disk: of a folder the list of names, not the files."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def unused(path: Path, separator: str) -> Path:
    """Returns this path; if it is taken, the first free one of `...-2`, `...-3` and so on."""
    free = path
    number = 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}{separator}{number}")
    return free


def set_aside(path: Path) -> str:
    """Renames a file or folder to a free `...before_resume`, and returns its new name."""
    aside = unused(path.with_name(f"{path.name}.before_resume"), separator=".")
    path.rename(aside)
    return aside.name


def step_of(folder: Path) -> int | None:
    """Returns 100 for `global_step_000100`; None for other names, such as those of a user."""
    match = re.fullmatch(r"global_step_(\d+)", folder.name)
    return int(match[1]) if match else None


def by_step(parent: Path) -> list[Path]:
    """Returns the `global_step_*` folders of a folder, the newest last."""
    folders = [path for path in parent.glob("global_step_*") if step_of(path) is not None]
    return sorted(folders, key=step_of)


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


# ============================================================ the manifest of a checkpoint
def blocks(*files: Path) -> Iterator[bytes]:
    """Yields what files hold, one after the other."""
    for path in files:
        with open(path, "rb") as file:
            while block := file.read(2**22):
                yield block


def describe(*files: Path) -> list[int]:
    """Returns the size of files in bytes and a CRC-32, which finds damage; it is no signature."""
    size = crc = 0
    for block in blocks(*files):
        size += len(block)
        crc = zlib.crc32(block, crc)
    return [size, crc]


def describe_files(folder: Path) -> dict[str, list[int]]:
    """Returns what `describe` says of each file of a folder, by path, as in `manifest.json`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:
        described = pool.map(describe, files)
        return {str(path.relative_to(folder)): entry for path, entry in zip(files, described)}


def copy_log(log: Path, folder: Path, earlier: Path) -> None:
    """Copies a log into a checkpoint's `logs`, in parts.

    Those of an earlier checkpoint's `logs` that the log still begins with become hard links, so
    only what is new is written, unless they are small or the disk has no links.
    """
    n_linked = size = 0
    with open(log, "rb") as source:
        with contextlib.suppress(OSError):
            for part in log_parts(earlier, log.name):
                is_same = all(source.read(len(block)) == block for block in blocks(part))
                if part.stat().st_size < LEAST_PART or not is_same:
                    break
                os.link(part, folder / part.name)
                n_linked += 1
                size += part.stat().st_size
        source.seek(size)
        name = f"{log.name}.{n_linked:04d}" if n_linked else log.name
        with open(folder / name, "xb") as target:
            shutil.copyfileobj(source, target)


def log_parts(folder: Path, name: str) -> list[Path]:
    """Returns the parts of a log in a checkpoint's `logs`, by number: .9999 before .10000."""
    return sorted(folder.glob(f"{name}*"), key=lambda part: (len(part.name), part.name))


def link_or_copy(file: str, target: str) -> None:
    """Gives a file that never changes a second name; a copy where the disk has no links."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copy2(file, target)


def fault_of(path: Path) -> str | None:
    """Returns what keeps a folder from being a whole checkpoint; None if nothing does."""
    try:
        for name, written in read_json(path / "manifest.json").items():
            found = describe(path / name)
            if found != written:
                return f"{name} has [bytes, CRC-32] {found}, it was written with {written}"
    except OSError as error:
        return f"{error.filename} is missing or cannot be read: {error.strerror}"
    except (ValueError, AttributeError) as error:
        return f"manifest.json cannot be read: {error}"
    return None
