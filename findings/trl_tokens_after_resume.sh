#!/usr/bin/env bash
# TRL 1.16.0, SFTTrainer: num_tokens begins at 0 again where a run is resumed.
#
# The good guess: what counts the tokens of the whole run is in the checkpoint, as the step is.
# What was seen: of four updates with six tokens each, num_tokens is 6, 12, 18, 24. Resumed after the second it goes on
# with 6 and 12, at steps 3 and 4.
# Why it matters: a curve over tokens folds back on itself at each restart, and the tokens of a long run are lost.
# Where: _total_train_tokens in trl/trainer/sft_trainer.py is not in the state that is saved.
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
rows = [{"prompt": "a b", "completion": " c d e"}] * 4


def train(folder: str, resume: str | None = None) -> list[dict]:
    """The log lines of a run."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    trainer = SFTTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes)),
        args=SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=1,
            max_steps=4,
            logging_steps=1,
            save_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=resume)
    return {line["step"]: line for line in trainer.state.log_history if "num_tokens" in line}


with tempfile.TemporaryDirectory() as folder:
    unbroken = train(folder)
    resumed = train(folder, f"{folder}/checkpoint-2")
found = [[lines[step]["num_tokens"] for step in (1, 2, 3, 4)] for lines in (unbroken, resumed)]
print(trl.__version__, "never stopped, and resumed after 2:", found)
assert found == [[6, 12, 18, 24], [6, 12, 6, 12]]
PYTHON
echo "as described"
