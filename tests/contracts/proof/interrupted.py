"""Kills a run and resumes it: it must end as if it had never been killed."""

import re
from collections.abc import Iterator
from pathlib import Path

from common import folders
from contracts.proof import compare, processes
from contracts.proof.bench import Bench, Finished, Unchecked
from contracts.proof.compare import Check, Difference
from contracts.proof.runs import INTERRUPTED

# How many times to try again when a run ends before it could be killed.
ATTEMPTS = 3


def resumed(bench: Bench, what: str, launcher: str, expected: Finished) -> Iterator[Check]:
    """Kills a run twice, resumes it, and compares its end with that of a run not killed.

    Args:
        what, launcher: the processes, in words and for `Bench.launch`.
        expected: the run that was not killed.
    """
    if expected.last_step < 2 * INTERRUPTED["save_steps"]:
        raise Unchecked(f"{what}: a run has too few updates for two checkpoints")
    for attempt in range(ATTEMPTS):
        name = f"killed-{launcher}-{attempt}"
        watch = Watch(bench.folder / name / "checkpoints")
        with bench.slots.take(processes.number_of(launcher)):
            was_killed = kill_twice(bench, name, launcher, watch)
        if was_killed or watch.faults:
            break
    else:
        raise Unchecked(
            f"{what}: the machine is too busy: {ATTEMPTS} times a run ended before it was killed"
        )
    found = Finished(name, bench.folder / name)
    yield Check(f"{what}: checkpoints whole or not there", compare.faults(watch.faults))
    if watch.faults:
        return
    of_lines = compare.lines(expected.lines, found.lines, exact=True)
    yield Check(f"{what}: log lines", of_lines)
    yield Check(f"{what}: samples", samples(expected, found))
    yield Check(f"{what}: weights", compare.models(expected, found, exact=True))


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

    def look(self) -> None:
        """Looks while the run goes on."""
        newest = self.newest()
        if newest is None:
            if self.has_seen:
                self.add("the last checkpoint was deleted before the next one was whole")
            return
        self.has_seen = True
        is_whole = (newest / "manifest.json").exists()
        # An old one may be half deleted. Then a newer one exists by now.
        if not is_whole and self.newest() == newest:
            self.add(f"{newest.name} had its name before it was whole")

    def sees_one(self) -> bool:
        """Looks, and returns whether there has been a checkpoint."""
        self.look()
        return self.has_seen

    def look_closely(self) -> None:
        """Looks after a kill, when nothing moves: every file of the newest one must be there."""
        self.look()
        newest = self.newest()
        fault = folders.fault_of(newest) if newest else None
        if fault:
            self.add(f"{newest.name}: {fault}")

    def newest(self) -> Path | None:
        """Returns the newest checkpoint."""
        found = folders.by_step(self.folder)
        return found[-1] if found else None

    def add(self, fault: str) -> None:
        """Notes a fault once."""
        if fault not in self.faults:
            self.faults.append(fault)


def kill_twice(bench: Bench, name: str, launcher: str, watch: Watch) -> bool:
    """Kills a run twice and lets it go on to its end, unless a checkpoint is found at fault.

    Returns:
        False if the run ended before a kill.
    """
    begin = bench.flags(bench.folder / name, **INTERRUPTED)
    resume = [*begin, "--resume", "auto"]

    # 1. When the first checkpoint has appeared.
    was_killed = bench.launch(f"{name}-0", launcher, begin, until=watch.sees_one)
    watch.look_closely()
    if watch.faults or not was_killed:
        return was_killed

    # 2. While the next one is written.
    earlier_steps = steps_named_in(watch.folder)

    def another_is_written() -> bool:
        watch.look()
        return bool(steps_named_in(watch.folder) - earlier_steps)

    was_killed = bench.launch(f"{name}-1", launcher, resume, until=another_is_written)
    watch.look_closely()
    if watch.faults or not was_killed:
        return was_killed

    # 3. Watched to its end, and not killed.
    def never() -> bool:
        watch.look()
        return False

    bench.launch(name, launcher, resume, until=never)
    return True


def steps_named_in(checkpoints: Path) -> set[str]:
    """Returns the `global_step_*` of all names in a folder, also of what is still being written."""
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return {step for name in names for step in re.findall(r"global_step_\d+", name)}


def samples(expected: Finished, found: Finished) -> Difference:
    """Counts the lines of `samples.jsonl` that differ; a recipe that samples nothing has none."""
    expected_lines = sample_lines(expected)
    found_lines = sample_lines(found)
    unlike = sum(line != other for line, other in zip(expected_lines, found_lines))
    wrong = unlike + abs(len(expected_lines) - len(found_lines))
    where = f"samples.jsonl: {len(found_lines)} lines, expected {len(expected_lines)}"
    return Difference(wrong, 0, where)


def sample_lines(run: Finished) -> list[str]:
    """Returns the lines of a run's `samples.jsonl`, none where there is no such file."""
    file = run.folder / "samples.jsonl"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []
