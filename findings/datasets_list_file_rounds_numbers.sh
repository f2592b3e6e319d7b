#!/usr/bin/env bash
# datasets 5.2.0: numbers of a JSON file that is one list are rounded to ten decimals; those of JSON lines are not.
#
# The good guess: [{...}, {...}] and one {...} a line are the same rows.
# What was seen: from lines 0.123456789012345 and 3e-12 come back as they are, from a list as 0.123456789 and 0.0. With
# field="rows", of {"rows": [...]}, 0.7 is 0.7000000000000001, too. to_json writes 0.0 for 3e-12, as well.
# Why it matters: a probability becomes 0, its logarithm minus infinity; and a model learns to write
# 0.7000000000000001 in the arguments of a tool.
# Where: datasets/packaged_modules/json/json.py writes a list anew with the ujson of pandas, whose default is ten
# decimals; https://github.com/huggingface/datasets/pull/8652 has the 0.7.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q datasets==5.2.0 pandas==3.1.1
"$folder/env/bin/python" - "$folder" <<'PYTHON'
import json
import pathlib
import sys

import datasets

folder = pathlib.Path(sys.argv[1])
numbers = [0.7, 0.123456789012345, 3e-12]
rows = [{"number": number} for number in numbers]


def load(name: str, text: str, **settings) -> list[float]:
    file = folder / name
    file.write_text(text)
    cache = str(folder / "cache")
    found = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=cache, **settings)
    return found["number"][:]


found = {
    "lines": load("lines.jsonl", "".join(json.dumps(row) + "\n" for row in rows)),
    "list": load("list.json", json.dumps(rows)),
    "field": load("field.json", json.dumps({"rows": rows}), field="rows"),
}
datasets.Dataset.from_list(rows).to_json(folder / "written.jsonl")
lines = (folder / "written.jsonl").read_text().splitlines()
found["to_json"] = [json.loads(line)["number"] for line in lines]
print(datasets.__version__, found)
rounded = [0.7, 0.123456789, 0.0]
assert found["lines"] == numbers and found["list"] == rounded and found["to_json"] == rounded
assert found["field"] == [0.7000000000000001, 0.12345678900000001, 0.0]
PYTHON
echo "as described"
