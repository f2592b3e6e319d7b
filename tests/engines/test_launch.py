"""Launching: every YAML, any directory, the right world.

What cannot be honoured is refused; what is not finite stops.
"""

import argparse
import datetime
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import types

import pytest

import common.launch
import common.run_folder
from runs import (
    CONFIGS,
    LAUNCHERS,
    OFFLINE,
    REPOSITORY,
    config_launcher,
    deepspeed_launcher,
    launch,
    letters,
    recipe,
    refuses,
    training_lines,
    weights,
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return letters(tmp_path_factory.mktemp("launch"), 16)


def flags(inputs, output, *more):
    return ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "sft.jsonl", "--output_dir", output, "--train_batch_size", 8,
            "--micro_train_batch_size", 2, "--max_steps", 3, "--warmup_steps", 0, "--report_to", "none", *more]  # fmt: skip


@pytest.mark.slow
def test_a_copy_of_a_recipe_runs_from_any_directory_with_the_yaml_of_the_repository(
    inputs, tmp_path
):
    """The JSON that the YAML names is found although the current directory is another."""
    copy = shutil.copy(recipe("sft"), tmp_path / "mine.py")
    result = launch(
        config_launcher("ds_fp16"), copy, *flags(inputs, tmp_path / "out"), cwd=tmp_path, fresh=True
    )
    assert (
        "DeepSpeed ZeRO-2 fp16" in result.stdout
        and "emulated on the CPU, for checking only" in result.stdout
    )
    assert (
        "train_batch_size 8 = micro_train_batch_size 2 x 1 process x 4 gradient accumulation steps"
        in result.stdout
    )


# Imports a recipe, as starting it does, and says which packages it has found.
FIND = "import runpy, sys; runpy.run_path(sys.argv[1]); import common; print(common.__file__)"


def test_a_recipe_of_a_clone_runs_with_its_own_clones_packages(tmp_path, monkeypatch):
    """Though others are installed, here by PYTHONPATH, and whatever the current directory is."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    for part in ("recipes", "common", "preference_recipes"):
        shutil.copytree(REPOSITORY / part, tmp_path / "clone" / part)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    command = [sys.executable, "-c", FIND, tmp_path / "clone/recipes/grpo.py"]
    found = subprocess.check_output(command, cwd=tmp_path, text=True).splitlines()[-1]
    assert found == str(tmp_path / "clone/common/__init__.py")


def test_where_a_run_goes_by_itself_and_what_it_keeps(inputs, tmp_path):
    """Two processes, one folder, named after the recipe and the time."""
    some = [
        flag
        for flag in flags(inputs, "", "--save_actor_steps", 1, "--save_actor_limit", 2)
        if flag not in ("--output_dir", "")
    ]
    launch(LAUNCHERS["ddp"], recipe("sft"), *some, cwd=tmp_path)
    (output,) = (tmp_path / "runs/sft").iterdir()
    datetime.datetime.strptime(output.name, "%Y%m%d-%H%M%S")
    assert sorted(path.name for path in output.iterdir()) == [
        ".run.lock",
        "actor",
        "actors",
        "environment.json",
        "metrics.jsonl",
        "run.yaml",
    ]
    assert sorted(path.name for path in (output / "actors").iterdir()) == [
        "global_step_000002",
        "global_step_000003",
    ]
    assert weights(output).equal(weights(output, "actors/global_step_000003"))


def test_runs_of_the_same_second_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = types.SimpleNamespace(now=lambda: datetime.datetime(2030, 1, 2, 3, 4, 5))
    monkeypatch.setattr(common.run_folder, "datetime", types.SimpleNamespace(datetime=now))
    args = argparse.Namespace(output_dir=None, resume="never")
    runs = tmp_path / "runs/dpo"
    for name in ("20300102-030405", "20300102-030405-2", "20300102-030405-3"):
        assert common.run_folder.decide(args, "dpo") == str(runs / name)
    args.output_dir = "mine"
    for _ in range(2):  # an empty folder that is named may be there
        assert common.run_folder.decide(args, "dpo") == str(tmp_path / "mine")


# Takes a folder and forks a process that outlives it; says so, and waits to be killed.
HOLDER = """
import os, sys, time
from pathlib import Path
from common import run_folder

