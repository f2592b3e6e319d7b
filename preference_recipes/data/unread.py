"""Which columns and keys of a data set nothing reads, so that nothing is dropped in silence.

A key is read if a row becomes something else without it. So no list of the keys that formats and
templates know is needed: each is taken out of a few rows, and these are converted again.
"""

import collections
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from common import counted
from preference_recipes.data.messages import BadRow

# A key by the keys above it, lists not counted: ("messages", "tool_calls", "id").
Path = tuple[str, ...]

DEPTH = 4
EXAMPLES = 3  # rows that are converted without a key
MOST_ROWS = 20_000  # that are looked at


def describe(rows: Iterable[dict], converter) -> str:
    """Returns which columns and keys with a value nothing reads; "" if all are read.

    Example: `not read: column "id" (800 rows), key "messages.train" (12 rows)`
    """
    looked_at = 0
    counts: collections.Counter[Path] = collections.Counter()
    # By yes, no and other values: `train: false` may be read where `train: true` changes nothing.
    examples: dict[Path, dict[Any, list[dict]]] = collections.defaultdict(dict)
    for row in itertools.islice(rows, MOST_ROWS):
        looked_at += 1
        found = dict.fromkeys(paths_of(row))  # in the order of the row
        counts.update({path: 1 for path, _ in found})
        for path, value in found:
            some = examples[path].setdefault(value, [])
            if len(some) < EXAMPLES:
                some.append(row)

    unread: list[Path] = []
    for path in sorted(counts, key=len):
        is_below_unread = any(path[: len(above)] == above for above in unread)
        tried = itertools.chain(*examples[path].values())
        if not is_below_unread and not any(is_read(row, path, converter) for row in tried):
            unread.append(path)
    named = [
        f'{"key" if path[1:] else "column"} "{".".join(path)}" ({counted(counts[path], "row")})'
        for path in unread
    ]
    where = f" of the first {MOST_ROWS:,}" if looked_at == MOST_ROWS else ""
    return f"not read{where}: {', '.join(named)}" if named else ""


def is_read(row: dict, path: Path, converter) -> bool:
    """Whether a row becomes something else without a key."""
    try:
        return learned(row, converter) != learned(without(row, path), converter)
    except BadRow:  # only without the key
        return True


def learned(row: dict, converter) -> dict:
    """Returns what a row becomes, as far as a model or a reward function reads it."""
    values = converter.convert_row(row, 0)
    # The copy for reward functions has each column; those for the template they do not read.
    columns = json.loads(values.pop("columns", "{}")).keys()
    return {**values, "columns": columns - {"tools", "chat_template_kwargs"}}


def paths_of(value: Any, above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields the keys of a row that hold a value, down to `DEPTH`, each with a yes or no."""
    for item in value if isinstance(value, list) else [value]:
        for name, below in item.items() if isinstance(item, dict) else ():
            if below is not None and below not in ("", [], {}):
                yield (*above, name), below if below in (0, 1) else None
                if len(above) + 1 < DEPTH:
                    yield from paths_of(below, (*above, name))


def without(value: Any, path: Path) -> Any:
    """Returns a copy of a value without a key, wherever it is."""
    if isinstance(value, list):
        return [without(item, path) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: below for name, below in value.items() if len(path) > 1 or name != path[0]}
    return kept | {n: without(below, path[1:]) for n, below in kept.items() if n == path[0]}
