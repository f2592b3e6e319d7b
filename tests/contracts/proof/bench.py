"""One recipe with a tiny model and tiny data, and all runs of it that a proof makes."""

import itertools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet
import pytest
import torch
import yaml
from safetensors.torch import load_file

from common import folders
from contracts.proof import warm
from runs import LAUNCHERS, TIMEOUT, flags_of, kill, launch, start, timeless

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
LEFT_OUT = {"save_dtype"}
# What every tiny run has, unless a promise changes it, as far as the recipe has such an argument.
TINY_RUN = {
    "dataset_split": "train",
    "eval_dataset_split": "train",
    "train_batch_size": BATCH,
    "micro_train_batch_size": BATCH,
    "micro_train_tokens": 0,
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
    "values_steps": 1,
    "values_tokens": True,
    "rollout_batch_size": ROLLOUT,
    "n_samples_per_prompt": RESPONSES,
    "generate_batch_size": 16,
    "score_batch_size": 16,
    "num_epochs_per_rollout": 1,
}
# How the arguments of one run differ from those of all tiny runs; see `Bench.flags`.
Changes = dict[str, Any]


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
        return [line for line in self.lines if any(tag.startswith("eval/") for tag in line)]

    @property
    def values(self) -> pyarrow.Table:
        """What `--values_steps` recorded, by update and, where it was split, by process."""
        parts = sorted((self.folder / "values.parquet").glob("*.parquet"))
        tables = [pyarrow.parquet.read_table(part) for part in parts]
        table = pyarrow.concat_tables(tables, promote_options="default")
        return table.sort_by("global_step")  # it is stable

    @property
    def last_step(self) -> int:
        """How many updates were applied."""
        return max(line["global_step"] for line in self.lines)

    @property
    def models(self) -> dict[str, Path]:
        """The Hugging Face folders of the run and of its last checkpoint, by relative path."""
        parents = [self.folder, *folders.by_step(self.folder / "checkpoints")[-1:]]
        files = [file for parent in parents for file in parent.glob("[!.]*/*.safetensors")]
        found = {str(file.parent.relative_to(self.folder)): file.parent for file in sorted(files)}
        return {name: model for name, model in found.items() if model.name != "engine"}


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
    """One recipe with tiny inputs, and all runs of it so far: who asks for a run first makes it.

    Args:
        argv: the recipe's arguments.
        folder: an empty folder for everything that is written.
        quick: whether promises are checked on fewer engines.

    Attributes:
        arguments: every argument of the recipe by name, as `run.yaml` records them.
        rows: the first rows of the training data, and those held out.
    """

    def __init__(self, recipe: Path, argv: list[str], folder: Path, quick: bool):
        self.recipe = recipe
        self.folder = folder
        self.quick = quick
        self.runs: dict[str, Finished | str] = {}
        self.arguments: dict[str, Any] = self.ask(argv)
        train = self.first_rows("dataset")
        held_out = self.first_rows("eval_dataset") or train[-EVALUATION_ROWS:]
        self.rows = {"train": train, "held_out": held_out}
        kept = {name: self.arguments[name] for name in self.arguments.keys() - LEFT_OUT}
        self.defaults_file = folder / "asked.yaml"
        self.defaults_file.write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")

    # ------------------------------------------------------------ what the recipe is
    def ask(self, argv: list[str]) -> dict:
        """The recipe's arguments: a run is stopped once it has recorded them."""
        record = self.folder / "asked" / "run.yaml"
        words = [*argv, "--output_dir", str(record.parent)]
        assert self.run_until("asked", "plain", words, record.exists), "no run.yaml was written"
        return yaml.safe_load(record.read_text(encoding="utf-8"))

    def first_rows(self, kind: str) -> list[dict]:
        """The first rows of the first set of `--dataset_name` or `--eval_dataset_name`."""
        from preference_recipes.data import files  # slow to import

        names = self.arguments[f"{kind}_name"]
        if not names:
            return []
        rows = files.find(names[0], self.arguments[f"{kind}_split"])
        return uneven(list(rows.select(range(min(2 * ROWS, len(rows))))))

    def has(self, name: str) -> bool:
        """Whether the recipe has this argument."""
        return name in self.arguments

    @property
    def generates(self) -> bool:
        """Whether the recipe learns from responses that it samples."""
        return self.has("rollout_batch_size")

    def model_folder(self, dropout: float = 0.0) -> Path:
        """A copy of the model with this dropout, where its config names some."""
        source = Path(self.arguments["model_name_or_path"])
        if not source.is_dir():
            from huggingface_hub import snapshot_download

            source = Path(snapshot_download(str(source)))
        copy = self.folder / f"model_{dropout:g}"
        if not copy.exists():
            copy.mkdir()
            for path in source.iterdir():
                if path.name != "config.json":
                    (copy / path.name).symlink_to(path.resolve())
            config = json.loads((source / "config.json").read_text(encoding="utf-8"))
            names = [name for name in config if "dropout" in name or "pdrop" in name]
            config |= dict.fromkeys(names, dropout)
            (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return copy

    # ------------------------------------------------------------ its flags
    def flags(
        self, output: Path, n_rows: int | None = None, dropout: float = 0.0, **changes
    ) -> list[str]:
        """The flags of a tiny run, as far as the recipe has them; `changes` are arguments."""
        asked = self.arguments
        n_rows = n_rows or (PROMPTS if self.generates else ROWS)
        longest_response = min(asked.get("max_new_tokens") or LONGEST_RESPONSE, LONGEST_RESPONSE)
        values = {
            **TINY_RUN,
            "model_name_or_path": self.model_folder(dropout),
            "dataset_name": self.data_file("train", n_rows),
            "eval_dataset_name": self.data_file("held_out", EVALUATION_ROWS),
            # How many updates an epoch of rollouts holds may depend on the rewards.
            "max_steps": SAMPLED_UPDATES if self.generates else 0,
            "max_length": min(asked.get("max_length") or LONGEST, LONGEST),
            "max_new_tokens": longest_response,
            # A policy that samples must not forget all answers, or nothing is left to learn from.
            "learning_rate": 1e-4 if self.generates else 1e-3,
            "lora_dropout": 0.0,
            **changes,
        }
        known = {name: values[name] for name in values if name in asked}
        return [str(self.defaults_file), *flags_of({"output_dir": output, **known})]

    def data_file(self, kind: str, number: int) -> Path:
        path = self.folder / f"{kind}_{number}.jsonl"
        lines = [json.dumps(row, default=str) + "\n" for row in self.rows[kind][:number]]
        path.write_text("".join(lines), encoding="utf-8")
        return path

    # ------------------------------------------------------------ its runs
    def run(
        self, name: str, launcher: str | list[str] = "plain", fresh: bool = False, **changes
    ) -> Finished:
        """The run of this name, made with these changes, see `flags`, by whoever asks first."""
        if name not in self.runs:
            output = self.folder / name
            flags = self.flags(output, **changes)
            words = LAUNCHERS[launcher] if isinstance(launcher, str) else launcher
            try:
                done = launch(words, self.recipe, *flags, cwd=Path.cwd(), fresh=fresh)
                self.runs[name] = Finished(output, done.stdout)
            except AssertionError as error:
                self.runs[name] = str(error)
        found = self.runs[name]
        return self.fail(name, found) if isinstance(found, str) else found

    def fail(self, name: str, output: str):
        """Ends a test because a run failed."""
        # Other processes fail after the first one because it is gone, and say no more than that.
        until_failure, _, _ = output.partition(f"\n{warm.FAILED}")
        last = "\n".join(until_failure.strip().splitlines()[-15:])
        pytest.fail(f"the run `{name}` ended with an error:\n{last}", pytrace=False)

    def run_until(
        self,
        name: str,
        launcher: str,
        flags: list[str],
        moment: Callable[[], bool],
        act: Callable = kill,
        fresh: bool = False,
    ) -> bool:
        """Runs the recipe until a moment, at which it is killed or `act` is called, or to its end.

        Returns whether it came to that moment.
        """
        console = self.folder / f"{name}.console"
        console.touch()  # a run that is killed at once may not come to it
        how: Changes = dict(cwd=Path.cwd(), output=str(console), fresh=fresh)
        process = start(LAUNCHERS[launcher], self.recipe, *flags, **how)
        latest = time.monotonic() + TIMEOUT
        came_to_it = False
        while process.poll() is None and not came_to_it and time.monotonic() < latest:
            came_to_it = moment()
            time.sleep(0.001)
        if process.returncode is None:
            (act if came_to_it else kill)(process)
        elif process.returncode:
            self.fail(name, console.read_text(errors="replace"))
        return came_to_it


# ============================================================ rows of uneven lengths

# Where a row may hold an answer to learn, as the formats of data have it.
ANSWERS = ["messages", "completion", "chosen", "rejected", "output", "conversations", "text"]


def uneven(rows: list[dict]) -> list[dict]:
    """Rows of uneven lengths: as they are, unless they have three lengths or fewer.

    Rows of one length would hide a mean of means, prompts of one length how generation pads them.
    Answers are repeated 1 to 3 times. Where there are none, every fourth prompt is, once: no more,
    since the model may have no answer to it that is worth a reward.
    """
    if len({len(json.dumps(row, default=str)) for row in rows}) > 3:
        return rows
    if any(name in row for row in rows for name in ANSWERS):
        columns, role, times = ANSWERS, "assistant", [1, 2, 3]
    else:
        columns, role, times = ["prompt"], "user", [1, 2, 1, 1]
    return [
        row | {name: repeated(row[name], n, role) for name in columns if name in row}
        for row, n in zip(rows, itertools.cycle(times))
    ]


def repeated(value, times: int, role: str):
    """A text repeated, or in a list of messages what this role says."""
    if isinstance(value, str):
        return value * times
    longer = lambda message: message | {"content": message["content"] * times}
    return [longer(message) if message["role"] == role else message for message in value]
