#!/usr/bin/env bash
# transformers 5.23.0 and torch 2.13.0: under bf16 autocast the cache of generation holds fp32, also its values.
#
# The good guess: autocast computes keys and values by linear layers, so both are bf16, 2 bytes a number.
# What was seen: rotary embeddings are fp32 and make the keys fp32. The cache takes the dtype of the keys for a layer, and
# joins later values to that, so the values are fp32, too. A model without rotary embeddings (GPT-2) has bf16.
# Why it matters: a cache takes twice the memory that one calculates for it. What writes new values in place, as a cache of
# fixed size does, meets two dtypes: `index_copy_` refuses them.
# Where: apply_rotary_pos_emb in models/llama/modeling_llama.py, DynamicLayer.lazy_initialization in cache_utils.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.0 transformers==5.23.0
"$folder/env/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

small = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
llama = LlamaForCausalLM(LlamaConfig(**small, intermediate_size=32, num_key_value_heads=2))
gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2))
found = {}
for name, model in {"llama": llama, "gpt2": gpt2}.items():
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for ids in ([[1, 2, 3]], [[4]]):
            model(torch.tensor(ids), past_key_values=cache, use_cache=True)
    layer = cache.layers[0]
    found[name] = [str(layer.keys.dtype), str(layer.values.dtype)]
print(transformers.__version__, torch.__version__, found)
assert found == {"llama": ["torch.float32"] * 2, "gpt2": ["torch.bfloat16"] * 2}
PYTHON
echo "as described"
