"""Nothing that a run wrote is deleted by a resume: what lies beyond the resume point is moved to `left_behind/`."""

import json
import shutil
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common import checkpoint, folders, left_behind
from common.progress import Progress
from runs import launch, lines, recipe, tiny_inputs, weights


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return tiny_inputs(tmp_path_factory.mktemp("left"))


def flags(inputs, output, *more):
    return ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "dpo.jsonl", "--output_dir", output, "--train_batch_size", 8,
            "--micro_train_batch_size", 4, "--max_steps", 4, "--learning_rate", 0.01, *more]  # fmt: skip


def abandoned(folder, checkpoints=(2, 4), actors=(1, 3), lines=5):
    """A run's folder; each checkpoint, actor and line says of which update it is."""
    for kind, steps in (("checkpoints", checkpoints), ("actors", actors)):
        for step in steps:
            path = folder / kind / f"global_step_{step:06d}"
            path.mkdir(parents=True)
            (path / "what").write_text(f"{kind} {step}")
    (folder / "actor").mkdir(parents=True)
    (folder / "actor/what").write_text("the end")
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard/events").write_text("curves")
    for name in ("metrics.jsonl", "samples.jsonl"):
        (folder / name).write_text("".join(f"{step}\n" for step in range(1, lines + 1)))
    return folder


def sizes(metrics, samples=None):
    """The bytes that the two files of lines had at the resume point."""
    samples = metrics if samples is None else samples
    return {"metrics.jsonl": metrics, "samples.jsonl": samples}


def files(folder):
    """The text of each file of a folder, by its path."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_run_begun_anew_deletes_nothing(tmp_path, capsys):
    before = files(abandoned(tmp_path, checkpoints=()))
    assert not left_behind.leave(tmp_path, None, {})
    said = capsys.readouterr().out
    kept = tmp_path / "left_behind/after_global_step_000000"
    assert files(kept) == before
    assert files(tmp_path).keys() - {f"left_behind/after_global_step_000000/{name}" for name in before} == {
        "metrics.jsonl", "samples.jsonl",
    }  # fmt: skip
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert (tmp_path / "samples.jsonl").read_text() == ""
    assert (
        said
        == f"left behind in {kept}: 2 saved actors, the final actor, tensorboard, 5 lines of samples.jsonl, 5 lines of metrics.jsonl\n"
    )
    # A second time: nothing of the first is touched.
    abandoned(tmp_path / "again", checkpoints=(), lines=1)
    for path in (tmp_path / "again").iterdir():
        shutil.move(path, tmp_path / path.name) if path.is_dir() else path.replace(
            tmp_path / path.name
        )
    left_behind.leave(tmp_path, None, {})
    assert "000000_2: " in capsys.readouterr().out
    assert (
        files(kept) == before
        and files(tmp_path / "left_behind/after_global_step_000000_2")["metrics.jsonl"] == "1\n"
    )
    left_behind.leave(tmp_path, None, {})
    assert not capsys.readouterr().out and len([*(tmp_path / "left_behind").iterdir()]) == 2


def test_going_back_to_an_update_moves_what_came_after(tmp_path, capsys):
    """Back to update 2. TensorBoard's files stay: it hides in them what came after."""
    before = files(abandoned(tmp_path))
    (tmp_path / "checkpoints/global_step_000004_best").mkdir()  # the user's own
    assert not left_behind.leave(tmp_path, 2, sizes(4, 2))
    said = capsys.readouterr().out
    kept = files(tmp_path / "left_behind/after_global_step_000002")
    moved = ["checkpoints/global_step_000004/what", "actors/global_step_000003/what", "actor/what"]
    assert {name: kept[name] for name in moved} == {name: before[name] for name in moved}
    assert (tmp_path / "samples.jsonl").read_text() == "1\n"
    assert (tmp_path / "metrics.jsonl").read_text() == "1\n2\n" and (
        tmp_path / "tensorboard/events"
    ).read_text() == "curves"
    assert kept.keys() - set(moved) == {"metrics.jsonl", "samples.jsonl"}
    assert kept["metrics.jsonl"] == "3\n4\n5\n" and kept["samples.jsonl"] == "2\n3\n4\n5\n"
    what = "1 checkpoint, 1 saved actor, the final actor, 4 lines of samples.jsonl, 3 lines of metrics.jsonl"
    assert said == f"left behind in {tmp_path}/left_behind/after_global_step_000002: {what}\n"
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "global_step_000002",
        "global_step_000004_best",
    ]


