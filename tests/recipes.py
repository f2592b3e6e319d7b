"""The recipes, and each as a module."""

import importlib.util
from types import ModuleType

from runs import recipe

NAMES = ["sft", "reward", "dpo", "ppo", "grpo"]


def load(name: str) -> ModuleType:
    """Imports a recipe without running it."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", recipe(name))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
