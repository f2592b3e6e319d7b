"""What each promise means: the runs it looks at, what it measures, and the bound.

Only what users script against is used: flags, log lines and their tags, files. So a changed loss,
metric or data function needs no change here.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from common import folders
from common.prove import bench as benches
from common.prove import compare
from common.prove.bench import (
    BATCH,
    DROPOUT,
    EVAL_STEPS,
    RESPONSES,
    ROLLOUT,
    ROWS,
    SHORT_ROLLOUT,
    Bench,
    Finished,
    Unchecked,
    updates_in,
)
from common.prove.compare import COUNTERS, Difference

# What makes an update, beside the weights that it leaves.
OF_UPDATE = {"loss", "grad_norm", "learning_rate", "samples", "tokens"}
# These are of the last update alone, so they belong to no mean.
OF_LAST_UPDATE = ("grad_norm", "learning_rate", "loss_scale", "epoch", "global_step")
# More than enough for the gradients of any model in fp16.
HIGH_SCALES = (24, 40, 60)  # powers of 2
# Gradients in half precision round: far less than this. One Adam step too many makes far more.
HALF = 1e-2
# The same weights and samples in half precision.
SAME_HALF = 1e-4
# The weights of two such runs, relative to how far training has moved them. The saved ones are
# rounded to half precision, too.
HALF_WEIGHTS = 5e-2
# What each is called in the table, and the samples of a micro-batch under it.
ENGINES = {
    "zero1": ("ZeRO-1", 2),
    "zero2": ("ZeRO-2", 4),
    "zero3": ("ZeRO-3", 2),
    "fsdp2": ("FSDP2", 4),
}
# How often a run is begun anew that has ended before it could be killed.
ATTEMPTS = 3
NO_DROPOUT = "the model's config names no dropout, and there is no --lora_dropout"


class Check(NamedTuple):
    """One line of the table: what was compared, how far it is off, and how far it may be."""

    what: str
    difference: Difference


class Promise(NamedTuple):
    """A contract of the project.

    Attributes:
        name: for `--only`.
        says: the contract in words.
        docs: where it is explained.
        check: does the work, one line of the table after the other. It may raise `Unchecked` or
            `RunFailed`; the lines before that stay.
    """

    name: str
    says: str
    docs: str
    check: Callable[[Bench], Iterator[Check]]


# ============================================================ runs of several promises


def base(bench: Bench) -> Finished:
    """One process, one micro-batch an update."""
    return bench.run("1x16", save_steps=1000)


def two_processes(bench: Bench) -> Finished:
    """Two processes, micro-batches of one sample: in an update of 1 or 11 one is a padding row."""
    return bench.run("2-processes", "ddp", micro_train_batch_size=1, save_steps=1000)


def on_engine(bench: Bench, engine: str) -> tuple[str, Finished]:
    """The name of an engine for the table, and the run of two processes under it."""
    what, size = ENGINES[engine]
    return what, bench.run(engine, engine, micro_train_batch_size=size, save_steps=1000)


def unbroken(bench: Bench) -> Finished:
    """A run with dropout that is not killed. Those that are killed must end as it does."""
    return bench.run("unbroken", "ddp", **INTERRUPTED)


# Updates of two processes, checkpoints between log lines, and dropout, so that random states count.
# Only one checkpoint is kept: it must stay until the next one is whole.
INTERRUPTED = dict(
    micro_train_batch_size=2,
    logging_steps=4,
    save_steps=2,
    save_total_limit=1,
    save_actor_steps=2,
    save_actor_limit=1,
    dropout=DROPOUT,
)


def other_seed(bench: Bench) -> Finished:
    bench.need("seed")
    interval = 2 if bench.samples else 0.5
    return bench.run("other-seed", seed=bench.arguments["seed"] + 1, logging_steps=interval)


def unclipped(bench: Bench) -> Finished:
    """A run at learning rate 0 that logs every update and clips no gradient."""
    bench.need("learning_rate", "logging_steps")
    changes = dict(learning_rate=0.0, critic_learning_rate=0.0, max_grad_norm=0.0, eval_steps=0)
    if bench.samples:  # its first update is all that is looked at
        changes["max_steps"] = 1
    return bench.run("unclipped", **changes)


class StandingStill(NamedTuple):
    """Two runs at learning rate 0, so that every update meets the same weights.

    Attributes:
        whole: each update is a whole pass over the data (of a recipe that samples: a rollout).
        split: of two processes. A pass is several updates of uneven size, the last log line is over
            a whole one.
        interval: how many updates a pass of `split` has: its `logging_steps`.
    """

    whole: Finished
    split: Finished
    interval: int


def standing_still(bench: Bench) -> StandingStill:
    bench.need("learning_rate", "logging_steps", "train_batch_size", "micro_train_batch_size")
    rates = dict(learning_rate=0.0, critic_learning_rate=0.0)
    size = ROWS
    # Two of 8 and, where an update has one sample, one of it and one padding row.
    micro = BATCH // 2
    if bench.samples:
        micro = 2  # of 11 samples: five of 2 and one of 1
        bench.need("num_epochs_per_rollout")
        rates |= dict(rows=SHORT_ROLLOUT, num_epochs_per_rollout=2)
        rates |= dict(max_steps=0, max_epochs=1)
        size = ROLLOUT * RESPONSES
    whole = bench.run("still-whole", train_batch_size=size, micro_train_batch_size=size, **rates)
    samples = whole.training[0].get("samples", ROWS)
    interval = updates_in(int(samples))
    split = bench.run(
        "still",
        "ddp",
        micro_train_batch_size=micro,
        logging_steps=interval,
        # No divisor of two passes, unless each is one update: the last update is saved, too.
        save_steps=interval + 1,
        save_actor_steps=interval + 1,
        **rates,
    )
    return StandingStill(whole, split, interval)


# ============================================================ the same update


def same_run(bench: Bench, what: str, other: Finished) -> Iterator[Check]:
    """Compares a run with `base`: the weights, and what its lines say of the updates."""
    reference = base(bench)
    of_lines = compare.of_lines(reference.training, other.training, only=OF_UPDATE)
    yield Check(f"{what}: log lines", of_lines)
    yield Check(f"{what}: weights", compare.of_models(reference, other))


def check_split(bench: Bench) -> Iterator[Check]:
    bench.need("micro_train_batch_size")
    reference = base(bench)
    four = bench.run("4x4", micro_train_batch_size=4, save_steps=1000)
    yield from same_run(bench, "4 micro-batches of 4", four)
    yield from same_run(bench, "2 processes", two_processes(bench))
    if not bench.quick and bench.has("micro_train_tokens"):
        first = reference.training[0]
        per_sample = first.get("tokens", 32 * BATCH) / first.get("samples", BATCH)
        changes = dict(micro_train_tokens=round(5 * per_sample), save_steps=1000)
        by_tokens = bench.run("tokens", **changes)
        yield from same_run(bench, "micro-batches by tokens", by_tokens)
        by_tokens = bench.run("2-by-tokens", "ddp", **changes)
        yield from same_run(bench, "2 processes by tokens", by_tokens)


def check_engines(bench: Bench) -> Iterator[Check]:
    bench.need("micro_train_batch_size")
    for engine in ("zero3",) if bench.quick else ENGINES:
        what, other = on_engine(bench, engine)
        yield from same_run(bench, what, other)


def check_packed(bench: Bench) -> Iterator[Check]:
    flags = [name for name in ("packing", "share_prompts") if bench.has(name)]
    if not flags:
        raise Unchecked("the recipe has neither --packing nor --share_prompts")
    changes = dict.fromkeys(flags, True)
    other = bench.run("packed", micro_train_batch_size=4, save_steps=1000, **changes)
    yield from same_run(bench, f"--{' --'.join(flags)}", other)


def check_last_update(bench: Bench) -> Iterator[Check]:
    """An update of 6 samples is the same where updates are of 6 and where they could be more."""
    bench.need("train_batch_size")
    rows = 6
    samples = rows
    full = dict(train_batch_size=rows)
    short = dict(train_batch_size=BATCH)
    if bench.samples:
        samples = rows * RESPONSES
        full = dict(train_batch_size=samples, rollout_batch_size=rows)
        short = dict(train_batch_size=ROLLOUT * RESPONSES, rollout_batch_size=ROLLOUT)
    same = dict(rows=rows, max_steps=0, max_epochs=1, save_steps=1000)
    one = bench.run("full-update", **same, **full, micro_train_batch_size=2)
    # Six samples are no whole number of micro-batches here.
    other = bench.run("short-update", **same, **short, micro_train_batch_size=4)
    only = {"loss", "grad_norm", "samples"}
    yield Check("log lines", compare.of_lines(one.training, other.training, only))
    yield Check("weights", compare.of_models(one, other))


# ============================================================ what is logged


def check_means(bench: Bench) -> Iterator[Check]:
    """At learning rate 0 a line over a whole pass is one mean, however its samples were split."""
    whole, split, interval = standing_still(bench)
    missing = []
    # The first update has a line of its own. So only the second pass has a line over all of it.
    if last_step(split) < 2 * interval:
        missing.append("the recipe makes one pass over the data, a line over a whole one needs two")
    else:
        expected = mean_metrics(whole)
        found = mean_metrics(split)
        expected["global_step"] = found["global_step"] = last_step(split)
        yield Check("training lines", compare.of_lines([expected], [found]))
        if len(split.training) > 2:
            yield Check("since the last line alone", of_second_line(split, expected))
    if bench.has("max_grad_norm"):
        one = base(bench).training[:1]
        other = unclipped(bench).training[:1]
        of_norm = compare.of_lines(one, other, only={"grad_norm"})
        yield Check("grad_norm before clipping", of_norm)
    if whole.evaluations or split.evaluations:
        yield Check("evaluations", compare.of_lines(whole.evaluations[:1], split.evaluations[:1]))
        # Five held-out rows in micro-batches of one: one process has a padding row.
        alone = base(bench).evaluations[:1]
        in_ones = two_processes(bench).evaluations[:1]
        yield Check("evaluations, a row at a time", compare.of_lines(alone, in_ones))
    else:
        missing.append("the recipe logs no evaluation")
    if missing:
        raise Unchecked("; ".join(missing))


def of_second_line(run: Finished, whole_pass: dict) -> Difference:
    """The second line ends the first pass, and the first update is not in it.

    So it must differ from the mean over that pass, at least in one metric.
    """
    _, second, *_ = run.training
    apart = [
        abs(second[tag] - value) / max(1.0, abs(value))
        for tag, value in whole_pass.items()
        if tag in second and not tag.startswith(COUNTERS)
    ]
    return at_least(max(apart, default=1.0), 1e-5)


def mean_metrics(run: Finished) -> dict:
    """The metrics of a run's last line, and those that only its first one has, of its rollout."""
    line = {**run.training[0], **run.training[-1]}
    return {
        tag: value for tag, value in line.items() if not any(part in tag for part in OF_LAST_UPDATE)
    }


