"""Faults of resuming that were reported of other programs.

No other test here would notice them. docs/counting.md describes them, tests/reported_faults.py plants
them.
"""

import pytest
import torch

from runs import launch, recipe, timeless, tiny_inputs, weights

# 44 rows: updates of 16, 16 and 12 samples in an epoch, and two epochs.
UPDATES = 6
EPOCH = 3


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run of two epochs with all of its checkpoints."""
    folder = tiny_inputs(tmp_path_factory.mktemp("reported"))
    train(folder, folder / "unbroken")
    return folder


def train(folder, output, *more):
    flags = [
        *("--model_name_or_path", folder / "model", "--dataset_name", folder / "dpo.jsonl"),
        *("--train_batch_size", 16, "--micro_train_batch_size", 4, "--max_epochs", 2),
        *("--learning_rate", 0.01, "--save_steps", 1, "--save_total_limit", 0),
        *("--output_dir", output, "--report_to", "none"),
    ]
    launch([], recipe("dpo"), *flags, *more)


@pytest.mark.parametrize("step", [EPOCH, EPOCH + 1])
def test_a_run_resumed_in_any_epoch_takes_the_rows_that_come_next(unbroken, step):
    """Where an epoch ends, and within the second one."""
    output = unbroken / f"resumed-{step}"
    checkpoint = unbroken / f"unbroken/checkpoints/global_step_{step:06}"
    train(unbroken, output, "--resume", checkpoint)
    expected = [line for line in timeless(unbroken / "unbroken") if line["global_step"] > step]
    found = [line for line in timeless(output) if line["global_step"] > step]
    assert found == expected
    assert {line["global_step"] for line in found} == set(range(step + 1, UPDATES + 1))
    assert torch.equal(weights(output), weights(unbroken / "unbroken"))
