"""`preference-recipes rows`: which rows made the numbers of a run."""

import itertools
import json
import math
import re
import shlex
import shutil
import statistics
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common import values
from contracts.proof.bench import Finished
from preference_recipes.tools import rows
from runs import launch, lines, recipe, refuses, short_run
from small_run import small_run


@pytest.fixture(scope="module")
def run(inputs):
    """Two epochs of 44 pairs, six updates each, every one of them recorded."""
    settings = dict(beta=0.1, report_to="tensorboard", values_tokens=True)
    return made(inputs, "beta-0.1", **settings)


def made(inputs, name: str, **settings):
    sizes = dict(max_epochs=2, micro_train_batch_size=2, values_steps=1, learning_rate=0.01)
    held_out = {"eval_dataset_name": inputs / "dpo.jsonl", "eval_steps": 6, "save_steps": 6}
    flags = short_run(inputs, "dpo", inputs / name, **sizes | held_out | settings)
    launch([], recipe("dpo"), *flags)
    return inputs / name


def recorded(run, metric: str, source: str = "train") -> dict[int, list[float]]:
    """By row, the values of a metric in the order of the updates."""
    by_row: dict[int, list[float]] = {}
    for sample in Finished(run).values.to_pylist():
        if sample["source"] == source:
            by_row.setdefault(sample["row"], []).append(sample[metric])
    return by_row


def found(capsys, run, *words) -> list[int]:
    """The numbers of the rows that the command prints."""
    rows.main([str(run), *map(str, words)])
    return [int(number) for number in re.findall(r"^row +(\d+)", capsys.readouterr().out, re.M)]


@pytest.mark.parametrize(
    "way, of_row",
    [
        ("--mean", statistics.fmean),
        ("--last", lambda values: values[-1]),
        ("--spread", statistics.pstdev),
    ],
)
def test_rows_are_in_the_order_of_a_metric(capsys, run, way, of_row):
    values = {row: of_row(each) for row, each in recorded(run, "rewards/margins").items()}
    assert set(values) == set(range(1, 45))
    expected = sorted(values, key=values.get)
    words = ["--sort", "rewards/margins", way]
    assert found(capsys, run, *words, "--top", 5) == expected[:-6:-1]
    assert found(capsys, run, *words, "--top", 0.1, "--lowest") == expected[:5]


def test_rows_are_in_the_order_of_a_difference(capsys, run):
    chosen, rejected = recorded(run, "logps/chosen"), recorded(run, "logps/rejected")
    apart = {row: sum(chosen[row]) - sum(rejected[row]) for row in chosen}
    words = ["--sort", "logps/chosen - logps/rejected", "--lowest", "--top", 6]
    assert found(capsys, run, *words) == sorted(apart, key=apart.get)[:6]


def test_rows_of_an_evaluation(capsys, run):
    values = recorded(run, "loss", "eval")
    assert {len(of_row) for of_row in values.values()} == {3}  # before, at update 6, at the end
    expected = max(values, key=lambda row: values[row][-1])
    words = ["--sort", "loss", "--last", "--source", "eval"]
    assert found(capsys, run, *words, "--top", 1) == [expected]


def test_what_was_found_and_the_rest_are_the_data_again(capsys, inputs, run, tmp_path):
    top = ["--sort", "loss", "--top", 7]
    chosen = found(capsys, run, *top)
    rows.main([str(run), *map(str, top), "--out", str(tmp_path / "flagged.jsonl")])
    rows.main([str(run), *map(str, top), "--out", str(tmp_path / "rest.jsonl"), "--rest"])
    flagged, rest, all_rows = (
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in (tmp_path / "flagged.jsonl", tmp_path / "rest.jsonl", inputs / "dpo.jsonl")
    )
    assert flagged == [row for number, row in enumerate(all_rows, 1) if number in chosen]
    assert rest == [row for number, row in enumerate(all_rows, 1) if number not in chosen]


