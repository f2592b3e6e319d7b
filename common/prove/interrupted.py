"""Kills a run and resumes it: it must end as if it had never been killed."""

import re
from collections.abc import Iterator
from pathlib import Path

from common import folders
from common.prove import compare, processes
from common.prove.bench import Bench, Finished, Unchecked
from common.prove.compare import Check, Difference
from common.prove.runs import INTERRUPTED

# How often a run is begun again that has ended before it could be killed.
ATTEMPTS = 3


def resumed(bench: Bench, what: str, launcher: str, expected: Finished) -> Iterator[Check]:
    """Kills a run when a checkpoint has appeared and while one is written, and resumes it.

    Args:
        expected: the run that was not killed.
    """
    if expected.last_step < 2 * INTERRUPTED["save_steps"]:
        raise Unchecked(f"{what}: a run has too few updates for two checkpoints")
    for attempt in range(ATTEMPTS):
        name = f"killed-{launcher}-{attempt}"
        with bench.slots.take(processes.number_of(launcher)):
            watch = kill_twice(bench, name, launcher)
        if watch:
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
        # Seen missing twice: it is not that the next one has come and this one goes.
        if not (newest / "manifest.json").exists() and self.newest() == newest:
            self.add(f"{newest.name} had its name before it was whole")

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


def kill_twice(bench: Bench, name: str, launcher: str) -> Watch | None:
    """Kills a run twice and lets it go on to its end, if no checkpoint was found at fault.

    Returns:
        what was seen of the checkpoints; None if the run ended before it could be killed.
    """
    checkpoints = bench.folder / name / "checkpoints"
    watch = Watch(checkpoints)
    earlier: set[str] = set()

    def has_appeared() -> bool:
        watch.look()
        return watch.has_seen

    def is_written() -> bool:
        watch.look()
        return bool(steps_named_in(checkpoints) - earlier)

    def never() -> bool:
        watch.look()
        return False

    begin = bench.flags(bench.folder / name, **INTERRUPTED)
    resume = [*begin, "--resume", "auto"]
    for number, (flags, moment) in enumerate([(begin, has_appeared), (resume, is_written)]):
        earlier = steps_named_in(checkpoints)
        was_killed = bench.launch(f"{name}-{number}", launcher, flags, until=moment)
        watch.look_closely()
        if watch.faults:
            return watch
        if not was_killed:
            return None
    bench.launch(name, launcher, resume, until=never)
    return watch


def steps_named_in(checkpoints: Path) -> set[str]:
    """Returns the `global_step_*` of all names in a folder, also of what is still being written."""
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return {step for name in names for step in re.findall(r"global_step_\d+", name)}


def samples(expected: Finished, found: Finished) -> Difference:
    """Counts the lines of `samples.jsonl` that differ; a recipe that asks nothing has none."""
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
