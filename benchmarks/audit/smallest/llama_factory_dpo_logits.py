"""LLaMA-Factory's DPO logs other `logits/chosen` for the same update, cut into other micro-batches.

    pip install llamafactory==0.9.5
    python llama_factory_dpo_logits.py

Two pairs are one update, at a learning rate of 0: one batch of two, or two batches of one. The loss is
the same; `logits/*` are means over all positions of the batch, and its padding is among them.
"""

import json
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
    {"instruction": "a b", "chosen": " c", "rejected": " d e"},
    {"instruction": "b", "chosen": " a b c d e f g h " * 4, "rejected": " c c"},
]
data = {
    "file_name": "rows.json",
    "ranking": True,
    "columns": {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"},
}
found = []


class Log(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        found.append(logs)


def line(batch: int) -> dict:
    """What the trainer logs of the update, in batches of so many pairs."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=len(words), initializer_range=0.5, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
        (Path(folder) / "dataset_info.json").write_text(json.dumps({"rows": data}))
        found.clear()
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
                gradient_accumulation_steps=2 // batch,
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
        return found[0]


whole = line(batch=2)
single = line(batch=1)
print(f"{'':20} 1 batch of 2   2 batches of 1")
for tag in ("loss", "logps/chosen", "logits/chosen", "logits/rejected"):
    print(f"{tag:20} {whole[tag]:12.6f}   {single[tag]:14.6f}")
