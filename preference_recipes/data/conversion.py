"""Tokenises a data set once, caches the result on disk, and names it by its content."""

from __future__ import annotations

import collections
import contextlib
import inspect
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import transformers
from tqdm import tqdm

from preference_recipes.data import cache, chat, files, formats, other_formats, workers
from preference_recipes.data.messages import BadRow

# Lists of truth values among the columns that a row function may return. All other lists are of
# token ids.
BOOLEAN_COLUMNS = {"targets"}

# The settings of a row function that cut rows, or leave them out.
LIMITS = ("max_new_tokens", "max_length")

PLAIN_STRINGS = (
    "strings are read as plain text though the model has a chat template; "
    "--strings_as_messages makes them turns of user and assistant"
)

# This many rows are converted, and then written, at once.
ROWS_AT_ONCE = 1_000

# Fewer rows take less than half a minute, and no bar is shown.
ROWS_WITH_BAR = 20_000

# A temporary column: each row's checksum, from which the fingerprint is made. Do not rename it:
# removing a column adds its name to the fingerprint, and older checkpoints would be refused.
CHECKSUM = "crc"


@dataclass
class Converter:
    """Applies a row function to rows; it can be sent to other processes.

    Attributes:
        function: see `dataset.load`.
        columns: the user's columns by the format's, see `formats.column_names`.
        settings: passed to the function; `max_length` among them.
    """

    function: Callable[..., dict]
    tokenizer: transformers.PreTrainedTokenizerBase
    columns: dict[str, str]
    settings: dict

    def convert_rows(self, rows: files.Rows, span: range) -> dict[str, list]:
        """Returns the columns of the result for some rows.

        Raises:
            BadRow: a row fits no format; with its number.
            UnicodeDecodeError: a row is not UTF-8.
        """
        entries = rows.table.select(span)
        converted = [
            self.convert_row(rows.row(entry), index) for index, entry in zip(span, entries)
        ]
        return {name: [row[name] for row in converted] for name in converted[0]}

    def convert_row(self, row: dict, index: int) -> dict:
        """Returns what the row function makes of a row, and columns of our own.

        These are `notes`, one a line; `longest`, the tokens of the row's longest sequence before
        it was cut; `roles`, those of its messages with blanks between them, "" for strings; `row`,
        the row's number from 1; `answer`, if the data has it; and the checksum.
        """
        row = rename_columns(row, self.columns)
        as_messages = bool(self.settings.get("strings_as_messages"))
        try:
            row = other_formats.standard(row, as_messages)
            values = self.function(row, tokenizer=self.tokenizer, **self.settings)
        except BadRow as error:
            raise BadRow(f"row {index + 1}: {error}") from None
        notes = values.pop("notes", []) + self.note_on_strings(row)
        longest = values.pop("longest", values["length"])
        return {
            **with_typed_lists(values),
            "notes": "\n".join(notes),
            "longest": longest,
            "roles": " ".join(formats.roles_of(row, as_messages)),
            "row": index + 1,
            **answer_of(row, values),
            CHECKSUM: checksum(values),
        }

    def note_on_strings(self, row: dict) -> list[str]:
        """Returns a note if strings are read as plain text, and could be read as messages."""
        # None: the caller has no such setting.
        reads_plain_text = self.settings.get("strings_as_messages") is False
        has_template = self.tokenizer.chat_template is not None
        if reads_plain_text and has_template and formats.is_plain_text(row):
            return [PLAIN_STRINGS]
        return []


def tokenise(name: str, split: str, converter: Converter) -> Path:
    """Reads a data set and converts all its rows, unless an earlier run has cached the result.

    Returns:
        The cached file.

    Raises:
        SystemExit: see `dataset.load`.
    """
    cache.check_root()
    rows = files.load(name, split)
    check_columns(name, rows, converter.columns)
    key = cache_key(rows, converter)
    # Not next to the data: a folder of `save_to_disk` is the user's own, and may be read-only.
    file = cache.root() / "tokenised" / f"{key}.arrow"
    record = cache.Record(key)
    try:
        with record.locked():
            if not record.is_true():
                convert(rows, converter, file)
                record.write([file])
    except BadRow as error:
        sys.exit(f"data set {name!r}, {error}")
    except UnicodeDecodeError as error:
        sys.exit(f"data set {name!r} is not UTF-8: {error}")
    except BrokenProcessPool:
        sys.exit(
            f"data set {name!r}: one of several processes that tokenise it died, possibly for lack "
            "of memory. There are fewer of them if the run may use fewer cores (taskset)"
        )
    return file


