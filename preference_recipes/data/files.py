"""Reads the rows of a data set from the hub, a local file or a folder of files.

JSON is read row by row, and a CSV as text, so that every value stays as it is. `datasets` would
guess a column's type and turn "007" into 7. It reads formats that have types, such as parquet.
"""

from __future__ import annotations

import csv
import functools
import glob
import gzip
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
from datasets.data_files import FILES_TO_IGNORE, DataFilesDict, get_data_patterns
from datasets.packaged_modules.json.json import Json

from common import one_line, pluralize, print_once, refuse

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")  # all but parquet may be gzipped

# The keys of messages, OpenAI's and ShareGPT's, and of tools, nested and flat.
CHAT_KEYS = [{"role", "content"}, {"from", "value"}, {"type", "function"}, {"name", "parameters"}]
# Longer than any cell; the default limit is 131,072 characters.
csv.field_size_limit(2**31 - 1)


def find(name: str, split: str) -> TypedRows | TextFiles:
    """Finds a hub data set (`owner/name` or `owner/name:config`), a local file, or a folder.

    A single file is the split `train`; file names in a folder say the split, as on the hub.
    """
    path = Path(name)
    is_local = path.exists()
    try:
        return find_local(path, split) if is_local else find_on_hub(name, split)
    except Exception as error:
        where = "" if is_local else " is no file or folder here, and on the hub"
        refuse(f"data set {name!r}{where}: {one_line(error)}")


def find_local(path: Path, split: str) -> TypedRows | TextFiles:
    """Finds the rows of a file or a folder."""
    # Links are not resolved: those of the hub's cache point to files without a suffix.
    splits = splits_of_folder(path) if path.is_dir() else {"train": [path.absolute()]}
    files = [file for file in splits.get(split, []) if is_data_file(file)]
    if not files:
        is_arrow = any(file.suffix == ".arrow" for file in splits.get(split, []))
        advice = ". `save_to_disk` wrote it: write it with `to_parquet`" if is_arrow else ""
        none = f"holds no {' '.join(SUFFIXES)}, or one of these and .gz"
        state = none if split in splits else "is not there"
        refuse(f"split {split!r} {state}; its splits: {', '.join(splits)}{advice}")
    if any(file.suffix != ".parquet" for file in files):
        return TextFiles(files)
    names = [glob.escape(str(file)) for file in files]
    rows = datasets.load_dataset("parquet", data_files=names, split="train")
    return TypedRows(rows, files[0].parent)


def refuse_missing(name: str) -> None:
    """Ends the run if a name can only be a local file's or folder's, and there is none."""
    is_local = name.removesuffix(".gz").endswith(SUFFIXES) or name.startswith(("/", ".", "~"))
    if is_local and not Path(name).exists():
        refuse(f"data file {name!r} does not exist (looked in {Path.cwd()})")


def stem(name: str) -> str:
    """Returns the last part of a data set's name, without the suffix of a data file."""
    if not Path(name).exists():
        name = name.partition(":")[0]  # the hub's name:config
    last = Path(name).name.removesuffix(".gz")
    return Path(last).stem if last.endswith(SUFFIXES) else last


def is_data_file(path: Path) -> bool:
    # `datasets` ignores some JSON files: dataset_infos.json and the like.
    return path.name.removesuffix(".gz").endswith(SUFFIXES) and path.name not in FILES_TO_IGNORE


