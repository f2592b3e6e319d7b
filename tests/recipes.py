"""What the tests of every recipe need to know about each, in one table: `RECIPES`."""

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent

# Rewards that are not in the data.
ANSWER_REWARD = "preference_recipes.rollouts.rewards:answer_reward"
TIES = "tests.tied_rewards:ties"
# A teacher whose tokens are those of all tiny models.
TEACHER = REPOSITORY / "assets/teacher"
TAUGHT = ["--teacher_model_name_or_path", TEACHER]


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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the tests of every recipe need to know about one. Flags are those of tiny runs.

    Attributes:
        data: the stem of the embedded data it learns from: conversations, pairs or prompts.
        demo: for test_learning.py.
        glossary_flags: for test_docs.py, so that every tag of the glossary is logged.
        device_flags: for test_waits.py.
    """

    data: Literal["sft", "preferences", "prompts"]
    demo: Demo
    glossary_flags: list = field(default_factory=list)
    device_flags: list = field(default_factory=list)

    @property
    def generates(self) -> bool:
        """Whether it learns from responses that it samples."""
        return self.data == "prompts"

    @property
    def held_out_file(self) -> str:
        """The embedded held-out data."""
        return f"{self.data}_eval.jsonl"


RECIPES = {
    "sft": Recipe(
        data="sft",
        demo=Demo("ds_fp16", "eval/exact_match", 0.45),  # docs/sft.md: 0.496
        device_flags=["--max_new_tokens", 4],
    ),
    "reward": Recipe(
        data="preferences",
        demo=Demo("cpu", "eval/accuracy", 0.45),  # docs/reward.md: 0.498 to 0.520
    ),
    "dpo": Recipe(
        data="preferences",
        demo=Demo("ds_fp16", "eval/exact_match", 0.15),
        device_flags=["--lora_r", 2, "--max_new_tokens", 4],
    ),
    "kto": Recipe(
        data="preferences",  # a pair is one sample of two answers; rows with a label are in test_labels.py
        demo=Demo("cpu", "eval/exact_match", 0.15),
        device_flags=["--max_new_tokens", 4],
    ),
    "ppo": Recipe(
        data="prompts",
        demo=Demo("cpu", "eval/exact_match", 0.25),
        device_flags=[
            *("--reward_function", ANSWER_REWARD, "--rollout_batch_size", 16),
            *("--max_new_tokens", 4, "--num_epochs_per_rollout", 2),
            *("--kl_in", "loss", "--kl_estimator", "k3"),
        ],
    ),
    "grpo": Recipe(
        data="prompts",
        demo=Demo("cpu", "eval/exact_match", 0.25),
        glossary_flags=["--kl_coef", 0.01],
        device_flags=[
            *("--reward_function", "test_waits:unequal", "--rollout_batch_size", 8),
            *("--n_samples_per_prompt", 2, "--max_new_tokens", 4, "--kl_coef", 0.1),
            *("--share_prompts", "false"),
        ],
    ),
    "distill": Recipe(
        data="prompts",
        demo=Demo("cpu", "eval/exact_match", 0.25),
        # Two updates of sampled tokens need log-probs of the rollout, which are timed.
        glossary_flags=["--loss_type", "sampled", "--num_epochs_per_rollout", 2],
        device_flags=[
            *(*TAUGHT, "--rollout_batch_size", 16, "--max_new_tokens", 4),
            *("--share_prompts", "false"),
        ],
    ),
}
NAMES = list(RECIPES)


def load(name: str, path: Path | None = None) -> ModuleType:
    """Imports a recipe, or this file instead, without running it."""
    path = path or REPOSITORY / f"recipes/{name}.py"
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
