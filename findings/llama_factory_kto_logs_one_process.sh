#!/usr/bin/env bash
# LLaMA-Factory 0.9.5, KTO: rewards and log-probs are logged of one process of several.
#
# The good guess: logs are those of all processes.
# What was seen: a good answer and a bad one are one update, at a learning rate of 0. On one process logps/chosen is
# -0.50 and logps/rejected -21.15. On two processes with a row each there is no logps/rejected: the bad row is the
# second process's.
# Why it matters: the curves show half of the data, or an eighth; with few bad answers they have gaps.
# Where: the KTOTrainer of TRL 0.24, which it needs; https://github.com/hiyouga/LlamaFactory/issues/10830
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6 transformers==5.6.0 \
    trl==0.24.0 accelerate==1.11.0 llamafactory==0.9.5
"$folder/env/bin/pip" uninstall -qy torchvision torchaudio  # they may not fit the build of torch; text needs none
cat >"$folder/train.py" <<'PYTHON'
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
    {"instruction": "a b", "output": " c", "label": True},
    {"instruction": "b", "output": " a b c d e f g h", "label": False},
]
columns = {"prompt": "instruction", "response": "output", "kto_tag": "label"}
data = {"file_name": "rows.json", "columns": columns}


class Log(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero and "loss" in logs:
            seen = {tag: round(logs[tag], 2) for tag in logs if tag.startswith("logps/")}
            print("\n", llamafactory.__version__, processes, "process(es):", seen)
            both = {"logps/chosen": -0.5, "logps/rejected": -21.15}
            assert seen == ({"logps/chosen": -0.5} if processes == 2 else both)


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
PYTHON
for processes in 1 2; do
    "$folder/env/bin/torchrun" --standalone --nproc-per-node "$processes" "$folder/train.py"
done
echo "as described"
