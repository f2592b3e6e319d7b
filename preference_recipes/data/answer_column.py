"""What the column `answer` may hold, and how it is kept: a list means any of its entries."""

import sys
from typing import Any

BETWEEN = "\x1e"  # the entries of a list; ASCII's record separator, which no answer has
OBJECT = "\x1f"  # stands for what is no answer


def to_text(answer: Any) -> str:
    """Returns an answer as a text, see `entries`; "" without one, `OBJECT` if it is one."""
    values = answer if isinstance(answer, (list, tuple)) else [answer]
    if any(isinstance(value, (dict, list, tuple)) for value in values):
        return OBJECT
    return BETWEEN.join(str(value) for value in values if value is not None and value != "")


def entries(text: str) -> list[str]:
    """Returns the answers, any of which is right, of what `to_text` returned."""
    return text.split(BETWEEN)


def refuse_objects(name: str, rows) -> None:
    """Exits if a row's answer is an object, which nothing can be compared with.

    Args:
        rows: of the data set `name`, as `dataset.load` returns them.
    """
    answers = rows["answer"][:] if "answer" in rows.column_names else []
    if OBJECT in answers:
        row = rows[answers.index(OBJECT)]["row"]
        sys.exit(
            f"data set {name!r}, row {row}: column 'answer' holds an object: expected a text, a "
            "number or a list of them, of which any is right"
        )
