#!/usr/bin/env bash
# Axolotl 0.19.0, SFT: the same rows make another update where they are cut into other micro-batches.
#
# The good guess: the loss is the mean over the tokens of the update, as in transformers' Trainer since 4.46.
# What was seen: four rows of unlike lengths, at a learning rate of nearly 0: loss and grad_norm are 3.46 and 5.01 in
# one batch of four, 3.04 and 4.31 in four batches of one.
# Why it matters: each batch is divided by its own tokens, so a token of a short row weighs more, and a smaller GPU
# trains another model.
# Where: the trainer sets model_accepts_loss_kwargs to False where forward has no parameter num_items_in_batch by name;
# transformers' models take it among others; https://github.com/axolotl-ai-cloud/axolotl/issues/3982
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.3.5 transformers==5.16.1 accelerate==1.13.0 axolotl==0.19.0
cat >"$folder/train.py" <<'PYTHON'
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
sys.modules["train"] = sys.modules[__name__]
import axolotl
from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.cli.train import do_train
from axolotl.integrations.base import BasePlugin

words = ["<pad>", "<eos>", *"abcdefgh"]
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
texts = ["a b c", "b d e f g h a b c d e f g h", "c d a a a", "d h g"]
logged = []


class Log(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        logged.append(logs)


class Plugin(BasePlugin):
    def add_callbacks_post_trainer(self, cfg, trainer):
        return [Log()]


def line(batch: int) -> dict:
    """What the trainer logs of the update, in batches of so many rows."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=len(words), initializer_range=0.5, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
        rows = []
        for text in texts:
            ids = tokenizer(text).input_ids
            rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids})
        (Path(folder) / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = dict(
            base_model=f"{folder}/model",
            datasets=[{"path": f"{folder}/rows.jsonl", "ds_type": "json", "type": None}],
            plugins=["train.Plugin"],
            output_dir=f"{folder}/run",
            dataset_prepared_path=f"{folder}/prepared",
            val_set_size=0,
            sequence_len=32,
            micro_batch_size=batch,
            gradient_accumulation_steps=4 // batch,
            max_steps=1,
            num_epochs=1,
            optimizer="adamw_torch",
            learning_rate=1e-12,
            lr_scheduler="constant",
            logging_steps=1,
            bf16=False,
            fp16=False,
            tf32=False,
        )
        file = Path(folder) / "settings.yaml"
        file.write_text(json.dumps(settings))  # JSON is YAML
        logged.clear()
        do_train(load_cfg(str(file)), TrainerCliArgs())
        return logged[0]


if __name__ == "__main__":  # its data workers import this script again
    found = {}
    for batch in (4, 1):
        logs = line(batch)
        found[batch] = [round(logs["loss"], 2), round(logs["grad_norm"], 2)]
    print("\n", axolotl.__version__, "loss and grad_norm by micro-batch:", found)
    assert found == {4: [3.46, 5.01], 1: [3.04, 4.31]}
PYTHON
(cd "$folder" && env/bin/python train.py)
echo "as described"
