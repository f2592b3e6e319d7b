"""Takes the numbers of a run apart: which rows made them. docs/rows.md works through a case.

    python -m preference_recipes.tools.rows RUN --step 1200
    python -m preference_recipes.tools.rows RUN --sort loss --spread
    python -m preference_recipes.tools.rows RUN --sort rewards/margins --lowest --out FILE --rest
    python -m preference_recipes.tools.rows RUN --sort loss --compare OTHER_RUN

RUN is a run's `--output_dir`. `--step` shows the rows of an update as `--preview` does: those with
the largest share of its loss first, if the run recorded values (`--values_steps`). `--sort` needs
recorded values, and orders rows by one of them over the whole run: by its `--mean` (the default),
its `--last` value or their `--spread`. `--out` writes the rows that it found as data again, and
with `--rest` all rows but those.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.compute as pc
import pyarrow.parquet
import yaml

from common import batches, folders, log, replaced
from common.values import COUNT, VALUES


# ============================================================ what a run has recorded
def read(run: Path, source: str | None, metrics: list[str] | None = None) -> pyarrow.Table:
    """Returns the recorded values of a run, in the order of its updates.

    Args:
        source: None: that of training.
        metrics: those that are wanted; None: all.
    """
    parts = sorted((run / VALUES).glob("*.parquet"))
    if not parts:
        sys.exit(f"{run} has no recorded values: its run needs --values_steps")
    names = ["global_step", "source", "row", "response", "weight"]
    names += [f"{name}{suffix}" for name in metrics or [] for suffix in ("", COUNT)]
    tables = []
    for part in parts:
        # Names that a part lacks are passed over.
        table = pyarrow.parquet.ParquetFile(part).read(names if metrics else None)
        of_training = pc.invert(pc.starts_with(table["source"], "eval"))
        tables.append(table.filter(pc.equal(table["source"], source) if source else of_training))
    table = pyarrow.concat_tables(tables, promote_options="default").sort_by("global_step")
    if not len(table):
        sys.exit(f"{run} has recorded nothing of {source or 'training'}")
    for name in set(metrics or []).difference(table.column_names):
        found = [name for name in pyarrow.parquet.read_schema(parts[-1]).names if COUNT in name]
        there_are = ", ".join(name.removesuffix(COUNT) for name in found)
        sys.exit(f"--sort {name}: not recorded in {run}; there are {there_are}")
    return table


def by_row(run: Path, source: str | None, metric: str, way: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of rows, and a metric of each over the run: `mean`, `last` or `spread`.

    What a row has in one update, such as several responses, counts as one value: their mean.

    Args:
        metric: also the difference of two, such as `logps/chosen - logps/rejected`.
    """
    first, *others = metric.split(" - ")
    table = read(run, source, [first, *others])
    weights = table["weight"].to_numpy() * table[first + COUNT].fill_null(0.0).to_numpy()
    column = table[first]
    for other in others:
        column = pc.subtract(column, table[other])  # null where one of them is
    weights = np.where(column.is_null().to_numpy(), 0.0, weights)
    values = column.fill_null(0.0).to_numpy()
    rows, steps = table["row"].to_numpy(), table["global_step"].to_numpy()
    order = np.lexsort((steps, rows))
    order = order[weights[order] > 0]
    rows, steps, values, weights = (each[order] for each in (rows, steps, values, weights))
    starts = np.flatnonzero(np.diff(rows, prepend=-1) | np.diff(steps, prepend=-1))  # of an update
    sums = np.add.reduceat(values * weights, starts)
    values = sums / np.add.reduceat(weights, starts)
    rows, starts, counts = np.unique(rows[starts], return_index=True, return_counts=True)
    if way == "last":
        return rows, values[starts + counts - 1]
    means = np.add.reduceat(values, starts) / counts
    if way == "mean":
        return rows, means
    squares = (values - np.repeat(means, counts)) ** 2
    return rows, np.sqrt(np.add.reduceat(squares, starts) / counts)


