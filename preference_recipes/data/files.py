"""Reads the rows of a data set from the hub, a local file or a folder of files."""

import glob
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import datasets
import pandas
from datasets.data_files import DataFilesDict, get_data_patterns

from common import counted, hub, in_one_line, print_once
from preference_recipes.data import cache

# The `datasets` builder for each file suffix. JSON has a reader of our own, see `JsonRows`.
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}

# JSON may write a character as two halves of these numbers.
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


class Rows(NamedTuple):
    """The rows of a data set.

    Attributes:
        table: one entry a row: its columns, or `json` and `columns`, see `JsonRows`.
        column_names: the columns of all rows, in the order in which they first appear.
        is_json: whether the entries are JSON texts.
    """

    table: datasets.Dataset
    column_names: list[str]
    is_json: bool

    def row(self, entry: dict) -> dict:
        """Returns the columns of one entry of `table`, None where the row lacks one."""
        if not self.is_json:
            return entry
        given = json.loads(entry["json"])
        return {column_name: given.get(column_name) for column_name in self.column_names}


class JsonRows(datasets.GeneratorBasedBuilder):
    """Keeps each row of JSON files as its own text, together with the names of its columns.

    So every value keeps the type that it has in its row. A table has one type for a whole column:
    in one a number would turn the text "046" of another row into 46, and dates would become times.
    """

    def _info(self) -> datasets.DatasetInfo:
        text = datasets.Value("string")
        return datasets.DatasetInfo(features=datasets.Features({"json": text, "columns": text}))

    def _split_generators(self, dl_manager) -> list[datasets.SplitGenerator]:
        return [
            datasets.SplitGenerator(split, gen_kwargs={"files": list(files)})
            for split, files in self.config.data_files.items()
        ]

    def _generate_examples(self, files: list[str]) -> Iterator[tuple[int, dict]]:
        number = 0
        for file in files:
            for text, row in json_rows(Path(file)):
                yield number, {"json": text, "columns": json.dumps(list(row))}
                number += 1


def load(name: str, split: str) -> Rows:
    """Loads a hub data set (`owner/name` or `owner/name:config`), a local file, or a folder.

    Files are `.jsonl .json .csv`, also gzipped, and `.parquet`. A single file is the split `train`.
    As on the hub, the file names in a folder say the split (`train*`, `test*` ...); if none does,
    all files are `train`. If only some do, a note names the files that are not read. A folder may
    also be one that `save_to_disk` wrote. The name of a file or a folder is never a pattern. The
    cells of a CSV are text.

    Raises:
        SystemExit: nothing there, malformed JSON (with the row, or the line of an array), no rows.
    """
    if is_saved_to_disk(Path(name)):
        return as_rows(name, split, load_saved(name, split), is_json=False)
    files = data_files(name)
    kinds = {reader_of(file) for file in files}
    if len(kinds) > 1:
        sys.exit(f"folder {name!r} mixes {sorted(kinds)} files: give a folder of one kind")
    try:
        if files or Path(name).is_dir():
            splits = split_files(Path(name))
            note_unread(Path(name), files, splits)
            table = read_files(split, kinds, splits)
        else:
            hub_name, _, config = name.partition(":")
            hub.reach()
            source = (hub_name, config or None)
            make = partial(datasets.load_dataset_builder, *source)
            table = read(split, make, source)
    except Exception as error:  # each reader raises what its library does
        refuse(name, split, error)
    return as_rows(name, split, table, is_json=kinds == {"json"})


def as_rows(name: str, split: str, table: datasets.Dataset, is_json: bool) -> Rows:
    """Returns the rows of a table; exits if there are none."""
    if len(table) == 0:
        refuse_empty(name, split)
    if not is_json:
        return Rows(table, table.column_names, is_json)
    column_names = {}
    for columns in table.unique("columns"):
        column_names.update(dict.fromkeys(json.loads(columns)))
    return Rows(table, list(column_names), is_json)


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


