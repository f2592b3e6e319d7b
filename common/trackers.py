"""Where log lines go besides the files: TensorBoard, and the other trackers of accelerate."""

import re
import sys
import uuid
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker

from common import record

NONE = "none"  # of `--report_to`
# Where TensorBoard shows the key charts. Without smoothing: it would smooth a few evaluations as it
# does hundreds of updates, and draw them far from their values.
KEY_CHARTS = "http://localhost:6006/#custom_scalars&_smoothingWeight=0"


def start(accelerator: Accelerator, args, charts: dict[str, list[str]], global_step: int) -> None:
    """Opens the trackers of `--report_to`; for the main process.

    A resumed run continues in TensorBoard's folder, and in the same run of wandb, swanlab, trackio.

    Args:
        charts: the key charts of TensorBoard: title -> tags, see `pattern_of`.
        global_step: where the run begins or continues. TensorBoard hides what a killed run wrote
            after it.
    """
    output_dir = Path(args.output_dir)
    settings = record.plain_settings(args)
    accelerator.log_with = [n for n in args.report_to if n not in ("tensorboard", NONE)]
    if accelerator.log_with:
        accelerator.project_configuration.set_directories(str(output_dir))
        # The same for each start of this run, and another one for any other folder.
        run_id = uuid.uuid5(uuid.NAMESPACE_URL, str(output_dir.resolve())).hex[:12]
        name = output_dir.resolve().name
        continued = {"name": name, "id": run_id, "resume": "allow"}
        # trackio knows runs by name alone, so two folders of the same name need different names.
        by_name = {"name": f"{name}-{run_id[:4]}", "resume": "allow"}
        accelerator.init_trackers(
            project_name=Path(sys.argv[0]).stem,
            config=settings,
            init_kwargs={"wandb": continued, "swanlab": continued, "trackio": by_name},
        )
    if "tensorboard" in args.report_to:
        is_new = not (output_dir / "tensorboard").is_dir()
        # A new run starts at 0, the step of the evaluation before the first update.
        purge_step = global_step + 1 if global_step else 0
        tracker = TensorBoardTracker("tensorboard", str(output_dir), purge_step=purge_step)
        tracker.start()
        accelerator.trackers.append(tracker)
        if is_new:
            describe(tracker.writer, charts, settings)


def describe(writer, charts: dict[str, list[str]], settings: dict) -> None:
    """Writes TensorBoard's page of key charts (CUSTOM SCALARS) and the arguments (HPARAMS)."""
    from torch.utils.tensorboard.summary import hparams  # slow to import

    layout = {title: ["Multiline", [pattern_of(tags)]] for title, tags in charts.items()}
    writer.add_custom_scalars({"key metrics": layout})
    for summary in hparams(settings, {"loss": 0.0}):  # the metric's values are those of its curve
        writer.file_writer.add_summary(summary)


def writer_of(accelerator: Accelerator):
    """Returns TensorBoard's writer; None where there is none: not asked for, or another process."""
    for tracker in accelerator.trackers:
        if isinstance(tracker, TensorBoardTracker):
            return tracker.writer
    return None


def add_histogram(writer, name: str, values: torch.Tensor, global_step: int) -> None:
    """Adds a histogram of values, of any shape, if there are any."""
    if len(values) and values.abs().max() < 1e20:  # TensorBoard's bins end there
        writer.add_histogram(name, values, global_step)


def pattern_of(tags: list[str]) -> str:
    """Returns the regular expression of tags, in training and in evaluation.

    Tags that begin with `eval/` are meant in evaluation alone, of each held-out set.
    """
    held_out = "eval/([^/]+/)?"
    patterns = [
        held_out + re.escape(tag.removeprefix("eval/"))
        if tag.startswith("eval/")
        else f"({held_out})?{re.escape(tag)}"
        for tag in tags
    ]
    return f"({'|'.join(patterns)})$"
