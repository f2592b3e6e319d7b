"""Loads the data sets of a run as token ids.

The way of a row: `load_data` -> `load` -> `tokenise`, once for a set, whose result is kept on disk
-> `Converter.convert_row` -> a row function, such as `formats.preference_row`.
"""

from __future__ import annotations

import collections
import inspect
import itertools
import marshal
import multiprocessing
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow
import transformers
from accelerate.utils import gather_object

from common import as_list, distributed, folders, in_one_line
from preference_recipes.data import files, formats, rendering, unread
from preference_recipes.data.messages import BadRow

ROWS_PER_PROCESS = 5_000  # a process tokenises so many in some seconds
MOST_PROCESSES = 32
ROWS_AT_A_TIME = 1_000  # that are in memory

UNREAD = "not_read.txt"  # next to the result: what nothing reads, see `unread.describe`
CHECKSUM = "crc"  # a temporary column: each row's checksum, from which the fingerprint is made
# Between the answers of a list, any of which is right: ASCII's record separator.
BETWEEN = "\x1e"

# Columns of which `--strings_as_messages` makes turns, where they are strings.
TEXTS = ("messages", "prompt", "completion", "chosen", "rejected")
PLAIN_STRINGS = (
    "strings are read as plain text though the model has a chat template; "
    "--strings_as_messages makes them turns of user and assistant"
)
NO_ANSWER = "column 'answer' holds an object, which no response is compared with"


class Data(NamedTuple):
    """The data of a run, as token ids.

    Attributes:
        train: the usable rows of all training sets one after the other.
        starts: the first row of each training set.
        eval_sets: the held-out sets by the prefixes of their tags.
        converter: turns a row into token ids; all these sets went through it.
    """

    train: datasets.Dataset
    starts: list[int]
    eval_sets: dict[str, datasets.Dataset]
    converter: Converter

    @property
    def fingerprints(self) -> dict[str, Any]:
        """Stand for the content of the sets: their rows, the tokenizer, what was cut."""
        held_out = {}
        for prefix, rows in self.eval_sets.items():
            content = [rows._fingerprint]  # of what a model reads; exact match reads the answers
            if "answer" in rows.column_names:
                content += rows["answer"]
            held_out[prefix] = datasets.fingerprint.Hasher.hash(content)
        return {"data": self.train._fingerprint, "held-out data": held_out}


def load_data(accelerator, args, tokenizer, *, function, **settings) -> Data:
    """Loads and tokenises the training sets and the held-out sets that the arguments name.

    All processes must call it.

    Args:
        function: makes token ids of a row, see `Converter`.
        settings: passed to `function`, besides `max_length` and `strings_as_messages`.
    """
    settings |= dict(strings_as_messages=args.strings_as_messages, max_length=args.max_length)
    converter = Converter(function, tokenizer, formats.column_names(args.columns), settings)
    names = as_list(args.dataset_name)
    sets = [load(accelerator, name, args.dataset_split, converter) for name in names]
    starts = [sum(map(len, sets[:place])) for place in range(len(sets))]
    train = sets[0]
    if len(sets) > 1:
        # Only held-out sets are asked for answers, and not every set may have them.
        columns = [name for name in train.column_names if name != "answer"]
        train = datasets.concatenate_datasets([rows.select_columns(columns) for rows in sets])
        content = datasets.fingerprint.Hasher.hash([rows._fingerprint for rows in sets])
        train = train.select(range(len(train)), new_fingerprint=content)
    eval_sets = load_evaluation_sets(
        accelerator, args.eval_dataset_name or [], args.eval_dataset_split, converter
    )
    return Data(train, starts, eval_sets, converter)


def load_evaluation_sets(
    accelerator, names: list[str], split: str, converter: Converter
) -> dict[str, datasets.Dataset]:
    """Loads held-out sets by the prefix of their tags: `eval/`, or `eval/<name>/` of several."""
    prefixes = [f"eval/{files.stem(name)}/" for name in names] if len(names) > 1 else ["eval/"]
    if len(set(prefixes)) < len(names):
        sys.exit(f"--eval_dataset_name {names}: two sets would log under the same name")
    return {
        prefix: load(accelerator, name, split, converter) for prefix, name in zip(prefixes, names)
    }