run_folder.lock(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(1000)
"""


def decide(folder, resume="never"):
    return common.run_folder.decide(
        argparse.Namespace(output_dir=str(folder), resume=resume), "dpo"
    )


def test_a_folder_is_one_runs_until_its_process_ends(tmp_path):
    """Even killed, and though something that it forked goes on, as a pool of a reward function may."""
    (tmp_path / "run.yaml").write_text("seed: 1\n")
    command = [sys.executable, "-c", HOLDER, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY) as holder:
        child = int(holder.stdout.readline())
        try:
            for resume in ("auto", "never"):
                refuses(
                    f"--output_dir {tmp_path} is in use",
                    call=lambda resume=resume: decide(tmp_path, resume),
                )
            holder.kill()
            holder.wait()
            assert decide(tmp_path) == str(tmp_path)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_folder_without_an_update_may_be_used_again(tmp_path):
    """What a run writes before its first update is no reason to refuse another one; all else is."""
    before = {
        ".run.lock": "",
        "run.yaml": "",
        "metrics.jsonl": '{"global_step": 0, "eval/loss": 3}\n',
    }
    more = {
        "a line": {"metrics.jsonl": before["metrics.jsonl"] + '{"global_step": 1, "loss": 3}\n'},
        "a checkpoint": {"checkpoints/global_step_000000/manifest.json": "{}"},
        "an actor on the way": {"actors/global_step_000001/config.json": "{}"},
        "an actor": {"actor/config.json": "{}"},
    }
    for name, changes in {"nothing": {}, **more}.items():
        folder = tmp_path / name
        for file, text in {**before, **changes}.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        if name == "nothing":
            assert decide(folder) == str(folder)
        else:
            refuses(
                f"--output_dir {folder} already holds another run",
                call=lambda folder=folder: decide(folder),
            )


def test_a_run_on_cpus_ends():
    """With torch 2.13 each second end hung when DDP was the last to hold its process group."""
    script = REPOSITORY / "tests/ending_groups.py"
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(REPOSITORY)}
    port = str(random.randrange(20_000, 30_000))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, port, rank], env=environment, stdout=subprocess.PIPE
        )
        for rank in "01"
    ]
    try:
        assert [rank.communicate(timeout=120)[0] for rank in ranks] == [b"ended\n"] * 2
    finally:
        for rank in ranks:
            rank.kill()


def test_an_output_dir_that_a_process_does_not_see_is_refused(inputs, tmp_path):
    """Another node's disk, as the processes tell each other."""
    (tmp_path / "unseen.py").write_text(
        "import runpy, sys\nfrom common import run_folder\ntold = run_folder.gather_object\n"
        "run_folder.gather_object = lambda found: [*told(found), False] if found == [True] else told(found)\n"
        "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    result = launch(
        [], tmp_path / "unseen.py", recipe("sft"), *flags(inputs, tmp_path / "out"), check=False
    )
    assert (
        result.returncode
        and f"{tmp_path / 'out'} is not visible to every process: several nodes" in result.stdout
    )
    assert "Traceback" not in result.stdout


def test_settings_that_would_be_ignored_are_refused(inputs, tmp_path):
    zero2 = json.loads((CONFIGS / "zero2.json").read_text())
    cases = {
        '"gradient_accumulation_steps": 3': {"gradient_accumulation_steps": 3},
        '"stage": 0, expected 1, 2 or 3': {"zero_optimization": {"stage": 0}},
        'has a "scheduler"': {"scheduler": {"type": "WarmupLR", "params": {}}},
    }
    for message, change in cases.items():
        (tmp_path / "ds.json").write_text(json.dumps({**zero2, **change}))
        launcher = deepspeed_launcher(tmp_path / "ds.json", 1)
        result = launch(launcher, recipe("sft"), *flags(inputs, tmp_path / "out"), check=False)
        assert result.returncode and message in result.stdout
    launcher = [*config_launcher("cpu"), "--mixed_precision", "fp16"]
    result = launch(launcher, recipe("sft"), *flags(inputs, tmp_path / "out"), check=False)
    assert result.returncode and "fp16 without DeepSpeed needs a GPU" in result.stdout


@pytest.mark.parametrize("launcher", ["plain", "zero2"])
def test_one_argument_rules_the_clipping(inputs, tmp_path, launcher):
    """`--max_grad_norm 0` is no clipping, also under DeepSpeed; the norm that is logged is the one before clipping."""
    runs = {}
    for norm in (0, 1e-3):
        runs[norm] = tmp_path / f"clip-{norm}"
        # Adam forgets the gradient's size, but not beside an epsilon of its order.
        launch(LAUNCHERS[launcher], recipe("sft"), *flags(inputs, runs[norm], "--max_grad_norm", norm, "--adam_epsilon", 1.0, "--max_steps", 1,
                                                          "--learning_rate", 1.0))  # fmt: skip
    start = weights(inputs, "model")
    moved = {norm: (weights(run) - start).norm().item() for norm, run in runs.items()}
    free, clipped = (training_lines(run)[0]["grad_norm"] for run in runs.values())
    assert free == pytest.approx(clipped, rel=1e-6) and free > 0.1
    assert moved[0] == pytest.approx(free, rel=0.3)  # lr * g / (|g| + 1)
    assert moved[1e-3] == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("launcher", ["plain", "ds_fp16"])
def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_rows(inputs, tmp_path, launcher):
    """One embedding is inf: the rows that hold its token, and no other, are named."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer("7").input_ids[0]] = float("inf")
    model.save_pretrained(tmp_path / "poisoned")
    tokenizer.save_pretrained(tmp_path / "poisoned")
    way = LAUNCHERS[launcher] if launcher in LAUNCHERS else config_launcher(launcher)
    out = flags(
        inputs,
        tmp_path / f"out-{launcher}",
        "--model_name_or_path",
        tmp_path / "poisoned",
        "--train_batch_size",
        16,
    )
    result = launch(way, recipe("sft"), *out, check=False)
    assert (
        result.returncode
        and "update 1 (updates_seen 0) is not finite, because of data rows" in result.stdout
    )
    named = result.stdout.split("because of data rows ")[1].split(". Nothing was updated")[0]
    assert named == "8"  # row 8 holds the prompt "7"
    assert not (tmp_path / f"out-{launcher}" / "actor").exists()
