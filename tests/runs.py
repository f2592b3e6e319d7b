"""Launching recipes as a user does, and reading what they wrote."""

import contextlib
import csv
import functools
import gzip
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from common import Refused
from contracts.proof import warm
from preference_recipes.tools import forks
from recipes import RECIPES

REPOSITORY = Path(__file__).resolve().parent.parent
ASSETS = REPOSITORY / "assets"
CONFIGS = Path(__file__).resolve().parent / "configs"
# Runs a recipe, and tells what its model holds at the end.
HOLDING = REPOSITORY / "tests/held_weights.py"
PYTHON = ["-m", "accelerate.commands.launch"]
IN_FP32 = ["--mixed_precision", "no"]
COMPILED = ["--dynamo_backend", "aot_eager"]
COMPILED += ["--dynamo_use_dynamic", "--dynamo_use_regional_compilation"]
OFFLINE = {"HF_HUB_OFFLINE": "1", **warm.ENVIRONMENT}
os.environ.update(OFFLINE)  # before the first launch: warm.py's process inherits it
TIMEOUT = 240  # seconds a launch may take: a hang is a failure


def code_of_page(page: str) -> str:
    """The first block of Python in a page."""
    return re.search("```python\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)[1]


@functools.cache
def forked(*names: str) -> Path:
    """A recipe with the changes of these files of `forks/`, in a folder of its own."""
    file = Path(tempfile.mkdtemp(), f"{forks.recipe_of(names[0])}.py")
    file.write_text(forks.patched(file.stem, list(names)))
    return file


def config_launcher(name: str, processes: int = 1) -> list[str]:
    """The launcher of one of the project's own YAMLs."""
    file = str(REPOSITORY / f"accelerate_configs/{name}.yaml")
    return [*PYTHON, "--config_file", file, "--num_processes", str(processes)]


def deepspeed_launcher(path: Path, processes: int) -> list[str]:
    """The launcher of a DeepSpeed JSON without a YAML."""
    engine = ["--use_deepspeed", "--deepspeed_config_file", str(path)]
    world = ["--num_processes", str(processes), "--num_machines", "1"]
    return [*PYTHON, *engine, *world, *IN_FP32, "--dynamo_backend", "no"]


def fp16_launcher(path: Path, stage: int, processes: int, **scale) -> list[str]:
    """A DeepSpeed world in fp16 with these settings of the loss scale, whose JSON is written to `path`."""
    fp16 = {"enabled": True, "loss_scale": 0.0, "loss_scale_window": 1000, "min_loss_scale": 1}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    names = ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "gradient_clipping")
    content = {"fp16": fp16 | scale, "zero_optimization": zero, **dict.fromkeys(names, "auto")}
    path.write_text(json.dumps(content))
    return deepspeed_launcher(path, processes)


LAUNCHERS = {
    "plain": [],
    "compiled": [*config_launcher("cpu"), *COMPILED],
    "ddp": [*config_launcher("ddp", 2), *IN_FP32],
    "fsdp2": [*config_launcher("fsdp2", 2), *IN_FP32],
}
for name in ("zero1", "zero2", "zero3", "offload", "growing"):
    LAUNCHERS[name] = deepspeed_launcher(CONFIGS / f"{name}.json", 2)


def slow(*values):
    """A case that `make test` leaves out."""
    import pytest  # not above: benchmarks/storm.py imports this file and needs none

    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(fast: Iterable, cases: Iterable) -> list:
    """These cases, but those that are not among the fast ones marked as slow."""
    return [case if case in fast else slow(case) for case in cases]


def flags_of(settings: dict) -> list[str]:
    """Arguments as words of a command line."""
    flags = []
    for name, value in settings.items():
        flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return flags


# What a small run that samples needs besides a reward.
ROLLOUTS = dict(rollout_batch_size=8, generate_batch_size=8, score_batch_size=8, max_new_tokens=4)


