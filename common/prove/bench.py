"""Runs one recipe again and again on tiny inputs, and reads what each run wrote."""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
import torch
import yaml
from safetensors.torch import load_file

from common import REPOSITORY, folders
from common.data.workers import available_cores
from common.prove import warm

CONFIGS = REPOSITORY / "accelerate_configs"
ACCELERATE = ["-m", "accelerate.commands.launch"]
# A run that takes longer hangs. It is no bound of a promise: a tiny run takes seconds.
HANG_SECONDS = 1800
# Of an update, unless a promise says otherwise.
BATCH = 16
# Two updates of 16 and one of 1, for which one process of two has only a padding row.
ROWS = 33
# Of the recipes that sample, with 3 responses to each prompt: a rollout of 16 prompts is 3 updates
# of 16 samples. A last rollout of one prompt is an update of 3, one of 11 prompts 3 updates of 11.
ROLLOUT = 16
RESPONSES = 3
PROMPTS = ROLLOUT + 1
SHORT_ROLLOUT = 11
SAMPLED_UPDATES = 6
# Divides nothing: the last micro-batch of an evaluation has padding rows, too.
EVALUATION_ROWS = 5
# Tokens of a row, and of a response.
LONGEST = 256
LONGEST_RESPONSE = 8
# No divisor of 6, the updates of most runs: the last one is evaluated, too.
EVAL_STEPS = 4
DROPOUT = 0.1
AUTO = ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "gradient_clipping")


class Unchecked(Exception):
    """Why a promise cannot be checked: a flag that the recipe lacks, a metric not logged."""


class RunFailed(Exception):
    """A run ended with an error, where it should not."""


@dataclass
class Finished:
    """A run that has ended.

    Attributes:
        name: for messages.
        folder: its `--output_dir`.
        console: what it printed.
    """

    name: str
    folder: Path
    console: str

    @property
    def lines(self) -> list[dict]:
        """All lines of `metrics.jsonl` without what depends on time."""
        text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        return [
            {name: value for name, value in line.items() if not name.startswith("perf/")}
            for line in lines
        ]

    @property
    def training(self) -> list[dict]:
        return [line for line in self.lines if "loss" in line]

    @property
    def evaluations(self) -> list[dict]:
        return [line for line in self.lines if is_evaluation(line)]

    def models(self) -> dict[str, Path]:
        """The Hugging Face folders that the run left, and those of its last checkpoint, by name."""
        parents = [self.folder]
        parents += folders.by_step(self.folder / "checkpoints")[-1:]
        found = {}
        for parent in parents:
            for file in sorted(parent.glob("*/*.safetensors")):
                if file.parent.name != "engine" and not file.parent.name.startswith("."):
                    found[str(file.parent.relative_to(self.folder))] = file.parent
        return found


def is_evaluation(line: dict) -> bool:
    return all(name == "global_step" or name.startswith("eval/") for name in line)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a Hugging Face folder, or of an adapter's, by name."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


# ============================================================ the launchers


def deepspeed_config(folder: Path, stage: int, **fp16) -> Path:
    """Writes a DeepSpeed JSON and returns its path.

    Args:
        fp16: settings of the loss scale; none for fp32.
    """
    # Threshold 0: so that ZeRO-3 shards even the smallest parameters.
    zero: dict[str, object] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config: dict[str, object] = {"zero_optimization": zero}
    config |= dict.fromkeys(AUTO, "auto")
    if fp16:
        config["fp16"] = {
            "enabled": True,
            "loss_scale": 0.0,
            "loss_scale_window": 1000,
            "min_loss_scale": 1,
            **fp16,
        }
    words = [f"zero{stage}", *(f"{name}{value}" for name, value in sorted(fp16.items()))]
    path = folder / f"{'_'.join(words)}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def launcher_words(name: str, folder: Path) -> list[str]:
    """What follows `python`, before the recipe, to launch it.

    Args:
        name: `plain`, `ddp`, `fsdp2`, `zero1`, `zero2`, `zero3`, or the path of a DeepSpeed JSON
            for one process.
    """
    if name == "plain":
        return []
    port = ["--main_process_port", "0"]
    if name in ("ddp", "fsdp2"):
        yaml_file = str(CONFIGS / f"{name}.yaml")
        two = ["--num_processes", "2", "--mixed_precision", "no"]
        return [*ACCELERATE, "--config_file", yaml_file, *two, *port]
    processes = "1"
    path = Path(name)
    if not name.endswith(".json"):
        processes = "2"
        path = deepspeed_config(folder, int(name.removeprefix("zero")))
    return [
        *ACCELERATE,
        *("--use_deepspeed", "--deepspeed_config_file", str(path)),
        *("--num_processes", processes, "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
        *port,
    ]


def processes_of(launcher: str) -> int:
    return 1 if launcher == "plain" or launcher.endswith(".json") else 2


class Slots:
    """Lets as many processes run at once as there are cores."""

    def __init__(self, number: int):
        self.number = number
        self.free = number
        self.changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, wanted: int):
        wanted = min(wanted, self.number)
        with self.changed:
            self.changed.wait_for(lambda: self.free >= wanted)
            self.free -= wanted
        try:
            yield
        finally:
            with self.changed:
                self.free += wanted
                self.changed.notify_all()


