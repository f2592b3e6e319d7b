"""Checkpoints and resuming."""

import json
import os
import shutil
import signal
import sys
import time
import types
from pathlib import Path

import torch
from accelerate.utils import DistributedType, gather_object, set_seed
from safetensors import SafetensorError

from common import actor, distributed, engine, folders
from common.arguments import MAY_CHANGE
from common.metrics import NOTHING


class Run(types.SimpleNamespace):
    """All that a checkpoint holds: `accelerator args optimizer scheduler tokenizer progress metrics`, and

    Attributes:
        model, unwrapped: what `accelerator.prepare` returned, and the `LogProbModel` inside it.
        data_fingerprint: of the tokenised training set; it stands for data, tokenizer and lengths.
        signal, signalled: the signal that ends the run after its update, 0 for none, and when it came.
        saved: `global_step` of the last checkpoint in `folder`.
        extra: what else the recipe carries from update to update, the same on all ranks: tensors, numbers, lists and dicts of them.
    """

    extra, signal, signalled, saved = None, 0, 0.0, -1

    @property
    def folder(self) -> Path:
        return Path(self.args.output_dir) / "checkpoints"

    @property
    def identity(self) -> dict:
        """What a run must share with the checkpoint it resumes from; a sharded state needs the same world, too."""
        accelerator, world = (
            self.accelerator,
            f"{engine.describe(self.accelerator)} with {self.accelerator.num_processes} processes",
        )
        return {
            **vars(self.args),
            "data": self.data_fingerprint,
            "world": world if engine.is_sharded(accelerator) else accelerator.mixed_precision,
        }


