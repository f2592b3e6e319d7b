"""A run killed, told to end or out of disk, and resumed, is one that went on, bit for bit.

It ends with the same weights and the same metrics.jsonl.
"""

import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import recipes
from common import folders
from common.checkpoint import LOGS
from preference_recipes.tools import export
from recipes import RECIPES
from runs import (
    LAUNCHERS,
    kill,
    launch,
    lines,
    recipe,
    refuses,
    samples,
    start,
    start_warm,
    timeless,
    tiny_inputs,
    weights,
    workers,
)
from small_run import small_run

# growing: ZeRO-2 in fp16, whose loss scale doubles every second update.
CASES = [
    pytest.param(name, launcher, "", marks=[pytest.mark.slow] * (launcher in slow))
    for name, of_recipe in RECIPES.items()
    for slow in [of_recipe.resume_on_slow]
    for launcher in (*of_recipe.resume_on, *slow)
]
CASES += [
    pytest.param(name, launcher, "lora", marks=[pytest.mark.slow] * (launcher != "plain"))
    for name, launcher in [
        ("dpo", "plain"),
        ("sft", "ddp"),
        ("dpo", "growing"),
        ("dpo", "fsdp2"),
        ("ppo", "zero3"),
    ]
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return tiny_inputs(tmp_path_factory.mktemp("resume"))


def flags(inputs, name, output):
    return ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / f"{name}.jsonl", "--output_dir", output,
            "--train_batch_size", 8, "--micro_train_batch_size", 2, "--max_epochs", 2, "--learning_rate", 0.01, "--logging_steps", 3,
            "--save_steps", 2, "--save_total_limit", 2, *RECIPES[name].resume_flags]  # fmt: skip


def run_until(inputs, name, launcher, output, ready, *more, fresh=False):
    """Starts a run and returns its process as soon as `ready()` holds."""
    command = [LAUNCHERS[launcher], recipe(name), *flags(inputs, name, output), *more]
    process = start(*command) if fresh else start_warm(*command, output=f"{output}.console")
    end = time.time() + 120
    while not ready() and process.poll() is None and time.time() < end:
        time.sleep(0.005)
    assert process.poll() is None, f"the run ended with {process.poll()} too early"
    return process


def kill_when(inputs, name, launcher, output, ready, *more):
    """Starts a run and kills all its processes as soon as `ready()` holds."""
    kill(run_until(inputs, name, launcher, output, ready, *more))


def resume(inputs, name, launcher, output, *more, check=True):
    given = [*flags(inputs, name, output), "--resume", "auto", *more]
    return launch(LAUNCHERS[launcher], recipe(name), *given, check=check)


def wrote(output, step):
    file = output / "metrics.jsonl"
    return file.exists() and f'"global_step": {step},' in file.read_text()


@pytest.fixture(scope="module")
def unbroken(inputs):
    @functools.cache
    def run(name, launcher, *more):
        output = inputs / f"unbroken-{name}-{launcher}{''.join(map(str, more))}"
        launch(LAUNCHERS[launcher], recipe(name), *flags(inputs, name, output), *more)
        return output

    return run


def expect_same(output, reference):
    assert timeless(output) == timeless(reference)
    assert samples(output) == samples(reference)
    assert torch.equal(weights(output), weights(reference))


@pytest.mark.parametrize("name, launcher, adapters", CASES)
def test_killed_and_resumed_is_the_run_never_killed(
    request, inputs, unbroken, name, launcher, adapters
):
    if launcher == "offload":
        request.getfixturevalue("cpu_adam")
    more = ["--lora_r", 4] if adapters else []
    if adapters and not RECIPES[name].generates:  # the policies of the others have no dropout
        more += ["--lora_dropout", 0.1]
    reference = unbroken(name, launcher, *more)
    output = inputs / f"killed-{name}-{launcher}{adapters}"
    kept = sorted(path.name for path in (reference / "checkpoints").iterdir())
    assert kept == ["global_step_000010", "global_step_000012"]
    # Line 9 stands beyond checkpoint 8, which holds a line half filled since line 6.
    kill_when(inputs, name, launcher, output, lambda: wrote(output, 9), *more)
    assert "resumed from" in resume(inputs, name, launcher, output, *more).stdout
    expect_same(output, reference)
    assert bool(samples(reference)) == RECIPES[name].generates
    if name == "grpo":  # the checkpoint is within a rollout; some groups were left out
        with torch.serialization.safe_globals([(recipes.load(name).State, "__main__.State")]):
            file = reference / "checkpoints/global_step_000010/rollout.pt"
            state = torch.load(file, weights_only=True)
        assert state.position.rollouts_seen >= 3 and state.position.update > 0
        dropped = [line["frac_groups_dropped"] for line in lines(reference) if "reward" in line]
        assert min(dropped) > 0 and max(dropped) < 1
    board = EventAccumulator(str(output / "tensorboard"))
    board.Reload()
    # Each step once, whatever the killed run wrote.
    assert [event.step for event in board.Scalars("loss")] == [1, 3, 6, 9, 12]


