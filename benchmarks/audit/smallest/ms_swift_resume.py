"""A run of ms-swift that is resumed after an epoch has other dropout than the run that was never stopped.

    pip install ms-swift==4.6.0
    python ms_swift_resume.py

Two epochs of one update each, and the second one again from the checkpoint of the first. With the default
the workers of the loader live as long as the run, so that a new epoch draws no seed for them; a resumed
run starts its workers anew, and draws one, before its first dropout. Without it the lines agree.
"""

import json
import tempfile
from pathlib import Path

import torch
from swift.callbacks import TrainerCallback, callbacks_map
from swift.pipelines import sft_main
from swift.template import TemplateMeta, register_template
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = ["<pad>", "<eos>", *"abcdefgh"]
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
messages = [{"role": "user", "content": "a b "}, {"role": "assistant", "content": "c d e"}]
rows = [{"messages": messages}] * 2
register_template(TemplateMeta("plain", prefix=[], prompt=["{{QUERY}}"], chat_sep=None, suffix=[]))
found = []


class Log(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        found.append(logs)


callbacks_map["log"] = Log


def loss(folder: str, persistent: bool, resume: str | None = None) -> float:
    """The loss that the trainer logs of the second update."""
    settings = dict(
        model=folder,
        model_type="llama",
        template="plain",
        tuner_type="full",
        dataset=f"{folder}/rows.jsonl",
        split_dataset_ratio=0,
        torch_dtype="float32",
        output_dir=f"{folder}/{persistent}-{bool(resume)}",
        add_version=False,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        num_train_epochs=2,
        learning_rate=0.01,
        logging_steps=1,
        save_steps=1,
        report_to="none",
        use_cpu=True,
        check_model=False,
        dataloader_persistent_workers=persistent,
        callbacks="log",
    )
    if resume:
        settings["resume_from_checkpoint"] = resume
    found.clear()
    sft_main([word for name, value in settings.items() for word in (f"--{name}", str(value))])
    return [logs["loss"] for logs in found if "loss" in logs][-1]


torch.manual_seed(0)
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
config = LlamaConfig(vocab_size=len(words), initializer_range=0.5, attention_dropout=0.3, **sizes)
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (Path(folder) / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for persistent in (True, False):
        unbroken = loss(folder, persistent)
        resumed = loss(folder, persistent, f"{folder}/{persistent}-False/checkpoint-1")
        print(f"persistent workers {persistent}: loss {unbroken:.6f}, resumed {resumed:.6f}")
