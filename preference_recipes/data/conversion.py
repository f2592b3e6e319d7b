"""Turns the rows of a data set into token ids, once: the result is kept on disk as Arrow files."""

from __future__ import annotations

import collections
import inspect
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import transformers

from common import folders, in_one_line
from preference_recipes.data import answer_column, files, formats, rendering, unread
from preference_recipes.data.messages import BadRow

PLAIN_STRINGS = (
    "strings are read as plain text though the model has a chat template; "
    "--strings_as_messages makes them turns of user and assistant"
)

# A process tokenises this many rows in some seconds.
ROWS_PER_PROCESS = 5_000
MOST_PROCESSES = 32
# Rows that are in memory at a time.
ROWS_AT_A_TIME = 1_000

# Next to the result: what nothing reads, see `unread.describe`.
UNREAD = "not_read.txt"
# A temporary column: each row's checksum, from which the fingerprint is made.
CHECKSUM = "crc"
# The column by which reward functions get a row's other columns, but those for the template.
KEPT_COLUMNS = "columns"
FOR_TEMPLATES = {"tools", "chat_template_kwargs"}


@dataclass
class Converter:
    """Applies a row function to rows, see `dataset.load`.

    Attributes:
        columns: the user's columns by the format's, see `formats.column_names`.
        settings: passed to the function; `max_length` among them.
    """

    function: Callable[..., dict]
    tokenizer: transformers.PreTrainedTokenizerBase
    columns: dict[str, str]
    settings: dict

    def convert_row(self, row: dict, index: int) -> dict:
        """Returns what the row function makes of a row, and columns of our own.

        These are `notes`, one a line; `row`, its number from 1; `answer`, "" if it has none; the
        checksum. `BadRow` has the number, too.
        """
        as_messages = self.settings.get("strings_as_messages")
        try:
            row = formats.standard(formats.rename_columns(row, self.columns))
            tokenizer = rendering.with_variables(self.tokenizer, row.get("chat_template_kwargs"))
            values = self.function(row, tokenizer=tokenizer, **self.settings)
        except BadRow as error:
            raise BadRow(f"row {index + 1}: {error}") from None
        except Exception as error:
            kind = type(error).__name__
            raise BadRow(f"row {index + 1}: {kind}: {in_one_line(error)}") from error
        notes = values.pop("notes", [])
        # None: the caller has no such setting.
        if as_messages is False and tokenizer.chat_template and formats.is_plain_text(row):
            notes.append(PLAIN_STRINGS)
        # Without a prompt nothing is asked: there is nothing to generate from.
        answer = None if values.get("prompt_ids") == [] else row.get("answer")
        return {
            **values,
            "notes": "\n".join(notes),
            "row": index + 1,
            "answer": answer_column.to_text(answer),
            CHECKSUM: zlib.crc32(repr(values).encode()),
        }

    def tokens_of(self, row: dict) -> dict:
        """Returns what is learned from a row; of the copy for reward functions only the names."""
        values = self.convert_row(row, 0)
        names = json.loads(values.get(KEPT_COLUMNS, "{}")).keys() - FOR_TEMPLATES
        return {**values, KEPT_COLUMNS: names, CHECKSUM: None}


# ============================================================ all rows
def tokenise(name: str, split: str, converter: Converter) -> Path:
    """Converts all rows of a data set, unless an earlier run did; returns the result's folder."""
    source = files.find(name, split)
    # Not next to the data: a folder of `save_to_disk` is the user's own, and may be read-only.
    cache = Path(datasets.config.HF_DATASETS_CACHE).expanduser() / "tokenised"
    folder = cache / cache_key(source, converter)
    if folder.is_dir():
        return folder
    rows = source.rows()
    for column_name, users_name in converter.columns.items():
        # The held-out sets have `answer`, the training set need not.
        if users_name not in rows.column_names and column_name != "answer":
            sys.exit(
                f"--columns: data set {name!r} has no column {users_name!r}; "
                f"it has {rows.column_names}"
            )
    temporary = cache / f".{folder.name}.{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        convert(name, rows, converter, temporary)
        not_read = unread.describe(rows.read(0, rows.number), converter.tokens_of)
        (temporary / UNREAD).write_text(not_read or "", encoding="utf-8")
        folders.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def convert(name: str, rows: files.Rows, converter: Converter, folder: Path) -> None:
    """Writes what the converter makes of all rows into a folder, by several processes."""
    processes = number_of_processes(rows.number)
    bounds = np.linspace(0, rows.number, processes + 1).astype(int).tolist()
    faults = multiprocessing.SimpleQueue()
    tasks = [
        (rows, converter, start, stop, folder / f"{start:012d}.arrow", faults)
        for start, stop in itertools.pairwise(bounds)
    ]
    if processes == 1:
        write_rows(*tasks[0])
    else:
        # Forks have the rows and the converter: pickled, a recipe's function would take the whole
        # module of the recipe along.
        fork = multiprocessing.get_context("fork")
        workers = [fork.Process(target=write_rows, args=task) for task in tasks]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            sys.exit(f"data set {name!r}: a process that tokenises ended before its rows did")
    found = []
    while not faults.empty():
        found.append(faults.get())
    if found:
        sys.exit(f"data set {name!r}, {min(found)[1]}")


