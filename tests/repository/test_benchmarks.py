"""The page of benchmarks says what was measured: its tables are those of benchmarks/results."""

import importlib.util
import subprocess
import sys

import pytest

from runs import REPOSITORY


def load(name: str):
    """Not by sys.path: benchmarks/peers.py would be found in place of tests/peers."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / f"benchmarks/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = load("tables")
audit = load("audit")


def test_the_tables_of_the_page_are_those_of_the_results():
    text = tables.README.read_text(encoding="utf-8")
    assert tables.with_tables(text, tables.render(tables.read())) == text
    assert tables.read(), "benchmarks/results holds nothing"


def test_the_tables_of_the_page_of_miscounts_are_those_of_the_audit():
    results = audit.read()
    text = audit.PAGE.read_text(encoding="utf-8")
    assert {"TRL", "preference-recipes"} <= {result["program"] for result in results}
    assert audit.with_tables(text, audit.render(results)) == text
    for result in results:
        assert result["repeats"] >= 2
        assert result["largest_difference_of_repeats"] < audit.NUMBERS_BOUND


@pytest.mark.slow
def test_the_audit_holds_for_a_recipe(tmp_path):
    command = [sys.executable, "benchmarks/audit.py", "ours", "--python", sys.executable]
    command += ["--works", "sft", "--only", "split", "numbers", "--folder", tmp_path]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    rows = [line.split()[:3] for line in ended.stdout.splitlines() if line.startswith("sft")]
    assert rows == [["sft", "split", "holds"], ["sft", "numbers", "holds"]]
