#!/usr/bin/env bash
# transformers 5.23.0: its 2,500 files of models are read when it is imported, and again when the first model is.
#
# The good guess: what it finds in them is kept. There is an lru_cache for it.
# What was seen: 549 folders are looked at by `import transformers`, and all of them again by `transformers.models`. The
# cache has room for 128, and both go through the folders in the same order, so it never answers.
# Why it matters: a quarter of a second of CPU time in each process that loads a model. common/arguments.py hands the
# first answer on.
# Where: create_import_structure_from_path in utils/import_utils.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q transformers==5.23.0
"$folder/env/bin/python" - <<'PYTHON'
import transformers
from transformers.utils.import_utils import create_import_structure_from_path

first = create_import_structure_from_path.cache_info()
import transformers.models

second = create_import_structure_from_path.cache_info()
print(transformers.__version__, first, second)
assert (first.hits, second.hits) == (0, 0)
assert second.misses == 2 * first.misses > 1000
PYTHON
echo "as described"
