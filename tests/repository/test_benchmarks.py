"""The page of benchmarks says what was measured: its tables are those of benchmarks/results."""

import contextlib
import importlib.util
import json
import math
import re
import subprocess
import sys
import time
import types

import psutil
import pytest

from contracts.proof import processes
from runs import REPOSITORY


def load(name: str):
    """Not by sys.path: benchmarks/peers.py would be found in place of tests/peers."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / f"benchmarks/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = load("tables")
gpu = load("gpu")
audit = load("audit")

FOUND = {
    "work": "dpo", "model": "body", "unit": "pairs/s", "commit": "0123456789ab", "changed": False, "date": "2026-01-31",
    "cpu": "A CPU", "threads": 2, "python": "3.11.7", "versions": {"trl": "1.16.0", "torch": "2.13.0"}, "window": 64,
    "updates": 5, "micro": [8, 1], "compiled": False, "good": True, "others": 0.01,
    "rows": [
        {"way": "equal", "rates": [11.44, 6.5], "ratios": [1.8, 1.7, 1.75], "fastest": 1.764, "memory_mib": [2954, 1360]},
        {"way": "fallback", "rates": [11.44, 4.77], "ratios": [2.4, 2.5], "fastest": 2.44, "memory_mib": [2954, 1400]},
    ],
}  # fmt: skip


def test_the_tables_of_the_page_are_those_of_the_results():
    text = tables.README.read_text(encoding="utf-8")
    assert tables.with_tables(text, tables.render(tables.read())) == text
    assert tables.read(), "benchmarks/results holds nothing"


def test_the_page_has_no_goals():
    text = tables.README.read_text(encoding="utf-8")
    assert not re.search(r"\bgoals?\b|missed", text)


def test_a_result_is_a_line_in_the_table_of_each_way():
    equal, fallback = tables.render([FOUND]).split(tables.TITLES["fallback"])
    assert equal.startswith(tables.TITLES["equal"])
    assert (
        "| dpo | body | 11.44 pairs/s | 6.5 pairs/s | **1.75** (3: 1.70 to 1.80) | 1.76 | 2954, 1360 | 8, 1 |"
        in equal
    )
    assert (
        "| dpo | body | 11.44 pairs/s | 4.77 pairs/s | **2.45** (2: 2.40 to 2.50) | 2.44 | 2954, 1400 | 8, 1 |"
        in fallback
    )
    assert fallback.endswith(
        "- dpo, body: 2026-01-31, commit 0123456789ab; A CPU, 2 threads, Python 3.11.7, trl 1.16.0, torch 2.13.0; "
        "5 updates of 64 samples; other processes used up to 1% of the CPU."
    )


def test_what_must_not_be_quoted_says_so():
    told = tables.render([FOUND | {"others": 0.2, "changed": True, "good": False}])
    assert "commit 0123456789ab; changed since;" in told
    assert "**Not a quiet machine: do not quote this row**" in told
    assert "**The two programs did not compute the same**" in told


def test_results_are_read_in_the_order_of_works(tmp_path):
    for work, model in [("sft", "body"), ("dpo", "head"), ("dpo", "body")]:
        (tmp_path / f"{work}-{model}.json").write_text(json.dumps({"work": work, "model": model}))
    found = [(result["work"], result["model"]) for result in tables.read(tmp_path)]
    assert found == [("dpo", "body"), ("dpo", "head"), ("sft", "body")]


def test_a_step_out_of_time_leaves_nothing_running(tmp_path):
    """A launcher starts the recipe as a process of its own, which would keep the GPU's memory."""
    started = tmp_path / "started"
    starts = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(started)!r}, 'w').write(str(child.pid)); print('begun', flush=True); "
        "time.sleep(600)"
    )
    args = types.SimpleNamespace(folder=tmp_path, tiny=True, jobs=1, limit=5)
    step = gpu.Step(args, "step")
    assert not step.run("starts another", "-c", starts)
    (run,) = step.runs
    assert run["status"] == "out of time" and run["output"] == "begun\n"
    child = int(started.read_text())
    deadline = time.monotonic() + 30  # a process that was killed needs a moment to end
    with contextlib.suppress(psutil.NoSuchProcess):
        while processes.is_alive(psutil.Process(child)):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_run_that_failed_is_a_step_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.Step, "run", lambda step, name, *command, **_: name == "model")
    args = types.SimpleNamespace(folder=tmp_path, tiny=True, jobs=1, limit=5)
    step = gpu.Step(args, "step")
    assert gpu.generation(step) == {"passed": False}


def test_the_tables_of_the_page_of_miscounts_are_those_of_the_audit():
    results = audit.read()
    text = audit.PAGE.read_text(encoding="utf-8")
    assert {"TRL", "preference-recipes"} <= {result["program"] for result in results}
    assert audit.with_tables(text, audit.render(results)) == text
    for result in results:
        assert result["repeats"] >= 2
        assert result["largest_difference_of_repeats"] < audit.NUMBERS_BOUND


def test_what_is_not_a_number_does_not_hold():
    checks = [
        audit.Check("a", distance, bound=1e-5, where="") for distance in (1e-6, 1e-4, math.nan)
    ]
    assert [check.holds for check in checks] == [True, False, False]


@pytest.mark.slow
def test_the_audit_holds_for_a_recipe(tmp_path):
    command = [sys.executable, "benchmarks/audit.py", "ours", "--python", sys.executable]
    command += ["--works", "sft", "--only", "split", "numbers", "--folder", tmp_path]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    rows = [line.split()[:3] for line in ended.stdout.splitlines() if line.startswith("sft")]
    assert rows == [["sft", "split", "holds"], ["sft", "numbers", "holds"]]
