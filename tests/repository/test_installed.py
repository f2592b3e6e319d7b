"""What pip installs, from a wheel outside the repository: the command, recipes, configs and the demo."""

import functools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import venv
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from recipes import NAMES
from runs import OFFLINE, REPOSITORY, copy_repository, recipe, slow_but, training_lines

pytest.importorskip("pip")  # it installs the wheel
pytest.importorskip("hatchling")  # it builds the wheel
if not (REPOSITORY / ".git").exists():
    pytest.skip("git knows which files are the repository's", allow_module_level=True)

# Where a wheel has the folders of the repository that are inside no package there.
MOVED = {
    name: f"preference_recipes/{name}"
    for name in ("accelerate_configs", "assets", "common", "recipes")
}
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
    """Makes an environment in which pip has installed `install`, and a stranger's `common`.

    What a recipe needs is taken from the tests' environment; an editable installation there is not.
    """
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/*/site-packages")
    paths = [path for path in sys.path if path.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join(paths))
    make_strangers_common(packages)
    if install:
        command = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install"]
        flags = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, *flags, *install], check=True)
    return folder


def make_strangers_common(folder: Path) -> None:
    (folder / "common").mkdir()
    (folder / "common/__init__.py").write_text("FILES = 'of a stranger'\n")


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
    expected = set()
    for name in built.files:
        folder, _, rest = name.partition("/")
        if folder in ("preference_recipes", *MOVED) and rest:
            expected.add(f"{MOVED.get(folder, folder)}/{rest}")
    with zipfile.ZipFile(built.wheel) as archive:
        names = archive.namelist()
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(expected)


def test_built_again_later_both_are_the_same_bytes(built, tmp_path):
    clone = tmp_path / "clone"
    copy_repository(clone)
    for file in clone.rglob("*.*"):
        os.utime(file, (1, 1))
    for kind, made in (("sdist", built.source), ("wheel", built.wheel)):
        assert build(kind, clone, tmp_path).read_bytes() == made.read_bytes()


# ============================================================ whose `common` it is

# The first lines of a recipe, as far as it looks for `common`.
HEAD = recipe("dpo").read_text().partition("import preference_recipes")
PRINT = "\nimport importlib.util\nimport common\nprint('found:', common.FILES)\n"
PRINT += "print('found:', importlib.util.find_spec('rollouts'))\n"
CELL = "import nbclient, nbformat; from nbformat import v4; cell = v4.new_code_cell('%run {}'); "
CELL += "nbclient.execute(v4.new_notebook(cells=[cell])); print(cell.outputs[0].text)"
STARTS = {
    "python": ["python"],
    "torchrun": ["python", "-m", "torch.distributed.run", "--nproc_per_node", 1],
    "accelerate": ["python", "-m", "accelerate.commands.launch", "--cpu", "--num_processes", 1],
    "pytest": ["python", "-m", "pytest", "-qs", "-p", "no:cacheprovider"],
    "notebook": ["python", "-c", CELL],
}


@pytest.fixture(scope="module")
def found(built, tmp_path_factory):
    """By kind of installation: an environment, where a recipe lies, where our files are."""
    folder = tmp_path_factory.mktemp("found")
    for name in ("plain", "fork", "clone"):
        (folder / name).mkdir()
    copy_repository(folder / "clone")
    editable = make_environment(folder / "editable", "-e", folder / "clone")
    (packages,) = built.environment.resolve().glob("lib/*/site-packages")
    clone, installed = folder / "clone", packages / "preference_recipes"
    for place in (folder / "fork", clone / "recipes", installed / "recipes"):
        make_strangers_common(place)
    (folder / "fork/preference_recipes").mkdir()  # a clone may have this name, too
    return {
        "clone": (make_environment(folder / "bare"), clone / "recipes", clone),
        "editable": (editable, folder / "fork", clone),
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
    if start != "notebook":
        command.append(script)
    said = built._replace(environment=environment).run(*command, cwd=tmp_path, check=False).stdout
    script.unlink()
    assert re.findall("found: (.*)", said) == [str(files), "None"], said


def test_where_a_strangers_common_came_first_one_line_says_so(built, tmp_path):
    command = ["python", "-c", "import common\nimport preference_recipes"]
    said = built.run(*command, cwd=tmp_path, check=False).stdout.splitlines()
    (packages,) = built.environment.glob("lib/*/site-packages")
    other = f"<module 'common' from '{packages}/common/__init__.py'>"
    ours = packages.resolve() / "preference_recipes/common"
    told = f"import preference_recipes before {other}: its own `common` is {ours}"
    assert said[-1] == f"ImportError: {told}"


# ============================================================ the command


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


# ============================================================ one file by URL


@pytest.fixture(scope="module")
def site(built, tmp_path_factory):
    """A server with the recipes, and an index with our wheel and the names of what it needs.

    Only the names: as everywhere here, the packages themselves are those of the tests' environment.
    """
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        told = archive.read(name).decode()
    needed = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", told, re.MULTILINE)
    for name in [*needed, "peft"]:
        version = metadata.version(name)
        made = f"{name.replace('-', '_')}-{version}"
        (folder / "simple" / name).mkdir(parents=True)
        wheel = folder / "simple" / name / f"{made}-py3-none-any.whl"
        head = f"Name: {name}\nVersion: {version}\n"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{made}.dist-info/METADATA", f"Metadata-Version: 2.1\n{head}")
            archive.writestr(f"{made}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{made}.dist-info/RECORD", "")
            if name == "torch":
                (path,) = built.environment.glob("lib/*/site-packages/dependencies.pth")
                archive.write(path, path.name)
    (folder / "simple/preference-recipes").mkdir()
    shutil.copy(built.wheel, folder / "simple/preference-recipes")
    shutil.copytree(REPOSITORY / "recipes", folder / "recipes")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["URL", "clone"])
def test_uv_runs_one_file(built, found, site, place, tmp_path, monkeypatch):
    """`uv run URL` in an empty folder, and `uv run recipes/dpo.py` in a clone, which finds its own files."""
    settings = dict(DEFAULT_INDEX=f"{site}/simple", CACHE_DIR=tmp_path / "cache", NO_CONFIG=1)
    settings |= dict(PYTHON=sys.executable, PYTHON_DOWNLOADS="never")
    for name, value in settings.items():
        monkeypatch.setenv(f"UV_{name}", str(value))
    uv = pytest.importorskip("uv").find_uv_bin()
    clone = found["clone"][2]
    script, folder = (
        ("recipes/dpo.py", clone) if place == "clone" else (f"{site}/recipes/dpo.py", tmp_path)
    )
    said = built.run(uv, "run", script, *FEW_UPDATES, "--output_dir", tmp_path / "out", cwd=folder)
    demo = re.search("running the demo, (.*)", said.stdout)[1]
    assert (demo == f"{clone}/assets/dpo.yaml") == (place == "clone"), said.stdout
    first = training_lines(tmp_path / "out")[0]
    assert first["loss"] == pytest.approx(0.6931, abs=1e-4)
