"""TRL's SFTTrainer logs another entropy for the same update where it is cut into other micro-batches.

    pip install trl==1.16.0
    python trl_sft_means.py

Four rows of unlike lengths are one update, at a learning rate of 0. It is made of one batch of four,
and of four batches of one. The loss is the same; `entropy` and `mean_token_accuracy` are means of the
batches' means, so they are not.
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


whole = line(batch=4)
single = line(batch=1)
print(f"{'':20} 1 batch of 4   4 batches of 1")
for tag in ("loss", "entropy", "mean_token_accuracy"):
    print(f"{tag:20} {whole[tag]:12.6f}   {single[tag]:14.6f}")
