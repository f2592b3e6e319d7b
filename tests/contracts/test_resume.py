"""A run killed, told to end or out of disk, and resumed, is one that went on, bit for bit."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.io.gfile import LocalFileSystem
from transformers import AutoModelForCausalLM

import recipes
import runs
from common import folders, log
from common.checkpoint import LOGS
from common.values import Recorder
from contracts.proof.bench import EVALUATION_ROWS, Bench, Finished
from preference_recipes.tools import export
from recipes import ANSWER_REWARD, TIES
from small_run import small_run

# growing: ZeRO-2 in fp16, whose loss scale doubles every second update.
FAST = [
    ("dpo", "plain", ""),
    ("dpo", "growing", ""),
    ("grpo", "plain", ""),
    ("dpo", "plain", "lora"),
]
# In two processes under DDP and ZeRO-3 the proof kills a run: test_recipe.py.
SLOW = [
    *(("sft", "offload", ""), ("dpo", "fsdp2", ""), ("ppo", "zero3", "")),
    *(("dpo", "growing", "lora"), ("dpo", "fsdp2", "lora"), ("ppo", "zero3", "lora")),
]
CASES = [*FAST, *(runs.slow(*case) for case in SLOW)]
# Two epochs of 6 updates, with dropout, so that random states count.
RUN = dict(n_rows=44, dropout=0.2, train_batch_size=8, micro_train_batch_size=2)
RUN |= dict(logging_steps=3, eval_steps=0, save_steps=2, save_total_limit=2)
RUN |= dict(learning_rate=0.01, report_to="tensorboard")
SAMPLED = RUN | dict(max_steps=12, max_new_tokens=6, generate_batch_size=8, score_batch_size=8)
OF_RECIPE = {
    # Four updates a rollout: checkpoint 8 holds the end of the second, line 9 is of the third.
    "ppo": SAMPLED | dict(n_samples_per_prompt=1, num_epochs_per_rollout=2),
    # Rollouts of 6 groups; those of equal scores are left out, so a rollout has 1 to 3 updates.
    "grpo": SAMPLED | dict(rollout_batch_size=6, n_samples_per_prompt=4),
}
REWARDS = {"ppo": ANSWER_REWARD, "grpo": TIES}


@pytest.fixture(scope="module")
def bench(bench_of):
    """`recipe -> Bench`."""
    flags = {name: ["--reward_function", function] for name, function in REWARDS.items()}
    return lambda name: bench_of(name, *flags.get(name, []))


def flags(bench: Bench, output: Path, **changes) -> list[str]:
    return bench.flags(output, **OF_RECIPE.get(bench.recipe.stem, RUN) | changes)


def unbroken(bench: Bench, launcher: str = "plain", **changes) -> Path:
    name = "-".join(["unbroken", launcher, *changes])
    return bench.run(name, launcher, **OF_RECIPE.get(bench.recipe.stem, RUN) | changes).folder


def stopped(bench: Bench, name: str, ready, launcher: str = "plain", changes=None, **how) -> Path:
    """A run that is killed, or what else `how` says, as soon as `ready(folder)` holds."""
    output = bench.folder / name
    given = flags(bench, output, **changes or {})
    came_to_it = bench.run_until(name, launcher, given, lambda: ready(output), **how)
    assert came_to_it, "it ended too early"
    return output


def resume(bench: Bench, output: Path, launcher="plain", check=True, point="auto", **changes):
    given = [*flags(bench, output, **changes), "--resume", point]
    return runs.launch(runs.LAUNCHERS[launcher], bench.recipe, *given, check=check)


def wrote(step: int):
    """Whether a run has a log line of this update."""
    has = lambda file: file.exists() and f'"global_step": {step},' in file.read_text()
    return lambda output: has(output / "metrics.jsonl")


def expect_same(output: Path, reference: Path) -> None:
    assert runs.timeless(output) == runs.timeless(reference)
    assert runs.samples(output) == runs.samples(reference)
    assert Finished(output).values.equals(Finished(reference).values)
    assert torch.equal(runs.weights(output), runs.weights(reference))


@pytest.mark.parametrize("name, launcher, adapters", CASES)
def test_killed_and_resumed_is_the_run_never_killed(request, bench, name, launcher, adapters):
    if launcher == "offload":
        request.getfixturevalue("cpu_adam")
    changes = {"lora_r": 4} if adapters else {}
    if adapters and name not in OF_RECIPE:  # policies that sample have no dropout
        changes["lora_dropout"] = 0.1
    reference = unbroken(bench(name), launcher, **changes)
    kept = sorted(path.name for path in (reference / "checkpoints").iterdir())
    assert kept == ["global_step_000010", "global_step_000012"]
    # Line 9 stands beyond checkpoint 8, which holds a line half filled since line 6.
    output = stopped(bench(name), f"killed-{launcher}{adapters}", wrote(9), launcher, changes)
    assert "resumed from" in resume(bench(name), output, launcher, **changes).stdout
    expect_same(output, reference)
    if name == "grpo":  # the checkpoint is within a rollout; some groups were left out
        recipes.load(name)  # so that torch knows the dataclasses
        file = reference / "checkpoints/global_step_000010/rollout.pt"
        state = torch.load(file, weights_only=True)
        assert state.rollouts_seen >= 3 and state.updates_made > 0
        made = [line for line in runs.training_lines(reference) if "reward" in line]
        dropped = [line["frac_groups_dropped"] for line in made]
        assert min(dropped) > 0 and max(dropped) < 1
    board = EventAccumulator(str(output / "tensorboard"))
    board.Reload()
    # Each step once, whatever the killed run wrote.
    assert [event.step for event in board.Scalars("loss")] == [1, 3, 6, 9, 12]


@pytest.mark.slow
def test_fsdp2_saved_before_its_first_update(bench, tmp_path):
    """torch steps a fresh optimizer when it saves it: Adam's next update would have been its second."""
    copy = tmp_path / "saves_at_once.py"
    loads = "    checkpoint.begin_or_resume()"
    text = bench("dpo").recipe.read_text()
    copy.write_text(text.replace(loads, f"{loads}; checkpoint.save(); sys.exit()"))
    output = bench("dpo").folder / "saved-at-0"
    runs.launch(runs.LAUNCHERS["fsdp2"], copy, *flags(bench("dpo"), output))
    assert "global_step_000000" in resume(bench("dpo"), output, "fsdp2").stdout
    expect_same(output, unbroken(bench("dpo"), "fsdp2"))


LONGER = {"max_epochs": 8, "report_to": "none"}


@pytest.mark.parametrize(
    "launcher, number",
    [
        ("plain", signal.SIGINT),
        runs.slow("ddp", signal.SIGTERM),
        runs.slow("zero2", signal.SIGUSR1),
    ],
)
def test_a_signal_ends_the_run_with_a_checkpoint(bench, launcher, number):
    """In a world of two one process alone gets SIGUSR1; SIGTERM goes to a user's launcher, which passes it on."""
    ended = []

    def send(process):
        target = psutil.Process(process.pid)
        if number == signal.SIGUSR1:
            target = target.children()[-1]
        target.send_signal(number)
        ended.append(process.wait(60))

    how = dict(act=send, fresh=launcher == "ddp")
    output = stopped(bench("sft"), f"signal-{launcher}", wrote(6), launcher, LONGER, **how)
    done = folders.step_of(folders.by_step(output / "checkpoints")[-1])
    assert ended != [0] and 6 <= done < 48 and not (output / "actor").exists()
    assert launcher != "plain" or ended == [128 + number]
    console = output.with_name(f"signal-{launcher}.console").read_text()
    assert f"stopped by {number.name} after update {done}, saved: to continue add" in console
    assert f"--output_dir {output} --resume auto" in console
    resume(bench("sft"), output, launcher, **LONGER)
    expect_same(output, unbroken(bench("sft"), launcher, **LONGER))