def load(accelerator, name: str, split: str, converter: Converter) -> datasets.Dataset:
    """Returns the usable rows of a data set as token ids; prints which were left out, and why.

    They have the columns of the row function, `row`, the number in the file (from 1), and `answer`
    as text, where the data has one.
    """
    accelerator.print(f"reading {name} ...", flush=True)
    # The first process of each machine fills the cache, and the others read what it wrote.
    is_first = accelerator.is_local_main_process
    folder = distributed.all_or_none(accelerator, is_first, tokenise, name, split, converter)
    first = accelerator.process_index - accelerator.local_process_index
    folder = gather_object([folder])[first]
    usable, notes = distributed.all_or_none(
        accelerator, True, read_usable, name, folder, converter.settings
    )
    accelerator.print("; ".join([f"data {name}: {len(usable)} usable rows", *notes]))
    return usable


@dataclass
class Converter:
    """Applies a row function to rows.

    Attributes:
        function: called as `function(row, tokenizer=tokenizer, **settings)`. It returns columns;
            among them `length`, the tokens of the row (of a pair, those of both sequences),
            `reason`, why it is left out ("" if it is not), `truncated`, whether something was cut
            off, and maybe `notes` for the user. It raises `BadRow`.
        columns: the user's columns by the format's, see `formats.column_names`.
        settings: passed to the function; `max_length` among them.
    """

    function: Callable[..., dict]
    tokenizer: transformers.PreTrainedTokenizerBase
    columns: dict[str, str]
    settings: dict

    def convert_row(self, row: dict, index: int) -> dict:
        """Returns what the row function makes of a row, and columns of our own.

        These are `notes`, one a line; `row`, its number from 1; `answer`, "" if it has none.
        `BadRow` has the number, too.
        """
        try:
            row = formats.standard(row, self.columns)
            tokenizer = rendering.with_variables(self.tokenizer, row.get("chat_template_kwargs"))
            values = self.function(row, tokenizer=tokenizer, **self.settings)
        except Exception as error:
            kind = "" if isinstance(error, BadRow) else f"{type(error).__name__}: "
            raise BadRow(f"row {index + 1}: {kind}{in_one_line(error)}") from error
        notes = values.pop("notes", [])
        # None: the caller has no such setting.
        reads_strings = self.settings.get("strings_as_messages") is False
        kinds = {type(row[name]) for name in TEXTS if row.get(name) is not None}
        if reads_strings and tokenizer.chat_template and kinds == {str}:
            notes.append(PLAIN_STRINGS)
        answer = ""
        if values.get("prompt_ids") != []:  # else nothing is asked: there is nothing to generate
            try:
                answer = answer_text(row.get("answer"))
            except ValueError:
                notes.append(NO_ANSWER)
        return {**values, "notes": "\n".join(notes), "row": index + 1, "answer": answer}


def answer_text(answer: Any) -> str:
    """Returns a column `answer` as a text; its answers, any of which is right, are its parts."""
    values = answer if isinstance(answer, (list, tuple)) else [answer]
    if any(isinstance(value, (dict, list, tuple)) for value in values):
        raise ValueError(NO_ANSWER)
    return BETWEEN.join(str(value) for value in values if value is not None and value != "")


