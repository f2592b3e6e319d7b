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
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import datasets
from datasets.data_files import DataFilesDict, get_data_patterns
from datasets.packaged_modules.json.json import Json

from common import counted, in_one_line, print_once

# The `datasets` builder for each file suffix; JSON and CSV are read here.
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}

# JSON may write a character as two halves of these numbers.
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")

# Longer than any text of a cell: the default ends at 131,072 characters.
csv.field_size_limit(2**31 - 1)


@dataclass
class Rows:
    """The rows of a data set, of which one at a time is in memory.

    Attributes:
        parts: of files read here: files, the first of their rows that counts, and the one after
            the last.
        table: what `datasets` reads; None for files read here.
        column_names: the columns of all rows, in the order in which they first appear.
        number: how many rows there are.
    """

    parts: list[tuple[list[Path], int, int]]
    table: datasets.Dataset | None
    column_names: list[str]
    number: int

    def read(self, start: int, stop: int) -> Iterator[dict]:
        """Yields the rows of a range, with None where a row lacks a column of others."""
        if self.table is not None:
            if start < self.number:
                yield from self.table.select(range(start, min(stop, self.number)))
            return
        entries = itertools.chain.from_iterable(
            itertools.islice(itertools.chain.from_iterable(map(entries_of, files)), first, last)
            for files, first, last in self.parts
        )
        for entry in itertools.islice(entries, start, stop):
            row = value_of(entry)
            yield {name: row.get(name) for name in self.column_names}