def check_log_lines(bench: Bench) -> Iterator[Check]:
    """Lines after the first update, every `logging_steps`, and the last; evaluations likewise."""
    bench.need("logging_steps")
    _, still, interval_of_still = standing_still(bench)
    runs = {
        "1, one process": (base(bench), 1),
        "1, two processes": (two_processes(bench), 1),
        "4": (unbroken(bench), 4),
        f"{interval_of_still}": (still, interval_of_still),
    }
    if bench.has("seed"):
        other = other_seed(bench)
        if bench.samples:
            runs["2"] = (other, 2)
        else:
            runs["half of all"] = (other, math.ceil(0.5 * last_step(other)))
    for what, (run, interval) in runs.items():
        yield Check(f"logging_steps {what}", of_steps(run, interval))
    if bench.has("eval_steps"):
        total = last_step(base(bench))
        expected = sorted({0, *range(EVAL_STEPS, total + 1, EVAL_STEPS), total})
        found = [line["global_step"] for line in base(bench).evaluations]
        yield Check(f"eval_steps {EVAL_STEPS}", of_lists(expected, found))
    yield from saved_where_due(bench, unbroken(bench), still, interval_of_still + 1)
    for what, run in (("1 process", base(bench)), ("2 processes", two_processes(bench))):
        yield from linear_schedule(bench, what, run)
    if not bench.samples:
        bench.need("max_epochs")
        yield Check("updates and samples of 2 epochs", of_counts(base(bench)))