def test_the_rows_of_an_update_are_known_without_a_record(capsys, run, tmp_path):
    """In the second epoch. With a record those with most of the loss come first."""
    unrecorded = shutil.copytree(run, tmp_path / "unrecorded")
    shutil.rmtree(unrecorded / "values.parquet")
    with_record = found(capsys, run, "--step", 9)
    assert len(with_record) == 8
    assert sorted(found(capsys, unrecorded, "--step", 9)) == sorted(with_record)
    losses = {row: values[1] for row, values in recorded(run, "loss").items()}
    assert with_record == sorted(with_record, key=losses.get, reverse=True)
    assert found(capsys, run, "--step", 9, "--top", 0.3) == with_record[:3]
    rows.main([str(run), "--step", "9", "--top", "1"])
    shown = capsys.readouterr().out
    (line,) = [line for line in lines(run) if line["global_step"] == 9]
    share = losses[with_record[0]] / (8 * line["loss"])
    assert f"share of loss {share:.4g}" in re.sub(" +", " ", shown) and "⟦" in shown


def test_a_recipe_is_read_as_it_was_run_with_what_it_imports_from_its_folder(capsys, run, tmp_path):
    copied = shutil.copytree(run, tmp_path / "copied")
    (tmp_path / "beside.py").write_text("")
    script = tmp_path / "mine.py"
    script.write_text(
        recipe("dpo").read_text().replace("import math\n", "import math\nimport beside\n")
    )
    record = json.loads((copied / "environment.json").read_text())
    python, _, *flags = shlex.split(record[-1]["command"])
    record[-1]["command"] = shlex.join([python, str(script), *flags])
    (copied / "environment.json").write_text(json.dumps(record))
    assert len(found(capsys, copied, "--step", 9)) == 8
    assert "beside" in sys.modules and str(tmp_path) not in sys.path


def test_the_log_probs_of_tokens_add_up_to_those_of_answers(capsys, run):
    """Those of the chosen answer first; the least probable tokens are named."""
    tokens, chosen, rejected = (
        recorded(run, name) for name in ("logps", "logps/chosen", "logps/rejected")
    )
    for row, lists in tokens.items():
        for logps, *sums in zip(lists, chosen[row], rejected[row]):
            assert sum(logps) == pytest.approx(sum(sums), rel=1e-5)
            first = [math.fsum(logps[:end]) for end in range(len(logps) + 1)]
            assert min(abs(each - sums[0]) for each in first) < 1e-4
    rows.main([str(run), "--step", "9", "--top", "1"])
    shown = capsys.readouterr().out
    (line,) = re.findall(r"least probable +(.*)", shown)
    assert line.count("\u27e6") == 5


def test_where_two_runs_differ_most_comes_first(capsys, inputs, run):
    other = made(inputs, "beta-1", beta=1.0)
    one, two = (recorded(each, "loss") for each in (run, other))
    apart = {row: abs(statistics.fmean(one[row]) - statistics.fmean(two[row])) for row in one}
    expected = sorted(apart, key=apart.get, reverse=True)[:6]
    assert found(capsys, run, "--sort", "loss", "--compare", other, "--top", 6) == expected


def test_runs_are_compared_if_they_read_the_same_rows(capsys, inputs, run, tmp_path):
    """Whatever they were evaluated on. Of a folder or the hub the name and the split are known."""
    compared = ["--sort", "loss", "--top", 6, "--compare", tmp_path / "other"]
    other = shutil.copytree(run, tmp_path / "other")
    record = json.loads((other / "environment.json").read_text())
    record[-1]["data_files"]["held_out.jsonl"] = [1, 1]
    (other / "environment.json").write_text(json.dumps(record))
    assert len(found(capsys, run, *compared)) == 6
    for folder in (other, shutil.copytree(run, tmp_path / "one")):
        record[-1]["data_files"] = {}
        (folder / "environment.json").write_text(json.dumps(record))
    assert len(found(capsys, tmp_path / "one", *compared)) == 6
    settings = (other / "run.yaml").read_text()
    for name, value in [("split", "train"), ("name", f"\n- {inputs / 'dpo.jsonl'}")]:
        line = f"\ndataset_{name}: {value}".replace(": \n", ":\n")
        assert line in settings
        (other / "run.yaml").write_text(settings.replace(line, line + "2"))
        refuses("read other data", call=lambda: found(capsys, tmp_path / "one", *compared))


