"""Checkpoints: what they hold, how they are written, and how a run resumes from one."""

import functools
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
from accelerate.utils import DistributedType, gather_object, set_seed
from accelerate.utils.constants import RNG_STATE_NAME
from safetensors import SafetensorError

from common import (
    actor,
    arguments,
    distributed,
    engine,
    folders,
    launch,
    left_behind,
    record,
    transcript,
)
from common.models import lora
from common.run import Run

# The counters of `Progress` that a checkpoint holds; it derives the others from these.
COUNTERS = ("global_step", "skipped_steps", "samples", "tokens", "sequences")
# The number of the layout of checkpoints: another one is refused.
FORMAT = 2
# At most: weights 4, fp32 masters 4, Adam's two moments 8, the actor 4.
BYTES_PER_PARAMETER = 20
BYTES_BESIDE = 20e6  # tokenizer, random states
# A launcher passes on a signal that its processes may have got already. Only what comes later than
# this many seconds after the first one is a second signal.
SAME_SIGNAL_SECONDS = 3


def carried(dataclass: type) -> type:
    """Lets checkpoints hold the objects of a dataclass in `Run.extra` and `Run.own`.

    They are read without running code, so torch wants to know by name what it may make.
    """
    torch.serialization.add_safe_globals([dataclass])
    return dataclass


def identity_of(run: Run) -> dict:
    """Returns what must equal the checkpoint's, except arguments that may change.

    `world` is the precision; for an engine that shards its state it is the engine, the precision,
    the device and the number of processes.
    """
    accelerator = run.accelerator
    world = accelerator.mixed_precision
    if engine.is_sharded(accelerator):
        world = f"{engine.describe(accelerator)} with {accelerator.num_processes} processes"
    template = str(getattr(run.tokenizer, "chat_template", None)).encode()
    return {
        **vars(run.args),
        **run.models,
        # The file's content counts, not its name.
        "chat_template": hashlib.sha256(template).hexdigest()[:16],
        "date": getattr(run.tokenizer, "chat_date", None),
        "data": run.data.fingerprint,
        "world": world,
    }


# ============================================================ saving


def save(run: Run) -> None:
    """Writes `checkpoints/global_step_...`, then deletes the oldest ones.

    All processes must call it.

    Raises:
        SystemExit: it could not be written, for example because the disk is full. What was written
            of it is removed; the checkpoints before it are untouched.
    """
    step = run.progress.global_step
    if run.last_saved == step:
        # A signal came after this checkpoint. Updates skipped since then will be skipped again.
        return
    final = run.checkpoints / f"global_step_{step:06d}"
    temporary = run.checkpoints / f".{final.name}.writing"
    earlier = folders.by_step(run.checkpoints)
    try:
        with run.metrics.timed("paused"):
            write(run, temporary, final)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises RuntimeError
        # Only the main process removes it: another process might delete it while the main process
        # renames it.
        if run.accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
        way_on = "There is none before it."
        if earlier:
            way_on = f"--resume auto goes on from {earlier[-1].name}."
        sys.exit(f"{final} could not be written: {str(error)[:200]}. {way_on}")
    run.last_saved = step


