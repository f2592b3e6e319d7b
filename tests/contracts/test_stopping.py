"""Runs that are told to end, lose a process or fill the disk leave a whole checkpoint and say so.

They go on as if nothing had been.
"""

import json
import os
import resource
import signal
import tempfile
import time
import types

import pytest
import torch
from accelerate.utils import DistributedType

from common import folders, run_folder
from common.checkpoint import Checkpoint
from runs import (
    LAUNCHERS,
    launch,
    lines,
    recipe,
    refuses,
    start,
    start_warm,
    timeless,
    tiny_llama,
    weights,
    workers,
    write_jsonl,
)
from small_run import small_run

UPDATES = 40


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopping")
    tiny_llama(folder / "model", attention_dropout=0.2)
    rows = [{"text": f"{n}{'x' * (n % 9)}"} for n in range(44)]
    write_jsonl(folder / "rows.jsonl", rows)
    return folder


def flags(inputs, output, *more):
    return ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "rows.jsonl", "--output_dir", output, "--train_batch_size", 8,
            "--micro_train_batch_size", 2, "--max_steps", UPDATES, "--learning_rate", 0.01, "--logging_steps", 3, "--report_to", "none", *more]  # fmt: skip


def begin(launcher, inputs, *command):
    """A run in the background. Under DDP the launcher and its processes are those of a user, else see warm.py."""
    if launcher == "ddp":
        return start(LAUNCHERS[launcher], *command, cwd=inputs)
    with tempfile.NamedTemporaryFile(dir=inputs, delete=False) as console:
        return start_warm(LAUNCHERS[launcher], *command, cwd=inputs, output=console.name)


def until(condition, process, seconds=90):
    end = time.time() + seconds
    while not condition():
        assert process.poll() is None and time.time() < end, process.communicate(timeout=60)[0][
            -3000:
        ]
        time.sleep(0.002)


@pytest.fixture(scope="module")
def unbroken(inputs):
    done = {}

    def run(launcher):
        if launcher not in done:
            done[launcher] = inputs / f"unbroken-{launcher}"
            launch(LAUNCHERS[launcher], recipe("sft"), *flags(inputs, done[launcher]))
        return done[launcher]

    return run


def assert_goes_on(inputs, launcher, output, reference):
    result = launch(LAUNCHERS[launcher], recipe("sft"), *flags(inputs, output, "--resume", "auto"))
    assert "resumed from" in result.stdout
    assert timeless(output) == timeless(reference) and torch.equal(
        weights(output), weights(reference)
    )


