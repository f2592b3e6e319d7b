"""What pip installs, from a wheel outside the repository: the command, recipes, configs and the demo."""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from preference_recipes.tools import forks
from recipes import NAMES
from runs import OFFLINE, REPOSITORY, copy_repository, recipe, slow_but, training_lines

pytest.importorskip("pip")  # it installs the wheel
pytest.importorskip("hatchling")  # it builds the wheel
if not (REPOSITORY / ".git").exists():
    pytest.skip("git knows which files are the repository's", allow_module_level=True)

# Folders of the repository that a wheel has inside its one package.
MOVED = ("accelerate_configs", "assets", "common", "forks", "recipes")
FEW_UPDATES = ["--max_steps", 2, "--exact_match_rows", 0, "--report_to", "none"]


class Built(NamedTuple):
    """Both distributions, the wheel built from the other one, and an environment that has it."""

    files: set[str]  # of the repository
    source: Path
    wheel: Path
    environment: Path

    def run(self, *words, cwd: Path, check: bool = True) -> subprocess.CompletedProcess:
        """Runs a program of the environment, stdout and stderr together."""
        command = [self.environment / "bin" / words[0], *map(str, words[1:])]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            command,
            cwd=cwd,
            env=variables | OFFLINE,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert not check or done.returncode == 0, done.stdout
        return done


def build(kind: str, source: Path, folder: Path) -> Path:
    """Builds a distribution of the files in a folder, as pip does, without a network."""
    code = f"from hatchling import build; print(build.build_{kind}({str(folder)!r}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True)
    return folder / done.stdout.splitlines()[-1]


def make_environment(folder: Path, *install) -> Path:
    """Makes an environment in which pip has installed `install`, and a stranger's `common`."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/*/site-packages")
    paths = [path for path in sys.path if path.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join(paths))
    make_strangers_common(packages)
    command = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install"]
    flags = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, *flags, *install], check=True)
    return folder


def make_strangers_common(folder: Path) -> None:
    (folder / "common").mkdir()
    (folder / "common/__init__.py").write_text("ROOT = 'of a stranger'\n")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    files = copy_repository(folder / "clone")
    source = build("sdist", folder / "clone", folder)
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    wheel = build("wheel", folder / source.name.removesuffix(".tar.gz"), folder)
    return Built(files, source, wheel, make_environment(folder / "environment", wheel))


def test_the_source_distribution_is_the_repository(built):
    with tarfile.open(built.source) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert names - {"PKG-INFO"} == built.files


def test_the_wheel_has_every_file_of_its_folders(built):
    """Each once, all in one package, and no tests, docs or benchmarks."""
    assert built.wheel.stat().st_size < 6e6 and built.source.stat().st_size < 8e6  # bytes
    ours = {name for name in built.files if name.startswith("preference_recipes/")}
    ours |= {f"preference_recipes/{name}" for name in built.files if name.split("/")[0] in MOVED}
    with zipfile.ZipFile(built.wheel) as archive:
        names = archive.namelist()
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(ours)


# ============================================================ whose `common` it is

# The first lines of a recipe, as far as it looks for `common`.
HEAD = recipe("dpo").read_text().partition("import preference_recipes")
PRINT = "\nimport importlib.util\nimport common\nprint('found:', common.ROOT)\n"
PRINT += "print('found:', importlib.util.find_spec('rollouts'))\n"
CELL = "import nbclient, nbformat; from nbformat import v4; cell = v4.new_code_cell('%run {}'); "
CELL += "nbclient.execute(v4.new_notebook(cells=[cell])); print(cell.outputs[0].text)"
STARTS = {
    "python": ["python"],
    "pytest": ["python", "-m", "pytest", "-qs", "-p", "no:cacheprovider"],
    "notebook": ["python", "-c", CELL],
}


@pytest.fixture(scope="module")
def found(built, tmp_path_factory):
    """By kind of installation: an environment, where a recipe lies, where our files are."""
    folder = tmp_path_factory.mktemp("found")
    (folder / "fork/preference_recipes").mkdir(parents=True)  # a clone may have this name, too
    clone = folder / "clone"
    copy_repository(clone)
    (packages,) = built.environment.resolve().glob("lib/*/site-packages")
    installed = packages / "preference_recipes"
    for place in (folder / "fork", clone / "recipes", installed / "recipes"):
        make_strangers_common(place)
    return {
        "clone": (built.environment, clone / "recipes", clone),  # though the wheel is there, too
        "editable": (make_environment(folder / "editable", "-e", clone), folder / "fork", clone),
        "wheel": (built.environment, folder / "fork", installed),
        "recipe of the wheel": (built.environment, installed / "recipes", installed),
    }


@pytest.mark.parametrize("start", slow_but(["python", "pytest"], STARTS))
@pytest.mark.parametrize("kind", ["clone", "editable", "wheel", "recipe of the wheel"])
def test_a_recipe_finds_our_common_whatever_lies_beside_it(built, found, kind, start, tmp_path):
    """A stranger's `common` is in its folder and in site-packages."""
    environment, folder, files = found[kind]
    script = folder / "test_copy.py"  # a name that pytest takes
    script.write_text("".join(HEAD[:2]) + PRINT)
    command = [str(word).format(script) for word in STARTS[start]]
    command += [script] * (start != "notebook")
    said = built._replace(environment=environment).run(*command, cwd=tmp_path, check=False).stdout
    script.unlink()
    assert re.findall("found: (.*)", said) == [str(files), "None"], said