def saved_where_due(
    bench: Bench, limited: Finished, still: Finished, interval: int
) -> Iterator[Check]:
    """Whether checkpoints and actors stand where `save_steps` and `save_actor_steps` say.

    Args:
        limited: a run that keeps one checkpoint and one actor.
        still: a run that saves checkpoints and actors every `interval` updates, and keeps all.
    """
    total = last_step(still)
    due = sorted({*range(interval, total + 1, interval), total})
    for steps, limit, folder in (
        ("save_steps", "save_total_limit", "checkpoints"),
        ("save_actor_steps", "save_actor_limit", "actors"),
    ):
        if bench.has(steps):
            found = [folders.step_of(path) for path in folders.by_step(still.folder / folder)]
            yield Check(f"{steps} {interval}", of_lists(due, found, folder))
        if bench.has(steps, limit):
            kept = [folders.step_of(path) for path in folders.by_step(limited.folder / folder)]
            yield Check(f"{limit} 1", of_lists([last_step(limited)], kept, folder))


def linear_schedule(bench: Bench, what: str, run: Finished) -> list[Check]:
    """Whether each line logs the learning rate that its own update was made with.

    The first update has the peak, the one after the last would have 0. Only the shape is checked,
    since a fork may give its groups rates of their own.
    """
    rates = [line.get("learning_rate") for line in run.training]
    if not bench.has("lr_scheduler_type", "warmup_steps") or None in rates or not rates[0]:
        return []
    total = last_step(run)
    differences = []
    for line, rate in zip(run.training, rates):
        step = line["global_step"]
        expected = rates[0] * (total + 1 - step) / total
        where = f"learning_rate, update {step}: {rate:.6g}, expected {expected:.6g}"
        differences.append(Difference(abs(rate / rates[0] - expected / rates[0]), 1e-6, where))
    nearest = compare.first_or_nearest(differences)
    return [Check(f"lr_scheduler_type linear, {what}", nearest)]