def write(run: Run, temporary: Path, final: Path) -> None:
    """Writes a checkpoint to `temporary` and renames it to `final`."""
    accelerator = run.accelerator
    choose_engine_state(run)
    settings = {}
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        settings["exclude_frozen_parameters"] = lora.has_adapter(run.unwrapped)
    accelerator.save_state(str(temporary / "engine"), **settings)  # it makes the folder
    if run.own is not None:
        torch.save(run.own, own_file(temporary, accelerator.process_index))
    state = state_beside_engine(run)
    if accelerator.is_main_process:
        torch.save(run.extra, temporary / "extra.pt")
        (temporary / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    # This also waits until every process has written its files.
    actor.save(run, temporary / "actor", beside=run.beside_actor)

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
        # The state counts their bytes. After a power failure they must be there as it is.
        logs = [file for file in logs_of(run) if file.exists()]
        folders.flush(*logs, run.checkpoints.parent)
        folders.replace(temporary, final, run.args.save_total_limit)
    accelerator.wait_for_everyone()


def logs_of(run: Run) -> tuple[Path, Path]:
    """Returns the files of lines that grow with a run."""
    return run.metrics.file, run.metrics.output_dir / transcript.FILE


def own_file(folder: Path, process_index: int) -> Path:
    """Where a checkpoint holds what one process alone carries, see `Run.own`."""
    return folder / f"own_{process_index}.pt"


def state_beside_engine(run: Run) -> dict:
    """Returns the content of `state.json`: what the engine does not save.

    `open_sums` has the sums of the log line not yet written, separately for each process: summing
    them now would change the rounding, and so the log. All processes must call it.
    """
    metrics = run.metrics
    log, samples = logs_of(run)
    return {
        "format": FORMAT,
        "arguments": identity_of(run),
        "progress": {name: getattr(run.progress, name) for name in COUNTERS},
        "scheduler": run.scheduler.state_dict(),
        "last_update": metrics.last_update,
        "metrics_bytes": size_of(log),
        "samples_bytes": size_of(samples),
        "open_sums": gather_object([metrics.open.state()]),
    }


def size_of(file: Path) -> int:
    """Returns the bytes of a file; 0 if it is not there."""
    return file.stat().st_size if file.exists() else 0


def read_state(path: Path) -> dict:
    """Returns the content of a checkpoint's `state.json`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not what `state_beside_engine` returns. The manifest does not tell that:
            it finds what storage damages, not what somebody has written anew.
    """
    state = folders.read_json(path / "state.json")
    for name in ("arguments", "progress", "scheduler", "last_update"):
        check_kind(state, name, dict)
    check_kind(state, "open_sums", list)
    for name in ("base_lrs", "lr_lambdas"):
        check_kind(state["scheduler"], name, list)
    # Older runs wrote no samples, and did not count sequences.
    counts = {"samples_bytes": 0, "sequences": 0, **state, **state["progress"]}
    counts["last_epoch"] = state["scheduler"].get("last_epoch")
    for name in ("metrics_bytes", "samples_bytes", "last_epoch", *COUNTERS):
        check_kind(counts, name, int)
        if counts[name] < 0:
            raise ValueError(f"{name} is {counts[name]}")
    processes = state["open_sums"]
    if not processes or not all(isinstance(sums, dict) for sums in processes):
        raise ValueError("open_sums are not those of each process")
    for sums in processes:
        for name in sums:
            check_kind(sums, name, list)
            if len(sums[name]) != 3 or not all(isinstance(x, float | int) for x in sums[name][1:]):
                raise ValueError(f"the sums of {name} are {sums[name]}")
    return state


def check_kind(values: Any, name: str, kind: type) -> None:
    """Raises a ValueError if a JSON value is no object with a member of this name and kind."""
    found = values.get(name) if isinstance(values, dict) else None
    if not isinstance(found, kind):
        raise ValueError(f"{name} is {str(found)[:40]}, not of the type {kind.__name__}")


def choose_engine_state(run: Run) -> None:
    """Makes accelerate save and load the trained model alone, and no frozen one.

    Of a model with adapters these are the adapters alone; DeepSpeed needs its engine for that, too.
    Names are without DDP's `module.`, so that another number of processes can load them.
    """
    engine.reshard(run.model)
    if run.accelerator.distributed_type == DistributedType.DEEPSPEED:
        saved = run.model
    elif lora.has_adapter(run.unwrapped):
        saved = lora.trained_part(run.unwrapped)
    elif engine.is_sharded(run.accelerator):
        saved = run.model
    else:
        saved = run.unwrapped
    run.accelerator._models = [saved]


# ============================================================ stopping


# Each ends a run after its update.
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Stands for a launcher that is gone. The number is the smallest, so that a signal counts before it.
LAUNCHER_GONE = signal.SIGHUP


def install_signals(run: Run) -> None:
    """Makes SIGTERM, SIGINT and SIGUSR1 end the run after its update, with a checkpoint.

    `stop_if_asked` then saves it. A second signal ends the run at once.
    """

    def handle(number: int, _frame) -> None:
        if run.stop_signal == 0:
            run.signalled_at = time.monotonic()
        elif time.monotonic() - run.signalled_at > SAME_SIGNAL_SECONDS:
            os._exit(128 + number)
        run.stop_signal = number

    for number in STOPPING:
        signal.signal(number, handle)
    keep_handlers_from_forks()


@functools.cache
def keep_handlers_from_forks() -> None:
    """Gives processes that a reward function forks from now on signals of their own.

    SIGTERM and SIGUSR1 end them at once. They ignore Ctrl-C, which reaches them, too: the update
    still needs them. They must not inherit the run's handler: Python runs a handler only between
    two of its instructions. A worker that got SIGTERM just before it waits for a lock would never
    end, and neither would its pool. A signal that comes during the fork waits until it is over.
    """

    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

    def become_ordinary() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=become_ordinary)


