#!/usr/bin/env bash
# mlx-lm 0.32.0 with transformers 5.23.0: a Llama that transformers 5 saved is read with a rotary base of 10,000.
#
# The good guess: mlx-lm, which requires transformers 5 itself, reads what transformers 5 saves.
# What was seen: transformers 5 writes the base into "rope_parameters", and no longer "rope_theta" beside it. mlx-lm's
# Qwen2 and Qwen3 read that. Its Llama, which many other models are loaded by, does not: it takes 10,000, and no scaling,
# without a word. Log-probs of a small random Llama with a base of 1,000,000 are off by up to 8.7; with "rope_theta"
# written beside they agree to 2e-5.
# Why it matters: a fine-tuned model answers worse and worse with each token, and its base, whose config is older, does not.
# Where: mlx_lm/models/llama.py: ModelArgs.rope_theta = 10000; qwen2.py and qwen3.py have __post_init__ for it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q mlx-lm==0.32.0 "mlx[cpu]==0.32.4" torch==2.13.0 numpy==2.4.0 transformers==5.23.0
FOLDER=$folder "$folder/env/bin/python" - <<'PYTHON'
import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.utils import load_model
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3)
IDS = list(range(3, 63))


def by_mlx(folder: Path) -> np.ndarray:
    model, _ = load_model(folder)
    logits = model(mx.array([IDS])).astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


found = {}
for kind in ("llama", "qwen2"):
    folder = Path(os.environ["FOLDER"], kind)
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = AutoConfig.for_model(kind, **SIZES, rope_parameters=rope, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits.log_softmax(-1).numpy()
    as_saved = np.abs(by_mlx(folder) - expected).max()
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_theta": 1e6}))
    found[kind] = (as_saved, np.abs(by_mlx(folder) - expected).max())
print(transformers.__version__, found)
assert found["llama"][0] > 0.1 and found["llama"][1] < 1e-3
assert max(found["qwen2"]) < 1e-3
PYTHON
echo "as described"