def test_a_full_disk_leaves_the_checkpoint_before_whole(bench):
    """No file may grow beyond 20 kB after the first checkpoint: what a full disk does, as far as a process can see."""
    ended = []

    def fill(process):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
        ended.append(process.wait(60))

    has_one = lambda output: folders.by_step(output / "checkpoints")
    output = stopped(bench("sft"), "full", has_one, changes=LONGER, act=fill)
    said = output.with_name("full.console").read_text()
    assert ended == [1] and "Traceback" not in said
    part = rf"{output}/checkpoints/\.global_step_\d+\.writing"
    assert re.fullmatch(f"{part} cannot be written: .+", said.strip().splitlines()[-1])
    assert has_one(output) and not any(map(folders.fault_of, has_one(output)))
    assert not [*output.glob("checkpoints/.*")]
    resume(bench("sft"), output, **LONGER)
    expect_same(output, unbroken(bench("sft"), **LONGER))


TABLES = [pyarrow.table({"loss": [1.0]})]
WRITERS = {
    "metrics.jsonl": lambda made: made.run.write({"loss": 1.0}),
    ".run.yaml.writing": lambda made: folders.replace_file(made.run.output_dir / "run.yaml", "a"),
    "values.parquet/.000000-x-0.parquet": lambda made: Recorder(made.run, "x", [], TABLES).write(),
    "tensorboard": lambda made: log.Board(made.run),
    ".few.pt": lambda made: save(made.run.output_dir / ".few.pt", torch.zeros(2)),
    ".many.pt": lambda made: save(made.run.output_dir / ".many.pt", torch.zeros(10**6)),
}


def save(file: Path, tensor: torch.Tensor) -> None:
    with folders.writing(file):
        torch.save(tensor, file)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name, write", WRITERS.items())
def test_what_a_full_disk_does_not_take_is_named(tmp_path, monkeypatch, name, write):
    """And the part that was written is removed, but never a log."""
    made = small_run(tmp_path, eval_dataset_name=None)
    made.run.start()
    file = tmp_path / name
    if name == "tensorboard":  # whose files are named after the time
        full = lambda *_: Path("/dev/full").write_text("x")
        monkeypatch.setattr(LocalFileSystem, "_write", full)
    else:
        file.parent.mkdir(exist_ok=True)
        file.symlink_to("/dev/full")
    why = "the disk or its quota is full" if file.suffix == ".pt" else "[Errno 28] "
    runs.refuses(f"{file} cannot be written: {why}", call=lambda: write(made))
    assert os.path.lexists(file) != file.name.startswith(".")


def test_a_recipe_that_holds_something_more_does_not_go_on_without_it(tmp_path):
    small_run(tmp_path).save()
    resumed = small_run(tmp_path)
    resumed.states["more"] = resumed.means
    with pytest.raises(FileNotFoundError, match="more"):
        resumed.load(resumed.folder / "global_step_000000")


def test_the_logs_in_a_checkpoint_are_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    run = small_run(tmp_path)
    for name in LOGS:
        (tmp_path / name).write_text(f'{{"global_step": 0, "in": "{name}"}}\n')
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda n: flushed.append(os.readlink(f"/proc/self/fd/{n}")))
    rename = Path.rename

    def checked(path, target):
        if path.name == ".global_step_000000.writing":
            logs = [path / "logs" / name for name in LOGS]
            expected = [*logs, path / "logs", path / "state.json", path]
            assert {*map(str, expected)} <= {*flushed}
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", checked)
    run.save()
    for name in LOGS:
        saved = run.folder / "global_step_000000/logs" / name
        assert saved.read_bytes() == (tmp_path / name).read_bytes()


def test_damage_is_named_and_the_checkpoint_before_taken(bench):
    """Any file of the newest checkpoint: deleted, emptied, cut by a byte, one bit flipped."""
    reference = unbroken(bench("dpo"))
    output = shutil.copytree(reference, reference.with_name("damaged"))
    newest = output / "checkpoints/global_step_000012"
    manifest = json.loads((newest / "manifest.json").read_text())
    parts = {path.split("/")[0] for path in manifest}
    assert parts == {"actor", "engine", "logs", "state.json"}
    assert folders.fault_of(newest) is None
    for name in [*manifest, "manifest.json"]:
        whole = (newest / name).read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        for damage in (None, b"", whole[:-1], flipped):
            (newest / name).unlink(missing_ok=True)
            if damage is not None:
                (newest / name).write_bytes(damage)
            fault = folders.fault_of(newest)
            assert fault and (name in fault or name == "manifest.json"), (name, fault)
        (newest / name).write_bytes(whole)
    (newest / "state.json").unlink()
    said = resume(bench("dpo"), output).stdout
    assert f"passed over {newest}: {newest}/state.json is missing" in said
    assert "global_step_000010" in said
    expect_same(output, reference)
    for folder in (output / "checkpoints").iterdir():
        (folder / "manifest.json").unlink()
    result = resume(bench("dpo"), output, check=False)
    assert result.returncode and "--resume auto: no whole checkpoint" in result.stdout


