"""What README and the docs say about files, commands and flags is true. `make docs` follows their links."""

import ast
import dataclasses
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

import runs
from common import arguments
from recipes import NAMES, load
from runs import ASSETS, LAUNCHERS, OFFLINE, REPOSITORY, copy_repository, launch, recipe

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "AGENTS.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
    REPOSITORY / "benchmarks/README.md",
    REPOSITORY / "assets/README.md",
]
SCRIPTS = [
    *(REPOSITORY / "common").glob("*.py"),
    *(REPOSITORY / "preference_recipes").rglob("*.py"),
    REPOSITORY / "tests/conftest.py",
    *(REPOSITORY / "benchmarks").glob("*.py"),
]
# Flags of other programs.
FOREIGN = {
    *("--logdir", "--private", "--no-deps", "--find-links"),  # tensorboard, hf, pip, uv
    *("--nodes", "--gpus-per-node", "--signal"),  # sbatch
    *("--nproc_per_node", "--nnodes", "--node_rank", "--master_addr", "--master_port"),  # torchrun
    *("--model", "--model_args", "--include_path", "--tasks", "--apply_chat_template"),  # lm-eval
    *("--device", "--batch_size", "--outfile", "--outtype"),  # lm-eval, llama.cpp
    *("--generation-config", "--logprobs-mode", "--worker-extension-cls", "--port"),  # vLLM
    *("--max-model-len", "--max-logprobs", "--dtype", "--enable-lora", "--max-lora-rank"),
}


def name_of(page) -> str:
    return f"{page.parent.name}-{page.stem}"


def fields(name: str) -> dict:
    return {field.name: field for field in dataclasses.fields(load(name).Args)}


@pytest.fixture(scope="module")
def recipe_flags() -> dict[str, set[str]]:
    return {name: set(arguments.Parser(load(name).Args)._option_string_actions) for name in NAMES}


@pytest.fixture(scope="module")
def launcher_flags() -> set[str]:
    return set(launch_command_parser()._option_string_actions)


def script_flags(path) -> set[str]:
    """The flags that a script's own parser knows."""
    return set(re.findall(r'"(--[a-z0-9_]+)"', path.read_text()))


def commands(page) -> list[str]:
    """The commands in a page's code blocks and code spans, or a recipe's docstring, each on one line."""
    text = page.read_text()
    block = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
    if page.suffix == ".py":
        lines = [line.strip() for line in ast.get_docstring(ast.parse(text)).splitlines()]
    else:
        lines = "\n".join(block.findall(text)).replace("\\\n", " ").splitlines()
        lines += re.findall(r"`([^`\n]+)`", block.sub("", text))
    started = re.compile(r"(\S*/)?(accelerate launch|python|make|sbatch) ")
    return [line.split("  #")[0].strip() for line in lines if started.match(line)]


