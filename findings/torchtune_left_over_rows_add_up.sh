#!/usr/bin/env bash
# torchtune 0.6.1: what an epoch's updates leave over is added to the first update of the next epoch.
#
# The good guess: rows that do not fill an update are left out, or make a smaller one. No update is larger.
# What was seen: DPO on three pairs, two of which are an update, at a learning rate of 0, where the loss is ln 2, 0.693.
# The first epoch's update logs 0.693, those of the second and third 1.040: gradient and loss of the pair that was left
# over are in them.
# Why it matters: an update that is too large at the beginning of each epoch, and a peak in the log.
# Where: train() in recipes/lora_dpo_single_device.py keeps its sums beyond the end of an epoch.
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
found = []


class Tokenizer:
    pad_id = 0


class Log:
    def log_config(self, config) -> None:
        pass

    def log_dict(self, payload: dict, step: int) -> None:
        found.append(round(payload["loss"], 3))

    def close(self) -> None:
        pass


def pairs(tokenizer) -> list[dict]:
    pair = {
        "chosen_input_ids": [2, 3, 4, 5],
        "chosen_labels": [-100, -100, 4, 5],
        "rejected_input_ids": [2, 3, 6],
        "rejected_labels": [-100, -100, 6],
    }
    return [pair] * 3


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
        shuffle=True,
        batch_size=1,
        gradient_accumulation_steps=2,
        epochs=3,
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
print("\n0.6.1", found)
assert found == [0.693, 1.04, 1.04]
PYTHON
echo "as described"
