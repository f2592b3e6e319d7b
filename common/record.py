"""What a run records of itself: its arguments, its surroundings, and a card for its model."""

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch
import yaml

from common import REPOSITORY, counted, engine, folders

ARGUMENTS_FILE = "run.yaml"
ENVIRONMENT_FILE = "environment.json"
# Where a run writes, and whether it goes on from a checkpoint, is no part of what it computes.
NOT_REPEATED = ("output_dir", "resume")
PACKAGES = (
    "torch",
    "accelerate",
    "deepspeed",
    "transformers",
    "datasets",
    "tokenizers",
    "safetensors",
    "peft",
    "bitsandbytes",
)


def write(accelerator, args) -> None:
    """Writes `run.yaml` and `environment.json` to `args.output_dir`; for the main process.

    `run.yaml` holds every argument but `output_dir` and `resume`, as the run uses them. It can be
    the first argument of the same recipe, which then repeats the run. `environment.json` holds one
    entry for each start of the run, the newest last: a run that was resumed has several.
    """
    output_dir = Path(args.output_dir)
    repeated = {name: value for name, value in vars(args).items() if name not in NOT_REPEATED}
    folders.replace_file(output_dir / ARGUMENTS_FILE, yaml.safe_dump(repeated, sort_keys=False))
    starts = [*starts_of(output_dir), describe_start(accelerator, args)]
    folders.replace_file(output_dir / ENVIRONMENT_FILE, json.dumps(starts, indent=1) + "\n")


def plain_settings(args) -> dict[str, bool | int | float | str]:
    """Returns the arguments of a run as trackers take them: a list is a text, None is left out."""
    settings = {}
    for name, value in vars(args).items():
        if name in NOT_REPEATED or value is None:
            continue
        is_plain = isinstance(value, (bool, int, float, str))
        settings[name] = value if is_plain else str(value)
    return settings


def starts_of(output_dir: Path) -> list[dict]:
    """Returns the entries of `environment.json`; none if it cannot be read."""
    try:
        return folders.read_json(output_dir / ENVIRONMENT_FILE)
    except (OSError, ValueError):
        return []


def describe_start(accelerator, args) -> dict:
    """Returns what surrounds a run: command, versions, launcher, devices, source of the recipe."""
    script = Path(sys.argv[0])
    device = "cpu"
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name(accelerator.device)
    plugin = accelerator.state.deepspeed_plugin
    launcher = {name: os.environ[name] for name in sorted(os.environ) if is_of_launcher(name)}
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([sys.executable, *sys.argv]),
        "working_directory": os.getcwd(),
        **{name: getattr(args, name) for name in NOT_REPEATED},
        "engine": engine.describe(accelerator),
        "processes": accelerator.num_processes,
        "device": device,
        "launcher": launcher,
        "deepspeed_config": plugin.deepspeed_config if plugin else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions(),
        "commit": commit(),
        "recipe": str(script),
        "source": script.read_text(encoding="utf-8") if script.is_file() else None,
    }


def is_of_launcher(name: str) -> bool:
    """Whether accelerate's launcher sets an environment variable of this name."""
    return name.startswith(("ACCELERATE_", "FSDP_")) or name == "WORLD_SIZE"


def versions() -> dict[str, str]:
    """Returns the versions of the packages that decide what a run computes."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Returns the commit of this repository, with a `+` if files differ; None outside of git.

    It takes no lock, so that it never is in the way of a user's own git command. `describe --dirty`
    would take that of the index, whatever the option says.
    """
    described = git("describe", "--always", "--abbrev=40")
    if described is None:
        return None
    differs = git("status", "--porcelain", "--untracked-files=no")
    return f"{described}+" if differs else described


def git(*words: str) -> str | None:
    """Returns what a git command prints about this repository; None if it prints nothing."""
    command = ["git", "--no-optional-locks", "-C", str(REPOSITORY), *words]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


