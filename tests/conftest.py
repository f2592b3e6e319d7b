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


compiled = pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")),
    reason="no C++ compiler here: with optimizer offload DeepSpeed compiles its Adam at the first run",
)
