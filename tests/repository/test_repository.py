"""What the repository says about itself is true: packages, versions, the lock, make's targets, CI. Nothing is trained here."""

import ast
import itertools
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlparse

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from recipes import NAMES
from runs import REPOSITORY

tomllib = pytest.importorskip("tomllib")  # Python 3.11 has it first

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
DEPENDENCIES = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = {
    name: [Requirement(line) for line in lines]
    for name, lines in PROJECT["optional-dependencies"].items()
}
PINS = [
    Requirement(line)
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
]
PYTHONS = ["3.10", "3.11", "3.13"]
# Packages that are imported by another name than they are installed by.
LIBRARIES = ("data", "models", "rollouts", "tools")
INSTALLED_AS = {"yaml": "pyyaml"}
OURS = {
    "common",
    "contracts",
    "preference_recipes",
    "peers",
    *(path.stem for path in REPOSITORY.glob("*/*.py")),
    *(path.stem for path in REPOSITORY.glob("tests/*/*.py")),
    *(path.stem for path in REPOSITORY.glob("benchmarks/audit/*.py")),
}


def imported(*folders: str) -> dict[str, Path]:
    """The packages that the files of folders import, each with a file that does.

    The adapters of the audit run in environments of their own, with requirements of their own.
    """
    found = {}
    for path in sorted(path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")):
        if path.is_relative_to(REPOSITORY / "benchmarks/audit"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                package = name.partition(".")[0]
                if package not in sys.stdlib_module_names and package not in OURS:
                    found[INSTALLED_AS.get(package, package.replace("_", "-"))] = path
    return found


def names_of(requirements: list[Requirement]) -> set[str]:
    return {requirement.name for requirement in requirements}


def pins_under(python: str) -> dict[str, str]:
    """The pinned version of each package under a version of Python."""
    environment = default_environment() | {"python_version": python}
    return {
        pin.name: str(pin.specifier).removeprefix("==")
        for pin in PINS
        if pin.marker is None or pin.marker.evaluate(environment)
    }


# ============================================================ packages


def test_every_import_is_a_declared_dependency():
    """What a run imports is installed with it; peft and math-verify with the extras that need them.

    `vllm` is imported in a server's own processes, see `preference_recipes/rollouts/vllm_worker.py`.
    """
    always = names_of(DEPENDENCIES)
    needed = imported("common", "preference_recipes", "recipes")
    assert needed.keys() - always == {"peft", "math-verify", "vllm"}
    assert "math-verify" in names_of(EXTRAS["math"])
    assert "peft" in names_of(EXTRAS["lora"]) & names_of(EXTRAS["qlora"])
    everything = always.union(*map(names_of, EXTRAS.values()))
    around = imported("tests", "benchmarks", "assets", "docs")
    assert around.keys() <= everything, around
    # None is declared for nothing. Others load these: transformers bitsandbytes, accelerate trackio, datasets pyarrow.
    loaded_by_others = {"tensorboard", "bitsandbytes", "pyarrow", "pytest-timeout", "pytest-xdist", "ruff", "mypy", "trackio"}  # fmt: skip
    assert everything - (needed.keys() | around.keys()) <= loaded_by_others


def test_every_dependency_has_a_lower_bound_that_its_pin_meets():
    of_tests = [*DEPENDENCIES, *EXTRAS["lora"], *EXTRAS["qlora"], *EXTRAS["math"], *EXTRAS["test"]]
    for python in PYTHONS:
        pins = pins_under(python)
        assert names_of(of_tests) - pins.keys() == {"filelock", "packaging", "tokenizers"}
        for requirement in of_tests:
            operators = sorted(specifier.operator for specifier in requirement.specifier)
            assert operators[-1:] == [">="] and set(operators[:-1]) <= {"!="}
            if requirement.name in pins:
                assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_a_version_that_only_adapters_cannot_use_is_excluded_with_them_alone():
    """transformers 5.24.0 demands a peft that is not published."""
    excluding = {
        name
        for name, requirements in {None: DEPENDENCIES, **EXTRAS}.items()
        for each in requirements
        if each.name == "transformers" and not each.specifier.contains("5.24.0")
    }
    with_peft = {name for name, requirements in EXTRAS.items() if "peft" in names_of(requirements)}
    assert excluding == with_peft == {"lora", "qlora", "test"}


def test_the_lock_is_of_this_project_and_names_public_places_only():
    lock = tomllib.loads((REPOSITORY / "uv.lock").read_text())
    (own,) = [package for package in lock["package"] if package["name"] == PROJECT["name"]]
    locked = {
        (entry["name"], str(SpecifierSet(entry.get("specifier", ""))), extra)
        for entry in own["metadata"]["requires-dist"]
        for extra in re.findall(r"extra == '(\w+)'", entry.get("marker", "")) or [None]
    }
    declared = {(each.name, str(each.specifier), None) for each in DEPENDENCIES}
    for extra, requirements in EXTRAS.items():
        declared |= {(each.name, str(each.specifier), extra) for each in requirements}
    assert locked == declared, "make lock"

    versions = {}
    for package in lock["package"]:
        versions.setdefault(package["name"], set()).add(package["version"])
    pinned = {}
    for pin in PINS:
        pinned.setdefault(pin.name, set()).add(str(pin.specifier).removeprefix("=="))
    assert {name: versions[name] for name in pinned} == pinned, "make lock"

    text = (REPOSITORY / "uv.lock").read_text()
    hosts = {urlparse(url).netloc for url in re.findall(r'"(\w+://[^"]+)"', text)}
    assert hosts == {"pypi.org", "files.pythonhosted.org"}


@pytest.mark.parametrize(
    "folder", ["common", *(f"preference_recipes/{name}" for name in LIBRARIES)]
)
def test_each_file_of_a_library_has_a_line_in_its_readme(folder):
    text = (REPOSITORY / folder / "README.md").read_text()
    named = re.findall(r"^\| `(\w+\.py)` \|", text, re.MULTILINE)
    files = [path.name for path in (REPOSITORY / folder).glob("*.py")]
    assert sorted(named) == sorted(name for name in files if not name.endswith("__.py"))


# ============================================================ make


def environment_of_make() -> dict[str, str]:
    """The tests' own, without what a `make test CONSTRAINTS=` around them gives to every make below it."""
    variables = re.findall(r"^(\w+) \?=", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    given = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", *variables}
    return {name: value for name, value in os.environ.items() if name not in given}


def make(*words) -> subprocess.CompletedProcess:
    command = ["make", "-C", REPOSITORY, "--no-print-directory", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment_of_make())


def targets() -> set[str]:
    line = re.search(r"^\.PHONY: (.*)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    return set(line[1].split())


def test_help_lists_every_target():
    listed = re.findall(r"^  make (\S+) +\S", make("help").stdout, re.MULTILINE)
    assert sorted(name for names in listed for name in names.split("|")) == sorted(targets())


@pytest.fixture
def environment(tmp_path):
    """A virtual environment whose pip and python are scripts; `pip_does` writes what pip runs."""
    (tmp_path / "bin").mkdir()

    def write(name: str, script: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    write("python", "exit 0")
    return tmp_path, lambda script: write("pip", script)


def test_an_installation_says_one_line_a_step(environment, monkeypatch):
    """Also when these tests are those of `make test CONSTRAINTS=`, as every night."""
    folder, pip_does = environment
    monkeypatch.setenv("MAKEFLAGS", " -- CONSTRAINTS=")
    monkeypatch.setenv("CONSTRAINTS", "")
    pip_does('echo "Collecting $*"; echo noise >&2')
    done = make("install", f"VENV={folder}")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.splitlines() == [
        f"installing into {folder}, which takes some minutes; {folder}/install.log shows the progress",
        "compiling what was installed",
    ]
    log = (folder / "install.log").read_text()
    assert "Collecting install" in log and "-c constraints.txt" in log and "noise" in log
    assert (folder / "installed").exists()
    assert "installing" not in make("install", f"VENV={folder}").stdout  # once is enough


def test_the_newest_versions_are_installed_without_constraints(environment):
    folder, pip_does = environment
    pip_does('echo "$*"')
    assert make("install-test", f"VENV={folder}", "CONSTRAINTS=").returncode == 0
    (said,) = (folder / "install.log").read_text().splitlines()
    assert "constraints" not in said and said.endswith("-e .[test,peers]")


def test_the_oldest_versions_are_installed_of_every_dependency(environment):
    folder, pip_does = environment
    pip_does('echo "$*"')
    assert make("test-minimum", f"MINIMUM_VENV={folder}").returncode == 0
    pins = [Requirement(line) for line in (folder / "minimum.txt").read_text().splitlines()]
    bounds = {
        (requirement.name, str(specifier).replace(">=", "=="))
        for requirement in itertools.chain(DEPENDENCIES, *EXTRAS.values())
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }
    assert {(pin.name, str(pin.specifier)) for pin in pins} == bounds
    assert ("transformers", "==5.17") in bounds


def test_a_failed_installation_shows_the_end_of_its_log(environment):
    folder, pip_does = environment
    pip_does('for i in $(seq 60); do echo "line $i"; done; echo "ERROR: no such package"; exit 1')
    failed = make("install", f"VENV={folder}")
    assert failed.returncode == 2
    lines = failed.stdout.splitlines()
    assert "ERROR: no such package" in lines and "line 60" in lines and "line 20" not in lines
    assert lines[-1] == f"the installation failed: see all of {folder}/install.log"
    assert not (folder / "installed").exists()


def test_an_interrupted_installation_is_done_again(environment):
    folder, pip_does = environment
    pip_does(f"touch {folder}/began; exec sleep 60")
    command = ["make", "-C", REPOSITORY, "install", f"VENV={folder}"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment_of_make(),
    )
    while not (folder / "began").exists():
        time.sleep(0.02)
    for _ in range(100):  # a shell that is just starting a program loses the signal
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: make and all that it started
        time.sleep(0.1)
        if process.poll() is not None:
            break
    assert process.returncode
    assert not (folder / "installed").exists()
    pip_does("echo all there")
    assert make("install", f"VENV={folder}").returncode == 0
    assert (folder / "installed").exists()


def test_the_tables_of_tests_have_each_file_once():
    """Under the name of its folder, and no more than eleven to a folder."""
    listed = []
    for section in (REPOSITORY / "tests/README.md").read_text().split("\n## ")[1:]:
        folder = section.splitlines()[0]
        rows = [line.split(" | ")[1] for line in section.splitlines() if line.startswith("| ")]
        names = [f"{folder}/{name}" for row in rows for name in re.findall(r"test_\w+\.py", row)]
        assert len(names) <= 11, folder
        listed += names
    found = sorted((REPOSITORY / "tests").glob("*/test_*.py"))
    assert sorted(listed) == [str(path.relative_to(REPOSITORY / "tests")) for path in found]


# ============================================================ CI
def checks_in(file: str) -> list[str]:
    """The commands of make in a workflow or a script, without those that install."""
    text = (REPOSITORY / file).read_text()
    found = re.findall(r"^ *(?:- run: )?(make [a-z-]+(?: CONSTRAINTS=)?)", text, re.MULTILINE)
    return sorted(command for command in found if "install" not in command)


def test_contributing_says_what_ci_runs():
    section = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("CI runs:")[2]
    table = section.partition("\n\n`python")[0]
    said = {}
    for commands, file in re.findall(r"^\| .* \| (.*) \| `(\S+)` \|$", table, re.MULTILINE):
        said[file] = sorted(re.findall(r"`(make [^`]+)`", commands))
    workflows = (REPOSITORY / ".github/workflows").glob("*.yml")
    files = [".ci/run", *(str(path.relative_to(REPOSITORY)) for path in workflows)]
    assert said == {file: checks_in(file) for file in files}


def test_workflows_run_targets_that_exist():
    commands = {}
    for path in sorted((REPOSITORY / ".github/workflows").glob("*.yml")):
        workflow = yaml.safe_load(path.read_text())
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        commands[path.stem] = [step["run"] for step in steps if "run" in step]
    made = [line for lines in commands.values() for line in lines if line.startswith("make ")]
    assert {line.split()[1] for line in made} <= targets()
    assert commands["test"] == ["make lint", "make test"]
    assert "make test-all" in commands["weekly"]
    assert "make test CONSTRAINTS=" in commands["nightly"]

    weekly = yaml.safe_load((REPOSITORY / ".github/workflows/weekly.yml").read_text())
    assert weekly["jobs"]["prove"]["strategy"]["matrix"]["recipe"] == NAMES
    assert set(NAMES) <= targets()

    test = yaml.safe_load((REPOSITORY / ".github/workflows/test.yml").read_text())
    pythons = test["jobs"]["test"]["strategy"]["matrix"]["python-version"]
    assert pythons == ["3.10", "3.13"]
    assert PROJECT["requires-python"] == f">={pythons[0]}"


def test_workflows_run_foreign_code_by_its_hash_and_keep_no_token():
    """A tag can be moved to other code; a token in the clone's settings can be read by what is tested."""
    used = set()
    for path in sorted((REPOSITORY / ".github/workflows").glob("*.yml")):
        used |= set(re.findall(r"uses: (.*)", path.read_text()))
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            checkouts = [
                step for step in job["steps"] if "actions/checkout" in step.get("uses", "")
            ]
            assert [step["with"]["persist-credentials"] for step in checkouts] == [False], path
    pinned = [re.fullmatch(r"actions/(\S+)@[0-9a-f]{40} # v6\.\d+\.\d+", action) for action in used]
    assert all(pinned) and sorted(match[1] for match in pinned) == ["checkout", "setup-python"]


def test_commits_are_checked_by_the_same_ruff():
    config = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())
    (ruff,) = config["repos"]
    assert ruff["rev"] == f"v{pins_under('3.13')['ruff']}"
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]