def stop_if_asked(run: Run) -> None:
    """Saves a checkpoint and ends the run if any process got a signal, or has lost its launcher.

    All processes must call it, after each update.

    Raises:
        SystemExit: with 128 plus the signal's number; without a launcher with that of SIGHUP.
    """
    number = run.stop_signal
    if number == 0 and launch.launcher_is_gone():
        number = LAUNCHER_GONE
    own_signal = torch.tensor(int(number), device=run.accelerator.device)
    number = int(run.accelerator.reduce(own_signal, "max"))
    if number == 0:
        return
    save(run)
    run.metrics.bar.close()
    cause = signal.Signals(number).name
    if number == LAUNCHER_GONE:
        cause = "the end of its launcher"
    run.accelerator.print(
        f"stopped by {cause} after update {run.last_saved}, "
        f"saved in {run.checkpoints}: go on with --resume auto"
    )
    sys.exit(128 + number)


# ============================================================ resuming


def begin(run: Run) -> None:
    """Puts a run where `--resume` says: at a checkpoint, or at the start.

    It also does what every run needs before its first update: it seeds, checks the disk, listens to
    signals, records the run, opens the log. All processes must call it.

    Raises:
        SystemExit: the disk is too small; there are checkpoints but none is whole; the one to take
            is of another run.
    """
    choose_engine_state(run)  # this also frees a reference model that is no longer needed
    # The models were made alike on all processes. From here on, dropout differs between them.
    set_seed(run.args.seed, device_specific=True)
    path = None
    if run.args.resume != "never":
        path = distributed.on_main_process(run.accelerator, find_checkpoint, run)
    distributed.on_main_process(run.accelerator, check_disk, run, path)
    install_signals(run)

    state = None
    if path:
        state = load(run, path)
        if path.parent.resolve() == run.checkpoints.resolve():
            run.last_saved = run.progress.global_step
    lost = leave_behind(run, state)
    distributed.on_main_process(run.accelerator, record.write, run.accelerator, run.args)
    run.metrics.start()

    came_from_elsewhere = path is not None and run.last_saved is None
    if lost:
        run.last_saved = None  # it is written again, with the bytes that its logs have now
    if lost or (came_from_elsewhere and run.args.save_steps):
        # If the checkpoint is in another run's folder, this run saves one of its own at once: if it
        # were killed before its first, --resume auto would start it anew.
        save(run)


def check_disk(run: Run, resumes_from: Path | None = None) -> None:
    """Refuses a run whose checkpoints, or whose actor at the end, will not fit on the disk.

    Before it measures, it removes what a killed run left half written. The disk must hold the
    checkpoints that the run keeps, and one more while that is written. Those later than the one
    that it resumes from stay on the disk, too, but do not count as kept.
    """
    for leftover in run.checkpoints.glob(".global_step_*"):
        shutil.rmtree(leftover)
    free_gib = shutil.disk_usage(run.args.output_dir).free / 2**30
    if not run.args.save_steps:
        actor_gib = actor.size_of(run.unwrapped, run.args.save_dtype) / 2**30
        if free_gib < actor_gib:
            sys.exit(
                f"{run.args.output_dir} has {free_gib:.3g} GiB free, too little for the actor of "
                f"{actor_gib:.3g} GiB"
            )
        return
    saved = lora.count_saved_parameters(run.unwrapped)
    most_gib = (saved * BYTES_PER_PARAMETER + BYTES_BESIDE) / 2**30
    there = folders.by_step(run.checkpoints)
    if resumes_from:
        step = folders.read_json(resumes_from / "state.json")["progress"]["global_step"]
        there = [path for path in there if folders.step_of(path) <= step]
    still_to_come = max(run.args.save_total_limit + 1 - len(there), 1)
    if free_gib < still_to_come * most_gib:
        sys.exit(
            f"{run.args.output_dir} has {free_gib:.3g} GiB free, too little for {still_to_come} "
            f"checkpoints of up to {most_gib:.3g} GiB"
        )


