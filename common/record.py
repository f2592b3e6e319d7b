"""What a run records about itself: arguments, surroundings, and a card for its model."""

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import torch
import yaml

from common import REPOSITORY, as_list, counted, distributed, engine, folders

ARGUMENTS_FILE = "run.yaml"
ENVIRONMENT_FILE = "environment.json"
EVALUATION = '"eval/'  # what the lines of evaluations hold
# Where a run writes, and whether it resumes, does not belong to what it computes.
NOT_REPEATED = ("output_dir", "resume")
PACKAGES = (
    "preference-recipes",
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


def write(accelerator, args, comparable_after: int = -1) -> None:
    """Writes `run.yaml` and `environment.json` to `args.output_dir`; for the main process.

    `run.yaml` holds every argument but `output_dir` and `resume`, as the run uses them. It can be
    the first argument of the same recipe, which then repeats the run. `environment.json` holds one
    entry for each start of the run, the newest last: a run that was resumed has several.

    Args:
        comparable_after: see `best.Best`.
    """
    output_dir = Path(args.output_dir)
    repeated = {name: value for name, value in vars(args).items() if name not in NOT_REPEATED}
    folders.replace_file(output_dir / ARGUMENTS_FILE, yaml.safe_dump(repeated, sort_keys=False))
    start = {**describe_start(accelerator, args), "comparable_after": comparable_after}
    starts = [*starts_of(output_dir), start]
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


def date_of_run(accelerator, args) -> str:
    """Returns the date that chat templates print, as in 2026-01-31; the same on all processes.

    It is that of the run's start: a resumed run takes it from the checkpoint.
    """
    return distributed.on_main_process(accelerator, find_date, args)


def find_date(args) -> str:
    """Does the work of `date_of_run` on one process."""
    candidates = []
    if args.resume == "auto":
        candidates = folders.by_step(Path(args.output_dir) / "checkpoints")[::-1]
    elif args.resume != "never":
        candidates = [Path(args.resume)]
    for path in candidates:
        # A torn checkpoint is refused later. Here another one of the same run is as good.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            day = folders.read_json(path / "state.json")["arguments"]["date"]
            if day is not None:
                return str(date.fromisoformat(day))  # a template prints it: only a date
    return date.today().isoformat()


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
    of_launcher = ("ACCELERATE_", "FSDP_", "WORLD_SIZE")
    launcher = {name: os.environ[name] for name in os.environ if name.startswith(of_launcher)}
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


def versions() -> dict[str, str]:
    """Returns the versions of the packages that decide what a run computes."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def commit() -> str | None:
    """Returns the commit of this repository, with a `+` if files differ; None outside of git.

    An installed `common` has none, even if its folder is in a repository of the user's.

    It takes no lock, so that it never blocks a user's own git command. `describe --dirty` would
    lock the index, whatever the option says.
    """
    if not (REPOSITORY / ".git").exists():
        return None
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
    """Writes a model card into the folder of an actor, from what its run has recorded so far.

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
    args = yaml.safe_load((output_dir / ARGUMENTS_FILE).read_text(encoding="utf-8"))
    shown = {name: without_folder(value) for name, value in args.items()}
    start = starts_of(output_dir)[-1]
    recipe = Path(start["recipe"]).stem
    header = {"library_name": library, "tags": [recipe]}
    # Names of the hub only: it refuses others.
    folder = Path(start.get("working_directory", ""))  # a user's code may have left it
    if not (folder / args["model_name_or_path"]).exists():
        header["base_model"] = args["model_name_or_path"]
    names = as_list(args["dataset_name"])
    on_hub = [name.partition(":")[0] for name in names if not (folder / name).exists()]
    if on_hub:
        header["datasets"] = on_hub
    used = ", ".join(f"{name} {version}" for name, version in start["versions"].items())
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---",
        f"# {Path(args['model_name_or_path']).name}, trained by {recipe}",
        f"From `{shown['model_name_or_path']}` on "
        f"{', '.join(f'`{without_folder(name)}`' for name in names)}.",
        figures(output_dir),
        f"## Arguments\n\n```yaml\n{yaml.safe_dump(shown, sort_keys=False)}```",
        f"{start['engine']}, {counted(start['processes'], 'process')}, {start['device']}. "
        f"Python {start['python']}, {used}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def without_folder(value: Any) -> Any:
    """Returns an argument's value with absolute paths shortened to their last part.

    A card is published, and folders tell of the machine and its user.
    """
    if isinstance(value, list):
        return [without_folder(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def ends_of_log(output_dir: Path, mark: str = "") -> list[dict]:
    """Returns the first and the last line of a run's log; torn lines do not count.

    Args:
        mark: what such a line holds, as `EVALUATION`.

    Returns:
        two lines, the same one twice if there is only one; none without any. Of evaluations those
        alone count that can be compared, see `best.Best`.
    """
    file = output_dir / "metrics.jsonl"
    after = comparable_after(output_dir) if mark == EVALUATION else -1
    found = []
    if file.is_file():
        with open(file, encoding="utf-8", errors="replace") as log:
            for line in log:
                values = as_object(line) if mark in line else None
                if values and values.get("global_step", 0) > after:
                    found = [*found[:1], values]
    return found and [found[0], found[-1]]


def as_object(line: str) -> dict | None:
    """Returns what a line of a log holds; None if that is no JSON object."""
    with contextlib.suppress(ValueError, RecursionError):
        values = json.loads(line)
        return values if isinstance(values, dict) else None
    return None


def comparable_after(output_dir: Path) -> int:
    """Returns after which update a run's evaluations can be compared, see `best.Best`."""
    starts = starts_of(output_dir)
    return starts[-1].get("comparable_after", -1) if starts else -1


def unreadable_lines(log: Path) -> list[int]:
    """Returns the numbers of the lines of a log that are no JSON object; none without a log."""
    if not log.is_file():
        return []
    with open(log, encoding="utf-8", errors="replace") as lines:
        return [number for number, line in enumerate(lines, 1) if as_object(line) is None]


def figures(output_dir: Path) -> str:
    """Returns a table of the held-out figures before training and now; empty without any."""
    evaluations = ends_of_log(output_dir, EVALUATION)
    if not evaluations:
        return ""
    first, last = [line["global_step"] for line in evaluations]
    rows: list[str] = []
    after = comparable_after(output_dir)
    if after >= 0:
        rows.append(f"Evaluations up to update {after} were of other data, or made otherwise.\n")
    rows += [f"| held out | update {first} | update {last} |", "| --- | --- | --- |"]
    for name, before, now in compared(evaluations):
        if name.startswith("eval/"):
            rows.append(f"| `{name}` | {before} | {now} |")
    return "\n".join(rows)


def compared(ends: list[dict]) -> list[tuple[str, str, str]]:
    """Returns each metric of the last line: its name, and its first and last values as texts."""
    first, last = ends
    rows = []
    for name, value in last.items():
        before = f"{first[name]:.4g}" if name in first else "-"
        rows.append((name, before, f"{value:.4g}"))
    return rows
