"""ms-swift's DPO logs other `logits/chosen` for the same update, cut into other micro-batches.

    pip install ms-swift==4.6.0
    python ms_swift_dpo_logits.py

Two pairs are one update, at a learning rate of 0: one batch of two, or two batches of one. `logits/*` are
means over the tokens of the answers, and of several batches the mean of their means, in which a token
of a short answer weighs more.
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
rows = [
    {
        "messages": [{"role": "user", "content": "a b "}, {"role": "assistant", "content": answer}],
        "rejected_response": "h h",
    }
    for answer in ("c", "d e f g h a b c d e f g")
]
register_template(TemplateMeta("plain", prefix=[], prompt=["{{QUERY}}"], chat_sep=None, suffix=[]))
found = []


class Log(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        found.append(logs)


callbacks_map["log"] = Log


def line(batch: int) -> dict:
    """What the trainer logs of the update, in batches of so many pairs."""
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
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=2 // batch,
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


whole = line(batch=2)
single = line(batch=1)
print(f"{'':20} 1 batch of 2   2 batches of 1")
for tag in ("loss", "logps/chosen", "logits/chosen"):
    print(f"{tag:20} {whole[tag]:12.6f}   {single[tag]:14.6f}")