def last_step(run: Finished) -> int:
    return max(line["global_step"] for line in run.lines)


def of_steps(run: Finished, interval: int) -> Difference:
    total = last_step(run)
    expected = sorted({1, *range(interval, total + 1, interval), total})
    return of_lists(expected, [line["global_step"] for line in run.training])


def of_lists(expected: list, found: list, what: str = "lines") -> Difference:
    """Counts the entries of one list alone."""
    if expected == found:
        return Difference(0, 0)
    wrong = len(set(expected) ^ set(found)) or 1
    return Difference(wrong, 0, f"{what} at {found}, expected at {expected}")


def of_counts(run: Finished) -> Difference:
    """Whether each usable row was in one update of each epoch."""
    rows = 0
    for name, usable in re.findall(r"^data (.*): (\d+) usable rows", run.console, re.M):
        if Path(name).name.startswith("train_"):  # the held-out rows have such a line, too
            rows += int(usable)
    if rows == 0:
        raise Unchecked("the recipe prints no line `data NAME: N usable rows`")
    expected = [2 * updates_in(rows), 2 * rows]
    last = run.training[-1]
    found = [last["global_step"], last.get("samples", 2 * rows)]
    if found == expected:
        return Difference(0, 0)
    return Difference(
        abs(found[1] - expected[1]) or 1,
        0,
        f"{found[0]} updates of {found[1]} samples, expected {expected[0]} of {expected[1]}",
    )


def check_evaluation(bench: Bench) -> Iterator[Check]:
    """An evaluation has no dropout, and the training goes on as if there had been none."""
    bench.need("eval_steps")
    often = unbroken(bench)
    if not often.evaluations:
        raise Unchecked("the recipe logs no evaluation")
    if bench.has_dropout:
        without_dropout = two_processes(bench).evaluations[:1]
        yield Check("without dropout", compare.of_lines(without_dropout, often.evaluations[:1]))
    seldom = bench.run("seldom-evaluated", "ddp", **{**INTERRUPTED, "eval_steps": 0})
    of_lines = compare.of_lines(seldom.training, often.training, exact=True)
    yield Check("log lines of training", of_lines)
    yield Check("weights", compare.of_models(seldom, often, exact=True))
    if not bench.has_dropout:
        raise Unchecked(f"evaluations without dropout: {NO_DROPOUT}")


# ============================================================ interrupted, repeated


def check_resume(bench: Bench) -> Iterator[Check]:
    bench.need("save_steps", "logging_steps")
    yield from resumed(bench, "2 processes", unbroken(bench), "ddp")
    if not bench.quick:
        for engine, what in (("plain", "1 process"), ("zero3", "ZeRO-3")):
            reference = bench.run(f"unbroken-{engine}", engine, **INTERRUPTED)
            yield from resumed(bench, what, reference, engine)
    if not bench.samples and not bench.has_dropout:
        raise Unchecked(f"random states: {NO_DROPOUT}")


