#!/usr/bin/env bash
# torchtune 0.6.1, DPO: logits/chosen count padding, and log_probs/chosen are those of the last micro-batch.
#
# The good guess: both are means over the update's chosen answers, whatever stands beside them.
# What was seen: at a learning rate of 0, logits/chosen of one chosen answer is 2.591 beside a short rejected answer,
# 2.650 beside a long one. log_probs/chosen of two pairs is -92.292 in one batch of two, -116.324 in two batches of one:
# that of the second pair alone. The loss is 0.693 in all.
# Why it matters: numbers of a run with accumulation are noise of the last rows, and padding moves the others.
# Where: train() in recipes/lora_dpo_single_device.py, and concatenated_forward, which takes .mean() of all logits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6 torchao==0.10.0 torchtune==0.6.1
"$folder/env/bin/python" - <<'PYTHON'
import importlib.util
import json
import tempfile
from pathlib import Path

import torch
import torchtune
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torchtune.models.convert_weights import tune_to_hf
from torchtune.models.llama3_2 import llama3_2

SIZES = dict(vocab_size=16, num_layers=1, num_heads=2, num_kv_heads=2, embed_dim=32, max_seq_len=32)
rows = []
logged = {}


class Tokenizer:
    pad_id = 0


class Log:
    def log_config(self, config) -> None:
        pass

    def log_dict(self, payload: dict, step: int) -> None:
        logged.update(payload)

    def close(self) -> None:
        pass


def pairs(tokenizer) -> list[dict]:
    return rows


def pair(chosen: list[int], rejected: list[int]) -> dict:
    return {
        "chosen_input_ids": [2, 3, *chosen],
        "chosen_labels": [-100, -100, *chosen],
        "rejected_input_ids": [2, 3, *rejected],
        "rejected_labels": [-100, -100, *rejected],
    }


def train(batch: int) -> None:
    """Makes one update of all rows, in batches of so many pairs."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        weights = llama3_2(**SIZES, intermediate_dim=32).state_dict()
        weights = tune_to_hf(weights, num_heads=2, num_kv_heads=2, dim=32)
        (Path(folder) / "model").mkdir()
        save_file(
            {name: value.contiguous() for name, value in weights.items()},
            f"{folder}/model/model.safetensors",
            {"format": "pt"},
        )
        sizes = dict(num_attention_heads=2, num_key_value_heads=2, hidden_size=32)
        (Path(folder) / "model/config.json").write_text(json.dumps(sizes))
        config = dict(
            output_dir=f"{folder}/run",
            model=dict(
                _component_="torchtune.models.llama3_2.lora_llama3_2",
                lora_attn_modules=["q_proj", "v_proj"],
                apply_lora_to_mlp=False,
                lora_rank=2,
                lora_alpha=4,
                intermediate_dim=32,
                **SIZES,
            ),
            tokenizer=dict(_component_="__main__.Tokenizer"),
            checkpointer=dict(
                _component_="torchtune.training.FullModelHFCheckpointer",
                checkpoint_dir=f"{folder}/model",
                checkpoint_files=["model.safetensors"],
                output_dir=f"{folder}/run",
                model_type="LLAMA3_2",
            ),
            resume_from_checkpoint=False,
            save_adapter_weights_only=True,
            dataset=dict(_component_="__main__.pairs"),
            seed=0,
            shuffle=False,
            batch_size=batch,
            gradient_accumulation_steps=len(rows) // batch,
            epochs=1,
            max_steps_per_epoch=None,
            optimizer=dict(_component_="torch.optim.AdamW", lr=0.0),
            lr_scheduler=dict(
                _component_="torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                num_warmup_steps=0,
            ),
            loss=dict(_component_="torchtune.rlhf.loss.DPOLoss"),
            compile=False,
            metric_logger=dict(_component_="__main__.Log"),
            log_every_n_steps=1,
            device="cpu",
            dtype="fp32",
            enable_activation_checkpointing=False,
            enable_activation_offloading=False,
        )
        file = Path(torchtune.__file__).parents[1] / "recipes/lora_dpo_single_device.py"
        spec = importlib.util.spec_from_file_location("recipe", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        recipe = module.LoRADPORecipeSingleDevice(cfg=OmegaConf.create(config))
        recipe.setup(cfg=OmegaConf.create(config))
        recipe.train()


found = []
for rejected in ([6], [6, 7, 8] * 8):
    rows[:] = [pair([4, 5], rejected)]
    train(batch=1)
    found.append(round(float(logged["logits/chosen"]), 2))
rows[:] = [pair([4, 5], [6]), pair([7, 8, 9], [6])]
for batch in (2, 1):
    train(batch)
    found.append(round(float(logged["log_probs/chosen"]), 1))
print("\n0.6.1", found)
assert found == [2.59, 2.65, -92.3, -116.3]
PYTHON
echo "as described"
