"""In TRL's DPOTrainer the pairs of an epoch's last update do not weigh the same.

    pip install trl==1.16.0
    python trl_last_micro_batch.py

Three pairs are one update: a batch of three; or a batch of two and one of one. Then the single pair
weighs as much as the other two together, so the gradient norm of the same update is another one.
"""

import tempfile

import torch
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


print(f"1 batch of 3:                grad_norm {line(batch=3)['grad_norm']:.6f}")
print(f"a batch of 2 and one of 1:   grad_norm {line(batch=2)['grad_norm']:.6f}")
