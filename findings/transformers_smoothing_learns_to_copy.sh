#!/usr/bin/env bash
# transformers 5.23.0, Trainer: with label smoothing a model that also reads images learns to repeat its input.
#
# The good guess: a small label_smoothing_factor is nearly no smoothing, and a model learns what it learns without.
# What was seen: two small models learn the row 2 3 4 5 6 7 2 3 .... After it Llama says 3 4 5 6 7 2 to 2 3 4 5 6 7,
# with a factor of 0.01 and without. Qwen2.5-VL does so without, and says 2 3 4 5 6 7 with the factor. Its loss falls as
# Llama's does.
# Why it matters: a model that echoes, and a curve that looks as it should. So it is with Qwen3-VL, Qwen3.5, Mistral 3
# and Llava.
# Where: compute_loss in transformers/trainer.py shifts labels of classes in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.0 transformers==5.23.0 accelerate==1.15.0
"$folder/env/bin/python" - <<'PYTHON'
import tempfile

import torch
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sizes = dict(
    vocab_size=10,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    bos_token_id=None,
    eos_token_id=None,
)
ids = [2, 3, 4, 5, 6, 7] * 2


def make(name: str):
    torch.manual_seed(0)
    if name == "Llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLConfig(
        text_config={**sizes, "rope_parameters": rope},
        vision_config=dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=32),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def learn(name: str, factor: float) -> list[int]:
    """What the trained model says after each of the row's first six tokens."""
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            label_smoothing_factor=factor,
            max_steps=100,
            learning_rate=1e-2,
            logging_steps=100,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        rows = [{"input_ids": ids, "labels": ids}] * 8
        trainer = Trainer(model=make(name), args=args, train_dataset=rows)
        trainer.train()
        model = trainer.model.eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids[:6]])).logits.argmax(-1)[0].tolist()


found = {
    (name, factor): learn(name, factor) for name in ("Llama", "Qwen2.5-VL") for factor in (0.0, 0.01)
}
print(transformers.__version__, found)
following, copied = ids[1:7], ids[:6]
assert found == {
    ("Llama", 0.0): following,
    ("Llama", 0.01): following,
    ("Qwen2.5-VL", 0.0): following,
    ("Qwen2.5-VL", 0.01): copied,
}
for name in ("Qwen3VL", "Qwen3_5", "Mistral3", "Llava"):
    assert hasattr(transformers, f"{name}ForConditionalGeneration")
    assert f"{name}ForConditionalGeneration" not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
PYTHON
echo "as described"
