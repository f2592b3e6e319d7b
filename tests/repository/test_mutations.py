"""Every planted fault still fits the code; the edits of planting.py do what they say.

The faults are those of mutations.py and of reported_faults.py. docs/counting.md names each of the
latter, with the file of its test.
"""

import ast
import re

import pytest

import mutations
import planting
import reported_faults

FAULTS = [*mutations.FAULTS, *reported_faults.FAULTS]
PAGE = mutations.REPOSITORY / "docs" / "counting.md"

CODE = '''
def outer(values, scale=1):
    """Its docstring."""
    total = sum(values)  # a comment
    seed(3)
    if total > 2:
        total += scale
    return make(total, scale=scale, unit="m")
'''


def planted(plant: planting.Plant) -> str:
    """The body of `outer` after an edit, without its docstring."""
    tree = ast.parse(CODE)
    plant(tree)
    text = ast.unparse(ast.fix_missing_locations(tree))
    return text.split('"""\n')[-1].replace("\n    ", "\n").strip()


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


def test_an_edit_finds_code_whatever_its_layout():
    edits = {
        "total = max(values)": planting.replace("outer", "sum( values )", by="max(values)"),
        "total -= scale": planting.replace("outer", "total += scale", by="total -= scale"),
        "first()\nsecond()": planting.replace("outer", "seed(3)", by="first(); second()"),
        "make(total, scale=2, unit='m')": planting.argument("outer", "make", "scale", "2"),
    }
    for expected, plant in edits.items():
        assert expected in planted(plant)
    assert "seed" not in planted(planting.drop_call("outer", "seed"))
    assert "total = " not in planted(planting.drop("outer", "total = sum(values)"))
    assert planted(planting.return_instead("outer", "0")) == "def outer(values, scale=1):\nreturn 0"


@pytest.mark.parametrize(
    "plant, said",
    [
        (planting.replace("outer", "total", by="0"), "'total' is 2 times in outer"),
        (planting.replace("outer", "total = min(values)", by="pass"), "is 0 times in outer"),
        (planting.drop_call("outer", "make"), "'make(...)' is 0 times in outer"),
        (planting.argument("outer", "make", "weight", "2"), "is 0 times in outer"),
        (planting.replace("inner", "total", by="0"), "'inner' of inner is defined 0 times"),
    ],
)
def test_an_edit_that_does_not_fit_once_says_so(plant, said):
    with pytest.raises(planting.Misfit) as misfit:
        planted(plant)
    assert said in str(misfit.value)