@pytest.mark.parametrize("end, whole", [
    (b"1\n2\n", 4),  # cut between two lines
    (b"1\n2\n3", 4),
    (b"1\n2\n\0\0\0\0", 4),
    (b"1\n2\n\0\0\0\n", 4),  # whole in form only
    (b"1\n2\n{\n{\n", 4),
    (b"{", 0),
    (b"", 0),
    (None, 0),  # no file
])  # fmt: skip
def test_a_log_that_lost_lines_keeps_what_is_whole(tmp_path, capsys, end, whole):
    """Four lines were there at the checkpoint; those that are torn are no lines for the next one to be glued to."""
    metrics, samples = tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl"
    samples.write_bytes(b"1\n2\n3\n4\n5\n")
    if end is not None:
        metrics.write_bytes(end)
    assert left_behind.leave(tmp_path, 4, sizes(8))
    said = capsys.readouterr().out
    lost = f"{metrics} had 8 bytes then, of which {whole} are whole lines now"
    assert f"NOTE: lines from before the checkpoint are lost: {lost}. These stay\n" in said
    assert f"{samples} had" not in said and not left_behind.leave(tmp_path, 4, sizes(whole, 8))
    assert samples.read_bytes() == b"1\n2\n3\n4\n"
    kept = tmp_path / "left_behind/after_global_step_000004/metrics.jsonl"
    assert (metrics.read_bytes() if end is not None else b"") == (end or b"")[:whole]
    assert (kept.read_bytes() if kept.exists() else b"") == (end or b"")[whole:]


def test_a_run_that_failed_before_its_first_update_leaves_its_folder_to_the_next(inputs, tmp_path):
    """Without `--resume`, and that one's curves begin anew."""
    output = tmp_path / "again"
    (tmp_path / "failing_of_test.py").write_text(
        "def reward(prompts, responses, **columns):\n    raise RuntimeError('no such server')\n"
    )
    command = [
        *["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "ppo.jsonl"],
        *["--output_dir", output, "--rollout_batch_size", 4, "--n_samples_per_prompt", 2],
        *["--train_batch_size", 8, "--max_new_tokens", 4, "--max_steps", 1],
        *["--drop_equal_groups", False],
    ]
    failing = ["--reward_function", "failing_of_test:reward"]
    result = launch([], recipe("grpo"), *command, *failing, cwd=tmp_path, check=False)
    assert result.returncode and "no such server" in result.stdout
    working = ["--reward_function", "preference_recipes.rollouts.rewards:answer_reward"]
    result = launch([], recipe("grpo"), *command, *working, cwd=tmp_path)
    kept = output / "left_behind/after_global_step_000000"
    assert f"left behind in {kept}: tensorboard\n" in result.stdout
    assert [line["global_step"] for line in lines(output)] == [1]
    board = EventAccumulator(str(output / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("loss")] == [1]
    # They are written once, at the beginning.
    assert board.PluginTagToContent("custom_scalars") and board.PluginTagToContent("hparams")
    result = launch([], recipe("grpo"), *command, *working, cwd=tmp_path, check=False)
    assert result.returncode and "already holds another run" in result.stdout


def test_killed_at_any_instant_of_the_move_nothing_is_lost(tmp_path, monkeypatch):
    """The process is killed before its n-th change of the disk; the next one resumes from the newest checkpoint that is there."""
    wanted = None
    for number in range(100):
        output = tmp_path / str(number)
        before = files(abandoned(output, checkpoints=(2, 4, 6), lines=7))
        done = iter(range(number))

        def killed_after(function, done=done):
            def call(*args, **kwargs):
                if next(done, None) is None:
                    raise KeyboardInterrupt
                return function(*args, **kwargs)

            return call

        try:
            with monkeypatch.context() as short_life:
                for module, name in [
                    (shutil, "move"),
                    (left_behind.folders, "flush"),
                    (left_behind.os, "truncate"),
                ]:
                    short_life.setattr(module, name, killed_after(getattr(module, name)))
                left_behind.leave(output, 2, sizes(4))
        except KeyboardInterrupt:
            pass
        else:
            wanted = number
            break
        newest = folders.step_of(folders.by_step(output / "checkpoints")[-1])
        assert len((output / "metrics.jsonl").read_text()) >= 2 * newest, (
            number
        )  # all lines up to that checkpoint
        left_behind.leave(output, newest, sizes(2 * newest))
        found = files(output)
        for name, text in before.items():
            if name in ("metrics.jsonl", "samples.jsonl"):
                continue
            assert [value for path, value in found.items() if path.endswith(name)][:1] == [text], (
                number,
                name,
            )
        assert (output / "metrics.jsonl").read_text() == before["metrics.jsonl"][: 2 * newest]
        assert (output / "samples.jsonl").read_text() == before["samples.jsonl"][: 2 * newest]
        for name in ("metrics.jsonl", "samples.jsonl"):
            ends = [
                value
                for path, value in found.items()
                if path.startswith("left_behind") and path.endswith(name)
            ]
            assert before[name][2 * newest :] in ends, number
    assert wanted >= 10  # that many changes were interrupted


def test_checkpoints_that_are_left_behind_do_not_count_as_kept(tmp_path, monkeypatch):
    """A billion parameters, 20 GB a checkpoint: of three there, two are beyond, so two more are to come."""
    abandoned(tmp_path, checkpoints=(2, 4, 6))
    for step in (2, 6):
        (tmp_path / f"checkpoints/global_step_{step:06d}/state.json").write_text(
            json.dumps({"progress": {"global_step": step}})
        )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=39 * 10**9))
    run = types.SimpleNamespace(
        args=types.SimpleNamespace(save_total_limit=2, save_steps=1, output_dir=str(tmp_path)),
        output_dir=tmp_path,
        checkpoints=tmp_path / "checkpoints",
        progress=Progress(100, 1, 1, 0),
        unwrapped=types.SimpleNamespace(
            parameters=lambda: [types.SimpleNamespace(ds_numel=10**9, numel=lambda: 0)],
            named_modules=lambda: [],
        ),
    )
    checkpoint.check_disk(run, tmp_path / "checkpoints/global_step_000006")
    with pytest.raises(SystemExit, match="too little for 2 checkpoints"):
        checkpoint.check_disk(run, tmp_path / "checkpoints/global_step_000002")


