"""Tokenises data sets once, caches the result on disk, and names it by its content."""

from __future__ import annotations

import collections
import contextlib
import inspect
import math
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow.compute
import transformers
from tqdm import tqdm

from common import distributed, lazily
from common.data import cache, formats, templates, tokens, workers
from common.data.formats import BadRow
from common.data.mixture import Mixture

if TYPE_CHECKING:
    import datasets

    from common.data import files
else:
    datasets = lazily("datasets")
    files = lazily("common.data.files")

# Lists of truth values among the columns that a row function may return. All other lists are of
# token ids.
BOOLEAN_COLUMNS = {"targets"}

# Columns that the rows of a row function need not have. Unlike the others they are no part of the
# result where no row has them.
OPTIONAL_COLUMNS = ("sequence_lengths",)

PLAIN_STRINGS = (
    "strings are read as plain text though the model has a chat template; "
    "--strings_as_messages makes them turns of user and assistant"
)

# Rows that are converted, and then written, at once.
ROWS_AT_ONCE = 1_000

# Fewer are converted in half a minute.
ROWS_WITH_BAR = 20_000

# Longer than this no run is silent.
PATIENCE_SECONDS = 5

# A temporary column: each row's checksum, from which the fingerprint is made. Do not rename it:
# removing a column adds its name to the fingerprint, and older checkpoints would be refused.
CHECKSUM = "crc"


class Data(NamedTuple):
    """The data of a run, as token ids.

    Attributes:
        train: the usable rows of all training sets one after the other.
        mixture: how an epoch takes them.
        eval_sets: the held-out sets by the prefixes of their tags.
    """

    train: datasets.Dataset
    mixture: Mixture
    eval_sets: dict[str, datasets.Dataset]

    @property
    def fingerprint(self) -> str:
        """Stands for the training set: its rows, the tokenizer, what was cut."""
        return self.train._fingerprint


def load_data(accelerator, args, tokenizer, *, function, **settings) -> Data:
    """Loads and tokenises the training sets and the held-out sets that the arguments name.

    All processes must call it.

    Args:
        args: `SharedArgs`.
        function: makes token ids of a row, see `load`.
        settings: passed to `function`, besides `max_length` and `strings_as_messages`.

    Raises:
        SystemExit: see `load`, `load_mixture` and `load_evaluation_sets`.
    """
    settings |= dict(
        function=function,
        tokenizer=tokenizer,
        columns=formats.column_names(args.columns),
        strings_as_messages=args.strings_as_messages,
        max_length=args.max_length,
    )
    train, mixture = load_mixture(
        accelerator, args.dataset_name, args.dataset_weights, args.dataset_split, **settings
    )
    eval_sets = load_evaluation_sets(
        accelerator, args.eval_dataset_name, args.eval_dataset_split, **settings
    )
    return Data(train, mixture, eval_sets)


def load(
    accelerator, name: str, split: str, function, tokenizer, columns: dict[str, str], **settings
) -> datasets.Dataset:
    """Loads a data set and applies a row function such as `pairs.preference_row` to every row.

    That is done once: the result is cached on disk under a key made of everything it depends on.
    Rows that cannot be used are left out before any permutation, counted and printed by reason.

    Args:
        function: called as `function(row, tokenizer=tokenizer, **settings)`. It returns the
            columns of the result; among them `length`, the number of tokens of the row (of a pair,
            those of both sequences), `reason`, why a row is left out ("" if it is not), and
            `truncated`, whether something was cut off. It may return `notes`, a list of what is
            said of such rows, see `tokens.note`, and `sequence_lengths`, see
            `sequences.Sequences`. It raises `BadRow` if a row fits no format.
        columns: see `formats.column_names`.
        settings: passed to `function`; `max_length` among them.

    Returns:
        The usable rows. Beside the columns of `function` they have `row`, the number in the file
        (from 1), and, where the data has one, `answer` as text ("" where a row has none).

    Raises:
        SystemExit: a row that fits no format (row number, column, expectation), or nothing usable
            left. On all processes.
    """
    # One process of each machine checks and fills the cache, then the others read it.
    is_first = accelerator.is_local_main_process
    task = (name, split, function, tokenizer, columns, settings, is_first)
    with word_of_patience(accelerator, f"reading and tokenising {name} ..."):
        of_first = distributed.all_or_none(accelerator, is_first, tokenise, *task)
        of_others = distributed.all_or_none(accelerator, not is_first, tokenise, *task)
    usable, notes = of_first if is_first else of_others
    accelerator.print("; ".join([f"data {name}: {len(usable)} usable rows", *notes]))
    return usable


