"""The proof: a recipe, or a fork of one, keeps each promise of docs/forking.md, where each has a section.

    make prove RECIPE=~/work/my_dpo.py                                          on every engine, ten minutes
    make prove RECIPE=~/work/my_dpo.py ARGS=--quick                             on fewer, two minutes
    pytest tests/contracts/test_recipe.py --recipe ~/work/my_dpo.py -k "split or resume"
    pytest tests/contracts --recipe "my_dpo.py --model_name_or_path MODEL --dataset_name pairs.jsonl"

The recipe runs many times on its demo, or on the model and the data that its arguments name, cut to a few rows, on the
CPU in fp32 (one promise in fp16). Only what users script against is looked at: flags, log lines and their tags, files.
A promise that cannot be checked, or not wholly, is skipped with the reason. Without `--recipe` the recipes of this
repository are proved. Bounds are in proof/compare.py. Several tests look at the same runs, which are in proof/runs.py:

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
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import folders
from contracts.proof import compare, interrupted, overflow, plain, runs, warm
from contracts.proof.bench import (
    BATCH,
    EVAL_STEPS,
    RESPONSES,
    ROLLOUT,
    Bench,
    Changes,
    Finished,
    updates_in,
    weights_of,
)
from contracts.proof.compare import Difference
from recipes import NAMES
from runs import REPOSITORY, TIMEOUT, recipe

pytestmark = pytest.mark.timeout(1200)

# What depends on a recipe's own loop. SFT and DPO show the other promises, which come from `common`; in CI each recipe
# is proved whole every week.
OF_EACH = {"test_split", "test_engines", "test_means", "test_last_update", "test_resume"}
# In `make test` other tests hold these of SFT or of DPO.
HELD = {"test_packed", "test_last_update", "test_resume", "test_overflow"}


def pytest_generate_tests(metafunc):
    given = metafunc.config.getoption("recipe")
    if given:
        proved = [pytest.param(given, id=given[0].stem)]
    else:
        # Each other recipe repeats on its own what SFT shows.
        is_held = metafunc.function.__name__ in HELD
        marks = {name: [pytest.mark.slow] * (name != "sft" or is_held) for name in NAMES}
        proved = [
            pytest.param([recipe(name)], id=name, marks=marks[name])
            for name in NAMES
            if name in ("sft", "dpo") or metafunc.function.__name__ in OF_EACH
        ]
    metafunc.parametrize("bench", proved, indirect=True, scope="module")


@pytest.fixture(scope="module")
def bench(request, tmp_path_factory):
    file, *arguments = request.param
    options = request.config.option
    # Of the recipes here one is proved on every engine.
    is_quick = options.quick or (not options.recipe and file.stem != "dpo")
    with pytest.MonkeyPatch.context() as patch:
        # Copies of recipes import this repository's `common`.
        patch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
        yield Bench(file, arguments, tmp_path_factory.mktemp("proof"), is_quick)


@pytest.fixture
def check(request):
    """The function that prints what was measured, and ends the test where it is beyond its bound."""
    promise = request.function.__name__.removeprefix("test_").replace("_", "-")

    def checked(what: str, difference: Difference) -> None:
        measured = f"{what}: off by {difference.measured:.2g}, bound {difference.bound:.2g}"
        if not difference.green:
            where = f"First in {difference.where}\nsee docs/forking.md#{promise}"
            pytest.fail(f"RED {promise}\n{measured}. {where}", pytrace=False)
        print(f"green  {measured}")

    return checked


# ============================================================ the same update

# What identifies an update in a log line.
OF_UPDATE = {"loss", "grad_norm", "learning_rate", "samples", "tokens"}
# A guess, if the recipe logs no tokens.
TOKENS_OF_SAMPLE = 32


def test_split(bench, check):
    """An update is the same however its samples are split."""
    bench.need("micro_train_batch_size")
    in_fours = bench.run("4x4", micro_train_batch_size=4, **runs.SAVED_AT_END)
    check_same_run(bench, check, "4 micro-batches of 4", in_fours)
    check_same_run(bench, check, "2 processes", runs.two_processes(bench))
    if bench.quick or not bench.has("micro_train_tokens"):
        return
    # Room for about five samples in a micro-batch.
    first_line = runs.one_process(bench).training[0]
    tokens = TOKENS_OF_SAMPLE
    if "tokens" in first_line and "samples" in first_line:
        tokens = first_line["tokens"] / first_line["samples"]
    changes: Changes = {"micro_train_tokens": round(5 * tokens), **runs.SAVED_AT_END}
    check_same_run(bench, check, "micro-batches by tokens", bench.run("tokens", **changes))
    check_same_run(bench, check, "2 processes by tokens", bench.run("2-tokens", "ddp", **changes))


def test_engines(bench, check):
    """An update is the same under every engine."""
    bench.need("micro_train_batch_size")
    for name in ("zero3",) if bench.quick else runs.ENGINES:
        check_same_run(bench, check, name, runs.on_engine(bench, name))


def test_packed(bench, check):
    """An update is the same with rows packed or prompts shared, which all other runs have off."""
    flags = [name for name in ("packing", "share_prompts") if bench.has(name)]
    if not flags:
        pytest.skip("the recipe has neither --packing nor --share_prompts")
    changes: Changes = dict.fromkeys(flags, True)
    packed = bench.run("packed", micro_train_batch_size=4, **runs.SAVED_AT_END, **changes)
    check_same_run(bench, check, f"--{' --'.join(flags)}", packed)


def check_same_run(bench: Bench, check, what: str, found: Finished) -> None:
    """Compares a run with that of one process: its weights, and `OF_UPDATE` of its log lines."""
    expected = runs.one_process(bench)
    check(f"{what}: log lines", compare.lines(expected.training, found.training, only=OF_UPDATE))
    check(f"{what}: weights", compare.models(expected, found))


def test_last_update(bench, check):
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
    check("log lines", compare.lines(expected.training, found.training, only))
    check("weights", compare.models(expected, found))


# ============================================================ what is logged


def test_means(bench, check):
    """A logged metric is the mean over all samples, however split; `grad_norm` is unclipped.

    The runs do not learn. `at_once` makes one update a pass, so each of its lines is over a whole
    pass. `in_parts` makes n updates a pass. Its lines are over update 1; over updates 2 to n, the
    rest of the first pass; over the second pass.
    """
    at_once = runs.pass_at_once(bench)
    in_parts = runs.pass_in_parts(bench)
    unchecked = []
    if in_parts.last_step >= 2 * runs.updates_of_a_pass(bench):
        expected, found = of_last_pass(at_once), of_last_pass(in_parts)
        # The runs end at different steps, which is not compared.
        same_step = {"global_step": in_parts.last_step}
        check("training lines", compare.lines([expected | same_step], [found | same_step]))
        if len(in_parts.training) > 2:
            # It lacks update 1, unless the sums were not emptied when line 1 was written.
            rest_of_first_pass = in_parts.training[1]
            check("since the last line", compare.unlike([rest_of_first_pass], [expected]))
    else:
        unchecked.append("a line over a whole pass: the recipe makes only one pass")
    if bench.has("max_grad_norm"):
        clipped = runs.one_process(bench).training[:1]
        unclipped = runs.unclipped(bench).training[:1]
        same = compare.lines(clipped, unclipped, only={"grad_norm"})
        check("grad_norm before clipping", same)
    else:
        unchecked.append("grad_norm before clipping: the recipe has no --max_grad_norm")
    if at_once.evaluations or in_parts.evaluations:
        first = compare.lines(at_once.evaluations[:1], in_parts.evaluations[:1])
        check("evaluations", first)
        # Five held-out rows in micro-batches of one: one process has a padding row.
        alone = runs.one_process(bench).evaluations[:1]
        in_ones = runs.two_processes(bench).evaluations[:1]
        check("evaluations, a row at a time", compare.lines(alone, in_ones))
    else:
        unchecked.append("means of an evaluation: the recipe logs no evaluation")
    if unchecked:
        pytest.skip("; ".join(unchecked))


def of_last_pass(run: Finished) -> dict:
    """Returns the metrics of a run's last pass, without those of one update alone.

    These runs have at most one rollout. Its metrics, such as `reward`, are in the first line alone,
    so they are taken from there.
    """
    line = {**run.training[0], **run.training[-1]}
    return {tag: value for tag, value in line.items() if not compare.is_of_last_update(tag)}


def test_log_lines(bench, check):
    """Whatever is logged, evaluated or saved is where the flags say."""
    bench.need("logging_steps")
    one_process = runs.one_process(bench)
    for run, interval in [
        (one_process, 1),
        (runs.two_processes(bench), 1),
        (runs.uninterrupted(bench), 4),
        (runs.pass_in_parts(bench), runs.updates_of_a_pass(bench)),
    ]:
        expected = due(interval, run.last_step, also=1)
        found = [line["global_step"] for line in run.training]
        check(f"logging_steps {interval}", compare.lists(expected, found, "lines"))
    if bench.has("seed"):
        other = runs.other_seed(bench)
        interval = 2 if bench.generates else math.ceil(0.5 * other.last_step)
        expected = due(interval, other.last_step, also=1)
        found = [line["global_step"] for line in other.training]
        check("logging_steps, 2 or half of all", compare.lists(expected, found, "lines"))
    if bench.has("eval_steps"):
        expected = due(EVAL_STEPS, one_process.last_step, also=0)
        found = [line["global_step"] for line in one_process.evaluations]
        check(f"eval_steps {EVAL_STEPS}", compare.lists(expected, found, "lines"))
    check_saved_where_due(bench, check)
    check_linear_schedule(bench, check, one_process)
    check_linear_schedule(bench, check, runs.two_processes(bench))
    if not bench.generates:
        bench.need("max_epochs")
        check("updates and samples of 2 epochs", counts_of_epochs(one_process))


def due(interval: int, last: int, also: int | None = None) -> list[int]:
    """Returns the steps at which something is due: `due(4, 6, also=0)` is `[0, 4, 6]`."""
    steps = {*range(interval, last + 1, interval), last}
    return sorted(steps if also is None else {also, *steps})


def check_saved_where_due(bench: Bench, check) -> None:
    """Whether checkpoints and actors are where the flags say, and no more than are to be kept."""
    # `runs.pass_in_parts` has `save_steps` and `save_actor_steps` of this interval, and no limits.
    interval = runs.updates_of_a_pass(bench) + 1
    keeps_all = runs.pass_in_parts(bench)
    keeps_last = runs.uninterrupted(bench)  # it has limits of 1
    for folder, interval_flag, limit_flag in [
        ("checkpoints", "save_steps", "save_total_limit"),
        ("actors", "save_actor_steps", "save_actor_limit"),
    ]:
        if not bench.has(interval_flag):
            continue
        expected = due(interval, keeps_all.last_step)
        all_saved = compare.lists(expected, saved_steps(keeps_all, folder), folder)
        check(f"{interval_flag} {interval}", all_saved)
        if bench.has(limit_flag):
            expected = [keeps_last.last_step]
            one_kept = compare.lists(expected, saved_steps(keeps_last, folder), folder)
            check(f"{limit_flag} 1", one_kept)


def saved_steps(run: Finished, folder: str) -> list[int]:
    """Returns the updates whose checkpoints, or actors, a run has."""
    return [folders.step_of(path) for path in folders.by_step(run.folder / folder)]


def check_linear_schedule(bench: Bench, check, run: Finished) -> None:
    """Whether each line logs the learning rate that its own update was made with.

    The first update has the peak rate. The rates fall in equal steps, which would reach 0 one
    update after the last. Only this shape is checked, since a fork may give its groups rates of
    their own.
    """
    rates = [line.get("learning_rate") for line in run.training]
    if not bench.has("lr_scheduler_type", "warmup_steps") or None in rates:
        return  # a fork with a schedule of its own
    peak = rates[0]
    differences = []
    for line, rate in zip(run.training, rates):
        step = line["global_step"]
        updates_left = run.last_step + 1 - step  # the line's own update is among them
        expected = peak * updates_left / run.last_step
        where = f"learning_rate, update {step}: {rate:.6g}, expected {expected:.6g}"
        off_by = abs(rate - expected) / peak if peak else math.inf
        differences.append(Difference(off_by, compare.SCHEDULE, where))
    check("lr_scheduler_type linear", compare.first_or_nearest(differences))


def counts_of_epochs(run: Finished) -> Difference:
    """Compares updates and samples of a run of two epochs with twice the usable rows.

    The console has a line for each file, such as `data /x/train_33_0.jsonl: 20 usable rows`. Files
    of held-out rows have other names.
    """
    found = re.findall(r"^data .*/train_\S*: (\d+) usable rows", run.console, re.M)
    rows = sum(map(int, found))
    if rows == 0:
        pytest.skip("the recipe prints no line `data NAME: N usable rows`")
    expected_samples = 2 * rows
    expected_updates = 2 * updates_in(rows)
    samples = run.training[-1].get("samples", expected_samples)
    wrong = abs(samples - expected_samples) + abs(run.last_step - expected_updates)
    where = f"{run.last_step} updates of {samples} samples"
    return Difference(wrong, 0, f"{where}, expected {expected_updates} of {expected_samples}")


NO_DROPOUT = "the model's config names no dropout, and there is no --lora_dropout"


def test_evaluation(bench, check):
    """An evaluation has no dropout, and leaves no trace in the training."""
    bench.need("eval_steps")
    often = runs.uninterrupted(bench)  # with dropout, if the model's config or an adapter has one
    if not often.evaluations:
        pytest.skip("the recipe logs no evaluation")
    seldom = bench.run("seldom-evaluated", "ddp", **{**runs.INTERRUPTED, "eval_steps": 0})
    check("log lines of training", compare.lines(seldom.training, often.training, exact=True))
    check("weights", compare.models(seldom, often, exact=True))
    if not bench.has_dropout:
        pytest.skip(f"evaluations without dropout: {NO_DROPOUT}")
    # The first evaluation, before any update, of a run whose config has no dropout.
    without_dropout = runs.two_processes(bench).evaluations[:1]
    check("without dropout", compare.lines(without_dropout, often.evaluations[:1]))


# ============================================================ interrupted, repeated


def test_resume(bench, check):
    """Killed and resumed, a run ends as if it had not been killed."""
    bench.need("save_steps", "logging_steps")
    for launcher in ("ddp",) if bench.quick else ("ddp", "plain", "zero3"):
        if launcher == "ddp":
            expected = runs.uninterrupted(bench)
        else:
            expected = bench.run(f"uninterrupted-{launcher}", launcher, **runs.INTERRUPTED)
        if expected.last_step < 2 * runs.INTERRUPTED["save_steps"]:
            pytest.skip(f"{launcher}: a run has too few updates for two checkpoints")
        found, faults = interrupted.resumed(bench, launcher)
        check(f"{launcher}: checkpoints whole or not there", compare.faults(faults))
        check(f"{launcher}: log lines", compare.lines(expected.lines, found.lines, exact=True))
        check(f"{launcher}: samples", interrupted.samples(expected, found))
        check(f"{launcher}: weights", compare.models(expected, found, exact=True))
    # Lost random states show only in what draws from them: dropout, and sampling without seeds of
    # its own. How a fork samples is not known, so a recipe that samples counts as drawing.
    if not (bench.has_dropout or bench.generates):
        pytest.skip(f"random states: {NO_DROPOUT}")


def test_overflow(bench, check):
    """The applied updates of a run that overflows in fp16 are those of a run that never does."""
    bench.need("max_steps", "train_batch_size")
    overflowed, clean, power = overflow.overflowed_and_clean(bench)
    nothing = [] if overflowed.training else ["no update was applied, or none was logged"]
    check("updates after the overflows", compare.faults(nothing))
    check("skips counted", overflow.skips(overflowed, power))
    # At one micro-batch size these are equal bit for bit, whatever the loss was multiplied by.
    only = {"global_step", "learning_rate", "critic_learning_rate", "samples", "tokens"}
    exact = compare.lines(clean.training, overflowed.training, only, exact=True)
    check("steps, samples, learning rates", exact)
    check("losses", overflow.losses(clean, overflowed))
    check("weights", overflow.weights(bench, clean, overflowed))
    check("samples of the next update", overflow.after_overflows(bench, power))


def test_seed(bench, check):
    """The same seed is the same run; another seed, and another epoch, have another order."""
    once = runs.one_process(bench)
    # In a new interpreter, which has another seed of Python's hashes.
    again = bench.run("again", fresh=True, **runs.SAVED_AT_END)
    check("twice: log lines", compare.lines(once.lines, again.lines, exact=True))
    check("twice: weights", compare.models(once, again, exact=True))
    other = runs.other_seed(bench)
    # Responses show the seed, and so does the order of rows.
    per_epoch = runs.updates_of_a_pass(bench)
    if not bench.generates and per_epoch == 1:
        pytest.skip("another seed: an epoch is one update, in which no order of rows shows")
    check(
        "another: unlike in the first line", compare.unlike(once.training[:1], other.training[:1])
    )
    if not bench.generates:
        bench.need("max_epochs")
        lines = runs.unclipped(bench).training  # at learning rate 0 the same order logs the same
        unlike = compare.unlike(lines[:per_epoch], lines[per_epoch : 2 * per_epoch])
        check("another epoch: another order", unlike)


# ============================================================ what is saved


def test_still(bench, check):
    """A learning rate of 0 moves nothing, in spite of the weight decay."""
    bench.need("weight_decay")
    made = {"ddp": runs.pass_in_parts(bench)}
    for name in () if bench.quick else ("zero2", "zero3"):
        changes = {**runs.NO_LEARNING, "micro_train_batch_size": 2, "save_steps": 2}
        made[name] = bench.run(f"no-learning-{name}", name, **changes)
    for name, run in made.items():
        differences = [*between_checkpoints(run), *since_start(bench, run)]
        if not differences:
            pytest.skip("the recipe saves no model to compare with its start, nor two checkpoints")
        check(name, compare.first_or_nearest(differences))


def between_checkpoints(run: Finished) -> Iterator[Difference]:
    """Compares the last checkpoint with the first: the actor, and the critic if there is one."""
    saved = folders.by_step(run.folder / "checkpoints")
    for name in ("actor", "critic") if len(saved) > 1 else ():
        if (saved[0] / name).is_dir():
            first, last = weights_of(saved[0] / name), weights_of(saved[-1] / name)
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


def test_actor(bench, check):
    """The saved actor is the trained one, and loads anywhere."""
    made = {"plain": runs.one_process(bench)}
    if not (made["plain"].folder / "actor").is_dir():
        pytest.skip("the recipe saves no actor")
    for name in () if bench.quick else ("zero3", "fsdp2"):
        made[name] = runs.on_engine(bench, name)
    for name, run in made.items():
        check_actor(bench, check, name, run)
    check_another_reference(bench, check, made["plain"])
    if not all(run.evaluations for run in made.values()):
        pytest.skip("a new run on the actor: the recipe logs no evaluation")


def check_actor(bench: Bench, check, what: str, run: Finished) -> None:
    """Checks the actor that a run has saved, in three ways as far as the run allows it."""
    # A script that knows only `transformers` and `peft`.
    words = [sys.executable, plain.__file__, str(run.folder / "actor"), str(bench.model_folder())]
    done = warm.run(words, Path.cwd(), dict(os.environ), timeout=TIMEOUT)
    if done.returncode:
        pytest.fail(f"plain transformers does not load it:\n{done.stdout[-2000:]}", pytrace=False)
    found = json.loads(done.stdout.splitlines()[-1])
    faults = [f"{name}: {value}" for name, value in found.items() if value]
    check(f"{what}: plain transformers loads it", compare.faults(faults))

    saved = folders.by_step(run.folder / "checkpoints")
    if saved and (saved[-1] / "actor").is_dir():
        last, actor = weights_of(saved[-1] / "actor"), weights_of(run.folder / "actor")
        same = compare.weights(last, actor, "actor", exact=True)
        check(f"{what}: it is that of the last checkpoint", same)

    if run.evaluations:
        changes = {"model_name_or_path": run.folder / "actor", **reference_of(bench)}
        first_line = bench.run_to_first_line(f"on-actor-{what}", **changes)
        expected = {**run.evaluations[-1], "global_step": 0}
        same = compare.lines([expected], [first_line])
        check(f"{what}: a new run on it logs the last eval/*", same)


def check_another_reference(bench: Bench, check, run: Finished) -> None:
    """Whether another reference changes what is logged, where the recipe has one.

    Two runs start on the actor. One has the reference that it was trained with, the other has the
    actor itself as its reference.
    """
    reference = reference_of(bench)
    if reference:
        actor = run.folder / "actor"
        one_update: Changes = {"model_name_or_path": actor, "max_steps": 1}
        first = bench.run("reference-start", **one_update, **reference)
        other = bench.run("reference-itself", **one_update, ref_model_name_or_path=actor)
        check("another reference: unlike", compare.unlike(first.lines, other.lines))


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
