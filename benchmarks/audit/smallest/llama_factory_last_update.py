"""In LLaMA-Factory's DPO the pairs of an epoch's last update do not weigh the same.

    pip install llamafactory==0.9.5
    python llama_factory_last_update.py
    torchrun --nproc_per_node 2 llama_factory_last_update.py

Three pairs are one update: a batch of three; a batch of two and one of one; on two processes one pair
at a time. In the second the single pair weighs as much as the other two together, in the third one
pair is in the update twice (accelerate's `even_batches`). So the gradient norm of the same update is
another one. The same is true of its reward models, and of SFT on two processes.
"""

import json
import os
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

# It imports torchaudio, of which there is no build for torch's CPU build, and uses it for sounds.
sys.modules["torchaudio"] = ModuleType("torchaudio")
sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)
from llamafactory.train.tuner import run_exp  # noqa: E402

words = ["<pad>", "<eos>", *"abcdefgh"]
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
rows = [
    {"instruction": "a b", "chosen": " c d e", "rejected": " a"},
    {"instruction": "b", "chosen": " h h h", "rejected": " c c"},
    {"instruction": "c", "chosen": " a b c", "rejected": " f g h a b"},
]
data = {
    "file_name": "rows.json",
    "ranking": True,
    "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"},
}


class Log(TrainerCallback):
    def __init__(self, name: str):
        self.name = name

    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero and "loss" in logs:
            print(f"\n{self.name}: grad_norm {logs['grad_norm']:.6f}")


def train(name: str, batch: int) -> None:
    """Makes one update, in batches of so many pairs, and prints its gradient norm."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=len(words), initializer_range=0.5, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
        (Path(folder) / "dataset_info.json").write_text(json.dumps({"rows": data}))
        run_exp(
            dict(
                stage="dpo",
                do_train=True,
                finetuning_type="full",
                model_name_or_path=folder,
                template="empty",
                dataset="rows",
                dataset_dir=folder,
                output_dir=f"{folder}/run",
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=2,
                num_train_epochs=1,
                learning_rate=0.0,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                overwrite_cache=True,
            ),
            callbacks=[Log(name)],
        )


if os.environ.get("WORLD_SIZE", "1") == "2":
    train("2 processes, a pair at a time", batch=1)
else:
    train("1 batch of 3", batch=3)
    train("a batch of 2 and one of 1", batch=2)
