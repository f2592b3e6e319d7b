"""ms-swift's DPO makes a smaller update of the last rows of an epoch.

    pip install ms-swift==4.6.0
    python ms_swift_last_update.py

Two pairs are one update, a batch of two, where an update may hold one batch; and where it may hold four
of them, so that it is the epoch's last, short one. There the batch's mean is divided by four.
"""

import json
import tempfile
from pathlib import Path

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


for accumulation in (1, 4):
    logs = line(accumulation)
    print(
        f"1 of {accumulation} batches: loss {logs['loss']:.6f}, grad_norm {logs['grad_norm']:.6f}"
    )
