"""Fixtures of several test files."""

import os
import shutil

import pytest
from accelerate import Accelerator
from transformers import AutoTokenizer

from common.launch import quiet
from runs import ASSETS


@pytest.fixture(scope="module")
def accelerator():
    quiet()
    return Accelerator(cpu=True)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ASSETS / "model")


# A file is one worker's. Begun last, a long one would leave the others without work.
LONGEST_FIRST = [
    "invariance",
    "configs",
    "resume",
    "stopping",
    "fp16",
    "launch",
    "ppo",
    "strategies",
    "memory",
    "counting",
    "metrics",
    "nodes",
]


def pytest_collection_modifyitems(items):
    rank = {f"test_{name}.py": number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


compiled = pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")),
    reason="no C++ compiler here: with optimizer offload DeepSpeed compiles its Adam at the first run",
)
