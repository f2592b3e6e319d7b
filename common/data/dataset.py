"""Tokenised once."""

import inspect
import sys
import zlib
from pathlib import Path

import datasets
import numpy as np

from common import distributed
from common.data import files, tokens
from common.data.formats import BadRow


def load(
    accelerator, name: str, split: str, function, tokenizer, columns: dict[str, str], **settings
) -> datasets.Dataset:
    """Loads a data set and applies a row function such as `preference_row` once: the result is cached on disk by its content.

    Rows that cannot be used are left out before any permutation, counted and printed by reason. The result keeps the
    row's number in the file (`row`, from 1) and, where the data has one, its `answer` as text ("" where a row has none).

    Args:
        columns: see `column_names`.
        settings: passed to `function`, and part of the cache's key, as is the function's source.

    Raises:
        SystemExit: a row that fits no format (row number, column, expectation), or nothing usable left. On all ranks.
    """
    task = name, split, function, tokenizer, columns, settings
    # One process of each machine fills the cache, then the others read it.
    turns = [
        distributed.all_or_none(
            accelerator, turn == accelerator.is_local_main_process, tokenise, *task
        )
        for turn in (True, False)
    ]
    result, notes = next(filter(None, turns))
    accelerator.print("; ".join([f"data {name}: {len(result)} usable rows", *notes]))
    return result


def tokenise(
    name: str, split: str, function, tokenizer, columns: dict, settings: dict
) -> tuple[datasets.Dataset, list[str]]:
    """`load_tokenized` on one process: the usable rows, and what is to be said of the others."""

    def convert(row, index):
        # What the user names goes before what is there, too.
        hidden = (
            ["messages", "text"]
            if {"prompt", "completion"} & columns.keys()
            else ["messages"]
            if "text" in columns
            else []
        )
        row = {k: v for k, v in row.items() if k not in hidden} | {
            name: row[own] for name, own in columns.items() if own in row
        }
        try:
            values = function(row, tokenizer=tokenizer, **settings)
            # Nothing is asked where there is no prompt.
            answer = {
                n: "" if row[n] is None or values.get("prompt_ids") == [] else str(row[n])
                for n in {"answer"} & row.keys()
            }
            values |= {"row": index + 1, **answer, "crc": zlib.crc32(repr(values).encode())}
            # Typed, as the first thousand rows, from which `datasets` takes the types, may all be left out, with empty lists.
            return {
                k: np.array(v, bool if k == "targets" else int) if isinstance(v, list) else v
                for k, v in values.items()
            }
        except BadRow as error:
            sys.exit(f"data set {name!r}, row {index + 1}: {error}")

    if settings["max_length"] < 2:
        sys.exit(
            f"--max_length {settings['max_length']}: expected at least 2, a token of the prompt and one of the answer"
        )
    rows = files.load(name, split)
    if missing := [
        own for name, own in columns.items() if own not in rows.column_names and name != "answer"
    ]:  # held-out sets have that
        sys.exit(
            f"--columns: data set {name!r} has no column {missing[0]!r}; it has {rows.column_names}"
        )
    key = [
        rows._fingerprint,
        *(file.read_text("utf-8") for file in sorted(Path(__file__).parent.glob("*.py"))),
        source_of(function),
        tokens.fingerprint(tokenizer),
        columns,
        settings,
    ]
    try:
        done = rows.map(
            convert,
            with_indices=True,
            remove_columns=rows.column_names,
            new_fingerprint=datasets.fingerprint.Hasher.hash(key),
        )
    except UnicodeDecodeError as error:
        sys.exit(f"data set {name!r} is not UTF-8: {error}")
    # Named by its content: the same rows from another path, or written at another time, are the same data.
    reasons, content = (
        column(done, "reason"),
        datasets.fingerprint.Hasher.hash_bytes(column(done, "crc").tobytes()),
    )
    usable = done.select(np.flatnonzero(reasons == ""), new_fingerprint=content)
    left_out, truncated = (
        np.unique(reasons[reasons != ""], return_counts=True),
        int((column(done, "truncated") & (reasons == "")).sum()),
    )
    notes = [f"{count} left out ({reason})" for reason, count in zip(*left_out)] + [
        f"{truncated} truncated"
    ] * (truncated > 0)
    if len(usable) == 0:
        sys.exit(f"data set {name!r}: no usable row: {'; '.join(notes)}")
    unanswered = "answer" in usable.column_names and not any(
        usable["answer"]
    )  # read until one is found
    return usable.remove_columns(["crc"] + ["answer"] * unanswered), notes


def column(dataset: datasets.Dataset, name: str) -> np.ndarray:
    """A column of numbers or words, read in parts: read at once it would take half a kilobyte a row."""
    return np.concatenate([part[name] for part in dataset.select_columns(name).iter(10_000)])


def source_of(function) -> str:
    """The source of a function and of those of its module that it calls: what else changes in a recipe changes no tokens."""
    values = (function.__globals__.get(name) for name in function.__code__.co_names)
    called = [
        value
        for value in values
        if inspect.isfunction(value)
        and value.__module__ == function.__module__
        and value is not function
    ]
    return "".join([inspect.getsource(function), *map(source_of, called)])


def load_evaluation_sets(
    accelerator, names: list[str] | None, *rest, **settings
) -> dict[str, datasets.Dataset]:
    """`load_tokenized` of each held-out set, by the prefix of its tags: `eval/`, or `eval/<name>/` where there are several."""
    stems = [Path(name.partition(":")[0]).name.split(".")[0] for name in names or []]
    if len(set(stems)) < len(stems):
        sys.exit(f"--eval_dataset_name {names}: two sets would log under the same name")
    prefixes = [f"eval/{stem}/" for stem in stems] if len(stems) > 1 else ["eval/"]
    return {p: load(accelerator, name, *rest, **settings) for p, name in zip(prefixes, names or [])}
