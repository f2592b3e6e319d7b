"""Turns the rows of a data set into token ids, once: `datasets` keeps the result on disk."""

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import transformers

from common import in_one_line
from preference_recipes.data import answer_column, chat, files, formats, unread
from preference_recipes.data.messages import BadRow

# The settings of a row function that cut rows, or leave them out.
LIMITS = ("max_new_tokens", "max_length")

PLAIN_STRINGS = (
    "strings are read as plain text though the model has a chat template; "
    "--strings_as_messages makes them turns of user and assistant"
)

# A process tokenises this many rows in some seconds.
ROWS_PER_PROCESS = 5_000
MOST_PROCESSES = 32

# Temporary columns: each row's checksum, from which the fingerprint is made, and why a row fits no
# format.
CHECKSUM = "crc"
ERROR = "error"

# Next to the result, and written last: what nothing reads, see `unread.describe`.
UNREAD = "not_read.txt"
# The column by which reward functions get a row's other columns, but those for the template.
KEPT_COLUMNS = "columns"
FOR_TEMPLATES = {"tools", "chat_template_kwargs"}

# What `generate` works on. The processes of `datasets` have it because they are forks: pickled, a
# recipe's function would take the whole module of the recipe along.
forked: dict[str, Any] = {}


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

        These are `notes`, one a line; `roles` of its messages, "" for strings; `row`, its number
        from 1; `answer`, "" if it has none; the checksum. `BadRow` has the number, too.
        """
        as_messages = bool(self.settings.get("strings_as_messages"))
        try:
            row = formats.standard(formats.rename_columns(row, self.columns), as_messages)
            tokenizer = chat.with_variables(self.tokenizer, row.get("chat_template_kwargs"))
            values = self.function(row, tokenizer=tokenizer, **self.settings)
        except BadRow as error:
            raise BadRow(f"row {index + 1}: {error}") from None
        except Exception as error:
            kind = type(error).__name__
            raise BadRow(f"row {index + 1}: {kind}: {in_one_line(error)}") from error
        notes = values.pop("notes", []) + self.note_on_strings(row)
        # Without a prompt nothing is asked: there is nothing to generate from.
        answer = None if values.get("prompt_ids") == [] else row.get("answer")
        return {
            **values,
            "notes": "\n".join(notes),
            "roles": " ".join(formats.roles_of(row, as_messages)),
            "row": index + 1,
            "answer": answer_column.to_text(answer),
            CHECKSUM: zlib.crc32(repr(values).encode()),
            ERROR: "",
        }

    def tokens_of(self, row: dict) -> dict:
        """Returns what is learned from a row; of the copy for reward functions only the names."""
        values = self.convert_row(row, 0)
        names = json.loads(values.get(KEPT_COLUMNS, "{}")).keys() - FOR_TEMPLATES
        return {**values, KEPT_COLUMNS: names, CHECKSUM: None}

    def note_on_strings(self, row: dict) -> list[str]:
        """Returns a note if strings are read as plain text, and could be read as messages."""
        # None: the caller has no such setting.
        reads_plain_text = self.settings.get("strings_as_messages") is False
        has_template = self.tokenizer.chat_template is not None
        if reads_plain_text and has_template and formats.is_plain_text(row):
            return [PLAIN_STRINGS]
        return []


# ============================================================ all rows
def tokenise(name: str, split: str, converter: Converter) -> list[str]:
    """Converts all rows of a data set, unless an earlier run did; returns the result's files."""
    source = files.find(name, split)
    key = cache_key(source, converter)
    # Not next to the data: a folder of `save_to_disk` is the user's own, and may be read-only.
    folder = Path(datasets.config.HF_DATASETS_CACHE).expanduser() / "tokenised" / key
    if not kept_files(folder):
        rows = source.rows()
        for column_name, users_name in converter.columns.items():
            # The held-out sets have `answer`, the training set need not.
            if users_name not in rows.column_names and column_name != "answer":
                sys.exit(
                    f"--columns: data set {name!r} has no column {users_name!r}; "
                    f"it has {rows.column_names}"
                )
        generate(name, rows, converter, folder)
    return kept_files(folder)


def kept_files(folder: Path) -> list[str]:
    """Returns the files that `datasets` wrote into a folder; none unless all are whole."""
    found = folder.glob("*/*/*/*.arrow") if (folder / UNREAD).is_file() else []
    return sorted(str(file) for file in found if not file.parent.name.endswith(".incomplete"))


def generate(name: str, rows: files.Rows, converter: Converter, folder: Path) -> None:
    """Writes what the converter makes of all rows into a folder, whole or not at all."""
    try:
        first = converter.convert_row(next(rows.read(0, 1)), 0)
    except BadRow as error:
        sys.exit(f"data set {name!r}, {error}")
    features = {column: feature_of(column, value) for column, value in first.items()}
    forked.update(rows=rows, converter=converter, first=first)
    processes = number_of_processes(rows.number)
    bounds = np.linspace(1, rows.number, processes + 1).astype(int).tolist()
    try:
        table = datasets.Dataset.from_generator(
            converted_rows,
            features=datasets.Features(features),
            cache_dir=str(folder),
            gen_kwargs={"spans": [range(*span) for span in itertools.pairwise(bounds)]},
            num_proc=processes if processes > 1 else None,
            fingerprint=folder.name,
        )
    finally:
        forked.clear()
    errors = column(table, ERROR)
    if (errors != "").any():
        shutil.rmtree(folder)
        sys.exit(f"data set {name!r}, {errors[errors != ''][0]}")
    not_read = unread.describe(rows.read(0, rows.number), converter.tokens_of)
    (folder / UNREAD).write_text(not_read or "", encoding="utf-8")


