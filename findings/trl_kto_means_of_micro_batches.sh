#!/usr/bin/env bash
# TRL 1.16.0, KTOTrainer: logps/chosen of the same update depends on how it is cut into micro-batches.
#
# The good guess: it is the mean over the good answers of the update.
# What was seen: of three good answers and a bad one, at a learning rate of 0, the loss is 0.5 and logps/rejected -15.76
# in 1 batch of 4 as in 2 batches of 2; logps/chosen is -18.447 and -23.497. Of two batches it is the mean of two means,
# in which the good answer beside the bad one counts twice. rewards/chosen is made in the same way.
# Why it matters: log-probs and rewards of runs with other micro-batches cannot be compared.
# Where: https://github.com/huggingface/trl/issues/7047
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
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import KTOConfig, KTOTrainer

words = ["<pad>", "<eos>", *"abcdefgh"]
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
rows = [
    {"prompt": "a b", "completion": " c", "label": True},
    {"prompt": "b", "completion": " d e", "label": True},
    {"prompt": "d", "completion": " a b c d e f g h a b c d", "label": True},
    {"prompt": "c d", "completion": " a a a", "label": False},
]


class InOrder(KTOTrainer):
    """Not shuffled: so that it is known which rows meet in a batch."""

    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset)


def line(batch: int) -> dict:
    """What the trainer logs of the update, in batches of so many rows."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=len(words), initializer_range=0.5, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        trainer = InOrder(
            model=folder,
            args=KTOConfig(
                output_dir=f"{folder}/run",
                loss_type="apo_zero_unpaired",  # without the KL, which is one of each batch
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


tags = ["loss", "logps/chosen", "logps/rejected"]
found = {batch: [round(line(batch)[tag], 2) for tag in tags] for batch in (4, 2)}
print(trl.__version__, tags, found)
assert found == {4: [0.5, -18.45, -15.76], 2: [0.5, -23.5, -15.76]}
PYTHON
echo "as described"
