"""The table of planted faults fits the code. `make planted` plants them."""

import re

from faults import faults
from runs import REPOSITORY

PROOF = "contracts/test_recipe.py"


def test_a_file_has_each_piece_once_and_its_tests_are_there():
    for file, tests, piece, other in faults():
        text = (REPOSITORY / file).read_text(encoding="utf-8")
        assert text.count(piece) == 1, (file, piece)
        if file.endswith(".py"):
            compile(text.replace(piece, other), file, "exec")
        named = [test.partition("::") for test in tests if not test.startswith("-")]
        for name, _, test in named:
            text = (REPOSITORY / "tests" / name).read_text(encoding="utf-8")
            assert not test or f"\ndef {test.partition('[')[0]}(" in text, test


def test_each_promise_of_the_proof_has_a_fault_and_is_explained():
    text = (REPOSITORY / "tests" / PROOF).read_text(encoding="utf-8")
    promises = sorted(re.findall(r"^def test_(\w+)", text, re.MULTILINE))
    tests = {test for fault in faults() for test in fault.tests if test.startswith(PROOF)}
    assert sorted(tests) == [f"{PROOF}::test_{name}" for name in promises]
    page = (REPOSITORY / "docs/forking.md").read_text(encoding="utf-8")
    explained = re.findall(r"^### ([a-z-]+)$", page, re.MULTILINE)
    assert sorted(explained) == [name.replace("_", "-") for name in promises]
