#!/usr/bin/env bash
# TRL 1.16.0, RewardTrainer: without a padding token of its own, a reward model never sees that an answer ended.
#
# The good guess: the end-of-text token that TRL appends to each answer is where the score is read.
# What was seen: with a padding token, "a b c" scores otherwise with the end than without. Where the tokenizer has none,
# TRL pads with the end-of-text token, and the two scores are equal: the end counts as padding, and the score is
# that of the token before.
# Why it matters: a finished answer and a truncated one have the same reward, whatever the pairs teach.
# Where: the head in transformers/modeling_layers.py takes the last token that is not pad_token_id, and not the mask.
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
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import RewardConfig, RewardTrainer

words = ["<pad>", "<eos>", *"abcdefgh"]
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
EOS = words.index("<eos>")
rows = [{"prompt": "a", "chosen": " b c", "rejected": " d e f"}] * 4


def scores(pad_token: str | None) -> list[float]:
    """Of the first chosen answer as TRL prepares it, and of the same without its end."""
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=pad_token, eos_token="<eos>")
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=len(words), initializer_range=0.5, num_labels=1, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        trainer = RewardTrainer(
            model=LlamaForSequenceClassification(config),
            args=RewardConfig(
                output_dir=folder,
                per_device_train_batch_size=4,
                max_steps=1,
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
    ids = trainer.train_dataset[0]["chosen_ids"]
    assert ids[-1] == EOS
    model = trainer.model.eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row])).logits.item() for row in (ids, ids[:-1])]


found = {str(pad_token): scores(pad_token) for pad_token in ("<pad>", None)}
print(trl.__version__, "scores with the end and without, by padding token:", found)
ended, cut = found["<pad>"]
assert abs(ended - cut) > 0.1
ended, cut = found["None"]
assert abs(ended - cut) < 1e-5
PYTHON
echo "as described"
