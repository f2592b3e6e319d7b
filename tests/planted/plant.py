"""Plants each fault of faults.py in a copy of this repository, and runs the tests that ought to see it.

    make planted                             all: half an hour; ends with 1 below 95 %
    make planted ARGS="recipes/dpo forks/"   those in files whose paths begin so

Tests run in forks of this process, which imports libraries and none of our own code, and what they launch in forks of
one server (contracts/proof/warm.py). Tests that are red without a fault end the run.
"""

import compileall
import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = REPOSITORY / "tests"
sys.path.insert(0, str(TESTS))

from contracts.proof import warm  # noqa: E402
from faults import faults  # noqa: E402

AIM = 0.95
SEEN = (1, 2)  # exit codes of pytest: a test failed, or could not be imported
ARGUMENTS = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--timeout", "300"]


def in_fork(function: Callable[[], int | None]) -> int:
    """Calls a function in a fork of this process, and returns what it returned."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            status = function() or 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def copy_to(folder: Path) -> None:
    from runs import copy_repository

    copy_repository(folder)
    compileall.compile_dir(
        folder, quiet=2
    )  # a planted file, changed at another time, is compiled anew


def run_tests(folder: Path, tests: tuple[str, ...]) -> int:
    """Runs tests of a copy of the repository until one fails; returns pytest's exit code."""
    for name in [name for name in sys.modules if re.match(r"contracts\b", name)]:
        del sys.modules[name]
    sys.path[:] = [str(folder / "tests"), *(path for path in sys.path if Path(path) != TESTS)]
    os.chdir(folder)
    console = os.open(folder.parent / "console", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(console, 1)
    os.dup2(console, 2)
    folders = ["--rootdir", str(folder), "--basetemp", str(folder.parent / "runs")]
    words = [word if word.startswith("-") else f"tests/{word}" for word in tests]
    return pytest.main([*ARGUMENTS, *folders, *words])


@functools.cache
def refuse_red(folder: Path, tests: tuple[str, ...]) -> None:
    if in_fork(lambda: run_tests(folder, tests)):
        sys.exit(f"{(folder.parent / 'console').read_text()}\nred without a fault: {tests}")


def plant_all(folder: Path, beginnings: tuple[str, ...]) -> float:
    """Plants the faults in files whose paths begin so, one at a time; returns the share seen."""
    chosen = [fault for fault in faults() if fault.file.startswith(beginnings)]
    survivors = []
    for file, tests, piece, other in chosen:
        refuse_red(folder, tests)
        text = (REPOSITORY / file).read_text(encoding="utf-8").replace(piece, other)
        (folder / file).write_text(text, encoding="utf-8")
        status = in_fork(lambda tests=tests: run_tests(folder, tests))
        shutil.copy2(REPOSITORY / file, folder / file)  # with its time of change
        console = (folder.parent / "console").read_text(errors="replace")
        by = re.findall(r"^(?:FAILED|ERROR) .*?(\w+(?:\[.*?\])?)(?: - |$)", console, re.MULTILINE)
        verdict = f"seen by {' '.join(by[:1])}" if status in SEEN else f"SURVIVED {' '.join(tests)}"
        print(line := f"{verdict}: {file}: {piece!r} -> {other!r} [{status}]", flush=True)
        survivors += [line] * (status not in SEEN)
    share = 1 - len(survivors) / len(chosen)
    print(f"\n{share:.1%} of {len(chosen)} faults seen", *survivors, sep="\n")
    return share


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as parent:
        os.environ.update(warm.ENVIRONMENT, PYTHONDONTWRITEBYTECODE="1", CUDA_VISIBLE_DEVICES="")
        os.environ["HF_DATASETS_CACHE"] = f"{parent}/cache"
        sys.dont_write_bytecode = True
        copy = Path(parent, "repository")
        in_fork(lambda: copy_to(copy))
        warm.import_libraries()
        warm.server()
        found = plant_all(copy, tuple(sys.argv[1:]) or ("",))
    sys.exit(int(found < AIM))
