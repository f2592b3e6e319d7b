"""Where a run goes, that no other run has its folder, which settings rule, and that what is not finite stops."""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import types

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, AutoTokenizer

import common.launch
import runs
from common import engine


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return runs.letters(tmp_path_factory.mktemp("launch"), 16)


def flags(inputs, output, **more):
    updates = dict(micro_train_batch_size=2, max_steps=3, warmup_steps=0)
    return runs.short_run(inputs, "sft", output, **updates | more)


@pytest.mark.parametrize(
    "told, has_bf16, precision",
    [("", True, "bf16"), ("", False, "fp32"), ("no", True, "fp32")],
)
def test_how_a_gpu_computes_where_no_launcher_says_it(told, has_bf16, precision, monkeypatch):
    """A plain `python recipes/dpo.py`, as `uv run` starts it, is `single_gpu.yaml`. Here a CPU is the GPU."""
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    on_cpu = lambda **settings: Accelerator(**settings | {"cpu": True})
    monkeypatch.setattr(common.launch, "Accelerator", on_cpu)
    monkeypatch.setattr(os, "environ", {"ACCELERATE_MIXED_PRECISION": told} if told else {})
    accelerator = common.launch.build(args=None, on_cpu=False, accumulation=1)
    assert engine.describe(accelerator) == f"one process {precision} on cpu"
    AcceleratorState._reset_state(reset_partial_state=True)


def test_where_a_run_goes_by_itself_and_what_it_keeps(inputs, tmp_path):
    """Two processes, one folder, named after the recipe and the time."""
    given = flags(inputs, None, save_actor_steps=1, save_actor_limit=2)
    runs.launch(runs.LAUNCHERS["ddp"], runs.recipe("sft"), *given, cwd=tmp_path)
    (output,) = (tmp_path / "runs/sft").iterdir()
    datetime.datetime.strptime(output.name, "%Y%m%d-%H%M%S")
    names = lambda folder: {path.name for path in folder.iterdir()}
    files = {".run.lock", "actor", "actors", "environment.json", "metrics.jsonl", "run.yaml"}
    assert names(output) == files
    assert names(output / "actors") == {"global_step_000002", "global_step_000003"}
    assert runs.weights(output).equal(runs.weights(output, "actors/global_step_000003"))


def decide(folder, resume="never", run_name=None):
    given = dict(output_dir=folder and str(folder), run_name=run_name, resume=str(resume))
    return common.launch.decide_folder(argparse.Namespace(**given), "dpo")


def test_runs_of_the_same_second_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = types.SimpleNamespace(now=lambda: datetime.datetime(2030, 1, 2, 3, 4, 5))
    monkeypatch.setattr(common.launch, "datetime", types.SimpleNamespace(datetime=now))
    for name in ("20300102-030405", "20300102-030405-2", "20300102-030405-3"):
        assert decide(None) == str(tmp_path / "runs/dpo" / name)
    for _ in range(2):  # an empty folder that is named may be there
        assert decide("mine") == str(tmp_path / "mine")


# Takes a folder and forks a process that outlives it; says so, and waits to be killed.
HOLDER = """
import os, sys, time
from pathlib import Path
from common import launch

launch.lock(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(1000)
"""


def test_a_run_has_the_name_that_it_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "runs/dpo/beta 0.3"
    for resume in ("never", "auto"):
        assert decide(None, resume, run_name=own.name) == str(own)
    (own / "actor").mkdir()
    assert decide(None, "auto", run_name=own.name) == str(own)
    runs.refuses(f"{own} already holds another run", call=lambda: decide(None, run_name=own.name))
    assert decide("mine", run_name="a/b") == str(tmp_path / "mine")  # then it is the trackers'
    for name in ("a/b", "..", ""):
        said = f"--run_name {name!r}: expected the name of a folder in runs/dpo"
        runs.refuses(said, call=lambda name=name: decide(None, run_name=name))


def test_a_folder_is_one_runs_until_its_process_ends(tmp_path):
    """Even killed, and though something that it forked goes on, as a pool of a reward function may."""
    (tmp_path / "run.yaml").write_text("seed: 1\n")
    command = [sys.executable, "-c", HOLDER, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=runs.REPOSITORY) as holder:
        child = int(holder.stdout.readline())
        try:
            for resume in ("auto", "never"):
                call = lambda resume=resume: decide(tmp_path, resume)
                runs.refuses(f"--output_dir {tmp_path} is in use", call=call)
            holder.kill()
            holder.wait()
            assert decide(tmp_path) == str(tmp_path)
        finally:
            holder.kill()  # `Popen` waits for it
            os.kill(child, signal.SIGKILL)


