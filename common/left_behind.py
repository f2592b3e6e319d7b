"""Moves aside what a run wrote beyond the point that it resumes from, so that nothing is lost."""

import hashlib
import json
import mmap
import os
import shutil
from pathlib import Path

from common import counted, folders, transcript

# Which settings wrote the lines of metrics.jsonl: [[0, digest], [8, digest]] says that other
# settings wrote the lines after update 8.
WRITERS = ".metrics_writers.json"


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
        self.folder = output_dir / "left_behind" / name
        number = 1
        while self.folder.exists():
            number += 1
            self.folder = self.folder.with_name(f"{name}_{number}")
        self.moved: list[str] = []

    def place_for(self, path: Path) -> Path:
        """The place of a file or folder of the run, with its parent folder made."""
        place = self.folder / path.relative_to(self.output_dir)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def move(self, path: Path) -> None:
        # `checkpoints` may be a link to another disk, to which a folder cannot be renamed.
        place = self.place_for(path)
        shutil.move(path, place)
        folders.flush(place.parent, path.parent)

    def move_newest_first(self, paths: list[Path], kind: str) -> None:
        """Moves `global_step_*` folders, the newest first.

        If the process is killed meanwhile, the newest checkpoint that is still there knows of all
        lines of `metrics.jsonl` up to it.
        """
        for path in sorted(paths, key=folders.step_of, reverse=True):
            self.move(path)
        if paths:
            self.moved.append(counted(len(paths), kind))

    def keep_end_of(self, file: Path, start: int) -> None:
        """Copies what a file of lines has from byte `start` on; the file itself is not cut."""
        with open(file, "rb") as lines:
            lines.seek(start)
            end = lines.read()
        place = self.place_for(file)
        place.write_bytes(end)
        folders.flush(place, place.parent)
        number = len(end.splitlines())
        self.moved.append(f"{counted(number, 'line')} of {file.name}")


def leave(
    output_dir: Path,
    step: int | None,
    metrics_bytes: int,
    samples_bytes: int,
    writers: list,
    now: str,
) -> str | None:
    """Moves everything beyond the resume point to a new folder in `left_behind/`.

    These are checkpoints, saved actors, and the ends of `metrics.jsonl` and `samples.jsonl` with
    their TensorBoard. These ends are only cut where the run will write the same lines again.

    It may be killed at any instant: the metrics come last, so the next resume finds either the same
    point or an earlier one, and goes on with what is still to be moved.

    Args:
        step: `global_step` of the checkpoint that the run resumes from; None if it begins anew.
        metrics_bytes, samples_bytes: the sizes that the two files had at that point.
        writers: who wrote `metrics.jsonl`, as `read_writers` returns it.
        now: the digest of this run's settings.

    Returns:
        What was moved where, in one line; None if there was nothing.
    """
    anew = step is None
    step = step or 0
    left = LeftBehind(output_dir, step)
    metrics = output_dir / "metrics.jsonl"
    samples = output_dir / transcript.FILE
    board = output_dir / "tensorboard"
    actor = output_dir / "actor"
    lines_beyond = is_longer(metrics, metrics_bytes)

    checkpoints = beyond(output_dir / "checkpoints", step)
    left.move_newest_first(checkpoints, "checkpoint")
    left.move_newest_first(beyond(output_dir / "actors", step), "saved actor")
    # The final actor has no step in its name. If nothing else lies beyond this point, the run had
    # ended here, and the actor stays.
    if actor.is_dir() and (checkpoints or lines_beyond):
        left.move(actor)
        left.moved.append("the final actor")

    same_lines = not anew and set(writers_beyond(writers, step)) == {now}
    if board.is_dir() and (anew or (lines_beyond and not same_lines)):
        if anew:
            left.move(board)
        else:
            # The run goes on in these files: TensorBoard hides there what it has left behind.
            shutil.copytree(board, left.place_for(board))
        left.moved.append(board.name)
    for file, size in ((samples, samples_bytes), (metrics, metrics_bytes)):
        whole = whole_lines(file, size)
        if not is_longer(file, whole):
            continue
        if not same_lines or whole < size:  # what is torn will not be written again
            left.keep_end_of(file, whole)
        os.truncate(file, whole)

    earlier = [entry for entry in writers if entry[0] < step and not anew]
    if not earlier or earlier[-1][1] != now:
        earlier.append([step, now])
    write_writers(output_dir, earlier)
    if not left.moved:
        return None
    return f"left behind in {left.folder}: {', '.join(left.moved)}"


def lost_lines(sizes: dict[Path, int]) -> str | None:
    """Says which files of lines have lost some that a checkpoint counts; None if none has.

    Args:
        sizes: the bytes that they had at the checkpoint.
    """
    lost = []
    for file, size in sizes.items():
        whole = whole_lines(file, size)
        if whole < size:
            lost.append(f"{file} had {size} bytes then, of which {whole} are whole lines now")
    if not lost:
        return None
    return f"NOTE: lines from before the checkpoint are lost: {'; '.join(lost)}. These stay"


def whole_lines(file: Path, size: int) -> int:
    """Returns how many of a file's first `size` bytes are whole lines of JSON.

    After a power failure the end of a file may be missing, or be zeros. A hand may have cut it.
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
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def is_longer(file: Path, size: int) -> bool:
    """Whether a file is there and has more bytes than that."""
    return file.is_file() and file.stat().st_size > size


def beyond(parent: Path, step: int) -> list[Path]:
    """The `global_step_*` folders of a folder that are later than `step`."""
    return [path for path in folders.by_step(parent) if folders.step_of(path) > step]


# ============================================================ who wrote which lines


def digest(settings: dict) -> str:
    """A short name of settings that are JSON values."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def writers_beyond(writers: list, step: int) -> list[str]:
    """The digests of the settings that wrote the lines after `step`."""
    ends = [start for start, _ in writers[1:]] + [float("inf")]
    return [settings for (_, settings), end in zip(writers, ends) if end > step]


def read_writers(output_dir: Path) -> list | None:
    """Who wrote `metrics.jsonl`; None if an older version did, which kept no such record."""
    file = output_dir / WRITERS
    if not file.is_file():
        return None
    try:
        return [[int(step), str(settings)] for step, settings in folders.read_json(file)]
    except (ValueError, TypeError):
        return [[0, "unknown"]]  # no run's own: all lines are kept


def write_writers(output_dir: Path, writers: list) -> None:
    """Replaces the record as a whole."""
    folders.replace_file(output_dir / WRITERS, json.dumps(writers))
