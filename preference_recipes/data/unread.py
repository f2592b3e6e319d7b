"""Which columns and keys of a data set nothing reads, so that nothing is dropped in silence.

A key is read if a row becomes something else without it. So no list of the keys that formats and
templates know is needed: each is taken out of a few rows, and these are converted again.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from common import counted
from preference_recipes.data.messages import BadRow

# A key by the keys above it, lists not counted: ("messages", "tool_calls", "id").
Path = tuple[str, ...]

DEPTH = 3
EXAMPLES = 3  # rows that are converted without a key
MOST_ROWS = 20_000  # that are looked at
MOST_PATHS = 100


def describe(
    rows: Iterable[dict], convert: Callable[[dict], dict], keeps_columns: bool
) -> str | None:
    """Returns which columns and keys with a value nothing reads; None if all are read.

    Example: `not read: column "id" (800 rows), key "messages.train" (12 rows)`

    Args:
        rows: of a data set, in order.
        convert: what is made of a row, without what is kept of it as a whole.
        keeps_columns: whether reward functions get the row's columns, which so are all read.
    """
    counts: collections.Counter[Path] = collections.Counter()
    examples: dict[Path, list[dict]] = collections.defaultdict(list)
    looked_at = 0
    for row in itertools.islice(rows, MOST_ROWS):
        looked_at += 1
        for path in set(paths_of(row)):
            counts[path] += 1
            if len(examples[path]) < EXAMPLES:
                examples[path].append(row)

    unread: list[Path] = []
    for path in sorted(counts, key=len)[:MOST_PATHS]:
        is_below_unread = any(path[: len(above)] == above for above in unread)
        is_kept = keeps_columns and len(path) == 1
        if is_below_unread or is_kept:
            continue
        if all(
            outcome(convert, row) == outcome(convert, without(row, path)) for row in examples[path]
        ):
            unread.append(path)
    if not unread:
        return None
    named = [
        f'{"column" if len(path) == 1 else "key"} "{".".join(path)}" '
        f"({counted(counts[path], 'row')})"
        for path in unread
    ]
    where = f" of the first {MOST_ROWS:,}" if looked_at == MOST_ROWS else ""
    return f"not read{where}: {', '.join(named)}"


def paths_of(value: Any, above: Path = ()) -> Iterator[Path]:
    """Yields the keys of a row that hold a value, down to `DEPTH`."""
    if isinstance(value, list):
        for item in value:
            yield from paths_of(item, above)
    elif isinstance(value, dict):
        for name, below in value.items():
            if below is None or below == "" or below == [] or below == {}:
                continue
            yield (*above, name)
            if len(above) + 1 < DEPTH:
                yield from paths_of(below, (*above, name))


def without(value: Any, path: Path) -> Any:
    """Returns a copy of a value without a key, wherever it is."""
    if isinstance(value, list):
        return [without(item, path) for item in value]
    if not isinstance(value, dict):
        return value
    first, *rest = path
    if not rest:
        return {name: below for name, below in value.items() if name != first}
    return {
        name: without(below, tuple(rest)) if name == first else below
        for name, below in value.items()
    }


def outcome(convert: Callable[[dict], dict], row: dict) -> dict | str:
    """Returns what is made of a row, or why it fits no format."""
    try:
        return convert(row)
    except BadRow as error:
        return str(error)