@pytest.mark.parametrize(
    "launcher, number",
    [
        pytest.param("plain", signal.SIGINT, id="plain-SIGINT"),
        pytest.param("ddp", signal.SIGTERM, id="ddp-SIGTERM", marks=pytest.mark.slow),
        pytest.param("zero2", signal.SIGUSR1, id="zero2-SIGUSR1", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_run_with_a_checkpoint(inputs, unbroken, launcher, number):
    """In a world of two one process alone gets SIGUSR1; SIGTERM goes to the launcher, which passes it on."""
    output = inputs / f"signal-{launcher}-{number.name}"
    process = begin(launcher, inputs, recipe("sft"), *flags(inputs, output))
    until(lambda: (output / "metrics.jsonl").exists() and len(lines(output)) >= 3, process)
    os.kill(workers(process)[-1] if number == signal.SIGUSR1 else process.pid, number)
    console, _ = process.communicate(timeout=60)
    done = max(int(path.name.split("_")[-1]) for path in (output / "checkpoints").iterdir())
    assert process.returncode and 6 <= done < UPDATES and not (output / "actor").exists()
    assert launcher != "plain" or process.returncode == 128 + number
    assert (
        f"stopped by {number.name} after update {done}, saved in {output}/checkpoints: go on with --resume auto"
        in console
    )
    assert_goes_on(inputs, launcher, output, unbroken(launcher))


def test_a_full_disk_leaves_the_checkpoint_before_whole(inputs, unbroken):
    """No file may grow beyond 20 kB after the first checkpoint: what a full disk does, as far as a process can see."""
    output = inputs / "full"
    given = flags(inputs, output, "--save_steps", 2, "--save_total_limit", 0)
    process = begin("plain", inputs, recipe("sft"), *given)
    until(lambda: [*(output / "checkpoints").glob("global_step_*")], process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
    console, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" in console
    whole = folders.by_step(output / "checkpoints")
    assert whole and all(folders.fault_of(path) is None for path in whole)
    assert_goes_on(inputs, "plain", output, unbroken("plain"))


@pytest.mark.parametrize(
    "world, stage, precision",
    [
        ("ZeRO-2 fp16 on cuda with 8 processes", 3, "fp16"),  # other files
        ("ZeRO-2 bf16 on cuda with 8 processes", 2, "fp16"),  # no loss scale
        ("ZeRO-2 fp16 on cuda with 80 processes", 2, "fp16"),  # other shards
    ],
)
def test_a_world_that_cannot_read_a_checkpoint_is_refused(tmp_path, world, stage, precision):
    plugin = types.SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": stage}})
    run = small_run(tmp_path, beta=1)
    run.accelerator = types.SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED,
        num_processes=8,
        mixed_precision=precision,
        device=torch.device("cuda"),
        state=types.SimpleNamespace(deepspeed_plugin=plugin),
    )
    before = {"beta": 1, "data": "d", "world": f"DeepSpeed {world}"}
    call = lambda: run.refuse_another_run(tmp_path, before)
    refuses(f"world: 'DeepSpeed {world}' in the checkpoint", call=call)


FORKS = """
import json, multiprocessing, os, signal
from common import stopping

signals = stopping.Signals()
fork = multiprocessing.get_context("fork")
# Ended at once: some while they are being forked, some while they wait for what never comes.
ended = []
for number in range(60):
    process = fork.Process(target=fork.Event().wait)
    process.start()
    process.terminate()
    process.join(10)
    ended.append(process.exitcode)
    process.kill()
os.kill(os.getpid(), signal.SIGUSR1)
print(json.dumps([ended, signals.number]))
"""


def test_what_a_reward_function_forks_has_signals_of_its_own(tmp_path):
    """SIGTERM, by which a pool ends its workers, needs no Python there: it would not run while a worker waits for a lock."""
    (tmp_path / "forks.py").write_text(FORKS)
    result = launch(LAUNCHERS["plain"], tmp_path / "forks.py", timeout=100)
    ended, own = json.loads(result.stdout.splitlines()[-1])
    assert ended == [-signal.SIGTERM] * 60 and own == signal.SIGUSR1


def test_what_a_killed_save_left_is_removed(tmp_path):
    for name in (".global_step_000004.writing", "global_step_000002"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    small_run(tmp_path, resume="never").find()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["global_step_000002"]


def test_a_signal_while_a_checkpoint_is_written_does_not_write_it_twice(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(
        Checkpoint, "write", lambda self, temporary, final: written.append(final.name)
    )
    run = small_run(tmp_path)
    for run.run.global_step in (4, 4, 5):
        run.save()
    assert written == ["global_step_000004", "global_step_000005"]


def test_where_a_resumed_run_goes(tmp_path):
    """From a path into a folder of its own, or on where it was; never over another run."""
    old = tmp_path / "old/checkpoints/global_step_000004"
    loose = tmp_path / "loose/global_step_000004"
    used = tmp_path / "used"
    inside = used / "exported/global_step_000004"  # not among the checkpoints of that run
    for folder in (old, loose, inside):
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    (used / "actor").mkdir()
    (used / "actor/config.json").write_text("{}")

    def decide(resume, output_dir=None):
        folder = output_dir and str(output_dir)
        return run_folder.decide(
            types.SimpleNamespace(resume=str(resume), output_dir=folder), "sft"
        )

    assert decide(old) == decide(old, tmp_path / "old") == str(tmp_path / "old")
    assert decide(old, tmp_path / "new") == decide(loose, tmp_path / "new") == str(tmp_path / "new")
    for checkpoint in (old, inside):
        refuses("already holds another run", call=lambda point=checkpoint: decide(point, used))
    refuses(f"--resume {loose}", "give --output_dir", call=lambda: decide(loose))
    assert decide("auto", used) == str(used)
