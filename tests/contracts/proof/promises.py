"""What each promise means: the runs it looks at, and what it compares.

The bounds are in `compare.py`, those of fp16 in `overflow.py`.

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
    pass_in_parts   2           2 or 8 samples     no       no        update 1, then one a pass

Runs that do not learn have a learning rate of 0: all their updates meet the same weights.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from common import folders
from contracts.proof import compare, interrupted, overflow, runs
from contracts.proof.bench import (
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
from contracts.proof.compare import Check, Difference

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
# Does the work, and yields what it measured, check by check. It may raise `Unchecked` or `RunFailed`;
# the checks before that stay. So it first yields all that the recipe allows, and then raises
# `Unchecked` with what it does not.
Promise = Callable[[Bench], Iterator[Check]]


# ============================================================ the same update
def check_split(bench: Bench) -> Iterator[Check]:
    """An update is the same however its samples are split."""
    bench.need("micro_train_batch_size")
    in_fours = bench.run("4x4", micro_train_batch_size=4, **runs.SAVED_AT_END)
    yield from same_run(bench, "4 micro-batches of 4", in_fours)
    yield from same_run(bench, "2 processes", runs.two_processes(bench))
    if bench.quick or not bench.has("micro_train_tokens"):
        return
    # Room for about five samples in a micro-batch.
    room = round(5 * tokens_of_sample(runs.one_process(bench)))
    changes: Changes = {"micro_train_tokens": room, **runs.SAVED_AT_END}
    yield from same_run(bench, "micro-batches by tokens", bench.run("tokens", **changes))
    yield from same_run(bench, "2 processes by tokens", bench.run("2-by-tokens", "ddp", **changes))


def tokens_of_sample(run: Finished) -> float:
    """Returns the mean tokens of a sample in a run's first update."""
    first_line = run.training[0]
    if "tokens" not in first_line or "samples" not in first_line:
        return TOKENS_OF_SAMPLE
    return first_line["tokens"] / first_line["samples"]


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
    """In a last, short update of n samples each weighs 1/n, not 1 / `--train_batch_size`.

    Two runs make one update of the same 6 rows, or 6 prompts where a recipe samples. It is a full
    update of one run, and a short one of the other.
    """
    bench.need("train_batch_size")
    n_rows = 6
    if bench.generates:
        full: Changes = {"train_batch_size": n_rows * RESPONSES, "rollout_batch_size": n_rows}
        short: Changes = {"train_batch_size": ROLLOUT * RESPONSES, "rollout_batch_size": ROLLOUT}
    else:
        full = {"train_batch_size": n_rows}
        short = {"train_batch_size": BATCH}
    one_epoch: Changes = {"n_rows": n_rows, "max_steps": 0, "max_epochs": 1, **runs.SAVED_AT_END}
    expected = bench.run("full-update", micro_train_batch_size=2, **one_epoch, **full)
    # 4 divides neither 6 rows nor 18 samples: micro-batches of 3 and 3, or of 4, 4, 4, 3 and 3.
    found = bench.run("short-update", micro_train_batch_size=4, **one_epoch, **short)
    only = {"loss", "grad_norm", "samples"}
    yield Check("log lines", compare.lines(expected.training, found.training, only))
    yield Check("weights", compare.models(expected, found))


# ============================================================ what is logged
def check_means(bench: Bench) -> Iterator[Check]:
    """A logged metric is the mean over all samples, however split; `grad_norm` is unclipped.

    The runs do not learn, so how a pass is cut into updates must not change its means.
    """
    at_once = runs.pass_at_once(bench)
    in_parts = runs.pass_in_parts(bench)
    unchecked = []
    # With n updates in a pass, `in_parts` logs after updates 1, n and 2n. Unless n is 1, only the
    # last of these lines is over a whole pass.
    has_second_pass = in_parts.last_step >= 2 * runs.updates_of_a_pass(bench)
    if has_second_pass:
        yield from means_of_a_pass(at_once, in_parts)
    else:
        unchecked.append("a line over a whole pass: the recipe makes only one pass")
    if bench.has("max_grad_norm"):
        yield norm_before_clipping(bench)
    else:
        unchecked.append("grad_norm before clipping: the recipe has no --max_grad_norm")
    if at_once.evaluations or in_parts.evaluations:
        yield from means_of_evaluations(bench, at_once, in_parts)
    else:
        unchecked.append("means of an evaluation: the recipe logs no evaluation")
    if unchecked:
        raise Unchecked("; ".join(unchecked))


def means_of_a_pass(at_once: Finished, in_parts: Finished) -> Iterator[Check]:
    """Compares the last lines of two runs that do not learn: each is over one whole pass.

    `at_once` makes one update a pass, so each of its lines is over a whole pass. `in_parts` makes n
    updates a pass. Its lines are over

        1. update 1
        2. updates 2 to n, the rest of the first pass; if n is 1, there is no such line
        3. the second pass

    Line 3 must equal a line of `at_once`. Line 2 must differ from it, since it lacks update 1. If
    it does not, the sums were not emptied when line 1 was written.
    """
    expected = means_of_last_pass(at_once)
    found = means_of_last_pass(in_parts)
    # The runs end at different steps, which is not compared.
    same_step = {"global_step": in_parts.last_step}
    same = compare.lines([{**expected, **same_step}], [{**found, **same_step}])
    yield Check("training lines", same)
    if len(in_parts.training) > 2:
        rest_of_first_pass = in_parts.training[1]
        differs = compare.unlike([rest_of_first_pass], [expected])
        yield Check("since the last line alone", differs)


