"""`update/*`: which weights an update moves in the precision in which they are read, and the warning where few move."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from runs import (
    ASSETS,
    REPOSITORY,
    config_launcher,
    launch,
    recipe,
    tiny_llama,
    training_lines,
)

PROBE = REPOSITORY / "tests/moved_probe.py"
FLAGS = ["--max_steps", 3, "--eval_steps", 0, "--warmup_steps", 0, "--learning_rate", 1e-4]
WAYS = {
    "single_gpu": (config_launcher("single_gpu", 1), []),
    "ds_zero3": (config_launcher("ds_zero3", 2), []),
    "ddp": (config_launcher("ddp", 2), []),
    "fsdp2": (config_launcher("fsdp2", 2), []),
    "ds_fp16": (config_launcher("ds_fp16", 2), []),
    "ds_zero1": (config_launcher("ds_zero1", 2), []),
    "ds_zero2": (config_launcher("ds_zero2", 2), []),
    "ds_zero2, adapters": (config_launcher("ds_zero2", 2), ["--lora_r", 8]),
    "ds_zero3, padded shards": (config_launcher("ds_zero3", 3), ["--train_batch_size", 48]),
}
FAST = ("single_gpu", "ds_zero3")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way not in FAST)) for way in WAYS]
)
def test_what_moved_is_counted_exactly(way, tmp_path):
    """As from whole weights, whatever a process holds of them: every number of every update's line."""
    launcher, more = WAYS[way]
    output = tmp_path / "output"
    flags = [*FLAGS, "--micro_train_batch_size", 16, "--logging_steps", 1, *more]
    script = [PROBE, recipe("sft"), *flags, "--output_dir", output]
    launch(launcher, *script, env={"PROBE": str(tmp_path / "probe.jsonl")})
    lines = (tmp_path / "probe.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in lines]
    assert len(lines) == len(training_lines(output)) == 3
    for (counted, reported), logged in zip(lines, training_lines(output)):
        assert {name: logged[name] for name in reported} == reported
        assert reported.keys() == counted.keys()
        for name, value in counted.items():
            assert reported[name] == pytest.approx(value, rel=1e-9)
        assert 0 < reported["update/moved"] < 1


def test_the_dead_zone_is_said_once(tmp_path):
    """Weights on the grid of bf16, and steps of a hundredth of half a cell: the masters move, what is read does not, and the
    run warns after 20 updates, with the updates that a median weight needs."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path / "model"))
    model.bfloat16().float().save_pretrained(tmp_path / "model")
    flags = [
        "--model_name_or_path",
        tmp_path / "model",
        "--dataset_name",
        ASSETS / "sft_train.jsonl",
    ]
    flags += ["--train_batch_size", 2, "--micro_train_batch_size", 2, "--max_length", 64]
    flags += [*FLAGS, "--max_steps", 25, "--learning_rate", 1e-6, "--lr_scheduler_type", "constant"]
    done = launch(
        config_launcher("single_gpu", 1),
        recipe("sft"),
        *flags,
        *("--logging_steps", 10, "--save_steps", 0, "--output_dir", tmp_path / "output"),
    )
    for line in training_lines(tmp_path / "output"):
        # Only small weights, norms (which fp32 reads) and embeddings have cells so small.
        assert line["update/norm"] > 0
    [warning] = re.findall(r"WARNING: 20 updates changed (.*)% of the weights.*", done.stdout)
    assert float(warning) < 5
    weights = torch.cat([weight.flatten() for weight in model.parameters()]).abs()
    half_cell = 2.0 ** torch.log2(weights.median()).floor() * 2**-8
    [updates] = re.findall(r"moves for some ([\d,]+) updates", done.stdout)
    assert int(updates.replace(",", "")) == round(half_cell.item() / 1e-6)


def test_fp32_has_no_such_tags(tmp_path):
    launch([], recipe("sft"), *FLAGS, "--max_steps", 1, "--output_dir", tmp_path)
    assert not [name for line in training_lines(tmp_path) for name in line if "update/" in name]
