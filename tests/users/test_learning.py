"""Each demo, run as its page says but for evaluations in between, learns what its page shows."""

import pytest
import yaml

from recipes import RECIPES
from runs import ASSETS, config_launcher, evaluation_lines, launch, recipe

# Seconds: a demo takes about 100 on two quiet cores, and many times that on busy ones.
TIMEOUT = 1500


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize("name", RECIPES)
def test_a_demo_learns(name, tmp_path):
    demo = RECIPES[name].demo
    words = [recipe(name), "--eval_steps", 0, "--output_dir", tmp_path]
    launch(config_launcher(demo.config), *words, timeout=TIMEOUT)
    before, *_, after = evaluation_lines(tmp_path)
    settings = yaml.safe_load((ASSETS / f"{name}.yaml").read_text())
    assert (before["global_step"], after["global_step"]) == (0, settings["max_steps"])
    assert after[demo.tag] - before[demo.tag] >= demo.gain
