"""Shows which rows are behind the numbers of a run. docs/rows.md works through a case.

    python -m preference_recipes.tools.rows RUN --step 1200
    python -m preference_recipes.tools.rows RUN --sort loss --spread
    python -m preference_recipes.tools.rows RUN --sort rewards/margins --lowest --out FILE --rest
    python -m preference_recipes.tools.rows RUN --sort loss --compare OTHER_RUN

RUN is a run's `--output_dir`. `--step` shows the rows of an update as `--preview` does. If the run
recorded values (`--values_steps`), those with the largest share of its loss come first. `--sort`
needs recorded values, and orders rows by one of them over the whole run. `--out` writes the rows
that it found as data, and with `--rest` all other rows.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import math
import os
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.compute as pc
import pyarrow.parquet
import yaml

from common import batches, folders, log, patched
from common.values import COUNT, VALUES
from preference_recipes.data import files

WAYS = {"mean": "mean", "last": "last", "spread": "stddev"}  # pyarrow's names


# ============================================================ recorded values
def read(run: Path, source: str | None, metrics: list[str] | None = None) -> pyarrow.Table:
    """Returns the recorded values of a source, by default of training; by default all metrics."""
    parts = sorted((run / VALUES).glob("*.parquet"))
    if not parts:
        sys.exit(f"{run} has no recorded values: its run needs --values_steps")
    names = None
    if metrics:
        names = ["global_step", "source", "row", "weight"]
        names += [f"{name}{suffix}" for name in metrics for suffix in ("", COUNT)]
    tables = []
    for part in parts:
        table = pyarrow.parquet.ParquetFile(part).read(names)  # only columns that the part has
        of_training = pc.invert(pc.starts_with(table["source"], "eval"))
        is_wanted = pc.equal(table["source"], source) if source else of_training
        tables.append(table.filter(is_wanted).drop("source"))
    table = pyarrow.concat_tables(tables, promote_options="default")
    if not len(table):
        sys.exit(f"{run} has recorded nothing of {source or 'training'}")
    for name in set(metrics or []).difference(table.column_names):
        recorded = [name for name in pyarrow.parquet.read_schema(parts[-1]).names if COUNT in name]
        there_are = ", ".join(name.removesuffix(COUNT) for name in recorded)
        sys.exit(f"--sort {name}: not recorded in {run}; there are {there_are}")
    return table


def by_row(run: Path, source: str | None, metric: str, way: str) -> pyarrow.Table:
    """Returns rows, `row`, and each one's metric over the run, `value`: its mean, last or spread.

    A row's values in one update, such as of several responses, count as one: their mean.

    Args:
        metric: a metric, or a difference such as `logps/chosen - logps/rejected`.
    """
    first, *others = metric.split(" - ")
    table = read(run, source, [first, *others])
    values = table[first]
    for other in others:
        values = pc.subtract(values, table[other])  # null where one of them is null
    weights = pc.multiply(table["weight"], table[first + COUNT])
    is_counted = pc.and_(pc.is_valid(values), pc.greater(weights, 0))
    table = table.select(["row", "global_step"])
    table = table.append_column("value", values).append_column("samples", weights)
    table = table.filter(is_counted)
    names = ("row", "global_step", "value", "samples")
    rows, steps, values, weights = (table[name].to_numpy() for name in names)
    order = np.lexsort((steps, rows))
    changes = np.diff(rows[order], prepend=-1) | np.diff(steps[order], prepend=-1)
    starts = np.flatnonzero(changes)  # where the values of a row in an update begin
    sums = np.add.reduceat((values * weights)[order], starts)
    means = sums / np.add.reduceat(weights[order], starts)
    table = pyarrow.table({"row": rows[order][starts], "value": means})
    # With threads, the last row of a group would be arbitrary.
    table = table.group_by("row", use_threads=False).aggregate([("value", WAYS[way])])
    return table.rename_columns(["row", "value"]).sort_by("row")


# ============================================================ rows
def settings_of(run: Path) -> SimpleNamespace:
    """Returns the arguments of a run, and `start`: an entry of its environment.json.

    It is the newest entry that recorded values, if any: a run may continue without recording.
    """
    if not (run / "environment.json").is_file():
        sys.exit(f"{run} is no run's folder: it has no environment.json")
    args = yaml.safe_load((run / "run.yaml").read_text(encoding="utf-8"))
    starts = folders.read_json(run / "environment.json")
    recorded = [start for start in starts if start["data_files"]]
    return SimpleNamespace(**args, start=[*starts, *recorded][-1])


def data_of(settings: SimpleNamespace, source: str | None) -> tuple[str, str]:
    """Returns the name and the split of a source's data."""
    if not (source or "").startswith("eval"):  # `train` and `rollout` mean the default
        return settings.dataset_name[0], settings.dataset_split
    names = settings.eval_dataset_name
    name = next(n for n in names if source in ("eval", f"eval/{files.stem(n)}"))
    return name, settings.eval_dataset_split


