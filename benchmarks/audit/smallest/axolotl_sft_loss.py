"""Axolotl's SFT makes another update of the same rows where they are cut into other micro-batches.

    pip install axolotl==0.19.0
    python axolotl_sft_loss.py

Four rows of unlike lengths are one update, at a learning rate of nearly 0. It is made of one batch of four, and of
four batches of one. Its trainer sets `model_accepts_loss_kwargs` to False where a model's `forward` has
no parameter of the name `num_items_in_batch`; transformers' models take it among others. So each batch
is divided by its own tokens, and a token of a short row weighs more.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
sys.modules["this_script"] = sys.modules[__name__]
from axolotl.cli.args import TrainerCliArgs  # noqa: E402
from axolotl.cli.config import load_cfg  # noqa: E402
from axolotl.cli.train import do_train  # noqa: E402
from axolotl.integrations.base import BasePlugin  # noqa: E402

words = ["<pad>", "<eos>", *"abcdefgh"]
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
texts = ["a b c", "b d e f g h a b c d e f g h", "c d a a a", "d h g"]
found = []


class Log(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        found.append(logs)


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
            plugins=["this_script.Plugin"],
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
        found.clear()
        do_train(load_cfg(str(file)), TrainerCliArgs())
        return found[0]


if __name__ == "__main__":  # its data workers import this script again
    whole = line(batch=4)
    single = line(batch=1)
    print(f"{'':10} 1 batch of 4   4 batches of 1")
    for tag in ("loss", "grad_norm"):
        print(f"{tag:10} {whole[tag]:12.6f}   {single[tag]:14.6f}")
