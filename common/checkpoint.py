"""Checkpoints: their content, how they are written, and how a run resumes from one."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, set_seed
from torch import nn

from common import distributed, engine, folders, log, pluralize, record, refuse, stopping
from common.actor import BEST_FILE, BEST_FOLDER, ActorSaver, Best
from common.arguments import MAY_CHANGE
from common.metrics import Means
from common.run import Run
from common.values import VALUES

# The counters of `Progress` that a checkpoint holds; a resumed run resets the others.
COUNTERS = ("global_step", "skipped_steps", "n_samples", "n_tokens")
# Log files that grow with a run. A checkpoint holds them as they were.
LOGS = (log.METRICS, log.SAMPLES)


class Checkpoint:
    """Saves and resumes a run. The arguments are the content of a checkpoint.

    Args:
        optimizer: the one that `accelerator.prepare` returned.
        scheduler: a `LambdaLR`, not prepared.
        means: the values of the next log line.
        must_match: the data, models that are only read, and the policy, of which only the base
            below adapters counts. A run resumes only from a checkpoint with the same
            `fingerprints` of these, and the same arguments. None is left out.
        states: the recipe's own, by name, such as `rollout=state`. `state()` of each returns
            what to save, the same on all processes: None, numbers, strings, tensors, lists and
            dicts of them, and dataclasses that are `checkpointable`. `load_state` restores it.
    """

    def __init__(
        self,
        run: Run,
        saver: ActorSaver,
        optimizer,
        scheduler,
        means: Means,
        must_match: list,
        **states,
    ):
        self.run = run
        self.accelerator = run.accelerator
        self.saver = saver
        self.model = saver.model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.means = means
        self.states = states
        self.is_deepspeed = engine.zero_stage(run.accelerator) > 0
        self.folder = run.output_dir / "checkpoints"
        # `global_step` of the last checkpoint in the run's own folder; None: there is none yet.
        self.last_saved: int | None = None
        self.signals = stopping.Signals()
        template = str(getattr(saver.tokenizer, "chat_template", None)).encode()
        processes = pluralize(self.accelerator.num_processes, "process")
        self.identity: dict[str, Any] = {  # all arguments, even those that may change
            **vars(run.args),
            # The template's content counts, not the name of its file.
            "chat_template": hashlib.sha256(template).hexdigest()[:16],
            "date": getattr(saver.tokenizer, "chat_date", None),
            "launched as": f"{engine.describe(self.accelerator)}, {processes}",
        }
        for part in must_match:
            self.identity |= part.fingerprints if part is not None else {}

    # ============================================================ saving

    def save_if_due(self) -> None:
        """Saves if `--save_steps` asks for it, and before a signal ends the run.

        All processes must call it, after each update.
        """
        run = self.run
        if run.args.save_steps > 0 and run.due(run.args.save_steps):
            self.save()
        signal = self.signals.of_any(self.accelerator)
        if signal:
            self.save()
            run.bar.close()
            go_on = f"--output_dir {record.relative(run.output_dir)} --resume auto"
            where = f"after update {self.last_saved}, saved: to continue add {go_on}"
            stopping.end(self.accelerator, signal, where)

    def save(self) -> None:
        """Writes a checkpoint, then deletes the oldest ones. All processes must call it."""
        if self.last_saved == self.run.global_step:
            # For example, a signal arrived. Since then, updates or rollouts may have been skipped:
            # the resumed run repeats them.
            return
        self.last_saved = self.run.global_step
        final = self.folder / f"global_step_{self.last_saved:06d}"
        temporary = final.with_name(f".{final.name}.writing")
        with self.run.timed("excluded"), folders.writing(temporary):
            self.write(temporary, final)

    def write(self, temporary: Path, final: Path) -> None:
        """Writes a checkpoint under a temporary name and renames it to `final`."""
        accelerator = self.accelerator
        # All processes write their parts of the engine's state. This also creates the folders.
        engine.reshard(self.model)
        only_trained = engine.has_adapter(self.saver.unwrapped)  # only DeepSpeed reads it
        accelerator.save_state(str(temporary / "engine"), exclude_frozen_parameters=only_trained)

        if self.means.recorder is not None:
            self.means.recorder.write()
        # The main process writes what is the same on all; all help to collect it.
        states = {name: part.state() for name, part in self.states.items()}
        state = {
            "arguments": self.identity,
            "progress": {name: getattr(self.run, name) for name in COUNTERS},
            "best": vars(self.saver.best),
            "scheduler": self.scheduler.state_dict(),
            "last_update": self.means.last_update,
            # One per process, because summing them now would change the rounding of the log.
            "open_sums": gather_object([self.means.state()]),
        }
        if accelerator.is_main_process:
            for name, content in states.items():
                torch.save(content, temporary / f"{name}.pt")
            (temporary / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
            earlier = [self.folder, *folders.by_step(self.folder)][-1]
            (temporary / "logs").mkdir()
            for name in LOGS:
                if (self.run.output_dir / name).exists():
                    file = self.run.output_dir / name
                    folders.copy_log(file, temporary / "logs", earlier / "logs")
            if (self.run.output_dir / VALUES).exists():
                parts = self.run.output_dir / VALUES  # they never change
                copies = temporary / "logs" / VALUES
                shutil.copytree(parts, copies, copy_function=folders.link_or_copy)
        self.saver.write_into(temporary)
        accelerator.wait_for_everyone()  # until each has written its files

        # Every process flushes everything, because each node buffers what was written on it.
        folders.flush(*temporary.rglob("*"), temporary)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            manifest = folders.describe_files(temporary)
            (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
            folders.replace(temporary, final)
            folders.rotate(self.folder, self.run.args.save_total_limit)
        accelerator.wait_for_everyone()

    # ============================================================ resuming

    def begin_or_resume(self) -> None:
        """Resumes from a checkpoint or begins anew, as `--resume` says, and opens the log.

        All processes must call it.
        """
        run = self.run
        accelerator = self.accelerator
        self.select_saved_modules()
        # All processes created the same models. From here on, their dropout differs.
        set_seed(run.args.seed, device_specific=True)
        path = distributed.on_main_process(accelerator, self.find)
        if path:
            self.load(path)
        if not distributed.on_main_process(accelerator, self.saver.has_best):
            self.saver.best = Best()  # the folder holds a later one: search again
        self.saver.count_patience()  # a run that had stopped early stops again
        distributed.on_main_process(accelerator, self.restore_folder, path)
        distributed.on_main_process(accelerator, record.write, accelerator, run.args)
        run.start()
        if path and path.parent.resolve() == self.folder.resolve():
            self.last_saved = run.global_step
        elif path and run.args.save_steps:
            self.save()  # the next `--resume auto` finds it here
        if accelerator.is_fsdp2 and run.global_step == 0:
            self.optimizer.state.clear()  # to save a new optimizer, torch steps it

    def select_saved_modules(self) -> None:
        """Makes accelerate save and load only the trained model, or its adapters.

        By default it takes all models that it has prepared. DeepSpeed needs its engine.
        """
        saved: nn.Module = self.model
        if engine.has_adapter(self.saver.unwrapped) and not self.is_deepspeed:
            trained = engine.trained_parameters(self.saver.unwrapped)
            # The names in a `ParameterDict` must not contain dots.
            by_name = {name.replace(".", "/"): parameter for name, parameter in trained.items()}
            saved = nn.ParameterDict(by_name)
        self.accelerator._models = [saved]

    def find(self) -> Path | None:
        """Returns the checkpoint that `--resume` names; with `auto`, the newest whole one.

        Prints which ones it skips, and why. None: the run begins at 0. For the main process.
        """
        for leftovers in ("*/.global_step_*.writing", "*/.global_step_*.deleting*"):
            for leftover in self.run.output_dir.glob(leftovers):  # from a killed run
                shutil.rmtree(leftover, ignore_errors=True)
        resume = self.run.args.resume
        if resume == "never":
            return None
        candidates = folders.by_step(self.folder)[::-1] if resume == "auto" else [Path(resume)]
        for path in candidates:
            fault = folders.fault_of(path)
            if fault is None:
                return path
            self.accelerator.print(f"passed over {path}: {fault}")
        if candidates:
            refuse(f"--resume {resume}: no whole checkpoint, see above")
        self.accelerator.print(f"no checkpoint in {self.folder}: starting from the beginning")
        return None

    def load(self, path: Path) -> None:
        """Loads a whole checkpoint into the run; refuses one that does not fit."""
        accelerator = self.accelerator
        state = folders.read_json(path / "state.json")
        self.check_same_run(path, state["arguments"])

        # 1. The engine's state, and random states.
        engine.reshard(self.model)
        settings = {}
        if self.is_deepspeed:
            # Checkpoints lack the base below adapters, see `ModelWrapper.fingerprints`.
            settings["load_module_strict"] = not engine.has_adapter(self.saver.unwrapped)
        accelerator.load_state(str(path / "engine"), **settings)
        # Loading gives DeepSpeed's Adam for CPUs new groups.
        self.scheduler.optimizer.param_groups = self.optimizer.param_groups

        # 2. The content of `state.json`.
        self.scheduler.load_state_dict(state["scheduler"])
        # Recompute the current rates: `--max_steps` or `--max_epochs` may have changed them.
        self.scheduler.last_epoch -= 1
        self.scheduler.step()
        for name in COUNTERS:
            setattr(self.run, name, state["progress"][name])
        self.saver.best = Best(**state["best"])
        self.means.last_update = state["last_update"]
        self.means.load_state(state["open_sums"][accelerator.process_index])

        # 3. The recipe's state. The main process wrote it, so its tensors were on the first GPU.
        device = {"cuda:0": str(accelerator.device)}
        for name, part in self.states.items():
            part.load_state(torch.load(path / f"{name}.pt", weights_only=True, map_location=device))
        updates = f"{self.run.global_step} updates, {self.run.skipped_steps} skipped"
        ended = ". The run had ended there" if self.run.finished else ""
        accelerator.print(f"resumed from {path}: {updates}{ended}")

    def check_same_run(self, path: Path, saved: dict) -> None:
        """Ends the program if a checkpoint's identity (`saved`) is not the run's."""
        current = self.identity
        may_change = MAY_CHANGE | self.run.args.may_change
        differences = [
            f"{name}: {value!r} in the checkpoint, {current.get(name)!r} now"
            for name, value in saved.items()
            if name not in may_change and current.get(name) != value
        ]
        if differences:
            refuse(f"--resume: {path} belongs to another run: {'; '.join(differences)}")

    def restore_folder(self, path: Path | None) -> None:
        """Restores the run's folder to its state at the checkpoint; for the main process.

        The logs are copied out of the checkpoint. Whatever the folder holds beyond that point, such
        as lines and checkpoints of a killed run, is kept under names that end in `.before_resume`.
        The logs come last: a run killed before that resumes from the same point again.
        """
        output_dir = self.run.output_dir
        beyond = [
            folder
            for parent in (self.folder, output_dir / "actors")
            for folder in folders.by_step(parent)
            if folders.step_of(folder) > self.run.global_step
        ]
        copies = (path or self.folder) / "logs"  # without a checkpoint there are none
        logs = {output_dir / name: folders.log_parts(copies, name) for name in LOGS}
        replaced = []
        for file, parts in logs.items():
            existing = [file] if file.exists() else []
            if folders.describe(*parts) != folders.describe(*existing):
                replaced.append(file)
        values = output_dir / VALUES  # a folder
        if folders.describe_files(values) != folders.describe_files(copies / VALUES):
            replaced.append(values)
        # The final actor stays only if the run had ended here and does not continue: `--max_steps`
        # may be higher now.
        if beyond or replaced or not self.run.finished:
            beyond.append(output_dir / "actor")
        if self.saver.best.global_step is None:
            beyond += [output_dir / BEST_FOLDER, output_dir / BEST_FILE]
        if path is None:  # a resumed run appends, and hides later values
            beyond.append(output_dir / "tensorboard")
        moved = [folders.set_aside(each) for each in [*beyond, *replaced] if each.exists()]
        for file in replaced:
            if file == values and (copies / VALUES).exists():
                shutil.copytree(copies / VALUES, values)
                folders.flush(*values.iterdir(), values)
            elif logs.get(file):
                with open(file, "xb") as log_file:
                    log_file.writelines(folders.blocks(*logs[file]))
                folders.flush(file)
        folders.flush(output_dir)
        if moved:
            self.accelerator.print(f"set aside in {output_dir}: {', '.join(moved)}")
