"""Fixtures of several test files."""

import argparse
import os

import preference_recipes  # noqa: F401  makes `common` ours

# The tests know what a CPU computes, and launch more processes than there may be GPUs. Set before torch looks for one.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from filelock import FileLock
from torch.utils import cpp_extension
from transformers import AttentionInterface, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common import launch
from runs import ASSETS, tiny_inputs

# A shell that starts the tests in the background has them, and all that they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

PRECISION_OF_PRODUCTS = torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture(autouse=True)
def process_as_it_began():
    """Takes back what models set for the whole process, so that no test depends on those before it."""
    # `stopping.Signals`
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # `onednn.use_onednn`, for a wide model
    torch.backends.mkldnn.matmul.fp32_precision = PRECISION_OF_PRODUCTS
    AttentionInterface.register("sdpa", sdpa_attention_forward)


@pytest.fixture(scope="module")
def accelerator():
    launch.quiet()
    return Accelerator(cpu=True)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ASSETS / "model")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with a tiny model and 44 rows for each recipe, unless a file has `inputs` of its own."""
    return tiny_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of tokenised data in which no other test has written."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


# A file is one worker's. Begun last, a long one would leave the others without work.
LONGEST_FIRST = [
    "recipe",
    "learning",
    "gallery",
    "prove",
    "environments",
    "nodes",
    "invariance",
    "resume",
    "launch",
    "fp16",
    "stopping",
    "lora",
]


def recipe_and_arguments(text: str) -> list[Path | str]:
    """The file of `--recipe`, then its arguments."""
    name, *arguments = shlex.split(text) or [""]
    file = Path(name).expanduser().resolve()
    if not file.is_file():
        raise argparse.ArgumentTypeError(f"{name}: no such file; name one such as recipes/sft.py")
    return [file, *arguments]


def pytest_addoption(parser):
    group = parser.getgroup("proof", "the proof of a recipe, contracts/test_recipe.py")
    group.addoption(
        "--recipe",
        type=recipe_and_arguments,
        help="prove this recipe alone: a file anywhere, in quotes also its arguments",
    )
    group.addoption("--quick", action="store_true", help="prove it on fewer engines")


def pytest_ignore_collect(collection_path, config):
    """With `--recipe` nothing is collected but the proof."""
    is_other = collection_path.is_file() and collection_path.name != "test_recipe.py"
    return True if config.getoption("recipe") and is_other else None


def pytest_collection_modifyitems(items):
    rank = {f"test_{name}.py": number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.fixture(scope="session")
def cpu_adam():
    """DeepSpeed's Adam for CPUs, compiled: on a busy machine that alone takes longer than a launch may."""
    if not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("no C++ compiler here, by which DeepSpeed makes its Adam at the first run")
    folder = Path(cpp_extension._get_build_directory("cpu_adam", False))
    # That of a killed process is free again. torch's stays, and who finds it waits without end.
    with FileLock(folder / "tests.lock"):
        (folder / "lock").unlink(missing_ok=True)
        command = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
        subprocess.run([sys.executable, "-c", command], check=True, capture_output=True)