# ============================================================ the rows themselves
def settings_of(run: Path) -> SimpleNamespace:
    """Returns the arguments of a run, and `start`: the newest entry of its environment.json."""
    if not (run / "environment.json").is_file():
        sys.exit(f"{run} is no run's folder: it has no environment.json")
    args = yaml.safe_load((run / "run.yaml").read_text(encoding="utf-8"))
    return SimpleNamespace(**args, start=folders.read_json(run / "environment.json")[-1])


def rows_of(settings: SimpleNamespace, source: str | None) -> Iterator[tuple[int, dict]]:
    """Yields the rows of a source's data with their numbers; exits if the file is another now."""
    from preference_recipes.data import files  # slow to import

    name, split = settings.dataset_name[0], settings.dataset_split
    if source:
        is_it = lambda name: source in ("eval", f"eval/{files.stem(name)}")
        name, split = next(filter(is_it, settings.eval_dataset_name)), settings.eval_dataset_split
    before = settings.start["data_files"].get(name)
    if before is not None and before != folders.describe(Path(name)):
        sys.exit(f"{name} has changed since the run read it: its rows may be others now")
    rows = files.find(name, split)
    return enumerate(rows.select(range(len(rows))), 1)


def as_read(run: Path, settings: SimpleNamespace) -> tuple:
    """Returns the arguments and the data of a run as its recipe itself reads them."""
    from preference_recipes.tools import preview  # slow to import

    script = shlex.split(settings.start["command"])[1]
    words = [script, str(run / "run.yaml"), "--preview", "1"]
    words += ["--output_dir", str(run), "--resume", "auto"]  # so that it keeps its date
    found: list[tuple] = []
    keep = lambda args, data: found.append((args, data))
    try:
        with replaced((preview, "print_preview", keep), (sys, "argv", words)):
            runpy.run_path(script, run_name="__main__")
    except SystemExit:
        if not found:
            raise
    return found[0]


# ============================================================ --step
def rows_of_update(run: Path, step: int, args, data) -> list[int]:
    """Returns the numbers of the rows of an update, which the seed and the epoch decide."""
    if hasattr(args, "rollout_batch_size") or len(data.starts) > 1:
        sys.exit(f"{run} recorded no values, without which nothing says which rows made an update")
    for saved in folders.by_step(run / "checkpoints")[-1:]:
        if folders.read_json(saved / "state.json")["arguments"]["data"] != data.train._fingerprint:
            sys.exit(f"the data of {run} have changed since: its updates have other rows now")
    logged = [line for line in log.lines(run) if "loss" in line]
    lines = [{"global_step": 0, "skipped_steps": 0}, *logged]
    after = next((line for line in lines if line["global_step"] >= step), None)
    if after is None or step < 1:
        sys.exit(f"--step {step}: {run} has logged {lines[-1]['global_step']} applied updates")
    before = [line for line in lines if line["global_step"] < step][-1]
    if before["skipped_steps"] != after["skipped_steps"] and before["global_step"] < step - 1:
        sys.exit(f"--step {step}: updates were skipped between log lines, and none says which")
    seen = step - 1 + after["skipped_steps"]
    places = batches.rows_of_update(len(data.train), args.train_batch_size, args.seed, seen)
    return data.train[places]["row"]


