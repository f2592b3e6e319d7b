"""Which columns and keys of a data set nothing reads, so that nothing is dropped in silence.

Each is taken out of a few rows, and these are converted again: it is read if they change.
"""

import collections
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from preference_recipes.data import formats
from preference_recipes.data.messages import BadRow, as_list

# A key by the keys above it, lists not counted: ("messages", "tool_calls", "id").
Path = tuple[str, ...]

DEPTH = 4
EXAMPLES = 3  # rows that are converted without a key
MOST_ROWS = 20_000  # that are looked at


def describe(rows: Iterable[dict], converter) -> str:
    """Returns which columns and keys with a value nothing reads, such as "messages.train"."""
    # By yes, no and other values: `train: false` may be read where `train: true` changes nothing.
    examples: dict[Path, dict[Any, list[dict]]] = collections.defaultdict(dict)
    for row in itertools.islice(rows, MOST_ROWS):
        for path, value in dict.fromkeys(paths_of(row)):
            some = examples[path].setdefault(value, [])
            if len(some) < EXAMPLES:
                some.append(row)
    unread: list[Path] = []
    for path in sorted(examples, key=len):
        is_below_unread = any(path[: len(above)] == above for above in unread)
        tried = itertools.chain(*examples[path].values())
        if not is_below_unread and not any(is_read(row, path, converter) for row in tried):
            unread.append(path)
    names = [json.dumps(".".join(path), ensure_ascii=False) for path in unread]
    return f"not read: {', '.join(names)}" if names else ""


def is_read(row: dict, path: Path, converter) -> bool:
    """Whether a row becomes something else without a key."""
    try:
        return learned(row, converter) != learned(without(row, path), converter)
    except BadRow:  # only without the key
        return True


def learned(row: dict, converter) -> dict:
    """Returns what a row becomes, as far as a model or a reward function reads it."""
    values = converter.convert_row(row, 0)
    # Reward functions get whole columns. In those that become ids a key must change the ids.
    columns = json.loads(values.pop("columns", "{}"))
    names = columns.keys() - {"tools", "chat_template_kwargs"}
    seen = {name: name in formats.FORMAT_COLUMNS or columns[name] for name in names}
    return {**values, "columns": seen}


def paths_of(value: Any, above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields the keys of a row that hold a value, down to `DEPTH`, each with a yes or no."""
    for item in as_list(value):
        if not isinstance(item, dict) or "bytes" in item:  # an image of `datasets`
            continue
        for name, below in item.items():
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