def short_run(inputs: Path, name: str, output: Path | None, **settings) -> list[str]:
    """The flags of a run on the model and the rows of `tiny_inputs`, or of `letters`."""
    files = {"model_name_or_path": inputs / "model", "dataset_name": inputs / f"{name}.jsonl"}
    if output:
        files["output_dir"] = output
    return flags_of({**files, "train_batch_size": 8, "report_to": "none", **settings})


def command_of(launcher: list[str], script: Path, *flags) -> list[str]:
    """What follows `python`, to start a script under a launcher."""
    port = ["--main_process_port", "0"] if launcher else []
    return [*launcher, *port, str(script), *map(str, flags)]


def start(
    launcher: list[str],
    script: Path,
    *flags,
    cwd: Path = REPOSITORY,
    env: dict | None = None,
    output: str = os.devnull,
    fresh: bool = False,
):
    """Starts a script under a launcher, offline; `fresh`: in new interpreters, as a user does."""
    words = command_of(launcher, script, *flags)
    # Helpers beside a recipe import our packages before it does, and others may be installed.
    ours = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    environment = os.environ | OFFLINE | ours | (env or {})
    if not fresh:
        return warm.Process(words, cwd, environment, output)
    with open(output, "wb") as console:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=cwd,
            env=environment,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs; one that has ended but was not waited for does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(process: subprocess.Popen | warm.Process) -> None:
    """A launcher and its workers, which are in groups of their own, all at once; waits until none is there."""
    started = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
        started = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for worker in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    process.wait()
    # They are not this process's children, so nobody tells it when they have ended.
    while any(is_alive(worker) for worker in started):
        time.sleep(0.01)


