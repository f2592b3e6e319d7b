"""Checkpoints: what they hold, how they are written, and how a run begins from one."""

import dataclasses
import hashlib
import json
import math
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, set_seed

from common import (
    actor,
    arguments,
    best,
    counted,
    distributed,
    engine,
    engine_state,
    errors,
    folders,
    left_behind,
    record,
    stopping,
    transcript,
)
from common.run import Run
from preference_recipes.models import lora

# The counters of `Progress` that a checkpoint holds; a resumed run starts the others again.
COUNTERS = ("global_step", "skipped_steps", "samples", "tokens", "sequences")
# The keys of `state.json` besides `format`, see `state_besides_engine`.
STATE = {"arguments", "progress", "best", "scheduler", "last_update", "log_bytes", "open_sums"}
# The version of a checkpoint's layout. Checkpoints of other versions are refused.
FORMAT = 3
# The rollout that vLLM servers sampled ahead, where there is one.
AHEAD = "ahead.pt"
# Bytes, at most: weights 4, fp32 masters 4, Adam's two moments 8, the actor 4.
BYTES_PER_PARAMETER = 20
BYTES_BESIDES = 20e6  # tokenizer, random states
GIB = 2**30


def carried(dataclass: type) -> type:
    """Lets checkpoints hold the objects of a dataclass in `Run.extra` and `Run.per_process`.

    They are read without running code, so torch must be told by name which classes it may
    construct.
    """
    torch.serialization.add_safe_globals([dataclass])
    return dataclass


# ============================================================ the beginning of a run


def begin(run: Run) -> Any:
    """Makes a run ready for its next update: at a checkpoint or at the start, as `--resume` says.

    Returns `run.extra`, which a checkpoint replaces. All processes must call it.

    Raises:
        SystemExit: the disk is too small; there are checkpoints but none is whole; the chosen one
            belongs to another run.
    """
    # Only the trained model is saved and loaded. This also frees a reference model that is no
    # longer needed.
    engine_state.choose(run)
    # The models were made alike on all processes. From here on, dropout differs between them.
    set_seed(run.args.seed, device_specific=True)
    stopping.listen(run)
    on_main_process = partial(distributed.on_main_process, run.accelerator)

    # 1. Find the checkpoint.
    path = on_main_process(find_checkpoint, run)

    # 2. Clean the disk, and see whether it has room.
    on_main_process(remove_half_written, run)
    on_main_process(check_disk, run, path)

    # 3. Load.
    state = load(run, path) if path else None

    # 4. Set aside what was written after the checkpoint.
    lines_are_lost = move_aside(run, path, state)

    # 5. Start.
    on_main_process(record.write, run.accelerator, run.args)  # `run.yaml`, `environment.json`
    run.best = on_main_process(best.restored, run)  # the one that was loaded, if it is still here
    best.count_patience(run)  # a run that had stopped early stops again
    run.metrics.start()
    if path:
        save_again_if_needed(run, path, lines_are_lost)
    return run.extra


def find_checkpoint(run: Run) -> Path | None:
    """Finds the checkpoint that `--resume` names; with `auto` the newest whole one of this run.

    Prints which ones are passed over, and why. Returns None if the run begins at 0. For the main
    process.

    Raises:
        SystemExit: the checkpoint that `--resume` names cannot be used; another version of
            `common` wrote it; for `auto` see `refuse_to_start_over`.
    """
    folders.put_back(run.checkpoints)  # a whole one that a killed run was replacing
    if run.args.resume == "never":
        return None
    if run.args.resume == "auto":
        candidates = folders.by_step(run.checkpoints)[::-1]
    else:
        candidates = [Path(run.args.resume)]
    for path in candidates:
        fault = folders.fault_of(path) or fault_of_state(path)
        if fault is None:
            return path
        run.accelerator.print(f"passed over {path}: {fault}")
    if run.args.resume != "auto":
        sys.exit(f"--resume {run.args.resume}: it cannot be used, see above")
    refuse_to_start_over(run, candidates)
    run.accelerator.print(f"no checkpoint in {run.checkpoints}: starting from the beginning")
    return None


