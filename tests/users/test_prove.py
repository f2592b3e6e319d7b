"""The proof, contracts/test_recipe.py, as somebody runs it on a fork: what is red, under its name, and why."""

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from runs import REPOSITORY, forked, launch, recipe

PYTEST = Path(pytest.__file__).with_name("__main__.py")


def prove(file: Path, folder: Path, *arguments, only=()) -> tuple[dict[str, str], str]:
    """What became of each promise, `green`, `red` or `unchecked`, and what was printed.

    Args:
        arguments: the recipe's.
        only: the promises that are checked; none: all.
    """
    report = folder / "report.xml"
    proof = REPOSITORY / "tests/contracts/test_recipe.py"
    tests = [f"{proof}::test_{name.replace('-', '_')}" for name in only] or [str(proof)]
    words = ["--quick", "--recipe", shlex.join(map(str, [file, *arguments]))]
    written = ["--basetemp", folder / "runs", "--junit-xml", report, "-p", "no:cacheprovider"]
    how = dict(cwd=folder, env={"PYTHONPATH": str(REPOSITORY)}, check=False, timeout=1200)
    result = launch([], PYTEST, *tests, *words, *written, "-raP", **how)
    output = result.stdout
    assert report.exists(), output
    statuses = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = re.sub(r"^test_|\[.*", "", case.get("name")).replace("_", "-")
        is_red = case.find("failure") is not None or case.find("error") is not None
        is_unchecked = case.find("skipped") is not None
        statuses[name] = "red" if is_red else "unchecked" if is_unchecked else "green"
    assert result.returncode == (1 if "red" in statuses.values() else 0), output
    return statuses, output


def test_each_promise_is_explained():
    """That each has a fault by which it is red is in planted/test_planted.py."""
    proof = (REPOSITORY / "tests/contracts/test_recipe.py").read_text()
    promises = [name.replace("_", "-") for name in re.findall(r"^def test_(\w+)", proof, re.M)]
    page = (REPOSITORY / "docs/forking.md").read_text()
    assert sorted(re.findall(r"^### ([a-z-]+)$", page, re.M)) == sorted(promises)


@pytest.mark.slow
def test_an_average_that_a_resume_starts_again_is_red(tmp_path):
    """What is not handed to `Checkpoint` is not in one."""
    text = forked("ema").read_text()
    kept = ", average=average"
    assert text.count(kept) == 1
    file = tmp_path / "my_ema.py"
    file.write_text(text.replace(kept, ""))
    report, output = prove(file, tmp_path, only=["resume"])
    assert report == {"resume": "red"} and "ema, most in" in output, output


@pytest.mark.slow
def test_a_recipe_that_does_not_start_says_why(tmp_path):
    report, output = prove(recipe("sft"), tmp_path, "--learning_rat", 1, only=["split"])
    assert report == {"split": "red"}
    assert "unrecognized arguments: --learning_rat 1" in output and "Traceback" not in output