def launch(
    launcher: list[str], script: Path, *flags, check: bool = True, timeout: float = TIMEOUT, **how
) -> subprocess.CompletedProcess:
    """Runs a script as `start` does; returns the completed process with stdout and stderr together."""
    with tempfile.NamedTemporaryFile() as console:
        process = start(launcher, script, *flags, output=console.name, **how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
        if hung := process.returncode is None:
            kill(process)
        output = Path(console.name).read_text(errors="replace")
    if hung:
        raise AssertionError(f"hung for {timeout} s: {' '.join(process.args)}\n{output[-4000:]}")
    if process.returncode and warm.aborted_at_exit(output):
        warnings.warn(f"it was done, then ended with exit {process.returncode}", stacklevel=2)
    elif check and process.returncode:
        raise AssertionError(
            f"exit {process.returncode}: {' '.join(process.args)}\n{output[-6000:]}"
        )
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def copy_repository(to: Path) -> set[str]:
    """Copies the files that git does not ignore; returns their names."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    names = {name for name in listed.stdout.splitlines() if (REPOSITORY / name).is_file()}
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, to / name)
    return names


def recipe(name: str) -> Path:
    return REPOSITORY / "recipes" / f"{name}.py"


def refuses(*parts, call) -> None:
    """Calls what must be refused in one line that holds all parts."""
    try:
        call()
    except (SystemExit, Refused) as refusal:
        said = refusal.args[0]
    else:
        raise AssertionError(f"not refused: {parts}")
    assert isinstance(said, str) and "\n" not in said, said
    assert all(str(part) in said for part in parts), said


def lines(output_dir: Path) -> list[dict]:
    """All lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").open()]


def without_timings(line: dict) -> dict:
    return {key: value for key, value in line.items() if not key.startswith(("perf/", "sync/"))}


def timeless(output_dir: Path) -> list[dict]:
    """All lines, without what differs from run to run."""
    return [without_timings(line) for line in lines(output_dir)]


def samples(output_dir: Path) -> list[dict]:
    """All prompts and responses that a run wrote down; none where it asks nothing."""
    file = output_dir / "samples.jsonl"
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def training_lines(output_dir: Path) -> list[dict]:
    return [line for line in lines(output_dir) if "loss" in line]


def evaluation_lines(output_dir: Path) -> list[dict]:
    return [line for line in lines(output_dir) if any(name.startswith("eval/") for name in line)]


def weights(output_dir: Path, folder: str = "actor") -> torch.Tensor:
    """All parameters of a saved actor, or of its adapter, as one fp64 vector, in the order of their names."""
    path = Path(output_dir) / folder
    is_adapter = (path / "adapter_config.json").exists()
    state = load_file(path / ("adapter_model.safetensors" if is_adapter else "model.safetensors"))
    return torch.cat([state[name].double().flatten() for name in sorted(state)])


def tiny_llama(folder: Path, **changes) -> Path:
    """A random fp32 Llama of 30 thousand parameters with untied head, and the embedded tokenizer."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128)
    special = dict(pad_token_id=0, bos_token_id=None, eos_token_id=1)
    config = LlamaConfig(**sizes | special | {"initializer_range": 0.1} | changes)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ASSETS / "model").save_pretrained(folder)
    return folder


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_rows(path: Path, rows: list[dict]) -> str:
    """Rows as the file kind that the name says; returns the name."""
    kind = path.name.removesuffix(".gz").split(".")[-1]
    path.parent.mkdir(exist_ok=True)
    if kind == "parquet":
        import datasets  # slow

        datasets.Dataset.from_list(rows).to_parquet(path)
        return str(path)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        if kind == "csv":
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)
        elif kind == "json":
            file.write(json.dumps(rows))
        else:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def first_rows(path: Path, source: Path, rows: int) -> Path:
    """The first rows of a file of JSON lines, maybe a packed one, as a file of their own."""
    with (gzip.open if source.suffix == ".gz" else open)(source, "rt") as file:
        path.write_text("".join(itertools.islice(file, rows)))
    return path


def message(role: str, content: str, **more) -> dict:
    return {"role": role, "content": content, **more}


def say(role: str, content: str) -> list[dict]:
    """A conversation of one message."""
    return [message(role, content)]


def whole_rows(ids: torch.Tensor, scored: torch.Tensor) -> dict:
    """The batch of rows of tokens, some of them scored, both `[rows, length]`; entry t is of token t."""
    predictor_index = (torch.arange(ids.numel(), device=ids.device).view(ids.shape) - 1).clamp(
        min=0
    )
    return {
        "inputs": {"input_ids": ids},
        "targets": ids[scored],
        "loss_mask": scored,
        "target_slots": scored.flatten().nonzero().flatten(),
        "predictor_index": predictor_index[scored],
    }


def letters(folder: Path, rows: int) -> Path:
    """A tiny model, and rows for SFT whose answers are of 1 to 5 letters."""
    tiny_llama(folder / "model")
    texts = ["ab"[n % 2] * (n % 5 + 1) for n in range(rows)]
    chats = [say("user", str(n)) + say("assistant", text) for n, text in enumerate(texts)]
    write_jsonl(folder / "sft.jsonl", [{"messages": chat} for chat in chats])
    return folder


def some_letters(n: int, salt: int, longest: int) -> str:
    """1 to `longest` letters, for a row of data and one of its texts."""
    length = 1 + (n * 13 + salt * 5) % longest
    return "".join(chr(97 + (n * 5 + salt * 7 + place**2) % 26) for place in range(length))


def pair_of(prompt: str, chosen: str, rejected: str) -> dict:
    answers = {"chosen": say("assistant", chosen), "rejected": say("assistant", rejected)}
    return {"prompt": say("user", prompt), **answers}


def tiny_inputs(folder: Path) -> Path:
    """A tiny model with dropout, so that random states count, and 44 rows of data for each recipe."""
    tiny_llama(folder / "model", attention_dropout=0.2)
    words = [f"{n}{'x' * (n % 9)}" for n in range(44)]
    pairs = [pair_of(word, word[::-1], word + "!") for word in words]
    rows: dict[str, list[dict]] = {
        "sft": [{"messages": pair["prompt"] + pair["chosen"]} for pair in pairs],
        "preferences": pairs,
        "prompts": [{"prompt": say("user", word), "answer": word} for word in words],
    }
    for name, of_recipe in RECIPES.items():
        write_jsonl(folder / f"{name}.jsonl", rows[of_recipe.data])
    return folder
