#!/usr/bin/env bash
# transformers 5.23.0: loading one model compiles the regular expressions of all models.
#
# The good guess: a renaming of weights is compiled when a weight is compared with it, so only those of the model are.
# What was seen: a Llama has no renaming, and 860 regular expressions are compiled to load it.
# Why it matters: a fifteenth of a second of CPU time in each process that loads a model, half of a small one's load.
# Where: WeightTransform.__init__ in core_model_loading.py, called for every kind of model by
# _build_checkpoint_conversion_mapping in conversion_mapping.py. Compiled at the first match, they would cost nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.0 transformers==5.23.0
"$folder/env/bin/python" - "$folder/model" <<'PYTHON'
import re
import sys
import time

import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, conversion_mapping

sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(sys.argv[1])
conversion_mapping._checkpoint_conversion_mapping_cache = None  # as in a new process
re.purge()

compile_pattern = re.compile
patterns = []


def counted(pattern, flags=0):
    patterns.append(pattern)
    return compile_pattern(pattern, flags)


re.compile = counted
AutoModelForCausalLM.from_pretrained(sys.argv[1])
re.compile = compile_pattern

re.purge()
before = time.process_time()
conversion_mapping._build_checkpoint_conversion_mapping()
seconds = time.process_time() - before
own = conversion_mapping.get_checkpoint_conversion_mapping("llama")
print(transformers.__version__, f"{len(set(patterns))} patterns, {seconds:.3f} s; of a Llama: {own}")
assert own is None and len(set(patterns)) > 800
PYTHON
echo "as described"
