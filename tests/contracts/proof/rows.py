"""The first rows of a recipe's data, of uneven lengths."""

import itertools
import json

from common import as_list

# Where a row may hold an answer to learn, as the formats of data have it.
ANSWERS = ["messages", "completion", "chosen", "rejected", "output", "conversations", "text"]


def first_rows(names: str | list[str] | None, split: str, number: int) -> list[list[dict]]:
    """Returns the first rows of each data set, made uneven, see `uneven`.

    Args:
        names: as a recipe's arguments name data sets.
        number: how many rows of each, at most.
    """
    from preference_recipes.data import files  # slow to import

    sets = []
    for name in as_list(names):
        sets.append(uneven(list(files.load(name, split).read(0, number))))
    return sets


def uneven(rows: list[dict]) -> list[dict]:
    """Returns rows of uneven lengths: as they are, unless they have three lengths or fewer.

    Rows of one length would hide a mean of means. So their answers are repeated 1 to 3 times.
    Prompts of one length would hide how generation pads them. So, where rows have no answers, every
    fourth prompt is repeated once: no more, since the model may have no answer to it that is worth
    a reward.
    """
    if len({len(json.dumps(row, default=str)) for row in rows}) > 3:
        return rows
    has_answers = any(name in row for row in rows for name in ANSWERS)
    columns = ANSWERS if has_answers else ["prompt"]
    role = "assistant" if has_answers else "user"
    times_of_rows = [1, 2, 3] if has_answers else [1, 2, 1, 1]
    return [
        {
            name: repeated(value, times, role) if name in columns else value
            for name, value in row.items()
        }
        for row, times in zip(rows, itertools.cycle(times_of_rows))
    ]


def repeated(value, times: int, role: str):
    """Returns a text repeated, or in a list of messages what this role says."""
    if isinstance(value, str):
        return value * times
    if not isinstance(value, list):
        return value
    messages = []
    for message in value:
        if isinstance(message, dict) and message.get("role") == role:
            message = {**message, "content": repeated(message.get("content"), times, role)}
        messages.append(message)
    return messages
