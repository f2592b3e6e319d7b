"""One recipe with a tiny model and tiny data, and all runs of it that a proof makes."""

import json
import math
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from safetensors.torch import load_file

from common import folders
from contracts.proof import processes, rows, warm
from contracts.proof.processes import Process, end_of

# A run that takes longer hangs. It is no bound of a promise: a tiny run takes seconds. Below the 600
# seconds that a test may take, so that it is told which run it was.
HANG_SECONDS = 240
# Samples of an update, unless a promise says otherwise.
BATCH = 16
# Two updates of 16 and one of 1, for which one process of two has only a padding row.
ROWS = 33
# For recipes that sample, with 3 responses to each prompt: a rollout of 16 prompts is 3 updates of
# 16 samples. A last rollout of one prompt is an update of 3, one of 11 prompts 3 updates of 11.
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

# Arguments that a tiny run must not be given: they have no value that turns them off.
LEFT_OUT = ("dataset_weights", "save_dtype")
# What every tiny run has, unless a promise changes it, as far as the recipe has such an argument.
TINY_RUN = {
    "dataset_split": "train",
    "eval_dataset_split": "train",
    "train_batch_size": BATCH,
    "micro_train_batch_size": BATCH,
    "micro_train_tokens": 0,
    "packing": False,
    "share_prompts": False,
    "gradient_checkpointing": False,
    "max_epochs": 2,
    "critic_learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.1,
    # Adam's own would turn the rounding of a gradient near zero into a whole step.
    "adam_epsilon": 1e-3,
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "eval_steps": EVAL_STEPS,
    "save_steps": 0,
    "save_total_limit": 0,
    "save_actor_steps": 0,
    "save_actor_limit": 0,
    "report_to": "none",
    "rollout_batch_size": ROLLOUT,
    "n_samples_per_prompt": RESPONSES,
    "generate_batch_size": 16,
    "score_batch_size": 16,
    "num_epochs_per_rollout": 1,
}
# How the arguments of one run differ from those of all tiny runs; see `Bench.flags`.
Changes = dict[str, Any]


class Unchecked(Exception):
    """Why a promise cannot be checked: a flag that the recipe lacks, a metric not logged."""


class RunFailed(Exception):
    """A run ended with an error, where it should not."""