def identity_of(settings: SimpleNamespace, source: str | None) -> list:
    """Identifies a source's rows: by the content of a file, else by a name and a split."""
    name, split = data_of(settings, source)
    path = Path(settings.start["working_directory"], name)
    names = [str(path.resolve()) if path.exists() else name, split]
    return settings.start["data_files"].get(name, names)


def rows_of(settings: SimpleNamespace, source: str | None) -> Iterator[tuple[int, dict]]:
    """Yields the rows of a source's data with their numbers; exits if the file has changed."""
    name, split = data_of(settings, source)
    before = settings.start["data_files"].get(name)
    if before is not None and before != folders.describe(Path(name)):
        sys.exit(f"{name} has changed since the run read it: its rows may be others now")
    rows = files.find(name, split)
    return enumerate(rows.select(range(len(rows))), 1)


def as_read(run: Path, settings: SimpleNamespace) -> tuple:
    """Returns the arguments and the data of a run as its own recipe reads them."""
    from preference_recipes.tools import preview  # slow to import

    script = shlex.split(settings.start["command"])[1]
    words = [script, str(run / "run.yaml"), "--preview", "1"]
    words += ["--output_dir", str(run), "--resume", "auto"]  # keeps the run's date
    runs: list[tuple] = []
    keep = lambda args, data: runs.append((args, data))
    path = [str(Path(script).resolve().parent), *sys.path]  # it may import modules beside it
    try:
        with patched((preview, "print_preview", keep), (sys, "argv", words), (sys, "path", path)):
            runpy.run_path(script, run_name="__main__")
    except SystemExit:
        if not runs:
            raise
    return runs[0]


def n_shown(top: float, items) -> int:
    """Returns how many of the items `--top` asks for."""
    return math.ceil(round(top * len(items), 6)) if top < 1 else int(top)


# ============================================================ --step
def rows_of_update(run: Path, step: int, args, data) -> list[int]:
    """Returns the numbers of an update's rows, which the seed and the epoch decide."""
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
    indices = batches.indices_of_update(len(data.train), args.train_batch_size, args.seed, seen)
    return data.train[indices]["row"]


def recorded_samples(run: Path, source: str | None, step: int) -> list[dict]:
    """Returns an update's samples as recorded, the largest share of its loss first."""
    table = read(run, source)
    update = table.filter(pc.equal(table["global_step"], step)).drop("global_step")
    if not len(update):
        last = sorted(pc.unique(table["global_step"]).to_pylist())[-5:]
        sys.exit(f"--step {step}: not recorded; the last that were: {', '.join(map(str, last))}")
    weights = pc.multiply(update["weight"], update["loss" + COUNT])
    losses = pc.multiply(update["loss"], weights).fill_null(0.0)
    shares = pc.divide(losses, pc.sum(pc.abs(losses)).as_py() or 1.0)
    samples = update.append_column("share of loss", shares).to_pylist()
    return sorted(samples, key=lambda sample: -abs(sample["share of loss"]))


