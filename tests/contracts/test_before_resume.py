"""A resume gives a run's folder back as it was at the checkpoint, and deletes nothing.

The logs come out of the checkpoint. What lies beyond it stays under names in `.before_resume`.
"""

import json
import shutil
from pathlib import Path

import pytest

from common import folders
from common.best import Best
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


def test_going_back_gives_the_logs_and_sets_aside_what_came_after(tmp_path, capsys):
    wrote(tmp_path)
    (tmp_path / "checkpoints/global_step_000004_best").mkdir()  # the user's own
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard/events").write_text("curves")  # it hides what came after by itself
    before = files(tmp_path)
    point = tmp_path / "checkpoints/global_step_000002"
    assert resume(tmp_path, str(point)).run.global_step == 2
    said = capsys.readouterr().out
    found = files(tmp_path)
    for name in LOGS:
        assert found[name] == before[f"checkpoints/global_step_000002/logs/{name}"]
        assert found[name].decode() == text_of(2, name)
        assert found[f"{name}.before_resume"] == before[name]
    renamed = [f"actors/global_step_00000{step}" for step in (3, 4, 5)]
    renamed += ["actor", "checkpoints/global_step_000004"]
    for name, content in before.items():
        (beyond, *_) = [part for part in renamed if name.startswith(f"{part}/")] or [""]
        if name not in LOGS:
            assert found[name.replace(beyond, f"{beyond}.before_resume", bool(beyond))] == content
    # Nothing else has come, and nothing stays under its former name.
    assert len(found) == len(before) + len(LOGS)
    assert (tmp_path / "checkpoints/global_step_000004_best").is_dir()
    (line,) = [line for line in said.splitlines() if line.startswith("set aside")]
    names = line.removeprefix(f"set aside in {tmp_path}: ").split(", ")
    assert sorted(names) == sorted(f"{Path(name).name}.before_resume" for name in [*renamed, *LOGS])


def test_a_second_time_takes_the_next_names(tmp_path, capsys):
    """Nothing of the first time is touched."""
    run = wrote(tmp_path)
    point = tmp_path / "checkpoints/global_step_000002"
    resume(tmp_path, str(point))
    first = files(tmp_path)
    for name in LOGS:
        (tmp_path / name).write_text(text_of(2, name) + "a second time\n")
    run.run.global_step = 4
    run.last_saved = None
    run.save()
    second = files(tmp_path)
    resume(tmp_path, str(point))
    found = files(tmp_path)
    for name in LOGS:
        assert found[name].decode() == text_of(2, name)
        assert found[f"{name}.before_resume"] == first[f"{name}.before_resume"]
        assert found[f"{name}.before_resume.2"] == second[name]
    saved = "checkpoints/global_step_000004"
    assert f"{saved}/state.json" not in found
    for attempt, content in ((".before_resume", first), (".before_resume.2", second)):
        source = f"{saved}{attempt}" if content is first else saved
        assert found[f"{saved}{attempt}/state.json"] == content[f"{source}/state.json"]
    # A third one finds all in order, and renames nothing.
    capsys.readouterr()
    resume(tmp_path, str(point))
    assert files(tmp_path) == found and "set aside" not in capsys.readouterr().out


@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: None,  # no file
        lambda text: b"",
        lambda text: text[:-9],  # torn in a line
        lambda text: text[: text.index(b"\n") + 1],  # cut between lines
        lambda text: text[:-9] + b"\0" * 9,  # as a file system leaves what was not written
        lambda text: text.replace(b"1", b"7"),  # edited, of the same length
        lambda text: text + b'{"global_step": 5}\n',
    ],
)
def test_what_became_of_a_log_in_the_runs_folder_does_not_matter(tmp_path, damage, log):
    """The checkpoint has its bytes; what is there instead stays aside."""
    wrote(tmp_path, updates=4)
    whole = (tmp_path / log).read_bytes()
    damaged = damage(whole)
    (tmp_path / log).unlink() if damaged is None else (tmp_path / log).write_bytes(damaged)
    resume(tmp_path)
    assert (tmp_path / log).read_bytes() == whole
    aside = tmp_path / f"{log}.before_resume"
    assert (aside.read_bytes() if aside.exists() else None) == damaged
    (other,) = set(LOGS) - {log}
    assert (tmp_path / other).read_text() == text_of(4, other)
    assert not (tmp_path / f"{other}.before_resume").exists()