class Finished(NamedTuple):
    """A run that has ended.

    Attributes:
        name: for messages.
        folder: its `--output_dir`.
        console: what it printed.
    """

    name: str
    folder: Path
    console: str = ""

    @property
    def lines(self) -> list[dict]:
        """All lines of `metrics.jsonl` without what depends on time."""
        text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        return [
            {tag: value for tag, value in line.items() if not tag.startswith("perf/")}
            for line in lines
        ]

    @property
    def training(self) -> list[dict]:
        """The lines of training."""
        return [line for line in self.lines if "loss" in line]

    @property
    def evaluations(self) -> list[dict]:
        """The lines of evaluations."""
        return [
            line
            for line in self.lines
            if all(tag == "global_step" or tag.startswith("eval/") for tag in line)
        ]

    @property
    def last_step(self) -> int:
        """How many updates were applied."""
        return max(line["global_step"] for line in self.lines)

    @property
    def models(self) -> dict[str, Path]:
        """The Hugging Face folders of the run and of its last checkpoint, by relative path."""
        found = {}
        for parent in (self.folder, *folders.by_step(self.folder / "checkpoints")[-1:]):
            for file in sorted(parent.glob("*/*.safetensors")):
                model = file.parent
                if model.name != "engine" and not model.name.startswith("."):
                    found[str(model.relative_to(self.folder))] = model
        return found


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a Hugging Face folder, or of an adapter's, by name."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def updates_in(samples: int) -> int:
    """Returns how many updates a pass over so many samples makes."""
    return math.ceil(samples / BATCH)


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
        self.slots = processes.Slots()
        self.runs: dict[str, Future] = {}
        self.lock = threading.Lock()
        self.running: set[Process] = set()
        self.is_stopped = False
        self.arguments: dict[str, Any] = {}
        self.train_rows: list[list[dict]] = []
        self.eval_rows: list[list[dict]] = []

    # ------------------------------------------------------------ what the recipe is
    def prepare(self) -> None:
        """Finds out the recipe's arguments, and reads the first rows of its data.

        The run is stopped once it has recorded its arguments, before its first update.

        Raises:
            RunFailed: it ended before that.
            Unchecked: it names no model or no data.
        """
        output = self.folder / "asked"
        record = output / "run.yaml"
        words = [str(self.recipe), *self.argv, "--output_dir", str(output)]
        process, console = self.start("asked", words, "plain")
        self.wait("asked", process, console, until=record.exists)
        if not record.exists():
            raise RunFailed(f"the recipe does not start:\n{end_of(console)}")
        self.arguments = yaml.safe_load(record.read_text(encoding="utf-8"))
        self.need("model_name_or_path", "dataset_name")
        self.train_rows = self.first_rows("dataset")
        self.eval_rows = self.first_rows("eval_dataset")
        if not self.eval_rows:
            self.eval_rows = [self.train_rows[0][-EVALUATION_ROWS:]]

    def first_rows(self, kind: str) -> list[list[dict]]:
        """Returns the first rows of `--dataset_name` or of `--eval_dataset_name`."""
        split = self.arguments.get(f"{kind}_split", "train")
        return rows.first_rows(self.arguments.get(f"{kind}_name"), split, number=2 * ROWS)

    def has(self, *names: str) -> bool:
        """Whether the recipe has all of these arguments."""
        return all(name in self.arguments for name in names)

    def need(self, *names: str) -> None:
        """Raises `Unchecked` if the recipe lacks one of these arguments."""
        missing = [f"--{name}" for name in names if name not in self.arguments]
        if missing:
            raise Unchecked(f"the recipe has no {' '.join(missing)}")

    @property
    def generates(self) -> bool:
        """Whether the recipe learns from responses that it samples."""
        return self.has("rollout_batch_size")

    # ------------------------------------------------------------ its model
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
    def has_adapter_dropout(self) -> bool:
        """Whether runs can be given dropout before adapters."""
        has_adapters = bool(self.arguments.get("lora_r")) and self.has("lora_dropout")
        return has_adapters and not self.generates

    @property
    def has_dropout(self) -> bool:
        """Whether runs can be given dropout: by the model's config, or before adapters."""
        return bool(self.dropout_settings) or self.has_adapter_dropout

    def model_folder(self, dropout: float = 0.0) -> Path:
        """Returns a copy of the model with this dropout in its config; an adapter as it is."""
        if self.model_config is None:
            return self.model_source
        config = {**self.model_config, **dict.fromkeys(self.dropout_settings, dropout)}
        copy = self.folder / f"model_{dropout:g}"
        with self.lock:
            if not copy.exists():
                copy.mkdir()
                for path in self.model_source.iterdir():
                    if path.name != "config.json":
                        (copy / path.name).symlink_to(path.resolve())
                (copy / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        return copy

    # ------------------------------------------------------------ its flags
    def flags(
        self, output: Path, n_rows: int | None = None, dropout: float = 0.0, **changes
    ) -> list[str]:
        """Returns the flags of a tiny run, as far as the recipe has them.

        Args:
            n_rows: rows of training data; default `ROWS`, or `PROMPTS` if the recipe samples.
            changes: arguments that differ from those of all tiny runs.
        """
        asked = self.arguments
        n_rows = n_rows or (PROMPTS if self.generates else ROWS)
        longest_response = min(asked.get("max_new_tokens") or LONGEST_RESPONSE, LONGEST_RESPONSE)
        values = {
            **TINY_RUN,
            "model_name_or_path": self.model_folder(dropout),
            "dataset_name": self.data_files("train", self.train_rows, n_rows),
            "eval_dataset_name": self.data_files("held_out", self.eval_rows, EVALUATION_ROWS),
            # How many updates an epoch of rollouts holds may depend on the rewards.
            "max_steps": SAMPLED_UPDATES if self.generates else 0,
            "max_length": min(asked.get("max_length") or LONGEST, LONGEST),
            "max_new_tokens": longest_response,
            # Recipes refuse one that is longer than a response. With half of one, short responses
            # have no penalty, and long ones have.
            "overlong_buffer": min(asked.get("overlong_buffer") or 0, longest_response // 2),
            # A policy that samples must not forget all answers, or nothing is left to learn from.
            "learning_rate": 1e-4 if self.generates else 1e-3,
            "lora_dropout": dropout if self.has_adapter_dropout else 0.0,
            **changes,
        }
        flags = ["--output_dir", str(output)]
        for name, value in values.items():
            if name in asked:
                flags.append(f"--{name}")
                flags += map(str, value if isinstance(value, list) else [value])
        return flags

    def data_files(self, kind: str, sets: list[list[dict]], number: int) -> list[Path]:
        """Writes the first rows of the sets, `number` of them in all; returns the files."""
        shares = [number // len(sets)] * len(sets)
        shares[0] += number - sum(shares)
        paths = []
        for index, (rows_of_set, share) in enumerate(zip(sets, shares)):
            path = self.folder / f"{kind}_{number}_{index}.jsonl"
            text = "".join(json.dumps(row, default=str) + "\n" for row in rows_of_set[:share])
            with self.lock:
                if not path.exists():
                    path.write_text(text, encoding="utf-8")
            paths.append(path)
        return paths

    def defaults_file(self) -> Path:
        """Writes the recipe's arguments as a YAML file, without those of `LEFT_OUT`."""
        path = self.folder / "asked.yaml"
        with self.lock:
            if not path.exists():
                kept = {k: v for k, v in self.arguments.items() if k not in LEFT_OUT}
                path.write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
        return path

    # ------------------------------------------------------------ its processes
    def start(
        self, name: str, words: list[str], launcher: str, fresh: bool = False
    ) -> tuple[Process, Path]:
        """Starts `python [launcher] words`; returns the process and the file of what it prints.

        Raises:
            RunFailed: `stop` was called.
        """
        console = self.folder / f"{name}.txt"
        command = [*processes.launcher_words(launcher, self.folder), *words]
        with self.lock:
            if self.is_stopped:
                raise RunFailed(f"the run `{name}` was stopped")
            process = processes.start(command, console, fresh)
            self.running.add(process)
        return process, console

    def wait(
        self, name: str, process: Process, console: Path, until: Callable[[], bool] | None = None
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
                    processes.show_stacks(process)
                    raise RunFailed(f"the run `{name}` hung:\n{end_of(console, most=100)}")
            return False
        finally:
            # Also after an error, for example in `until`, no run is left behind.
            if process.returncode is None:
                processes.kill(process)
            with self.lock:
                self.running.discard(process)

    def check_end(self, name: str, process: Process, console: Path) -> None:
        """Raises `RunFailed` if a process that has ended failed."""
        output = console.read_text(encoding="utf-8", errors="replace")
        if process.returncode and not warm.aborted_at_exit(output):
            raise RunFailed(f"the run `{name}` ended with an error:\n{end_of(console)}")

    def stop(self) -> None:
        """Kills all runs, and lets none start from now on.

        Threads that wait for a run then get `RunFailed`.
        """
        with self.lock:
            self.is_stopped = True
            for process in self.running:
                processes.send_kill(process)

    # ------------------------------------------------------------ its runs
    def run(self, name: str, launcher: str = "plain", fresh: bool = False, **changes) -> Finished:
        """Returns the run of this name, made with these changes by whoever asks first.

        Args:
            fresh: in new interpreters, as a user starts it.
            changes: see `flags`.

        Raises:
            RunFailed: it ended with an error.
            Unchecked: none of the rows that it was given can be used.
        """
        with self.lock:
            is_first = name not in self.runs
            future = self.runs.setdefault(name, Future())
        if is_first:
            try:
                output = self.folder / name
                flags = self.flags(output, **changes)
                with self.slots.take(processes.number_of(launcher)):
                    self.launch(name, launcher, flags, fresh=fresh)
                console = (self.folder / f"{name}.txt").read_text(
                    encoding="utf-8", errors="replace"
                )
                future.set_result(Finished(name, output, console))
            except RunFailed as error:
                future.set_exception(as_unchecked(error) or error)
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def launch(
        self,
        name: str,
        launcher: str,
        flags: list[str],
        until: Callable[[], bool] | None = None,
        fresh: bool = False,
    ) -> bool:
        """Runs the recipe to its end, or until a moment, at which all its processes are killed.

        Returns:
            whether it came to that moment.

        Raises:
            RunFailed: it ended with an error.
        """
        words = [str(self.recipe), str(self.defaults_file()), *flags]
        process, console = self.start(name, words, launcher, fresh)
        was_killed = self.wait(name, process, console, until)
        if not was_killed:
            self.check_end(name, process, console)
        return was_killed

    def run_to_first_line(self, name: str, **changes) -> dict:
        """Returns the first line of a run's `metrics.jsonl`, and kills it there."""
        output = self.folder / name
        file = output / "metrics.jsonl"

        def has_line() -> bool:
            return file.exists() and "\n" in file.read_text(encoding="utf-8")

        with self.slots.take(1):
            self.launch(name, "plain", self.flags(output, **changes), until=has_line)
        return Finished(name, output).lines[0]

    def run_script(self, name: str, *words: str) -> str:
        """Runs another script than the recipe; returns what it printed."""
        with self.slots.take(1):
            process, console = self.start(name, list(words), "plain")
            self.wait(name, process, console)
        if process.returncode != 0:
            raise RunFailed(end_of(console))
        return console.read_text(encoding="utf-8", errors="replace")


def as_unchecked(error: RunFailed) -> Unchecked | None:
    """Returns what to say where none of a run's few rows can be used; None of another error.

    Some later rows can be used: `prepare` has seen a run begin with all of them.
    """
    unusable = re.search(r"no usable row: .*", str(error))
    if unusable:
        return Unchecked(f"the first rows of the data cannot be used: {unusable[0]}")
    return None
