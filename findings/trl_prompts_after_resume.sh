#!/usr/bin/env bash
# TRL 1.16.0, GRPOTrainer: resumed in the second epoch, a run takes the prompts in the order of the first one again.
#
# The good guess: each epoch has an order of its own, and a resumed run goes on with that of its epoch.
# What was seen: eight prompts, an update each, in the order g d a h c b e f, then e b h g d c a f. Resumed from the
# checkpoint between the two epochs, the second one is g d a h c b e f.
# Why it matters: the run is not the one that was interrupted; with many restarts all epochs have one order.
# Where: RepeatSampler in trl/trainer/utils.py makes its generator anew, and a resume only skips batches.
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
from trl import GRPOConfig, GRPOTrainer

words = ["<pad>", "<eos>", *"abcdefgh"]
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
rows = [{"prompt": letter} for letter in "abcdefgh"]


def train(folder: str, resume: str | None = None) -> str:
    """The prompts of a run, in the order in which they come."""
    seen = []

    def reward(prompts, completions, **_) -> list[float]:
        seen.append(prompts[0])
        return [float(len(completion)) for completion in completions]

    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    trainer = GRPOTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes)),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=2,
            num_train_epochs=2,
            logging_steps=1,
            save_steps=8,
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
    return " ".join(seen)


with tempfile.TemporaryDirectory() as folder:
    unbroken = train(folder)
    resumed = train(folder, f"{folder}/checkpoint-8")
found = [unbroken[:15], unbroken[16:], resumed]
print(trl.__version__, "first epoch, second, second after a resume:", found)
assert found == ["g d a h c b e f", "e b h g d c a f", "g d a h c b e f"]
PYTHON
echo "as described"
