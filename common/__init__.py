"""Where this repository stands, and whether a recipe found the `common` that belongs to it."""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    # DeepSpeed would warn about the missing GPU wherever it is imported.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

REPOSITORY = Path(__file__).resolve().parent.parent
ASSETS = REPOSITORY / "assets"


def check_recipe(recipe_file: str) -> None:
    """Stops a recipe of one clone that imported the `common` of another: the two may differ.

    A copy of a recipe outside any clone is fine: it runs with the installed `common`.

    Args:
        recipe_file: the recipe's `__file__`.

    Raises:
        SystemExit: with both folders and the way out.
    """
    clone = Path(recipe_file).resolve().parent.parent
    if (clone / "common" / "__init__.py").is_file() and clone != REPOSITORY:
        sys.exit(
            f"{recipe_file} would run with 'common' of {REPOSITORY}. "
            f"Run `pip install -e {clone}` in this environment first."
        )
