#!/usr/bin/env bash
# TRL 1.16.0, SFTTrainer: the logged entropy and token accuracy of an update depend on how it is cut into micro-batches.
#
# The good guess: as the loss, they are means over the tokens of the update: 1 batch of 4 rows or 4 batches of 1 are the
# same.
# What was seen: of four rows of unlike lengths at a learning rate of 0, the loss is 3.4950 both times. The entropy is
# 1.3338 and 1.3680, mean_token_accuracy 0.1304 and 0.1607: means of the batches' means, in which a token of a short row
# weighs more.
# Why it matters: two runs that differ by the micro-batch alone look different, and a smaller GPU changes the curve.
# Where: compute_loss in trl/trainer/sft_trainer.py; https://github.com/huggingface/trl/issues/6943
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.0 transformers==5.23.0 \
    accelerate==1.15.0 datasets==5.2.0 trl==1.16.0
"$folder/env/bin/python" - <<'PYTHON'
import tempfile

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = ["<pad>", "<eos>", *"abcdefgh"]
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
TAGS = ["loss", "entropy", "mean_token_accuracy"]
rows = [
    {"prompt": "a b", "completion": " c"},
    {"prompt": "b", "completion": " d e f g h a b c d e f g h"},
    {"prompt": "c d", "completion": " a a a"},
    {"prompt": "d", "completion": " h g"},
]


def line(batch: int) -> dict:
    """What the trainer logs of the update, in batches of so many rows."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=len(words), initializer_range=0.5, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=LlamaForCausalLM(config),
            args=SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=4 // batch,
                max_steps=1,
                learning_rate=0.0,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.train()
        return trainer.state.log_history[0]


found = {batch: [round(line(batch)[tag], 3) for tag in TAGS] for batch in (4, 1)}
print(trl.__version__, TAGS, found)
assert found == {4: [3.495, 1.334, 0.13], 1: [3.495, 1.368, 0.161]}
PYTHON
echo "as described"
