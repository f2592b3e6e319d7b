"""The proof, contracts/test_recipe.py, as somebody runs it on a fork: what is red, under its name, and why."""

import re
import shlex
from pathlib import Path

import pytest

from runs import REPOSITORY, forked, launch, recipe

PYTEST = Path(pytest.__file__).with_name("__main__.py")


def prove(file: Path, folder: Path, *arguments, only=()) -> tuple[list[str], str]:
    """Which promises a recipe with these arguments breaks, and what was printed.

    Args:
        only: the promises that are checked; none: all.
    """
    proof = REPOSITORY / "tests/contracts/test_recipe.py"
    tests = [f"{proof}::test_{name}" for name in only] or [proof]
    words = ["--quick", "--recipe", shlex.join(map(str, [file, *arguments]))]
    words += ["--basetemp", folder / "runs", "-p", "no:cacheprovider", "-raP"]
    how = dict(cwd=folder, env={"PYTHONPATH": str(REPOSITORY)}, check=False, timeout=1200)
    result = launch([], PYTEST, *tests, *words, **how)
    red = re.findall(r"^(?:FAILED|ERROR) .*?::test_(\w+)", result.stdout, re.M)
    assert result.returncode == (1 if red else 0), result.stdout
    return red, result.stdout


@pytest.mark.slow
def test_an_average_that_a_resume_starts_again_is_red(tmp_path):
    """What is not handed to `Checkpoint` is not in one."""
    text = forked("ema").read_text()
    kept = ", average=average"
    assert text.count(kept) == 1
    file = tmp_path / "my_ema.py"
    file.write_text(text.replace(kept, ""))
    red, output = prove(file, tmp_path, only=["resume"])
    assert red == ["resume"] and "ema, most in" in output, output


@pytest.mark.slow
def test_a_recipe_that_does_not_start_says_why(tmp_path):
    red, output = prove(recipe("sft"), tmp_path, "--learning_rat", 1, only=["split"])
    assert red == ["split"]
    assert "unrecognized arguments: --learning_rat 1" in output and "Traceback" not in output
