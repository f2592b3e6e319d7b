"""Every planted fault still fits the code; the edits of planting.py do what they say.

The faults are those of mutations.py and of reported_faults.py. docs/counting.md names each of the
latter, with the file of its test.
"""

import ast
import re

import pytest

import mutations
import reported_faults

FAULTS = [*mutations.FAULTS, *reported_faults.FAULTS]
PAGE = mutations.REPOSITORY / "docs" / "counting.md"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_fits_the_code_and_names_a_test(fault):
    compile(mutations.with_fault(fault), fault.file, "exec")
    file, _, test = fault.test.partition("::")
    tree = ast.parse((mutations.REPOSITORY / "tests" / file).read_text(encoding="utf-8"))
    assert test.partition("[")[0] in {node.name for node in tree.body if hasattr(node, "name")}


def test_names_are_given_once():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)


def test_the_page_of_miscounts_names_each_fault_that_was_reported_and_its_test():
    tests = {fault.name: fault.test.partition("::")[0] for fault in FAULTS}
    named = []
    for row in re.findall(r"\| (`\w+`.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        faults, _, files = row.rpartition(" | ")[2].partition("; ")
        names = re.findall(r"`(\w+)`", faults)
        assert set(re.findall(r"`(.*?)`", files)) == {tests[name] for name in names}, row
        named += names
    assert len(set(named)) == len(named)
    assert {fault.name for fault in reported_faults.FAULTS} <= set(named)
