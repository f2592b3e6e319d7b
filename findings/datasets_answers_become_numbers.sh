#!/usr/bin/env bash
# datasets 5.2.0: in a column of strings and lists, the string "42" comes back as the number 42.
#
# The good guess: a string is a string, whatever stands in other rows.
# What was seen: of answers that are all strings, each comes back as it is. Once a message of another row has a list of
# parts as its content, the column becomes JSON, and a string that can be read as JSON is read: "42" is 42, "true" is
# True, '{"town": "Rome"}' a dict, "[1, 2]" a list, and "007" is 7. Words stay.
# Why it matters: rows with images have lists of parts, rows without have strings. Together, short answers turn into
# numbers, and JSON answers into objects, which a chat template writes in its own way or refuses.
# Where: json_encode_field in datasets/utils/json.py leaves a string that is JSON as it is, so nobody can tell later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q datasets==5.2.0
"$folder/env/bin/python" - "$folder" <<'PYTHON'
import json
import pathlib
import sys

import datasets

folder = pathlib.Path(sys.argv[1])
answers = ["42", "true", '{"town": "Rome"}', "[1, 2]", "007", "yes"]


def row(question: str | list, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def load(name: str, rows: list[dict]) -> list:
    """The answers of the rows, as they come back."""
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cache = str(folder / "cache")
    found = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=cache)
    return [messages[1]["content"] for messages in found["messages"]]


texts = [row("What is it?", answer) for answer in answers]
parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
alone = load("texts.jsonl", texts)
mixed = load("mixed.jsonl", [*texts, row(parts, "yes")])
print(datasets.__version__, "strings:", alone, "beside a list of parts:", mixed)
assert alone == answers
assert mixed == [42, True, {"town": "Rome"}, [1, 2], 7, "yes", "yes"]
PYTHON
echo "as described"
