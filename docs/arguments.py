"""Writes docs/arguments.md: every argument of every recipe, from the recipes' own `Args`.

python docs/arguments.py
"""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from common.arguments import Parser
from common.shared_args import range_in_words

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPES = ("sft", "reward", "dpo", "kto", "ppo", "grpo", "distill")

HEAD = """# Every argument

Written by `python docs/arguments.py`; `python recipes/dpo.py --help` prints the same. A flag that
is true or false may be given without a value; what is true by default is turned off by
`--no_share_prompts`, or `--share_prompts false`. A YAML file that is given first has the same names
without the dashes; flags win over it. Numbers are at least 0 where nothing else is said. Where
recipes differ, each text follows their names.
"""


def actions(recipe: str) -> dict[str, argparse.Action]:
    """The arguments of a recipe by name, as its parser has them."""
    path = REPOSITORY / f"recipes/{recipe}.py"
    spec = importlib.util.spec_from_file_location(f"arguments_of_{recipe}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = Parser(module.Args)._actions
    named = [action for action in found if not action.option_strings[0].startswith("--no_")]
    fields = module.Args.__dataclass_fields__
    for action in named:
        action.field = fields.get(action.dest)
    return {action.dest: action for action in named if action.field}


def default_of(action: argparse.Action) -> str:
    """Returns the default, and that with adapters where it is another one."""
    default = as_typed(action.default)
    with_lora = action.field.metadata["with_lora"]
    return default if with_lora is None else f"{default} (with `--lora_r`: {as_typed(with_lora)})"


def as_typed(value: Any) -> str:
    """Returns a value as one would type it; `none` where there is no value."""
    if value is None:
        return "`none`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return f"`{' '.join(map(str, value)) or 'none'}`"
    if isinstance(value, float):
        return f"`{value:g}`".replace("e-0", "e-")
    return f"`{value}`"


def values_of(action: argparse.Action) -> str:
    """Returns what an argument takes, as far as its default does not show it."""
    if action.choices:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    several = ["several"] if action.nargs in ("+", "*") else []
    limits = range_in_words(action.field.metadata["limits"])
    return ", ".join(several + [limits] * (limits not in ("", "at least 0")))


def meaning_of(action: argparse.Action) -> str:
    """Returns the help of an argument."""
    return action.field.metadata["help"]


def row(name: str, of_recipes: dict[str, argparse.Action]) -> str:
    """Returns the line of one argument in a table.

    Args:
        of_recipes: the argument in each recipe of the table that has it.
    """
    cells = [f"`--{name}`"]
    for describe in (default_of, values_of, meaning_of):
        cells.append(joined({recipe: describe(action) for recipe, action in of_recipes.items()}))
    escaped = [cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells]
    return "| " + " | ".join(escaped) + " |"


def joined(texts: dict[str, str]) -> str:
    """Returns what all recipes say; where they differ, each text after the recipes that say it.

    For `{"dpo": "0.1", "ppo": "0.03", "sft": "0.03"}` it is `dpo: 0.1; ppo, sft: 0.03`.
    """
    recipes_of: dict[str, list[str]] = {}
    for recipe, text in texts.items():
        recipes_of.setdefault(text, []).append(recipe)
    if len(recipes_of) == 1:
        return next(iter(recipes_of))
    return "; ".join(f"{', '.join(recipes)}: {text}" for text, recipes in recipes_of.items())


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