# ============================================================ all rows
def tokenise(name: str, split: str, converter: Converter) -> Path:
    """Converts all rows of a data set, unless an earlier run did; returns the result's folder."""
    source = files.find(name, split)
    code = [*Path(__file__).parent.glob("*.py"), Path(inspect.getfile(converter.function))]
    key = [  # all that the result depends on
        source.identity,
        *(file.read_text("utf-8") for file in sorted(code)),
        converter.function.__name__,
        rendering.fingerprint(converter.tokenizer),
        converter.columns,
        converter.settings,
    ]
    # Not next to the data: a folder of `save_to_disk` is the user's own, and may be read-only.
    cache = Path(datasets.config.HF_DATASETS_CACHE).expanduser() / "tokenised"
    folder = cache / datasets.fingerprint.Hasher.hash(key)
    if folder.is_dir():
        return folder
    rows = source.rows()
    if rows.number == 0:
        sys.exit(f"data set {name!r}, split {split!r}, holds no rows")
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
        not_read = unread.describe(rows.read(0, rows.number), converter)
        (temporary / UNREAD).write_text(not_read, encoding="utf-8")
        folders.flush(*temporary.iterdir(), temporary)
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another run was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def convert(name: str, rows: files.Rows, converter: Converter, folder: Path) -> None:
    """Writes what the converter makes of all rows into a folder, by as many processes as pay.

    One process of each machine tokenises, and takes its share of the cores that it may use.
    """
    processes = 1
    if sys.platform.startswith("linux"):  # elsewhere forks are not safe
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        processes = max(min(cores, rows.number // ROWS_PER_PROCESS, MOST_PROCESSES), 1)
    bounds = np.linspace(0, rows.number, processes + 1).astype(int).tolist()
    faults = multiprocessing.SimpleQueue()
    tasks = [
        (rows, converter, start, stop, folder / f"{start:012d}.arrow", faults)
        for start, stop in itertools.pairwise(bounds)
    ]
    # Forks have the rows and the converter: pickled, a recipe's function would take the whole
    # module of the recipe along.
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=write_rows, args=task) for task in tasks[1:]]
    for worker in workers:
        worker.start()
    write_rows(*tasks[0])
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        sys.exit(f"data set {name!r}: a process that tokenises ended before its rows did")
    if not faults.empty():
        found = [faults.get() for _ in tasks if not faults.empty()]
        sys.exit(f"data set {name!r}, {min(found)[1]}")


def write_rows(rows: files.Rows, converter: Converter, start: int, stop: int, file, faults) -> None:
    """Writes the converted rows of a range; at a row that fits no format it ends with its error."""

    def converted(row: dict, index: int) -> dict:
        values = converter.convert_row(row, index)
        read = {name: value for name, value in values.items() if name not in ("notes", "answer")}
        return {**values, CHECKSUM: zlib.crc32(marshal.dumps(read, 0))}

    given = zip(rows.read(start, stop), range(start, stop))
    try:
        some = [converted(*next(given))]
        schema = pyarrow.schema([(name, type_of(name, value)) for name, value in some[0].items()])
        with (
            pyarrow.OSFile(str(file), "wb") as sink,
            pyarrow.ipc.new_stream(sink, schema) as writer,
        ):
            while some:
                writer.write_batch(pyarrow.RecordBatch.from_pylist(some, schema))
                some = [converted(*each) for each in itertools.islice(given, ROWS_AT_A_TIME)]
    except BadRow as error:
        faults.put((start, str(error)))


def type_of(name: str, value) -> pyarrow.DataType:
    """Returns the type of a column, which the row function's value of any row tells."""
    if isinstance(value, list):
        return pyarrow.list_(pyarrow.bool_() if name.endswith("learned") else pyarrow.int32())
    return pyarrow.scalar(value).type


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
        counts.update(set(filter(None, text.split("\n"))))
    for name in limits:  # named as one would give it: `--max_length 1024`
        notes = [note.replace(name, f"--{name} {settings[name]}") for note in notes]
    return notes + [f"{kind}: {count} rows" for kind, count in sorted(counts.items())]


def row_numbers(rows: np.ndarray) -> str:
    """Returns the first row numbers in words, such as `row 7` or `rows 3, 4, 8 and 2 more`."""
    shown = ", ".join(map(str, rows[:3]))
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    return f"row {shown}" if len(rows) == 1 else f"rows {shown}{more}"


def column(dataset: datasets.Dataset, name: str) -> np.ndarray:
    """Returns a column of numbers or words as one array.

    It is read in parts: at once it would take half a kilobyte per row.
    """
    parts = dataset.select_columns(name).iter(10_000)
    return np.concatenate([part[name] for part in parts])