@dataclass
class Source:
    """Where the rows of one split are; nothing but the names of files has been read.

    Attributes:
        name: as the user gave it.
        files: of each split, if they are read here.
        table: what `datasets` reads; None for files read here.
    """

    name: str
    split: str
    files: dict[str, list[Path]]
    table: datasets.Dataset | None = None

    def identity(self) -> list:
        """Returns what changes with every change of the rows."""
        if self.table is not None:
            return [self.table._fingerprint]
        stats = [(str(path), path.stat()) for paths in self.files.values() for path in paths]
        return [self.split, *((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats)]

    def rows(self) -> Rows:
        """Reads all rows once, and returns them with their number and columns.

        Raises:
            SystemExit: a row that cannot be read, no rows, no such split.
        """
        if self.table is not None:
            rows = Rows([], self.table, self.table.column_names, len(self.table))
        else:
            rows = self.scan()
        if rows.number == 0:
            refuse_empty(self.name, self.split)
        return rows

    def scan(self) -> Rows:
        """Counts the rows of files that are read here, and collects their columns."""
        numbers = dict.fromkeys(self.files, 0)
        column_names: dict[str, None] = {}
        for split, paths in self.files.items():
            if split not in self.split:  # `train[:10]` and `train+test` name their splits
                continue
            for path in paths:
                for row in checked_rows(path):
                    numbers[split] += 1
                    column_names.update(dict.fromkeys(row))
        try:
            asked = datasets.ReadInstruction.from_spec(self.split).to_absolute(numbers)
        except (ValueError, AssertionError) as error:
            refuse(self.name, self.split, error)
        parts = [(self.files[part.splitname], part.from_, part.to) for part in asked]
        number = sum(max(last - first, 0) for _, first, last in parts)
        return Rows(parts, None, list(column_names), number)


def load(name: str, split: str) -> Rows:
    """Returns the rows of a data set, all of them read once; see `find` and `Source.rows`."""
    return find(name, split).rows()


def find(name: str, split: str) -> Source:
    """Finds a hub data set (`owner/name` or `owner/name:config`), a local file, or a folder.

    Files are `.jsonl .json .csv`, also gzipped, and `.parquet`. A single file is the split `train`.
    As on the hub, the file names in a folder say the split (`train*`, `test*` ...); if none does,
    all files are `train`. If only some do, a note names the files that are not read. A folder may
    also be one that `save_to_disk` wrote. The name of a file or a folder is never a pattern. The
    cells of a CSV are text.

    Raises:
        SystemExit: nothing there, or nothing that can be read.
    """
    if is_saved_to_disk(Path(name)):
        return Source(name, split, {}, load_saved(name, split))
    files = data_files(name)
    kinds = {reader_of(file) for file in files}
    if len(kinds) > 1:
        sys.exit(f"folder {name!r} mixes {sorted(kinds)} files: give a folder of one kind")
    try:
        if not files and not Path(name).is_dir():
            return find_on_hub(name, split)
        splits = split_files(Path(name))
        note_unread(Path(name), files, splits)
        of_splits = {
            str(part): [Path(file) for file in paths if is_data_file(Path(file))]
            for part, paths in splits.items()
        }
        if kinds != {"parquet"}:
            return Source(name, split, of_splits)
        escaped = {part: [glob.escape(str(f)) for f in paths] for part, paths in of_splits.items()}
        table = datasets.load_dataset("parquet", data_files=escaped, split=split)
        return Source(name, split, {}, table)
    except Exception as error:  # each reader raises what its library does
        refuse(name, split, error)


def find_on_hub(name: str, split: str) -> Source:
    """Downloads a data set of the hub."""
    hub_name, _, config = name.partition(":")
    builder = datasets.load_dataset_builder(hub_name, config or None)
    if not isinstance(builder, Json) or builder.config.field is not None:
        builder.download_and_prepare()
        return Source(name, split, {}, builder.as_dataset(split))
    settings = datasets.DownloadConfig(token=builder.token, storage_options=builder.storage_options)
    manager = datasets.DownloadManager(base_path=builder.base_path, download_config=settings)
    downloaded = manager.download_and_extract(builder.config.data_files)
    files = {
        str(part): [Path(file) for file in manager.iter_files(paths)]
        for part, paths in downloaded.items()
    }
    return Source(name, split, files)


# ============================================================ which files
def data_files(name: str) -> list[Path]:
    """Returns the data files that a local name stands for; none for a data set on the hub.

    Raises:
        SystemExit: nothing is there, or no file that could be data.
    """
    path = Path(name)
    if path.is_dir():
        return [file for file in path.rglob("*") if is_data_file(file)]
    if not is_data_file(path):
        if path.is_file():
            sys.exit(f"data file {name!r} must end in {' '.join(READERS)}, or one of them and .gz")
        has_parts = name.partition(":")[0].count("/") > 1 and not name.startswith("buckets/")
        if name.startswith(("/", "./", "../", "~")) or has_parts:  # no name of the hub
            sys.exit(f"data folder {name!r} does not exist (looked in {Path.cwd()})")
        return []
    if not path.is_file():
        sys.exit(f"data file {name!r} does not exist (looked in {Path.cwd()})")
    return [path]


def is_data_file(path: Path) -> bool:
    # `datasets` ignores some JSON files: dataset_infos.json and the like.
    return reader_of(path) is not None and path.name not in datasets.data_files.FILES_TO_IGNORE


def reader_of(path: Path) -> str | None:
    """Returns the kind of a data file by its name; None if it is none.

    Raises:
        SystemExit: a gzipped parquet file, which no reader reads.
    """
    is_gzipped = path.suffix == ".gz"
    reader = READERS.get(Path(path.stem).suffix if is_gzipped else path.suffix)
    if is_gzipped and reader == "parquet":
        sys.exit(f"data file {str(path)!r}: parquet is compressed by itself; unpack it with gunzip")
    return reader


def stem(name: str) -> str:
    """Returns the last part of a data set's name, without the suffix of a data file."""
    if not Path(name).exists():
        name = name.partition(":")[0]  # the hub's name:config
    last = Path(name).name.removesuffix(".gz")
    for suffix in READERS:
        last = last.removesuffix(suffix)
    return last


def split_files(path: Path) -> DataFilesDict:
    """Returns the files of each split of a local file or folder.

    `datasets` would read the characters `*?[` in a name as a pattern, so they are escaped.
    """
    if path.is_file():
        # Not resolved: a link of the hub's cache points to a file whose name says no format.
        return DataFilesDict.from_patterns({"train": [glob.escape(str(path.absolute()))]})
    escaped = glob.escape(str(path.resolve()))
    if escaped == str(path.resolve()):
        # This also reads what the data card of a cloned hub folder says about its files.
        return datasets.load_dataset_builder(str(path)).config.data_files
    return DataFilesDict.from_patterns(get_data_patterns(escaped), base_path=escaped)


def note_unread(folder: Path, files: list[Path], splits: DataFilesDict) -> None:
    """Prints which files of a folder are in no split: `more.jsonl` next to `train.jsonl`."""
    read = {os.path.realpath(file) for paths in splits.values() for file in paths}
    unread = []
    for file in files:
        path = file.relative_to(folder)
        is_ignored = any(part.startswith((".", "__")) for part in path.parts)  # by `datasets`
        if file.is_file() and not is_ignored and os.path.realpath(file) not in read:
            unread.append(str(path))
    if unread:
        listed = ", ".join(sorted(unread)[:5]) + (", ..." if len(unread) > 5 else "")
        print_once(
            f"NOTE: folder {str(folder)!r}: {counted(len(unread), 'file')} in none of the splits "
            f"{sorted(map(str, splits))}, so not read: {listed}"
        )


# ============================================================ folders of save_to_disk
def is_saved_to_disk(path: Path) -> bool:
    """Whether `save_to_disk` of a data set, or of a dict of its splits, wrote a folder."""
    is_one_set = (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    return is_one_set or (path / "dataset_dict.json").is_file()


def load_saved(name: str, split: str) -> datasets.Dataset:
    """Returns one split of what `save_to_disk` wrote. A data set without splits is `train`, too."""
    try:
        saved = datasets.load_from_disk(name)
    except Exception as error:  # a torn folder raises what pyarrow, json or the disk do
        refuse(name, split, error)
    splits = saved
    if isinstance(saved, datasets.Dataset):
        splits = {"train": saved, str(saved.split or "train"): saved}
    if split not in splits:
        sys.exit(f"data set {name!r} has no split {split!r}; it has {list(splits)}")
    return splits[split]


# ============================================================ JSON and CSV
def entries_of(path: Path) -> Iterator[str | dict]:
    """Yields the rows of a JSON or CSV file; where each is a line of JSON, that line.

    Of lines one is in memory at a time, of a JSON array all rows.
    """
    with open(path, "rb") as file:
        is_gzipped = file.read(2) == b"\x1f\x8b"
    open_file = gzip.open if is_gzipped or path.suffix == ".gz" else open
    # A byte order mark, which Windows writes, is no part of the first row. Lines end at a line feed
    # alone, not at what Unicode takes for an end of line.
    with open_file(path, "rt", encoding="utf-8-sig", newline="\n") as file:
        if reader_of(path) == "csv":
            yield from csv.DictReader(file, strict=True)
        elif first_character(file) == "[":
            file.seek(0)
            yield from json.load(file)
        else:
            file.seek(0)
            yield from filter(None, map(str.strip, file))


def value_of(entry: str | dict) -> dict:
    """Returns the row of one of `entries_of`."""
    return json.loads(entry) if isinstance(entry, str) else entry


def checked_rows(path: Path) -> Iterator[dict]:
    """Yields the rows of a file, of which each can be read.

    Raises:
        SystemExit: a row that cannot be read, or that is no object; with its number, from 1. A
            malformed array, with the line and the column.
    """
    number = 1
    try:
        for entry in entries_of(path):
            row = line_value(entry) if isinstance(entry, str) else entry
            if not isinstance(row, dict):
                found = json.dumps(row, ensure_ascii=False)[:60]
                sys.exit(f"{path}, row {number}: expected a JSON object, found {found}")
            if None in row:  # where `csv` puts them
                raise ValueError("more cells than the header: quote cells that hold commas")
            if not isinstance(entry, str) or HALF_CHARACTER.search(entry):
                check_characters(row)
            yield row
            number += 1
    except UnicodeDecodeError as error:
        sys.exit(f"{path}, row {number} or a later one, is not UTF-8: {error}")
    except json.JSONDecodeError as error:  # of an array: `line_value` raises a plain ValueError
        sys.exit(f"{path}: malformed JSON: {error}")
    except (ValueError, RecursionError, csv.Error) as error:
        sys.exit(f"{path}, row {number}: malformed {(reader_of(path) or 'json').upper()}: {error}")
    except (OSError, EOFError, zlib.error) as error:
        sys.exit(f"{path}, row {number}, cannot be read: {error}")


def line_value(line: str) -> object:
    """Returns the value of a line of JSON."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        # It is always line 1 of this text, which tells nothing.
        raise ValueError(f"{error.msg}: column {error.colno}") from None


def check_characters(row: dict) -> None:
    """Raises a ValueError if a row holds half of a character: no file or tokenizer takes that."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{half!a} is one half of a character, without the other") from None


def first_character(file) -> str:
    """Returns the first character that is not whitespace; empty if there is none."""
    character = file.read(1)
    while character.isspace():
        character = file.read(1)
    return character


# ============================================================ refusals
def refuse(name: str, split: str, error: Exception) -> NoReturn:
    """Exits with the reason why a data set could not be read."""
    why = in_one_line(error.__cause__ or error)
    if isinstance(error, StopIteration) or "corresponds to no data" in why:
        refuse_empty(name, split)
    sys.exit(f"data set {name!r}, split {split!r}, could not be read: {why}")


def refuse_empty(name: str, split: str) -> NoReturn:
    sys.exit(f"data set {name!r}, split {split!r}, holds no rows")
