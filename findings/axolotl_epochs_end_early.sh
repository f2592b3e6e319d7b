#!/usr/bin/env bash
# Axolotl 0.19.0: a run of four epochs ends after two of them where an epoch's rows do not fill its last update.
#
# The good guess: num_epochs: 4 is four passes over the rows.
# What was seen: two rows, where an update may hold four: an epoch makes an update of two rows. The run stops after its
# second update, at the end of the second epoch.
# Why it matters: small sets are seen half as often as asked, and the learning rate's schedule is as short.
# Where: calculate_total_num_steps in axolotl/utils/trainer.py: rows * epochs / size of an update, 2 * 4 / 4 = 2.
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
texts = ["a b c", "c d a a a"]
logged = []


class Log(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            logged.append((state.global_step, round(state.epoch)))


class Plugin(BasePlugin):
    def add_callbacks_post_trainer(self, cfg, trainer):
        return [Log()]


def train() -> None:
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
            micro_batch_size=1,
            gradient_accumulation_steps=4,
            num_epochs=4,
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
        do_train(load_cfg(str(file)), TrainerCliArgs())


if __name__ == "__main__":  # its data workers import this script again
    train()
    print("\n", axolotl.__version__, "update and epoch:", logged)
    assert logged == [(1, 1), (2, 2)]
PYTHON
(cd "$folder" && env/bin/python train.py)
echo "as described"