def refuse_to_start_over(run: Run, passed_over: list[Path]) -> None:
    """Refuses `--resume auto` unless the run may begin at 0: it has no checkpoint and no actor.

    Args:
        passed_over: the checkpoints that cannot be used.

    Raises:
        SystemExit: the folder has checkpoints, but none that can be used; or it has none, but the
            final actor, so the run has ended.
    """
    # Renamed copies are no candidates, but they show that the run is not new.
    unusable = passed_over or list(run.checkpoints.glob("global_step_*"))
    if unusable:
        sys.exit(
            f"--resume auto: of {counted(len(unusable), 'checkpoint')} none is whole "
            "and named as written; to start from the beginning take another --output_dir"
        )
    if (run.output_dir / "actor").exists():
        sys.exit(f"--resume auto: the run in {run.output_dir} has ended and left no checkpoint")


def remove_half_written(run: Run) -> None:
    """Removes what a killed run left of checkpoints that it was writing or replacing.

    For the main process, after `find_checkpoint` has put back a whole one that was being replaced.
    """
    for leftover in run.checkpoints.glob(".global_step_*"):
        shutil.rmtree(leftover)


def check_disk(run: Run, resumes_from: Path | None = None) -> None:
    """Refuses a run if the disk has no room for what it will save.

    With `--save_steps` these are checkpoints, else it is the actor. For the main process.
    """
    folder = run.output_dir
    if run.args.save_steps:
        if run.checkpoints.exists():  # maybe a link to another disk
            folder = run.checkpoints
        number = checkpoints_to_come(run, resumes_from)
        saved = lora.count_saved_parameters(run.unwrapped)
        each_gib = (saved * BYTES_PER_PARAMETER + BYTES_BESIDES) / GIB
        needed_gib = number * each_gib
        what = f"{counted(number, 'checkpoint')} of up to {each_gib:.3g} GiB"
    else:
        needed_gib = actor.size_of(run.unwrapped, run.args.save_dtype) / GIB
        what = f"the actor of {needed_gib:.3g} GiB"
    free_gib = shutil.disk_usage(folder).free / GIB
    if free_gib < needed_gib:
        sys.exit(f"{folder} has {free_gib:.3g} GiB free, too little for {what}")


def checkpoints_to_come(run: Run, resumes_from: Path | None) -> int:
    """Returns how many checkpoints the disk must still have room for; at least one.

    With `--save_total_limit 0` it is one: the user may remove some meanwhile. With a limit it is
    the smaller of

        n_allowed    the limit, and one more while the next is written, less those that are there
        n_due        those that are due in the whole run, less those that were made
    """
    if run.args.save_total_limit == 0:
        return 1
    interval = max(run.progress.updates_in(run.args.save_steps), 1)
    n_there = 0
    n_made = 0
    if resumes_from:  # later checkpoints are moved aside
        resume_step = folders.read_json(resumes_from / "state.json")["progress"]["global_step"]
        saved_steps = [folders.step_of(path) for path in folders.by_step(run.checkpoints)]
        n_there = sum(step <= resume_step for step in saved_steps)
        n_made = resume_step // interval - 1  # the last of them may be saved again
    n_allowed = run.args.save_total_limit + 1 - n_there
    n_due = math.ceil(run.progress.total_steps / interval) - n_made
    return max(min(n_allowed, n_due), 1)


def move_aside(run: Run, path: Path | None, state: dict | None) -> bool:
    """Moves aside what the folder holds beyond the resume point, see `left_behind.leave`.

    For example, a run that is resumed at update 20 and was killed at update 27 leaves the lines of
    updates 21 to 27 and a checkpoint of update 25.

    All processes must call it.

    Args:
        path, state: the checkpoint that the run resumes from; None if it begins at 0.

    Returns:
        Whether log lines up to that point are lost.
    """
    step = None
    log_bytes = {}
    if path is not None:
        step = run.progress.global_step
        if is_own(run, path):  # one from another folder counts the lines of that folder
            log_bytes = state["log_bytes"]
    return distributed.on_main_process(
        run.accelerator, left_behind.leave, run.output_dir, step, log_bytes
    )


def save_again_if_needed(run: Run, path: Path, lines_are_lost: bool) -> None:
    """Makes sure that the next `--resume auto` finds what this run resumed from.

        the checkpoint is in                   then
        the run's own folder                   it is this run's last one
        the run's own folder, lines are lost   it is saved again: its `log_bytes` count lost lines
        another folder                         it is saved here, if `--save_steps` is not 0

    Args:
        path: the checkpoint that the run resumed from.
        lines_are_lost: what `move_aside` returned.
    """
    if is_own(run, path) and not lines_are_lost:
        run.last_saved = run.progress.global_step
    elif is_own(run, path) or run.args.save_steps:
        save(run)


def is_own(run: Run, path: Path) -> bool:
    """Whether a checkpoint is in the folder that the run itself saves to."""
    return path.parent.resolve() == run.checkpoints.resolve()