def test_a_log_that_the_checkpoint_lacks_is_set_aside(tmp_path):
    """Its first line came after the checkpoint."""
    run = small_run(tmp_path)
    update(run)
    (tmp_path / "metrics.jsonl").write_text(text_of(1, "metrics.jsonl"))
    run.save()
    (tmp_path / "samples.jsonl").write_text("beyond\n")
    resume(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == text_of(1, "metrics.jsonl")
    assert not (tmp_path / "samples.jsonl").exists()
    assert (tmp_path / "samples.jsonl.before_resume").read_text() == "beyond\n"


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path, capsys):
    wrote(tmp_path, every=0)
    shutil.rmtree(tmp_path / "actor")  # it has not ended
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard/events").write_text("curves")
    best = {"metric": "eval/loss", "global_step": 3, "value": 1.0}
    (tmp_path / "best.json").write_text(json.dumps(best))
    (tmp_path / "actor_best").mkdir()
    (tmp_path / "actor_best/what").write_text("best")
    before = files(tmp_path)
    assert resume(tmp_path).run.global_step == 0
    said = capsys.readouterr().out
    assert f"no checkpoint in {tmp_path}/checkpoints: starting from the beginning" in said
    aside = [*LOGS, "best.json", "actor_best", "tensorboard"]
    aside += [f"actors/global_step_00000{step}" for step in range(1, 6)]
    expected = {}
    for name, content in before.items():
        (part,) = [part for part in aside if name == part or name.startswith(f"{part}/")]
        expected[name.replace(part, f"{part}.before_resume", 1)] = content
    assert files(tmp_path) == expected
    # The same with `--resume never`, which takes a folder of a run without an update.
    (tmp_path / "metrics.jsonl").write_text("of an evaluation\n")
    resume(tmp_path, "never")
    assert not (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "metrics.jsonl.before_resume.2").read_text() == "of an evaluation\n"


@pytest.mark.parametrize("comes_after", [False, True])
def test_the_best_actor_is_set_aside_only_if_it_came_after(tmp_path, capsys, comes_after):
    """Then the best begins anew: its actor of before the checkpoint is overwritten."""
    best = {"keep_best": "eval/loss"}
    run = small_run(tmp_path, save_total_limit=0, **best)
    (tmp_path / "actor_best").mkdir()
    for loss in [1.0, 2.0, 0.5] if comes_after else [1.0, 2.0]:
        update(run)
        run.actor.keep_best({"eval/loss": loss})
        if loss == 2.0:
            run.save()
    found = resume(tmp_path, **best).actor.best
    assert found == (Best() if comes_after else Best(global_step=1, value=1.0, since=1))
    assert ("--keep_best begins anew" in capsys.readouterr().out) == comes_after
    for name in ("actor_best", "best.json"):
        assert (tmp_path / name).exists() != comes_after
        assert (tmp_path / f"{name}.before_resume").exists() == comes_after


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
    number = 0
    while True:
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
            pass
        else:
            break
        # With `auto`, the newest checkpoint that kept its name; by its name the same as before.
        newest = folders.step_of(folders.by_step(output / "checkpoints")[-1])
        assert newest in (2, 4, 6), number
        resumed = resume(output, str(point))
        assert resumed.run.global_step == 2
        found = files(output)
        for name in LOGS:
            assert found[name].decode() == text_of(2, name), number
            asides = [text for path, text in found.items() if path.startswith(f"{name}.before")]
            assert before[name] in asides, number
        for name, content in before.items():
            beyond = [
                folder
                for folder in (*Path(name).parents, Path(name))
                if (folders.step_of(folder) or 0) > 2 or folder == Path("actor")
            ]
            if beyond:
                renamed = name.replace(str(beyond[0]), f"{beyond[0]}.before_resume", 1)
                assert found[renamed] == content and name not in found, (number, name)
        number += 1
    assert number >= 15  # that many changes were interrupted


def test_a_run_that_goes_on_elsewhere_has_the_logs_there(tmp_path):
    """And a checkpoint of its own; the other run's folder is as it was."""
    old, new = tmp_path / "old", tmp_path / "new"
    wrote(old)
    new.mkdir()
    before = files(old)
    resume(new, str(old / "checkpoints/global_step_000002"), save_steps=2)
    assert files(old) == before
    for name in LOGS:
        assert (new / name).read_text() == text_of(2, name)
    saved = new / "checkpoints/global_step_000002"
    assert folders.fault_of(saved) is None
    assert (saved / "logs/metrics.jsonl").read_text() == text_of(2, "metrics.jsonl")