class Watch:
    """Looks at a folder of checkpoints while a run writes them.

    A kill at the instant of a look would leave just what it sees. So what must hold after a kill
    must hold at every look: once there is a checkpoint, the newest one is whole.

    Attributes:
        faults: what was seen that must not be.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.has_seen = False
        self.faults: list[str] = []

    def look(self) -> None:
        newest = self.newest()
        if newest is None:
            if self.has_seen:
                self.add("the last checkpoint was deleted before the next one was whole")
            return
        self.has_seen = True
        # Seen missing twice: it is not that the next one has come and this one goes.
        if not (newest / "manifest.json").exists() and self.newest() == newest:
            self.add(f"{newest.name} had its name before it was whole")

    def look_closely(self) -> None:
        """Looks after a kill, when nothing moves: every file of the newest one must be there."""
        self.look()
        newest = self.newest()
        fault = folders.fault_of(newest) if newest else None
        if fault:
            self.add(f"{newest.name}: {fault}")

    def newest(self) -> Path | None:
        found = folders.by_step(self.folder)
        return found[-1] if found else None

    def add(self, fault: str) -> None:
        if fault not in self.faults:
            self.faults.append(fault)


def resumed(bench: Bench, what: str, reference: Finished, launcher: str) -> Iterator[Check]:
    """Kills a run when a checkpoint has appeared and while one is written, and resumes it."""
    if last_step(reference) < 2 * INTERRUPTED["save_steps"]:
        raise Unchecked(f"{what}: a run has too few updates for two checkpoints")
    for attempt in range(ATTEMPTS):
        name = f"killed-{launcher}-{attempt}"
        with bench.slots.take(benches.processes_of(launcher)):
            watch = kill_twice(bench, name, launcher)
        if watch:
            break
    else:
        raise Unchecked(
            f"{what}: the machine is too busy: {ATTEMPTS} times a run ended before it was killed"
        )
    whole = Difference(len(watch.faults), 0, "; ".join(watch.faults))
    yield Check(f"{what}: checkpoints whole or not there", whole)
    if watch.faults:
        return
    again = Finished(name, bench.folder / name, "")
    of_lines = compare.of_lines(reference.lines, again.lines, exact=True)
    yield Check(f"{what}: log lines", of_lines)
    yield Check(f"{what}: samples", of_samples(reference.folder, again.folder))
    yield Check(f"{what}: weights", compare.of_models(reference, again, exact=True))


def kill_twice(bench: Bench, name: str, launcher: str) -> Watch | None:
    """Kills a run twice and lets it go on to its end, if no checkpoint was found at fault.

    Returns:
        what was seen of the checkpoints; None if the run ended before it could be killed.
    """
    output = bench.folder / name
    checkpoints = output / "checkpoints"
    watch = Watch(checkpoints)
    before: set[str] = set()

    def has_appeared() -> bool:
        watch.look()
        return watch.has_seen

    def is_written() -> bool:
        watch.look()
        return bool(steps_named_in(checkpoints) - before)

    def never() -> bool:
        watch.look()
        return False

    of_start = bench.flags(output, **INTERRUPTED)
    of_resume = [*of_start, "--resume", "auto"]
    kills = [(of_start, has_appeared), (of_resume, is_written)]
    for number, (flags, moment) in enumerate(kills):
        before = steps_named_in(checkpoints)
        was_killed = bench.run_until(f"{name}-{number}", launcher, flags, moment)
        watch.look_closely()
        if watch.faults:
            return watch
        if not was_killed:
            return None
    bench.run_until(name, launcher, of_resume, never)
    return watch


def steps_named_in(checkpoints: Path) -> set[str]:
    """The `global_step_*` of all names in a folder, also of what is still being written."""
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return {step for name in names for step in re.findall(r"global_step_\d+", name)}


def of_samples(expected: Path, found: Path) -> Difference:
    """Counts the lines of `samples.jsonl` that differ; a recipe that asks nothing has none."""
    texts = []
    for folder in (expected, found):
        file = folder / "samples.jsonl"
        texts.append(file.read_text(encoding="utf-8").splitlines() if file.exists() else [])
    if texts[0] == texts[1]:
        return Difference(0, 0)
    unlike = sum(one != other for one, other in zip(*texts))
    wrong = unlike + abs(len(texts[0]) - len(texts[1]))
    where = f"samples.jsonl: {len(texts[1])} lines, expected {len(texts[0])}"
    return Difference(wrong, 0, where)


def check_seed(bench: Bench) -> Iterator[Check]:
    one = unbroken(bench)
    # In new interpreters: each has another seed of Python's hashes.
    again = bench.run("again", "ddp", fresh=True, **INTERRUPTED)
    yield Check("twice: log lines", compare.of_lines(one.lines, again.lines, exact=True))
    yield Check("twice: weights", compare.of_models(one, again, exact=True))
    other = other_seed(bench)
    # An epoch of one update has the same rows in any order.
    if bench.samples or standing_still(bench).interval > 1:
        moved = largest_difference(base(bench).training[:1], other.training[:1])
        yield Check("another: unlike in the first line", at_least(moved, 1e-5))
    if bench.has("learning_rate") and not bench.samples:
        bench.need("max_epochs")
        yield from of_epochs(unclipped(bench), standing_still(bench).interval)


def of_epochs(run: Finished, per_epoch: int) -> list[Check]:
    """At learning rate 0 two epochs in one order would log the same.

    Nothing where an epoch is one update: it has the same rows in any order.

    Args:
        run: two epochs, a line for each update.
        per_epoch: the updates of an epoch.
    """
    if per_epoch < 2:
        return []
    apart = [
        abs(line[tag] - other[tag])
        for line, other in zip(run.training, run.training[per_epoch:])
        for tag in line
        if tag in other and not tag.startswith(COUNTERS) and tag not in ("epoch", "learning_rate")
    ]
    return [Check("another epoch: another order", at_least(max(apart, default=1.0), 1e-5))]


def largest_difference(lines: list[dict], others: list[dict]) -> float:
    """Returns by how much the values of some lines differ at most, of large values as a share."""
    return max(
        abs(line[tag] - value) / max(1.0, abs(value))
        for line, other in zip(lines, others)
        for tag, value in other.items()
        if tag in line
    )


def at_least(measured: float, bound: float) -> Difference:
    """A difference that must be there: green from `bound` on."""
    if measured >= bound:
        return Difference(0, 0, f"{measured:.3g}")
    where = f"all metrics: they differ by {measured:.3g} at most, expected at least {bound:g}"
    return Difference(1, 0, where)


# ============================================================ nothing moves what should not


def check_still(bench: Bench) -> Iterator[Check]:
    bench.need("weight_decay")
    split = standing_still(bench).split
    yield still(bench, "2 processes", split)
    if not bench.quick:
        rates = dict(learning_rate=0.0, critic_learning_rate=0.0)
        for engine in ("zero2", "zero3"):
            run = bench.run(
                f"still-{engine}", engine, micro_train_batch_size=2, save_steps=2, **rates
            )
            yield still(bench, ENGINES[engine][0], run)


def still(bench: Bench, what: str, run: Finished) -> Check:
    """Compares a run's last models with those of its first checkpoint and with its start."""
    saved = folders.by_step(run.folder / "checkpoints")
    differences = []
    if len(saved) > 1:
        for name in ("actor", "critic"):
            first = saved[0] / name
            last = saved[-1] / name
            if first.is_dir():
                first_weights, last_weights = map(benches.weights_of, (first, last))
                differences.append(
                    compare.of_weights(first_weights, last_weights, name, exact=True)
                )
    actor = benches.weights_of(run.folder / "actor")
    start = benches.weights_of(Path(bench.model_folder(0.0)))
    common = {name for name in actor if name in start}
    if common:
        differences.append(
            compare.of_weights(
                {name: start[name].float() for name in common},
                {name: actor[name].float() for name in common},
                "actor",
                exact=True,
            )
        )
    if not differences:
        raise Unchecked("the recipe saves no model to compare with its start, nor two checkpoints")
    return Check(what, compare.first_or_nearest(differences))


