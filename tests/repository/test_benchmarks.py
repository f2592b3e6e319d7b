"""The page of benchmarks says what was measured: its tables are those of benchmarks/results."""

from recipes import load
from runs import REPOSITORY


def test_the_tables_of_the_page_are_those_of_the_results():
    # Not by sys.path: benchmarks/peers.py would be found in place of tests/peers.
    tables = load("tables", REPOSITORY / "benchmarks/tables.py")
    text = tables.README.read_text(encoding="utf-8")
    assert tables.with_tables(text, tables.render(tables.read())) == text
    assert tables.read(), "benchmarks/results holds nothing"
