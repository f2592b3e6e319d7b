"""torchtune's recipes add what an epoch's updates leave over to the first update of the next epoch.

    pip install torchtune==0.6.1 torchao==0.10.0 torch
    python torchtune_left_over.py

Three pairs, of which two are an update, at a learning rate of 0; DPO's loss is ln 2 = 0.693 then. An epoch
has one update and leaves one pair over, whose gradient and loss are kept. So the second epoch's update is
half as large again, and its logged loss is 1.040; the third one's is 1.040, too.
"""

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


class Tokenizer:
    pad_id = 0


class Log:
    def log_config(self, config) -> None:
        pass

    def log_dict(self, payload: dict, step: int) -> None:
        print(f"\nupdate {step}: loss {payload['loss']:.6f}")

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