def show_step(run: Path, settings: SimpleNamespace, source: str | None, step: int, top: float):
    """Prints the rows of an update, or of an evaluation, as `--preview` does."""
    from preference_recipes.tools import preview  # slow to import

    args, data = as_read(run, settings)
    folder = files.find(*data_of(settings, source)).folder  # paths of images are relative to it
    converter = replace(data.converter, folder=folder)
    if source or (run / VALUES).exists():
        samples = recorded_samples(run, source, step)
    else:
        samples = [{"row": row} for row in rows_of_update(run, step, args, data)]
    samples = samples[: n_shown(top, samples)]
    row_numbers = {sample["row"] for sample in samples}
    given_rows = {row: values for row, values in rows_of(settings, source) if row in row_numbers}
    for sample in samples:
        row = sample.pop("row")
        print(f"\nrow {row}")
        values = converter.convert_row(given_rows[row], row - 1)
        print("\n".join(preview.describe_row(given_rows[row], values, converter)))
        logps = sample.pop("logps", None) or []
        parts = preview.sequences_of(values)
        trained = [
            token for part in parts for token in itertools.compress(part.ids, part.is_trained)
        ]
        if 0 < len(logps) == len(trained):  # not for responses, nor rows of several sequences
            ids = [trained[index] for index in np.argsort(logps)[:5]]
            tokens = preview.marked(preview.Part("", ids, [True] * 5), converter.tokenizer)
            print(f"  least probable           {tokens}")
        for name, value in sample.items():
            if COUNT not in name and value is not None:
                print(f"  {name:24} {value:.4g}")


# ============================================================ --sort
def data_uri(file: bytes) -> str:
    return f"data:;base64,{base64.b64encode(file).decode()}"


def as_text(row: dict, file_as: Callable[[bytes], str] = data_uri) -> str:
    """Returns a row as a line of JSON, by default one that can be read as the same data."""
    as_string = lambda value: file_as(value) if isinstance(value, bytes) else str(value)
    return json.dumps(row, ensure_ascii=False, default=as_string)


def show_sorted(run: Path, settings: SimpleNamespace, args: argparse.Namespace) -> None:
    """Prints the rows at one end of an order, or writes them, or the others, as data."""
    table = by_row(run, args.source, args.sort, args.way)
    columns = ["value"]
    order = "value"
    if args.compare:
        other_table = by_row(args.compare, args.source, args.sort, args.way)
        other_settings = settings_of(args.compare)
        if identity_of(other_settings, args.source) != identity_of(settings, args.source):
            sys.exit(f"{run} and {args.compare} read other data: their rows are not the same")
        table = table.join(other_table, "row", join_type="inner", right_suffix=" there")
        columns = ["value", "value there"]
        order = "difference"
        table = table.append_column(order, pc.abs(pc.subtract(*table.select(columns))))
    direction = "ascending" if args.lowest else "descending"
    table = table.sort_by([(order, direction), ("row", "ascending")])
    top = table[: n_shown(args.top, table)]
    chosen = {sample["row"]: sample for sample in top.to_pylist()}
    if args.out:
        with open(args.out, "x", encoding="utf-8") as file:
            for row, given_rows in rows_of(settings, args.source):
                if (row in chosen) != args.rest:
                    file.write(as_text(given_rows) + "\n")
        return
    given_rows = {row: values for row, values in rows_of(settings, args.source) if row in chosen}
    for row, sample in chosen.items():
        values = "  ".join(f"{sample[column]:>11.5g}" for column in columns)
        text = as_text(given_rows[row], lambda file: f"<{len(file)} bytes>")
        print(f"row {row:>8}  {values}  {text}")


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
    if not args.sort and (args.out or args.compare or args.lowest or args.way != "mean"):
        parser.error("--out, --lowest, --last, --spread and --compare go with --sort")
    settings = settings_of(args.run)
    os.chdir(settings.start["working_directory"])  # paths of data sets are relative to it
    if args.sort:
        return show_sorted(args.run, settings, args)
    show_step(args.run, settings, args.source, args.step, args.top)


if __name__ == "__main__":
    main(command="python -m preference_recipes.tools.rows")
