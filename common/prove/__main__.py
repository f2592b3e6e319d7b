"""Proves that a recipe, or a fork of one, keeps the project's contracts.

    python -m common.prove recipes/sft.py
    python -m common.prove ~/work/my_dpo.py --model_name_or_path M --dataset_name pairs.jsonl
    python -m common.prove ~/work/my_dpo.py --quick --only split --only resume

It runs the recipe many times on its demo, or on the model and the data that its arguments name, cut
to a few rows. It prints a table of the promises: green or red, what was measured, and the bound.
Everything runs on the CPU in fp32 (one promise in fp16), with this repository's `common`. The full
proof takes less than ten minutes on two cores, `--quick` about two: it checks every promise on
fewer engines.

Arguments other than those below are the recipe's own. The exit status is 0 if all that could be
checked is green. What each promise means: docs/forking.md.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from common import REPOSITORY, show_any_text

if TYPE_CHECKING:  # slow to import
    from common.prove.bench import Bench
    from common.prove.compare import Check
    from common.prove.promises import Promise


class Outcome(NamedTuple):
    """What became of a promise.

    Attributes:
        checks: what was measured.
        failure: the error that ended the checks, if one did.
        unchecked: why there are no further checks, if something is missing.
    """

    promise: "Promise"
    checks: "list[Check]"
    failure: str = ""
    unchecked: str = ""

    @property
    def status(self) -> str:
        """`green`, `red` or `unchecked`."""
        if self.failure or not all(check.difference.green for check in self.checks):
            return "red"
        return "unchecked" if self.unchecked else "green"


def judge(promise: "Promise", bench: "Bench") -> Outcome:
    """Checks one promise. Whatever goes wrong in its runs makes it red."""
    from common.prove.bench import RunFailed, Unchecked

    checks: list[Check] = []
    try:
        for check in promise.check(bench):
            checks.append(check)
    except Unchecked as reason:
        return Outcome(promise, checks, unchecked=str(reason))
    except RunFailed as error:
        return Outcome(promise, checks, failure=str(error))
    except Exception:  # such as a log line without what the contracts say
        return Outcome(promise, checks, failure=traceback.format_exc(limit=-2).strip())
    return Outcome(promise, checks)


# ============================================================ the table
def table(outcomes: list[Outcome]) -> str:
    """Returns one line for each check, and one for each promise that has not been checked whole."""
    rows = [("", "promise", "checked", "measured", "bound")]
    for outcome in outcomes:
        for check in outcome.checks:
            difference = check.difference
            status = "green" if difference.green else "RED"
            measured = number(difference.measured)
            bound = number(difference.bound)
            rows.append((status, outcome.promise.name, check.what, measured, bound))
        if outcome.failure:
            rows.append(("RED", outcome.promise.name, "a run failed, see below", "", ""))
        if outcome.unchecked:
            rows.append(("-", outcome.promise.name, outcome.unchecked, "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def number(value: float) -> str:
    """Returns a whole number as it is, any other with two digits."""
    if value == round(value, 0):
        return f"{value:g}"
    return f"{value:.1e}"


def explain(outcomes: list[Outcome]) -> str:
    """Returns what is wrong with each red promise, and where it is explained."""
    lines = []
    for outcome in outcomes:
        if outcome.status != "red":
            continue
        lines.append(f"\nRED {outcome.promise.name}: {outcome.promise.says}")
        for check in outcome.checks:
            difference = check.difference
            if not difference.green:
                off = f"off by {number(difference.measured)}, bound {number(difference.bound)}"
                lines.append(f"    {check.what}: {off}. First in {difference.where}")
        lines += [f"    {line}" for line in outcome.failure.splitlines()]
        lines.append(f"    see {outcome.promise.docs}")
    return "".join(f"{line}\n" for line in lines)


def as_json(outcomes: list[Outcome], args: argparse.Namespace, seconds: float) -> dict:
    """Returns the table for programs.

    Args:
        args: see `parse`.
    """
    return {
        "recipe": str(args.recipe.resolve()),
        "quick": args.quick,
        "seconds": round(seconds, 1),
        "green": not any(outcome.status == "red" for outcome in outcomes),
        "promises": {outcome.promise.name: promise_as_json(outcome) for outcome in outcomes},
    }


def promise_as_json(outcome: Outcome) -> dict:
    """Returns the lines of one promise for programs."""
    return {
        "status": outcome.status,
        "why": outcome.failure or outcome.unchecked,
        "checks": [
            {
                "what": check.what,
                "green": check.difference.green,
                "measured": str(check.difference.measured),
                "bound": str(check.difference.bound),
                "where": check.difference.where,
            }
            for check in outcome.checks
        ],
    }


# ============================================================ the command
def prove(args: argparse.Namespace, of_recipe: list[str]) -> list[Outcome]:
    """Checks the promises of a recipe and returns what became of each.

    Args:
        args, of_recipe: see `parse`.
    """
    from common.prove.bench import Bench  # slow to import
    from common.prove.promises import PROMISES

    wanted = [promise for promise in PROMISES if not args.only or promise.name in args.only]
    folder = Path(tempfile.mkdtemp(prefix="prove-"))
    bench = Bench(args.recipe.resolve(), of_recipe, folder, args.quick)
    threads = ThreadPoolExecutor(len(wanted))
    try:
        bench.prepare()
        return list(threads.map(lambda promise: judge(promise, bench), wanted))
    finally:
        bench.stop()  # after Ctrl-C or an error some runs still go on
        threads.shutdown(cancel_futures=True)
        if args.keep:
            print(f"the runs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def set_environment() -> None:
    """Makes every run one on the CPU, with this repository's `common`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    before = os.environ.get("PYTHONPATH")
    paths = [str(REPOSITORY), *([before] if before else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Returns the command's own arguments, and those of the recipe.

    Raises:
        SystemExit: there is no such recipe, promise or folder.
    """
    from common.prove.promises import PROMISES  # slow to import

    parser = argparse.ArgumentParser(
        prog="python -m common.prove",
        usage="%(prog)s RECIPE [the recipe's arguments] [--quick] [--only NAME] [--json FILE]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", nargs="?", type=Path, help="the recipe's file, anywhere")
    parser.add_argument("--quick", action="store_true", help="every promise on fewer engines")
    parser.add_argument("--only", action="append", default=[], help="check this promise alone")
    parser.add_argument("--list", action="store_true", help="name the promises, run nothing")
    parser.add_argument("--json", type=Path, help="write the table to this file, too")
    parser.add_argument("--keep", action="store_true", help="leave the runs on the disk")
    args, of_recipe = parser.parse_known_args(argv)
    if args.list:
        return args, of_recipe
    names = [promise.name for promise in PROMISES]
    unknown = [name for name in args.only if name not in names]
    if unknown:
        parser.error(f"--only {unknown[0]}: no such promise. There are: {' '.join(names)}")
    if args.recipe is None:
        parser.error("name a recipe, such as recipes/sft.py")
    if not args.recipe.is_file():
        parser.error(f"{args.recipe}: no such file. Name a recipe, such as recipes/sft.py")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.absolute().parent}")
    return args, of_recipe


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    show_any_text()
    args, of_recipe = parse(argv)
    from common.prove.bench import RunFailed, Unchecked  # slow to import
    from common.prove.promises import PROMISES

    if args.list:
        for promise in PROMISES:
            print(f"{promise.name:12} {promise.says}")
        return 0
    start = time.monotonic()
    set_environment()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        outcomes = prove(args, of_recipe)
    except (RunFailed, Unchecked) as error:
        print(f"nothing can be checked: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: all runs were killed, no table is printed", file=sys.stderr)
        return 128 + signal.SIGINT
    seconds = time.monotonic() - start
    print(table(outcomes))
    print(explain(outcomes), end="")
    statuses = [outcome.status for outcome in outcomes]
    counts = {status: statuses.count(status) for status in ("green", "red", "unchecked")}
    shown = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    print(f"\n{args.recipe}: {shown} in {seconds:.0f} s, with {REPOSITORY}/common")
    if args.json:
        report = as_json(outcomes, args, seconds)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if counts["red"] else 0


if __name__ == "__main__":
    sys.exit(main())