# ============================================================ the bench


class Bench:
    """One recipe with tiny inputs, and all runs of it so far.

    Several promises look at the same runs. The first one that asks for a run makes it; the others
    wait for it.

    Args:
        recipe: the file.
        argv: its arguments.
        folder: an empty folder for everything that is written.
        quick: whether promises are checked on fewer engines.

    Attributes:
        arguments: every argument of the recipe by name, as `run.yaml` records them.
        train_rows, eval_rows: the first rows of each data set.
    """

    def __init__(self, recipe: Path, argv: list[str], folder: Path, quick: bool):
        self.recipe = recipe
        self.argv = argv
        self.folder = folder
        self.quick = quick
        self.slots = Slots(max(2, available_cores()))
        self.runs: dict[str, Future] = {}
        self.lock = threading.Lock()
        self.processes: set[warm.Process | Fresh] = set()  # those that run
        self.is_stopped = False
        self.arguments: dict = {}
        self.train_rows: list[list[dict]] = []
        self.eval_rows: list[list[dict]] = []

    # ------------------------------------------------------------ what the recipe is

    def prepare(self) -> None:
        """Finds out the recipe's arguments, and reads the first rows of its data.

        The run is stopped once it has recorded its arguments, before its first update.

        Raises:
            RunFailed: it ended before that.
        """
        output = self.folder / "asked"
        words = [str(self.recipe), *self.argv, "--output_dir", str(output)]
        process, console = self.start("asked", words, "plain")
        record = output / "run.yaml"
        self.wait("asked", process, console, until=record.exists)
        if not record.exists():
            raise RunFailed(f"the recipe does not start:\n{end_of(console)}")
        self.arguments = yaml.safe_load(record.read_text(encoding="utf-8"))
        self.read_data()

    def has(self, *names: str) -> bool:
        return all(name in self.arguments for name in names)

    def need(self, *names: str) -> None:
        """Raises `Unchecked` if the recipe lacks one of these arguments."""
        missing = [f"--{name}" for name in names if name not in self.arguments]
        if missing:
            raise Unchecked(f"the recipe has no {' '.join(missing)}")

    @property
    def samples(self) -> bool:
        """Whether the recipe generates what it learns from."""
        return self.has("rollout_batch_size")

    def read_data(self) -> None:
        """Reads the first rows of each data set that the arguments name."""
        from common.data import files  # slow to import

        self.need("model_name_or_path", "dataset_name")

        def first_rows(names: str | list[str] | None, split: str, number: int) -> list[list[dict]]:
            if isinstance(names, str):
                names = [names]
            sets = []
            for name in names or []:
                rows = files.load(name, split)
                entries = rows.table.select(range(min(number, len(rows.table))))
                sets.append([rows.row(entry) for entry in entries])
            return sets

        asked = self.arguments
        self.train_rows = first_rows(
            asked["dataset_name"], asked.get("dataset_split", "train"), 2 * ROWS
        )
        self.eval_rows = first_rows(
            asked.get("eval_dataset_name"), asked.get("eval_dataset_split", "train"), 2 * ROWS
        )
        self.train_rows = [uneven(rows) for rows in self.train_rows]
        self.eval_rows = [uneven(rows) for rows in self.eval_rows]
        if not self.eval_rows:
            self.eval_rows = [rows[-EVALUATION_ROWS:] for rows in self.train_rows[:1]]

    def data_files(self, kind: str, sets: list[list[dict]], number: int) -> list[str]:
        """Writes the first rows of the sets, `number` of them in all; returns the files."""
        shares = [number // len(sets)] * len(sets)
        shares[0] += number - sum(shares)
        paths = []
        for index, (rows, share) in enumerate(zip(sets, shares)):
            path = self.folder / f"{kind}_{number}_{index}.jsonl"
            if not path.exists():
                # Written aside: another run may be about to read it.
                temporary = path.with_suffix(f".{threading.get_ident()}")
                text = "".join(json.dumps(row, default=str) + "\n" for row in rows[:share])
                temporary.write_text(text, encoding="utf-8")
                os.replace(temporary, path)
            paths.append(str(path))
        return paths

    @cached_property
    def model_source(self) -> Path:
        """The folder of the model that the arguments name."""
        name = self.arguments["model_name_or_path"]
        if Path(name).is_dir():
            return Path(name)
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name))

    @cached_property
    def model_config(self) -> dict | None:
        """The model's config; None of an adapter, whose base has one."""
        file = self.model_source / "config.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    @property
    def dropout_settings(self) -> list[str]:
        """The names of the model's config that set a dropout."""
        return [
            name
            for name, value in (self.model_config or {}).items()
            if ("dropout" in name or "pdrop" in name)
            and isinstance(value, (int, float))
            and not isinstance(value, bool)
        ]

    @property
    def has_dropout(self) -> bool:
        """Whether runs can be given dropout: by the model's config, or before adapters."""
        return bool(self.dropout_settings) or self.has_adapter_dropout

    @property
    def has_adapter_dropout(self) -> bool:
        return bool(self.arguments.get("lora_r")) and self.has("lora_dropout") and not self.samples

    def model_folder(self, dropout: float) -> str:
        """Returns the model with this dropout in its config; else it is the same."""
        source = self.model_source
        config = self.model_config
        if config is None:
            return self.arguments["model_name_or_path"]
        changed = dict.fromkeys(self.dropout_settings, dropout)
        copy = self.folder / f"model_{dropout:g}"
        with self.lock:
            if not copy.exists():
                temporary = self.folder / ".model"
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                for path in source.iterdir():
                    (temporary / path.name).symlink_to(path.resolve())
                (temporary / "config.json").unlink()
                text = json.dumps({**config, **changed}, indent=1)
                (temporary / "config.json").write_text(text, encoding="utf-8")
                temporary.rename(copy)
        return str(copy)

    # ------------------------------------------------------------ its flags

    def flags(
        self, output: Path, rows: int | None = None, dropout: float = 0.0, **changes
    ) -> list[str]:
        """Returns the flags of a tiny run, as far as the recipe has them.

        Args:
            rows: of the training data; default `ROWS`, or `PROMPTS` of a recipe that samples.
            changes: arguments that differ from those of all tiny runs.
        """
        asked = self.arguments
        rows = rows or (PROMPTS if self.samples else ROWS)
        response = min(asked.get("max_new_tokens") or LONGEST_RESPONSE, LONGEST_RESPONSE)
        values = {
            "model_name_or_path": self.model_folder(dropout),
            "dataset_name": self.data_files("train", self.train_rows, rows),
            "dataset_weights": None,
            "dataset_split": "train",
            "eval_dataset_name": self.data_files("held_out", self.eval_rows, EVALUATION_ROWS),
            "eval_dataset_split": "train",
            "output_dir": str(output),
            "train_batch_size": BATCH,
            "micro_train_batch_size": BATCH,
            "micro_train_tokens": 0,
            "packing": False,
            "share_prompts": False,
            "gradient_checkpointing": False,
            "max_epochs": 2,
            # How many updates an epoch of rollouts holds may depend on the rewards.
            "max_steps": SAMPLED_UPDATES if self.samples else 0,
            "max_length": min(asked.get("max_length") or LONGEST, LONGEST),
            "max_new_tokens": response,
            # Recipes refuse one that is longer than a response. With half of one, short responses
            # have no penalty, and long ones have.
            "overlong_buffer": min(asked.get("overlong_buffer") or 0, response // 2),
            # A policy that samples must not forget all answers, or nothing is left to learn from.
            "learning_rate": 1e-4 if self.samples else 1e-3,
            "critic_learning_rate": 1e-3,
            "lr_scheduler_type": "linear",
            "warmup_steps": 0,
            "weight_decay": 0.1,
            # Adam's own would turn the rounding of a gradient near zero into a whole step.
            "adam_epsilon": 1e-3,
            "max_grad_norm": 1.0,
            "lora_dropout": dropout if self.has_adapter_dropout else 0.0,
            "logging_steps": 1,
            "eval_steps": EVAL_STEPS,
            "save_steps": 0,
            "save_total_limit": 0,
            "save_actor_steps": 0,
            "save_actor_limit": 0,
            "save_dtype": None,
            "report_to": "none",
            "rollout_batch_size": ROLLOUT,
            "n_samples_per_prompt": RESPONSES,
            "generate_batch_size": 16,
            "score_batch_size": 16,
            "num_epochs_per_rollout": 1,
            **changes,
        }
        flags = []
        for name, value in values.items():
            if name not in asked and name != "output_dir":
                continue
            if value is None:
                continue  # `defaults_file` leaves it out, too
            flags.append(f"--{name}")
            flags += map(str, value if isinstance(value, list) else [value])
        return flags

    def defaults_file(self) -> Path:
        """The recipe's arguments as a YAML file, without those that a tiny run must not have."""
        path = self.folder / "asked.yaml"
        with self.lock:
            if not path.exists():
                left_out = ("dataset_weights", "save_dtype")
                kept = {k: v for k, v in self.arguments.items() if k not in left_out}
                path.write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
        return path

    # ------------------------------------------------------------ running

    def start(self, name: str, words: list[str], launcher: str, fresh: bool = False):
        """Starts `python [launcher] words`; returns the process and the file of what it prints.

        Raises:
            RunFailed: `stop` was called.
        """
        console = self.folder / f"{name}.txt"
        command = [*launcher_words(launcher, self.folder), *words]
        environment = {**os.environ, **warm.ENVIRONMENT}
        console.touch()  # a run that is killed at once may not come to it
        process: warm.Process | Fresh
        with self.lock:
            if self.is_stopped:
                raise RunFailed(f"the run `{name}` was stopped")
            if fresh:
                process = Fresh(command, environment, console)
            else:
                process = warm.Process(command, os.getcwd(), environment, str(console))
            self.processes.add(process)
        return process, console

    def wait(
        self,
        name: str,
        process,
        console: Path,
        until: Callable[[], bool] | None = None,
    ) -> bool:
        """Waits for the end of a run that `start` has started.

        Args:
            until: kills the run at the moment when this is true.

        Returns:
            whether it came to that moment.

        Raises:
            RunFailed: it hung, and was killed.
        """
        latest = time.monotonic() + HANG_SECONDS
        interval = 0.001 if until else 1  # seconds; a moment may be short
        try:
            while process.poll(interval) is None:
                if until and until():
                    return True
                if time.monotonic() > latest:
                    raise RunFailed(f"the run `{name}` hung:\n{end_of(console)}")
            return False
        finally:
            # Also after an error, for example in `until`, no run is left behind.
            if process.returncode is None:
                kill(process)
            with self.lock:
                self.processes.discard(process)

    def stop(self) -> None:
        """Kills all runs, and lets none start from now on.

        Threads that wait for a run then get `RunFailed`.
        """
        with self.lock:
            self.is_stopped = True
            for process in self.processes:
                send_kill(process)

    def run(self, name: str, launcher: str = "plain", fresh: bool = False, **changes) -> Finished:
        """Returns the run of this name, made with these changes by whoever asks first.

        Args:
            fresh: in new interpreters, as a user starts it.
            changes: see `flags`.

        Raises:
            RunFailed: it ended with an error.
            Unchecked: none of the rows that it was given can be used.
        """

        def make() -> Finished:
            output = self.folder / name
            try:
                with self.slots.take(processes_of(launcher)):
                    return self.finish(name, launcher, self.flags(output, **changes), fresh)
            except RunFailed as error:
                unusable = re.search(r"no usable row: .*", str(error))
                if unusable:  # some later rows are: `prepare` has seen a run begin with all of them
                    reason = f"the first rows of the data cannot be used: {unusable[0]}"
                    raise Unchecked(reason) from None
                raise

        return self.once(name, make)

    def once(self, name: str, make: Callable[[], Finished]) -> Finished:
        """Returns what `make` returned when the first caller of this name called it."""
        with self.lock:
            is_first = name not in self.runs
            future = self.runs.setdefault(name, Future())
        if is_first:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def finish(self, name: str, launcher: str, flags: list[str], fresh: bool = False) -> Finished:
        """Runs the recipe to its end."""
        words = [str(self.recipe), str(self.defaults_file()), *flags]
        process, console = self.start(name, words, launcher, fresh)
        self.wait(name, process, console)
        self.check_end(name, process, console)
        text = console.read_text(encoding="utf-8", errors="replace")
        return Finished(name, Path(flags[flags.index("--output_dir") + 1]), text)

    def run_until(
        self, name: str, launcher: str, flags: list[str], moment: Callable[[], bool]
    ) -> bool:
        """Starts the recipe and kills all its processes at a moment; whether it came to that."""
        words = [str(self.recipe), str(self.defaults_file()), *flags]
        process, console = self.start(name, words, launcher)
        was_killed = self.wait(name, process, console, until=moment)
        if not was_killed:
            self.check_end(name, process, console)
        return was_killed

    def check_end(self, name: str, process, console: Path) -> None:
        """Raises `RunFailed` if a process that has ended failed."""
        output = console.read_text(encoding="utf-8", errors="replace")
        if process.returncode and not warm.aborted_at_exit(output):
            raise RunFailed(f"the run `{name}` ended with an error:\n{end_of(console)}")

    def run_to_first_line(self, name: str, **changes) -> dict:
        """Returns the first line of a run's `metrics.jsonl`, and kills it there."""
        output = self.folder / name
        file = output / "metrics.jsonl"

        def has_line() -> bool:
            return file.exists() and "\n" in file.read_text(encoding="utf-8")

        with self.slots.take(1):
            self.run_until(name, "plain", self.flags(output, **changes), has_line)
        return Finished(name, output, "").lines[0]

    def run_script(self, name: str, *words: str) -> str:
        """Runs another script than the recipe; returns what it printed."""
        with self.slots.take(1):
            process, console = self.start(name, list(words), "plain")
            self.wait(name, process, console)
        if process.returncode != 0:
            raise RunFailed(end_of(console))
        return console.read_text(encoding="utf-8", errors="replace")


class Fresh:
    """A new interpreter, with the methods of `warm.Process` that are used here."""

    def __init__(self, command: list[str], environment: dict[str, str], console: Path):
        with open(console, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    def poll(self, timeout: float = 0) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        return self.process.returncode


def kill(process) -> None:
    """Kills a run's processes, and waits until there are none."""
    started = send_kill(process)
    process.poll(30)
    # Most of them are not this process's children, so nobody tells it when they have ended.
    while any(is_alive(one) for one in started):
        time.sleep(0.01)


def send_kill(process) -> list[psutil.Process]:
    """Kills a run's processes and returns them: they may need a moment to end.

    They are one process group, and so die at once. But under a real torchrun each worker has a
    group of its own, and a run that has only just begun has none yet.
    """
    started = []
    with contextlib.suppress(psutil.NoSuchProcess):
        begun = psutil.Process(process.pid)
        started = [begun, *begun.children(recursive=True)]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    return started


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_of(console: Path, most: int = 12) -> str:
    """The last lines of what a run printed, or of what it did until its first process failed.

    The other processes fail after that one because it is gone, and say no more than that.
    """
    text = console.read_text(encoding="utf-8", errors="replace")
    until_failure, _, _ = f"\n{text}".partition(f"\n{warm.FAILED}")
    return "\n".join(until_failure.strip().splitlines()[-most:])


# Where a row may hold an answer to learn, as the formats of data have it.
ANSWERS = ("messages", "completion", "chosen", "rejected", "output", "conversations", "text")


def uneven(rows: list[dict]) -> list[dict]:
    """Returns rows of uneven lengths: as they are, unless all of them are equally long.

    Rows of one length hide a mean of means. So the answers of such rows are repeated 1 to 3 times.
    Prompts of one length hide how generation pads them. So every fourth prompt without an answer is
    said twice: not more, since the model may have no answer to it that is worth a reward.
    """
    if len({len(json.dumps(row, default=str)) for row in rows}) > 3:
        return rows
    has_answers = any(name in row for row in rows for name in ANSWERS)
    texts, role = (ANSWERS, "assistant") if has_answers else (("prompt",), "user")
    times_of = (1, 2, 3) if has_answers else (1, 2, 1, 1)
    return [
        {
            name: repeated(value, times, role) if name in texts else value
            for name, value in row.items()
        }
        for row, times in zip(rows, itertools.cycle(times_of))
    ]


def repeated(value, times: int, role: str):
    """Repeats a text, or in a list of messages what this role says."""
    if isinstance(value, str):
        return value * times
    if not isinstance(value, list):
        return value
    messages = []
    for message in value:
        if isinstance(message, dict) and message.get("role") == role:
            message = {**message, "content": repeated(message.get("content"), times, role)}
        messages.append(message)
    return messages


def updates_in(samples: int) -> int:
    return math.ceil(samples / BATCH)
