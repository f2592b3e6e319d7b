"""Reading data sets."""

import gzip
import json
import sys
from pathlib import Path

import datasets
import pandas

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load(name: str, split: str) -> datasets.Dataset:
    """Loads a hub data set (`owner/name` or `owner/name:config`), a local file, or a folder of files.

    Files are `.jsonl .json .parquet .csv`, also gzipped. A file is the split `train`; the files of a folder are the splits
    that their names say (`train*`, `test*` ...), or all of them `train`, as on the hub. The cells of a CSV are text.

    Raises:
        SystemExit: nothing there, malformed JSON (with the row), no rows.
    """
    path, options = Path(name), {}
    ignored = datasets.data_files.FILES_TO_IGNORE  # dataset_infos.json and the like
    files = [
        file
        for file in (path.rglob("*") if path.is_dir() else [path])
        if reader_of(file) and file.name not in ignored
    ]
    kinds = {reader_of(file) for file in files}
    if not path.is_dir() and path.is_file() != bool(files):
        why = (
            f"does not exist (looked in {Path.cwd()})"
            if files
            else f"must end in {' '.join(READERS)}, or one of them and .gz"
        )
        sys.exit(f"data file {name!r} {why}")
    if len(kinds) > 1:
        sys.exit(f"folder {name!r} mixes {sorted(kinds)} files: give a folder of one kind")
    try:
        if kinds == {"csv"}:  # else "42" would be a number, and "None" nothing
            first = pandas.read_csv(files[0], nrows=1)
            if not isinstance(
                first.index, pandas.RangeIndex
            ):  # else the columns would shift in silence
                raise ValueError(
                    "row 1 has more cells than the header: quote cells that hold commas"
                )
            options = {
                "features": datasets.Features(dict.fromkeys(first, datasets.Value("string"))),
                "keep_default_na": False,
            }
        if path.is_file():
            return datasets.load_dataset(*kinds, data_files=name, split=split, **options)
        hub_name, _, config = (name, "", "") if path.is_dir() else name.partition(":")
        return datasets.load_dataset(hub_name, config or None, split=split, **options)
    except Exception as error:  # each reader raises what its library does
        why = " ".join(str(error.__cause__ or error).split())[:300]
        empty = (
            isinstance(error, (StopIteration, pandas.errors.EmptyDataError))
            or "corresponds to no data" in why
        )
        for file in files if kinds == {"json"} and not empty else []:
            find_malformed_json(file)
        sys.exit(
            f"data set {name!r}, split {split!r}, "
            + ("holds no rows" if empty else f"could not be read: {why}")
        )


def reader_of(path: Path) -> str | None:
    """The `datasets` builder for a file name; None if it is not a data file."""
    return READERS.get(Path(path.stem).suffix if path.suffix == ".gz" else path.suffix)


def find_malformed_json(path: Path) -> None:
    """Exits with the first row of a JSON or JSON-lines file that is not a JSON object; returns if there is none."""
    where = f"{path}"
    try:
        text = (gzip.open if path.suffix == ".gz" else open)(path, "rb").read()
        array = ".jsonl" not in path.suffixes and text.lstrip()[:1] == b"["
        for number, row in enumerate(json.loads(text) if array else text.splitlines(), 1):
            where = f"{path}, row {number}"
            if not isinstance(value := row if array else json.loads(row.strip() or b"{}"), dict):
                sys.exit(f"{where}: expected a JSON object, found {json.dumps(value)[:60]}")
    except Exception as error:  # gzip and json raise a dozen kinds
        sys.exit(f"{where}: malformed JSON: {str(error).replace('line 1 ', '')}")
