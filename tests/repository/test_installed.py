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

from recipes import NAMES
from runs import OFFLINE, REPOSITORY, copy_repository, recipe, training_lines

pytest.importorskip("pip")  # it installs the wheel
pytest.importorskip("setuptools", "77")  # it builds the wheel
if not (REPOSITORY / ".git").exists():
    pytest.skip("git knows which files are the repository's", allow_module_level=True)

# Where a wheel has the folders of the repository that are inside no package there.
MOVED = {name: f"preference_recipes/{name}" for name in ("accelerate_configs", "assets", "recipes")}
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
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True)
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    files = copy_repository(folder / "clone")
    source = build("sdist", folder / "clone", folder)
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    wheel = build("wheel", folder / source.name.removesuffix(".tar.gz"), folder)

    environment = folder / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin/python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*command, "--no-index", "--no-deps", wheel], check=True)
    # What it needs is taken from the tests' environment; an editable installation there is not.
    (packages,) = environment.glob("lib/*/site-packages")
    paths = [path for path in sys.path if path.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join(paths))
    return Built(files, source, wheel, environment)


def test_the_source_distribution_is_the_repository(built):
    with tarfile.open(built.source) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {"PKG-INFO", "setup.cfg"}
    assert {name for name in names - made if ".egg-info/" not in name} == built.files


def test_the_wheel_has_every_file_of_its_folders(built):
    """Each once, and no tests, docs or benchmarks."""
    expected = set()
    for name in built.files:
        folder, _, rest = name.partition("/")
        if folder in ("common", "preference_recipes", *MOVED) and rest:
            expected.add(f"{MOVED.get(folder, folder)}/{rest}")
    with zipfile.ZipFile(built.wheel) as archive:
        names = archive.namelist()
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(expected)


def test_list_names_recipes_and_configs(built, tmp_path):
    printed = built.run("preference-recipes", "list", cwd=tmp_path).stdout
    configs = sorted(path.name for path in (REPOSITORY / "accelerate_configs").glob("*.yaml"))
    assert re.findall(r"^  (\S+) +\S", printed, re.MULTILINE) == sorted(NAMES) + configs
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


def test_export_is_a_command_too(built, tmp_path):
    refused = built.run("preference-recipes", "export", "none", "out", cwd=tmp_path, check=False)
    assert refused.returncode == 1
    assert refused.stdout.startswith(
        "none is not a whole checkpoint: none/manifest.json is missing"
    )


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
