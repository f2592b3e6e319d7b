"""What every recipe must do alike and no forker wants to change: counting, reducing, saving, launching, data order, log-probs."""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault(
        "DS_ACCELERATOR", "cpu"
    )  # else DeepSpeed warns of it wherever it is imported

REPOSITORY = Path(__file__).resolve().parent.parent
ASSETS = REPOSITORY / "assets"


def check_recipe(recipe_file: str) -> None:
    """Stops a recipe of one clone that imported the `common` of another: the two may disagree silently.

    A copy of a recipe outside any clone is fine: it runs with the installed `common`.

    Args:
        recipe_file: the recipe's `__file__`.

    Raises:
        SystemExit: naming both folders and the way out.
    """
    beside = Path(recipe_file).resolve().parent.parent
    if (beside / "common" / "__init__.py").is_file() and beside != REPOSITORY:
        sys.exit(
            f"{recipe_file} would run with 'common' of {REPOSITORY}. Run `pip install -e {beside}` in this environment first."
        )