def converted_rows(spans: list[range]) -> Iterator[dict]:
    """Yields what the converter makes of some rows; `datasets` calls it, in several processes.

    An exception would not come back whole from another process. So a row that fits no format ends
    the rows with one that holds the error. Row 0 precedes the span that starts at 1.
    """
    converter = forked["converter"]
    for span in spans:
        if span.start == 1:
            yield forked["first"]
        index = span.start
        try:
            for row in forked["rows"].read(span.start, span.stop):
                yield converter.convert_row(row, index)
                index += 1
        except BadRow as error:
            yield {**forked["first"], ERROR: str(error)}
            return


def number_of_processes(rows: int) -> int:
    """Returns how many processes are worth their start for a data set of so many rows.

    One process of each machine tokenises, and takes its share of the cores that it may use.
    """
    if multiprocessing.get_start_method() != "fork":
        return 1
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(min(cores, rows // ROWS_PER_PROCESS, MOST_PROCESSES), 1)


def feature_of(name: str, value) -> datasets.Value | datasets.List:
    """Returns the type of a column, which the row function's value of any row tells."""
    if isinstance(value, list):
        return datasets.List(datasets.Value("bool" if name.endswith("learned") else "int32"))
    kinds = {str: "string", bool: "bool", int: "int64", float: "float64"}
    return datasets.Value(kinds[type(value)])


def column(dataset: datasets.Dataset, name: str) -> np.ndarray:
    """Returns a column of numbers or words as one array.

    It is read in parts: at once it would take half a kilobyte per row.
    """
    parts = dataset.select_columns(name).iter(10_000)
    return np.concatenate([part[name] for part in parts])


# ============================================================ usable rows, and notes on the others
def read_usable(name: str, kept: list[str], settings: dict) -> tuple[datasets.Dataset, list[str]]:
    """Returns the usable rows of what `tokenise` wrote, and notes on what was left out or cut."""
    converted = datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in kept])
    notes = describe_unusable(converted, settings) + describe_notes(converted)
    file = Path(kept[0]).parents[3] / UNREAD  # `datasets` adds three folders
    notes += filter(None, [file.read_text(encoding="utf-8")])
    # The same rows from another path, or written at another time, are the same data.
    content = datasets.fingerprint.Hasher.hash_bytes(column(converted, CHECKSUM).tobytes())
    is_usable = column(converted, "reason") == ""
    converted = converted.remove_columns(["notes", ERROR, CHECKSUM])
    usable = converted.select(np.flatnonzero(is_usable), new_fingerprint=content)
    if len(usable) == 0:
        sys.exit(f"data set {name!r}: no usable row: {'; '.join(notes)}")
    has_answers = (column(usable, "answer") != "").any()
    return usable if has_answers else usable.remove_columns(["answer"]), notes


def describe_unusable(converted: datasets.Dataset, settings: dict) -> list[str]:
    """Returns which rows are left out, by reason, and which are truncated, with the limits.

    Example: `["2 of 9 left out (empty answer): rows 3, 4", "1 truncated (--max_length 12): row 2"]`
    """
    rows = column(converted, "row")
    reasons = column(converted, "reason")
    notes = []
    for reason in np.unique(reasons[reasons != ""]):
        found = rows[reasons == reason]
        why = with_limits(reason, settings)
        notes.append(f"{len(found)} of {len(rows)} left out ({why}): {row_numbers(found)}")
    cut = rows[column(converted, "truncated") & (reasons == "")]
    if len(cut):
        limits = ", ".join(with_limits(name, settings) for name in LIMITS if name in settings)
        notes.append(f"{len(cut)} truncated ({limits}): {row_numbers(cut)}")
    return notes


def with_limits(text: str, settings: dict) -> str:
    """Returns a text with each limit that it names as one would give it: `--max_length 1024`."""
    for name in LIMITS:
        if name in settings:
            text = text.replace(name, f"--{name} {settings[name]}")
    return text


def row_numbers(rows: np.ndarray, most: int = 3) -> str:
    """Returns the first row numbers in words, such as `row 7` or `rows 3, 4, 8 and 2 more`."""
    shown = ", ".join(map(str, rows[:most]))
    if len(rows) > most:
        shown += f" and {len(rows) - most} more"
    return f"row {shown}" if len(rows) == 1 else f"rows {shown}"


def describe_notes(converted: datasets.Dataset) -> list[str]:
    """Returns what the row function noted on usable rows: each kind with its number of rows."""
    counts: collections.Counter[str] = collections.Counter()
    for part in converted.select_columns(["notes", "reason"]).iter(10_000):
        for text, reason in zip(part["notes"], part["reason"]):
            if not reason:
                counts.update(dict.fromkeys(filter(None, text.split("\n"))).keys())
    return [f"{kind}: {count} rows" for kind, count in counts.items()]


# ============================================================ the cache's key
def cache_key(source: files.Source, converter: Converter) -> str:
    """Returns a name for the converted rows, which changes with everything that they depend on."""
    code = [*Path(__file__).parent.glob("*.py"), Path(inspect.getfile(converter.function))]
    key = [
        source.identity(),
        *(file.read_text("utf-8") for file in sorted(code)),
        converter.function.__name__,
        chat.fingerprint(converter.tokenizer),
        converter.columns,
        converter.settings,
    ]
    return datasets.fingerprint.Hasher.hash(key)