def check_overflow(bench: Bench) -> Iterator[Check]:
    """The applied updates of a run that overflows at first are those of a run that never does.

    Both meet the same samples at every update, since their data are one update long.
    """
    bench.need("max_steps", "train_batch_size")
    same = dict(max_steps=4, micro_train_batch_size=4, rows=BATCH, eval_steps=0)
    if bench.samples:
        bench.need("num_epochs_per_rollout")
        # All updates are of one rollout: another one would have other responses.
        prompts = BATCH // 2
        same |= dict(
            rows=prompts,
            rollout_batch_size=prompts,
            n_samples_per_prompt=2,
            num_epochs_per_rollout=100,
        )
    for power in HIGH_SCALES:
        config = benches.deepspeed_config(bench.folder, 2, initial_scale_power=power, hysteresis=1)
        overflowed = bench.run(f"overflow-{power}", str(config), **same)
        last = overflowed.training[-1] if overflowed.training else {}
        if not last:
            nothing = Difference(math.inf, 0, "no update was applied, or none was logged")
            yield Check("updates after the overflows", nothing)
            return
        if "loss_scale" not in last or "skipped_steps" not in last:
            raise Unchecked("the recipe does not log loss_scale and skipped_steps")
        fits = round(math.log2(last["loss_scale"]))
        if fits < power:
            break
    else:
        raise Unchecked(f"nothing overflows at a loss scale of 2**{power}")
    yield Check(f"skips counted, of {power - fits}", of_skips(overflowed, power))
    config = benches.deepspeed_config(bench.folder, 2, initial_scale_power=fits, hysteresis=1)
    clean = bench.run("no-overflow", str(config), **same)
    # At one micro-batch size these are equal bit for bit, whatever the loss was multiplied by.
    exact = {"global_step", "learning_rate", "critic_learning_rate", "samples", "tokens"}
    of_lines = compare.of_lines(clean.training, overflowed.training, exact, exact=True)
    yield Check("steps, samples, learning rates", of_lines)
    yield Check("losses", half_lines(clean, overflowed))
    yield Check("weights", half_models(bench, clean, overflowed))
    yield after_overflows(bench, power)


