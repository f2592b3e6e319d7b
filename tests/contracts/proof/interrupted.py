"""Kills a run twice and resumes it."""

import re
from pathlib import Path

import pytest

from common import folders
from contracts.proof.bench import Bench, Finished
from contracts.proof.compare import Difference
from contracts.proof.runs import INTERRUPTED
from runs import samples as samples_of

# How many times to try again when a run ends before it could be killed.
ATTEMPTS = 3


class Watch:
    """Looks at a folder of checkpoints while a run writes them.

    A kill at the instant of a look would leave just what it sees. So what must hold after a kill
    must hold at every look: once there is a checkpoint, the newest one is whole.

    Attributes:
        has_seen: whether there has been a checkpoint.
        faults: what was seen that must not be.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.has_seen = False
        self.faults: list[str] = []

    def sees_one(self) -> bool:
        """Looks while the run goes on; returns whether there has been a checkpoint."""
        newest = self.newest()
        if newest is None:
            if self.has_seen:
                self.add("the last checkpoint was deleted before the next one was whole")
            return self.has_seen
        self.has_seen = True
        is_whole = (newest / "manifest.json").exists()
        # An old one may be half deleted. Then a newer one exists by now.
        if not is_whole and self.newest() == newest:
            self.add(f"{newest.name} had its name before it was whole")
        return True

    def look_closely(self) -> None:
        """Looks after a kill, when nothing moves: every file of the newest one must be there."""
        self.sees_one()
        newest = self.newest()
        fault = folders.fault_of(newest) if newest else None
        if newest and fault:
            self.add(f"{newest.name}: {fault}")

    def newest(self) -> Path | None:
        found = folders.by_step(self.folder)
        return found[-1] if found else None

    def add(self, fault: str) -> None:
        """Notes a fault once."""
        if fault not in self.faults:
            self.faults.append(fault)


def resumed(bench: Bench, launcher: str) -> tuple[Finished, list[str]]:
    """Returns a run that was killed twice and went on to its end, and the faults of its checkpoints.

    With a fault it may not have ended.
    """
    for attempt in range(ATTEMPTS):
        name = f"killed-{launcher}-{attempt}"
        watch = Watch(bench.folder / name / "checkpoints")
        if kill_twice(bench, name, launcher, watch) or watch.faults:
            return Finished(bench.folder / name), watch.faults
    return pytest.skip(f"too busy a machine: {ATTEMPTS} times a run ended before it was killed")


def kill_twice(bench: Bench, name: str, launcher: str, watch: Watch) -> bool:
    """Kills a run twice and lets it go on to its end, unless a checkpoint is found at fault.

    Returns:
        False if the run ended before a kill.
    """
    begin = bench.flags(bench.folder / name, **INTERRUPTED)
    resume = [*begin, "--resume", "auto"]

    # 1. When the first checkpoint has appeared.
    was_killed = bench.run_until(f"{name}-0", launcher, begin, watch.sees_one)
    watch.look_closely()
    if watch.faults or not was_killed:
        return was_killed

    # 2. While the next one is written.
    earlier_steps = steps_named_in(watch.folder)

    def another_is_written() -> bool:
        watch.sees_one()
        return bool(steps_named_in(watch.folder) - earlier_steps)

    was_killed = bench.run_until(f"{name}-1", launcher, resume, another_is_written)
    watch.look_closely()
    if watch.faults or not was_killed:
        return was_killed

    # 3. Watched to its end, and not killed.
    bench.run_until(name, launcher, resume, lambda: not watch.sees_one())
    return True


def steps_named_in(checkpoints: Path) -> set[str]:
    """Returns the `global_step_*` of all names in a folder, also of what is still being written."""
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return {step for name in names for step in re.findall(r"global_step_\d+", name)}


def samples(expected: Finished, found: Finished) -> Difference:
    """Counts the lines of `samples.jsonl` that differ; a recipe that samples nothing has none."""
    expected_lines, found_lines = samples_of(expected.folder), samples_of(found.folder)
    unlike = sum(one != other for one, other in zip(expected_lines, found_lines))
    wrong = unlike + abs(len(expected_lines) - len(found_lines))
    where = f"samples.jsonl: {len(found_lines)} lines, expected {len(expected_lines)}"
    return Difference(wrong, 0, where)
