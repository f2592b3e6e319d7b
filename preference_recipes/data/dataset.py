"""Loads the data sets of a run as token ids, which are cached on disk.

The path of a row: `load_data` -> `load` -> `tokenise` -> `write_rows` -> `Converter.convert_row` ->
a row function, such as `formats.preference_row`.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import itertools
import json
import marshal
import multiprocessing
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow
import pyarrow.compute
import transformers
from accelerate.utils import gather_object
from datasets.arrow_writer import ArrowWriter

from common import display, distributed, folders, one_line, refuse
from preference_recipes.data import files, formats, rendering, unread
from preference_recipes.data.messages import IMAGE_COLUMNS, BadRow, LeftOut, has_image_part

ROWS_PER_PROCESS = 5_000  # a process tokenises these in some seconds
MAX_PROCESSES = 32

ABOUT = "about.json"  # next to the token ids: their fingerprint, and notes for the user
ONLY_COUNTED = ("reason", "truncated", "notes")  # columns of row functions that are not stored

PLAIN_STRINGS = (
    "strings are read as plain text though the model has a chat template; "
    "--strings_as_messages makes them turns of user and assistant"
)
NO_IMAGES = "this recipe, or --vllm_url, reads no images: docs/images.md"
# Separates the right answers of a row, which are stored as one text: ASCII's record separator.
ANSWER_SEPARATOR = "\x1e"


class Data(NamedTuple):
    """The data of a run, as token ids."""

    train: datasets.Dataset  # the usable rows of all training sets, one set after the other
    starts: list[int]  # the index of each training set's first row
    eval_sets: dict[str, datasets.Dataset]  # by the prefixes of their tags
    converter: Converter  # the one that made all of these
    sets: Sequence[tuple[str, datasets.Dataset]] = ()  # all sets, each with its name

    @property
    def fingerprints(self) -> dict[str, Any]:
        """Identify the content of the sets: their rows, the tokenizer, what was truncated."""
        held_out = {prefix: rows._fingerprint for prefix, rows in self.eval_sets.items()}
        fingerprints = {"data": self.train._fingerprint, "held-out data": held_out}
        if self.processor is not None:
            fingerprints["images"] = rendering.describe_processor(self.processor)
        return fingerprints

    @property
    def processor(self) -> Any:
        """The processor for the images of these sets; None if they have none."""
        has_images = any("images" in rows.column_names for _, rows in self.sets)
        return self.converter.tokenizer.processor if has_images else None

    def refuse_ids_beyond(self, n_rows: int, model_name: str) -> None:
        """Ends the run where a set has a token id beyond the rows of a model's embedding."""
        tokenizer = self.converter.tokenizer
        if max(tokenizer.get_vocab().values()) < n_rows:  # the usual case
            return
        for name, rows in self.sets:
            for column in [column for column in rows.column_names if column.endswith("_ids")]:
                ids = pyarrow.compute.list_flatten(rows.with_format("arrow")[column][:])
                largest = pyarrow.compute.max(ids).as_py() or 0
                if largest >= n_rows:
                    row = next(row["row"] for row in rows if largest in row[column])
                    token = tokenizer.convert_ids_to_tokens(largest)
                    where = f"data set {name!r}, row {row}: {column} has token {largest}, {token!r}"
                    refuse(f"{where}: the embedding of {model_name!r} has {n_rows} rows: resize it")


def load_data(accelerator, args, tokenizer, *, function, reads_images=False, **settings) -> Data:
    """Loads the data sets that the arguments name. All processes must call it.

    Args:
        function, settings: see `Converter`; `max_length` and `strings_as_messages` are added.
        reads_images: whether the recipe reads images; otherwise a row with one ends the run.
    """
    settings |= dict(strings_as_messages=args.strings_as_messages, max_length=args.max_length)
    refusal = getattr(tokenizer, "no_images", NO_IMAGES) if reads_images else NO_IMAGES
    converter = Converter(
        function, tokenizer, formats.column_names(args.columns), settings, refusal
    )
    held_out = args.eval_dataset_name or []
    for name in [*args.dataset_name, *held_out]:
        files.refuse_missing(name)
    sets = [load(accelerator, name, args.dataset_split, converter) for name in args.dataset_name]
    starts = [sum(map(len, sets[:index])) for index in range(len(sets))]
    content = datasets.fingerprint.Hasher.hash([rows._fingerprint for rows in sets])
    train = datasets.concatenate_datasets(sets)
    train = train.select(range(len(train)), new_fingerprint=content)

    prefixes = ["eval/"]  # prefixes of tags; names distinguish several sets
    if len(held_out) > 1:
        prefixes = [f"eval/{files.stem(name)}/" for name in held_out]
    if len(set(prefixes)) < len(held_out):
        refuse(f"--eval_dataset_name {held_out}: two sets would log under the same name")
    eval_sets = [load(accelerator, name, args.eval_dataset_split, converter) for name in held_out]
    named_sets = [*zip(args.dataset_name, sets), *zip(held_out, eval_sets)]
    data = Data(train, starts, dict(zip(prefixes, eval_sets)), converter, named_sets)
    if getattr(args, "train_vision", False) and data.processor is None:
        refuse("--train_vision: no row of these sets has an image")
    return data


