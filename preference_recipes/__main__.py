"""The command `preference-recipes`, for those who install instead of clone.

preference-recipes list                             recipes and launch configs
preference-recipes copy dpo my_dpo.py               a recipe, or a config, to change it
preference-recipes copy grpo my_grpo.py --fork sapo     a recipe as a paper changes it
preference-recipes run --config_file ddp.yaml dpo   `accelerate launch` of a recipe, here or yours
preference-recipes export CHECKPOINT OUT            the actor of a checkpoint: --help says more
preference-recipes rows RUN --sort loss             the rows behind a number: --help says more
"""

import argparse
import ast
import importlib
import os
import sys
from importlib import metadata
from pathlib import Path

from common import ROOT, exit_on_refusal
from preference_recipes.tools import forks

PROJECT = "preference-recipes"
RECIPES = ROOT / "recipes"
CONFIGS = ROOT / "accelerate_configs"


@exit_on_refusal()
def main() -> None:
    if sys.argv[1:2] == ["run"]:  # accelerate reads its own flags
        return run(sys.argv[2:])
    if sys.argv[1:2] in (["export"], ["rows"]):
        name, *words = sys.argv[1:]
        tool = importlib.import_module(f"preference_recipes.tools.{name}")  # slow
        return tool.main(words, f"{PROJECT} {name}")
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=PROJECT, description=__doc__, formatter_class=layout)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("run", help="run a recipe", add_help=False)
    commands.add_parser("export", help="take the actor out of a checkpoint", add_help=False)
    commands.add_parser("rows", help="show which rows made a run's numbers", add_help=False)
    commands.add_parser("list", help="list recipes and launch configs")
    copier = commands.add_parser("copy", help="copy a recipe or a launch config, to change it")
    copier.add_argument("name", help="as `list` shows it, such as dpo or ddp.yaml")
    copier.add_argument("file", type=Path, help="the copy; nothing is overwritten")
    copier.add_argument("--fork", nargs="+", default=[], help="changes, as `list` shows them")
    args = parser.parse_args()
    if args.command == "list":
        list_files()
    else:
        copy(args.name, args.file, args.fork)


def list_files() -> None:
    """Prints the recipes and the launch configs, each with what it is."""
    print(f"recipes, in {RECIPES}:")
    for file in sorted(RECIPES.glob("*.py")):
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
        print(f"  {file.stem:22}{docstring.splitlines()[0]}")
    print(f"forks of these recipes, in {forks.FORKS}:")
    for name in forks.names():
        first_line = (forks.FORKS / f"{name}.diff").read_text(encoding="utf-8").splitlines()[0]
        print(f"  {name:22}{forks.recipe_of(name)}: {first_line}")
    print(f"configs for --config_file, in {CONFIGS}:")
    for file in sorted(CONFIGS.glob("*.yaml")):
        first_line = file.read_text(encoding="utf-8").splitlines()[0]
        print(f"  {file.name:22}{first_line.removeprefix('# ').partition('. ')[0]}")


def copy(name: str, file: Path, chosen: list[str]) -> None:
    """Copies a recipe, with the changes of the chosen forks, or a launch config.

    A recipe's first line then says what it is a copy of.
    """
    source = packaged(name)
    text = source.read_text(encoding="utf-8")
    origin = f"{source.relative_to(ROOT)} of {PROJECT} {metadata.version(PROJECT)}"
    if chosen:
        text = forks.patched(source.stem, chosen)
        origin += f", with {' and '.join(chosen)}"
    if source.suffix == ".py":
        text = f"# Copied from {origin}\n{text}"
    try:
        with open(file, "x", encoding="utf-8") as copied:
            copied.write(text)
    except OSError as error:
        sys.exit(f"{file} cannot be written: {error.strerror}")
    print(f"{file} is a copy of {origin}\nto see your changes: diff {source} {file}")


def run(words: list[str]) -> None:
    """Runs `accelerate launch`. The recipe and the config may be names that `list` shows.

    Args:
        words: its own flags, the recipe, the recipe's flags.
    """
    from accelerate.commands import launch  # slow to import

    parser = launch.launch_command_parser()
    parser.prog = f"{PROJECT} run"
    args = parser.parse_args(words)
    args.training_script = path_of(args.training_script)
    if args.config_file is not None:
        args.config_file = path_of(args.config_file)
    if not args.training_script_args:  # the demo: accelerate's threads would wait for each other
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    launch.launch_command(args)


def path_of(name: str) -> str:
    """Returns the path of a file that the user has, or of one that `list` shows."""
    return name if Path(name).is_file() else str(packaged(name))


def packaged(name: str) -> Path:
    """Returns the file of a name as `list` shows it, or as the docs spell it: `recipes/dpo.py`."""
    for file in (RECIPES / f"{name}.py", CONFIGS / name, ROOT / name):
        if file.is_file() and file.parent in (RECIPES, CONFIGS):
            return file
    recipes = sorted(file.stem for file in RECIPES.glob("*.py"))
    configs = sorted(file.name for file in CONFIGS.glob("*.*"))
    sys.exit(f"{name!r} is neither a file here nor one of {', '.join(recipes + configs)}")


if __name__ == "__main__":
    main()
