"""A user's mistakes, as the console shows them: one message, the last thing on the screen."""

import gc
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from common import arguments, errors
from common.shared_args import SharedArgs
from recipes import load as load_recipe
from runs import ASSETS, LAUNCHERS, REPOSITORY, launch, recipe

MODEL = ["--model_name_or_path", ASSETS / "model"]
OWN = [*MODEL, "--dataset_name", "pairs.jsonl"]
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}

# Each: recipe, flags, what the message says. Those of `FAST` run in `make test`.
TABLE = [
    # The command line.
    ("dpo", ["--betta", 1], ["unrecognized arguments: --betta 1"]),
    ("sft", ["--seed", -1], ["--seed -1: expected at least 0 and below 4294967296"]),
    ("dpo", MODEL, ["--dataset_name is missing", "neither for the demo"]),
    ("dpo", ["unknown.yaml"], ["unrecognized arguments: --betta 0.2"]),
    # Numbers and settings.
    ("sft", ["--save_steps", 2.5], ["--save_steps 2.5: expected a whole number of updates"]),
    ("dpo", ["--beta", 0], ["--beta 0.0: expected above 0"]),
    ("dpo", [*OWN, "--loss_type", "ipo", "--label_smoothing", 0.1], ["--label_smoothing 0.1", "--loss_type sigmoid or robust"]),
    ("dpo", [*OWN, "--max_epochs", 0], ["--max_epochs 0 and --max_steps 0", "at least one"]),
    ("dpo", ["--train_batch_size", 200, "--micro_train_batch_size", 6], ["198 or 204", "1 process"]),
    ("dpo", [*OWN, "--lora_alpha", 4], ["--lora_alpha has no meaning", "give --lora_r"]),
    ("dpo", [*OWN, "--load_in_4bit", "True"], ["--load_in_4bit", "give --lora_r"]),
    ("dpo", [*OWN, "--lora_target_modules", "q_proj"], ["--lora_target_modules has no meaning", "give --lora_r"]),
    ("dpo", [*OWN, "--lora_r", 4, "--lora_target_modules", "no"], ["no linear layer of LlamaForCausalLM", "q_proj"]),
    # Models.
    ("dpo", ["--model_name_or_path", "/no/such", *OWN[2:]], ["'/no/such' cannot be loaded by Auto"]),
    ("dpo", ["--model_name_or_path", "owner/never", *OWN[2:]], ["'owner/never'", "connect"]),
    # Data.
    ("dpo", [*MODEL, "--dataset_name", "none.jsonl"], ["'none.jsonl' does not exist (looked in"]),
    ("dpo", [*MODEL, "--dataset_name", "torn.jsonl"], ["torn.jsonl, row 2: Expecting"]),
    ("dpo", [*MODEL, "--dataset_name", "columns.jsonl"], ["row 1: no 'chosen'", "found ['a']"]),
    ("dpo", [*MODEL, "--dataset_name", "same.jsonl"], ["no usable row", "chosen equal to rejected"]),
    ("dpo", [*OWN, "--columns", "prompt"], ["--columns prompt: expected", "such as prompt=question"]),
    ("dpo", [*OWN, "--dataset_weights", 1, 2], ["--dataset_weights 1.0 2.0: expected 1 number"]),
    # Reward functions.
    ("ppo", OWN, ["nothing scores the responses", "--reward_function"]),
    # Folders and checkpoints.
    ("dpo", [*OWN, "--output_dir", "stopped"], ["already holds another run", "--resume auto"]),
    ("dpo", [*OWN, "--resume", "auto"], ["--resume auto", "--output_dir: give it"]),
    ("dpo", [*OWN, "--resume", "used"], ["--resume used is not in the checkpoints of a run"]),
]  # fmt: skip
FAST = range(0, len(TABLE), 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's working directory."""
    folder = tmp_path_factory.mktemp("mistakes")
    texts = {
        "pairs.jsonl": (json.dumps(PAIR) + "\n") * 4,
        "torn.jsonl": json.dumps(PAIR) + '\n{"prompt": "a", "chosen"\n',
        "columns.jsonl": '{"a": 1}\n',
        "same.jsonl": json.dumps(PAIR | {"rejected": "b"}) + "\n",
        "unknown.yaml": "betta: 0.2\n",
        "used/actor/x": "",
        "stopped/checkpoints/global_step_000001/x": "",
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    "name, flags, parts",
    [
        pytest.param(*row, marks=[pytest.mark.slow] * (number not in FAST))
        for number, row in enumerate(TABLE)
    ],
)
def test_a_mistake_is_one_message(folder, name, flags, parts):
    result = launch([], recipe(name), *flags, cwd=folder, check=False)
    said = result.stdout.strip().splitlines()
    assert result.returncode == 1, result.stdout
    assert all(part in said[-1] for part in parts), result.stdout
    assert "Traceback" not in result.stdout and len(said) < 8, result.stdout


class Waits(Exception):
    """A process waits for its launcher to end it."""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Lets the test be one of the two processes of a launcher, whose files have the places that torch gives them."""

    def become(rank: int):
        folder = tmp_path / f"attempt_0/{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        return folder / "error.json"

    def sleep(seconds):
        raise Waits

    monkeypatch.setattr(time, "sleep", sleep)
    return become


def divide():
    return 1 / 0


def test_the_launcher_is_told_one_message_of_all_processes(worker, capsys):
    """That of the first. It stands at the end of the launcher's report, so the process does not print it."""
    file = worker(1)
    with pytest.raises(SystemExit) as refusal:
        errors.run(lambda: sys.exit("--beta 0: expected more"))
    assert refusal.value.code == 1
    message = json.loads(file.read_text())["message"]
    assert message["message"] == message["extraInfo"]["py_callstack"] == "--beta 0: expected more"
    errors.launcher_says("a consequence")
    assert json.loads(file.read_text())["message"] == message

    # The others tell nothing, and wait: a process that fails too would be in the report.
    other = worker(0)
    for main in (lambda: sys.exit("--beta 0: expected more"), divide):
        with pytest.raises(Waits):
            errors.run(main)
    assert capsys.readouterr().err == "" and not other.exists()


def test_garbage_is_collected_once_the_arguments_are_read():
    """A recipe that is a program has switched it off; one that is imported has not."""
    load_recipe("dpo")
    assert gc.isenabled()
    gc.disable()
    arguments.parse(SharedArgs, "dpo.yaml", ["--model_name_or_path=m", "--dataset_name=d"])
    assert gc.isenabled()


@pytest.mark.parametrize("end, code", [("1 / 0", 1), ("sys.exit(3)", 1), ("sys.exit(0)", 0)])
def test_what_fails_after_the_last_update_is_a_failure(end, code, tmp_path):
    """A process that has closed its metrics ends before the interpreter cleans up, with its own code."""
    script = tmp_path / "late.py"
    script.write_text(
        "import atexit, sys\nfrom common import errors, log\n"
        "def main():\n"
        "    atexit.register(log.exit_without_cleaning_up)\n"
        f"    {end}\n"
        "errors.run(main)\n"
    )
    (tmp_path / "0").mkdir()
    of_launcher = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "0/error.json"), "LOCAL_RANK": "0"}
    environment = {**os.environ, **of_launcher, "PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run([sys.executable, script], env=environment).returncode == code


def test_without_a_launcher_of_its_own_a_process_says_it_itself(worker, monkeypatch, capsys):
    """Nor does a signal that stops a run make it wait."""
    file = worker(0)
    with pytest.raises(SystemExit) as stopped:
        errors.run(lambda: sys.exit(128 + signal.SIGTERM))
    assert stopped.value.code == 143 and not file.exists()
    monkeypatch.delenv("LOCAL_RANK")  # started by a process that a launcher started
    with pytest.raises(SystemExit, match="said"):
        errors.run(lambda: sys.exit("said"))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    with pytest.raises(SystemExit, match="said"):
        errors.run(lambda: sys.exit("said"))
    assert not file.exists()
    with pytest.raises(ZeroDivisionError):
        errors.run(divide)


@pytest.mark.slow
@pytest.mark.parametrize("flags, message", [
    (["--beta", "strong"], "dpo.py: error: argument --beta: invalid float value: 'strong'"),
    ([*MODEL, "--dataset_name", "none.jsonl"], "data file 'none.jsonl' does not exist"),
])  # fmt: skip
def test_under_a_launcher_the_message_is_the_last_thing_on_the_screen(folder, flags, message):
    """And is there once: both processes refuse, the launcher reports one.

    The other one may be ended by the launcher's signal before it has read its arguments.
    """
    result = launch(LAUNCHERS["ddp"], recipe("dpo"), *flags, cwd=folder, check=False, fresh=True)
    assert result.returncode != 0
    *_, last, border = result.stdout.strip().splitlines()
    assert set(border) == {"="} and message in last, result.stdout
    assert result.stdout.count(message) == 1