def save(run: Run) -> None:
    """Writes `checkpoints/global_step_...` under another name, flushes it, renames it, then deletes the oldest. All ranks call it.

    Raises:
        SystemExit: it could not be written, as on a full disk; what was is removed, the checkpoints before it are untouched.
    """
    if (
        run.saved == run.progress.global_step
    ):  # a signal came meanwhile; updates skipped since then would be skipped again
        return
    final, before = (
        run.folder / f"global_step_{run.progress.global_step:06d}",
        folders.by_step(run.folder),
    )
    try:
        write(run, final, run.folder / f".{final.name}.writing")
    except (
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # torch and safetensors have their own kinds
        if run.accelerator.is_main_process:  # another might delete what this one is renaming
            shutil.rmtree(run.folder / f".{final.name}.writing", ignore_errors=True)
        way_on = (
            f"--resume auto goes on from {before[-1].name}" if before else "There is none before it"
        )
        sys.exit(f"{final} could not be written: {str(error)[:200]}. {way_on}.")
    run.saved = run.progress.global_step


def write(run: Run, final: Path, temporary: Path) -> None:
    accelerator = run.accelerator
    choose_engine_state(run)
    accelerator.save_state(str(temporary / "engine"))  # makes the folder
    state = {  # all that the engine does not know, with each process's own sums of the log line not yet written
        "arguments": run.identity,
        "progress": {
            name: getattr(run.progress, name)
            for name in ("global_step", "skipped_steps", "updates_seen", "samples", "tokens")
        },
        "scheduler": run.scheduler.state_dict(),
        "last_update": run.metrics.last_update,
        "metrics_bytes": run.metrics.file.stat().st_size if run.metrics.file.exists() else 0,
        "open_sums": gather_object(
            [{name: value.tolist() for name, value in run.metrics.open.sums.items()}]
        ),
    }
    if accelerator.is_main_process:
        torch.save(run.extra, temporary / "extra.pt")
        (temporary / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    actor.save(
        accelerator, run.model, run.unwrapped, run.tokenizer, temporary / "actor"
    )  # and waits for all
    folders.flush(
        *temporary.rglob("*"), temporary
    )  # on every rank: each flushes what its own node holds back
    mine = sorted(filter(Path.is_file, temporary.rglob("*")))[
        accelerator.process_index :: accelerator.num_processes
    ]
    manifest = dict(
        gather_object(
            [
                (str(path.relative_to(temporary)), [path.stat().st_size, folders.checksum(path)])
                for path in mine
            ]
        )
    )
    if accelerator.is_main_process:
        (temporary / "manifest.json").write_text(
            json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8"
        )
        folders.replace(temporary, final, run.args.save_total_limit)
    accelerator.wait_for_everyone()


def check_disk(run: Run) -> None:
    """Refuses a run whose checkpoints will not fit on the disk: those it keeps, and one more while that is written."""
    for leftover in run.folder.glob(
        ".global_step_*"
    ):  # of a run that was killed while saving; one with .old was damaged
        shutil.rmtree(leftover)
    run.metrics.parameters = sum(
        getattr(p, "ds_numel", p.numel()) for p in run.unwrapped.parameters()
    )
    size = (
        run.metrics.parameters * (4 + 4 + 8 + 4) / 2**30
    )  # GiB at most: weights, fp32 masters, two moments, the actor
    number = max(run.args.save_total_limit + 1 - len(folders.by_step(run.folder)), 1)
    if (
        run.args.save_steps
        and (free := shutil.disk_usage(run.args.output_dir).free / 2**30) < number * size
    ):
        sys.exit(
            f"{run.args.output_dir} has {free:.3g} GiB free, too little for {number} checkpoints of up to {size:.3g} GiB"
        )


def stop_if_asked(run: Run) -> None:
    """After a window: where any process was told to end (see `resume`), saves a checkpoint and leaves. All ranks call it."""
    if number := int(
        run.accelerator.reduce(torch.tensor(run.signal, device=run.accelerator.device), "max")
    ):
        save(run)
        run.metrics.bar.close()
        run.accelerator.print(
            f"stopped by {signal.Signals(number).name} after update {run.saved}, saved in {run.folder}: go on with --resume auto"
        )
        sys.exit(128 + number)


def choose_engine_state(run: Run) -> None:
    """What accelerate saves and loads: no frozen model, and names without DDP's `module.`, for another number of processes."""
    engine.reshard(run.model)
    run.accelerator._models = [run.model if engine.is_sharded(run.accelerator) else run.unwrapped]


def resume(run: Run) -> None:
    """Puts a run where `--resume` says: at a checkpoint, or (auto, and none was ever written) at the start. All ranks call it.

    From here on SIGTERM, SIGINT and SIGUSR1 end the run after its update, with a checkpoint; a second one, a few seconds later (a
    launcher passes on what its processes may have got already), ends it at once.

    Raises:
        SystemExit: no whole checkpoint though there are some, or one of another run: the difference is shown.
    """
    choose_engine_state(run)  # and so lets a reference go that is no longer needed
    set_seed(
        run.args.seed, device_specific=True
    )  # models were made alike on all ranks; dropout differs between them
    distributed.on_main_process(run.accelerator, check_disk, run)
    accelerator, owner, metrics_size = run.accelerator, os.getpid(), 0

    def note(number, _):
        forked, late = os.getpid() != owner, run.signal and time.monotonic() - run.signalled > 3
        if late or (
            forked and number != signal.SIGINT
        ):  # Ctrl-C reaches the workers of a reward function, which the update still needs
            os._exit(128 + number)
        run.signal, run.signalled = number, run.signalled if run.signal else time.monotonic()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, note)
    if run.args.resume == "never":
        return run.metrics.start()
    if path := distributed.on_main_process(accelerator, find, run):
        load(run, path, state := json.loads((path / "state.json").read_text(encoding="utf-8")))
        if path.parent.resolve() == run.folder.resolve():
            metrics_size, run.saved = state["metrics_bytes"], run.progress.global_step
        accelerator.print(
            f"resumed from {path}: {run.progress.global_step} updates, {run.progress.updates_seen} windows seen"
        )
    # Like the lines beyond it, what was saved later is of the run that is left behind; where nothing was found all is.
    for folder in [*folders.by_step(run.folder), *folders.by_step(run.folder.parent / "actors")]:
        if accelerator.is_main_process and int(folder.name[12:]) > run.progress.global_step:
            shutil.rmtree(folder)
    run.metrics.start(metrics_size)
    # A run that goes on elsewhere has a checkpoint of its own from the start: killed before its first, it would begin anew.
    save(run) if path and run.saved < 0 and run.args.save_steps else accelerator.wait_for_everyone()


def find(run: Run) -> Path | None:
    """The checkpoint to take, the newest whole one with `--resume auto`, or None; names those passed over."""
    candidates = (
        folders.by_step(run.folder)[::-1] if run.args.resume == "auto" else [Path(run.args.resume)]
    )
    for path in candidates:
        if not (fault := folders.fault_of(path)):
            return path
        run.accelerator.print(f"passed over {path}: {fault}")
    if found := candidates or [*run.folder.glob("global_step_*")]:
        sys.exit(
            f"--resume {run.args.resume}: none of the {len(found)} checkpoints is whole and named as written; to start anew take another --output_dir"
        )
    if (run.folder.parent / "actor").exists():
        sys.exit(f"--resume auto: the run in {run.folder.parent} has ended and left no checkpoint")
    run.accelerator.print(f"no checkpoint in {run.folder}: starting from the beginning")


def load(run: Run, path: Path, state: dict) -> None:
    """Reads a verified checkpoint into the run.

    Raises:
        SystemExit: it is of other data, another algorithm's settings, or another world where that cannot be loaded.
    """
    before, now = state["arguments"], run.identity
    now["world"] = now["world"][
        : len(before.get("world", ""))
    ]  # a universal checkpoint's names stage and precision only
    if changed := [
        name for name in before if name not in MAY_CHANGE and now.get(name) != before[name]
    ]:
        differences = (
            f"{name}: {before[name]!r} in the checkpoint, {now.get(name)!r} now" for name in changed
        )
        sys.exit(
            f"--resume: {path} is of another run: {'; '.join(differences)}{' (common.export --universal is for another number of processes)' * ('world' in changed)}"
        )
    accelerator, rank, processes = (
        run.accelerator,
        run.accelerator.process_index,
        len(state["open_sums"]),
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.print(
            "NOTE: DeepSpeed's state is read as pickles, which can run code: resume from your own checkpoints only."
        )
        run.model._config.load_universal_checkpoint = (
            path / "engine/pytorch_model/zero"
        ).is_dir()  # see common/export.py
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in run.optimizer.param_groups
    ]
    # On a GPU Adam's step counts would be read back from it for each parameter.
    accelerator.load_state(
        str(path / "engine"), **({} if engine.is_sharded(accelerator) else {"map_location": "cpu"})
    )
    run.scheduler.optimizer.param_groups = (
        run.optimizer.param_groups
    )  # new ones, which DeepSpeed's Adam for CPUs does not share
    (schedule := run.scheduler).load_state_dict(state["scheduler"])
    # The next update's, by the horizon of now: --max_steps and --max_epochs may have changed.
    schedule._last_lr = [
        base * factor(schedule.last_epoch)
        for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas)
    ]
    # DeepSpeed 0.19.8 gives all groups the settings of the first, and one shared step count, from a universal ZeRO-3 checkpoint.
    for group, settings, learning_rate in zip(
        run.optimizer.param_groups, groups, schedule.get_last_lr()
    ):
        group.update(settings, lr=learning_rate)
    for moments in (part for part in run.optimizer.state.values() if "step" in part):
        moments["step"] = moments["step"] + 0
    run.metrics.last_update, run.extra = (
        state["last_update"],
        torch.load(path / "extra.pt", weights_only=True),
    )
    vars(run.progress).update(state["progress"])
    for writer, sums in enumerate(state["open_sums"]):
        mine = rank == (writer if processes == accelerator.num_processes else 0)
        for name, value in sums.items():  # the others take the names
            run.metrics.open.merge(
                name,
                torch.tensor(
                    value if mine else NOTHING, dtype=torch.float64, device=accelerator.device
                ),
            )
    if (
        processes != accelerator.num_processes
    ):  # the data order goes on exactly; random states cannot
        accelerator.print(
            f"note: {processes} processes before, {accelerator.num_processes} now: dropout, if any, is drawn anew"
        )
