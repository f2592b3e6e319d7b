"""Reads the rows of a data set from the hub, a local file or a folder of files.

JSON is read by `json.loads` row by row, and a CSV as text, so that every value stays as it is.
`datasets` would guess a column's type from ten megabytes at a time: one list in them would put
quotes around the strings of other rows, and a number would make 7 of "007". It reads what has types
of its own, such as parquet.
"""

import csv
import glob
import gzip
import itertools
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import datasets
from datasets.data_files import DataFilesDict, get_data_patterns
from datasets.packaged_modules.json.json import Json

from common import counted, in_one_line, print_once

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")  # all but the last may be gzipped

# Longer than any text of a cell: the default ends at 131,072 characters.
csv.field_size_limit(2**31 - 1)


class Source(NamedTuple):
    """The rows of one split; nothing but the names of files has been read.

    Attributes:
        identity: changes with every change of the rows.
        rows: returns them; files that are read here are looked through once.
    """

    identity: list
    rows: Callable[[], "Rows"]


class Rows(NamedTuple):
    """The rows of a data set, of which one at a time is in memory.

    Attributes:
        parts: files read here, the first of their rows that counts, and the one after the last.
        table: what `datasets` reads; None for files read here.
        column_names: the columns of all rows, in the order in which they first appear.
    """

    parts: list[tuple[list[Path], int, int]]
    table: datasets.Dataset | None
    column_names: list[str]
    number: int

    def read(self, start: int, stop: int) -> Iterator[dict]:
        """Yields the rows of a range, with None where a row lacks a column of others."""
        if self.table is not None:
            yield from self.table.select(range(start, min(stop, self.number)))
            return
        entries = itertools.chain.from_iterable(
            itertools.islice(itertools.chain.from_iterable(map(entries_of, files)), first, last)
            for files, first, last in self.parts
        )
        for entry in itertools.islice(entries, start, stop):
            row = value_of(entry)
            yield {name: row.get(name) for name in self.column_names}


# ============================================================ which files
def find(name: str, split: str) -> Source:
    """Finds a hub data set (`owner/name` or `owner/name:config`), a local file, or a folder.

    A single file is the split `train`. As on the hub, the file names in a folder say the split; if
    none does, all files are `train`. The name of a file or a folder is never a pattern.
    """
    path = Path(name)
    if not path.exists():
        if name.removesuffix(".gz").endswith(SUFFIXES) or name.startswith(("/", ".", "~")):
            sys.exit(f"data file {name!r} does not exist (looked in {Path.cwd()})")
        return find_on_hub(name, split)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(name)
        return of_table(saved if isinstance(saved, datasets.Dataset) else saved[split])
    # A file is not resolved: a link of the hub's cache points to one whose name says no format.
    splits = {"train": [path.absolute()]}
    if path.is_dir():
        folder = str(path.resolve())
        escaped = glob.escape(folder)  # `datasets` would read the characters `*?[` as a pattern
        if escaped == folder:
            # This also reads what the data card of a cloned hub folder says about its files.
            splits = datasets.load_dataset_builder(folder).config.data_files
        else:
            splits = DataFilesDict.from_patterns(get_data_patterns(escaped), base_path=escaped)
    files = {str(part): list(filter(is_data_file, map(Path, splits[part]))) for part in splits}
    suffixes = {file.suffix for paths in files.values() for file in paths}
    note_unread(path, files)
    if not suffixes:
        sys.exit(f"no file of {name!r} ends in {' '.join(SUFFIXES)}, or one of them and .gz")
    if suffixes != {".parquet"}:
        return of_files(files, split)
    names = {part: [glob.escape(str(file)) for file in paths] for part, paths in files.items()}
    return of_table(datasets.load_dataset("parquet", data_files=names, split=split))


def note_unread(folder: Path, files: dict[str, list[Path]]) -> None:
    """Prints which data files of a folder are in no split: `more.jsonl` next to `train.jsonl`."""
    read = {os.path.realpath(file) for paths in files.values() for file in paths}
    unread = [
        str(file.relative_to(folder))
        for file in sorted(filter(is_data_file, folder.rglob("*")))
        if os.path.realpath(file) not in read
        # `datasets` ignores these.
        and not any(part.startswith((".", "__")) for part in file.relative_to(folder).parts)
    ]
    if unread:
        print_once(
            f"NOTE: folder {str(folder)!r}: {counted(len(unread), 'file')} in none of the splits "
            f"{sorted(files)}, so not read: {', '.join(unread[:5])}"
        )


