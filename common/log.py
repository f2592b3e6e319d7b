"""Names of the files that a run appends to; TensorBoard and other trackers (`--report_to`)."""

import re
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from accelerate.utils import gather_object

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"


def open_trackers(
    accelerator: Accelerator, args, global_step: int, charts: dict[str, list[str]]
) -> None:
    """Opens what `--report_to` names; TensorBoard also gets a page of the key charts."""
    trackers = [name for name in args.report_to if name not in ("tensorboard", "none")]
    if trackers:
        accelerator.log_with = trackers
        accelerator.project_configuration.set_directories(args.output_dir)
        config = dict(vars(args))  # a copy: that of MLflow deletes long values
        gpus = [] if accelerator.device.type == "cpu" else [accelerator.device]
        with torch.random.fork_rng(gpus):  # that of ClearML sets a seed of its own
            accelerator.init_trackers(Path(sys.argv[0]).stem, config=config)
    if "tensorboard" in args.report_to:
        # It hides what a killed run wrote after this update.
        board = TensorBoardTracker("tensorboard", args.output_dir, purge_step=global_step + 1)
        board.start()
        accelerator.trackers.append(board)
        multiline = {}
        for title, tags in charts.items():  # in training, and in each held-out set's evaluation
            names = "|".join(re.escape(tag.removeprefix("eval/")) for tag in tags)
            multiline[title] = ["Multiline", [f"(eval/([^/]+/)?)?({names})$"]]
        board.writer.add_custom_scalars({"key metrics": multiline})


def add_histograms(
    accelerator: Accelerator, source: str, values: dict[str, np.ndarray], global_step: int
) -> None:
    """Shows the values of samples in TensorBoard, under tags such as `samples/train/loss`.

    All processes must call it.
    """
    of_processes = gather_object([values])
    boards = [tracker for tracker in accelerator.trackers if tracker.name == "tensorboard"]
    for name in values if boards else ():
        of_all = np.concatenate([of_process[name] for of_process in of_processes])
        if np.isfinite(of_all).any():
            shown = of_all[np.isfinite(of_all)]
            boards[0].writer.add_histogram(f"samples/{source}/{name}", shown, global_step)