def show_step(run: Path, settings: SimpleNamespace, source: str | None, step: int, top: int):
    """Prints the rows of an update, or of an evaluation, as `--preview` does."""
    samples = []
    if (run / VALUES).exists():
        table = read(run, source)
        of_step = table.filter(pc.equal(table["global_step"], step))
        if not len(of_step):
            last = ", ".join(map(str, pc.unique(table["global_step"]).to_pylist()[-5:]))
            sys.exit(f"--step {step}: not recorded; the last that were: {last}")
        samples = of_step.drop(["global_step", "source"]).to_pylist()
        for sample in samples:
            counts = sample["weight"] * (sample.get("loss" + COUNT) or 0.0)
            sample["share of loss"] = (sample.get("loss") or 0.0) * counts
        whole = sum(abs(sample["share of loss"]) for sample in samples) or 1.0
        samples = [{**each, "share of loss": each["share of loss"] / whole} for each in samples]
        samples.sort(key=lambda sample: -abs(sample["share of loss"]))
    args, data = as_read(run, settings)
    if not samples:
        samples = [{"row": row} for row in rows_of_update(run, step, args, data)]
    from preference_recipes.tools import preview

    wanted = {sample["row"] for sample in samples[:top]}
    given = {row: values for row, values in rows_of(settings, source) if row in wanted}
    for sample in samples[:top]:
        row = sample.pop("row")
        print(f"\nrow {row}")
        values = data.converter.convert_row(given[row], row - 1)
        print("\n".join(preview.describe_row(given[row], values, data.converter)))
        logps = np.array(sample.pop("logps", None) or [])
        trained = [
            token
            for part in preview.sequences_of(values)
            for token, is_trained in zip(part.ids, part.is_trained)
            if is_trained
        ]
        if 0 < len(logps) == len(trained):  # not of responses, nor of a row of several sequences
            least = preview.Sequence("", [trained[k] for k in np.argsort(logps)[:5]], [True] * 5)
            print(f"  least probable           {preview.marked(least, data.converter.tokenizer)}")
        for name, value in sample.items():
            if COUNT not in name and value is not None:
                print(f"  {name:24} {value:.4g}")


# ============================================================ --sort
def show_sorted(run: Path, settings: SimpleNamespace, args: argparse.Namespace) -> None:
    """Prints the rows at one end of an order, or writes them, or all others, as data."""
    numbers, values = by_row(run, args.source, args.sort, args.way)
    columns = [values]
    if args.compare:
        if settings_of(args.compare).start["data_files"] != settings.start["data_files"]:
            sys.exit(f"{run} and {args.compare} read other data: their rows are not the same")
        others, values_of_other = by_row(args.compare, args.source, args.sort, args.way)
        numbers, mine, theirs = np.intersect1d(numbers, others, return_indices=True)
        columns = [values[mine], values_of_other[theirs]]
        values = abs(columns[0] - columns[1])
    order = np.argsort(values if args.lowest else -values, kind="stable")
    top = math.ceil(round(args.top * len(order), 6)) if args.top < 1 else int(args.top)
    chosen = {int(numbers[place]): place for place in order[:top]}
    texts = {}
    with open(args.out or os.devnull, "x" if args.out else "w", encoding="utf-8") as file:
        for row, given in rows_of(settings, args.source):
            text = json.dumps(given, ensure_ascii=False, default=str)
            if row in chosen:
                texts[row] = text
            if (row in chosen) != args.rest:
                file.write(f"{text}\n")
    for row, place in chosen.items() if not args.out else ():
        numbers_of_row = "  ".join(f"{column[place]:>11.5g}" for column in columns)
        print(f"row {row:>8}  {numbers_of_row}  {texts[row]}")


def main(words: list[str] | None = None, command: str | None = None) -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=command, description=__doc__, formatter_class=layout)
    path = lambda name: Path(name).expanduser().resolve()
    parser.add_argument("run", type=path, help="a run's --output_dir")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--step", type=int, help="the global_step of an update or an evaluation")
    task.add_argument(
        "--sort", metavar="METRIC", help="as log lines name it, without eval/; or A - B"
    )
    for flag in ("--mean", "--last", "--spread"):
        parser.add_argument(flag, dest="way", action="store_const", const=flag[2:], default="mean")
    parser.add_argument("--lowest", action="store_true", help="the lowest first")
    parser.add_argument("--top", type=float, default=20, help="rows; below 1: a share of all")
    parser.add_argument("--source", help="eval or eval/NAME; default: what was trained on")
    parser.add_argument("--compare", type=path, help="a run: first where the two differ most")
    parser.add_argument("--out", type=path, help="a new .jsonl file for the rows")
    parser.add_argument("--rest", action="store_true", help="write all other rows to --out")
    args = parser.parse_args(words)
    if args.rest and not args.out:
        parser.error("--rest needs --out")
    settings = settings_of(args.run)
    os.chdir(settings.start["working_directory"])  # from which data sets are named
    if args.sort:
        return show_sorted(args.run, settings, args)
    show_step(args.run, settings, args.source, args.step, int(args.top))


if __name__ == "__main__":
    main(command="python -m preference_recipes.tools.rows")