def write_rows(rows: files.Rows, converter: Converter, start: int, stop: int, file, faults) -> None:
    """Writes the converted rows of a range; at a row that fits no format it ends with its error."""
    given = enumerate(rows.read(start, stop), start)
    try:
        values = converter.convert_row(*next(given)[::-1])
        schema = pyarrow.schema([(name, type_of(name, value)) for name, value in values.items()])
        with (
            pyarrow.OSFile(str(file), "wb") as sink,
            pyarrow.ipc.new_stream(sink, schema) as writer,
        ):
            converted = [values]
            while converted:
                writer.write_batch(pyarrow.RecordBatch.from_pylist(converted, schema))
                some = itertools.islice(given, ROWS_AT_A_TIME)
                converted = [converter.convert_row(row, index) for index, row in some]
    except BadRow as error:
        faults.put((start, str(error)))


def number_of_processes(rows: int) -> int:
    """Returns how many processes are worth their start for a data set of so many rows.

    One process of each machine tokenises, and takes its share of the cores that it may use.
    """
    if not sys.platform.startswith("linux"):  # elsewhere forks are not safe
        return 1
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(min(cores, rows // ROWS_PER_PROCESS, MOST_PROCESSES), 1)


def type_of(name: str, value) -> pyarrow.DataType:
    """Returns the type of a column, which the row function's value of any row tells."""
    if isinstance(value, list):
        return pyarrow.list_(pyarrow.bool_() if name.endswith("learned") else pyarrow.int32())
    return pyarrow.scalar(value).type


def column(dataset: datasets.Dataset, name: str) -> np.ndarray:
    """Returns a column of numbers or words as one array.

    It is read in parts: at once it would take half a kilobyte per row.
    """
    parts = dataset.select_columns(name).iter(10_000)
    return np.concatenate([part[name] for part in parts])


# ============================================================ usable rows, and notes on the others
def read_usable(name: str, folder: Path, settings: dict) -> tuple[datasets.Dataset, list[str]]:
    """Returns the usable rows of what `tokenise` wrote, and notes on what was left out or cut."""
    parts = [datasets.Dataset.from_file(str(file)) for file in sorted(folder.glob("*.arrow"))]
    converted = datasets.concatenate_datasets(parts)
    notes = notes_on(converted, settings)
    notes += filter(None, [(folder / UNREAD).read_text(encoding="utf-8")])
    # The same rows from another path, or written at another time, are the same data.
    content = datasets.fingerprint.Hasher.hash_bytes(column(converted, CHECKSUM).tobytes())
    is_usable = column(converted, "reason") == ""
    converted = converted.remove_columns(["notes", CHECKSUM])
    usable = converted.select(np.flatnonzero(is_usable), new_fingerprint=content)
    if len(usable) == 0:
        sys.exit(f"data set {name!r}: no usable row: {'; '.join(notes)}")
    has_answers = (column(usable, "answer") != "").any()
    return usable if has_answers else usable.remove_columns(["answer"]), notes


def notes_on(converted: datasets.Dataset, settings: dict) -> list[str]:
    """Returns which rows are left out, by reason, which are cut, and what the row function noted.

    Example: `["2 of 9 left out (empty answer): rows 3, 4", "1 truncated (max_length): row 2"]`
    """
    limits = [name for name in settings if name.startswith("max_")]
    rows = column(converted, "row")
    reasons = column(converted, "reason")
    notes = []
    for reason in np.unique(reasons[reasons != ""]):
        found = rows[reasons == reason]
        notes.append(f"{len(found)} of {len(rows)} left out ({reason}): {row_numbers(found)}")
    cut = rows[column(converted, "truncated") & (reasons == "")]
    if len(cut):
        notes.append(f"{len(cut)} truncated ({', '.join(limits)}): {row_numbers(cut)}")
    counts: collections.Counter[str] = collections.Counter()
    for text in column(converted, "notes")[reasons == ""]:
        counts.update(dict.fromkeys(filter(None, text.split("\n"))).keys())
    for name in limits:  # named as one would give it: `--max_length 1024`
        notes = [note.replace(name, f"--{name} {settings[name]}") for note in notes]
    return notes + [f"{kind}: {count} rows" for kind, count in counts.items()]


def row_numbers(rows: np.ndarray, most: int = 3) -> str:
    """Returns the first row numbers in words, such as `row 7` or `rows 3, 4, 8 and 2 more`."""
    shown = ", ".join(map(str, rows[:most]))
    if len(rows) > most:
        shown += f" and {len(rows) - most} more"
    return f"row {shown}" if len(rows) == 1 else f"rows {shown}"


# ============================================================ the cache's key
def cache_key(source: files.Source, converter: Converter) -> str:
    """Returns a name for the converted rows, which changes with everything that they depend on."""
    code = [*Path(__file__).parent.glob("*.py"), Path(inspect.getfile(converter.function))]
    key = [
        source.identity(),
        *(file.read_text("utf-8") for file in sorted(code)),
        converter.function.__name__,
        rendering.fingerprint(converter.tokenizer),
        converter.columns,
        converter.settings,
    ]
    return datasets.fingerprint.Hasher.hash(key)