def test_what_it_cannot_know_is_said(capsys, inputs, run, tmp_path):
    unrecorded = shutil.copytree(run, tmp_path / "unrecorded")
    shutil.rmtree(unrecorded / "values.parquet")
    given = lambda *words: lambda: rows.main(list(map(str, words)))
    refuses("--values_steps", call=given(unrecorded, "--sort", "loss"))
    refuses("--values_steps", call=given(unrecorded, "--step", 6, "--source", "eval"))
    refuses("12 applied updates", call=given(unrecorded, "--step", 13))
    refuses("--step 13: not recorded", ": 8, 9, 10, 11, 12", call=given(run, "--step", 13))
    refuses("--sort los:", "loss, rewards/chosen", call=given(run, "--sort", "los"))
    refuses("no environment.json", call=given(inputs, "--step", 1))
    out = tmp_path / "rows.jsonl"
    for words in (["--out", out], ["--lowest"], ["--spread"], ["--compare", run]):
        with pytest.raises(SystemExit, match="2"):
            rows.main(list(map(str, [run, "--step", 9, *words])))
    assert "--compare go with --sort" in capsys.readouterr().err
    edited = shutil.copytree(run, tmp_path / "edited")
    data = inputs / "dpo.jsonl"
    record = json.loads((edited / "environment.json").read_text())
    assert record[-1]["data_files"][str(data)]
    record[-1]["data_files"][str(data)][1] += 1
    record.append({**record[-1], "data_files": {}})  # it went on without --values_steps
    (edited / "environment.json").write_text(json.dumps(record))
    refuses(data, "has changed", call=given(edited, "--sort", "loss"))
    refuses("read other data", call=given(edited, "--sort", "loss", "--compare", run))


def test_tensorboard_has_histograms_of_what_is_recorded(run):
    for source, n_samples, steps in [("train", 8, range(1, 13)), ("eval", 44, [0, 6, 12])]:
        folder = run / "tensorboard" / ("eval" if source == "eval" else "")
        board = EventAccumulator(str(folder), size_guidance={"histograms": 0})
        board.Reload()
        by_row = recorded(run, "logps/chosen", source)
        shown = board.Histograms("samples/logps/chosen")
        assert [event.step for event in shown] == list(steps)
        assert {event.histogram_value.num for event in shown} <= {n_samples, 4}
        total = math.fsum(event.histogram_value.sum for event in shown)
        assert total == pytest.approx(math.fsum(itertools.chain(*by_row.values())), rel=1e-9)


def test_a_checkpoint_has_the_parts_under_a_second_name(run):
    copies = run / "checkpoints/global_step_000012/logs/values.parquet"
    parts = sorted((run / "values.parquet").iterdir())
    assert [part.samefile(copies / part.name) for part in parts] == [True] * 5
    assert len(list(copies.iterdir())) == 5


def test_a_part_is_written_when_enough_samples_wait(tmp_path, monkeypatch):
    """So that a long run does not keep them in memory."""
    monkeypatch.setattr(values, "SAMPLES_PER_PART", 10)
    run = small_run(tmp_path, values_steps=1).run
    recorder = run.recorder("train")
    for _ in range(7):
        ones = torch.ones(4)
        recorder.add({"loss": (ones, ones, "mean")}, ones, [1, 2, 3, 4])
        run.update_done(True, 4, 1)
        recorder.close_update(True)
    names = sorted(part.name for part in (tmp_path / "values.parquet").iterdir())
    assert names == ["000003-train-0.parquet", "000006-train-0.parquet"]
