"""One recipe with a tiny model and tiny data, and all runs of it that a proof makes."""

import json
import math
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file

from common import folders
from contracts.proof import rows, warm
from runs import LAUNCHERS, TIMEOUT, kill, launch, start_warm, timeless

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
# A name of `LAUNCHERS`, or the words of another one.
Launcher = str | list[str]


class Finished(NamedTuple):
    """A run that has ended: its `--output_dir`, and what it printed."""

    folder: Path
    console: str = ""

    @property
    def lines(self) -> list[dict]:
        """All lines of `metrics.jsonl` without what depends on time."""
        return timeless(self.folder)

    @property
    def training(self) -> list[dict]:
        return [line for line in self.lines if "loss" in line]

    @property
    def evaluations(self) -> list[dict]:
        is_of_evaluation = lambda tag: tag == "global_step" or tag.startswith("eval/")
        return [line for line in self.lines if all(map(is_of_evaluation, line))]

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


class Bench:
    """One recipe with tiny inputs, and all runs of it so far.

    Several promises look at the same runs. The first one that asks for a run makes it.

    Args:
        argv: the recipe's arguments.
        folder: an empty folder for everything that is written.
        quick: whether promises are checked on fewer engines.

    Attributes:
        arguments: every argument of the recipe by name, as `run.yaml` records them.
        train_rows, eval_rows: the first rows of each data set.
    """

    def __init__(self, recipe: Path, argv: list[str], folder: Path, quick: bool):
        self.recipe = recipe
        self.folder = folder
        self.quick = quick
        self.runs: dict[str, Finished] = {}
        self.failures: dict[str, str] = {}
        self.arguments: dict[str, Any] = self.ask(argv)
        self.need("model_name_or_path", "dataset_name")
        self.train_rows = self.first_rows("dataset")
        self.eval_rows = self.first_rows("eval_dataset")
        if not self.eval_rows:
            self.eval_rows = [self.train_rows[0][-EVALUATION_ROWS:]]
        kept = {k: v for k, v in self.arguments.items() if k not in LEFT_OUT}
        self.defaults_file = folder / "asked.yaml"
        self.defaults_file.write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")

    # ------------------------------------------------------------ what the recipe is
    def ask(self, argv: list[str]) -> dict:
        """Returns the recipe's arguments: a run is stopped once it has recorded them."""
        record = self.folder / "asked" / "run.yaml"
        words = [*argv, "--output_dir", str(record.parent)]
        if not self.run_until("asked", "plain", words, record.exists):
            pytest.fail("the recipe records no run.yaml", pytrace=False)
        return yaml.safe_load(record.read_text(encoding="utf-8"))

    def first_rows(self, kind: str) -> list[list[dict]]:
        """Returns the first rows of `--dataset_name` or of `--eval_dataset_name`."""
        split = self.arguments.get(f"{kind}_split", "train")
        return rows.first_rows(self.arguments.get(f"{kind}_name"), split, number=2 * ROWS)

    def has(self, *names: str) -> bool:
        """Whether the recipe has all of these arguments."""
        return all(name in self.arguments for name in names)

    def need(self, *names: str) -> None:
        """Skips the test if the recipe lacks one of these arguments."""
        missing = [f"--{name}" for name in names if name not in self.arguments]
        if missing:
            pytest.skip(f"the recipe has no {' '.join(missing)}")

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
            if ("dropout" in name or "pdrop" in name) and type(value) in (int, float)
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
        flags = [str(self.defaults_file), "--output_dir", str(output)]
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
            path.write_text(text, encoding="utf-8")
            paths.append(path)
        return paths

    # ------------------------------------------------------------ its runs
    def run(
        self, name: str, launcher: Launcher = "plain", fresh: bool = False, **changes
    ) -> Finished:
        """Returns the run of this name, made with these changes by whoever asks first.

        Args:
            fresh: in new interpreters, as a user starts it.
            changes: see `flags`.
        """
        if name not in self.runs and name not in self.failures:
            output = self.folder / name
            flags = self.flags(output, **changes)
            words = LAUNCHERS[launcher] if isinstance(launcher, str) else launcher
            try:
                done = launch(words, self.recipe, *flags, cwd=Path.cwd(), fresh=fresh)
                self.runs[name] = Finished(output, done.stdout)
            except AssertionError as error:
                self.failures[name] = str(error)
        if name in self.failures:
            self.fail(name, self.failures[name])
        return self.runs[name]

    def fail(self, name: str, output: str) -> None:
        """Ends a test because a run failed; skips it where none of the few rows can be used.

        Some later rows can be used: `ask` has seen a run begin with all of them.
        """
        # Other processes fail after the first one because it is gone, and say no more than that.
        until_failure, _, _ = output.partition(f"\n{warm.FAILED}")
        last = "\n".join(until_failure.strip().splitlines()[-15:])
        if "no usable row: " in output:
            pytest.skip(f"the first rows of the data cannot be used: {last}")
        pytest.fail(f"the run `{name}` ended with an error:\n{last}", pytrace=False)

    def run_until(
        self, name: str, launcher: str, flags: list[str], moment: Callable[[], bool]
    ) -> bool:
        """Runs the recipe until a moment, at which all its processes are killed, or to its end.

        Returns:
            whether it came to that moment.
        """
        console = self.folder / f"{name}.console"
        console.touch()  # a run that is killed at once may not come to it
        process = start_warm(
            LAUNCHERS[launcher], self.recipe, *flags, cwd=Path.cwd(), output=str(console)
        )
        latest = time.monotonic() + TIMEOUT
        try:
            while process.poll(0.001) is None:
                if moment():
                    return True
                if time.monotonic() > latest:
                    self.fail(name, f"{console.read_text(errors='replace')}\nit hung")
        finally:
            if process.returncode is None:
                kill(process)
        if process.returncode:
            self.fail(name, console.read_text(errors="replace"))
        return False

    def run_to_first_line(self, name: str, **changes) -> dict:
        """Returns the first line of a run's `metrics.jsonl`, and kills it there."""
        output = self.folder / name
        file = output / "metrics.jsonl"
        has_line = lambda: file.exists() and "\n" in file.read_text(encoding="utf-8")
        self.run_until(name, "plain", self.flags(output, **changes), has_line)
        return Finished(output).lines[0]
