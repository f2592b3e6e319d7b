#!/usr/bin/env bash
# datasets 5.2.0: an image column that was told not to decode is decoded, and its file is written anew.
#
# The good guess: `rows.features["image"].decode = False` lets images come back as the files that they are. It raises
# nothing and reads back as False on the object that was changed.
# What was seen: `features` is a copy at each access, so nothing changes: rows have decoded images, and what is mapped
# from them is encoded again, here a JPEG of other quality. `cast_column` with `Image(decode=False)` does what was meant.
# Why it matters: a program that means to keep a user's files trains on others, with other pixels, and says nothing.
# Where: Dataset.features in datasets/arrow_dataset.py returns a copy.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q datasets==5.2.0 pillow==12.0.0
"$folder/env/bin/python" - "$folder" <<'PYTHON'
import io
import sys

import datasets
from PIL import Image

buffer = io.BytesIO()
Image.new("RGB", (8, 8), "red").save(buffer, "JPEG", quality=95)  # Pillow's default is 75
file = f"{sys.argv[1]}/rows.parquet"
features = datasets.Features({"image": datasets.Image()})
datasets.Dataset.from_dict({"image": [{"bytes": buffer.getvalue()}]}, features=features).to_parquet(file)
rows = datasets.load_dataset("parquet", data_files=file, split="train", cache_dir=f"{sys.argv[1]}/cache")

rows.features["image"].decode = False
print(datasets.__version__, "after decode = False:", type(rows[0]["image"]).__name__)
assert isinstance(rows[0]["image"], Image.Image)
assert rows.features["image"].decode
mapped = rows.map(lambda row: {"image": row["image"], "n": 1})
raw = mapped.cast_column("image", datasets.Image(decode=False))[0]["image"]["bytes"]
print("mapped:", len(raw), "bytes, the user's file:", len(buffer.getvalue()))
cast = rows.cast_column("image", datasets.Image(decode=False))
assert cast[0]["image"]["bytes"] == buffer.getvalue()
assert raw != buffer.getvalue()
PYTHON
echo "as described"