def load(accelerator, name: str, split: str, converter: Converter) -> datasets.Dataset:
    """Returns the usable rows of a data set as token ids; prints how many are unusable, and why."""
    accelerator.print(f"reading {name} ...", flush=True)
    # The first process of each machine fills the cache; the others read it.
    is_first = accelerator.is_local_main_process
    folder = distributed.all_or_none(accelerator, is_first, tokenise, name, split, converter)
    first = accelerator.process_index - accelerator.local_process_index
    folder = gather_object([folder])[first]
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    parts = [datasets.Dataset.from_file(str(file)) for file in sorted(folder.glob("*.arrow"))]
    rows = datasets.concatenate_datasets(parts)
    if accelerator.is_main_process:
        display.write("; ".join([f"data {name}: {len(rows)} usable rows", *about["notes"]]))
    if not any(rows["answer"][:]):
        rows = rows.remove_columns("answer")
    if "images" in rows.column_names:
        counts = pyarrow.compute.list_value_length(rows.with_format("arrow")["images"][:])
        if not pyarrow.compute.sum(counts).as_py():
            rows = rows.remove_columns("images")
    return rows.select(range(len(rows)), new_fingerprint=about["fingerprint"])


# ============================================================ a row
@dataclass
class Converter:
    """Applies a row function to rows.

    The function is called as `function(row, tokenizer=tokenizer, **settings)`. It returns columns,
    among them `length`, the tokens of the row (in a pair, of both sequences), `truncated`, whether
    anything was cut off, and maybe `notes` for the user. It raises `LeftOut` and `BadRow`.
    """

    function: Callable[..., dict]
    tokenizer: transformers.PreTrainedTokenizerBase
    columns: dict[str, str]  # the user's columns by the format's
    settings: dict
    image_refusal: str = NO_IMAGES  # why images are not read; "" if they are
    folder: Path = Path()  # paths of images are relative to it

    def convert_row(self, row: dict, index: int) -> dict:
        """Returns the columns of a row, its number from 1 as `row`, and its `answer`, maybe "".

        `reason` is "", or says why the row is left out; then there are only `notes` besides.
        """
        try:
            row = formats.normalize_columns(row, self.columns)
            if self.image_refusal and self.has_images(row):
                raise BadRow(f"images: {self.image_refusal}")
            if not self.image_refusal:
                from preference_recipes.data import images  # only here: text needs none

                row, pictures, image_spellings = images.find(row, formats.TEXTS, self)
            values = self.function(row, tokenizer=self.tokenizer, **self.settings)
            if not self.image_refusal:
                values |= images.columns_of(values, pictures, image_spellings, self.tokenizer)
        except LeftOut as left_out:
            return {"reason": str(left_out), "notes": []}
        except Exception as error:
            kind = "" if isinstance(error, BadRow) else f"{type(error).__name__}: "
            raise BadRow(f"row {index + 1}: {kind}{one_line(error)}") from error
        notes = [*values.get("notes", [])]
        could_turn_strings = self.settings.get("strings_as_messages") is False
        kinds = {type(row[name]) for name in formats.TEXTS if row.get(name) is not None}
        if could_turn_strings and self.tokenizer.chat_template and kinds == {str}:
            notes.append(PLAIN_STRINGS)
        answer = ""
        if values.get("prompt_ids") != []:  # otherwise no answer is generated
            with contextlib.suppress(ValueError):  # objects are reported as not read
                answer = answer_text(row.get("answer"))
        return {"reason": "", **values, "notes": notes, "row": index + 1, "answer": answer}

    def has_images(self, row: dict) -> bool:
        """Whether a message of a row has an image, or a column that the model could read."""
        has_processor = getattr(self.tokenizer, "processor", None) is not None
        has_column = has_processor and any(map(row.get, IMAGE_COLUMNS))
        return has_column or any(has_image_part(row.get(name)) for name in formats.TEXTS)