def find_on_hub(name: str, split: str) -> Source:
    """Downloads a data set of the hub."""
    hub_name, _, config = name.partition(":")
    builder = datasets.load_dataset_builder(hub_name, config or None)
    if not isinstance(builder, Json) or builder.config.field is not None:
        builder.download_and_prepare()
        return of_table(builder.as_dataset(split))
    settings = datasets.DownloadConfig(token=builder.token, storage_options=builder.storage_options)
    manager = datasets.DownloadManager(base_path=builder.base_path, download_config=settings)
    downloaded = manager.download_and_extract(builder.config.data_files)
    files = {part: list(map(Path, manager.iter_files(downloaded[part]))) for part in downloaded}
    return of_files({str(part): paths for part, paths in files.items()}, split)


def of_table(table: datasets.Dataset) -> Source:
    rows = Rows([], table, table.column_names, len(table))
    return Source([table._fingerprint], lambda: rows)


def of_files(files: dict[str, list[Path]], split: str) -> Source:
    """Returns the rows of files that are read here."""

    def rows() -> Rows:
        numbers = dict.fromkeys(files, 0)
        column_names: dict[str, None] = {}
        for part in files:
            if part not in split:  # `train[:10]` and `train+test` name their splits
                continue
            for row in itertools.chain.from_iterable(map(checked_rows, files[part])):
                numbers[part] += 1
                column_names.update(dict.fromkeys(row))
        asked = datasets.ReadInstruction.from_spec(split).to_absolute(numbers)
        parts = [(files[part.splitname], part.from_, part.to) for part in asked]
        number = sum(max(last - first, 0) for _, first, last in parts)
        return Rows(parts, None, list(column_names), number)

    stats = [(str(path), path.stat()) for paths in files.values() for path in paths]
    return Source([split, *((path, s.st_size, s.st_mtime_ns) for path, s in stats)], rows)


def is_data_file(path: Path) -> bool:
    # `datasets` ignores some JSON files: dataset_infos.json and the like.
    is_known = path.name.removesuffix(".gz").endswith(SUFFIXES)
    return is_known and path.name not in datasets.data_files.FILES_TO_IGNORE


def stem(name: str) -> str:
    """Returns the last part of a data set's name, without the suffix of a data file."""
    if not Path(name).exists():
        name = name.partition(":")[0]  # the hub's name:config
    last = Path(name).name.removesuffix(".gz")
    return Path(last).stem if last.endswith(SUFFIXES) else last


# ============================================================ JSON and CSV
def entries_of(path: Path) -> Iterator[str | dict]:
    """Yields the rows of a JSON or CSV file; where each is a line of JSON, that line.

    Of lines one is in memory at a time, of a JSON array all rows.
    """
    open_file = gzip.open if path.suffix == ".gz" else open
    # A byte order mark, which Windows writes, is no part of the first row. Lines end at a line feed
    # alone, not at what Unicode takes for an end of line.
    with open_file(path, "rt", encoding="utf-8-sig", newline="\n") as file:
        if path.name.removesuffix(".gz").endswith(".csv"):
            yield from csv.DictReader(file, strict=True)
            return
        is_array = file.read(1000).lstrip().startswith("[")
        file.seek(0)
        if is_array:
            yield from json.load(file)
        else:
            yield from filter(None, map(str.strip, file))


def value_of(entry: str | dict) -> dict:
    """Returns the row of one of `entries_of`."""
    return json.loads(entry) if isinstance(entry, str) else entry


def checked_rows(path: Path) -> Iterator[dict]:
    """Yields the rows of a file, of which each can be read; else ends the run with its number."""
    number = 1
    try:
        for entry in entries_of(path):
            row = value_of(entry)
            if not isinstance(row, dict):
                raise ValueError(f"expected a JSON object, found {json.dumps(row):.60}")
            if None in row:  # where `csv` puts them
                raise ValueError("more cells than the header: quote cells that hold commas")
            yield row
            number += 1
    except (ValueError, RecursionError, csv.Error, OSError, EOFError, zlib.error) as error:
        sys.exit(f"{path}, row {number}: {in_one_line(error)}")