def means_of_last_pass(run: Finished) -> dict:
    """Returns the metrics of a run's last pass, without those of one update alone.

    These runs have at most one rollout. Its metrics, such as `reward`, are in the first line alone,
    so they are taken from there.
    """
    line = {**run.training[0], **run.training[-1]}
    return {tag: value for tag, value in line.items() if not compare.is_of_last_update(tag)}


def norm_before_clipping(bench: Bench) -> Check:
    """Whether a run that clips its gradients logs the norm that they had before."""
    clipped = runs.one_process(bench).training[:1]
    unclipped = runs.unclipped(bench).training[:1]
    same = compare.lines(clipped, unclipped, only={"grad_norm"})
    return Check("grad_norm before clipping", same)


def means_of_evaluations(bench: Bench, at_once: Finished, in_parts: Finished) -> Iterator[Check]:
    """Compares first evaluations: `at_once` with `in_parts`, and one process with two."""
    first = compare.lines(at_once.evaluations[:1], in_parts.evaluations[:1])
    yield Check("evaluations", first)
    # Five held-out rows in micro-batches of one: one process has a padding row.
    alone = runs.one_process(bench).evaluations[:1]
    in_ones = runs.two_processes(bench).evaluations[:1]
    yield Check("evaluations, a row at a time", compare.lines(alone, in_ones))


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
        also: a further step at which it is due.
    """
    steps = {*range(interval, last + 1, interval), last}
    return sorted(steps if also is None else {also, *steps})


def every_interval_logged(bench: Bench) -> Iterator[Check]:
    """Checks where the log lines are in runs of different `logging_steps`."""
    yield logged_where_due("logging_steps 1, one process", runs.one_process(bench), 1)
    yield logged_where_due("logging_steps 1, two processes", runs.two_processes(bench), 1)
    yield logged_where_due("logging_steps 4", runs.uninterrupted(bench), 4)
    interval = runs.updates_of_a_pass(bench)
    yield logged_where_due(f"logging_steps {interval}", runs.pass_in_parts(bench), interval)
    if not bench.has("seed"):
        return
    other = runs.other_seed(bench)
    if bench.generates:
        yield logged_where_due("logging_steps 2", other, 2)
    else:
        half = math.ceil(0.5 * other.last_step)
        yield logged_where_due("logging_steps half of all", other, half)


def logged_where_due(title: str, run: Finished, interval: int) -> Check:
    """Whether lines are at the first update, at every multiple of `interval`, and at the last."""
    expected = due(interval, run.last_step, also=1)
    found = [line["global_step"] for line in run.training]
    return Check(title, compare.lists(expected, found, "lines"))


def saved_where_due(bench: Bench) -> Iterator[Check]:
    """Whether checkpoints and actors are where the flags say, and no more than are to be kept."""
    # `runs.pass_in_parts` has `save_steps` and `save_actor_steps` of this interval, and no limits.
    interval = runs.updates_of_a_pass(bench) + 1
    keeps_all = runs.pass_in_parts(bench)
    all_due = due(interval, keeps_all.last_step)
    # `runs.uninterrupted` has limits of 1.
    keeps_last = runs.uninterrupted(bench)
    last_due = [keeps_last.last_step]
    for folder, (interval_flag, limit_flag) in SAVED.items():
        if not bench.has(interval_flag):
            continue
        all_saved = compare.lists(all_due, saved_steps(keeps_all, folder), folder)
        yield Check(f"{interval_flag} {interval}", all_saved)
        if bench.has(limit_flag):
            one_kept = compare.lists(last_due, saved_steps(keeps_last, folder), folder)
            yield Check(f"{limit_flag} 1", one_kept)


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
        return  # a fork with a schedule of its own
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
    rows = usable_training_rows(run)
    expected_samples = 2 * rows
    expected_updates = 2 * updates_in(rows)
    samples = run.training[-1].get("samples", expected_samples)
    wrong = abs(samples - expected_samples) + abs(run.last_step - expected_updates)
    found = f"{run.last_step} updates of {samples} samples"
    return Difference(wrong, 0, f"{found}, expected {expected_updates} of {expected_samples}")


def usable_training_rows(run: Finished) -> int:
    """Returns how many rows a run trains on in an epoch, as its console says.

    A line for each file reads `data /x/train_33_0.jsonl: 20 usable rows`. Files of held-out rows
    have such lines, too, and other names.
    """
    rows = 0
    for file, usable in re.findall(r"^data (.*): (\d+) usable rows", run.console, re.M):
        if Path(file).name.startswith("train_"):
            rows += int(usable)
    if rows == 0:
        raise Unchecked("the recipe prints no line `data NAME: N usable rows`")
    return rows


def check_evaluation(bench: Bench) -> Iterator[Check]:
    """An evaluation has no dropout, and leaves no trace in the training."""
    bench.need("eval_steps")
    often = runs.uninterrupted(bench)  # with dropout, if the model's config or an adapter has one
    if not often.evaluations:
        raise Unchecked("the recipe logs no evaluation")
    at_ends: Changes = {**runs.INTERRUPTED, "eval_steps": 0}
    seldom = bench.run("seldom-evaluated", "ddp", **at_ends)
    of_lines = compare.lines(seldom.training, often.training, exact=True)
    yield Check("log lines of training", of_lines)
    yield Check("weights", compare.models(seldom, often, exact=True))
    if not bench.has_dropout:
        raise Unchecked(f"evaluations without dropout: {NO_DROPOUT}")
    # The first evaluation, before any update, of a run whose config has no dropout.
    without_dropout = runs.two_processes(bench).evaluations[:1]
    yield Check("without dropout", compare.lines(without_dropout, often.evaluations[:1]))


# ============================================================ interrupted, repeated
def check_resume(bench: Bench) -> Iterator[Check]:
    """Killed and resumed, a run ends as if it had not been killed."""
    bench.need("save_steps", "logging_steps")
    yield from interrupted.resumed(bench, "2 processes", "ddp", runs.uninterrupted(bench))
    if not bench.quick:
        for launcher, what in (("plain", "1 process"), ("zero3", "ZeRO-3")):
            expected = bench.run(f"uninterrupted-{launcher}", launcher, **runs.INTERRUPTED)
            yield from interrupted.resumed(bench, what, launcher, expected)
    # Lost random states show only in what draws from them: dropout, and sampling without seeds of
    # its own. How a fork samples is not known, so a recipe that samples counts as drawing.
    draws_at_random = bench.has_dropout or bench.generates
    if not draws_at_random:
        raise Unchecked(f"random states: {NO_DROPOUT}")


def check_seed(bench: Bench) -> Iterator[Check]:
    """The same seed is the same run; another seed, and another epoch, have another order."""
    once = runs.uninterrupted(bench)
    # In new interpreters: each has another seed of Python's hashes.
    again = bench.run("again", "ddp", fresh=True, **runs.INTERRUPTED)
    yield Check("twice: log lines", compare.lines(once.lines, again.lines, exact=True))
    yield Check("twice: weights", compare.models(once, again, exact=True))
    other = runs.other_seed(bench)
    # Responses show the seed, and so does the order of rows.
    if not bench.generates and runs.updates_of_a_pass(bench) == 1:
        raise Unchecked("another seed: an epoch is one update, in which no order of rows shows")
    unlike = compare.unlike(runs.one_process(bench).training[:1], other.training[:1])
    yield Check("another: unlike in the first line", unlike)
    if not bench.generates:
        bench.need("max_epochs")
        yield order_of_epochs(runs.unclipped(bench), runs.updates_of_a_pass(bench))


def order_of_epochs(run: Finished, per_epoch: int) -> Check:
    """Whether the second epoch has another order: at learning rate 0 the same one logs the same.

    Args:
        run: two epochs at learning rate 0, with a line for each update.
        per_epoch: the updates of an epoch, at least two.
    """
    first = run.training[:per_epoch]
    second = run.training[per_epoch : 2 * per_epoch]
    return Check("another epoch: another order", compare.unlike(first, second))


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
    """Compares the weights of a run in which nothing may move, in all ways that it allows."""
    differences = [*between_checkpoints(run), *since_start(bench, run)]
    if not differences:
        raise Unchecked("the recipe saves no model to compare with its start, nor two checkpoints")
    return compare.first_or_nearest(differences)


def between_checkpoints(run: Finished) -> Iterator[Difference]:
    """Compares the last checkpoint with the first: the actor, and the critic if there is one."""
    saved = folders.by_step(run.folder / "checkpoints")
    if len(saved) < 2:
        return
    for name in ("actor", "critic"):
        if (saved[0] / name).is_dir():
            first = weights_of(saved[0] / name)
            last = weights_of(saved[-1] / name)
            yield compare.weights(first, last, name, exact=True)


def since_start(bench: Bench, run: Finished) -> Iterator[Difference]:
    """Compares the saved actor with the model that the run began with.

    Yields nothing for a new adapter, which has none of the model's tensors.
    """
    start = weights_of(bench.model_folder())
    actor = weights_of(run.folder / "actor")
    names = actor.keys() & start.keys()
    if names:
        # In fp32: a model may be stored in another dtype than it was loaded from.
        at_start = {name: start[name].float() for name in names}
        at_end = {name: actor[name].float() for name in names}
        yield compare.weights(at_start, at_end, "actor", exact=True)


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


PROMISES: dict[str, Promise] = {
    "split": check_split,
    "engines": check_engines,
    "packed": check_packed,
    "means": check_means,
    "evaluation": check_evaluation,
    "log-lines": check_log_lines,
    "resume": check_resume,
    "overflow": overflow.check_overflow,
    "seed": check_seed,
    "still": check_nothing_moves,
    "actor": check_actor,
    "last-update": check_last_update,
}
