"""What each promise means: the runs it looks at, what it measures, and the bound.

Only what users script against is used: flags, log lines and their tags, files, and of the console
how many rows the data have. So a changed loss, metric or data function needs no change here.

The runs that several promises look at, made in `runs.py`:

                    processes   a micro-batch      learns   dropout   log lines
    one_process     1           a whole update     yes      no        every update
    two_processes   2           one sample         yes      no        every update
    on_engine       2           2 or 4 samples     yes      no        every update
    uninterrupted   2           2 samples          yes      yes       every 4 updates
    other_seed      1           a whole update     yes      no        every 2, or half of all
    unclipped       1           a whole update     no       no        every update
    pass_at_once    1           a whole pass       no       no        every update: one pass each
    pass_in_parts   2           2 or 8 samples     no       no        one for each pass

Runs that do not learn have a learning rate of 0: all their updates meet the same weights.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from common import folders
from common.prove import compare, interrupted, overflow, runs
from common.prove.bench import (
    BATCH,
    EVAL_STEPS,
    RESPONSES,
    ROLLOUT,
    Bench,
    Changes,
    Finished,
    Unchecked,
    updates_in,
    weights_of,
)
from common.prove.compare import Check, Difference

# What identifies an update in a log line.
OF_UPDATE = {"loss", "grad_norm", "learning_rate", "samples", "tokens"}
# By folder: the flag that says when it gets another one, and the flag that says how many are kept.
SAVED = {
    "checkpoints": ("save_steps", "save_total_limit"),
    "actors": ("save_actor_steps", "save_actor_limit"),
}
# A guess, if the recipe logs no tokens.
TOKENS_OF_SAMPLE = 32
NO_DROPOUT = "the model's config names no dropout, and there is no --lora_dropout"


class Promise(NamedTuple):
    """A contract of the project.

    Attributes:
        name: for `--only`.
        says: the contract in words.
        check: does the work, and yields the table line by line. It may raise `Unchecked` or
            `RunFailed`; the lines before that stay.
    """

    name: str
    says: str
    check: Callable[[Bench], Iterator[Check]]

    @property
    def docs(self) -> str:
        """Where it is explained."""
        return f"docs/forking.md#{self.name}"


# ============================================================ the same update
def check_split(bench: Bench) -> Iterator[Check]:
    """An update is the same however its samples are split."""
    bench.need("micro_train_batch_size")
    in_fours = bench.run("4x4", micro_train_batch_size=4, **runs.SAVED_AT_END)
    yield from same_run(bench, "4 micro-batches of 4", in_fours)
    yield from same_run(bench, "2 processes", runs.two_processes(bench))
    if bench.quick or not bench.has("micro_train_tokens"):
        return
    first = runs.one_process(bench).training[0]
    tokens_of_sample = TOKENS_OF_SAMPLE
    if "tokens" in first and "samples" in first:
        tokens_of_sample = first["tokens"] / first["samples"]
    # Room for about five samples in a micro-batch.
    changes: Changes = {"micro_train_tokens": round(5 * tokens_of_sample), **runs.SAVED_AT_END}
    yield from same_run(bench, "micro-batches by tokens", bench.run("tokens", **changes))
    yield from same_run(bench, "2 processes by tokens", bench.run("2-by-tokens", "ddp", **changes))


def check_engines(bench: Bench) -> Iterator[Check]:
    """An update is the same under every engine."""
    bench.need("micro_train_batch_size")
    for name in ("zero3",) if bench.quick else runs.ENGINES:
        yield from same_run(bench, runs.ENGINES[name].what, runs.on_engine(bench, name))


def check_packed(bench: Bench) -> Iterator[Check]:
    """An update is the same with rows packed or prompts shared, which all other runs have off."""
    flags = [name for name in ("packing", "share_prompts") if bench.has(name)]
    if not flags:
        raise Unchecked("the recipe has neither --packing nor --share_prompts")
    changes: Changes = dict.fromkeys(flags, True)
    packed = bench.run("packed", micro_train_batch_size=4, **runs.SAVED_AT_END, **changes)
    yield from same_run(bench, f"--{' --'.join(flags)}", packed)


def same_run(bench: Bench, what: str, found: Finished) -> Iterator[Check]:
    """Compares a run with that of one process: its weights, and `OF_UPDATE` of its log lines."""
    expected = runs.one_process(bench)
    of_lines = compare.lines(expected.training, found.training, only=OF_UPDATE)
    yield Check(f"{what}: log lines", of_lines)
    yield Check(f"{what}: weights", compare.models(expected, found))


def check_last_update(bench: Bench) -> Iterator[Check]:
    """An update that is short of `--train_batch_size` is that of a run whose size it has.

    Both runs have one update, of 6 samples; where a recipe samples, of those of 6 prompts.
    """
    bench.need("train_batch_size")

    def size(rows: int) -> Changes:
        if bench.generates:
            return {"train_batch_size": rows * RESPONSES, "rollout_batch_size": rows}
        return {"train_batch_size": rows}

    n_rows = 6
    own = size(n_rows)
    larger = size(ROLLOUT if bench.generates else BATCH)
    same: Changes = {"n_rows": n_rows, "max_steps": 0, "max_epochs": 1, **runs.SAVED_AT_END}
    expected = bench.run("full-update", micro_train_batch_size=2, **same, **own)
    # The samples, 6 or 18, are no whole number of micro-batches here.
    found = bench.run("short-update", micro_train_batch_size=4, **same, **larger)
    only = {"loss", "grad_norm", "samples"}
    yield Check("log lines", compare.lines(expected.training, found.training, only))
    yield Check("weights", compare.models(expected, found))


# ============================================================ what is logged
def check_means(bench: Bench) -> Iterator[Check]:
    """A logged metric is the mean over all samples, however they are split."""
    at_once = runs.pass_at_once(bench)
    in_parts = runs.pass_in_parts(bench)
    unchecked = []

    # Update 1 has a line of its own, so the line that ends the first pass lacks it. Only the line
    # that ends the second one is over a whole pass.
    if in_parts.last_step >= 2 * runs.updates_of_a_pass(bench):
        yield from means_of_a_pass(at_once, in_parts)
    else:
        unchecked.append(
            "the recipe makes one pass over the data, a line over a whole one needs two"
        )
    if bench.has("max_grad_norm"):
        clipped = runs.one_process(bench).training[:1]
        unclipped = runs.unclipped(bench).training[:1]
        norm = compare.lines(clipped, unclipped, only={"grad_norm"})
        yield Check("grad_norm before clipping", norm)
    if at_once.evaluations or in_parts.evaluations:
        yield from means_of_evaluations(bench, at_once, in_parts)
    else:
        unchecked.append("the recipe logs no evaluation")
    if unchecked:
        raise Unchecked("; ".join(unchecked))


def means_of_a_pass(at_once: Finished, in_parts: Finished) -> Iterator[Check]:
    """Compares the last lines of two runs that do not learn, each over one whole pass.

    `at_once` has one update a pass, and a line for each: all its lines are over a whole pass.
    `in_parts` has several updates a pass, and a line at update 1 and at the end of each pass.
    """
    # `compare.lines` wants equal steps. The two end at different ones, so both get the same.
    step = {"global_step": in_parts.last_step}
    whole = {**step, **means_of_last_line(at_once)}
    joined = {**step, **means_of_last_line(in_parts)}
    yield Check("training lines", compare.lines([whole], [joined]))
    if len(in_parts.training) > 2:
        # The line that ends the first pass lacks update 1. If it still equals a whole pass in every
        # metric, the sums are not emptied after a line.
        end_of_first_pass = in_parts.training[1]
        yield Check("since the last line alone", compare.unlike([end_of_first_pass], [whole]))


def means_of_evaluations(bench: Bench, at_once: Finished, in_parts: Finished) -> Iterator[Check]:
    """Compares first evaluations: `at_once` with `in_parts`, and one process with two."""
    first = compare.lines(at_once.evaluations[:1], in_parts.evaluations[:1])
    yield Check("evaluations", first)
    # Five held-out rows in micro-batches of one: one process has a padding row.
    alone = runs.one_process(bench).evaluations[:1]
    in_ones = runs.two_processes(bench).evaluations[:1]
    yield Check("evaluations, a row at a time", compare.lines(alone, in_ones))


def means_of_last_line(run: Finished) -> dict:
    """Returns the metrics of a run's last line that are means.

    Those of its one rollout are in the first line only, and are taken from there.
    """
    line = {**run.training[0], **run.training[-1]}
    return {tag: value for tag, value in line.items() if not compare.is_of_last_update(tag)}


def check_log_lines(bench: Bench) -> Iterator[Check]:
    """Whatever is logged, evaluated or saved is where the flags say."""
    bench.need("logging_steps")
    yield from every_interval_logged(bench)
    one_process = runs.one_process(bench)
    if bench.has("eval_steps"):
        expected = due(EVAL_STEPS, one_process.last_step, also=0)
        found = [line["global_step"] for line in one_process.evaluations]
        yield Check(f"eval_steps {EVAL_STEPS}", compare.lists(expected, found, "lines"))
    yield from saved_where_due(bench)
    yield from linear_schedule(bench, "1 process", one_process)
    yield from linear_schedule(bench, "2 processes", runs.two_processes(bench))
    if not bench.generates:
        bench.need("max_epochs")
        yield Check("updates and samples of 2 epochs", counts_of_epochs(one_process))


def due(interval: int, last: int, also: int | None = None) -> list[int]:
    """Returns the steps at which something is due: `due(4, 6, also=0)` is `[0, 4, 6]`.

    Args:
        last: the last step, at which it is always due.
        also: a step before the first multiple of the interval, if it is due there, too.
    """
    steps = {*range(interval, last + 1, interval), last}
    return sorted(steps if also is None else {also, *steps})


def every_interval_logged(bench: Bench) -> Iterator[Check]:
    """Looks at the lines of runs with different `logging_steps`."""
    yield logged_where_due("1, one process", runs.one_process(bench), 1)
    yield logged_where_due("1, two processes", runs.two_processes(bench), 1)
    yield logged_where_due("4", runs.uninterrupted(bench), 4)
    interval = runs.updates_of_a_pass(bench)
    yield logged_where_due(f"{interval}", runs.pass_in_parts(bench), interval)
    if not bench.has("seed"):
        return
    other = runs.other_seed(bench)
    if bench.generates:
        yield logged_where_due("2", other, 2)
    else:
        yield logged_where_due("half of all", other, math.ceil(0.5 * other.last_step))


def logged_where_due(what: str, run: Finished, interval: int) -> Check:
    """Whether lines are at the first update, at every multiple of `interval`, and at the last."""
    expected = due(interval, run.last_step, also=1)
    found = [line["global_step"] for line in run.training]
    return Check(f"logging_steps {what}", compare.lists(expected, found, "lines"))


def saved_where_due(bench: Bench) -> Iterator[Check]:
    """Whether checkpoints and actors are where the flags say, and no more than are to be kept."""
    keeps_all = runs.pass_in_parts(bench)  # `save_total_limit` 0
    keeps_one = runs.uninterrupted(bench)  # `save_total_limit` 1
    interval = runs.updates_of_a_pass(bench) + 1  # `save_steps` of `keeps_all`, and of its actors
    expected = due(interval, keeps_all.last_step)
    for folder, (interval_flag, limit_flag) in SAVED.items():
        if bench.has(interval_flag):
            saved = saved_steps(keeps_all, folder)
            yield Check(f"{interval_flag} {interval}", compare.lists(expected, saved, folder))
        if bench.has(interval_flag, limit_flag):
            saved = saved_steps(keeps_one, folder)
            yield Check(f"{limit_flag} 1", compare.lists([keeps_one.last_step], saved, folder))


def saved_steps(run: Finished, folder: str) -> list[int]:
    """Returns the updates whose checkpoints, or actors, a run has."""
    return [folders.step_of(path) for path in folders.by_step(run.folder / folder)]


def linear_schedule(bench: Bench, what: str, run: Finished) -> Iterator[Check]:
    """Whether each line logs the learning rate that its own update was made with.

    The first update has the peak rate. The rates fall in equal steps, which would reach 0 one
    update after the last. Only this shape is checked, since a fork may give its groups rates of
    their own.
    """
    rates = [line.get("learning_rate") for line in run.training]
    if not bench.has("lr_scheduler_type", "warmup_steps") or None in rates:
        return
    title = f"lr_scheduler_type linear, {what}"
    peak = rates[0]
    if peak == 0:
        yield Check(title, compare.faults(["learning_rate, update 1: 0, expected the peak rate"]))
        return
    differences = []
    for line, rate in zip(run.training, rates):
        step = line["global_step"]
        updates_left = run.last_step + 1 - step  # the line's own update is among them
        expected = peak * updates_left / run.last_step
        where = f"learning_rate, update {step}: {rate:.6g}, expected {expected:.6g}"
        off_by = abs(rate - expected) / peak
        differences.append(Difference(off_by, compare.SCHEDULE, where))
    yield Check(title, compare.first_or_nearest(differences))


def counts_of_epochs(run: Finished) -> Difference:
    """Compares updates and samples of a run of two epochs with twice the usable rows."""
    rows = 0
    for name, usable in re.findall(r"^data (.*): (\d+) usable rows", run.console, re.M):
        if Path(name).name.startswith("train_"):  # the held-out rows have such a line, too
            rows += int(usable)
    if rows == 0:
        raise Unchecked("the recipe prints no line `data NAME: N usable rows`")
    expected_samples = 2 * rows
    expected_updates = 2 * updates_in(rows)
    samples = run.training[-1].get("samples", expected_samples)
    wrong = abs(samples - expected_samples) + abs(run.last_step - expected_updates)
    found = f"{run.last_step} updates of {samples} samples"
    return Difference(wrong, 0, f"{found}, expected {expected_updates} of {expected_samples}")


def check_evaluation(bench: Bench) -> Iterator[Check]:
    """An evaluation has no dropout, and the training goes on as if there had been none."""
    bench.need("eval_steps")
    often = runs.uninterrupted(bench)
    if not often.evaluations:
        raise Unchecked("the recipe logs no evaluation")
    if bench.has_dropout:
        without_dropout = runs.two_processes(bench).evaluations[:1]
        yield Check("without dropout", compare.lines(without_dropout, often.evaluations[:1]))
    seldom = bench.run("seldom-evaluated", "ddp", **{**runs.INTERRUPTED, "eval_steps": 0})
    of_lines = compare.lines(seldom.training, often.training, exact=True)
    yield Check("log lines of training", of_lines)
    yield Check("weights", compare.models(seldom, often, exact=True))
    if not bench.has_dropout:
        raise Unchecked(f"evaluations without dropout: {NO_DROPOUT}")


# ============================================================ interrupted, repeated
def check_resume(bench: Bench) -> Iterator[Check]:
    """Killed and resumed, a run ends as if it had not been killed."""
    bench.need("save_steps", "logging_steps")
    yield from interrupted.resumed(bench, "2 processes", "ddp", runs.uninterrupted(bench))
    if not bench.quick:
        for launcher, what in (("plain", "1 process"), ("zero3", "ZeRO-3")):
            expected = bench.run(f"uninterrupted-{launcher}", launcher, **runs.INTERRUPTED)
            yield from interrupted.resumed(bench, what, launcher, expected)
    if not bench.generates and not bench.has_dropout:
        raise Unchecked(f"random states: {NO_DROPOUT}")


def check_seed(bench: Bench) -> Iterator[Check]:
    """The same seed is the same run; another seed, and another epoch, have another order."""
    once = runs.uninterrupted(bench)
    # In new interpreters: each has another seed of Python's hashes.
    again = bench.run("again", "ddp", fresh=True, **runs.INTERRUPTED)
    yield Check("twice: log lines", compare.lines(once.lines, again.lines, exact=True))
    yield Check("twice: weights", compare.models(once, again, exact=True))
    other = runs.other_seed(bench)
    # An epoch of one update has the same rows in any order.
    if bench.generates or runs.updates_of_a_pass(bench) > 1:
        unlike = compare.unlike(runs.one_process(bench).training[:1], other.training[:1])
        yield Check("another: unlike in the first line", unlike)
    if bench.has("learning_rate") and not bench.generates:
        bench.need("max_epochs")
        # It is a run at learning rate 0 that logs every update.
        yield from order_of_epochs(runs.unclipped(bench), runs.updates_of_a_pass(bench))


def order_of_epochs(run: Finished, per_epoch: int) -> Iterator[Check]:
    """Checks that two epochs differ in order: at learning rate 0 the same order logs the same.

    Checks nothing where an epoch is one update, which has the same rows in any order.

    Args:
        run: two epochs, a line for each update.
        per_epoch: the updates of an epoch.
    """
    if per_epoch < 2:
        return
    first = run.training[:per_epoch]
    second = run.training[per_epoch : 2 * per_epoch]
    unlike = compare.unlike(first, second)
    yield Check("another epoch: another order", unlike)


# ============================================================ what is saved
def check_nothing_moves(bench: Bench) -> Iterator[Check]:
    """A learning rate of 0 moves nothing, in spite of the weight decay."""
    bench.need("weight_decay")
    at_rate_0 = runs.pass_in_parts(bench)
    yield Check("2 processes", distance_moved(bench, at_rate_0))
    if not bench.quick:
        for name in ("zero2", "zero3"):
            changes = {**runs.NO_LEARNING, "micro_train_batch_size": 2, "save_steps": 2}
            run = bench.run(f"no-learning-{name}", name, **changes)
            yield Check(runs.ENGINES[name].what, distance_moved(bench, run))


def distance_moved(bench: Bench, run: Finished) -> Difference:
    """Compares weights that must not have moved: last checkpoint with first, actor with start."""
    differences = []
    saved = folders.by_step(run.folder / "checkpoints")
    for name in ("actor", "critic"):
        if len(saved) > 1 and (saved[0] / name).is_dir():
            first = weights_of(saved[0] / name)
            last = weights_of(saved[-1] / name)
            differences.append(compare.weights(first, last, name, exact=True))
    start = weights_of(bench.model_folder())
    actor = weights_of(run.folder / "actor")
    names = actor.keys() & start.keys()  # none of an adapter
    if names:
        # In fp32: a model may be stored in another dtype than it was loaded from.
        at_start = {name: start[name].float() for name in names}
        at_end = {name: actor[name].float() for name in names}
        differences.append(compare.weights(at_start, at_end, "actor", exact=True))
    if not differences:
        raise Unchecked("the recipe saves no model to compare with its start, nor two checkpoints")
    return compare.first_or_nearest(differences)


def check_actor(bench: Bench) -> Iterator[Check]:
    """The saved actor is the trained one, and loads anywhere."""
    one_process = runs.one_process(bench)
    if not (one_process.folder / "actor").is_dir():
        raise Unchecked("the recipe saves no actor")
    yield from saved_actor(bench, "1 process", one_process)
    yield from another_reference_differs(bench, one_process)
    made = [one_process]
    if not bench.quick:
        for name in ("zero3", "fsdp2"):
            run = runs.on_engine(bench, name)
            yield from saved_actor(bench, runs.ENGINES[name].what, run)
            made.append(run)
    if not all(run.evaluations for run in made):
        raise Unchecked("a new run on the actor: the recipe logs no evaluation")


def saved_actor(bench: Bench, what: str, run: Finished) -> Iterator[Check]:
    """Checks the actor that a run has saved, in three ways as far as the run allows it."""
    yield from loads_in_plain_transformers(bench, what, run)
    yield from equals_last_checkpoint(what, run)
    if run.evaluations:
        yield new_run_logs_the_same(bench, what, run)


def loads_in_plain_transformers(bench: Bench, what: str, run: Finished) -> Iterator[Check]:
    """Whether a script that knows only `transformers` and `peft` finds no fault in the actor."""
    script = str(Path(__file__).with_name("plain.py"))
    actor = str(run.folder / "actor")
    start = str(bench.model_folder())
    printed = bench.run_script(f"plain-{run.name}", script, actor, start)
    found = json.loads(printed.splitlines()[-1])
    faults = [f"{name}: {value}" for name, value in found.items() if value]
    yield Check(f"{what}: plain transformers loads it", compare.faults(faults))


def equals_last_checkpoint(what: str, run: Finished) -> Iterator[Check]:
    """Whether the actor has the weights of the last checkpoint, if there is one."""
    saved = folders.by_step(run.folder / "checkpoints")
    if not saved or not (saved[-1] / "actor").is_dir():
        return
    last = weights_of(saved[-1] / "actor")
    actor = weights_of(run.folder / "actor")
    same = compare.weights(last, actor, "actor", exact=True)
    yield Check(f"{what}: it is that of the last checkpoint", same)


def new_run_logs_the_same(bench: Bench, what: str, run: Finished) -> Check:
    """Whether a new run on the actor starts with the evaluation that the old run ended with."""
    first_line = bench.run_to_first_line(
        f"on-actor-{run.name}",
        model_name_or_path=run.folder / "actor",
        **reference_of(bench),
    )
    expected = {**run.evaluations[-1], "global_step": 0}
    same = compare.lines([expected], [first_line])
    return Check(f"{what}: a new run on it logs the last eval/*", same)


def another_reference_differs(bench: Bench, run: Finished) -> Iterator[Check]:
    """Whether another reference changes what is logged; yields nothing without a reference.

    Two runs start on the actor. One has the reference that it was trained with, the other has the
    actor itself as its reference.
    """
    reference = reference_of(bench)
    if not reference:
        return
    actor = run.folder / "actor"
    one_update: Changes = {"model_name_or_path": actor, "max_steps": 1}
    first = bench.run("reference-start", **one_update, **reference)
    other = bench.run("reference-itself", **one_update, ref_model_name_or_path=actor)
    yield Check("another reference: unlike", compare.unlike(first.lines, other.lines))


def reference_of(bench: Bench) -> Changes:
    """Returns the flag that gives a run on a saved actor the reference of the first run.

    It is {} if the recipe has no reference, or loads none because of `--kl_coef 0`.
    """
    asked = bench.arguments
    if "ref_model_name_or_path" not in asked or asked.get("kl_coef", 1) == 0:
        return {}
    # By default the reference is the model that the first run started from.
    reference = asked["ref_model_name_or_path"] or bench.model_folder()
    return {"ref_model_name_or_path": reference}


PROMISES = [
    Promise("split", "the same update however its samples are split", check_split),
    Promise("engines", "the same update under every engine", check_engines),
    Promise("packed", "the same update with rows packed or prompts shared", check_packed),
    Promise("means", "a logged metric is the exact mean over both processes", check_means),
    Promise(
        "evaluation",
        "an evaluation has no dropout and leaves no trace in the training",
        check_evaluation,
    ),
    Promise(
        "log-lines",
        "lines, evaluations, checkpoints and learning rates are where the flags say",
        check_log_lines,
    ),
    Promise(
        "resume", "killed and resumed, a run ends as if it had never been killed", check_resume
    ),
    Promise("overflow", "an fp16 overflow leaves no trace", overflow.check_overflow),
    Promise("seed", "the same seed is the same run, another seed another", check_seed),
    Promise("still", "a learning rate of 0 moves nothing", check_nothing_moves),
    Promise("actor", "the saved actor is the trained one", check_actor),
    Promise("last-update", "the last, short update weighs each sample 1/n", check_last_update),
]
