"""Knows the best evaluation of a run, and ends a run that no longer gets better."""

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator

from common import counted, distributed, folders
from common.progress import Progress

FOLDER = "actor_best"
FILE = "best.json"
# Metrics of which less is better, by the end of their names. `:min` and `:max` say otherwise.
LOWER_IS_BETTER = ("loss", "kl")
# What evaluations depend on, and what may change when a run is resumed.
OF_EVALUATION = (
    "max_new_tokens",
    "eval_dataset_name",
    "eval_dataset_split",
    "exact_match_rows",
    "eval_temperature",
    "eval_samples",
)


class Target(NamedTuple):
    """What `--keep_best` names: a metric, and whether less of it is better."""

    metric: str
    lower: bool

    def describe(self) -> str:
        """Returns the metric and its direction in words."""
        return f"{self.metric}, {'lower' if self.lower else 'higher'} is better"


class Best:
    """The best evaluation of a run so far.

    Attributes:
        global_step: when it was; None as long as there is none.
        value: of the metric of `--keep_best`.
        since: how many evaluations came after it.
    """

    def __init__(self, accelerator: Accelerator, args, progress: Progress):
        self.accelerator = accelerator
        self.args = args
        self.progress = progress
        self.output_dir = Path(args.output_dir)
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
        wanted = target(self.args.keep_best)
        if wanted.metric not in line:
            sys.exit(
                f"--keep_best {self.args.keep_best}: this run's evaluations have no such metric; "
                f"they have {', '.join(line)}"
            )
        value = line[wanted.metric]
        found = is_better(value, self.value, wanted.lower)
        if found:
            self.begin(self.progress.global_step, value)
            self.record()
        else:
            self.since += 1
        self.count_patience()
        return found

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds."""
        return {"global_step": self.global_step, "value": self.value, "since": self.since}

    def load_state(self, state: dict[str, Any], arguments_before: dict) -> None:
        """Takes over the best evaluation of a checkpoint; none if evaluations have changed.

        Values of other held-out rows, or of responses sampled otherwise, cannot be compared.

        Args:
            arguments_before: those of the run that wrote the checkpoint.
        """
        self.begin(state["global_step"], state["value"])
        self.since = state["since"]
        before = of_evaluation(arguments_before)
        now = of_evaluation(vars(self.args))
        changed = [name for name in now if name in before and before[name] != now[name]]
        if self.global_step is not None and changed:
            self.accelerator.print(
                f"NOTE: --{changed[0]} is not that of the checkpoint: --keep_best begins anew here"
            )
            self.begin()

    def find_folder(self) -> None:
        """Begins anew after a resume if the folder of the best actor is not here any more.

        That is so in another folder, and if the run was killed just after a better actor had taken
        its place: that one lies beyond the checkpoint, and was set aside.
        """
        folder = self.output_dir / FOLDER
        is_here = distributed.on_main_process(self.accelerator, folder.is_dir)
        if self.global_step is not None and not is_here:
            self.accelerator.print(
                f"NOTE: {folder}, of update {self.global_step}, is not here: --keep_best begins "
                "anew at this checkpoint"
            )
            self.begin()
        if self.global_step is not None:
            self.record()
        self.count_patience()  # a run that had stopped early stops again

    def count_patience(self) -> None:
        """Ends the run if `--stop_after` evaluations in a row were no better than the best."""
        if self.is_out_of_patience:
            self.progress.stopped_early = True  # never false again: GRPO may have ended the run

    @property
    def is_out_of_patience(self) -> bool:
        """Whether the last `--stop_after` evaluations were no better than the best; 0: never."""
        return 0 < self.args.stop_after <= self.since

    def record(self) -> None:
        """Writes `best.json`, from which model cards and the end of the run take it."""
        if self.accelerator.is_main_process:
            values = {
                "metric": target(self.args.keep_best).metric,
                "global_step": self.global_step,
                "value": self.value,
            }
            folders.replace_file(self.output_dir / FILE, json.dumps(values) + "\n")

    def describe_end(self) -> list[str]:
        """Returns lines for the end of a run: the best evaluation, and whether it ended the run."""
        if self.args.keep_best is None:
            return []
        if self.global_step is None:
            return [f"no best evaluation: {self.args.keep_best} was never a number"]
        lines = [f"best: {describe(self.output_dir)}, saved in {self.output_dir / FOLDER}"]
        if self.is_out_of_patience and self.progress.global_step < self.progress.total_steps:
            evaluations = counted(self.since, "evaluation")
            lines.append(f"stopped early: {evaluations} without a better one (--stop_after)")
        return lines


def target(keep_best: str) -> Target:
    """Reads `METRIC`, `METRIC:min` or `METRIC:max`.

    Without a direction, less is better if the name ends in one of `LOWER_IS_BETTER`: `eval/loss`
    is `Target("eval/loss", lower=True)`.
    """
    for ending, lower in ((":min", True), (":max", False)):
        if keep_best.endswith(ending):
            return Target(keep_best.removesuffix(ending), lower)
    return Target(keep_best, keep_best.endswith(LOWER_IS_BETTER))


def fault_of_settings(args) -> str | None:
    """Returns what is wrong with `--keep_best` and `--stop_after`; None if nothing is."""
    if args.keep_best is None:
        if args.stop_after:
            return f"--stop_after {args.stop_after} needs --keep_best, such as eval/loss"
        return None
    if not target(args.keep_best).metric.startswith("eval/"):
        return (
            f"--keep_best {args.keep_best}: expected a metric of evaluations, such as eval/loss, "
            "or with its direction, such as eval/loss:min"
        )
    if not args.eval_dataset_name:
        return f"--keep_best {args.keep_best} needs --eval_dataset_name"
    if args.stop_after and not args.eval_steps:
        return f"--stop_after {args.stop_after} needs --eval_steps"
    return None


def of_evaluation(settings: dict) -> dict:
    """Returns the settings that evaluations depend on.

    Of a data set's path only the last part counts, since the file may have been moved.
    """
    found = {name: settings[name] for name in OF_EVALUATION if name in settings}
    files = found.get("eval_dataset_name") or []
    return {**found, "eval_dataset_name": [Path(file).name for file in files]}


def is_better(value: float, best: float | None, lower: bool) -> bool:
    """Whether a value is better than the best so far. Equal is not, and NaN never is."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value < best if lower else value > best


def recorded(output_dir: Path) -> dict | None:
    """Returns the content of `best.json`; None if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError):
        found = folders.read_json(output_dir / FILE)
        if isinstance(found, dict) and found.keys() >= {"metric", "global_step", "value"}:
            return found
    return None


def describe(output_dir: Path) -> str:
    """Returns which evaluation was the best, and its value; empty if none is recorded."""
    found = recorded(output_dir)
    if found is None:
        return ""
    return f"{found['metric']} {found['value']:.4g} at update {found['global_step']}"
