"""Another tracker than TensorBoard."""

import inspect
import json
import re
import sqlite3

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

import runs
from small_run import small_run


@pytest.mark.slow
def test_another_tracker_gets_every_line(inputs, tmp_path):
    """trackio keeps its runs in files of its own, so this needs no network."""
    output = tmp_path / "out"
    given = runs.short_run(inputs, "dpo", output, max_steps=2, report_to="trackio")
    env = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    runs.launch([], runs.recipe("dpo"), *given, env=env, fresh=True)
    (database,) = (tmp_path / "trackio").rglob("*.db")
    with sqlite3.connect(database) as connection:
        found = connection.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, _ in found] == [1, 2]
    losses = [line["loss"] for line in runs.training_lines(output)]
    assert [json.loads(values)["loss"] for _, values in found] == pytest.approx(losses)
    assert not (output / "tensorboard").exists()


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow", "clearml", "swanlab"])
def test_a_tracker_gets_the_runs_name(tmp_path, monkeypatch, name):
    """accelerate calls the tracker with it as wandb.init(project="...", name="mine") and the like."""
    given = []
    init = lambda _, project, config, kinds: given.append(kinds[name])
    monkeypatch.setattr(Accelerator, "init_trackers", init)
    small_run(tmp_path, report_to=[name], run_name="mine").run.start()
    ((argument, value),) = given[0].items()
    assert value == "mine"
    source = inspect.getsource(LOGGER_TYPE_TO_CLASS[name])
    assert re.search(rf"\b{argument}: |\*\*self.init_kwargs", source)


def test_a_tracker_that_sets_a_seed_does_not_change_the_run(tmp_path, monkeypatch):
    """As ClearML's does: the run goes on with the random state of its seed, or of its checkpoint."""
    seed = lambda *_, **__: torch.manual_seed(1337)
    monkeypatch.setattr(Accelerator, "init_trackers", seed)
    run = small_run(tmp_path, report_to=["trackio"]).run
    before = torch.get_rng_state()
    run.start()
    assert torch.equal(torch.get_rng_state(), before)