# ============================================================ JSON and CSV
class TextFiles:
    """The rows of JSON and CSV files. Only one row at a time is in memory."""

    def __init__(self, files: list[Path]):
        self.files = files
        self.folder = files[0].parent  # paths of images are relative to it
        stats = [(str(file), file.stat()) for file in files]
        # It changes with every change of the rows.
        self._fingerprint = repr([(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats])

    @functools.cached_property
    def summary(self) -> tuple[int, list[str]]:
        """The number of rows, and all columns in the order of their first appearance."""
        n_rows = 0
        names: dict[str, None] = {}
        for row in itertools.chain.from_iterable(map(rows_of, self.files)):
            n_rows += 1
            names.update(dict.fromkeys(row))
        return n_rows, list(names)

    def __len__(self) -> int:
        return self.summary[0]

    def select(self, indices: range) -> Iterator[dict]:
        """Yields the rows of a range, with None for columns that only other rows have."""
        _, names = self.summary
        rows = itertools.chain.from_iterable(map(rows_of, self.files))
        for row in itertools.islice(rows, indices.start, indices.stop):
            yield {name: row.get(name) for name in names}


def rows_of(path: Path) -> Iterator[dict]:
    """Yields the rows of a file. An unreadable row ends the run with its number."""
    open_file = gzip.open if path.suffix == ".gz" else open
    number = 1
    try:
        # The encoding skips a byte order mark, which Windows writes. Lines end only at a line feed,
        # not at Unicode's other line ends.
        with open_file(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            for row in parsed(file, path.name.removesuffix(".gz").endswith(".csv")):
                if not isinstance(row, dict):
                    raise ValueError(f"expected a JSON object, found {json.dumps(row):.60}")
                if None in row:  # the key of surplus cells in `csv`
                    raise ValueError("more cells than the header: quote cells that hold commas")
                yield row
                number += 1
    except Exception as error:
        refuse(f"{path}, row {number}: {one_line(error)}")


def parsed(file, is_csv: bool) -> Iterable:
    """Returns the rows of an open file. A JSON array is read into memory as a whole."""
    if is_csv:
        reader = csv.DictReader(file, strict=True)
        object_of([(name, None) for name in reader.fieldnames or [] if name], kind="columns")
        return reader
    decoder = json.JSONDecoder(object_pairs_hook=object_of)
    is_array = file.read(1000).lstrip().startswith("[")
    file.seek(0)
    if is_array:
        return decoder.decode(file.read())
    return map(decoder.decode, filter(None, map(str.strip, file)))


def object_of(pairs: list[tuple[str, Any]], kind: str = "keys") -> dict:
    """Returns a JSON object. Raises `ValueError` on a duplicate name, whose value would be lost."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two {kind} are named {duplicate!r}")
    return result


# ============================================================ formats with types, such as parquet
class TypedRows:
    """The rows of a data set with column types, by which each dict has the keys of all others.

    Templates ask whether a key is present, so `select` removes keys that are null.
    """

    def __init__(self, dataset: datasets.Dataset, folder: Path = Path()):
        self.dataset = dataset
        self.folder = folder
        self._fingerprint = dataset._fingerprint
        keep_files(dataset.info.features)  # `dataset.features` is a copy

    def __len__(self) -> int:
        return len(self.dataset)

    def select(self, indices: range) -> Iterator[dict]:
        """Yields the rows of a range."""
        types = self.dataset.features
        for row in self.dataset.select(indices):
            yield {name: unpadded(row[name], types[name], name == "tools") for name in types}


def keep_files(feature) -> None:
    """Makes `datasets` return images as files instead of decoding them."""
    if isinstance(feature, datasets.Image):
        feature.decode = False
    below = feature.values() if isinstance(feature, dict) else [vars(feature).get("feature")]
    for part in filter(None, below):
        keep_files(part)


def unpadded(value: Any, feature, in_chat: bool = False) -> Any:
    """Returns a value without the null keys that only the type of a chat adds."""
    if isinstance(feature, dict) and value is not None:
        in_chat = in_chat or any(keys <= feature.keys() for keys in CHAT_KEYS)
        return {
            name: unpadded(part, feature[name], in_chat)
            for name, part in value.items()
            if part is not None or not in_chat
        }
    if isinstance(feature, (datasets.List, datasets.LargeList)) and value is not None:
        return [unpadded(part, feature.feature, in_chat) for part in value]
    return value


# ============================================================ folders, and the hub
def splits_of_folder(folder: Path) -> dict[str, list[Path]]:
    """Returns the files of a folder by split; prints the data files that are in no split."""
    name = str(folder.resolve())
    escaped = glob.escape(name)  # `datasets` would read the characters `*?[` as a pattern
    if escaped == name:
        # This also respects the data card of a cloned hub folder.
        split_files = datasets.load_dataset_builder(name).config.data_files
    else:
        split_files = DataFilesDict.from_patterns(get_data_patterns(escaped), base_path=escaped)
    splits = {str(split): list(map(Path, split_files[split])) for split in split_files}
    used = {file.resolve() for files in splits.values() for file in files}
    in_folder = filter(is_data_file, sorted(folder.rglob("*")))
    unread = [str(file.relative_to(folder)) for file in in_folder if file.resolve() not in used]
    if unread:
        count = f"{pluralize(len(unread), 'file')} in none of the splits {sorted(splits)}"
        print_once(f"NOTE: folder {str(folder)!r}: {count}, so not read: {', '.join(unread[:5])}")
    return splits


def find_on_hub(name: str, split: str) -> TypedRows | TextFiles:
    """Downloads a data set from the hub; for JSON, only the files of one split."""
    hub_name, _, config = name.partition(":")
    builder = datasets.load_dataset_builder(hub_name, config or None)
    if not isinstance(builder, Json) or builder.config.field is not None:
        builder.download_and_prepare()
        return TypedRows(builder.as_dataset(split))
    files = builder.config.data_files
    if split not in files:
        refuse(f"data set {name!r} has no split {split!r}; it has {', '.join(map(str, files))}")
    settings = datasets.DownloadConfig(token=builder.token, storage_options=builder.storage_options)
    manager = datasets.DownloadManager(base_path=builder.base_path, download_config=settings)
    downloaded = manager.download_and_extract(files[split])
    return TextFiles(list(map(Path, manager.iter_files(downloaded))))
