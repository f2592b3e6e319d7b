#!/usr/bin/env bash
# LLaMA-Factory 0.9.5, DPO: the logged logits/chosen are means over padding, too.
#
# The good guess: as in TRL, they are means over the tokens of the answers.
# What was seen: two pairs of unlike lengths as one update, at a learning rate of 0: logps/chosen is -50.89 in one batch
# of two as in two batches of one; logits/chosen is -0.38 and -0.45, logits/rejected -0.02 and -0.10.
# Why it matters: the curve depends on the micro-batch size and on how long the longest row beside a short one is.
# Where: concatenated_forward in llamafactory/train/dpo/trainer.py; get_batch_loss_metrics takes .mean() of all logits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6 transformers==5.6.0 \
    trl==0.24.0 accelerate==1.11.0 llamafactory==0.9.5
"$folder/env/bin/pip" uninstall -qy torchvision torchaudio  # they may not fit the build of torch; text needs none
"$folder/env/bin/python" - <<'PYTHON'
import json
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

# It imports torchaudio, and uses it for sounds.
sys.modules["torchaudio"] = ModuleType("torchaudio")
sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)
import llamafactory
from llamafactory.train.tuner import run_exp

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


tags = ["loss", "logps/chosen", "logits/chosen", "logits/rejected"]
seen = {batch: [round(line(batch)[tag], 2) for tag in tags] for batch in (2, 1)}
print(llamafactory.__version__, tags, seen)
assert seen == {2: [0.69, -50.89, -0.38, -0.02], 1: [0.69, -50.89, -0.45, -0.1]}
PYTHON
echo "as described"
