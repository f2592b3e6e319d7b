#!/usr/bin/env bash
# transformers 5.23.0: once mistral-common is installed, another tokenizer is loaded from the same folder.
#
# The good guess: a tokenizer follows from its folder. Installing a package that nobody imports changes nothing.
# What was seen: a folder with tokenizer.json, a chat template and tekken.json gives a TokenizersBackend with its template.
# With mistral-common 1.11.7 and pillow it gives a MistralCommonBackend: no chat template, other ids.
# `mistral_format=False` keeps the first.
# Why it matters: a trainer reads other tokens once another program's package stands in its environment.
# Where: AutoTokenizer.from_pretrained in models/auto/tokenization_auto.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q transformers==5.23.0
cat > "$folder/load.py" <<'PYTHON'
import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

folder = Path(sys.argv[1])
for settings in ({}, {"mistral_format": False}):
    tokenizer = AutoTokenizer.from_pretrained(folder, **settings)
    template = getattr(tokenizer, "chat_template", None)
    print(type(tokenizer).__name__, template, tokenizer.encode("hello", add_special_tokens=False))
PYTHON
"$folder/env/bin/python" - "$folder/model" <<'PYTHON'
import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

folder = Path(sys.argv[1])
words = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
tokenizer.chat_template = "mine"
tokenizer.save_pretrained(folder)
(folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
PYTHON
"$folder/env/bin/pip" download -q --no-deps -d "$folder/wheel" mistral-common==1.11.7
"$folder/env/bin/python" -m zipfile -e "$folder"/wheel/*.whl "$folder/unpacked"
cp "$folder"/unpacked/mistral_common/data/tekken_240911.json "$folder/model/tekken.json"
"$folder/env/bin/python" "$folder/load.py" "$folder/model" | tee "$folder/before"
"$folder/env/bin/pip" install -q mistral-common==1.11.7 pillow==12.0.0
"$folder/env/bin/python" "$folder/load.py" "$folder/model" | tee "$folder/after"
diff <(printf 'TokenizersBackend mine [1]\nTokenizersBackend mine [1]\n') "$folder/before"
diff <(printf 'MistralCommonBackend None [29706]\nTokenizersBackend mine [1]\n') "$folder/after"
echo "as described"
