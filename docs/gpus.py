"""Writes the table of docs/recipes-by-gpu.md: which launch and which settings fit on which GPU.

python docs/gpus.py

For each model and machine it takes the first arrangement that fits by the estimate of
`preference_recipes.tools.memory`.
"""

import tempfile
from pathlib import Path
from typing import NamedTuple

import yaml
from transformers import AutoConfig

from preference_recipes.tools import memory

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_name("recipes-by-gpu.md")
BEGIN = "<!-- written by docs/gpus.py -->\n"
END = "<!-- end -->\n"
# Of a GPU's memory, what an estimate may take: the rest is for what it leaves out.
USABLE = 0.9
# GRPO's responses that are generated at once, of up to --max_length tokens with their prompts.
RESPONSES = 16

# Hidden size, inner size of the MLP, layers, heads, heads of keys, vocabulary, tied embeddings.
SHAPES = {
    "0.5 B": ("qwen2", 896, 4864, 24, 14, 2, 151936, True),  # Qwen2.5
    "3 B": ("qwen2", 2048, 11008, 36, 16, 2, 151936, True),
    "7 B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
    "14 B": ("qwen2", 5120, 13824, 48, 40, 8, 152064, False),
    "32 B": ("qwen2", 5120, 27648, 64, 40, 8, 152064, False),
    "70 B": ("llama", 8192, 28672, 80, 64, 8, 128256, False),  # Llama 3.1
}
# Bytes of a GPU, GPUs, and launch configs with the YAML of the recipe's arguments, best first.
ON_ONE = [("single_gpu", "full"), ("single_gpu", "lora"), ("single_gpu", "qlora")]
ON_EIGHT = [("ds_zero2", "full"), ("ds_zero3", "full"), ("ds_zero3", "lora")]
MACHINES = {
    "24 GB": (24e9, 1, ON_ONE),
    "80 GB": (80e9, 1, ON_ONE),
    "8 x 80 GB": (80e9, 8, ON_EIGHT),
}
RECIPES = ("sft", "dpo", "grpo")


class Fit(NamedTuple):
    """An arrangement, and the GiB that it is estimated to take on each GPU."""

    config: str
    settings: str
    gib: float


def config_of(model: str):
    """Returns the config of a model of that size."""
    kind, hidden, inner, layers, heads, keys, vocabulary, tied = SHAPES[model]
    return AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM" if kind == "llama" else "Qwen2ForCausalLM"],
    )


def read_settings(name: str) -> dict:
    """Returns the recipe's arguments in one of the YAMLs in assets/by_gpu."""
    file = REPOSITORY / "assets" / "by_gpu" / f"{name}.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def estimate(model: str, recipe: str, processes: int, config: str, settings_name: str) -> float:
    """Returns the GiB that a run takes on each GPU at its worst moment."""
    settings = read_settings(settings_name)
    setup = memory.read_setup(Path("accelerate_configs") / f"{config}.yaml", processes)
    shape = config_of(model)
    rank = settings.get("lora_r", 0)
    with tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)
        counts = memory.count(folder, rank, settings.get("load_in_4bit", False))
    # DPO's reference is the base with its adapters off.
    frozen = int(recipe == "dpo" and not rank)
    tokens = settings["micro_train_tokens"]
    of_micro_batch = memory.activations(setup, shape, tokens, settings["gradient_checkpointing"])
    rows = memory.table(setup, counts, 1, frozen, of_micro_batch)
    (total,) = [row for row in rows if (row.place, row.state) == ("GPU", "sum")]
    worst = max(total.forward, total.backward, total.step)
    if recipe == "grpo":
        # ZeRO-3 gathers the whole actor to generate. Keys and values are in half precision.
        gathered = 2 * counts.parameters if setup.stage == 3 else 0
        keys = shape.num_key_value_heads * shape.hidden_size // shape.num_attention_heads
        cache = 2 * 2 * keys * shape.num_hidden_layers * RESPONSES * settings["max_length"]
        worst = max(worst, total.step + gathered + cache)
    return worst / memory.GIB


def first_fit(model: str, recipe: str, machine: str) -> Fit | None:
    """Returns the first arrangement that fits on a machine; None if none does."""
    size, processes, arrangements = MACHINES[machine]
    for config, settings in arrangements:
        gib = estimate(model, recipe, processes, config, settings)
        if gib <= USABLE * size / memory.GIB:
            return Fit(config, settings, gib)
    return None


def table() -> str:
    """Returns the table of all models, recipes and machines."""
    lines = [f"| model | recipe | {' | '.join(MACHINES)} |", "| --- " * (2 + len(MACHINES)) + "|"]
    for model in SHAPES:
        for recipe in RECIPES:
            fits = [first_fit(model, recipe, machine) for machine in MACHINES]
            cells = [
                f"`{fit.config}`, `{fit.settings}`: {fit.gib:.0f}" if fit else "none"
                for fit in fits
            ]
            lines.append(f"| {model} | {recipe} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """Returns the page with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
