"""A resume gives a run's folder back as it was at the checkpoint, and deletes nothing."""

import itertools
import os
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
    run.begin_or_resume()
    return run


def expect_logs(folder: Path, step: int) -> None:
    for name in LOGS:
        assert (folder / name).read_text() == text_of(step, name)


def expect_nothing_lost(folder: Path, before: dict[str, bytes]) -> None:
    """Every file is still there, under its name or another one."""
    assert set(before.values()) <= set(files(folder).values())


def test_going_back_gives_the_logs_and_sets_aside_what_came_after(tmp_path, capsys):
    """A second time under the next names; a third time finds all in order."""
    run = wrote(tmp_path)
    (tmp_path / "checkpoints/global_step_000004_best").mkdir()  # the user's own
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard/events").write_text("curves")  # it hides what came after by itself
    # What became of a log does not matter: the checkpoint has its bytes.
    (tmp_path / "metrics.jsonl").write_text(text_of(5, "metrics.jsonl").replace("1", "7")[:-9])
    point = str(tmp_path / "checkpoints/global_step_000002")
    beyond = [f"actors/global_step_00000{step}" for step in (3, 4, 5)]
    beyond += ["checkpoints/global_step_000004", "actor", *LOGS]
    for suffix in (".before_resume", ".before_resume.2"):
        before = files(tmp_path)
        assert resume(tmp_path, point).run.global_step == 2
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "set aside" in line]
        expect_logs(tmp_path, 2)
        expect_nothing_lost(tmp_path, before)
        aside = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob(f"*{suffix}")}
        assert aside == {f"{name}{suffix}" for name in beyond}
        names = line.removeprefix(f"set aside in {tmp_path}: ").split(", ")
        assert sorted(names) == sorted(Path(name).name for name in aside)
        # It goes on, to another end.
        beyond = ["checkpoints/global_step_000004", *LOGS]
        for name in LOGS:
            (tmp_path / name).write_text(text_of(2, name) + "a second time\n")
        if suffix == ".before_resume":
            run.run.global_step, run.last_saved = 4, None
            run.save()
    for name in LOGS:
        (tmp_path / name).write_text(text_of(2, name))
    before = files(tmp_path)
    resume(tmp_path, point)
    assert files(tmp_path) == before and "set aside" not in capsys.readouterr().out
    assert (tmp_path / "checkpoints/global_step_000004_best").is_dir()


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
    """If it goes on, that actor is set aside: at its end the run saves another one."""
    wrote(tmp_path, updates=4)
    before = files(tmp_path)
    resume(tmp_path, max_steps=4)
    assert files(tmp_path) == before
    resume(tmp_path, max_steps=5)
    expect_nothing_lost(tmp_path, before)
    assert (tmp_path / "actor.before_resume/what").read_text() == "the end"


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
                for owner, name in [(Path, "rename"), (folders, "blocks"), (folders, "flush")]:
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


def test_what_a_log_has_is_written_once(tmp_path, monkeypatch):
    """Each checkpoint has all of it, in parts that they share. A damaged one is named, and shared no more."""
    monkeypatch.setattr(folders, "LEAST_PART", 1)
    run = wrote(tmp_path / "run", updates=10, every=1)
    saved = folders.by_step(run.folder)
    for name in LOGS:
        parts = {path.stat() for checkpoint in saved for path in checkpoint.glob(f"logs/{name}*")}
        sizes = {part.st_ino: part.st_size for part in parts}
        assert sum(sizes.values()) == len(text_of(10, name))
        (tmp_path / "run" / name).write_text("")  # as by a user who needs the space
    # Copied alone to another disk, the newest is whole, and a run goes on from it.
    copied = shutil.copytree(saved[-1], tmp_path / "disk" / saved[-1].name)
    # A part of four of them is damaged.
    with open(saved[-1] / "logs/samples.jsonl.0006", "r+b") as part:
        part.write(b"[")
    for name in LOGS:
        (tmp_path / "run" / name).write_text(text_of(11, name))
    update(run)
    run.save()
    faults = [folders.fault_of(path) or "" for path in folders.by_step(run.folder)]
    assert [fault[:23] for fault in faults] == [""] * 6 + ["logs/samples.jsonl.0006"] * 4 + [""]
    resume(tmp_path / "run")
    expect_logs(tmp_path / "run", 11)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "new").mkdir()
    resume(tmp_path / "new", str(copied))
    expect_logs(tmp_path / "new", 10)


def test_parts_of_a_log_are_in_the_order_of_their_numbers(tmp_path):
    names = ["samples.jsonl", *(f"samples.jsonl.{n:04d}" for n in (1, 2, 9999, 10000))]
    for name in names:
        (tmp_path / name).touch()
    assert [part.name for part in folders.log_parts(tmp_path, "samples.jsonl")] == names


@pytest.mark.parametrize("case", ["no links", "cut", "edited", "gone"])
def test_a_log_that_shares_no_parts_is_copied_whole(tmp_path, monkeypatch, case):
    """The disk has no links, a user changed the log, or deleted a part of the earlier checkpoint."""
    monkeypatch.setattr(folders, "LEAST_PART", 1)
    run = wrote(tmp_path, updates=3, every=3)
    earlier = run.folder / "global_step_000003"
    text = text_of(4, "samples.jsonl")
    if case == "no links":
        monkeypatch.setattr(os, "link", lambda *paths: os.stat("not there"))
    elif case == "cut":
        text = text_of(1, "samples.jsonl")
    elif case == "edited":
        text = "{}\n" + text
    else:
        (earlier / "logs/samples.jsonl").unlink()
    update(run)
    (tmp_path / "samples.jsonl").write_text(text)
    run.save()
    saved = run.folder / "global_step_000004"
    assert folders.fault_of(saved) is None
    (only,) = saved.glob("logs/samples.jsonl*")
    assert only.read_text() == text


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
