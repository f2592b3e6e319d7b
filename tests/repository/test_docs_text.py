"""What README and the docs say about files, commands and flags is true. Nothing is trained here."""

import dataclasses
import json
import re
import runpy
import shlex

import pytest
from accelerate.commands.launch import launch_command_parser

from common import arguments
from preference_recipes.data import labels, pairs, prompts
from preference_recipes.models.load import tokenizer_of
from recipes import NAMES, load
from runs import ASSETS, REPOSITORY

PAGES = [
    REPOSITORY / "README.md",
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
# Flags of other programs: tensorboard, sbatch, torchrun, pip, pytest.
FOREIGN = {"--logdir", "--logdir_spec", "--nodes", "--gpus-per-node", "--ntasks-per-node", "--nproc_per_node", "--nnodes", "--node_rank",
           "--master_addr", "--master_port", "--signal", "--requeue", "--kill-on-bad-exit", "--locked", "--no-deps",
           "--model", "--model_args", "--include_path", "--tasks", "--apply_chat_template", "--device", "--batch_size",  # lm-eval
           "--private", "--outfile", "--outtype",
           "--generation-config", "--logprobs-mode", "--worker-extension-cls", "--max-model-len", "--dtype", "--enable-lora", "--max-lora-rank",
           "--gpu-memory-utilization", "--tensor-parallel-size", "--port"}  # fmt: skip  # vLLM


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
    """The commands in a page's code blocks and code spans, each on one line."""
    text = page.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    )
    started = re.compile(r"(\S*/)?(accelerate launch|python|make|sbatch) ")
    return [line.split("  #")[0].strip() for line in lines if started.match(line)]


def flags_of(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_the_launch_table_is_the_folder():
    section = (
        (REPOSITORY / "README.md")
        .read_text()
        .partition("## Choosing a launch")[2]
        .partition("\n## ")[0]
    )
    first_cells = "\n".join(
        line.split("|")[1] for line in section.splitlines() if line.startswith("| `")
    )
    listed = re.findall(r"`([\w.]+)`", first_cells)
    assert sorted(listed) == sorted(
        p.name for p in (REPOSITORY / "accelerate_configs").iterdir() if p.suffix != ".json"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_every_command_names_what_exists(page, recipe_flags, launcher_flags):
    targets = set(
        re.findall(r"^\.PHONY: (.*)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)[
            0
        ].split()
    )
    for command in commands(page):
        words = shlex.split(re.sub(r"[\[\]]", " ", command))
        if words[0].endswith("make"):
            assert {word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)} <= targets, (
                command
            )
            continue
        script = next(
            (
                place
                for place, word in enumerate(words)
                if word.endswith(".py") or word.startswith(("common.", "preference_recipes."))
            ),
            None,
        )
        if script is None or words[script].startswith(
            "llama.cpp/"
        ):  # such as `python -c`, `accelerate launch` alone
            continue
        for word in words[:script]:
            if word.startswith("accelerate_configs/") and "<" not in word and "CONFIG" not in word:
                assert (REPOSITORY / word).is_file(), command
        if "launch" in words[:script]:
            assert flags_of(words[:script]) <= launcher_flags | FOREIGN, command

        name = words[script]
        path = REPOSITORY / (
            f"{name.replace('.', '/')}.py"
            if name.startswith(("common.", "preference_recipes."))
            else name
        )
        if "my_" in name or path.parent.name == "recipes":
            recipe = re.sub("my_", "", path.stem)
            assert recipe in recipe_flags, command
            assert flags_of(words[script:]) <= recipe_flags[recipe], command
        else:
            assert path.is_file(), command
            assert flags_of(words[script:]) <= script_flags(path) | {"--help"}, command


@pytest.mark.parametrize("page", PAGES[:-2], ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_every_flag_that_a_page_mentions_exists(page, recipe_flags, launcher_flags):
    known = set().union(
        *recipe_flags.values(), *map(script_flags, SCRIPTS), launcher_flags, FOREIGN
    )
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+[a-z0-9]", page.read_text()))
    assert mentioned <= known


def anchors(page) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    [*PAGES, *(REPOSITORY / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY"))],
    ids=lambda page: f"{page.parent.name}-{page.stem}",
)
def test_every_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
        assert target.suffix != ".png" or "demo" in name or target.stat().st_size < 100_000, link


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
    assert "| `--vf_coef` | `0.1` | number, at least 0 | weight of the value loss |" in page


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_a_recipe_begins_with_a_run_on_data_of_ones_own(name, tmp_path, monkeypatch):
    """A file of one row and the command, in five lines: the recipe takes both."""
    beginning = (REPOSITORY / f"docs/{name}.md").read_text().partition("\n## ")[0]
    block = re.search(r"^```\n(.*?)^```", beginning, re.MULTILINE | re.DOTALL)[1]
    lines = block.splitlines()
    assert len(lines) == 5
    file = re.fullmatch(r"cat > (\S+) << 'END'", lines[0])[1]
    assert lines[2] == "END"
    (tmp_path / file).write_text(lines[1] + "\n")

    monkeypatch.chdir(tmp_path)
    words = shlex.split(" ".join(lines[3:]).replace("\\", ""))
    flags = words[words.index(f"recipes/{name}.py") + 1 :]
    recipe = load(name)
    args = arguments.parse(recipe.Args, ASSETS / f"{name}.yaml", flags)
    assert args.dataset_name == file

    settings = {}
    if name == "sft":
        function = recipe.sft_row
        settings = {"loss_on": args.loss_on}
    elif name == "reward":
        function = recipe.reward_row
    elif name == "dpo":
        function = pairs.preference_row
    elif name == "kto":
        function = labels.labelled_row
    else:
        function = prompts.prompt_row
        settings = {"max_new_tokens": args.max_new_tokens}
    tokenizer = tokenizer_of(str(ASSETS / "model"))
    values = function(json.loads(lines[1]), tokenizer, args.max_length, **settings)
    assert values["reason"] == "" and values["length"] > 0