@contextlib.contextmanager
def word_of_patience(accelerator, text: str) -> Iterator[None]:
    """Prints a text if the block takes longer than a user waits without one."""
    timer = threading.Timer(PATIENCE_SECONDS, accelerator.print, [text], {"flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def load_mixture(
    accelerator, names: str | list[str], weights: list[float] | None, *rest, **settings
) -> tuple[datasets.Dataset, Mixture]:
    """Loads one or several training sets; see `load`.

    Args:
        weights: one for each set, see `Mixture`; default 1.

    Returns:
        The usable rows of all sets behind each other, and how they are mixed.

    Raises:
        SystemExit: not a weight above 0 for each set; what `load` raises.
    """
    names = [names] if isinstance(names, str) else names
    if weights is None:
        weights = [1.0] * len(names)
    if len(weights) != len(names) or not all(0 < weight < math.inf for weight in weights):
        sys.exit(
            f"--dataset_weights {' '.join(map(str, weights))}: expected {len(names)} numbers above "
            f"0, one for each of --dataset_name {' '.join(names)}"
        )
    sets = [load(accelerator, name, *rest, **settings) for name in names]
    mixture = Mixture(tuple(len(rows) for rows in sets), tuple(weights))
    if len(sets) == 1 and weights == [1]:
        return sets[0], mixture

    accelerator.print(mixture.describe(names))
    # Only held-out sets are asked for answers, and not every set may have them.
    without_answers = [
        rows.remove_columns([name for name in rows.column_names if name == "answer"])
        for rows in sets
    ]
    rows = datasets.concatenate_datasets(without_answers)
    content = [[part._fingerprint for part in sets], mixture.weights]
    fingerprint = datasets.fingerprint.Hasher.hash(content)
    return rows.select(range(len(rows)), new_fingerprint=fingerprint), mixture


def load_evaluation_sets(
    accelerator, names: list[str] | None, *rest, **settings
) -> dict[str, datasets.Dataset]:
    """Loads the held-out sets; see `load`.

    Returns:
        Each set by the prefix of its tags: `eval/`, or `eval/<name>/` where there are several.
    """
    names = names or []
    stems = [files.stem(name) for name in names]
    if len(set(stems)) < len(stems):
        sys.exit(f"--eval_dataset_name {names}: two sets would log under the same name")
    prefixes = [f"eval/{stem}/" for stem in stems] if len(stems) > 1 else ["eval/"]
    return {
        prefix: load(accelerator, name, *rest, **settings) for prefix, name in zip(prefixes, names)
    }


def column(dataset: datasets.Dataset, name: str) -> np.ndarray:
    """Returns a column of numbers or words as one array.

    It is read in parts: read at once it would take half a kilobyte per row.
    """
    parts = dataset.select_columns(name).iter(10_000)
    return np.concatenate([part[name] for part in parts])


# ============================================================ one process tokenises
def tokenise(
    name: str,
    split: str,
    function,
    tokenizer,
    columns: dict[str, str],
    settings: dict,
    check: bool = True,
) -> tuple[datasets.Dataset, list[str]]:
    """Does the work of `load` on one process.

    Args:
        check: look for damage in what is cached, and make it again. Another process of this machine
            has done so otherwise.

    Returns:
        the usable rows, and notes on what was left out or cut.
    """
    if settings["max_length"] < 2:
        sys.exit(
            f"--max_length {settings['max_length']}: expected at least 2, "
            "a token of the prompt and one of the answer"
        )
    cache.check_root()
    rows = files.load(name, split, check)
    check_columns(name, rows, columns)
    converter = Converter(rows, function, tokenizer, columns, settings)
    key = cache_key(rows, function, tokenizer, columns, settings)
    try:
        converted = convert_checked(converter, key) if check else convert(converter, key)
    except BadRow as error:
        sys.exit(f"data set {name!r}, {error}")
    except UnicodeDecodeError as error:
        sys.exit(f"data set {name!r} is not UTF-8: {error}")
    except BrokenProcessPool:
        sys.exit(
            f"data set {name!r}: one of several processes that tokenise it died, maybe for lack of "
            "memory. There are fewer of them if the run may use fewer cores (taskset)"
        )
    notes = describe_unusable(converted)
    usable = select_usable(converted)
    if len(usable) == 0:
        sys.exit(f"data set {name!r}: no usable row: {'; '.join(notes)}")
    return usable, notes


def convert_checked(converter: Converter, key: str) -> datasets.Dataset:
    """Does the work of `convert`, but takes from the cache only what is as it was written."""
    kept = cache.Kept(key)
    with kept.alone():
        is_whole = kept.state() == cache.WHOLE
        converted = convert(converter, key, from_cache=is_whole)
        if not is_whole:
            kept.write([Path(file["filename"]) for file in converted.cache_files])
    return converted


def convert(converter: Converter, key: str, from_cache: bool = True) -> datasets.Dataset:
    """Returns all rows as the converter makes them, from the cache if they are there.

    Args:
        from_cache: False makes them again.

    Raises:
        BadRow, UnicodeDecodeError, BrokenProcessPool: see `Converter` and `workers.each`.
    """
    table = converter.rows.table
    # Not beside the data: a folder of `save_to_disk` is the user's own, and may be read-only.
    folder = cache.root() / "tokenised"
    folder.mkdir(parents=True, exist_ok=True)
    spans = [
        range(start, min(start + ROWS_AT_ONCE, len(table)))
        for start in range(0, len(table), ROWS_AT_ONCE)
    ]
    processes = workers.number_for(len(table), converter)
    # One process writes what all return. So their number changes nothing in the file.
    with contextlib.closing(workers.each(converter, spans, processes)) as parts:
        shown = with_bar(parts, len(table))
        return table.map(
            lambda _rows: next(shown),
            batched=True,
            batch_size=ROWS_AT_ONCE,
            remove_columns=table.column_names,
            cache_file_name=str(folder / f"{key}.arrow"),
            load_from_cache_file=from_cache,
            new_fingerprint=key,
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


@dataclass
class Converter:
    """Applies a row function to the rows of a data set; other processes can get a copy of it.

    Attributes:
        function, tokenizer, columns, settings: see `load`.
    """

    rows: files.Rows
    function: Callable[..., dict]
    tokenizer: transformers.PreTrainedTokenizerBase
    columns: dict[str, str]
    settings: dict

    def __call__(self, span: range) -> dict[str, list]:
        """Returns the columns of the result for some rows.

        Raises:
            BadRow: a row fits no format; with its number.
            UnicodeDecodeError: a row is no text.
        """
        entries = self.rows.table.select(span)
        converted = [self.convert_row(entry, index) for index, entry in zip(span, entries)]
        return {name: [row[name] for row in converted] for name in converted[0]}

    def convert_row(self, entry: dict, index: int) -> dict:
        """Returns what the row function makes of one entry of the table, and columns of our own."""
        row = rename_columns(self.rows.row(entry), self.columns)
        as_messages = self.settings.get("strings_as_messages")
        try:
            row = formats.standard(row, bool(as_messages))
            values = self.function(row, tokenizer=self.tokenizer, **self.settings)
        except (BadRow, templates.TooMuch) as error:
            raise BadRow(f"row {index + 1}: {error}") from None
        notes = values.pop("notes", [])
        # None: the caller has no such setting.
        has_template = self.tokenizer.chat_template is not None
        if as_messages is False and has_template and formats.is_plain_text(row):
            notes.append(PLAIN_STRINGS)
        optional = {column_name: [] for column_name in OPTIONAL_COLUMNS}
        return {
            **with_typed_lists({**optional, **values}),
            "notes": "\n".join(notes),
            "row": index + 1,
            **answer_of(row, values),
            CHECKSUM: checksum(values),
        }


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


def rename_columns(row, columns: dict[str, str]) -> dict:
    """Returns the row under a format's names: the user's columns win over all in the data."""
    named = {
        column_name: row[users_name]
        for column_name, users_name in columns.items()
        if users_name in row
    }
    hidden = hidden_columns(columns)
    kept = {column_name: value for column_name, value in row.items() if column_name not in hidden}
    return {**kept, **named}


def hidden_columns(columns: dict[str, str]) -> set[str]:
    """Returns the columns of the data that would win over those that the user named.

    `formats.conversation` recognises `messages` first, then `text`, then `prompt` and
    `completion`. Naming a column of one format switches off the formats recognised before it.
    """
    if "prompt" in columns or "completion" in columns:
        return {"messages", "text"}
    if "text" in columns:
        return {"messages"}
    return set()


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


def select_usable(converted: datasets.Dataset) -> datasets.Dataset:
    """Returns the usable rows, under a fingerprint of all rows' content."""
    reasons = column(converted, "reason")
    # The same rows from another path, or written at another time, are the same data.
    content = datasets.fingerprint.Hasher.hash_bytes(column(converted, CHECKSUM).tobytes())
    # Before the rows get their name, which depends on the columns that are removed later.
    unused = [name for name in OPTIONAL_COLUMNS if not has_values(converted, name)]
    converted = converted.remove_columns(["notes", *unused])
    usable = converted.select(np.flatnonzero(reasons == ""), new_fingerprint=content)
    superfluous = [CHECKSUM]
    # `any` reads until it finds the first answer.
    if "answer" in usable.column_names and not any(usable["answer"]):
        superfluous.append("answer")
    return usable.remove_columns(superfluous)


def has_values(converted: datasets.Dataset, name: str) -> bool:
    """Whether any list of a column is not empty."""
    lengths = pyarrow.compute.list_value_length(converted.data[name])
    return bool(pyarrow.compute.sum(lengths).as_py())


def describe_unusable(converted: datasets.Dataset) -> list[str]:
    """Says how many rows are left out, by reason, and how many usable ones are truncated."""
    reasons = column(converted, "reason")
    is_usable = reasons == ""
    counts = zip(*np.unique(reasons[~is_usable], return_counts=True))
    notes = [f"{count} left out ({reason})" for reason, count in counts]
    truncated = int((column(converted, "truncated") & is_usable).sum())
    if truncated:
        notes.append(f"{truncated} truncated")
    return notes + describe_notes(converted)


def describe_notes(converted: datasets.Dataset) -> list[str]:
    """What the row function noted of usable rows: each kind once, with its rows and an example."""
    counts = collections.Counter()
    examples = {}
    for part in converted.select_columns(["notes", "reason", "row"]).iter(10_000):
        for text, reason, row in zip(part["notes"], part["reason"], part["row"]):
            if not text or reason:
                continue
            of_row = dict(line.partition("\t")[::2] for line in reversed(text.split("\n")))
            counts.update(of_row.keys())
            for kind, example in of_row.items():
                examples.setdefault(kind, f" (row {row}: {example})" if example else "")
    return [f"{kind}: {count} rows{examples[kind]}" for kind, count in counts.items()]


# ============================================================ the cache's key
def cache_key(
    rows: files.Rows, function, tokenizer, columns: dict[str, str], settings: dict
) -> str:
    """Returns a name for the converted rows, which changes with everything that they depend on."""
    folder = Path(__file__).parent
    key = [
        rows.table._fingerprint,
        *(file.read_text("utf-8") for file in sorted(folder.glob("*.py"))),
        source_of(function),
        tokens.fingerprint(tokenizer),
        columns,
        settings,
    ]
    return datasets.fingerprint.Hasher.hash(key)


def source_of(function) -> str:
    """Returns the source of a function and of those functions of its own module that it calls.

    So a change to the rest of a recipe does not tokenise the data again.
    """
    sources = [inspect.getsource(function)]
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if (
            inspect.isfunction(called)
            and called.__module__ == function.__module__
            and called is not function
        ):
            sources.append(source_of(called))
    return "".join(sources)
