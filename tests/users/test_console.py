"""What the console's encoding cannot show never ends a run: in the locale C, Python would stop at the first character that is not ASCII."""

import io
import json
import os
import subprocess
import sys

import pytest

import common
from common import logger
from runs import LAUNCHERS, REPOSITORY, launch, lines, recipe, tiny_inputs, write_jsonl

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
PROMPT, ANSWER = "你好, čaj?", "grüß 👋"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tiny_inputs(tmp_path_factory.mktemp("console"))
    say = lambda role, text: [{"role": role, "content": text}]
    rows = [
        {
            "prompt": say("user", f"{PROMPT} {n}"),
            "chosen": say("assistant", ANSWER),
            "rejected": say("assistant", "no"),
            "answer": ANSWER,
        }
        for n in range(8)
    ]
    write_jsonl(folder / "dpo-text.jsonl", rows)
    write_jsonl(
        folder / "ppo-text.jsonl", [{"prompt": row["prompt"], "answer": ANSWER} for row in rows]
    )
    return folder


def test_what_an_encoding_lacks_is_shown_as_its_number(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(
        sys, "stderr", io.StringIO()
    )  # such as a notebook's: it has no encoding to change
    with pytest.raises(UnicodeEncodeError):
        print(PROMPT)
    common.show_any_text()
    print(PROMPT, flush=True)
    assert out.buffer.getvalue().decode("ascii").splitlines()[-1] == r"\u4f60\u597d, \u010daj?"


@pytest.mark.parametrize(
    "name, launcher",
    [
        ("ppo", "plain"),
        pytest.param("dpo", "plain", marks=pytest.mark.slow),
        pytest.param("dpo", "ddp", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_run_in_the_locale_c(inputs, name, launcher):
    data, output = inputs / f"{name}-text.jsonl", inputs / f"out-{name}-{launcher}"
    more = [
        "--rollout_batch_size",
        4,
        "--generate_batch_size",
        4,
        "--score_batch_size",
        4,
        "--reward_function",
        "preference_recipes.rollouts.rewards:answer_reward",
    ]
    result = launch(
        LAUNCHERS[launcher], recipe(name), "--model_name_or_path", inputs / "model", "--dataset_name", data, "--eval_dataset_name", data,
        "--output_dir", output, "--train_batch_size", 4, "--micro_train_batch_size", 2, "--max_steps", 2, "--save_steps", 1,
        "--max_new_tokens", 4, *(more if name == "ppo" else []), env=ASCII, fresh=True,
    )  # fmt: skip
    assert [line["global_step"] for line in lines(output)] == [0, 1, 2, 2]
    assert "done: 2 updates" in result.stdout and r"\u4f60" in result.stdout
    assert f"{output}: metrics.jsonl, samples.jsonl, actor/\n" in result.stdout
    assert (output / "samples.jsonl").exists()


def test_the_commands_on_a_console_of_ascii(tmp_path):
    """export names the folder that it wrote."""
    checkpoint, out = tmp_path / "global_step_000001", tmp_path / "ö"
    (checkpoint / "actor").mkdir(parents=True)
    for file in ("actor/config.json", "state.json"):
        (checkpoint / file).write_text("{}")
    from common import folders

    folders.write_manifest(checkpoint, folders.describe_files(checkpoint))
    command = [sys.executable, "-m", "preference_recipes.tools.export", checkpoint, out]
    console = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}
    done = subprocess.run(
        command, env=os.environ | console, cwd=REPOSITORY, capture_output=True, check=True
    )
    assert (
        done.stdout.decode("ascii") == f"wrote {tmp_path}/" + r"\xf6" + "\n"
        and json.loads((out / "config.json").read_text()) == {}
    )


def test_what_is_announced_is_what_is_written(tmp_path):
    """Where checkpoints are; a schedule that a resumed run has changed."""
    inputs, output = tiny_inputs(tmp_path), tmp_path / "out"
    flags = ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "dpo.jsonl"]
    flags += ["--output_dir", output, "--save_steps", 1, "--lora_r", 2, "--lr_scheduler_type"]
    flags += ["linear", "--warmup_steps", 0, "--train_batch_size", 4]
    flags += ["--micro_train_batch_size", 4]
    first = launch([], recipe("dpo"), *flags, "--max_steps", 2).stdout
    assert f"  checkpoints  {output}/checkpoints, one every 1 update\n" in first
    assert f"  output       {output}: metrics.jsonl, actor/\n" in first
    assert not (output / "samples.jsonl").exists()
    assert "the schedule has" not in first
    more = ["--resume", "auto", "--max_steps", 4]
    assert (
        "NOTE: the schedule has 4 updates now, and 2 in the checkpoint: the learning rate is "
        "2.5e-06, not 0\n"
    ) in launch([], recipe("dpo"), *flags, *more).stdout


def test_an_evaluation_is_printed_in_columns():
    values = {"eval/loss": 0.69314, "eval/accuracies": 0.5, "eval/margins": 0.0}
    assert logger.in_columns(values) == [
        "  eval/loss           0.6931    eval/accuracies        0.5",
        "  eval/margins             0",
    ]
