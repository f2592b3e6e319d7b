"""TRL's SFTTrainer counts `num_tokens` from 0 again where a run is resumed.

    pip install trl==1.16.0
    python trl_tokens_after_resume.py

Four updates of one row each, and the same run again from its checkpoint 2.
"""

import tempfile

import torch
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
print("update   num_tokens, never stopped   num_tokens, resumed after update 2")
for step in unbroken:
    print(f"{step:6}   {unbroken[step]['num_tokens']:25.0f}   {resumed[step]['num_tokens']:34.0f}")
