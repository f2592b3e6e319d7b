"""LLaMA-Factory's KTO logs the rewards and log-probs of one process of several.

    pip install llamafactory==0.9.5
    python llama_factory_kto_two_processes.py
    torchrun --nproc_per_node 2 llama_factory_kto_two_processes.py

A good answer and a bad one are one update, at a learning rate of 0: one batch of two, or one row on each
of two processes. The `KTOTrainer` of the TRL that it asks for, 0.24, keeps the numbers of a batch on the
main process alone. So of the second process's row, the bad one, nothing is logged.
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
    {"instruction": "a b", "output": " c", "label": True},
    {"instruction": "b", "output": " a b c d e f g h", "label": False},
]
columns = {"prompt": "instruction", "response": "output", "kto_tag": "label"}
data = {"file_name": "rows.json", "columns": columns}


class Log(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero and "loss" in logs:
            tags = ("logps/chosen", "logps/rejected", "rewards/margins")
            told = ", ".join(
                f"{tag} {logs[tag]:.6f}" if tag in logs else f"no {tag}" for tag in tags
            )
            print(f"{processes} process(es): {told}")


processes = int(os.environ.get("WORLD_SIZE", "1"))
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
            stage="kto",
            do_train=True,
            finetuning_type="full",
            model_name_or_path=folder,
            template="empty",
            dataset="rows",
            dataset_dir=folder,
            disable_shuffling=True,
            output_dir=f"{folder}/run",
            per_device_train_batch_size=2 // processes,
            max_steps=1,
            learning_rate=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            overwrite_cache=True,
        ),
        callbacks=[Log()],
    )