def convert(rows: files.Rows, converter: Converter, file: Path) -> None:
    """Writes what the converter makes of all rows to a file, whole or not at all.

    Raises:
        BadRow, UnicodeDecodeError, BrokenProcessPool: see `Converter` and `workers.map_in_order`.
    """
    n_rows = len(rows.table)
    spans = [
        range(start, min(start + ROWS_AT_ONCE, n_rows)) for start in range(0, n_rows, ROWS_AT_ONCE)
    ]
    convert_span = partial(converter.convert_rows, rows)
    processes = workers.number_for(n_rows, convert_span)
    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(workers.map_in_order(convert_span, spans, processes)) as parts:
        parts_shown = with_bar(parts, n_rows)
        # The function ignores the rows of `map`, which only writes to the file, in order, what the
        # workers made. So their number changes nothing in the file.
        rows.table.map(
            lambda _rows: next(parts_shown),
            batched=True,
            batch_size=ROWS_AT_ONCE,
            remove_columns=rows.table.column_names,
            cache_file_name=str(file),
            load_from_cache_file=False,
            new_fingerprint=file.stem,
        )


def with_bar(parts: Iterator[dict[str, list]], rows: int) -> Iterator[dict[str, list]]:
    """Yields the parts of a data set, and shows a bar while they are made, if there are many."""
    with tqdm(
        total=rows,
        desc="tokenising",
        unit=" rows",
        disable=rows < ROWS_WITH_BAR,
        mininterval=0.5 if sys.stderr.isatty() else 10,
    ) as bar:
        for part in parts:
            bar.update(len(part[CHECKSUM]))
            yield part


# ============================================================ the user's columns
def check_columns(name: str, rows: files.Rows, columns: dict[str, str]) -> None:
    """Exits if a column that the user named is in no row of the data.

    `answer` may be missing: the held-out sets have it, the training set need not.
    """
    for column_name, users_name in columns.items():
        if users_name not in rows.column_names and column_name != "answer":
            sys.exit(
                f"--columns: data set {name!r} has no column {users_name!r}; "
                f"it has {rows.column_names}"
            )


def rename_columns(row: dict, columns: dict[str, str]) -> dict:
    """Returns a row under a format's names. The user's columns take precedence over the data's own.

    Example: with `{"prompt": "question"}`, the row `{"question": "Why?", "text": "a"}` becomes
    `{"question": "Why?", "prompt": "Why?"}`, see `hidden_columns`.
    """
    hidden = hidden_columns(columns)
    renamed = {name: value for name, value in row.items() if name not in hidden}
    for format_name, users_name in columns.items():
        if users_name in row:
            renamed[format_name] = row[users_name]
    return renamed


def hidden_columns(columns: dict[str, str]) -> set[str]:
    """Returns the columns of the data that would take precedence over those that the user named.

    Naming a column of one format switches off those that are looked for before it.
    """
    if "prompt" in columns or "completion" in columns:
        return {"messages", "text"}
    if columns.keys() & {"instruction", "input", "output"}:
        others = {"messages", "prompt", "completion", "text", "conversations"}
        return others - columns.keys()
    if "conversations" in columns:
        return {"messages", "prompt", "completion", "text"} - columns.keys()
    if "text" in columns:
        return {"messages", "prompt", "completion", "conversations", "instruction"}
    return set()


# ============================================================ columns of the result
def with_typed_lists(values: dict) -> dict:
    """Returns the values with every list as an array that has a type, even if it is empty.

    `datasets` infers types from the first 1,000 rows. If all of those are unusable their lists are
    empty, so we state the types.
    """
    typed = {}
    for column_name, value in values.items():
        if isinstance(value, list):
            value = np.array(value, dtype=bool if column_name in BOOLEAN_COLUMNS else int)
        typed[column_name] = value
    return typed


def answer_of(row: dict, values: dict) -> dict[str, str]:
    """Returns the column `answer` of a row whose data has one, else no column."""
    if "answer" not in row:
        return {}
    # Without a prompt nothing is asked: there is nothing to generate from.
    nothing_asked = values.get("prompt_ids") == []
    if row["answer"] is None or nothing_asked:
        return {"answer": ""}
    return {"answer": str(row["answer"])}


def checksum(values: dict) -> int:
    """Returns the checksum of what a row function returned; the order of the keys counts.

    The fingerprint of the data is made of these numbers, and a checkpoint holds that fingerprint:
    a change here, or in what a row function returns, makes resume refuse older checkpoints.
    """
    return zlib.crc32(repr(values).encode())


def column(dataset: datasets.Dataset, name: str) -> np.ndarray:
    """Returns a column of numbers or words as one array.

    It is read in parts: read at once it would take half a kilobyte per row.
    """
    parts = dataset.select_columns(name).iter(10_000)
    return np.concatenate([part[name] for part in parts])


# ============================================================ usable rows, and notes on the others
def read_usable(name: str, file: Path, settings: dict) -> tuple[datasets.Dataset, list[str]]:
    """Returns the usable rows of what `tokenise` wrote, and notes on what was left out or cut.

    Args:
        settings: those of the row function.

    Raises:
        SystemExit: no row is usable.
    """
    converted = datasets.Dataset.from_file(str(file))
    notes = describe_unusable(converted, settings) + describe_notes(converted)
    usable = select_usable(converted)
    if len(usable) == 0:
        sys.exit(f"data set {name!r}: no usable row: {'; '.join(notes)}")
    return usable, notes