def answer_text(answer: Any) -> str:
    """Returns a right answer, or several of which any is right, as one text."""
    values = answer if isinstance(answer, (list, tuple)) else [answer]
    if any(isinstance(value, (dict, list, tuple)) for value in values):
        raise ValueError("column 'answer' holds an object, which no response is compared with")
    return ANSWER_SEPARATOR.join(
        str(value) for value in values if value is not None and value != ""
    )


# ============================================================ all rows
def tokenise(name: str, split: str, converter: Converter) -> Path:
    """Converts all rows of a data set, unless an earlier run did; returns the result's folder."""
    rows = files.find(name, split)
    converter = replace(converter, folder=rows.folder)
    code = [*Path(__file__).parent.glob("*.py"), Path(inspect.getfile(converter.function))]
    key = [  # everything that the result depends on
        rows._fingerprint,
        *(file.read_text("utf-8") for file in sorted(code)),
        converter.function.__name__,
        rendering.fingerprint(converter.tokenizer),
        converter.columns,
        converter.settings,
        converter.image_refusal,
    ]
    # It is not next to the data, which may be read-only.
    cache = Path(datasets.config.HF_DATASETS_CACHE).expanduser() / "tokenised"
    folder = cache / datasets.fingerprint.Hasher.hash(key)
    if folder.is_dir():
        return folder
    with folders.writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".") as parent:
            temporary = Path(parent, folder.name)
            temporary.mkdir()
            about = convert(name, rows, converter, temporary)
            (temporary / ABOUT).write_text(json.dumps(about), encoding="utf-8")
            folders.flush(*temporary.iterdir(), temporary)
            with contextlib.suppress(OSError):  # another run was faster
                temporary.rename(folder)
    return folder


def convert(name: str, rows, converter: Converter, folder: Path) -> dict[str, Any]:
    """Writes the usable rows of a data set into a folder; returns the content of `ABOUT`."""
    processes = 1
    if sys.platform.startswith("linux"):  # elsewhere forks are not safe
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        processes = max(min(cores, len(rows) // ROWS_PER_PROCESS, MAX_PROCESSES), 1)
    bounds = [len(rows) * index // processes for index in range(processes + 1)]
    tasks = [
        (rows, converter, start, stop, folder / f"{start:012d}.arrow")
        for start, stop in itertools.pairwise(bounds)
    ]
    try:
        if processes == 1:
            parts = [write_rows(*tasks[0])]
        else:
            fork = multiprocessing.get_context("fork")
            with ProcessPoolExecutor(processes, mp_context=fork) as pool:
                parts = list(pool.map(write_rows, *zip(*tasks)))
    except BadRow as error:
        refuse(f"data set {name!r}, {error}")
    counts = sum((counts for counts, _ in parts), collections.Counter())
    notes = [f"{text}: {count} of {len(rows)} rows" for text, count in sorted(counts.items())]
    checksums = [checksum for _, part in parts for checksum in part]
    if not checksums:
        refuse("; ".join([f"data set {name!r}: no usable row of {len(rows)}", *notes]))
    unread_note = unread.describe(rows.select(range(len(rows))), converter)
    # The same rows from another path or time are the same data.
    fingerprint = datasets.fingerprint.Hasher.hash(checksums)
    return {"fingerprint": fingerprint, "notes": [*notes, *filter(None, [unread_note])]}


def write_rows(
    rows, converter: Converter, start: int, stop: int, file: Path
) -> tuple[collections.Counter, list[int]]:
    """Converts a range of rows, and writes the usable ones, if there are any, into a file.

    Returns counts of rows by note for the user, and the checksums of the usable ones.
    """
    counts: collections.Counter[str] = collections.Counter()
    checksums: list[int] = []
    writer = None
    for index, row in enumerate(rows.select(range(start, stop)), start):
        values = converter.convert_row(row, index)
        if values["reason"]:
            counts[f"left out ({values['reason']})"] += 1
            continue
        counts.update({*values["notes"]})
        if values["truncated"]:
            counts["truncated"] += 1
        stored = {name: values[name] for name in values if name not in ONLY_COUNTED}
        checksums.append(zlib.crc32(marshal.dumps(stored, 0)))
        if writer is None:
            schema = pyarrow.schema([(name, type_of(name, stored[name])) for name in stored])
            writer = ArrowWriter(path=str(file), schema=schema)
        writer.write(stored)
    if writer is not None:
        writer.finalize()
    return counts, checksums


def type_of(name: str, value) -> pyarrow.DataType:
    """Returns the type of a column, given its value in any row."""
    if name == "images":
        return pyarrow.list_(pyarrow.large_binary())
    if isinstance(value, list):
        return pyarrow.list_(pyarrow.bool_() if name.endswith("loss_mask") else pyarrow.int32())
    return pyarrow.scalar(value).type