def find_checkpoint(run: Run) -> Path | None:
    """Finds the checkpoint that `--resume` names; with `auto` the newest whole one of this run.

    Prints which ones are passed over, and why. Returns None if `auto` finds that none was ever
    written.

    Raises:
        SystemExit: there are checkpoints but none is whole; the run has ended and left none.
    """
    if run.args.resume == "auto":
        folders.put_back(run.checkpoints)
        candidates = folders.by_step(run.checkpoints)[::-1]
    else:
        candidates = [Path(run.args.resume)]
    for path in candidates:
        fault = folders.fault_of(path) or fault_of_state(path)
        if fault is None:
            return path
        run.accelerator.print(f"passed over {path}: {fault}")

    # A copy under another name is not taken, but it tells that this run is not new.
    found = candidates or list(run.checkpoints.glob("global_step_*"))
    if found:
        sys.exit(
            f"--resume {run.args.resume}: none of the {len(found)} checkpoints is whole and named "
            "as written; to start anew take another --output_dir"
        )
    if (run.output_dir / "actor").exists():
        sys.exit(f"--resume auto: the run in {run.output_dir} has ended and left no checkpoint")
    run.accelerator.print(f"no checkpoint in {run.checkpoints}: starting from the beginning")
    return None


def fault_of_state(path: Path) -> str | None:
    """Says what keeps a checkpoint's `state.json` from being used; None if nothing does."""
    try:
        read_state(path)
    except (OSError, ValueError) as error:
        return f"state.json cannot be used: {error}"
    return None


def leave_behind(run: Run, state: dict | None) -> bool:
    """Moves what lies beyond the resume point to `<output_dir>/left_behind/`, and says so.

    Checkpoints, actors and log lines beyond that point belong to the abandoned run. If the run
    starts at 0, that is all of them. Only log lines that will be written again are cut. All
    processes must call it.

    Args:
        state: the `state.json` that the run resumes from; None if it starts from the beginning.

    Returns:
        whether log lines from before that point are lost, which is said.
    """
    now = digest_of_lines(identity_of(run), run.accelerator.num_processes)
    return distributed.on_main_process(run.accelerator, leave_behind_on_main, run, state, now)


def leave_behind_on_main(run: Run, state: dict | None, now: str) -> bool:
    """See `leave_behind`."""
    output_dir = run.output_dir
    step = None
    metrics_bytes = 0
    samples_bytes = 0
    writers = left_behind.read_writers(output_dir) or []
    if state is not None:
        step = run.progress.global_step
        if run.last_saved is not None:  # else it is a checkpoint of another folder
            metrics_bytes = state["metrics_bytes"]
            samples_bytes = state["samples_bytes"]
        if not writers:
            wrote_it = digest_of_lines(state["arguments"], processes=len(state["open_sums"]))
            writers = [[0, wrote_it]]
    lost = left_behind.lost_lines(dict(zip(logs_of(run), (metrics_bytes, samples_bytes))))
    try:
        said = left_behind.leave(
            output_dir,
            step,
            metrics_bytes,
            samples_bytes,
            writers,
            now,
        )
    except OSError as error:
        sys.exit(
            f"what lies beyond the resume point cannot be moved to {output_dir}/left_behind: "
            f"{error}. It is all there still: go on with --resume auto"
        )
    for line in filter(None, (lost, said)):
        print(line, flush=True)
    return lost is not None


def digest_of_lines(identity: dict, processes: int) -> str:
    """Stands for all that decides the lines of `metrics.jsonl`, to the last digit."""
    decides = {
        name: value for name, value in identity.items() if name not in arguments.NOT_IN_LINES
    }
    return left_behind.digest({**decides, "processes": processes})


