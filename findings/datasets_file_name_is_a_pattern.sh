#!/usr/bin/env bash
# datasets 5.2.0: the name of a file is read as a pattern, so that another file is loaded than the one that was named.
#
# The good guess: a path that exists is that file: data_files="run[1].jsonl" loads run[1].jsonl.
# What was seen: the rows of run1.jsonl, which lies beside it: [1] is a class of characters. No word is said.
# Why it matters: scripts that number their files write such names, and where no other file fits, the load ends
# with a bare StopIteration. glob.escape(path) helps.
# Where: resolve_pattern in datasets/data_files.py calls glob.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q datasets==5.2.0
"$folder/env/bin/python" - <<'PYTHON'
import glob
import json
import pathlib
import tempfile

import datasets

folder = pathlib.Path(tempfile.mkdtemp())
named = folder / "run[1].jsonl"
named.write_text(json.dumps({"text": "of the file that was named"}) + "\n")
(folder / "run1.jsonl").write_text(json.dumps({"text": "of another file"}) + "\n")


def load(name: str) -> list[str]:
    cache = str(folder / "cache")
    return datasets.load_dataset("json", data_files=name, split="train", cache_dir=cache)["text"][:]


found = [load(str(named)), load(glob.escape(str(named)))]
print(datasets.__version__, found)
assert found == [["of another file"], ["of the file that was named"]]
PYTHON
echo "as described"
