"""Records of a run: its arguments, its environment, and a card for its model."""

import json
import os
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import yaml

from common import engine, folders, log

HERE = Path.cwd()  # a user's code may change it later
PACKAGES = "torch accelerate deepspeed transformers datasets tokenizers peft bitsandbytes"


def relative(path: Path) -> str:
    """Returns a path relative to the working directory, if it is inside."""
    return str(path.relative_to(HERE)) if path.is_relative_to(HERE) else str(path)


def write(accelerator, args) -> None:
    """Writes `run.yaml` and `environment.json` to `args.output_dir`; for the main process.

    `run.yaml` can be the first argument of the same recipe, which then repeats the run.
    `environment.json` holds one entry for each start of the run, the newest last.
    """
    output_dir = Path(args.output_dir)
    not_repeated = ("output_dir", "run_name", "resume")
    arguments = {name: value for name, value in vars(args).items() if name not in not_repeated}
    folders.replace_file(output_dir / "run.yaml", yaml.safe_dump(arguments, sort_keys=False))

    file = output_dir / "environment.json"
    starts = folders.read_json(file) if args.resume != "never" and file.is_file() else []
    is_cuda = accelerator.device.type == "cuda"
    plugin = accelerator.state.deepspeed_plugin
    prefixes = ("ACCELERATE_", "FSDP_", "WORLD_SIZE")
    imported = [name for name in PACKAGES.split() if name in sys.modules]
    # The data behind recorded values, see preference_recipes/tools/rows.py.
    names = [*args.dataset_name, *(args.eval_dataset_name or [])] if args.values_steps else []
    data_files = [name for name in names if Path(HERE, name).is_file()]
    start = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([sys.executable, *sys.argv]),
        "working_directory": str(HERE),
        "engine": engine.describe(accelerator),
        "device": torch.cuda.get_device_name(accelerator.device) if is_cuda else "cpu",
        "launcher": {name: os.environ[name] for name in os.environ if name.startswith(prefixes)},
        "deepspeed_config": plugin.deepspeed_config if plugin else None,
        "data_files": {name: folders.describe(Path(HERE, name)) for name in data_files},
        "python": sys.version,
        "versions": {name: sys.modules[name].__version__ for name in imported},
    }
    folders.replace_file(file, json.dumps([*starts, start], indent=1) + "\n")


def write_card(folder: Path, args) -> None:
    """Writes a model card into an actor's folder. It contains no local paths."""
    recipe = Path(sys.argv[0]).stem
    model, *data = map(without_folder, (args.model_name_or_path, *args.dataset_name))
    is_adapter = (folder / "adapter_config.json").exists()
    header = {"library_name": "peft" if is_adapter else "transformers", "tags": [recipe]}
    if not (HERE / args.model_name_or_path).exists():  # a name on the hub
        header["base_model"] = model
    text = f"# {model}, trained by {recipe} on {', '.join(data)}\n"
    evaluations = log.evaluations(Path(args.output_dir))
    if evaluations:
        step = evaluations[-1].pop("global_step")
        rows = [f"| {name} | {value:.4g} |" for name, value in evaluations[-1].items()]
        text += "\n".join([f"\n| evaluation at update {step} | |", "| --- | --- |", *rows, ""])
    changed = {n: without_folder(value) for n, value in log.changed_arguments(args).items()}
    changed.pop("output_dir", None)
    text += f"\nArguments:\n\n```yaml\n{yaml.safe_dump(changed, sort_keys=False)}```\n"
    card = f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n{text}"
    (folder / "README.md").write_text(card, encoding="utf-8")


def without_folder(value: Any) -> Any:
    """Returns an argument's value as others may see it: only the name of a local path."""
    if isinstance(value, list):
        return [without_folder(item) for item in value]
    if isinstance(value, str) and (value[:1] in ("/", "~", ".") or os.path.exists(HERE / value)):
        return Path(value).name
    return value