def load(run: Run, path: Path) -> dict:
    """Reads a whole checkpoint into the run and returns its `state.json`.

    Raises:
        SystemExit: it is of other data, of other settings, or of a world whose state this one
            cannot load.
    """
    state = read_state(path)
    if state.get("format") != FORMAT:
        sys.exit(
            f"--resume: {path} was written by another version of `common`: resume it with that"
        )
    refuse_another_run(run, path, state["arguments"])
    load_engine(run, path / "engine")
    if len(state["open_sums"]) == run.accelerator.num_processes:
        distributed.all_or_none(run.accelerator, True, load_random_states, run, path / "engine")
    load_schedule(run, state["scheduler"])
    for name in COUNTERS:
        setattr(run.progress, name, state["progress"][name])
    run.metrics.last_update = state["last_update"]
    run.extra = read_tensors(run, path / "extra.pt")
    load_own(run, path)
    load_open_sums(run, state["open_sums"])
    run.accelerator.print(
        f"resumed from {path}: {run.progress.global_step} updates, "
        f"{run.progress.skipped_steps} skipped"
    )
    return state


def read_tensors(run: Run, file: Path) -> Any:
    """Reads tensors onto this process's own device; those that were on the CPU stay there."""

    def place(storage, location: str):
        if location == "cpu":
            return storage
        return storage.to(device=run.accelerator.device)

    return torch.load(file, weights_only=True, map_location=place)


def load_own(run: Run, path: Path) -> None:
    """Reads what this process alone carries; see `Run.own`.

    Raises:
        SystemExit: the checkpoint at `path` has none, or is of another number of processes and
            each has a part of its own.
    """
    if run.own is None:
        return
    accelerator = run.accelerator
    files = list(path.glob("own_*.pt"))
    if not files:
        sys.exit(
            f"--resume: {path} holds no running values of each process, which this recipe needs"
        )
    index = accelerator.process_index
    if len(files) != accelerator.num_processes:
        if engine.is_sharded(accelerator):
            sys.exit(
                f"--resume: {path} holds the running values of {len(files)} processes, now there "
                f"are {accelerator.num_processes}: {engine.describe(accelerator)} cuts them anew"
            )
        index = 0  # where nothing is sharded all have the same
    run.own = read_tensors(run, own_file(path, index))


def refuse_another_run(run: Run, path: Path, before: dict) -> None:
    """Ends the program if the checkpoint at `path` is not of this run.

    Args:
        before: the `identity` of the run that wrote it.

    Raises:
        SystemExit: with all differences.
    """
    now = identity_of(run)
    if before.get("world") == universal_world(now["world"]):
        now["world"] = before["world"]
    may_change = arguments.MAY_CHANGE | run.args.may_change
    # An argument that is newer than the checkpoint is not compared.
    changed = [name for name in before if name not in may_change and now.get(name) != before[name]]
    if not changed:
        return
    differences = "; ".join(
        f"{name}: {before[name]!r} in the checkpoint, {now.get(name)!r} now" for name in changed
    )
    way_out = ""
    if "world" in changed:
        way_out = " (common.export --universal is for another number of processes)"
    sys.exit(f"--resume: {path} is of another run: {differences}{way_out}")


def universal_world(world: str) -> str:
    """Returns the `world` of a universal checkpoint: no device and processes, which may differ.

    This is `DeepSpeed ZeRO-2 fp16` for `DeepSpeed ZeRO-2 fp16 on cuda with 8 processes`. Such
    checkpoints are made by `common/export.py`.
    """
    return world.partition(" on ")[0]


