"""What people see of a run: samples, and another tracker than TensorBoard."""

import inspect
import json
import re
import sqlite3
import statistics

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

import runs
from recipes import TIES
from small_run import small_run


def flags(inputs, name, output, **more):
    sizes = dict(train_batch_size=4, micro_train_batch_size=2, max_steps=2, max_new_tokens=4)
    if name == "ppo":
        sizes |= runs.ROLLOUTS | dict(rollout_batch_size=4, reward_function=TIES)
    return runs.short_run(inputs, name, output, **sizes | more)


@pytest.mark.parametrize(
    "name, value_of_sample, tag", [("dpo", "right", "exact_match"), ("ppo", "score", "scores")]
)
def test_samples_are_those_that_the_metrics_count(inputs, name, value_of_sample, tag):
    rows = [json.loads(line) for line in (inputs / f"{name}.jsonl").open()][:6]
    held_out = runs.write_jsonl(
        inputs / f"held-out-{name}.jsonl", [{**r, "answer": "7"} for r in rows]
    )
    output = inputs / name
    runs.launch([], runs.recipe(name), *flags(inputs, name, output, eval_dataset_name=held_out))
    written = runs.samples(output)
    for line in runs.evaluation_lines(output):
        step = line["global_step"]
        asked = [s for s in written if (s["source"], s["global_step"]) == ("eval", step)]
        assert [sample["row"] for sample in asked] == [1, 2, 3, 4, 5, 6]
        mean = statistics.fmean(sample[value_of_sample] for sample in asked)
        assert mean == pytest.approx(line[f"eval/{tag}"], rel=1e-6)
    for line in runs.training_lines(output) if name == "ppo" else []:
        of_rollout = ("rollout", line["global_step"] - 1)
        made = [s for s in written if (s["source"], s["global_step"]) == of_rollout]
        mean = statistics.fmean(sample["score"] for sample in made)
        assert mean == pytest.approx(line["objective/scores"], rel=1e-6)
        assert made[0]["rewards"].keys() == {"ties"}


@pytest.mark.slow
def test_another_tracker_gets_every_line(inputs, tmp_path):
    """trackio keeps its runs in files of its own, so this needs no network."""
    output = tmp_path / "out"
    given = flags(inputs, "dpo", output, report_to="trackio")
    runs.launch(
        [], runs.recipe("dpo"), *given, env={"TRACKIO_DIR": str(tmp_path / "trackio")}, fresh=True
    )
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
