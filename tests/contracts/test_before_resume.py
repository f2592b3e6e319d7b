"""A resume gives a run's folder back as it was at the checkpoint, and deletes nothing.

The logs come out of the checkpoint. What lies beyond it stays under names in `.before_resume`.
"""

import itertools
import shutil
from pathlib import Path

import pytest

from common import folders
from common.checkpoint import Checkpoint
from small_run import small_run, update

LOGS = ("metrics.jsonl", "samples.jsonl")


def text_of(step: int, name: str) -> str:
    """What a log holds after an update."""
    return "".join(
        f'{{"global_step": {number}, "in": "{name}"}}\n' for number in range(1, step + 1)
    )


def wrote(folder: Path, updates: int = 5, every: int = 2) -> Checkpoint:
    """A run of some updates, with a line of both logs and an actor for each, and its last actor."""
    folder.mkdir(exist_ok=True)
    run = small_run(folder, save_total_limit=0)
    for step in range(1, updates + 1):
        update(run)
        for name in LOGS:
            (folder / name).write_text(text_of(step, name))
        actor = folder / f"actors/global_step_{step:06d}"
        actor.mkdir(parents=True)
        (actor / "what").write_text(f"actor {step}")
        if every and step % every == 0:
            run.save()
    (folder / "actor").mkdir()
    (folder / "actor/what").write_text("the end")
    return run