def read_files(split: str, kinds: set[str], files: DataFilesDict) -> datasets.Dataset:
    """Returns the rows of one split of local files, all of one kind; see `read`."""
    if kinds == {"json"}:
        json_files = {
            part: datasets.data_files.DataFilesList(
                [file for file in paths if is_data_file(Path(file))], paths.origin_metadata
            )
            for part, paths in files.items()
        }
        version = datasets.fingerprint.Hasher.hash(Path(__file__).read_text("utf-8"))
        make = partial(JsonRows, data_files=DataFilesDict(json_files), hash=version)
        return read(split, make, (kinds, files, version))

    escaped = {
        part: [glob.escape(file) for file in paths if is_data_file(Path(file))]
        for part, paths in files.items()
    }
    options = {}
    if kinds == {"csv"}:
        first_split = next(iter(files.values()))
        options = csv_options(Path(first_split[0]))
    make = partial(datasets.load_dataset_builder, *kinds, data_files=escaped, **options)
    return read(split, make, (kinds, files, options))


def read(
    split: str, make: Callable[[], datasets.DatasetBuilder], source: tuple
) -> datasets.Dataset:
    """Returns the rows of one split, which `datasets` caches; what is damaged is made again.

    Args:
        make: makes the builder of `datasets` that reads the source.
        source: what the rows are read from.
    """
    record = cache.Record(datasets.fingerprint.Hasher.hash([source, split]))
    with record.locked():
        is_whole = record.is_true()
        if not is_whole:
            record.remove_files()
        # After that, because a builder reads what is cached as soon as it is made.
        builder = make()
        builder.download_and_prepare()
        table = builder.as_dataset(split)
        files = [Path(builder.cache_dir) / "dataset_info.json"]
        files += [Path(file["filename"]) for file in table.cache_files]
        if not is_whole or list(record.entries()) != files:
            record.write(files)
    return table


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


# ============================================================ JSON
def json_rows(path: Path) -> Iterator[tuple[str, dict]]:
    """Yields text and value of each row of a JSON file: one row a line, or one array of rows.

    Of lines only one is in memory at a time, of an array all rows.

    Raises:
        SystemExit: a row that cannot be read, or that is no JSON object; with its number, from 1.
            A malformed array, with the line and the column.
    """
    number = 1
    open_file = gzip.open if path.suffix == ".gz" else open
    try:
        # A byte order mark, which Windows writes, is no part of the first row.
        with open_file(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            is_array = first_character(file) == "["
            file.seek(0)
            for text, row in array_rows(file) if is_array else line_rows(file):
                if not isinstance(row, dict):
                    found = json.dumps(row, ensure_ascii=False)[:60]
                    sys.exit(f"{path}, row {number}: expected a JSON object, found {found}")
                if HALF_CHARACTER.search(text):
                    check_characters(row)
                yield text, row
                number += 1
    except UnicodeDecodeError as error:
        sys.exit(f"{path}, row {number} or a later one, is not UTF-8: {error}")
    except json.JSONDecodeError as error:  # of an array: `line_rows` raises a plain ValueError
        sys.exit(f"{path}: malformed JSON: {error}")
    except (ValueError, RecursionError) as error:
        sys.exit(f"{path}, row {number}: malformed JSON: {error}")
    except (OSError, EOFError, zlib.error) as error:
        sys.exit(f"{path}, row {number}, cannot be read: {error}")


def check_characters(row: dict) -> None:
    """Raises a ValueError if a row holds half of a character: no file or tokenizer takes that."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{half!a} is one half of a character, without the other") from None


def first_character(file: io.TextIOBase) -> str:
    """Returns the first character that is not whitespace; empty if there is none."""
    character = file.read(1)
    while character.isspace():
        character = file.read(1)
    return character


def line_rows(file: io.TextIOBase) -> Iterator[tuple[str, object]]:
    """Yields the text and the value of each line that is not empty."""
    for line in file:
        text = line.strip()
        if text:
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                # It is always line 1 of this text, which tells nothing.
                raise ValueError(f"{error.msg}: column {error.colno}") from None
            yield text, row


def array_rows(file: io.TextIOBase) -> Iterator[tuple[str, object]]:
    """Yields a text and the value of each element of a JSON array."""
    for row in json.loads(file.read()):
        yield json.dumps(row), row


# ============================================================ refusals
def refuse(name: str, split: str, error: Exception) -> NoReturn:
    """Exits with the reason why a data set could not be read."""
    why = in_one_line(error.__cause__ or error)
    no_rows = (
        isinstance(error, (StopIteration, pandas.errors.EmptyDataError))
        or "corresponds to no data" in why
    )
    if no_rows:
        refuse_empty(name, split)
    sys.exit(f"data set {name!r}, split {split!r}, could not be read: {why}")


def refuse_empty(name: str, split: str) -> NoReturn:
    sys.exit(f"data set {name!r}, split {split!r}, holds no rows")
