#!/usr/bin/env bash
# datasets 5.2.0: a column of JSON strings that look like dates comes back as points in time.
#
# The good guess: JSON knows no dates, so the string "2024-01-05" is a string, as json.loads says.
# What was seen: datetime.datetime(2024, 1, 5, 0, 0), the feature timestamp[s]; with one other text in the column all
# are strings. So the type of a row depends on the other rows.
# Why it matters: str() of such an answer is "2024-01-05 00:00:00". It is learned so, or compared so, and every right
# response counts as wrong.
# Where: the JSON reader of pyarrow, which datasets uses, guesses types.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q datasets==5.2.0
"$folder/env/bin/python" - <<'PYTHON'
import json
import pathlib
import tempfile

import datasets

folder = pathlib.Path(tempfile.mkdtemp())


def load(name: str, *answers: str) -> list:
    file = folder / name
    file.write_text("".join(json.dumps({"answer": answer}) + "\n" for answer in answers))
    rows = datasets.load_dataset(
        "json", data_files=str(file), split="train", cache_dir=str(folder / "cache")
    )
    return rows["answer"][:]


alone = load("dates.jsonl", "2024-01-05")
mixed = load("mixed.jsonl", "2024-01-05", "soon")
print(datasets.__version__, alone, mixed)
assert [str(value) for value in alone] == ["2024-01-05 00:00:00"] and mixed == ["2024-01-05", "soon"]
PYTHON
echo "as described"
