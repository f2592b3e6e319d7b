"""Each demo, run as its page says but for evaluations in between, learns what its page shows."""

import pytest
import yaml

from recipes import RECIPES
from runs import ASSETS, config_launcher, evaluation_lines, launch, recipe

# Seconds: a demo takes about 100 on two quiet cores, and many times that on busy ones.
TIMEOUT = 1500


def learn(name: str, config: str, output, *flags) -> tuple[dict, dict]:
    """The first and the last evaluation of a demo."""
    words = [recipe(name), *flags, "--eval_steps", 0, "--output_dir", output]
    launch(config_launcher(config), *words, fresh=True, timeout=TIMEOUT)
    before, *_, after = evaluation_lines(output)
    settings = yaml.safe_load((ASSETS / f"{name}.yaml").read_text())
    assert (before["global_step"], after["global_step"]) == (0, settings["max_steps"])
    return before, after


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize("name", RECIPES)
def test_a_demo_learns(name, tmp_path):
    demo = RECIPES[name].demo
    before, after = learn(name, demo.config, tmp_path)
    assert after[demo.tag] - before[demo.tag] >= demo.gain


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 60)
def test_a_demo_learns_with_adapters(tmp_path):
    """DPO, at the learning rate that docs/lora.md gives."""
    flags = ["--lora_r", 16, "--learning_rate", 2e-3]
    before, after = learn("dpo", "cpu", tmp_path, *flags)
    assert after["eval/exact_match"] - before["eval/exact_match"] >= 0.15