def test_killed_where_an_epoch_ends(inputs, unbroken):
    """The rows that come next are those of the second epoch."""
    output = inputs / "killed-at-epoch"
    at_end = lambda: (output / "checkpoints/global_step_000006").exists()
    kill_when(inputs, "dpo", "plain", output, at_end)
    resume(inputs, "dpo", "plain", output)
    expect_same(output, unbroken("dpo", "plain"))


LONGER = ["--max_epochs", 8, "--report_to", "none"]


@pytest.mark.parametrize(
    "launcher, number",
    [
        ("plain", signal.SIGINT),
        pytest.param("ddp", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("zero2", signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_run_with_a_checkpoint(inputs, unbroken, launcher, number):
    """In a world of two one process alone gets SIGUSR1; SIGTERM goes to a user's launcher, which passes it on."""
    output = inputs / f"signal-{launcher}"
    began = lambda: wrote(output, 6)
    fresh = launcher == "ddp"
    process = run_until(inputs, "sft", launcher, output, began, *LONGER, fresh=fresh)
    os.kill(workers(process)[-1] if number == signal.SIGUSR1 else process.pid, number)
    console, _ = process.communicate(timeout=60)
    done = folders.step_of(folders.by_step(output / "checkpoints")[-1])
    assert process.returncode and 6 <= done < 48 and not (output / "actor").exists()
    assert launcher != "plain" or process.returncode == 128 + number
    assert f"stopped by {number.name} after update {done}, saved in {output}" in console
    resume(inputs, "sft", launcher, output, *LONGER)
    expect_same(output, unbroken("sft", launcher, *LONGER))


def test_a_full_disk_leaves_the_checkpoint_before_whole(inputs, unbroken):
    """No file may grow beyond 20 kB after the first checkpoint: what a full disk does, as far as a process can see."""
    output = inputs / "full"
    has_one = lambda: folders.by_step(output / "checkpoints")
    process = run_until(inputs, "sft", "plain", output, has_one, *LONGER)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
    console, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" in console
    assert has_one() and all(folders.fault_of(path) is None for path in has_one())
    resume(inputs, "sft", "plain", output, *LONGER)
    expect_same(output, unbroken("sft", "plain", *LONGER))


def test_a_recipe_that_holds_something_more_does_not_go_on_without_it(tmp_path):
    small_run(tmp_path).save()
    resumed = small_run(tmp_path)
    resumed.others["more"] = resumed.others["extra"]
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


def test_random_states_that_cannot_be_read_are_refused(tmp_path):
    """accelerate passes over any error there, and the run would draw other dropout without a word."""
    small_run(tmp_path).save()
    final = tmp_path / "checkpoints/global_step_000000"
    file = final / "engine/random_states_0.pkl"
    states = torch.load(file, weights_only=False)
    states["torch_manual_seed"] = states["torch_manual_seed"][:-1]
    torch.save(states, file)
    with pytest.raises(RuntimeError):
        small_run(tmp_path).load(final)


def test_damage_is_named_and_the_checkpoint_before_taken(inputs, unbroken):
    """Any file of the newest checkpoint: deleted, emptied, cut by a byte, one bit flipped."""
    reference = unbroken("dpo", "plain")
    output = shutil.copytree(reference, inputs / "damaged")
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
    said = resume(inputs, "dpo", "plain", output).stdout
    assert f"passed over {newest}: {newest}/state.json is missing" in said
    assert "global_step_000010" in said
    expect_same(output, reference)
    for folder in (output / "checkpoints").iterdir():
        (folder / "manifest.json").unlink()
    result = resume(inputs, "dpo", "plain", output, check=False)
    assert result.returncode and "--resume auto: no whole checkpoint" in result.stdout


@pytest.mark.parametrize(
    "name, launcher", [("dpo", "plain"), pytest.param("kto", "zero3", marks=pytest.mark.slow)]
)
def test_export_gives_the_actor_the_run_saved(unbroken, tmp_path, name, launcher):
    reference = unbroken(name, launcher)
    checkpoint = reference / "checkpoints/global_step_000012"
    command = [sys.executable, "-m", "preference_recipes.tools.export", checkpoint]
    subprocess.run([*command, tmp_path / "out"], check=True, cwd=tmp_path)
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
    refuses("actor/model.safetensors has [bytes, CRC-32]", call=call)


def test_a_longer_run_has_its_own_rates_from_the_first_update_on(inputs, unbroken):
    """Update 13 of 18, after a run of 12: the falling rate of a horizon of 18, not the zero at which the 12 ended."""
    output = shutil.copytree(unbroken("dpo", "plain"), inputs / "longer")
    resume(inputs, "dpo", "plain", output, "--max_epochs", 3, "--logging_steps", 1)
    rates = {line["global_step"]: line["learning_rate"] for line in lines(output)}
    expected = {step: 0.01 * (18 - (step - 1)) / 16 for step in range(13, 19)}
    assert {step: rates[step] for step in expected} == pytest.approx(expected)


def test_auto_does_not_begin_again_what_has_ended(inputs, tmp_path):
    few = ["--max_steps", 1, "--save_steps", 0]
    resume(inputs, "dpo", "plain", tmp_path / "ended", *few)
    result = resume(inputs, "dpo", "plain", tmp_path / "ended", *few, check=False)
    assert result.returncode and "has ended and left no checkpoint" in result.stdout


def test_a_checkpoint_of_another_run_is_refused(inputs, unbroken):
    """All differences are named. Of data the content decides: here one character of the last row."""
    point = unbroken("dpo", "plain") / "checkpoints/global_step_000012"
    *rows, last = (inputs / "dpo.jsonl").read_text().splitlines()
    edited = inputs / "edited.jsonl"
    edited.write_text("\n".join([*rows, last.replace("!", "?")]))
    for changes, parts in [
        (["--beta", 0.2, "--max_length", 9], ["beta: 0.1 in the checkpoint, 0.2", "max_length: "]),
        (["--dataset_name", edited], ["belongs to another run: data: "]),
        (["--eval_dataset_name", edited], ["belongs to another run: held-out data: {}"]),
    ]:
        flags = [*changes, "--resume", point]
        said = resume(inputs, "dpo", "plain", inputs / "other", *flags, check=False)
        assert said.returncode and "Traceback" not in said.stdout
        assert all(part in said.stdout for part in parts), said.stdout


@pytest.mark.slow
def test_each_process_draws_its_own_dropout(unbroken):
    """From one seed all would drop the same places, each of other samples."""
    engine = unbroken("sft", "ddp") / "checkpoints/global_step_000012/engine"
    seeds = []
    for rank in (0, 1):
        states = torch.load(engine / f"random_states_{rank}.pkl", weights_only=False)
        generator = torch.Generator()
        generator.set_state(states["torch_manual_seed"])
        seeds.append(generator.initial_seed())
    assert seeds == [0, 1]


@pytest.mark.slow
def test_a_critic_that_was_sharded_is_taken_out_whole(inputs, unbroken, tmp_path):
    """It has learned: every weight matrix of it differs from the model that it started from."""
    checkpoint = unbroken("ppo", "zero3") / "checkpoints/global_step_000012"
    export.export(checkpoint, tmp_path / "critic", model="critic")
    critic, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "critic", output_loading_info=True
    )
    assert not info["missing_keys"] and critic.score.weight.shape == (1, 32)
    start = dict(AutoModelForCausalLM.from_pretrained(inputs / "model").named_parameters())
    for name, parameter in critic.named_parameters():
        assert parameter.isfinite().all()
        if name.startswith("model.layers") and parameter.ndim == 2:
            assert not torch.equal(parameter, start[name])
