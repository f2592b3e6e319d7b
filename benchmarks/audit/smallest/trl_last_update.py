"""On two processes the last update of an epoch may hold a row twice, under transformers' Trainer.

    pip install trl==1.16.0
    python trl_last_update.py
    torchrun --nproc_per_node 2 trl_last_update.py

Three rows are one update: a batch of one row, accumulated three times; or on two processes. There
accelerate's `even_batches`, which is on by default, fills the second process's last batch with the
first row again. So the gradient norm of the same update is another one.
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
rows = [
    {"prompt": "a b", "completion": " c d e"},
    {"prompt": "b", "completion": " h h h"},
    {"prompt": "c", "completion": " a b c"},
]
torch.manual_seed(0)
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
config = LlamaConfig(vocab_size=len(words), initializer_range=0.5, **sizes)
with tempfile.TemporaryDirectory() as folder:
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4,
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
    line = trainer.state.log_history[0]
    if trainer.accelerator.is_main_process:
        print(
            f"{trainer.accelerator.num_processes} process(es): loss {line['loss']:.6f}, "
            f"grad_norm {line['grad_norm']:.6f}, num_tokens {line['num_tokens']:.0f}"
        )
