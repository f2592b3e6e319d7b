"""TRL's KTOTrainer logs other rewards and log-probs for the same update, cut into other micro-batches.

    pip install trl==1.16.0
    python trl_kto_means.py

Four rows are one update, at a learning rate of 0: three good answers and a bad one. Of one batch of
four, `logps/chosen` is the mean of the good ones. Of two batches of two it is the mean of two means,
in which the good answer beside the bad one counts twice.
"""

import tempfile

import torch
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


whole = line(batch=4)
halves = line(batch=2)
print(f"{'':20} 1 batch of 4   2 batches of 2")
for tag in ("loss", "logps/chosen", "logps/rejected"):
    print(f"{tag:20} {whole[tag]:12.6f}   {halves[tag]:14.6f}")
