"""Whole runs on a pretended device: no tensor of the host meets one of the device, see pretended_device.py.

test_waits.py shows this of updates and rollouts. Here are evaluations and reward models, and what tells machines with a
GPU from those without.
"""

import gzip
import itertools
import os
import sys

import pytest
from transformers import LlamaConfig, LlamaForSequenceClassification

import pretended_device
from common.actor import Actor
from recipes import RECIPES, load
from runs import ASSETS, evaluation_lines, recipe, tiny_llama
from test_waits import Ended

ROWS = 8


def first_rows(source, target):
    with (gzip.open if source.suffix == ".gz" else open)(source, "rt") as file:
        target.write_text("".join(itertools.islice(file, ROWS)))
    return target


def reward_model(folder):
    tiny_llama(folder)  # its tokenizer
    config = LlamaConfig.from_pretrained(folder, num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["sft", "ppo", "distill"])  # of each kind of loop
def test_no_tensor_of_the_host_meets_one_of_the_device(name, tmp_path, monkeypatch):
    flags = [
        "--model_name_or_path", tiny_llama(tmp_path / "model"), "--output_dir", tmp_path / "run",
        "--dataset_name", first_rows(ASSETS / RECIPES[name].train_file, tmp_path / "rows.jsonl"),
        "--eval_dataset_name", first_rows(ASSETS / RECIPES[name].held_out_file, tmp_path / "held_out.jsonl"),
        "--train_batch_size", ROWS, "--micro_train_batch_size", ROWS // 2, "--max_steps", 1, "--eval_steps", 1,
        "--max_length", 64, "--report_to", "none", *RECIPES[name].device_flags,
    ]  # fmt: skip
    if RECIPES[name].evaluates_answers:
        flags += ["--max_new_tokens", 4]
    if RECIPES[name].generates:
        flags += ["--rollout_batch_size", ROWS]
    if RECIPES[name].scores_responses:
        flags += ["--reward_model_name_or_path", reward_model(tmp_path / "reward")]
    monkeypatch.setattr(sys, "argv", [str(recipe(name)), *map(str, flags)])
    module = load(name)

    def save(*args, **kwargs):
        raise Ended

    with monkeypatch.context() as patch, pretended_device.device(patch):
        patch.setattr(Actor, "save", save)
        with pytest.raises(Ended):
            module.main()
    assert [line["global_step"] for line in evaluation_lines(tmp_path / "run")] == [0, 1]


def test_tests_see_no_gpu():
    """They launch two processes where there may be one GPU, and their server has DeepSpeed for CPUs."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
