"""Moves aside what a run wrote beyond the point that it resumes from, so that nothing is lost."""

import json
import mmap
import os
import shutil
import sys
from pathlib import Path

from common import best, counted, folders, transcript


class LeftBehind:
    """One folder in `<output_dir>/left_behind/` and what was moved to it.

    Nothing is made on the disk before the first move. A name is never used twice.

    Attributes:
        folder: such as `left_behind/after_global_step_000008`.
        moved: what was moved, in words.
    """

    def __init__(self, output_dir: Path, step: int):
        self.output_dir = output_dir
        name = f"after_{folders.STEP_PREFIX}{step:06d}"
        self.folder = folders.unused(output_dir / "left_behind" / name, separator="_")
        self.moved: list[str] = []

    def place_for(self, path: Path) -> Path:
        """Returns the place of a file or folder of the run, and makes its parent folder."""
        place = self.folder / path.relative_to(self.output_dir)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def move(self, path: Path) -> None:
        """Moves a file or folder; `checkpoints` may be a link to another disk."""
        place = self.place_for(path)
        shutil.move(path, place)
        folders.flush(place.parent, path.parent)

    def move_folder(self, name: str, said: str) -> None:
        """Moves a folder of the run, if it is there.

        Args:
            said: what the message calls it.
        """
        if (self.output_dir / name).is_dir():
            self.move(self.output_dir / name)
            self.moved.append(said)

    def move_newest_first(self, paths: list[Path], kind: str) -> None:
        """Moves `global_step_*` folders, the newest first.

        If the process is killed meanwhile, `metrics.jsonl` still has all lines up to the newest
        checkpoint that is left.
        """
        for path in sorted(paths, key=folders.step_of, reverse=True):
            self.move(path)
        if paths:
            self.moved.append(counted(len(paths), kind))

    def move_end_of(self, file: Path, start: int) -> None:
        """Moves what a file of lines has from byte `start` on."""
        with open(file, "rb") as lines:
            lines.seek(start)
            end = lines.read()
        place = self.place_for(file)
        place.write_bytes(end)
        folders.flush(place, place.parent)
        os.truncate(file, start)
        number = len(end.splitlines())
        self.moved.append(f"{counted(number, 'line')} of {file.name}")


def leave(output_dir: Path, step: int | None, log_bytes: dict[str, int]) -> bool:
    """Moves everything beyond the resume point to `left_behind/`, and prints what was moved.

    Checkpoints, actors and log lines beyond that point belong to the abandoned run. For the main
    process.

    Args:
        step: `global_step` of the checkpoint that the run resumes from; None if it begins at 0.
        log_bytes: by name, the size at that point of each file of lines that the run continues.

    Returns:
        Whether lines from before that point are lost, which is printed, too.

    Raises:
        SystemExit: something could not be moved.
    """
    lost = lost_lines(output_dir, log_bytes)
    if lost:
        print(f"NOTE: lines from before the checkpoint are lost: {lost}. These stay", flush=True)
    try:
        left = move_beyond(output_dir, step, log_bytes)
    except OSError as error:
        sys.exit(
            f"what lies beyond the resume point cannot be moved to {output_dir}/left_behind: "
            f"{error}. Nothing is lost: continue with --resume auto"
        )
    if left.moved:
        print(f"left behind in {left.folder}: {', '.join(left.moved)}", flush=True)
    return bool(lost)


def move_beyond(output_dir: Path, step: int | None, log_bytes: dict[str, int]) -> LeftBehind:
    """Does the moves of `leave`.

    It may be killed at any instant: the metrics come last, so the next resume finds either the same
    point or an earlier one, and moves the rest.
    """
    begins_at_0 = step is None
    point = step or 0
    left = LeftBehind(output_dir, point)
    metrics = output_dir / "metrics.jsonl"
    samples = output_dir / transcript.FILE
    has_lines_beyond = is_longer(metrics, log_bytes.get(metrics.name, 0))

    checkpoints = beyond(output_dir / "checkpoints", point)
    left.move_newest_first(checkpoints, "checkpoint")
    left.move_newest_first(beyond(output_dir / "actors", point), "saved actor")
    # The final actor has no step in its name. If nothing else lies beyond this point, the run had
    # ended here, and the actor stays.
    if checkpoints or has_lines_beyond:
        left.move_folder("actor", "the final actor")
    found = best.recorded(output_dir)
    if found and (begins_at_0 or found["global_step"] > point):
        left.move_folder(best.FOLDER, "the best actor")
        left.move(output_dir / best.FILE)
    # A run that continues adds to these files: TensorBoard hides in them what was logged later.
    if begins_at_0:
        left.move_folder("tensorboard", "tensorboard")
    for file in (samples, metrics):
        whole = whole_lines(file, log_bytes.get(file.name, 0))
        if is_longer(file, whole):
            left.move_end_of(file, whole)
    return left


def lost_lines(output_dir: Path, log_bytes: dict[str, int]) -> str:
    """Returns which files of lines have lost some that a checkpoint counts; "" if none has."""
    lost = []
    for name, size in log_bytes.items():
        file = output_dir / name
        whole = whole_lines(file, size)
        if whole < size:
            lost.append(f"{file} had {size} bytes then, of which {whole} are whole lines now")
    return "; ".join(lost)


def whole_lines(file: Path, size: int) -> int:
    """Returns how many of a file's first `size` bytes are whole lines of JSON.

    After a power failure the end of a file may be missing, or be zeros. A user may have cut it.
    """
    if not is_longer(file, 0):
        return 0
    with open(file, "rb") as lines, mmap.mmap(lines.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end = text.rfind(b"\n", 0, size) + 1
        while end > 0:
            start = text.rfind(b"\n", 0, end - 1) + 1
            if is_json(text[start:end]):
                break
            end = start
    return end


def is_json(line: bytes) -> bool:
    """Whether a line holds a JSON value."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def is_longer(file: Path, size: int) -> bool:
    """Whether a file is there and has more bytes than that."""
    return file.is_file() and file.stat().st_size > size


def beyond(parent: Path, step: int) -> list[Path]:
    """Returns the `global_step_*` folders of a folder that are later than `step`."""
    return [path for path in folders.by_step(parent) if folders.step_of(path) > step]
