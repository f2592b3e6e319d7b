"""The trained model as an ordinary Hugging Face folder, or its adapter as a folder of peft."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from common import display, engine, folders, pluralize, record, refuse, saving
from common.run import Run

BEST_FOLDER = "actor_best"
BEST_FILE = "best.json"


@dataclasses.dataclass
class Best:
    """The best evaluation so far, see `--keep_best`. A checkpoint holds it."""

    global_step: int | None = None  # None as long as there is none
    value: float | None = None
    since: int = 0  # evaluations that came after it


class ActorSaver:
    """Saves the trained model as an ordinary folder: at intervals, the best one, and at the end.

    `model` is the prepared module. What is saved is the transformers model inside it,
    `unwrapped.model`. `others` holds further models inside, such as PPO's critic, by
    folder name; only checkpoints hold them, see `write_into`.
    """

    def __init__(
        self, run: Run, model: nn.Module, tokenizer, others: Mapping[str, nn.Module] | None = None
    ):
        self.run = run
        self.model = model
        self.tokenizer = tokenizer
        self.others = dict(others or {})
        self.unwrapped = engine.unwrapped(run.accelerator, model)
        self.best = Best()

    def save(
        self, directory: Path | None = None, weights: dict[str, torch.Tensor] | None = None
    ) -> None:
        """Saves the actor, or its adapters alone if it has any. All processes must call it.

        Args:
            directory: by default the run's `actor`.
            weights: saved instead of the model's own, such as averages; by name in `unwrapped`.
        """
        run = self.run
        if directory is None and not run.global_step:
            refuse(f"no update was applied, {run.skipped_steps} were skipped: no actor is saved")
        directory = directory or run.output_dir / "actor"
        with run.timed("excluded"):
            saving.save(
                run.accelerator,
                run.args,
                self.model,
                {directory: self.unwrapped.model},
                self.tokenizer,
                dtype=run.args.save_dtype,
                weights=weights,
            )
        display.write(f"saved the actor: {record.relative(directory)}")

    def save_if_due(self) -> None:
        """Saves the actor in `actors` if `--save_actor_steps` asks for it after this update."""
        args = self.run.args
        if args.save_actor_steps > 0 and self.run.due(args.save_actor_steps):
            actors = self.run.output_dir / "actors"
            self.save(actors / f"global_step_{self.run.global_step:06d}")
            if self.run.accelerator.is_main_process:
                folders.rotate(actors, args.save_actor_limit)

    def write_into(self, parent: Path) -> None:
        """Writes the actor in its training precision to `parent/actor`, and `others` beside it."""
        run = self.run
        by_name = {"actor": self.unwrapped.model, **self.others}
        models = {parent / name: model for name, model in by_name.items()}
        saving.save(run.accelerator, run.args, self.model, models, self.tokenizer)

    def save_if_best(self, eval_metrics: dict[str, float]) -> None:
        """Saves the actor if an evaluation is the best so far; may end the run (`--stop_after`).

        All processes must call it after each evaluation, including the one before training.
        """
        run = self.run
        if not run.args.keep_best:
            return
        metric = run.args.keep_best.removesuffix(":min").removesuffix(":max")
        sign = {":min": -1, ":max": 1}.get(run.args.keep_best[-4:], display.direction(metric) or 1)
        if metric not in eval_metrics:
            names = ", ".join(eval_metrics)
            refuse(f"--keep_best {run.args.keep_best}: evaluations have only {names}")
        value = eval_metrics[metric]
        previous_best = -math.inf if self.best.value is None else sign * self.best.value
        self.best.since += 1
        if sign * value > previous_best:  # NaN never is
            self.best = Best(run.global_step, value)
            # The file comes first, so that a run killed in between sees that the two disagree.
            if run.accelerator.is_main_process:
                values = {"metric": metric, "global_step": run.global_step, "value": value}
                folders.replace_file(run.output_dir / BEST_FILE, json.dumps(values) + "\n")
            self.save(run.output_dir / BEST_FOLDER)
        self.count_patience()

    def has_best(self) -> bool:
        """Whether the run's folder holds the best evaluation's actor; true if there is none yet."""
        file = self.run.output_dir / BEST_FILE
        if self.best.global_step is None or not file.is_file():
            return self.best.global_step is None
        return folders.read_json(file)["global_step"] == self.best.global_step

    def count_patience(self) -> None:
        """Ends the run if `--stop_after` evaluations in a row were no better than the best."""
        if 0 < self.run.args.stop_after <= self.best.since:
            self.run.stopped_early = True
            evaluations = pluralize(self.best.since, "evaluation")
            display.write(f"stopped early: {evaluations} without a better one (--stop_after)")