def flags_of(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_the_launch_table_is_the_folder():
    readme = (REPOSITORY / "README.md").read_text()
    section = readme.partition("## Choosing a launch")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = re.findall(r"`([\w.]+)`", "\n".join(cells))
    files = [path for path in (REPOSITORY / "accelerate_configs").iterdir()]
    assert sorted(listed) == sorted(path.name for path in files if path.suffix != ".json")


def test_the_loop_in_the_readme_is_that_of_the_recipe():
    shown = (REPOSITORY / "README.md").read_text().split("```python\n")[1].partition("```")[0]
    code = [line.partition("# ")[0].strip() for line in recipe("dpo").read_text().splitlines()]
    place = code.index("with accelerator.accumulate(model):")
    following = [line for line in code[place:] if line and "check_finite" not in line]
    assert [line.strip() for line in shown.splitlines()] == following[: shown.count("\n")]


@pytest.mark.parametrize("page", [*PAGES, *map(recipe, NAMES)], ids=name_of)
def test_every_command_names_what_exists(page, recipe_flags, launcher_flags):
    phony = re.search(r"^\.PHONY: (.*)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    targets = set(phony[1].split())
    for command in commands(page):
        words = shlex.split(re.sub(r"[\[\]]", " ", command))
        if words[0].endswith("make"):
            named = {word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)}
            assert named <= targets, command
            continue
        of_ours = re.compile(r"(common|preference_recipes)\.|(?!llama\.cpp/).*\.py$")
        places = [place for place, word in enumerate(words) if of_ours.match(word)]
        if not places:  # such as `python -c`, `accelerate launch` alone
            continue
        before, name, after = words[: places[0]], words[places[0]], words[places[0] + 1 :]
        for word in before:
            if word.startswith("accelerate_configs/") and "<" not in word and "CONFIG" not in word:
                assert (REPOSITORY / word).is_file(), command
        if "launch" in before:
            assert flags_of(before) <= launcher_flags | FOREIGN, command

        path = REPOSITORY / (name if name.endswith(".py") else f"{name.replace('.', '/')}.py")
        if "my_" in name or path.parent.name == "recipes":
            assert flags_of(after) <= recipe_flags[path.stem.removeprefix("my_")], command
        else:
            assert flags_of(after) <= script_flags(path) | {"--help"}, command


@pytest.mark.parametrize("page", PAGES[:-2], ids=name_of)
def test_every_flag_that_a_page_mentions_exists(page, recipe_flags, launcher_flags):
    known = set().union(
        *recipe_flags.values(), *map(script_flags, SCRIPTS), launcher_flags, FOREIGN
    )
    for diff in (REPOSITORY / "forks").glob("*.diff"):  # a field that it adds to `Args`
        known |= {
            f"--{name}" for name in re.findall(r"^\+    (\w+): .* = arg\(", diff.read_text(), re.M)
        }
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+[a-z0-9]", page.read_text()))
    assert mentioned <= known


@pytest.mark.slow
def test_the_commands_of_agents_md_run(tmp_path):
    """In a copy of the repository; of the proof one promise."""
    copy_repository(tmp_path)
    text = (REPOSITORY / "AGENTS.md").read_text()
    assert len(text.splitlines()) <= 80
    script = "".join(re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    make = f"make VENV={sys.prefix} -o {sys.prefix}/installed-test prove"
    script = script.replace("make prove", make).replace("--quick", "'--quick -k still'")
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | OFFLINE | {"PATH": path}
    said = subprocess.check_output(["bash", "-ec", script], cwd=tmp_path, env=env, text=True)
    for words in ("⟦", '"global_step": 4', "97+70=", "1 passed"):
        assert words in said


def test_the_table_of_other_names_is_that_of_the_messages():
    page = (REPOSITORY / "docs/faq.md").read_text().partition("## What are other trainers'")[2]
    rows = {}
    for names, ours in re.findall(r"^\| (`.*) \| (.*) \|$", page, re.MULTILINE):
        rows[names.replace("`", "")] = ours.partition(" ([")[0].replace("`", "")
    said = yaml.safe_load(arguments.OTHER_NAMES.read_text())
    older = {f"{names}, older": ours for names, ours in said["older"].items()}
    assert rows == {**said["current"], **older}


def test_every_argument_is_documented():
    page = (REPOSITORY / "docs/arguments.md").read_text()
    written = runpy.run_path(str(REPOSITORY / "docs/arguments.py"))["page"]()
    assert page == written, "run: python docs/arguments.py"
    # Whatever that script leaves out: each argument has one line under a heading that names its recipe.
    documented = {name: [] for name in NAMES}
    for section in page.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        for name in NAMES if title == "All recipes" else title.split(", "):
            documented[name] += re.findall(r"^\| `--(\w+)` \|", section, re.MULTILINE)
    assert {name: sorted(found) for name, found in documented.items()} == {
        name: sorted(fields(name)) for name in NAMES
    }
    # A default, a range and a meaning, as they are in the recipe.
    assert "| at least 0 and below 0.5 | how likely a label is wrong |" in page


@pytest.mark.parametrize("page", [*NAMES, "environments"])
def test_the_page_of_a_recipe_begins_with_a_run_on_data_of_ones_own(page, tmp_path):
    """Lines that write a file, and the command: the recipe takes both. A preview needs no weights and leaves nothing."""
    no_weights = shutil.ignore_patterns("*.safetensors")
    model = shutil.copytree(ASSETS / "model", tmp_path / "model", ignore=no_weights)
    here = {"Qwen/Qwen2.5-0.5B-Instruct": model, "Qwen/Qwen2.5-7B-Instruct": ASSETS / "teacher"}
    text = (REPOSITORY / f"docs/{page}.md").read_text()
    block = re.search(r"^```\n(.*?)^(accelerate .*?)^```", text, re.M | re.S)
    subprocess.run(["bash", "-ec", block[1]], cwd=tmp_path, check=True)
    (tmp_path / "my_environments.py").write_text(runs.code_of_page("docs/environments.md"))
    words = shlex.split(block[2].replace("\\\n", ""))
    name = "grpo" if page == "environments" else page
    flags = [str(here.get(word, word)) for word in words[words.index(f"recipes/{name}.py") + 1 :]]
    given = dict(zip(flags[::2], flags[1::2]))
    file = given["--dataset_name"]
    said = launch(LAUNCHERS["plain"], recipe(name), *flags, "--preview", 1, cwd=tmp_path).stdout
    assert f"row 1 of {file}" in said and "output in" not in said
    assert not (tmp_path / "runs").exists()
    if name == "grpo":  # each update is of one rollout, with eight responses to each question
        questions = len((tmp_path / file).read_text().splitlines())
        assert given["--rollout_batch_size"] == str(questions)
        assert given["--train_batch_size"] == str(8 * questions)


def test_ten_lines_of_the_readme_are_a_single_update(tmp_path):
    """By the defaults: of a model and a data set, without sizes."""
    (row,) = re.findall(r'^{"prompt".*}$', (REPOSITORY / "README.md").read_text(), re.M)
    (tmp_path / "pairs.jsonl").write_text(f"{row}\n" * 10)
    flags = ["--model_name_or_path", ASSETS / "model", "--dataset_name", "pairs.jsonl"]
    said = launch([], recipe("dpo"), *flags, "--output_dir", "out", cwd=tmp_path).stdout
    assert "pairs.jsonl: 10 usable rows" in said
    (line,) = runs.lines(tmp_path / "out")
    assert (line["global_step"], line["samples"]) == (1, 10)


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("data", "<|user|>2+2=<|end|><|assistant|> 4<|end|>\n"),
        ("rollouts", "46 apples\nTrue False\n[1.0, 0.0]\n"),
    ],
)
def test_the_lines_of_a_librarys_page_run(name, printed, capsys):
    """Those of models are in tests/models/test_logprobs.py."""
    code = runs.code_of_page(f"preference_recipes/{name}/README.md")
    exec(code.replace("assets/model", str(ASSETS / "model")), {})
    assert capsys.readouterr().out == printed
