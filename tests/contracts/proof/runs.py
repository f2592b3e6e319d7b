"""The runs that several promises look at."""

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


def uninterrupted(bench: Bench) -> Finished:
    """Two processes with dropout. Runs that are killed must end as this one does."""
    return bench.run("uninterrupted", "ddp", **INTERRUPTED)


def other_seed(bench: Bench) -> Finished:
    """One process with another seed, and another interval between log lines."""
    bench.need("seed")
    interval = 2 if bench.generates else 0.5
    return bench.run("other-seed", seed=bench.arguments["seed"] + 1, logging_steps=interval)


# ============================================================ at learning rate 0
def unclipped(bench: Bench) -> Finished:
    """One process that clips no gradient, at learning rate 0. It logs every update."""
    bench.need("learning_rate", "logging_steps")
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
    """Two processes; a pass over the same data is several updates of uneven size.

    The first log line is of the first update, the last one over a whole pass.
    """
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
    samples = pass_at_once(bench).training[0].get("samples", ROWS)
    return updates_in(int(samples))


def settings_of_passes(bench: Bench) -> Changes:
    """Returns what `pass_at_once` and `pass_in_parts` have in common: two passes, no learning."""
    bench.need("learning_rate", "logging_steps", "train_batch_size", "micro_train_batch_size")
    if not bench.generates:
        return NO_LEARNING
    bench.need("num_epochs_per_rollout")
    return {
        **NO_LEARNING,
        "n_rows": SHORT_ROLLOUT,
        "num_epochs_per_rollout": 2,
        "max_steps": 0,
        "max_epochs": 1,
    }
