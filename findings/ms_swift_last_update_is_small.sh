#!/usr/bin/env bash
# ms-swift 4.6.0, DPO: the last, short update of an epoch is made smaller.
#
# The good guess: the loss of an update is the mean over its pairs, however many there are.
# What was seen: two pairs in one batch, at a learning rate of 0. Where an update holds one batch, the loss is 0.693 and
# grad_norm 1.820; where it may hold four, 0.173 and 0.455: the one batch's mean is divided by four.
# Why it matters: with 8 accumulation steps and one batch left over, the last rows of each epoch count an eighth, and
# the logged loss dips there.
# Where: https://github.com/modelscope/ms-swift/issues/10084
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6 transformers==5.19.0 trl==0.29.1 ms-swift==4.6.0
"$folder/env/bin/python" - <<'PYTHON'
import json
import tempfile
from pathlib import Path

import swift
import torch
from swift.callbacks import TrainerCallback, callbacks_map
from swift.pipelines import rlhf_main
from swift.template import TemplateMeta, register_template
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = ["<pad>", "<eos>", *"abcdefgh"]
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
messages = [{"role": "user", "content": "a b "}, {"role": "assistant", "content": "c d e"}]
rows = [{"messages": messages, "rejected_response": "h h"}] * 2
register_template(TemplateMeta("plain", prefix=[], prompt=["{{QUERY}}"], chat_sep=None, suffix=[]))
found = []


class Log(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        found.append(logs)


callbacks_map["log"] = Log


def line(accumulation: int) -> dict:
    """What the trainer logs of the update, where an update may hold so many batches."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=len(words), initializer_range=0.5, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (Path(folder) / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = dict(
            rlhf_type="dpo",
            model=folder,
            model_type="llama",
            template="plain",
            tuner_type="full",
            dataset=f"{folder}/rows.jsonl",
            split_dataset_ratio=0,
            torch_dtype="float32",
            output_dir=f"{folder}/run",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=1,
            learning_rate=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            check_model=False,
            callbacks="log",
        )
        found.clear()
        rlhf_main([word for name, value in settings.items() for word in (f"--{name}", str(value))])
        return found[0]


seen = {}
for accumulation in (1, 4):
    logs = line(accumulation)
    seen[accumulation] = [round(logs["loss"], 3), round(logs["grad_norm"], 3)]
print(swift.__version__, "loss and grad_norm by accumulation steps:", seen)
assert seen == {1: [0.693, 1.82], 4: [0.173, 0.455]}
PYTHON
echo "as described"