def load_engine(run: Run, folder: Path) -> None:
    """Loads what `accelerator.save_state` wrote: weights, optimizer, loss scale, random states.

    The settings of the optimizer's groups stay those of this run.

    Args:
        folder: `engine` in a checkpoint.
    """
    accelerator = run.accelerator
    settings_of_groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in run.optimizer.param_groups
    ]
    if engine.is_sharded(accelerator):
        accelerator.print(
            "NOTE: the state of DeepSpeed and FSDP2 is read as pickles, which can run code: "
            "resume from your own checkpoints only."
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        is_universal = (folder / "pytorch_model" / "zero").is_dir()  # see common/export.py
        run.model._config.load_universal_checkpoint = is_universal
        # A base is not in the checkpoint, see `Run.models`.
        strict = not lora.has_adapter(run.unwrapped)
        accelerator.load_state(str(folder), load_module_strict=strict)
    elif engine.is_sharded(accelerator):
        accelerator.load_state(str(folder))
    else:
        # Adam keeps its step counts on the CPU, unless it is fused. accelerate would load them onto
        # the GPU, and each update would wait to read them back, one for each parameter.
        accelerator.load_state(str(folder), map_location="cpu")

    # From a universal ZeRO-3 checkpoint DeepSpeed 0.19.8 gives all groups the settings of the first
    # one, and all parameters one step count that they share. So we set each group's own settings
    # again and give each parameter a count of its own.
    for group, settings in zip(run.optimizer.param_groups, settings_of_groups):
        group.update(settings)
    is_fused = run.optimizer.param_groups[0].get("fused")
    for parameter, moments in run.optimizer.state.items():
        step = moments.get("step")
        if torch.is_tensor(step):
            moments["step"] = step.clone()
            if is_fused:
                moments["step"] = moments["step"].to(parameter.device, torch.float32)


def load_random_states(run: Run, folder: Path) -> None:
    """Sets the random states of this process, once more: accelerate passes over any error there.

    Args:
        folder: `engine` in a checkpoint of as many processes.

    Raises:
        SystemExit: they cannot be read.
    """
    file = folder / f"{RNG_STATE_NAME}_{run.accelerator.process_index}.pkl"
    try:
        states = accelerate.utils.load(file)
        random.setstate(states["random_state"])
        np.random.set_state(states["numpy_random_seed"])
        torch.set_rng_state(states["torch_manual_seed"])
        # A run that comes from a CPU has none.
        if run.accelerator.device.type == "cuda" and "torch_cuda_manual_seed" in states:
            states_of_gpus = states["torch_cuda_manual_seed"]
            torch.cuda.set_rng_state(states_of_gpus[torch.cuda.current_device()])
    except Exception as error:  # whatever a pickle of other versions may raise
        cause = " ".join(str(error).partition(". ")[0].split())[:200]
        sys.exit(
            f"--resume: the random states in {file} cannot be read, so dropout would be drawn "
            f"otherwise ({type(error).__name__}: {cause}). Give --resume an older checkpoint"
        )


def load_schedule(run: Run, state: dict) -> None:
    """Puts the scheduler where it was, and sets the learning rates of the next update."""
    scheduler = run.scheduler
    # After loading, DeepSpeed's Adam for CPUs has new groups: the scheduler must set their rates.
    scheduler.optimizer.param_groups = run.optimizer.param_groups
    scheduler.load_state_dict(state)
    # --max_steps and --max_epochs may have changed. So the rates are those of the new horizon, not
    # those of the checkpoint.
    scheduler._last_lr = [
        base_rate * factor(scheduler.last_epoch)
        for base_rate, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)
    ]
    for group, learning_rate in zip(run.optimizer.param_groups, scheduler.get_last_lr()):
        group["lr"] = learning_rate


def load_open_sums(run: Run, sums_by_process: list[dict[str, list[float]]]) -> None:
    """Restores the sums of the log line that was not yet written when the checkpoint was.

    Each process takes the sums that it had. If the number of processes has changed, the first one
    takes them all; the data order still goes on exactly, but random states cannot.

    Args:
        sums_by_process: sum, count, minimum and maximum by name, of each process that wrote the
            checkpoint.
    """
    accelerator = run.accelerator
    processes_before = len(sums_by_process)
    same_number = processes_before == accelerator.num_processes
    for writer, sums in enumerate(sums_by_process):
        reader = writer if same_number else 0
        run.metrics.open.load_state(sums, mine=accelerator.process_index == reader)
    if not same_number:
        accelerator.print(
            f"note: {processes_before} processes before, {accelerator.num_processes} now: "
            "dropout, if any, is drawn anew"
        )