def after_overflows(bench: Bench, power: int) -> Check:
    """The first applied update has the samples that follow those of the skipped ones, and no other.

    At learning rate 0 a run that never overflows meets the same weights there. Its data are of
    several updates, so each update has other samples.
    """
    same = dict(micro_train_batch_size=4, eval_steps=0)
    bound = SAME_HALF
    if bench.samples:
        # One rollout of 48 samples, 16 an update. Before an update is applied a recipe may take the
        # old log-probs from the pass that trains, later from the one that scores: these round
        # otherwise.
        same |= dict(rows=ROLLOUT, num_epochs_per_rollout=100, score_batch_size=4)
        bound = HALF
    config = benches.deepspeed_config(bench.folder, 2, initial_scale_power=power, hysteresis=1)
    overflowed = bench.run("overflow-data", str(config), **same, max_steps=1)
    if not overflowed.training:
        raise Unchecked("on data of several updates none was applied after the overflows")
    line = overflowed.training[0]
    skips = line["skipped_steps"]
    # Lower than what fits here: the gradients of the other samples may be larger.
    low = max(round(math.log2(line["loss_scale"])) - 6, 0)
    config = benches.deepspeed_config(bench.folder, 2, initial_scale_power=low, hysteresis=1)
    rates = dict(learning_rate=0.0, critic_learning_rate=0.0)
    clean = bench.run("no-overflow-data", str(config), **same, **rates, max_steps=skips + 1)
    expected = clean.training[-1]
    if expected["skipped_steps"]:
        raise Unchecked(f"on data of several updates one overflows at a loss scale of 2**{low}")
    differences = []
    for tag, value in expected.items():
        if tag.startswith(COUNTERS) or any(part in tag for part in OF_LAST_UPDATE):
            continue
        measured = abs(value - line.get(tag, math.inf)) / max(1.0, abs(value))
        where = f"{tag}, update 1: {line.get(tag)}, expected {value}"
        differences.append(Difference(measured, bound, where))
    return Check("samples of the next update", compare.first_or_nearest(differences))


def of_skips(run: Finished, power: int) -> Difference:
    """Each overflow halves the scale: a line must count as many skips as there were before it."""
    differences = []
    for line in run.training:
        expected = power - math.log2(line.get("loss_scale", 2.0**power))
        found = line["skipped_steps"]
        where = (
            f"skipped_steps, update {line['global_step']}: {found}, the scale fell {expected:g}x"
        )
        differences.append(Difference(abs(found - expected), 0, where))
    return compare.first_or_nearest(differences)


def half_lines(expected: Finished, found: Finished) -> Difference:
    """Compares losses and gradient norms up to the rounding of half precision."""
    differences = []
    for line, other in zip(expected.training, found.training):
        for tag in ("loss", "grad_norm"):
            if tag in line and tag in other:
                measured = abs(line[tag] - other[tag]) / max(abs(line[tag]), 1e-2)
                where = f"{tag}, update {line['global_step']}: {line[tag]:.6g}, {other[tag]:.6g}"
                differences.append(Difference(measured, HALF, where))
    return compare.first_or_nearest(differences)