def test_auto_without_a_checkpoint_keeps_the_killed_run(inputs, tmp_path):
    """The actors and the metrics of a run that was killed before its first checkpoint, then a run over them."""
    output = tmp_path / "killed"
    launch([], recipe("dpo"), *flags(inputs, output, "--save_actor_steps", 1))
    shutil.rmtree(output / "actor")  # as if it had been killed before its end
    first, first_lines = (
        weights(output, "actors/global_step_000004"),
        (output / "metrics.jsonl").read_bytes(),
    )
    result = launch(
        [],
        recipe("dpo"),
        *flags(inputs, output, "--save_actor_steps", 2, "--max_steps", 2, "--resume", "auto"),
    )
    kept = output / "left_behind/after_global_step_000000"
    (said,) = [line for line in result.stdout.splitlines() if "left behind" in line]
    assert said == f"left behind in {kept}: 4 saved actors, tensorboard, 4 lines of metrics.jsonl"
    assert (kept / "metrics.jsonl").read_bytes() == first_lines and weights(
        kept, "actors/global_step_000004"
    ).equal(first)
    assert [path.name for path in folders.by_step(output / "actors")] == ["global_step_000002"]
    assert [line["global_step"] for line in lines(output)] == [1, 2]
    assert [*(kept / "tensorboard").iterdir()] and [*(output / "tensorboard").iterdir()]


def test_a_shorter_run_keeps_the_lines_and_checkpoints_of_the_longer(inputs, tmp_path):
    output = tmp_path / "shorter"
    launch([], recipe("dpo"), *flags(inputs, output, "--save_steps", 1, "--save_total_limit", 0))
    before = (output / "metrics.jsonl").read_text().splitlines()
    again = [
        "--resume",
        output / "checkpoints/global_step_000002",
        "--save_steps",
        1,
        "--save_total_limit",
        0,
    ]
    result = launch([], recipe("dpo"), *flags(inputs, output, *again))
    kept = output / "left_behind/after_global_step_000002"
    what = "2 checkpoints, the final actor, 2 lines of metrics.jsonl\n"
    assert f"left behind in {kept}: {what}" in result.stdout
    assert (kept / "metrics.jsonl").read_text().splitlines() == before[2:]
    assert len(lines(output)) == 4
    result = launch([], recipe("dpo"), *flags(inputs, output, *again, "--max_steps", 3))
    kept = output / "left_behind/after_global_step_000002_2"
    assert (
        f"left behind in {kept}: 2 checkpoints, the final actor, 2 lines of metrics.jsonl\n"
        in result.stdout
    )
    timeless = lambda text: {
        key: value for key, value in json.loads(text).items() if not key.startswith("perf/")
    }
    assert [timeless(line) for line in (kept / "metrics.jsonl").read_text().splitlines()] == [
        timeless(line) for line in before[2:]
    ]
    assert folders.fault_of(kept / "checkpoints/global_step_000004") is None
    assert [line["global_step"] for line in lines(output)] == [1, 2, 3]


def test_a_finished_run_that_had_a_checkpoint_leaves_one_of_its_end(inputs, tmp_path):
    """Without --save_steps, such as after a signal: the same command again repeats nothing."""
    output = tmp_path / "finished"
    launch([], recipe("dpo"), *flags(inputs, output, "--save_steps", 1, "--max_steps", 2))
    again = flags(inputs, output, "--save_steps", 0, "--resume", "auto")
    launch([], recipe("dpo"), *again)
    assert folders.step_of(folders.by_step(output / "checkpoints")[-1]) == 4
    actor, metrics = weights(output), (output / "metrics.jsonl").read_bytes()
    result = launch([], recipe("dpo"), *again)
    assert "left behind" not in result.stdout
    assert weights(output).equal(actor) and (output / "metrics.jsonl").read_bytes() == metrics
