"""Each demo, run as its page says, learns what its page shows."""

from typing import NamedTuple

import pytest
import yaml

from runs import ASSETS, config_launcher, evaluation_lines, launch, recipe

TIMEOUT = (
    1500  # seconds: a demo takes about 100 on two quiet cores, and many times that on busy ones
)


class Demo(NamedTuple):
    """What a demo must reach.

    Attributes:
        config: one of those in `accelerate_configs/` that the recipe's page gives figures of.
        tag: what it learns, as a share of the held-out rows.
        gain: how much that share must grow from before the first update to after the last.
    """

    config: str
    tag: str
    gain: float


DEMOS = {
    "sft": Demo("ds_fp16", "eval/exact_match", 0.45),  # docs/sft.md: 0.496
    "reward": Demo("cpu", "eval/accuracy", 0.45),  # docs/reward.md: 0.498 to 0.520
    "dpo": Demo("ds_fp16", "eval/exact_match", 0.15),
    "ppo": Demo("cpu", "eval/exact_match", 0.25),
    "grpo": Demo("cpu", "eval/exact_match", 0.25),
}


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize("name", DEMOS)
def test_a_demo_learns(name, tmp_path):
    demo = DEMOS[name]
    flags = ["--output_dir", tmp_path]
    launch(config_launcher(demo.config), recipe(name), *flags, fresh=True, timeout=TIMEOUT)
    before, *_, after = evaluation_lines(tmp_path)

    settings = yaml.safe_load((ASSETS / f"{name}.yaml").read_text())
    assert (before["global_step"], after["global_step"]) == (0, settings["max_steps"])
    assert after[demo.tag] - before[demo.tag] >= demo.gain


# By docs/lora.md: learning rate, and the gain in held-out exact match, of which 0.15 is asked for.
WITH_ADAPTERS = {"sft": (3e-3, 0.4), "dpo": (2e-3, 0.15), "grpo": (3e-3, 0.25)}


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize("name", WITH_ADAPTERS)
def test_a_demo_learns_with_adapters(name, tmp_path):
    learning_rate, gain = WITH_ADAPTERS[name]
    flags = ["--lora_r", 16, "--learning_rate", learning_rate, "--output_dir", tmp_path]
    command = [ASSETS / f"{name}.yaml", *flags]
    launch(config_launcher("cpu"), recipe(name), *command, fresh=True, timeout=TIMEOUT)
    before, *_, after = evaluation_lines(tmp_path)
    assert after["eval/exact_match"] - before["eval/exact_match"] >= gain