def half_models(bench: Bench, expected: Finished, found: Finished) -> Difference:
    """Returns how far two actors are from each other, relative to how far one is from its start."""
    start = benches.weights_of(Path(bench.model_folder(0.0)))
    one = benches.weights_of(expected.folder / "actor")
    other = benches.weights_of(found.folder / "actor")
    if not start.keys() & one.keys():  # an adapter, which begins as it stands still
        start = benches.weights_of(standing_still(bench).split.folder / "actor")
    moved = math.sqrt(sum(square(one[name], start[name]) for name in one if name in start))
    apart = math.sqrt(sum(square(one[name], other[name]) for name in one))
    if moved == 0:
        raise Unchecked("four updates in fp16 move nothing")
    return Difference(apart / moved, HALF_WEIGHTS, "actor")


def square(one, other) -> float:
    return float((one.double() - other.double()).square().sum())


# ============================================================ the saved actor


def check_actor(bench: Bench) -> Iterator[Check]:
    yield from saved_actor(bench, "1 process", base(bench))
    if not bench.quick:
        for engine in ("zero3", "fsdp2"):
            what, run = on_engine(bench, engine)
            yield from saved_actor(bench, what, run)


def saved_actor(bench: Bench, what: str, run: Finished) -> Iterator[Check]:
    folder = run.folder / "actor"
    if not folder.is_dir():
        raise Unchecked("the recipe saves no actor")
    script = str(Path(__file__).with_name("plain.py"))
    words = [script, str(folder), bench.model_folder(0.0)]
    found = json.loads(bench.run_script(f"plain-{run.name}", *words).splitlines()[-1])
    faults = [f"{name}: {value}" for name, value in found.items() if value]
    loads = Difference(len(faults), 0, "; ".join(faults))
    yield Check(f"{what}: plain transformers loads it", loads)
    saved = folders.by_step(run.folder / "checkpoints")
    if saved and (saved[-1] / "actor").is_dir():
        last = benches.weights_of(saved[-1] / "actor")
        same = compare.of_weights(last, benches.weights_of(folder), "actor", exact=True)
        yield Check(f"{what}: it is that of the last checkpoint", same)

    changes = {}
    asked = bench.arguments
    if "ref_model_name_or_path" in asked and asked.get("kl_coef", 1) > 0:
        start = bench.model_folder(0.0)
        changes["ref_model_name_or_path"] = asked["ref_model_name_or_path"] or start
    name = f"on-actor-{run.name}"
    if not run.evaluations:
        raise Unchecked("the recipe logs no evaluation")
    found = bench.run_to_first_line(name, model_name_or_path=str(folder), **changes)
    expected = {**run.evaluations[-1], "global_step": 0}
    difference = compare.of_lines([expected], [found])
    yield Check(f"{what}: a new run on it logs the last eval/*", difference)
    if changes and run is base(bench):
        one_update = dict(model_name_or_path=str(folder), max_steps=1)
        to_start = bench.run(f"{name}-to-start", **one_update, **changes)
        to_itself = bench.run(f"{name}-to-itself", **one_update, ref_model_name_or_path=str(folder))
        most = largest_difference(to_itself.lines, to_start.lines)
        yield Check("another reference: unlike", at_least(most, 1e-5))


PROMISES = [
    Promise(
        "split",
        "the same update however its samples are split",
        "docs/forking.md#split",
        check_split,
    ),
    Promise(
        "engines",
        "the same update under every engine",
        "docs/forking.md#engines",
        check_engines,
    ),
    Promise(
        "packed",
        "the same update with rows packed or prompts shared",
        "docs/forking.md#packed",
        check_packed,
    ),
    Promise(
        "means",
        "a logged metric is the exact mean over both processes",
        "docs/forking.md#means",
        check_means,
    ),
    Promise(
        "evaluation",
        "an evaluation has no dropout and leaves no trace in the training",
        "docs/forking.md#evaluation",
        check_evaluation,
    ),
    Promise(
        "log-lines",
        "lines, evaluations, checkpoints and learning rates are where the flags say",
        "docs/forking.md#log-lines",
        check_log_lines,
    ),
    Promise(
        "resume",
        "killed and resumed, a run is the run never killed",
        "docs/forking.md#resume",
        check_resume,
    ),
    Promise(
        "overflow", "an fp16 overflow leaves no trace", "docs/forking.md#overflow", check_overflow
    ),
    Promise(
        "seed",
        "the same seed is the same run, another seed another",
        "docs/forking.md#seed",
        check_seed,
    ),
    Promise("still", "a learning rate of 0 moves nothing", "docs/forking.md#still", check_still),
    Promise("actor", "the saved actor is the trained one", "docs/forking.md#actor", check_actor),
    Promise(
        "last-update",
        "the last, short update weighs each sample 1/n",
        "docs/forking.md#last-update",
        check_last_update,
    ),
]
