"""Knows the best evaluation of a run, and ends a run that no longer gets better."""

import json
import math
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from common import counted, folders
from common.progress import Progress

FOLDER = "actor_best"
FILE = "best.json"


class Best:
    """The best evaluation of a run so far.

    Attributes:
        metric, lower: what `--keep_best` names, and whether less of it is better.
        global_step: when it was; None as long as there is none.
        value: of the metric.
        since: how many evaluations came after it.
    """

    def __init__(self, accelerator: Accelerator, args, progress: Progress):
        self.accelerator = accelerator
        self.args = args
        self.progress = progress
        self.output_dir = Path(args.output_dir)
        named = args.keep_best or ""
        self.metric = named.removesuffix(":min").removesuffix(":max")
        self.lower = named.endswith((":min", "loss", "kl"))
        self.global_step: int | None = None
        self.value: float | None = None
        self.since = 0

    def note(self, line: dict[str, float]) -> bool:
        """Takes note of an evaluation's values, and returns whether it is the best so far."""
        if self.metric not in line:
            sys.exit(
                f"--keep_best {self.args.keep_best}: this run's evaluations have no such metric; "
                f"they have {', '.join(line)}"
            )
        value = line[self.metric]
        found = self.is_better(value)
        self.since += 1
        if found:
            self.load_state({"global_step": self.progress.global_step, "value": value, "since": 0})
            if self.accelerator.is_main_process:
                folders.replace_file(self.output_dir / FILE, self.in_file())
        self.count_patience()
        return found

    def is_better(self, value: float) -> bool:
        """Whether a value is better than the best so far. Equal is not, and NaN never is."""
        if self.value is None:
            return not math.isnan(value)
        return value < self.value if self.lower else value > self.value

    def in_file(self) -> str:
        """Returns the content of `best.json`. It names the actor in the folder next to it."""
        values = {"metric": self.metric, "global_step": self.global_step, "value": self.value}
        return json.dumps(values) + "\n"

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds."""
        return {name: getattr(self, name) for name in ("global_step", "value", "since")}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over the best evaluation of a checkpoint."""
        self.global_step = state["global_step"]
        self.value = state["value"]
        self.since = state["since"]

    def forget(self) -> None:
        """Begins anew: the next evaluation is the best so far."""
        self.load_state({"global_step": None, "value": None, "since": 0})

    def count_patience(self) -> None:
        """Ends the run if `--stop_after` evaluations in a row were no better than the best."""
        if 0 < self.args.stop_after <= self.since:
            self.progress.stopped_early = True  # never false again: GRPO may have ended the run

    def describe_end(self) -> list[str]:
        """Returns lines for the end of a run: the best evaluation, and whether it ended the run."""
        if self.args.keep_best is None:
            return []
        if self.global_step is None:
            return [f"no best evaluation: {self.args.keep_best} was never a number"]
        lines = [
            f"best: {self.metric} {self.value:.4g} at update {self.global_step}, "
            f"saved in {self.output_dir / FOLDER}"
        ]
        if 0 < self.args.stop_after <= self.since:
            evaluations = counted(self.since, "evaluation")
            lines.append(f"stopped early: {evaluations} without a better one (--stop_after)")
        return lines


def fault_of_settings(args) -> str | None:
    """Returns which setting of `--keep_best` or `--stop_after` would be ignored; None if none."""
    if args.keep_best and not args.eval_dataset_name:
        return f"--keep_best {args.keep_best} needs --eval_dataset_name"
    if args.stop_after and not (args.keep_best and args.eval_steps):
        return f"--stop_after {args.stop_after} needs --keep_best and --eval_steps"
    return None
