"""Reports a run to the trackers that accelerate knows: wandb, trackio, mlflow and others."""

import json
import sys
import uuid
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from common import folders

# Which run of each tracker this is, so that a resumed run continues it.
FILE = "trackers.json"
# TensorBoard is not one of accelerate's here: see `common/board.py`.
OWN = ("tensorboard", "none")


def check(report_to: list[str]) -> None:
    """Refuses names of `--report_to` that are unknown, or whose package is not installed.

    Raises:
        SystemExit: with the valid names.
    """
    known = [*OWN, *sorted(set(LOGGER_TYPE_TO_CLASS) - set(OWN))]
    installed = [str(name) for name in get_available_trackers()]
    for name in report_to:
        if name not in known:
            sys.exit(f"--report_to {name}: expected one or several of {', '.join(known)}")
        if name not in OWN and name not in installed:
            sys.exit(f"--report_to {name}: its package is not installed, try `pip install {name}`")
    if "none" in report_to and len(report_to) > 1:
        sys.exit(f"--report_to {' '.join(report_to)}: none goes with no other name")


def start(accelerator: Accelerator, report_to: list[str], output_dir: Path, settings: dict) -> None:
    """Opens a run in each tracker, or the one that a resumed run has there already.

    The project is the recipe's name, the run's name is that of `output_dir`. For the main process.

    Args:
        settings: the run's arguments.
    """
    accelerator.log_with = [name for name in report_to if name not in OWN]
    if not accelerator.log_with:
        return
    # For trackers that write files.
    accelerator.project_configuration.set_directories(str(output_dir))
    file = output_dir / FILE
    is_new = not file.is_file()
    ids = {"own": uuid.uuid4().hex[:12]} if is_new else folders.read_json(file)
    accelerator.init_trackers(
        project_name=Path(sys.argv[0]).stem,
        config=settings if is_new else None,  # mlflow refuses another value later
        init_kwargs=settings_of_trackers(output_dir, ids),
    )
    for tracker in accelerator.trackers:
        if tracker.name == "mlflow":
            ids["mlflow"] = tracker.tracker.info.run_id
    folders.replace_file(file, json.dumps(ids, indent=1) + "\n")


def settings_of_trackers(output_dir: Path, ids: dict[str, str]) -> dict[str, dict]:
    """Returns, for each tracker, what makes a resumed run continue the same run there.

    Trackers that are not listed begin a new one.

    Args:
        ids: `own`, which this run chose itself, and the one that `mlflow` chose.
    """
    name = output_dir.resolve().name
    by_id = {"name": name, "id": ids["own"], "resume": "allow"}
    # trackio knows runs by name alone, so two folders of the same name need different names.
    by_name = {"name": f"{name}-{ids['own'][:4]}", "resume": "allow"}
    return {
        "wandb": by_id,
        "swanlab": by_id,
        "trackio": by_name,
        "mlflow": {"run_name": name, "run_id": ids.get("mlflow")},
        "dvclive": {"dir": str(output_dir / "dvclive"), "resume": True},
    }
