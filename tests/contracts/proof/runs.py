"""The runs that several promises look at, and those that are killed or overflow."""

import re
from pathlib import Path

import pytest

from common import folders
from contracts.proof.bench import (
    BATCH,
    DROPOUT,
    RESPONSES,
    ROLLOUT,
    ROWS,
    SHORT_ROLLOUT,
    Bench,
    Changes,
    Finished,
    updates_in,
)
from runs import fp16_launcher

# A checkpoint at the end alone.
SAVED_AT_END: Changes = {"save_steps": 1000}
# Nothing moves, so every update meets the same weights.
NO_LEARNING: Changes = {"learning_rate": 0.0, "critic_learning_rate": 0.0}
# Checkpoints between log lines, and dropout, so that random states count. Only one checkpoint is
# kept: it must stay until the next one is whole.
INTERRUPTED: Changes = {
    "micro_train_batch_size": 2,
    "logging_steps": 4,
    "save_steps": 2,
    "save_total_limit": 1,
    "save_actor_steps": 2,
    "save_actor_limit": 1,
    "dropout": DROPOUT,
}
# Engines, and how many samples a micro-batch has under each.
ENGINES = {"zero1": 2, "zero2": 4, "zero3": 2, "fsdp2": 4}


def one_process(bench: Bench) -> Finished:
    """One process, one micro-batch an update."""
    return bench.run("1x16", **SAVED_AT_END)


def two_processes(bench: Bench) -> Finished:
    """Two processes, micro-batches of one sample: in an update of 1 or 11 one is a padding row."""
    return bench.run("2-processes", "ddp", micro_train_batch_size=1, **SAVED_AT_END)


def on_engine(bench: Bench, name: str) -> Finished:
    """Two processes under an engine of `ENGINES`."""
    return bench.run(name, name, micro_train_batch_size=ENGINES[name], **SAVED_AT_END)


def packed(bench: Bench) -> Finished:
    """One process with prompts shared."""
    return bench.run("packed", share_prompts=True, micro_train_batch_size=4, **SAVED_AT_END)


def uninterrupted(bench: Bench) -> Finished:
    """Two processes with dropout. Runs that are killed must end as this one does."""
    return bench.run("uninterrupted-ddp", "ddp", **INTERRUPTED)


def other_seed(bench: Bench) -> Finished:
    """One process with another seed, and another interval between log lines."""
    interval = 2 if bench.generates else 0.5
    return bench.run("other-seed", seed=bench.arguments["seed"] + 1, logging_steps=interval)


# ============================================================ at learning rate 0


def unclipped(bench: Bench) -> Finished:
    """One process that clips no gradient, at learning rate 0. It logs every update."""
    changes = {**NO_LEARNING, "max_grad_norm": 0.0, "eval_steps": 0}
    if bench.generates:  # its first update is all that is looked at
        changes["max_steps"] = 1
    return bench.run("unclipped", **changes)


def pass_at_once(bench: Bench) -> Finished:
    """One process; each update is a whole pass over the data, or over a rollout, as one batch."""
    size = ROLLOUT * RESPONSES if bench.generates else ROWS
    changes = settings_of_passes(bench)
    return bench.run("pass-at-once", train_batch_size=size, micro_train_batch_size=size, **changes)


def pass_in_parts(bench: Bench) -> Finished:
    """Two processes; a pass over the same data is several updates of uneven size."""
    interval = updates_of_a_pass(bench)
    return bench.run(
        "pass-in-parts",
        "ddp",
        # Two of 8 and, where an update has one sample, one of it and one padding row. Of a recipe
        # that samples, an update has 11 samples: five of 2 and one of 1.
        micro_train_batch_size=2 if bench.generates else BATCH // 2,
        logging_steps=interval,
        # No divisor of two passes, unless each is one update: the last update is saved, too.
        save_steps=interval + 1,
        save_actor_steps=interval + 1,
        **settings_of_passes(bench),
    )


def updates_of_a_pass(bench: Bench) -> int:
    """Returns how many updates of `BATCH` samples the samples of `pass_at_once` make."""
    return updates_in(int(pass_at_once(bench).training[0]["samples"]))


def settings_of_passes(bench: Bench) -> Changes:
    """Returns what `pass_at_once` and `pass_in_parts` have in common: two passes, no learning."""
    if not bench.generates:
        return NO_LEARNING
    of_rollout = {"n_rows": SHORT_ROLLOUT, "num_epochs_per_rollout": 2}
    return {**NO_LEARNING, **of_rollout, "max_steps": 0, "max_epochs": 1}


# ============================================================ killed and resumed

# How many times to try again when a run ends before it could be killed.
ATTEMPTS = 3


def killed_twice(bench: Bench, launcher: str) -> Finished:
    """A run that is killed when a checkpoint has its name, then while the next one is written.

    After each kill the newest checkpoint must be whole. The third start goes on to the end.
    """
    for attempt in range(ATTEMPTS):
        name = f"killed-{launcher}-{attempt}"
        checkpoints = bench.folder / name / "checkpoints"
        begin = bench.flags(bench.folder / name, **INTERRUPTED)
        resume = [*begin, "--resume", "auto"]
        has_one = lambda folder=checkpoints: bool(folders.by_step(folder))
        if bench.run_until(f"{name}-0", launcher, begin, has_one):
            check_newest(checkpoints)
            before = steps_named_in(checkpoints)
            writes = lambda folder=checkpoints, seen=before: bool(steps_named_in(folder) - seen)
            if bench.run_until(f"{name}-1", launcher, resume, writes):
                check_newest(checkpoints)
                bench.run_until(name, launcher, resume, lambda: False)
                return Finished(bench.folder / name)
    return pytest.skip(f"too busy a machine: {ATTEMPTS} times a run ended before it was killed")


def check_newest(checkpoints: Path) -> None:
    newest = folders.by_step(checkpoints)[-1:]
    fault = folders.fault_of(newest[0]) if newest else "there is none"
    assert fault is None, f"checkpoints whole or not there: {fault}"


def steps_named_in(checkpoints: Path) -> set[str]:
    """Returns the `global_step_*` of all names in a folder, also of what is still being written."""
    return {
        step for path in checkpoints.iterdir() for step in re.findall(r"global_step_\d+", path.name)
    }


# ============================================================ in fp16

# Far more than fits: a gradient of 2**-16 overflows.
HIGH_SCALE = 32


def at_scale(bench: Bench, power: int) -> Finished:
    """Four updates of the same samples in fp16, the first loss scale a power of 2."""
    settings: Changes = {"max_steps": 4, "micro_train_batch_size": 4, "eval_steps": 0}
    settings["n_rows"] = BATCH
    if bench.generates:
        # All updates are of one rollout: another one would have other responses.
        prompts = BATCH // 2
        settings |= {"n_rows": prompts, "rollout_batch_size": prompts, "n_samples_per_prompt": 2}
        settings["num_epochs_per_rollout"] = 100
    scale = {"initial_scale_power": power, "hysteresis": 1}
    launcher = fp16_launcher(bench.folder / f"fp16_{power}.json", 2, 1, **scale)
    return bench.run(f"scale-{power}", launcher, **settings)