def test_a_folder_without_a_line_may_be_used_again(tmp_path):
    """What a run writes before its first log line is no reason to refuse another one; all else is."""
    for name in ("", "metrics.jsonl", "checkpoints", "actors", "actor"):
        folder = tmp_path / (name or "none")
        (folder / name).mkdir(parents=True)
        for file in (".run.lock", "run.yaml"):
            (folder / file).touch()
        if name:
            runs.refuses("already holds another run", call=lambda folder=folder: decide(folder))
        else:
            assert decide(folder) == str(folder)


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
    assert decide(None, old) == decide(tmp_path / "old", old) == str(tmp_path / "old")
    assert decide(tmp_path / "new", old) == decide(tmp_path / "new", loose) == str(tmp_path / "new")
    for checkpoint in (old, inside):
        call = lambda point=checkpoint: decide(used, point)
        runs.refuses("already holds another run", call=call)
    runs.refuses(f"--resume {loose}", "give --output_dir", call=lambda: decide(None, loose))
    assert decide(used, "auto") == str(used)


def expect_refused(launcher: list[str], words: list, said: str) -> None:
    result = runs.launch(launcher, *words, check=False)
    assert result.returncode and said in result.stdout
    assert "Traceback" not in result.stdout


def test_an_output_dir_that_a_process_does_not_see_is_refused(inputs, tmp_path):
    """Another node's disk, as the processes tell each other."""
    (tmp_path / "unseen.py").write_text(
        "import runpy, sys\nfrom common import launch\ntold = launch.gather_object\n"
        "launch.gather_object = lambda found: [*told(found), False] if found == [True] else told(found)\n"
        "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    words = [tmp_path / "unseen.py", runs.recipe("sft"), *flags(inputs, tmp_path / "out")]
    said = f"{tmp_path / 'out'} is not visible to every process: several nodes"
    expect_refused([], words, said)


def test_settings_that_would_be_ignored_are_refused(inputs, tmp_path):
    zero2 = json.loads((runs.CONFIGS / "zero2.json").read_text())
    words = [runs.recipe("sft"), *flags(inputs, tmp_path / "out")]
    cases = {
        '"gradient_accumulation_steps": 3': {"gradient_accumulation_steps": 3},
        'has "scheduler": remove it': {"scheduler": {"type": "WarmupLR", "params": {}}},
        "has ZeRO stage 0": {"zero_optimization": {"stage": 0}},
        "has ZeRO stage 0: take 1, 2 or 3": {"zero_optimization": {}},
    }
    for message, change in cases.items():
        (tmp_path / "ds.json").write_text(json.dumps({**zero2, **change}))
        expect_refused(runs.deepspeed_launcher(tmp_path / "ds.json", 1), words, message)
    launcher = [*runs.config_launcher("cpu"), "--mixed_precision", "fp16"]
    expect_refused(launcher, words, "fp16 without DeepSpeed needs a GPU")


@pytest.mark.parametrize("launcher", ["plain", "zero2"])
def test_one_argument_rules_the_clipping(inputs, tmp_path, launcher):
    """0 is no clipping, also under DeepSpeed; the norm that is logged is the one before clipping."""
    outputs = {}
    for norm in (0, 1e-3):
        outputs[norm] = tmp_path / f"clip-{norm}"
        # Adam forgets the gradient's size, but not beside an epsilon of its order.
        rates = dict(max_steps=1, learning_rate=1, adam_epsilon=1)
        given = flags(inputs, outputs[norm], max_grad_norm=norm, **rates)
        runs.launch(runs.LAUNCHERS[launcher], runs.recipe("sft"), *given)
    start = runs.weights(inputs, "model")
    moved = {norm: (runs.weights(run) - start).norm().item() for norm, run in outputs.items()}
    free, clipped = (runs.training_lines(run)[0]["grad_norm"] for run in outputs.values())
    assert free == pytest.approx(clipped, rel=1e-6) and free > 0.1
    assert moved[0] == pytest.approx(free, rel=0.3)  # lr * g / (|g| + 1)
    assert moved[1e-3] == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize("launcher", ["plain", "ds_fp16"])
def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_rows(inputs, tmp_path, launcher):
    """One embedding is inf: the rows that hold its token, and no other, are named."""
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer("7").input_ids[0]] = float("inf")
    model.save_pretrained(tmp_path / "poisoned")
    tokenizer.save_pretrained(tmp_path / "poisoned")
    way = runs.LAUNCHERS["plain"] if launcher == "plain" else runs.config_launcher(launcher)
    output = tmp_path / "out"
    more = {"model_name_or_path": tmp_path / "poisoned", "train_batch_size": 16}
    result = runs.launch(way, runs.recipe("sft"), *flags(inputs, output, **more), check=False)
    # Row 8 holds the prompt "7".
    said = "update 1 (updates_seen 0) is not finite, because of data rows 8. Nothing was updated"
    assert result.returncode and said in result.stdout
    assert not (output / "actor").exists()


def test_threads_end_before_their_process(tmp_path):
    """Such as an upload that a reward function began. With gloo a process ends by itself, see `errors.leave`."""
    (tmp_path / "thread.py").write_text(
        "import threading, time\nfrom accelerate import Accelerator\nfrom common import errors\n"
        "def upload():\n    time.sleep(0.5)\n    print('uploaded')\n"
        "def main():\n    Accelerator(cpu=True)\n    threading.Thread(target=upload).start()\n"
        "errors.run(main)\n"
    )
    result = runs.launch(runs.LAUNCHERS["ddp"], tmp_path / "thread.py", fresh=True)
    assert result.stdout.count("uploaded") == 2
