"""Each demo, run as its page says, learns what its page shows."""

import pytest
import yaml

from recipes import RECIPES
from runs import ASSETS, config_launcher, evaluation_lines, launch, recipe

TIMEOUT = (
    1500  # seconds: a demo takes about 100 on two quiet cores, and many times that on busy ones
)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize("name", RECIPES)
def test_a_demo_learns(name, tmp_path):
    demo = RECIPES[name].demo
    flags = ["--output_dir", tmp_path]
    launch(config_launcher(demo.config), recipe(name), *flags, fresh=True, timeout=TIMEOUT)
    before, *_, after = evaluation_lines(tmp_path)

    settings = yaml.safe_load((ASSETS / f"{name}.yaml").read_text())
    assert (before["global_step"], after["global_step"]) == (0, settings["max_steps"])
    assert after[demo.tag] - before[demo.tag] >= demo.gain


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize(
    "name", [name for name, of_recipe in RECIPES.items() if of_recipe.demo.adapters]
)
def test_a_demo_learns_with_adapters(name, tmp_path):
    learning_rate, gain = RECIPES[name].demo.adapters
    flags = ["--lora_r", 16, "--learning_rate", learning_rate, "--output_dir", tmp_path]
    command = [ASSETS / f"{name}.yaml", *flags]
    launch(config_launcher("cpu"), recipe(name), *command, fresh=True, timeout=TIMEOUT)
    before, *_, after = evaluation_lines(tmp_path)
    assert after["eval/exact_match"] - before["eval/exact_match"] >= gain