# ============================================================ the card of a model
def write_card(folder: Path, library: str) -> None:
    """Writes a model card beside a saved actor, from what its run has recorded so far.

    Args:
        folder: somewhere below the run's `output_dir`. Without a run above it there is no card.
        library: that loads the model, `transformers` or `peft`.
    """
    # A record that a user emptied or tore makes no card: a checkpoint is worth more than that.
    runs = [parent for parent in folder.absolute().parents if starts_of(parent)]
    if runs:
        (folder / "README.md").write_text(card(runs[0], library), encoding="utf-8")


def card(output_dir: Path, library: str) -> str:
    """Returns the card: base, data, figures before and after, arguments, command, versions."""
    text = (output_dir / ARGUMENTS_FILE).read_text(encoding="utf-8")
    args = yaml.safe_load(text)
    start = starts_of(output_dir)[-1]
    recipe = Path(start["recipe"]).stem
    header = {"library_name": library, "tags": [recipe]}
    # Names of the hub only: it refuses others.
    if not Path(args["model_name_or_path"]).exists():
        header["base_model"] = args["model_name_or_path"]
    names = args["dataset_name"]
    names = [names] if isinstance(names, str) else names
    on_hub = [name.partition(":")[0] for name in names if not Path(name).exists()]
    if on_hub:
        header["datasets"] = on_hub
    used = ", ".join(f"{name} {version}" for name, version in start["versions"].items())
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---",
        f"# {Path(args['model_name_or_path']).name}, trained by {recipe}",
        f"From `{args['model_name_or_path']}` on {', '.join(f'`{name}`' for name in names)}.",
        figures(output_dir),
        f"## Arguments\n\n```yaml\n{text}```",
        f"## Command\n\n```\n{start['command']}\n```\n\n"
        f"{start['engine']}, {counted(start['processes'], 'process')}, "
        f"{start['device']}. "
        f"Python {start['python']}, {used}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


class Log:
    """The first and the last lines of a run's `metrics.jsonl`.

    A run may have millions of lines, and each checkpoint has a card. So each line is read once, and
    those in between are not kept.

    Attributes:
        ends: the first and the last line, or the only one.
        evaluations: likewise of the lines of evaluations.
    """

    def __init__(self, output_dir: Path):
        self.file = output_dir / "metrics.jsonl"
        self.ends: list[dict] = []
        self.evaluations: list[dict] = []
        self.position = 0  # the bytes that are read

    def read_on(self) -> None:
        """Reads the lines that were written since the last call."""
        if not self.file.is_file():
            return
        last = b""
        with open(self.file, "rb") as lines:
            lines.seek(self.position)
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # torn
                self.position += len(line)
                if not self.ends:
                    keep(self.ends, line)
                elif line.startswith(b"{"):
                    last = line
                if b'"eval/' in line:
                    keep(self.evaluations, line)
        keep(self.ends, last)


def keep(ends: list[dict], line: bytes) -> None:
    """Makes a line the last of these, unless it is none of ours."""
    with contextlib.suppress(ValueError, RecursionError):
        values = json.loads(line)
        if isinstance(values, dict):
            ends[1:] = [values]


the_log = functools.cache(Log)


def log_of(output_dir: Path) -> Log:
    """Returns the `Log` of the run that this process writes, as it stands now."""
    log = the_log(output_dir.absolute())
    log.read_on()
    return log


def figures(output_dir: Path) -> str:
    """Returns a table of the held-out figures before training and now; empty without any."""
    evaluations = log_of(output_dir).evaluations
    if not evaluations:
        return ""
    first = evaluations[0]["global_step"]
    last = evaluations[-1]["global_step"]
    rows = [f"| held out | update {first} | update {last} |", "| --- | --- | --- |"]
    for name, before, after in first_and_last(evaluations):
        if name.startswith("eval/"):
            rows.append(f"| `{name}` | {before} | {after} |")
    return "\n".join(rows)


def first_and_last(lines: list[dict]) -> list[tuple[str, str, str]]:
    """Returns each metric of the last line: its name, and its first and last values as texts."""
    first = lines[0]
    rows = []
    for name, value in lines[-1].items():
        before = f"{first[name]:.4g}" if name in first else "-"
        rows.append((name, before, f"{value:.4g}"))
    return rows