def files(folder: Path) -> dict[str, bytes]:
    """The bytes of each file of a folder, by its path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("run.yaml", "environment.json")
    }


def resume(folder: Path, name: str = "auto", **settings) -> Checkpoint:
    """What a run does before its first update."""
    run = small_run(folder, resume=name, save_total_limit=0, **settings)
    run.resume()
    return run


def expect_logs(folder: Path, step: int) -> None:
    for name in LOGS:
        assert (folder / name).read_text() == text_of(step, name)


def expect_nothing_lost(folder: Path, before: dict[str, bytes]) -> None:
    """Every file is still there, under its name or another one."""
    assert set(before.values()) <= set(files(folder).values())


def test_going_back_gives_the_logs_and_sets_aside_what_came_after(tmp_path, capsys):
    wrote(tmp_path)
    (tmp_path / "checkpoints/global_step_000004_best").mkdir()  # the user's own
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard/events").write_text("curves")  # it hides what came after by itself
    before = files(tmp_path)
    point = tmp_path / "checkpoints/global_step_000002"
    assert resume(tmp_path, str(point)).run.global_step == 2
    said = capsys.readouterr().out
    expect_logs(tmp_path, 2)
    expect_nothing_lost(tmp_path, before)
    (line,) = [line for line in said.splitlines() if line.startswith("set aside")]
    names = line.removeprefix(f"set aside in {tmp_path}: ").split(", ")
    beyond = [f"global_step_00000{step}" for step in (3, 4, 4, 5)]
    beyond = [f"{name}.before_resume" for name in [*beyond, "actor", *LOGS]]
    assert sorted(names) == sorted(beyond)
    aside = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.before_resume")}
    assert len(aside) == len(beyond) and "checkpoints/global_step_000004.before_resume" in aside
    assert (tmp_path / "checkpoints/global_step_000004_best").is_dir()


def test_a_second_time_takes_the_next_names(tmp_path, capsys):
    """Nothing of the first time is touched."""
    run = wrote(tmp_path)
    point = tmp_path / "checkpoints/global_step_000002"
    resume(tmp_path, str(point))
    for name in LOGS:
        (tmp_path / name).write_text(text_of(2, name) + "a second time\n")
    run.run.global_step = 4
    run.last_saved = None
    run.save()
    before = files(tmp_path)
    resume(tmp_path, str(point))
    expect_logs(tmp_path, 2)
    expect_nothing_lost(tmp_path, before)
    saved = "checkpoints/global_step_000004.before_resume"
    for path in (*LOGS, "checkpoints/global_step_000004"):
        assert (tmp_path / f"{path}.before_resume.2").exists()
    assert files(tmp_path)[f"{saved}/state.json"] == before[f"{saved}/state.json"]
    # A third one finds all in order, and renames nothing.
    before = files(tmp_path)
    capsys.readouterr()
    resume(tmp_path, str(point))
    assert files(tmp_path) == before and "set aside" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"",
        lambda text: text[:-9],  # torn in a line
        lambda text: text.replace(b"1", b"7"),  # edited, of the same length
        lambda text: text + b'{"global_step": 5}\n',
    ],
)
def test_what_became_of_a_log_in_the_runs_folder_does_not_matter(tmp_path, damage):
    """The checkpoint has its bytes; what is there instead stays aside."""
    wrote(tmp_path, updates=4)
    log = tmp_path / "metrics.jsonl"
    damaged = damage(log.read_bytes())
    log.write_bytes(damaged)
    (tmp_path / "samples.jsonl").unlink()
    resume(tmp_path)
    expect_logs(tmp_path, 4)
    assert (tmp_path / "metrics.jsonl.before_resume").read_bytes() == damaged


def test_a_log_that_the_checkpoint_lacks_is_set_aside(tmp_path):
    """Its first line came after the checkpoint."""
    run = small_run(tmp_path)
    update(run)
    run.save()
    (tmp_path / "samples.jsonl").write_text("beyond\n")
    resume(tmp_path)
    assert not (tmp_path / "samples.jsonl").exists()
    assert (tmp_path / "samples.jsonl.before_resume").read_text() == "beyond\n"


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path):
    wrote(tmp_path, every=0)
    shutil.rmtree(tmp_path / "actor")  # it has not ended
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard/events").write_text("curves")
    before = files(tmp_path)
    assert resume(tmp_path).run.global_step == 0
    expect_nothing_lost(tmp_path, before)
    assert all(".before_resume" in name for name in files(tmp_path))
    # The same with `--resume never`, which takes a folder of a run without an update.
    (tmp_path / "metrics.jsonl").write_text("of an evaluation\n")
    resume(tmp_path, "never")
    assert not (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "metrics.jsonl.before_resume.2").read_text() == "of an evaluation\n"


def test_a_run_that_had_ended_at_its_checkpoint_keeps_its_actor(tmp_path):
    wrote(tmp_path, updates=4)
    before = files(tmp_path)
    resume(tmp_path)
    assert files(tmp_path) == before


def test_killed_at_any_instant_it_resumes_from_the_same_point(tmp_path, monkeypatch):
    """The process is killed before its n-th change of the disk; the next one goes on from there."""
    whole = tmp_path / "whole"
    wrote(whole, updates=7)
    before = files(whole)
    for number in itertools.count():
        output = shutil.copytree(whole, tmp_path / str(number))
        point = output / "checkpoints/global_step_000002"
        done = iter(range(number))

        def killed_after(function, done=done):
            def call(*args, **kwargs):
                if next(done, None) is None:
                    raise KeyboardInterrupt
                return function(*args, **kwargs)

            return call

        run = small_run(output, resume=str(point))
        run.load(point)
        try:
            with monkeypatch.context() as short_life:
                for owner, name in [(Path, "rename"), (shutil, "copyfile"), (folders, "flush")]:
                    short_life.setattr(owner, name, killed_after(getattr(owner, name)))
                run.restore_folder(point)
        except KeyboardInterrupt:
            assert resume(output, str(point)).run.global_step == 2
            expect_logs(output, 2)
            expect_nothing_lost(output, before)
            later = [folders.step_of(path) for path in folders.by_step(output / "actors")]
            assert later == [1, 2] and not (output / "actor").exists(), number
        else:
            break
    assert number >= 15  # that many changes were interrupted


def test_a_run_that_goes_on_elsewhere_has_the_logs_there(tmp_path):
    """And a checkpoint of its own; the other run's folder is as it was."""
    old, new = tmp_path / "old", tmp_path / "new"
    wrote(old)
    new.mkdir()
    before = files(old)
    resume(new, str(old / "checkpoints/global_step_000002"), save_steps=2)
    assert files(old) == before
    expect_logs(new, 2)
    saved = new / "checkpoints/global_step_000002"
    assert folders.fault_of(saved) is None
    assert (saved / "logs/metrics.jsonl").read_text() == text_of(2, "metrics.jsonl")