# ============================================================ saving


def save(run: Run) -> None:
    """Writes `checkpoints/global_step_...`, then deletes the oldest ones.

    All processes must call it.

    Raises:
        SystemExit: it could not be written, for example because the disk is full. What was written
            of it is removed, at the latest by the next resume. Earlier ones are untouched.
    """
    step = run.progress.global_step
    if run.last_saved == step:
        # This step is saved already, for example when a signal arrives right after. Skipped updates
        # and rollouts without an update since then are not in it. The resumed run repeats them.
        return
    final = run.checkpoints / f"global_step_{step:06d}"
    temporary = run.checkpoints / f".{final.name}.writing"
    earlier = folders.by_step(run.checkpoints)
    try:
        with run.metrics.timed("paused"):
            write(run, temporary, final)
    except Exception as error:
        if not errors.is_of_disk(error) and not isinstance(error, RuntimeError):  # torch's
            raise
        why = errors.why_not_written(error, run.output_dir)
        # Only the main process removes the folder. Another one might do so while it is renamed.
        if run.accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
        way_on = "This folder has none before it."
        if earlier:
            way_on = f"--resume auto goes on from {earlier[-1].name}."
        sys.exit(f"{final} could not be written: {why}. {way_on}")
    run.last_saved = step


def write(run: Run, temporary: Path, final: Path) -> None:
    """Writes a checkpoint to `temporary` and renames it to `final`."""
    accelerator = run.accelerator
    # All processes write their parts of the engine's state, and their own state.
    engine_state.save(run, temporary / "engine")  # it makes both folders
    if run.per_process is not None:
        torch.save(run.per_process, per_process_file(temporary, accelerator.process_index))

    # The main process writes what all have alike; all help to collect it.
    ahead = run.servers.state(run) if run.servers is not None else None
    state = state_besides_engine(run)
    if accelerator.is_main_process:
        torch.save(run.extra, temporary / "extra.pt")
        if ahead is not None:
            torch.save(ahead, temporary / AHEAD)
        (temporary / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    # This also waits until every process has written its files.
    actor.save_all(run, temporary)

    # Every process flushes everything: each node holds back what was written on it.
    folders.flush(*temporary.rglob("*"), temporary)
    own_entries = folders.describe_files(
        temporary, share=accelerator.process_index, shares=accelerator.num_processes
    )
    entries = {}
    for part in gather_object([own_entries]):
        entries.update(part)
    if accelerator.is_main_process:
        folders.write_manifest(temporary, entries)
        # The state counts their bytes: after a power failure they must be on the disk, too.
        logs = [file for file in logs_of(run) if file.exists()]
        folders.flush(*logs, run.output_dir)
        folders.replace(temporary, final, run.args.save_total_limit)
    accelerator.wait_for_everyone()


def logs_of(run: Run) -> list[Path]:
    """Returns the files of lines that grow with a run."""
    return [run.metrics.file, run.output_dir / transcript.FILE]


def per_process_file(folder: Path, process_index: int) -> Path:
    """Returns the file in which a checkpoint holds one process's state, see `Run.per_process`."""
    return folder / f"own_{process_index}.pt"


# ============================================================ the end of a run


def stop_if_asked(run: Run) -> None:
    """Saves a checkpoint and ends the run if any process got a signal, or has lost its launcher.

    All processes must call it, after each update. After the last one it also calls
    `save_end_if_resumable`.

    Raises:
        SystemExit: with 128 plus the signal's number, or that of SIGHUP if the launcher is gone.
    """
    number = stopping.signal_of_any(run)
    if number == 0:
        if run.progress.finished:
            save_end_if_resumable(run)
        return
    save(run)
    run.metrics.bar.close()
    run.accelerator.print(
        f"stopped by {stopping.cause_of(number)} after update {run.last_saved}, "
        f"saved in {run.checkpoints}: go on with --resume auto"
    )
    sys.exit(128 + number)


def save_end_if_resumable(run: Run) -> None:
    """Saves the end of a run that has a checkpoint, although it does not save by `--save_steps`.

    Usually a signal had stopped it, which saved that checkpoint, and it was resumed. If that stayed
    the last one, `--resume auto` would repeat all updates since then.
    """
    has_checkpoint = run.last_saved is not None
    if has_checkpoint and not run.args.save_steps:
        save(run)


# ============================================================ what `state.json` holds


def state_besides_engine(run: Run) -> dict:
    """Returns the content of `state.json`: what the engine does not save.

    `open_sums` has the sums of the log line not yet written, separately for each process: summing
    them now would change the rounding, and so the log. All processes must call it.
    """
    return {
        "format": FORMAT,
        "arguments": identity_of(run),
        "progress": {name: getattr(run.progress, name) for name in COUNTERS},
        "best": dataclasses.asdict(run.best),
        "scheduler": run.scheduler.state_dict(),
        "last_update": run.metrics.last_update,
        "log_bytes": {file.name: size_of(file) for file in logs_of(run)},
        "open_sums": gather_object([run.metrics.open.state()]),
    }


def identity_of(run: Run) -> dict:
    """Returns what must be the same in a run and in the checkpoint that it resumes from.

    Arguments that may change are in it, too; `refuse_another_run` skips them.
    """
    template = str(getattr(run.tokenizer, "chat_template", None)).encode()
    return {
        **vars(run.args),
        **run.models,
        # The content of the template counts, not the name of its file.
        "chat_template": hashlib.sha256(template).hexdigest()[:16],
        "date": getattr(run.tokenizer, "chat_date", None),
        "data": run.data.fingerprint,
        "world": world_of(run.accelerator),
    }


def world_of(accelerator) -> str:
    """Returns what the engine's state in a checkpoint depends on, besides the model.

    Unsharded, that is the precision alone: `bf16`. Shards fit only the same engine, device and
    number of processes, so these are named, too: `DeepSpeed ZeRO-2 fp16 on cuda with 8 processes`.
    """
    if not engine.is_sharded(accelerator):
        return accelerator.mixed_precision
    return f"{engine.describe(accelerator)} with {accelerator.num_processes} processes"


def size_of(file: Path) -> int:
    """Returns the bytes of a file; 0 if it is not there."""
    return file.stat().st_size if file.exists() else 0


def fault_of_state(path: Path) -> str | None:
    """Returns what keeps a checkpoint's `state.json` from being used; None if nothing does.

    Raises:
        SystemExit: another version of `common` wrote it.
    """
    try:
        state = read_state(path)
        missing = STATE - state.keys() or set(COUNTERS) - state["progress"].keys()
    except (OSError, ValueError, AttributeError) as error:
        return f"state.json cannot be used: {type(error).__name__}: {error}"
    return f"state.json lacks {', '.join(sorted(missing))}" if missing else None


def read_state(path: Path) -> dict:
    """Returns the content of a checkpoint's `state.json`.

    Raises:
        SystemExit: another version of `common` wrote it.
    """
    state = folders.read_json(path / "state.json")
    if state.get("format") != FORMAT:
        sys.exit(
            f"--resume: {path} was written by another version of `common`: resume it with that"
        )
    return state


# ============================================================ loading


def load(run: Run, path: Path) -> dict:
    """Reads a whole checkpoint into the run and returns its `state.json`.

    Raises:
        SystemExit: the run that wrote it had other data or settings, or its shards do not fit this
            engine or number of processes, see `world_of`.
    """
    state = read_state(path)
    refuse_another_run(run, path, state["arguments"])

    # 1. What the engine holds.
    engine_state.load(run, path / "engine")
    processes_before = len(state["open_sums"])
    if processes_before == run.accelerator.num_processes:
        # Each process loads its own random state. If one cannot, all exit.
        restore = partial(engine_state.load_random_states, run, path / "engine")
        distributed.all_or_none(run.accelerator, True, restore)

    # 2. What `state.json` holds.
    load_schedule(run, state["scheduler"])
    note_new_horizon(run, state)
    for name in COUNTERS:
        setattr(run.progress, name, state["progress"][name])
    run.best = best.of_checkpoint(run, state)
    run.metrics.last_update = state["last_update"]
    load_open_sums(run, state["open_sums"])

    # 3. What the recipe holds.
    run.extra = read_tensors(run, path / "extra.pt")
    if run.servers is not None and (path / AHEAD).exists():
        run.servers.load_state(torch.load(path / AHEAD, weights_only=True))
    load_per_process(run, path)
    run.accelerator.print(
        f"resumed from {path}: {run.progress.global_step} updates, "
        f"{run.progress.skipped_steps} skipped"
    )
    return state


def read_tensors(run: Run, file: Path) -> Any:
    """Reads a file of `torch.save` onto this process's device; what was on the CPU stays there."""

    def place(storage, location: str):  # as `torch.load` asks of `map_location`
        if location == "cpu":
            return storage
        return storage.to(device=run.accelerator.device)

    return torch.load(file, weights_only=True, map_location=place)


def load_per_process(run: Run, path: Path) -> None:
    """Reads the state of this process, see `Run.per_process`.

    Raises:
        SystemExit: the checkpoint has no such state, or that of another number of processes, whose
            shards differ.
    """
    if run.per_process is None:
        return
    accelerator = run.accelerator
    files = list(path.glob("own_*.pt"))
    if not files:
        sys.exit(
            f"--resume: {path} holds no state of single processes (Run.per_process), which this "
            "recipe needs"
        )
    same_number = len(files) == accelerator.num_processes
    if not same_number and engine.is_sharded(accelerator):
        sys.exit(
            f"--resume: {path} holds the state of {len(files)} processes (Run.per_process), now "
            f"there are {accelerator.num_processes}, and {engine.describe(accelerator)} would "
            "shard it differently"
        )
    index = accelerator.process_index if same_number else 0  # unsharded, all have the same
    run.per_process = read_tensors(run, per_process_file(path, index))


def refuse_another_run(run: Run, path: Path, before: dict) -> None:
    """Ends the program if the checkpoint at `path` belongs to another run.

    Args:
        before: what `identity_of` returned for the run that wrote it.

    Raises:
        SystemExit: with all differences.
    """
    now = identity_of(run)
    may_change = arguments.MAY_CHANGE | run.args.may_change
    # An argument that is newer than the checkpoint is not compared.
    changed = [name for name in before if name not in may_change and now.get(name) != before[name]]
    if not changed:
        return
    differences = "; ".join(
        f"{name}: {before[name]!r} in the checkpoint, {now.get(name)!r} now" for name in changed
    )
    way_out = ""
    if "world" in changed and engine.is_sharded(run.accelerator):
        way_out = " (under DeepSpeed and FSDP2 a resume needs the same number of processes)"
    sys.exit(f"--resume: {path} belongs to another run: {differences}{way_out}")


def load_schedule(run: Run, state: dict) -> None:
    """Restores the scheduler's counters, and computes the learning rates of the next update anew.

    The rates in the checkpoint, of the scheduler and of the optimizer, are not used: `--max_steps`
    or `--max_epochs` may have changed.
    """
    scheduler = run.scheduler
    groups = run.optimizer.param_groups
    # DeepSpeed's Adam for CPUs has other groups since it was loaded. The scheduler must set these.
    scheduler.optimizer.param_groups = groups
    scheduler.load_state_dict(state)  # not the functions in `lr_lambdas`, which stay this run's
    updates_applied = scheduler.last_epoch
    learning_rates = [
        base_rate * share_of_peak(updates_applied)
        for base_rate, share_of_peak in zip(scheduler.base_lrs, scheduler.lr_lambdas)
    ]
    scheduler._last_lr = learning_rates  # what `get_last_lr` returns
    for group, learning_rate in zip(groups, learning_rates):
        group["lr"] = learning_rate


def note_new_horizon(run: Run, state: dict) -> None:
    """Prints that the schedule is longer or shorter than that of the checkpoint, if it is."""
    before = state["arguments"]
    updates_before = before["max_steps"] or before["max_epochs"] * run.progress.updates_per_epoch
    updates = run.progress.total_steps
    if updates == updates_before:
        return
    rate_before = state["scheduler"]["_last_lr"][0]
    rate = run.scheduler.get_last_lr()[0]
    change = "as before" if rate == rate_before else f"not {rate_before:.3g}"
    run.accelerator.print(
        f"NOTE: the schedule has {updates} updates now, and {updates_before} in the checkpoint: "
        f"the learning rate is {rate:.3g}, {change}"
    )


def load_open_sums(run: Run, sums_by_process: list[dict[str, list]]) -> None:
    """Restores the sums of the log line that was still open when the checkpoint was written.

    Each process takes the sums that it had. If the number of processes has changed, the first one
    takes them all; the data order still continues exactly, but random states do not.

    Args:
        sums_by_process: what `Means.state` returned in each process that wrote the checkpoint.
    """
    accelerator = run.accelerator
    processes_before = len(sums_by_process)
    same_number = processes_before == accelerator.num_processes
    for writer, sums in enumerate(sums_by_process):
        reader = writer if same_number else 0
        run.metrics.open.load_state(sums, mine=accelerator.process_index == reader)
    if not same_number:
        accelerator.print(
            f"NOTE: {processes_before} processes before, {accelerator.num_processes} now: "
            "random numbers, such as those of dropout, do not continue"
        )
