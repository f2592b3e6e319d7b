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

import torch
import yaml

from common import REPOSITORY, as_list, counted, engine, folders

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
    folders.replace_file(output_dir / "run.yaml", yaml.safe_dump(repeated, sort_keys=False))
    file = output_dir / "environment.json"
    starts = folders.read_json(file) if file.is_file() else []
    starts.append(describe_start(accelerator, args))
    folders.replace_file(file, json.dumps(starts, indent=1) + "\n")


def describe_start(accelerator, args) -> dict:
    """Returns what surrounds a run: command, versions, launcher, devices, source of the recipe."""
    script = Path(sys.argv[0])
    device = "cpu"
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name(accelerator.device)
    plugin = accelerator.state.deepspeed_plugin
    of_launcher = ("ACCELERATE_", "FSDP_", "WORLD_SIZE")
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([sys.executable, *sys.argv]),
        "working_directory": os.getcwd(),
        **{name: getattr(args, name) for name in NOT_REPEATED},
        "engine": engine.describe(accelerator),
        "processes": accelerator.num_processes,
        "device": device,
        "launcher": {name: os.environ[name] for name in os.environ if name.startswith(of_launcher)},
        "deepspeed_config": plugin.deepspeed_config if plugin else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
        "recipe": str(script),
        "source": script.read_text(encoding="utf-8") if script.is_file() else None,
    }


def commit() -> str | None:
    """Returns the commit of this repository; None where `common` was installed, or without git."""
    if not (REPOSITORY / ".git").exists():
        return None
    with contextlib.suppress(OSError):
        command = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    return None


def find_date(args) -> str:
    """Returns the date that chat templates print, as in 2026-01-31; for the main process.

    It is that of the run's start: a resumed run takes it from the checkpoint.
    """
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


# ============================================================ the card of a model
def write_card(folder: Path, library: str) -> None:
    """Writes a model card into the folder of an actor, from what its run has recorded so far.

    Args:
        folder: somewhere below the run's `output_dir`. Without a run above it there is no card.
        library: that loads the model, `transformers` or `peft`.
    """
    for parent in folder.absolute().parents:
        if (parent / "environment.json").is_file():
            (folder / "README.md").write_text(card(parent, library), encoding="utf-8")
            return


def card(output_dir: Path, library: str) -> str:
    """Returns the card: base, data, figures before and after, versions."""
    args = yaml.safe_load((output_dir / "run.yaml").read_text(encoding="utf-8"))
    start = folders.read_json(output_dir / "environment.json")[-1]
    recipe = Path(start["recipe"]).stem
    model = args["model_name_or_path"]
    data = as_list(args["dataset_name"])
    # The hub refuses names that are not its own. A card is published, so it shows no folders.
    folder = Path(start["working_directory"])  # a user's code may have left it
    local = [name for name in (model, *data) if (folder / name).exists()]
    header = {"library_name": library, "tags": [recipe]}
    if model not in local:
        header["base_model"] = model
    if on_hub := [name.partition(":")[0] for name in data if name not in local]:
        header["datasets"] = on_hub
    shown = [f"`{Path(name).name if name in local else name}`" for name in (model, *data)]
    table = before_and_after(output_dir)
    if table:
        table.insert(1, ("---", "---", "---"))
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---",
        f"# {Path(model).name}, trained by {recipe}",
        f"From {shown[0]} on {', '.join(shown[1:])}.",
        "\n".join(f"| {' | '.join(row)} |" for row in table),
        f"{start['engine']}, {counted(start['processes'], 'process')}, {start['device']}. "
        f"Python {start['python']}, "
        f"{', '.join(f'{name} {version}' for name, version in start['versions'].items())}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def before_and_after(output_dir: Path) -> list[tuple[str, str, str]]:
    """Returns the first and the last value of each held-out metric, as a table with titles.

    Empty without an evaluation.
    """
    file = output_dir / "metrics.jsonl"
    if not file.is_file():
        return []
    with open(file, encoding="utf-8") as lines:
        evaluations = [json.loads(line) for line in lines if '"eval/' in line]
    if not evaluations:
        return []
    first = evaluations[0]
    last = evaluations[-1]
    rows = [("held out", f"update {first['global_step']}", f"update {last['global_step']}")]
    for name, value in last.items():
        if name.startswith("eval/"):
            before = f"{first[name]:.4g}" if name in first else "-"
            rows.append((name, before, f"{value:.4g}"))
    return rows
