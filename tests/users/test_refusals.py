"""A user's mistakes, as the console shows them: one message, the last thing on the screen."""

import signal
import sys
import time
import types

import pytest

from common import Refused, arguments, errors
from recipes import load
from runs import ASSETS, LAUNCHERS, config_launcher, forked, launch, recipe, start, write_jsonl

MODEL = ["--model_name_or_path", ASSETS / "model"]
OWN = [*MODEL, "--dataset_name", "pairs.jsonl"]

SMOOTHED = [*OWN, "--loss_type", "ipo", "--label_smoothing", 0.1]
MINE = """
def asks(prompts, responses, key): ...
"""
ASKED = [*MODEL, "--dataset_name", "asked.jsonl", "--reward_function"]
# Each: recipe, flags, what the message says.
TABLE = [
    ("dpo", ["unknown.yaml"], ["unknown.yaml: there is no argument betta. Did you mean --beta?"]),
    ("dpo", ["none.yaml"], ["none.yaml cannot be read: [Errno 2] No such file"]),
    ("dpo", ["torn.yaml"], ["torn.yaml cannot be read: ", "line 1"]),
    ("dpo", ["value.yaml"], ["value.yaml: error: argument --beta: invalid float value: 'abc'"]),
    ("dpo", ["--lr=1e-4"], ["arguments: --lr=1e-4. Instead of lr give --learning_rate"]),
    (
        "grpo",
        ["--epsilon", 0.2, "--num-epochs", 3, "--betta", 1],
        [
            "--betta 1. Instead of epsilon give --clip_range. Instead of num_epochs give --max_epochs"
        ],
    ),
    ("dpo", ["--bf16"], ["--bf16. Instead of bf16 give a YAML of accelerate_configs/"]),
    ("dpo", [*OWN, "--keep_best", "eval/x"], ["eval/x: not used: give --eval_dataset_name, too"]),
    ("dpo", ["--report_to", "wandb"], ["wandb is not installed: pip install wandb"]),
    (
        "dpo",
        ["--push_to_hub", "True"],
        ["--push_to_hub True: expected a name, such as me/my-model"],
    ),
    ("dpo", ["--model_name_or_path", "./none", *OWN[2:]], ["folder './none' does not exist"]),
    (
        "grpo",
        [*ASKED, "none:brief"],
        ["'none:brief' cannot be loaded, from /", "No module named 'none'"],
    ),
    ("grpo", [*ASKED, "torn:f"], ["'torn:f' cannot be loaded", "(torn.py, line 1)"]),
    ("grpo", [*ASKED, "mine:none"], ["'mine:none' cannot be loaded", "no attribute 'none'"]),
    ("grpo", [*ASKED, "mine"], ["'mine' is no function or class: expected MODULE:NAME"]),
    (
        "grpo",
        [*ASKED, "mine:asks"],
        ["missing a required argument: 'key'; the data's columns: prompt"],
    ),
    ("dpo", MODEL, ["--dataset_name is missing", "neither for the demo"]),
    ("sft", ["--save_steps", 2.5], ["--save_steps 2.5: expected whole updates"]),
    # Not after the models are loaded.
    ("dpo", ["--report_to", "all"], ["--report_to all: expected one of tensorboard,"]),
    ("dpo", ["--beta", 0], ["--beta 0.0: expected above 0"]),
    # A process adds its number.
    ("sft", ["--seed", 2**32 - 1], ["--seed 4294967295: expected at least 0 and below 2147483648"]),
    ("dpo", SMOOTHED, ["--label_smoothing 0.1: not used with --loss_type ipo, only sigmoid"]),
    ("dpo", [*OWN, "--lora_alpha", 4], ["--lora_alpha 4.0: not used", "give --lora_r"]),
    ("dpo", ["--model_name_or_path", "owner/never", *OWN[2:]], ["'owner/never'", "connect"]),
    ("dpo", ["--model_name_or_path", ".", *OWN[2:]], ["'.' cannot", "without config.json"]),
    ("dpo", [*OWN, "--chat_template", "none.j"], ["--chat_template none.j: no such file"]),
    ("dpo", [*OWN, "--chat_template_kwargs", "{a"], ["{a: expected a JSON object, such as {"]),
    ("dpo", [*OWN, "--dataset_split", "x"], [": split 'x' is not there; its splits: train"]),
    ("ppo", OWN, ["nothing scores the responses", "--reward_function"]),
    # A file, where a folder is to be made.
    ("dpo", [*OWN, "--output_dir", "mine.py/run"], ["mine.py/run cannot be written: "]),
    ("dpo", [*OWN, "--resume", "auto"], ["--resume auto does not say where", "give --output_dir"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's working directory."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_jsonl(folder / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4)
    write_jsonl(folder / "asked.jsonl", [{"prompt": "a", "answer": "b"}] * 4)
    (folder / "unknown.yaml").write_text("betta: 0.2\n")
    (folder / "torn.yaml").write_text("beta: [0.2\n")
    (folder / "value.yaml").write_text("beta: abc\n")
    (folder / "torn.py").write_text("def f(:\n")
    (folder / "mine.py").write_text(MINE)
    return folder


@pytest.mark.parametrize("name, flags, parts", TABLE)
def test_a_mistake_is_one_message(folder, name, flags, parts):
    result = launch([], recipe(name), *flags, cwd=folder, check=False)
    said = result.stdout.strip().splitlines()
    assert result.returncode == 1, result.stdout
    assert all(part in said[-1] for part in parts), result.stdout
    assert "Traceback" not in result.stdout and len(said) < 8, result.stdout
    assert not [*folder.glob("runs/*/*")]  # a failed start leaves no folder of a run


def test_a_guess_at_an_argument_is_close():
    hint = arguments.Parser(load("dpo").Args).hint
    assert hint("--top_p") == hint("--use_dora") == hint("--seeed_of_all") == ""
    assert hint("--learning-rat=1") == ". Did you mean --learning_rate?"


# Sizes by which the settings of a case are the only fault in those of a demo.
SIZES = {
    "ppo": dict(rollout_batch_size=16, train_batch_size=8),
    # A rollout need not be a multiple of an update.
    "grpo": dict(rollout_batch_size=100, train_batch_size=256, max_new_tokens=1024),
    "distill": {},
}
HTTP = "http://x"
CISPO = {"loss_type": "cispo", "clip_range": 0.1}
NO_KL = {"kl_coef": 0.0, "kl_in": "loss"}
ADAPTIVE = {"kl_target": 6.0, "kl_horizon": 25.0, "n_samples_per_prompt": 8}
SAMPLED = {"loss_type": "sampled"}
MIXED = {"on_policy_share": 0.5}
NO_TEACHER = {"teacher_model_name_or_path": None}
# A recipe with the changes of forks, settings, and what is said against them.
SETTINGS = [
    ("ppo", {"kl_in": "loss"}, "--kl_in loss --kl_estimator k1"),
    ("ppo", NO_KL | {"ref_model_name_or_path": "R"}, "--ref_model_name_or_path R: not used"),
    ("ppo", {"kl_coef": 0.0, "kl_estimator": "k3"}, "--kl_estimator k3: not used"),
    ("ppo", NO_KL, "--kl_in loss: not used"),
    ("ppo adaptive_kl", {"kl_target": 6.0, "kl_coef": 0.0}, "--kl_target"),
    ("ppo adaptive_kl", ADAPTIVE, "--kl_horizon above a fifth of them (25.6)"),
    ("ppo adaptive_kl", {"kl_horizon": 500.0}, "--kl_horizon 500.0: not used: give --kl_target"),
    ("grpo", {"n_samples_per_prompt": 1}, "--n_samples_per_prompt 1 --baseline group"),
    ("grpo", {"baseline": "none", "advantage_std": "group"}, "--advantage_std group"),
    ("grpo", {"rollout_batch_size": 31}, "fewer than --train_batch_size 256"),
    # Its sampler has no dropout: the policy that is trained would not be the one that responded.
    ("grpo", {"lora_r": 4, "lora_dropout": 0.1}, "--lora_dropout 0.1: expected"),
    ("grpo", {"rollouts_ahead": 1}, "--rollouts_ahead 1: not used: give --vllm_url, too"),
    ("grpo", {"max_turns": 3}, "--max_turns 3: not used: give --environment, too"),
    ("grpo", {"environment_timeout": 5.0}, "--environment_timeout 5.0: not used"),
    ("grpo", {"normalize_reward": True}, "not used: give --reward_model_name_or_path, too"),
    ("grpo", CISPO, "--clip_range 0.1: not used with --loss_type cispo, only clip"),
    ("grpo", {"kl_estimator": "k2"}, "--kl_estimator k2: not used: give --kl_coef, too"),
    ("grpo dapo", {"refill_rounds": 1, "drop_equal_groups": False}, "--refill_rounds replaces"),
    ("grpo dapo", {"refill_rounds": 1, "kl_coef": 0.1}, "--refill_rounds replaces groups left out"),
    ("grpo dapo", {"overlong_penalty": 0.5}, "--overlong_penalty 0.5: not used"),
    ("distill", SAMPLED | {"beta": 0.5}, "--beta 0.5: not used with --loss_type sampled"),
    ("distill gkd", SAMPLED | MIXED, "were not drawn by the student"),
    ("distill gkd", MIXED | {"n_samples_per_prompt": 2}, "give --n_samples_per_prompt 1"),
    ("distill", {"vllm_url": HTTP, "sampler_correction": "none"}, "only --loss_type sampled is"),
    ("distill", {"max_sampler_difference": 0.1}, "0.1: not used: give --vllm_url, too"),
    ("distill", SAMPLED | {"sampler_correction": "none"}, "--sampler_correction none: not used"),
    ("distill", {"teacher_url": HTTP}, "expected one teacher, or several"),
    ("distill", NO_TEACHER | {"teacher": "T"}, "as --teacher NAME=PATH and --teacher_"),
    ("distill", {"teacher": "a=T", "teacher_url": "a=http://x"} | NO_TEACHER, "each name once"),
    ("distill", NO_TEACHER | {"teacher_url": HTTP, "temperature": 0.7}, "--temperature 0.7: a --t"),
    ("distill", NO_TEACHER, "no teacher: give"),
]


@pytest.mark.parametrize("name, settings, said", SETTINGS)
def test_settings_that_would_be_ignored_or_cannot_work(name, settings, said):
    name, *forks = name.split()
    recipe = load(name, forked(*forks) if forks else None)

    def refused(settings: dict) -> str:
        argv = [
            f"--{flag}={'' if x is None else x}" for flag, x in (SIZES[name] | settings).items()
        ]
        try:
            recipe.check_settings(arguments.parse(recipe.Args, ASSETS / f"{name}.yaml", argv))
        except (SystemExit, Refused) as refusal:
            return refusal.args[0].strip().splitlines()[-1]
        return ""

    assert refused({}) == "" and said in refused(settings)


class Waits(Exception):
    """A process waits for its launcher to end it."""


def test_of_all_processes_one_says_why(tmp_path, monkeypatch, capsys):
    """The first, and once more below what the launcher prints."""

    def become(rank: int):
        """One of the two processes of a launcher, whose files have the places that torch gives them."""
        file = tmp_path / f"attempt_0/{rank}/error.json"
        file.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def sleep(seconds):
        raise Waits

    monkeypatch.setattr(time, "sleep", sleep)
    repeated = []
    monkeypatch.setattr(errors, "repeat", repeated.append)
    monkeypatch.setattr(
        errors, "tqdm", types.SimpleNamespace(_instances=[])
    )  # not those of other tests
    become(1)
    with pytest.raises(SystemExit) as stopped:  # a signal that stops a run is no error
        errors.run(lambda: sys.exit(128 + signal.SIGTERM))
    assert stopped.value.code == 143
    with pytest.raises(SystemExit) as refusal:
        errors.run(lambda: sys.exit("--beta 0: expected more"))
    assert refusal.value.code == "--beta 0: expected more"

    # The others tell nothing, and wait: a process that fails too would be in the report.
    become(0)
    for main in (lambda: sys.exit("--beta 0: expected more"), lambda: 1 / 0):
        with pytest.raises(Waits):
            errors.run(main)
    assert capsys.readouterr().err == ""
    assert repeated == ["--beta 0: expected more"]
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")  # without a launcher
    with pytest.raises(SystemExit, match="said"):
        errors.run(lambda: sys.exit("said"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [config_launcher("single_gpu"), LAUNCHERS["ddp"]],
    ids=["single_gpu", "ddp"],
)
@pytest.mark.parametrize("name, flags, parts", [TABLE[0], TABLE[-1]])
def test_under_a_launcher_the_message_is_the_last_thing_on_the_screen(
    folder, launcher, name, flags, parts
):
    """Below what the launcher prints, once: all processes refuse, one says so."""
    command = start(launcher, recipe(name), *flags, cwd=folder, output=folder / "said", fresh=True)
    assert command.wait(200) == 1
    last = ""
    while not all(part in last for part in parts):  # it comes after the launcher's end
        time.sleep(0.1)
        *_, last = (folder / "said").read_text().strip().splitlines()
    time.sleep(1)
    assert (folder / "said").read_text().strip().endswith(last)
    assert not [*folder.glob("runs/*/*")]
