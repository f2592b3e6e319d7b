"""Writes docs/arguments.md: every argument of every recipe, from the recipes' own `Args`.

python docs/arguments.py
"""

import argparse
import importlib.util
import re
from pathlib import Path

from transformers import HfArgumentParser

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPES = ("sft", "reward", "dpo", "ppo", "grpo")

HEAD = """# Every argument

Written by `python docs/arguments.py` from the recipes' own `Args`; a test compares them. `python
recipes/dpo.py --help` prints the same. The pages of the recipes say more about those that matter
most: [sft](sft.md), [reward](reward.md), [dpo](dpo.md), [ppo](ppo.md), [grpo](grpo.md).

A flag that is true or false may stand without a value: `--packing` is `--packing true`. What is
true by default is turned off by `--no_share_prompts`, or `--share_prompts false`. A YAML file
that is given first has the same names without the dashes; flags win over it. A default or a
meaning that differs between recipes is given for each.
"""


def actions(recipe: str) -> dict[str, argparse.Action]:
    """The arguments of a recipe by name, as its parser has them."""
    path = REPOSITORY / f"recipes/{recipe}.py"
    spec = importlib.util.spec_from_file_location(f"arguments_of_{recipe}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = HfArgumentParser(module.Args)._actions
    named = [action for action in found if not action.option_strings[0].startswith("--no_")]
    return {action.dest: action for action in named if action.dest != "help"}


def default_of(action: argparse.Action) -> str:
    """Returns a default as one would type it; `none` where there is no value."""
    value = action.default
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def values_of(action: argparse.Action) -> str:
    """Returns what an argument takes: its choices, or the kind of its value."""
    if action.choices:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    if isinstance(action.default, bool):
        return "true or false"
    kind = {int: "whole number", float: "number", str: "text"}.get(action.type, "text")
    return f"one or several: {kind}" if action.nargs in ("+", "*") else kind


def row(name: str, of_recipes: dict[str, argparse.Action]) -> str:
    """Returns the line of one argument in a table.

    Args:
        of_recipes: the argument in each recipe of the table that has it.
    """
    defaults: dict[str, list[str]] = {}
    helps: dict[str, list[str]] = {}
    for recipe, action in of_recipes.items():
        defaults.setdefault(default_of(action), []).append(recipe)
        # In which folder a run goes is said once for all recipes.
        text = (action.help or "").replace(f"runs/{recipe}/", "runs/<recipe>/")
        helps.setdefault(re.sub(r"\s+", " ", text), []).append(recipe)
    cells = [f"`--{name}`", joined(defaults, "`"), values_of(next(iter(of_recipes.values())))]
    cells.append(joined(helps, ""))
    escaped = [cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells]
    return "| " + " | ".join(escaped) + " |"


def joined(recipes_by_text: dict[str, list[str]], quote: str) -> str:
    """Returns the one text, or each with the recipes that it is of."""
    if len(recipes_by_text) == 1:
        return f"{quote}{next(iter(recipes_by_text))}{quote}"
    parts = [
        f"{', '.join(recipes)}: {quote}{text}{quote}" for text, recipes in recipes_by_text.items()
    ]
    return "; ".join(parts)


def page() -> str:
    """Returns the whole page."""
    arguments = {recipe: actions(recipe) for recipe in RECIPES}
    names = list(dict.fromkeys(name for recipe in RECIPES for name in arguments[recipe]))
    by_owners: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        owners = tuple(recipe for recipe in RECIPES if name in arguments[recipe])
        by_owners.setdefault(owners, []).append(name)
    parts = [HEAD]
    # What all have comes first, what only one has last.
    for owners in sorted(by_owners, key=lambda owners: (-len(owners), RECIPES.index(owners[0]))):
        title = "All recipes" if owners == RECIPES else ", ".join(owners)
        rows = [
            row(name, {recipe: arguments[recipe][name] for recipe in owners})
            for name in by_owners[owners]
        ]
        table = ["| argument | default | takes | meaning |", "| --- | --- | --- | --- |", *rows]
        parts.append(f"## {title}\n\n" + "\n".join(table) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (REPOSITORY / "docs/arguments.md").write_text(page(), encoding="utf-8")
