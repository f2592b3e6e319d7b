"""Finds the columns and keys of a data set that nothing reads, to report them to the user.

Each is removed from a few rows, which are converted again. A key is read if the result changes.
"""

import collections
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from preference_recipes.data import formats
from preference_recipes.data.messages import BadRow, as_list

# A key with the keys above it, without list indices: ("messages", "tool_calls", "id").
Path = tuple[str, ...]

DEPTH = 4
EXAMPLES = 3  # rows that are converted without a key
MAX_ROWS = 20_000  # rows that are examined


def describe(rows: Iterable[dict], converter) -> str:
    """Describes the columns and keys with values that nothing reads, such as "messages.train"."""
    # By 1, 0 and other values: `train: false` may be read where `train: true` changes nothing.
    examples: dict[Path, dict[Any, list[dict]]] = collections.defaultdict(dict)
    for row in itertools.islice(rows, MAX_ROWS):
        for path, value in dict.fromkeys(paths_of(row)):
            example_rows = examples[path].setdefault(value, [])
            if len(example_rows) < EXAMPLES:
                example_rows.append(row)
    unread: list[Path] = []
    for path in sorted(examples, key=len):
        is_below_unread = any(path[: len(above)] == above for above in unread)
        trial_rows = itertools.chain(*examples[path].values())
        if not is_below_unread and not any(is_read(row, path, converter) for row in trial_rows):
            unread.append(path)
    names = [json.dumps(".".join(path), ensure_ascii=False) for path in unread]
    return f"not read: {', '.join(names)}" if names else ""


def is_read(row: dict, path: Path, converter) -> bool:
    """Whether a row is converted to something else without a key."""
    try:
        return learned(row, converter) != learned(without(row, path), converter)
    except BadRow:  # only without the key
        return True


def learned(row: dict, converter) -> dict:
    """Returns a converted row, as far as a model or a reward function reads it."""
    values = converter.convert_row(row, 0)
    # Reward functions get whole columns. In columns that become ids, a key must change the ids.
    columns = json.loads(values.pop("row_json", "{}"))
    names = columns.keys() - {"tools", "chat_template_kwargs"}
    visible_columns = {name: name in formats.FORMAT_COLUMNS or columns[name] for name in names}
    return {**values, "columns": visible_columns}


def paths_of(value: Any, above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields the keys of a row that hold a value, down to `DEPTH`, each with its 1, 0 or None."""
    for item in as_list(value):
        if not isinstance(item, dict) or "bytes" in item:  # an image of `datasets`
            continue
        for name, below in item.items():
            if below is not None and below not in ("", [], {}):
                yield (*above, name), below if below in (0, 1) else None
                if len(above) + 1 < DEPTH:
                    yield from paths_of(below, (*above, name))


def without(value: Any, path: Path) -> Any:
    """Returns a copy of a value in which a key is removed everywhere."""
    if isinstance(value, list):
        return [without(item, path) for item in value]
    if not isinstance(value, dict):
        return value
    rest = {name: below for name, below in value.items() if len(path) > 1 or name != path[0]}
    return rest | {name: without(rest[name], path[1:]) for name in rest if name == path[0]}
