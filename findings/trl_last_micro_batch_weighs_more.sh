#!/usr/bin/env bash
# TRL 1.16.0, DPOTrainer: in the last update of an epoch, the pairs of its last micro-batch weigh more.
#
# The good guess: the loss is the mean over the pairs of an update, also where its last micro-batch is not full.
# What was seen: three pairs as one update, at a learning rate of 0: grad_norm is 1.198 as one batch of three, 1.502 as
# a batch of two and one of one, whose pair weighs as much as the other two together.
# Why it matters: each epoch ends with an update that follows a few rows, and how much depends on the micro-batch size.
# Where: training_step of transformers' Trainer divides each micro-batch's mean by the number of micro-batches.
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
from trl import DPOConfig, DPOTrainer

words = ["<pad>", "<eos>", *"abcdefgh"]
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
rows = [
    {"prompt": "a b", "chosen": " c d e", "rejected": " a"},
    {"prompt": "b", "chosen": " h h h", "rejected": " c c"},
    {"prompt": "c", "chosen": " a b c", "rejected": " f g h a b"},
]


def line(batch: int) -> dict:
    """What the trainer logs of the update, in batches of so many pairs."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=len(words), initializer_range=0.5, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        trainer = DPOTrainer(
            model=folder,
            args=DPOConfig(
                output_dir=f"{folder}/run",
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=2,
                num_train_epochs=1,
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


found = {batch: round(line(batch)["grad_norm"], 3) for batch in (3, 2)}
print(trl.__version__, "grad_norm by the size of a micro-batch", found)
assert found == {3: 1.198, 2: 1.502}
PYTHON
echo "as described"
