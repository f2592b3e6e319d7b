"""What people see of a run: TensorBoard, as its own server answers, other trackers, and samples."""

import json
import re
import sqlite3
import statistics
import urllib.request
from urllib.parse import urlencode

import pytest
from tensorboard import default, program
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes import RECIPES
from runs import (
    evaluation_lines,
    launch,
    lines,
    recipe,
    samples,
    tiny_inputs,
    training_lines,
)
from small_run import small_run

NAMES = ["dpo", "ppo"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return tiny_inputs(tmp_path_factory.mktemp("board"))


@pytest.fixture(scope="module")
def finished(inputs):
    """A run of two updates of each recipe, held-out data with answers included."""
    done = {}

    def run(name):
        if name not in done:
            data = inputs / f"{name}.jsonl"
            rows = [json.loads(line) for line in data.read_text().splitlines()][:6]
            held_out = inputs / f"held-out-{name}.jsonl"
            held_out.write_text("".join(json.dumps(row | {"answer": "7"}) + "\n" for row in rows))
            output = inputs / name
            more = RECIPES[name].board_flags
            if RECIPES[name].evaluates_answers:
                more = ["--max_new_tokens", 4]
            launch(
                [], recipe(name), "--model_name_or_path", inputs / "model", "--dataset_name", data, "--eval_dataset_name", held_out,
                "--output_dir", output, "--train_batch_size", 4, "--micro_train_batch_size", 2, "--max_steps", 2, *more,
            )  # fmt: skip
            done[name] = output
        return done[name]

    return run


@pytest.fixture(scope="module")
def ask():
    """Starts TensorBoard on a folder; returns a function that asks its server."""

    def start(folder):
        server = program.TensorBoard(plugins=default.get_plugins())
        server.configure(
            argv=[None, "--logdir", str(folder), "--port", "0", "--load_fast", "false"]
        )
        url = server.launch()

        def answer(path, body=None, **query):
            request = urllib.request.Request(f"{url}data/plugin/{path}?{urlencode(query)}")
            if body is not None:
                request.data = json.dumps(body).encode()
                request.add_header("Content-Type", "application/json")
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)

        return answer

    return start


@pytest.mark.parametrize("name", NAMES)
def test_what_tensorboards_server_answers(finished, ask, name):
    output = finished(name)
    answer = ask(output)
    # Every value of every line is a curve.
    logged = {tag for line in lines(output) for tag in line} - {"global_step"}
    assert set(answer("scalars/tags")["tensorboard"]) == logged
    key_metric = RECIPES[name].key_metric
    held_out = {tag for tag in logged if tag.startswith("eval/")}
    for tag in (key_metric, *held_out):
        points = answer("scalars/scalars", tag=tag, run="tensorboard")
        expected = {line["global_step"]: line[tag] for line in lines(output) if tag in line}
        assert {step: value for _, step, value in points} == pytest.approx(expected), tag
    # The page of key charts: in each, training and evaluation.
    (group,) = answer("custom_scalars/layout")["category"]
    assert group["title"] == "key metrics"
    charts = {chart["title"]: chart["multiline"]["tag"] for chart in group["chart"]}
    for title, (pattern,) in charts.items():
        assert any(re.fullmatch(pattern, tag) for tag in logged), title
    patterns = [pattern for (pattern,) in charts.values()]
    shown = {tag for tag in logged for pattern in patterns if re.match(pattern, tag)}
    assert key_metric in shown and shown & held_out


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_those_that_the_metrics_count(finished, name):
    output = finished(name)
    written = samples(output)
    for line in evaluation_lines(output) if name != "dpo" else lines(output):
        if "eval/exact_match" not in line:
            continue
        asked = [
            s for s in written if s["source"] == "eval" and s["global_step"] == line["global_step"]
        ]
        assert [sample["row"] for sample in asked] == [1, 2, 3, 4, 5, 6]
        if name == "dpo":
            right = [sample["right"] for sample in asked]
            assert statistics.fmean(right) == line["eval/exact_match"]
        else:
            scores = [sample["score"] for sample in asked]
            assert statistics.fmean(scores) == pytest.approx(line["eval/scores"], rel=1e-6)
    if name != "dpo":
        for line in training_lines(output):
            made = [
                sample["score"]
                for sample in written
                if sample["source"] == "rollout"
                and sample["global_step"] == line["global_step"] - 1
            ]
            assert made, line
            score = line["objective/scores" if name == "ppo" else "reward"]
            assert statistics.fmean(made) == pytest.approx(score, rel=1e-6)
        assert written[0]["rewards"].keys() == {"ties"}


@pytest.mark.slow
def test_another_tracker_gets_every_line(inputs, tmp_path):
    """trackio keeps its runs in files of its own, so this needs no network."""
    output = tmp_path / "out"
    flags = ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "dpo.jsonl", "--output_dir", output,
             "--train_batch_size", 4, "--micro_train_batch_size", 2, "--max_steps", 2, "--report_to", "trackio"]  # fmt: skip
    launch([], recipe("dpo"), *flags, env={"TRACKIO_DIR": str(tmp_path / "trackio")}, fresh=True)
    (database,) = (tmp_path / "trackio").rglob("*.db")
    with sqlite3.connect(database) as connection:
        found = connection.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, _ in found] == [1, 2]
    losses = [line["loss"] for line in training_lines(output)]
    assert [json.loads(values)["loss"] for _, values in found] == pytest.approx(losses)
    assert not (output / "tensorboard").exists()


def test_a_resumed_run_goes_on_in_the_same_curves(tmp_path):
    """What a killed run wrote after the checkpoint is hidden."""
    for first, last, resumed_from in ((1, 4, 0), (3, 5, 2)):
        checkpoint = small_run(tmp_path, report_to=["tensorboard"])
        checkpoint.run.global_step = resumed_from
        checkpoint.run.logger.start()
        for step in range(first, last + 1):
            checkpoint.run.global_step = step
            checkpoint.run.logger.write({"loss": step + 0.5 * resumed_from})
        checkpoint.run.accelerator.trackers[0].finish()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    found = [(event.step, event.value) for event in board.Scalars("loss")]
    assert found == [(1, 1), (2, 2), (3, 4), (4, 5), (5, 6)]
    assert board.PluginTagToContent("custom_scalars")