def select_usable(converted: datasets.Dataset) -> datasets.Dataset:
    """Returns the usable rows, under a fingerprint of all rows' content."""
    reasons = column(converted, "reason")
    # The same rows from another path, or written at another time, are the same data.
    content = datasets.fingerprint.Hasher.hash_bytes(column(converted, CHECKSUM).tobytes())
    converted = converted.remove_columns(["notes", "longest"])
    usable = converted.select(np.flatnonzero(reasons == ""), new_fingerprint=content)
    superfluous = [CHECKSUM]
    # `any` reads until it finds the first answer.
    if "answer" in usable.column_names and not any(usable["answer"]):
        superfluous.append("answer")
    return usable.remove_columns(superfluous)


def describe_unusable(converted: datasets.Dataset, settings: dict) -> list[str]:
    """Returns which rows are left out, by reason, and which are truncated, with the limits.

    Example: `["2 of 9 left out (empty answer): rows 3, 4",
    "1 truncated (--max_length 12, the longest has 17 tokens): row 2"]`
    """
    rows = column(converted, "row")
    reasons = column(converted, "reason")
    lengths = column(converted, "longest")
    notes = []
    for reason in np.unique(reasons[reasons != ""]):
        is_meant = reasons == reason
        why = with_limits(reason, settings)
        if why != reason:
            why += f", the longest has {lengths[is_meant].max():,} tokens"
        if reason == formats.NO_ASSISTANT:
            why += f", found {roles_in(converted.select(np.flatnonzero(is_meant)))}"
        count = f"{is_meant.sum()} of {len(reasons)}"
        notes.append(f"{count} left out ({why}): {row_numbers(rows[is_meant])}")

    is_cut = column(converted, "truncated") & (reasons == "")
    if is_cut.any():
        limits = [with_limits(name, settings) for name in LIMITS if name in settings]
        longest = f"the longest has {lengths[is_cut].max():,} tokens"
        why = ", ".join([*limits, longest])
        notes.append(f"{is_cut.sum()} truncated ({why}): {row_numbers(rows[is_cut])}")
    return notes


def with_limits(text: str, settings: dict) -> str:
    """Returns a text with each limit that it names as one would give it: `--max_length 1024`."""
    for name in LIMITS:
        if name in settings:
            text = text.replace(name, f"--{name} {settings[name]}")
    return text


def roles_in(converted: datasets.Dataset) -> str:
    """Returns the roles of all messages in some rows, such as `bot, user`; `none` without any."""
    roles = {role for text in np.unique(column(converted, "roles")) for role in text.split()}
    return ", ".join(sorted(roles)) or "none"


def row_numbers(rows: np.ndarray, most: int = 3) -> str:
    """Returns the first row numbers in words, such as `row 7` or `rows 3, 4, 8 and 2 more`."""
    shown = ", ".join(map(str, rows[:most]))
    if len(rows) > most:
        shown += f" and {len(rows) - most} more"
    return f"row {shown}" if len(rows) == 1 else f"rows {shown}"


def describe_notes(converted: datasets.Dataset) -> list[str]:
    """Returns what the row function noted on usable rows: each kind once, with its number of rows.

    Where rows of a kind have examples, the first is shown. Example, with a tab before each example:

        row 1    tools are not written
                 answers do not continue the prompt    it ends '<think>'
        row 2    tools are not written
        returned ["tools are not written: 2 rows",
                  "answers do not continue the prompt: 1 rows (row 1: it ends '<think>')"]
    """
    counts: collections.Counter[str] = collections.Counter()
    examples: dict[str, str] = {}
    for part in converted.select_columns(["notes", "reason", "row"]).iter(10_000):
        for text, reason, row in zip(part["notes"], part["reason"], part["row"]):
            if reason or not text:
                continue
            for kind, example in first_of_each_kind(text, row).items():
                counts[kind] += 1
                examples.setdefault(kind, example)
    return [f"{kind}: {count} rows{examples[kind]}" for kind, count in counts.items()]


def first_of_each_kind(text: str, row: int) -> dict[str, str]:
    """Returns the kinds of a row's notes, each with its first example as it is printed.

    Args:
        text: the notes, one a line, see `chat.note`.
    """
    kinds: dict[str, str] = {}
    for line in text.split("\n"):
        kind, _, example = line.partition("\t")
        kinds.setdefault(kind, f" (row {row}: {example})" if example else "")
    return kinds


# ============================================================ the cache's key
def cache_key(rows: files.Rows, converter: Converter) -> str:
    """Returns a name for the converted rows, which changes with everything that they depend on."""
    folder = Path(__file__).parent
    key = [
        rows.table._fingerprint,
        *(file.read_text("utf-8") for file in sorted(folder.glob("*.py"))),
        source_of(converter.function),
        chat.fingerprint(converter.tokenizer),
        converter.columns,
        converter.settings,
    ]
    return datasets.fingerprint.Hasher.hash(key)


def source_of(function: Callable) -> str:
    """Returns the source of a function and of those functions of its own module that it calls.

    So the data is not tokenised again when the rest of a recipe changes.
    """
    source = inspect.getsource(function)
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        is_own = inspect.isfunction(called) and called.__module__ == function.__module__
        if is_own and called is not function:
            source += source_of(called)
    return source
