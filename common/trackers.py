"""Reports a run to the trackers that accelerate knows: wandb, trackio, mlflow and others."""

import json
import sys
import uuid
from pathlib import Path

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from common import folders

# Which run of each tracker this is, so that a resumed run goes on in it.
FILE = "trackers.json"
# TensorBoard has a room of its own, `common/board.py`.
OWN = ("tensorboard", "none")


def check(report_to: list[str]) -> None:
    """Refuses names of `--report_to` that are unknown, or whose package is not installed.

    Raises:
        SystemExit: with the names that would do.
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


def start(report_to: list[str], output_dir: Path, settings: dict) -> list[GeneralTracker]:
    """Opens a run in each tracker, or the one that this run already has there.

    The project is the recipe's name, the run's name is that of `output_dir`. A tracker that cannot
    continue a run gets a new one. For the main process.

    Args:
        settings: the run's arguments.
    """
    names = [name for name in report_to if name not in OWN]
    if not names:
        return []
    file = output_dir / FILE
    ids = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    trackers = []
    for name in names:
        tracker = make(name, ids.get(name), output_dir)
        tracker.start()
        if name not in ids:
            tracker.store_init_configuration(settings)  # mlflow refuses another value later
            ids[name] = id_of(tracker)
        trackers.append(tracker)
    folders.replace_file(file, json.dumps(ids, indent=1) + "\n")
    return trackers


def make(name: str, known_id: str | None, output_dir: Path) -> GeneralTracker:
    """Returns accelerate's tracker of that name, not started.

    Args:
        known_id: of the run to go on with, as `id_of` returned it; None for a new run.
    """
    project = Path(sys.argv[0]).stem
    run_name = output_dir.resolve().name
    tracker_class = LOGGER_TYPE_TO_CLASS[name]
    run_id = known_id or uuid.uuid4().hex[:12]
    if name in ("wandb", "swanlab"):
        return tracker_class(project, name=run_name, id=run_id, resume="allow")
    if name == "trackio":
        # It knows runs by their name alone: two folders of the same name must not be one run.
        return tracker_class(project, name=known_id or f"{run_name}-{run_id[:4]}", resume="allow")
    if name == "mlflow":
        return tracker_class(project, run_id=known_id, run_name=run_name)
    if name == "aim":
        return tracker_class(project, logging_dir=str(output_dir), run_hash=known_id)
    if name == "dvclive":
        return tracker_class(project, dir=str(output_dir / "dvclive"), resume=known_id is not None)
    return tracker_class(project)


def id_of(tracker: GeneralTracker) -> str:
    """Returns what names the run in its tracker; an empty text where nothing does."""
    run = tracker.tracker
    if tracker.name == "mlflow":
        return run.info.run_id
    if tracker.name == "trackio":
        return run.name
    if tracker.name == "aim":
        return run.hash
    return str(getattr(run, "id", ""))
