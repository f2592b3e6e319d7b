"""Knows the best evaluation of a run, and ends a run that no longer gets better."""

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from common import counted, distributed, folders
from common.progress import Progress

FOLDER = "actor_best"
FILE = "best.json"
# What evaluations depend on, and what may change when a run is resumed.
OF_EVALUATION = (
    "held-out data",
    "source of the rewards",
    "max_new_tokens",
    "exact_match_rows",
    "eval_temperature",
    "eval_samples",
)


class Best:
    """The best evaluation of a run so far.

    Attributes:
        metric, lower: what `--keep_best` names, and whether less of it is better.
        global_step: when it was; None as long as there is none.
        value: of the metric.
        since: how many evaluations came after it.
        comparable_after: evaluations of this update and before were of other held-out data, or made
            otherwise; -1: none.
    """

    def __init__(self, accelerator: Accelerator, args, progress: Progress):
        self.accelerator = accelerator
        self.args = args
        self.progress = progress
        self.output_dir = Path(args.output_dir)
        named = args.keep_best or ""
        self.metric = named.removesuffix(":min").removesuffix(":max")
        self.lower = named.endswith((":min", "loss", "kl"))
        self.comparable_after = -1
        self.begin()

    def begin(self, global_step: int | None = None, value: float | None = None) -> None:
        """Makes this evaluation the best so far; without arguments there is none yet."""
        self.global_step = global_step
        self.value = value
        self.since = 0

    def note(self, line: dict[str, float]) -> bool:
        """Takes note of an evaluation, and returns whether it is the best so far.

        Args:
            line: its values, the same on all processes.

        Raises:
            SystemExit: it has no such metric.
        """
        if self.metric not in line:
            sys.exit(
                f"--keep_best {self.args.keep_best}: this run's evaluations have no such metric; "
                f"they have {', '.join(line)}"
            )
        found = self.is_better(line[self.metric])
        if found:
            self.begin(self.progress.global_step, line[self.metric])
            self.record()
        else:
            self.since += 1
        self.count_patience()
        return found

    def is_better(self, value: float) -> bool:
        """Whether a value is better than the best so far. Equal is not, and NaN never is."""
        if math.isnan(value):
            return False
        if self.value is None:
            return True
        return value < self.value if self.lower else value > self.value

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds."""
        names = ("global_step", "value", "since", "comparable_after")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: dict[str, Any], before: dict, now: dict) -> None:
        """Takes over the best evaluation of a checkpoint; none if evaluations have changed.

        Values of other held-out rows, or of responses sampled otherwise, cannot be compared.

        Args:
            before, now: the identity of the run that wrote the checkpoint, and of this one.
        """
        self.begin(state["global_step"], state["value"])
        self.since = state["since"]
        self.comparable_after = state["comparable_after"]
        changed = [name for name in OF_EVALUATION if before.get(name) != now.get(name)]
        if changed:
            self.accelerator.print(
                f"NOTE: changed since the checkpoint: {' and '.join(changed)}. Evaluations "
                "from now on are compared with each other alone, and --keep_best begins anew"
            )
            self.begin()
            self.comparable_after = self.progress.global_step

    def find_folder(self) -> None:
        """Begins anew after a resume if the folder of the best actor is not here any more.

        That is so in another folder, and if the run was killed just after a better actor had taken
        its place: that one lies beyond the checkpoint, and was set aside.
        """
        folder = self.output_dir / FOLDER
        is_here = distributed.on_main_process(self.accelerator, folder.is_dir)
        if self.global_step is not None and not is_here:
            self.begin_anew(f"{folder}, of update {self.global_step}, is not here")
        if self.global_step is not None:
            self.record()
        self.count_patience()  # a run that had stopped early stops again

    def begin_anew(self, why: str) -> None:
        """Forgets the best evaluation, and says why."""
        self.accelerator.print(f"NOTE: {why}: --keep_best begins anew at this checkpoint")
        self.begin()

    def count_patience(self) -> None:
        """Ends the run if `--stop_after` evaluations in a row were no better than the best."""
        if 0 < self.args.stop_after <= self.since:
            self.progress.stopped_early = True  # never false again: GRPO may have ended the run

    def record(self) -> None:
        """Writes `best.json`: a resumed run asks it whether `actor_best` lies beyond it."""
        if self.accelerator.is_main_process:
            values = {"metric": self.metric, "global_step": self.global_step, "value": self.value}
            folders.replace_file(self.output_dir / FILE, json.dumps(values) + "\n")

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


def recorded_step(output_dir: Path) -> int | None:
    """Returns the update of the best evaluation in a folder; None if none is recorded."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return folders.read_json(output_dir / FILE)["global_step"]
    return None
