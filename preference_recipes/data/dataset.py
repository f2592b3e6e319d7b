"""Loads the training sets and the held-out sets of a run as token ids."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import datasets
from accelerate.utils import gather_object

from common import as_list, distributed
from preference_recipes.data import answer_column, files, formats
from preference_recipes.data.conversion import Converter, column, read_usable, tokenise

__all__ = ["Data", "column", "load", "load_data", "load_evaluation_sets"]


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


def load_data(accelerator, args, tokenizer, *, function, exact_match=False, **settings) -> Data:
    """Loads and tokenises the training sets and the held-out sets that the arguments name.

    All processes must call it.

    Args:
        function: makes token ids of a row, see `load`.
        exact_match: whether responses are compared with the held-out sets' column `answer`.
        settings: passed to `function`, besides `max_length` and `strings_as_messages`.
    """
    for name in as_list(args.dataset_name) + as_list(args.eval_dataset_name):
        files.data_files(name)  # ends the run if it is missing: held-out ones are read last
    settings |= dict(strings_as_messages=args.strings_as_messages, max_length=args.max_length)
    converter = Converter(function, tokenizer, formats.column_names(args.columns), settings)
    names = as_list(args.dataset_name)
    sets = [load(accelerator, name, args.dataset_split, converter) for name in names]
    starts = [sum(map(len, sets[:place])) for place in range(len(sets))]
    eval_sets = load_evaluation_sets(
        accelerator, args.eval_dataset_name, args.eval_dataset_split, converter
    )
    if exact_match:
        for name, rows in zip(args.eval_dataset_name or [], eval_sets.values()):
            answer_column.refuse_objects(name, rows)
    return Data(joined(sets), starts, eval_sets, converter)


def load(accelerator, name: str, split: str, converter: Converter) -> datasets.Dataset:
    """Loads a data set and applies a row function such as `pairs.preference_row` to every row.

    That is done once: the result is cached on disk under a key made of everything it depends on.
    Rows that cannot be used are left out, counted and printed by reason.

    Args:
        converter: its function is called as `function(row, tokenizer=tokenizer, **settings)`. It
            returns columns; among them `length`, the tokens of the row (of a pair, those of both
            sequences), `reason`, why it is left out ("" if it is not), `truncated`, whether
            something was cut off, and maybe `notes` for the user. It raises `BadRow`.

    Returns:
        The usable rows, also with `row`, the number in the file (from 1), and `answer` as text,
        where the data has one.
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


def joined(sets: list[datasets.Dataset]) -> datasets.Dataset:
    """Returns the rows of training sets one after the other."""
    if len(sets) == 1:
        return sets[0]
    # Only held-out sets are asked for answers, and not every set may have them.
    without_answers = [
        rows.remove_columns([name for name in rows.column_names if name == "answer"])
        for rows in sets
    ]
    rows = datasets.concatenate_datasets(without_answers)
    content = datasets.fingerprint.Hasher.hash([part._fingerprint for part in sets])
    return rows.select(range(len(rows)), new_fingerprint=content)


def load_evaluation_sets(
    accelerator, names: list[str] | None, split: str, converter: Converter
) -> dict[str, datasets.Dataset]:
    """Loads held-out sets by the prefix of their tags: `eval/`, or `eval/<name>/` of several."""
    names = names or []
    stems = [files.stem(name) for name in names]
    if len(set(stems)) < len(stems):
        sys.exit(f"--eval_dataset_name {names}: two sets would log under the same name")
    prefixes = [f"eval/{stem}/" for stem in stems] if len(stems) > 1 else ["eval/"]
    return {
        prefix: load(accelerator, name, split, converter) for prefix, name in zip(prefixes, names)
    }
