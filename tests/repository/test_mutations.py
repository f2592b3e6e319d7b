"""Every planted fault fits the code, and docs/counting.md names those that were reported, with their tests.

The faults are those of mutations.py, and of users/test_prove.py, which the proof finds.
"""

import ast
import re

import pytest

import mutations
from users import test_prove

PROVED = test_prove.FAULTS
FAULTS = {**mutations.FAULTS, **PROVED}
PAGE = mutations.REPOSITORY / "docs" / "counting.md"


def failing(name: str) -> str:
    """The pytest node that must fail."""
    if name in PROVED:
        return f"contracts/test_recipe.py::test_{PROVED[name].promise.replace('-', '_')}"
    return mutations.FAULTS[name].test


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_fits_the_code_and_names_a_test(name):
    compile(mutations.with_fault(FAULTS[name]), FAULTS[name].file, "exec")
    file, _, test = failing(name).partition("::")
    tree = ast.parse((mutations.REPOSITORY / "tests" / file).read_text(encoding="utf-8"))
    assert test.partition("[")[0] in {node.name for node in tree.body if hasattr(node, "name")}


def test_the_page_of_miscounts_names_each_fault_that_was_reported_and_its_test():
    named = []
    for row in re.findall(r"\| (`\w+`.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        faults, _, files = row.rpartition(" | ")[2].partition("; ")
        names = re.findall(r"`(\w+)`", faults)
        tests = {failing(name).partition("::")[0] for name in names}
        assert set(re.findall(r"`(.*?)`", files)) == tests, row
        named += names
    assert len(set(named)) == len(named)
    assert set(mutations.FAULTS) <= set(named)
