"""What torchtune's DPO logs of an update depends on its padding, and on its micro-batches.

    pip install torchtune==0.6.1 torchao==0.10.0 torch
    python torchtune_dpo_numbers.py

At a learning rate of 0: `logits/chosen` of the same chosen answer, beside a short rejected answer and a
long one: it is the mean over all positions, those of padding with them. And `log_probs/chosen` of two
pairs, as one batch of two and as two batches of one: the recipe for one device logs the last batch alone.
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


for name, rejected in (("a short", [6]), ("a long", [6, 7, 8] * 8)):
    rows[:] = [pair([4, 5], rejected)]
    train(batch=1)
    print(f"beside {name} rejected answer: logits/chosen {logged['logits/chosen']:.6f}")
rows[:] = [pair([4, 5], [6]), pair([7, 8, 9], [6])]
for batch in (2, 1):
    train(batch)
    told = f"log_probs/chosen {logged['log_probs/chosen']:.6f}, loss {logged['loss']:.6f}"
    print(f"batches of {batch}: {told}")
