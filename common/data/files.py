"""Reads the rows of a data set from the hub, a local file or a folder of files."""

import gzip
import json
import sys
from pathlib import Path
from typing import NoReturn

import datasets
import pandas

# The `datasets` builder for each file suffix.
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load(name: str, split: str) -> datasets.Dataset:
    """Loads a hub data set (`owner/name` or `owner/name:config`), a local file, or a folder.

    Files are `.jsonl .json .parquet .csv`, also gzipped. A single file is the split `train`. As on
    the hub, the file names in a folder say the split (`train*`, `test*` ...); if none does, all
    files are `train`. The cells of a CSV are text.

    Raises:
        SystemExit: nothing there, malformed JSON (with the row), no rows.
    """
    files = data_files(name)
    builders = {reader_of(file) for file in files}
    if len(builders) > 1:
        sys.exit(f"folder {name!r} mixes {sorted(builders)} files: give a folder of one kind")
    try:
        options = {}
        if builders == {"csv"}:
            options = csv_options(files[0])
        if Path(name).is_file():
            (builder,) = builders
            return datasets.load_dataset(builder, data_files=name, split=split, **options)
        if Path(name).is_dir():
            return datasets.load_dataset(name, split=split, **options)
        hub_name, _, config = name.partition(":")
        return datasets.load_dataset(hub_name, config or None, split=split)
    except Exception as error:  # each reader raises what its library does
        refuse(name, split, files, error)


def data_files(name: str) -> list[Path]:
    """Returns the data files that a local name stands for; none for a data set on the hub."""
    path = Path(name)
    if path.is_dir():
        return [file for file in path.rglob("*") if is_data_file(file)]
    if not is_data_file(path):
        if path.is_file():
            sys.exit(f"data file {name!r} must end in {' '.join(READERS)}, or one of them and .gz")
        return []
    if not path.is_file():
        sys.exit(f"data file {name!r} does not exist (looked in {Path.cwd()})")
    return [path]


def is_data_file(path: Path) -> bool:
    # `datasets` ignores some JSON files: dataset_infos.json and the like.
    return reader_of(path) is not None and path.name not in datasets.data_files.FILES_TO_IGNORE


def reader_of(path: Path) -> str | None:
    """The `datasets` builder for a file name; None if it is not a data file."""
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    return READERS.get(suffix)


def csv_options(path: Path) -> dict:
    """Returns options that make every cell text: else "42" would be a number, "None" nothing."""
    header = pandas.read_csv(path, nrows=1)
    # pandas takes surplus cells as an index, and the columns would shift in silence.
    if not isinstance(header.index, pandas.RangeIndex):
        raise ValueError("row 1 has more cells than the header: quote cells that hold commas")
    return {
        "features": datasets.Features(dict.fromkeys(header, datasets.Value("string"))),
        "keep_default_na": False,
    }


def refuse(name: str, split: str, files: list[Path], error: Exception) -> NoReturn:
    """Exits with the reason why a data set could not be read."""
    why = " ".join(str(error.__cause__ or error).split())[:300]
    no_rows = (
        isinstance(error, (StopIteration, pandas.errors.EmptyDataError))
        or "corresponds to no data" in why
    )
    if no_rows:
        sys.exit(f"data set {name!r}, split {split!r}, holds no rows")
    for file in files:
        if reader_of(file) == "json":
            find_malformed_json(file)
    sys.exit(f"data set {name!r}, split {split!r}, could not be read: {why}")


def find_malformed_json(path: Path) -> None:
    """Exits with the first row of a JSON or JSON-lines file that is not a JSON object.

    Returns if there is none: then the reader failed for another reason.
    """
    where = str(path)
    try:
        open_file = gzip.open if path.suffix == ".gz" else open
        with open_file(path, "rb") as file:
            text = file.read()
        is_array = ".jsonl" not in path.suffixes and text.lstrip().startswith(b"[")
        rows = json.loads(text) if is_array else text.splitlines()
        for number, row in enumerate(rows, 1):
            where = f"{path}, row {number}"
            value = row if is_array else json.loads(row.strip() or b"{}")
            if not isinstance(value, dict):
                sys.exit(f"{where}: expected a JSON object, found {json.dumps(value)[:60]}")
    except Exception as error:  # gzip and json raise a dozen kinds
        sys.exit(f"{where}: malformed JSON: {str(error).replace('line 1 ', '')}")
