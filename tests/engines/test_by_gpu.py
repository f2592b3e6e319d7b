"""docs/memory.md: its settings are arguments of every recipe."""

import re
import runpy

import pytest

from common import ASSETS, arguments
from runs import REPOSITORY, recipe

PAGE = (REPOSITORY / "docs/memory.md").read_text(encoding="utf-8")
RECIPES = ("sft", "dpo", "grpo")
SETTINGS = sorted((ASSETS / "by_gpu").glob("*.yaml"))


def parse(name: str, *argv: str):
    args_class = runpy.run_path(str(recipe(name)), run_name="read")["Args"]
    return arguments.parse(args_class, ASSETS / f"{name}.yaml", list(argv))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda file: file.stem)
def test_every_settings_file_is_read_by_every_recipe(settings, name):
    more = ["--reward_function", "my_rewards:right"] if name == "grpo" else []
    args = parse(name, str(settings), "--model_name_or_path", "M", "--dataset_name", "D", *more)
    assert (args.max_length, args.micro_train_tokens) == (2048, 4096)
    assert args.gradient_checkpointing
    assert (args.lora_r > 0) == ("lora" in settings.stem)
    assert args.load_in_4bit == (settings.stem[0] == "q")
    # The page has the learning rates by default.
    rates = re.search(rf"\| `{settings.name}` \|.*\| (.*) \|", PAGE)[1]
    if "/" in rates:
        assert float(rates.split(" / ")[RECIPES.index(name)]) == args.learning_rate
