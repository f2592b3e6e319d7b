"""Papers as diffs to a recipe: the files `forks/NAME.diff`."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from common import ROOT, refuse

FORKS = ROOT / "forks"


def names() -> list[str]:
    return sorted(file.stem for file in FORKS.glob("*.diff"))


def recipe_of(name: str) -> str:
    """Returns the name of the recipe that a fork changes."""
    file = FORKS / f"{name}.diff"
    if not file.is_file():
        refuse(f"{name!r} is no fork; there are {', '.join(names())}")
    return re.search(r"^--- recipes/(\w+)\.py$", file.read_text(encoding="utf-8"), re.MULTILINE)[1]


def patched(recipe: str, chosen: list[str]) -> str:
    """Returns the text of a recipe to which forks are applied one after the other.

    Exits if a fork changes another recipe, or if two forks change the same lines.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{recipe}.py")
        shutil.copyfile(ROOT / f"recipes/{recipe}.py", file)
        for name in chosen:
            if recipe_of(name) != recipe:
                refuse(f"{name} changes recipes/{recipe_of(name)}.py, not recipes/{recipe}.py")
            command = ["patch", "--fuzz=0", "--silent", "--forward", str(file)]
            if subprocess.run([*command, FORKS / f"{name}.diff"], capture_output=True).returncode:
                others = " and ".join(chosen[: chosen.index(name)]) or f"recipes/{recipe}.py"
                refuse(f"{name} cannot be added to {others}: both change the same lines")
        return file.read_text(encoding="utf-8")