def test_where_a_strangers_common_came_first_one_line_says_so(built, found, tmp_path):
    command = ["python", "-c", "import common\nimport preference_recipes"]
    said = built.run(*command, cwd=tmp_path, check=False).stdout.splitlines()[-1]
    (packages,) = built.environment.glob("lib/*/site-packages")
    other = f"<module 'common' from '{packages}/common/__init__.py'>"
    ours = found["wheel"][2] / "common"
    assert said.endswith(f"import preference_recipes before {other}: its own `common` is {ours}")


# ============================================================ the command


def test_list_names_recipes_and_configs(built, tmp_path):
    printed = built.run("preference-recipes", "list", cwd=tmp_path).stdout
    configs = sorted(path.name for path in (REPOSITORY / "accelerate_configs").glob("*.yaml"))
    assert (
        re.findall(r"^  (\S+) +\S", printed, re.MULTILINE)
        == sorted(NAMES) + forks.names() + configs
    )
    assert re.search(r"^  dpo +Direct Preference Optimization: ", printed, re.MULTILINE)
    assert re.search(r"^  cpu.yaml +No GPU, fp32$", printed, re.MULTILINE)


def test_a_copy_says_what_it_is_a_copy_of_and_overwrites_nothing(built, tmp_path):
    printed = built.run("preference-recipes", "copy", "dpo", "my_dpo.py", cwd=tmp_path).stdout
    upstream = recipe("dpo").read_text()
    first_line, _, rest = (tmp_path / "my_dpo.py").read_text().partition("\n")
    assert first_line == "# Copied from recipes/dpo.py of preference-recipes 0.1.0"
    assert rest == upstream
    # The command that it prints shows that line alone.
    (command,) = re.findall(r"^to see your changes: (.*)", printed, re.MULTILINE)
    shown = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True)
    assert shown.stdout == f"0a1\n> {first_line}\n"

    (tmp_path / "my_dpo.py").write_text("mine")
    refused = built.run("preference-recipes", "copy", "dpo", "my_dpo.py", cwd=tmp_path, check=False)
    assert (refused.returncode, refused.stdout) == (1, "my_dpo.py cannot be written: File exists\n")
    assert (tmp_path / "my_dpo.py").read_text() == "mine"

    built.run("preference-recipes", "copy", "ds_zero2.yaml", "mine.yaml", cwd=tmp_path)
    own = REPOSITORY / "accelerate_configs/ds_zero2.yaml"
    assert (tmp_path / "mine.yaml").read_text() == own.read_text()


@pytest.mark.slow
def test_a_copy_runs_under_a_config_that_names_a_json(built, tmp_path):
    """The copy and the config are the user's; DeepSpeed's JSON and the assets are those of the wheel."""
    built.run("preference-recipes", "copy", "dpo", "my_dpo.py", cwd=tmp_path)
    built.run("preference-recipes", "copy", "ds_fp16.yaml", "mine.yaml", cwd=tmp_path)
    launcher = ["--config_file", "mine.yaml", "--main_process_port", 0]
    flags = [*FEW_UPDATES, "--output_dir", tmp_path / "out"]
    words = ["preference-recipes", "run", *launcher, "my_dpo.py", *flags]
    assert "fp16" in built.run(*words, cwd=tmp_path).stdout
    (first, second) = training_lines(tmp_path / "out")
    assert first["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert (second["global_step"], first["skipped_steps"]) == (2, 0)


@pytest.mark.slow
def test_the_notebook_runs_on_a_cpu(built, tmp_path, monkeypatch):
    """With the demo's model and the wheel. A command that fails in a notebook would stop nothing."""
    nbclient, nbformat = map(pytest.importorskip, ("nbclient", "nbformat"))
    notebook = nbformat.read(REPOSITORY / "examples/first_dpo.ipynb", 4)
    notebook.cells = [cell for cell in notebook.cells if not cell.source.startswith("%pip")]
    name, ours = "Qwen/Qwen2.5-0.5B-Instruct", f"{REPOSITORY}/assets/model"
    for cell in notebook.cells:
        cell.source = cell.source.replace(name, ours)
    monkeypatch.setenv("PATH", str(built.environment / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # without a user's own settings of accelerate
    nbclient.execute(notebook, cwd=tmp_path, timeout=300)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    said = "".join(output.get("text", "") for output in outputs)
    for words in ("⟦", "done: 20 updates", "Capital of Spain? -> "):
        assert words in said, said
    assert any("image/png" in output.get("data", {}) for output in outputs)
    margins = [line["rewards/margins"] for line in training_lines(tmp_path / "first_dpo")]
    assert (len(margins), margins[0]) == (20, 0) and margins[-1] > 0