def test_export_gives_the_actor_the_run_saved(bench, tmp_path):
    reference = unbroken(bench("dpo"))
    checkpoint = reference / "checkpoints/global_step_000012"
    command = [sys.executable, "-m", "preference_recipes.tools.export", checkpoint]
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    subprocess.run([*command, tmp_path / "out"], check=True, cwd=tmp_path)
    assert (tmp_path / "out").is_symlink()
    read = lambda folder: {path.name: path.read_bytes() for path in folder.iterdir()}
    assert read(tmp_path / "out") == read(reference / "actor")
    export.export(checkpoint, tmp_path / "half", dtype="bfloat16")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    whole = AutoModelForCausalLM.from_pretrained(reference / "actor")
    for one, other in zip(half.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other.to(torch.bfloat16))
    torn = shutil.copytree(checkpoint, tmp_path / "torn")
    (torn / "actor/model.safetensors").write_bytes(b"x")
    call = lambda: export.export(torn, tmp_path / "no")
    runs.refuses("actor/model.safetensors has [bytes, CRC-32]", call=call)


def test_a_longer_run_has_its_own_rates_from_the_first_update_on(bench):
    """Update 13 of 18, after a run of 12: the falling rate of a horizon of 18, not the zero at which the 12 ended."""
    reference = unbroken(bench("dpo"))
    output = shutil.copytree(reference, reference.with_name("longer"))
    resume(bench("dpo"), output, max_epochs=3, logging_steps=1)
    rates = {line["global_step"]: line["learning_rate"] for line in runs.training_lines(output)}
    expected = {step: 0.01 * (18 - (step - 1)) / 18 for step in range(13, 19)}
    assert {step: rates[step] for step in expected} == pytest.approx(expected)


def test_a_checkpoint_of_another_run_is_refused(bench):
    """All differences are named. Of data the content decides: here one character of the last row."""
    reference = unbroken(bench("dpo"))
    point = reference / "checkpoints/global_step_000012"
    *rows, last = bench("dpo").data_file("train", RUN["n_rows"]).read_text().splitlines()
    edited = reference.with_name("edited.jsonl")
    edited.write_text("\n".join([*rows, last.replace("=", "?")]))
    # Of held-out rows the answers of exact match count, too, which no model reads.
    held_out = bench("dpo").data_file("held_out", EVALUATION_ROWS).read_text()
    answered = reference.with_name("answered.jsonl")
    answered.write_text(held_out.replace('"answer": "', '"answer": "0', 1))
    for changes, parts in [
        ({"beta": 0.2, "max_length": 90}, ["beta: 0.1 in the checkpoint, 0.2", "max_length: "]),
        ({"dataset_name": edited}, ["belongs to another run: data: "]),
        ({"eval_dataset_name": answered}, ["belongs to another run: held-out data: "]),
    ]:
        output = reference.with_name("other")
        said = resume(bench("dpo"), output, check=False, point=point, **changes)
        assert said.returncode and "Traceback" not in said.stdout
        assert all(part in said.stdout for part in parts), said.stdout


@pytest.mark.slow
def test_each_process_draws_its_own_dropout(bench):
    """From one seed all would drop the same places, each of other samples."""
    checkpoints = unbroken(bench("sft"), "ddp", **LONGER) / "checkpoints"
    engine = folders.by_step(checkpoints)[-1] / "engine"
    seeds = []
    for rank in (0, 1):
        states = torch.load(engine / f"random_states_{rank}.pkl", weights_only=False)
        generator = torch.Generator()
        generator.set_state(states["torch_manual_seed"])
        seeds.append(generator.initial_seed())
    assert seeds == [0, 1]
