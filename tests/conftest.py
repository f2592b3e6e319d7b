"""Fixtures of several test files."""

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
