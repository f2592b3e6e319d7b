"""The proof: a recipe, or a fork of one, keeps each promise of docs/forking.md, where each has a section.

    make prove RECIPE=~/work/my_dpo.py                                          on every engine, ten minutes
    make prove RECIPE=~/work/my_dpo.py ARGS=--quick                             on fewer, two minutes
    pytest tests/contracts/test_recipe.py --recipe ~/work/my_dpo.py -k "split or resume"
    pytest tests/contracts --recipe "my_dpo.py --model_name_or_path MODEL --dataset_name pairs.jsonl"

The recipe runs many times on its demo, or on the model and the data that its arguments name, cut to a few rows, on the
CPU in fp32 (one promise in fp16). Only what users script against is looked at: flags, log lines and their tags, files.
Without `--recipe` the recipes of this repository are proved. Bounds are in proof/compare.py, runs that several tests
look at in proof/runs.py. Runs that do not learn have a learning rate of 0: all their updates meet the same weights.
"""

import math
import os
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from common import folders
from contracts.proof import runs
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
from contracts.proof.compare import same_lines, same_models, same_weights, unlike, within
from recipes import NAMES
from runs import REPOSITORY, recipe, samples

pytestmark = pytest.mark.timeout(1200)

# What depends on a recipe's own loop. SFT and DPO show the other promises, which come from `common`; in CI each recipe
# is proved whole every week.
OF_EACH = {
    "test_split",
    "test_engines",
    "test_means",
    "test_last_update",
    "test_resume",
    "test_values",
}
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


# ============================================================ the same update

# What identifies an update in a log line.
OF_UPDATE = {"loss", "grad_norm", "learning_rate", "samples", "tokens"}


def test_split(bench):
    """An update is the same however its samples are split."""
    in_fours = bench.run("4x4", micro_train_batch_size=4, **runs.SAVED_AT_END)
    same_run(bench, "4 micro-batches of 4", in_fours)
    same_run(bench, "2 processes", runs.two_processes(bench))
    if not bench.quick:
        # Room for about five samples in a micro-batch.
        first_line = runs.one_process(bench).training[0]
        tokens = round(5 * first_line["tokens"] / first_line["samples"])
        changes: Changes = {"micro_train_tokens": tokens, **runs.SAVED_AT_END}
        same_run(bench, "micro-batches by tokens", bench.run("tokens", **changes))
        same_run(bench, "2 processes by tokens", bench.run("2-tokens", "ddp", **changes))


def test_engines(bench):
    """An update is the same under every engine."""
    for name in ("zero3",) if bench.quick else runs.ENGINES:
        same_run(bench, name, runs.on_engine(bench, name))


def test_packed(bench):
    """An update is the same with prompts shared, which all other runs have off."""
    if not bench.has("share_prompts"):
        pytest.skip("the recipe has no --share_prompts")
    same_run(bench, "--share_prompts", runs.packed(bench))


def same_run(bench: Bench, what: str, found: Finished) -> None:
    """Compares a run with that of one process: its weights, and `OF_UPDATE` of its log lines."""
    expected = runs.one_process(bench)
    same_lines(what, expected.training, found.training, only=OF_UPDATE)
    same_models(what, expected, found)


def test_last_update(bench):
    """In a last, short update of n samples each weighs 1/n, not 1 / `--train_batch_size`.

    Two runs make one update of the same 10 rows, or 6 prompts where a recipe samples. It is a full
    update of one run, and a short one of the other.
    """
    n_rows = 6 if bench.generates else 10
    if bench.generates:
        full: Changes = {"train_batch_size": n_rows * RESPONSES, "rollout_batch_size": n_rows}
        short: Changes = {"train_batch_size": ROLLOUT * RESPONSES, "rollout_batch_size": ROLLOUT}
    else:
        full = {"train_batch_size": n_rows}
        short = {"train_batch_size": BATCH}
    one_epoch: Changes = {"n_rows": n_rows, "max_steps": 0, "max_epochs": 1, **runs.SAVED_AT_END}
    expected = bench.run("full-update", micro_train_batch_size=2, **one_epoch, **full)
    # Unequal micro-batches, of 4, 3 and 3 rows, or of 4, 4, 4, 3 and 3 samples: a mean of their
    # means would be another number.
    found = bench.run("short-update", micro_train_batch_size=4, **one_epoch, **short)
    only = {"loss", "grad_norm", "samples"}
    same_lines("a short update", expected.training, found.training, only)
    same_models("a short update", expected, found)


# ============================================================ what is logged


def test_means(bench):
    """A logged metric is the mean over all samples, however split; `grad_norm` is unclipped.

    The runs do not learn. `at_once` makes one update a pass, so each of its lines is over a whole
    pass. `in_parts` makes n updates a pass. Its lines are over update 1; over updates 2 to n, the
    rest of the first pass; over the second pass.
    """
    at_once = runs.pass_at_once(bench)
    in_parts = runs.pass_in_parts(bench)
    expected = of_last_pass(at_once)
    same_lines("a line of a whole pass", [expected], [of_last_pass(in_parts)])
    if len(in_parts.training) > 2:
        # It lacks update 1, unless the sums were not emptied when line 1 was written.
        unlike("since the last line", [in_parts.training[1]], [expected])

    clipped = runs.one_process(bench)
    unclipped = runs.unclipped(bench).training[:1]
    same_lines("before clipping", clipped.training[:1], unclipped, only={"grad_norm"})

    same_lines("evaluations", at_once.evaluations[:1], in_parts.evaluations[:1])
    # Five held-out rows in micro-batches of one: one process has a padding row.
    in_ones = runs.two_processes(bench).evaluations[:1]
    same_lines("evaluations, a row at a time", clipped.evaluations[:1], in_ones)


def of_last_pass(run: Finished) -> dict:
    """Returns the metrics of a run's last pass, without those of one update alone.

    These runs have at most one rollout. Its metrics, such as `reward`, are in the first line alone,
    so they are taken from there. They end at different updates, which is not compared.
    """
    line = {**run.training[0], **run.training[-1]}
    of_update = {"grad_norm", "loss_scale", "epoch"}
    kept = {tag: line[tag] for tag in line.keys() - of_update if not tag.endswith("learning_rate")}
    return kept | {"global_step": 1}


def test_log_lines(bench):
    """Whatever is logged, evaluated or saved is where the flags say."""
    one_process = runs.one_process(bench)
    other_seed = runs.other_seed(bench)
    a_pass = runs.updates_of_a_pass(bench)
    in_parts = runs.pass_in_parts(bench)
    for run, interval in [
        (one_process, 1),
        (runs.two_processes(bench), 1),
        (runs.uninterrupted(bench), 4),
        (in_parts, a_pass),
        (other_seed, 2 if bench.generates else math.ceil(0.5 * other_seed.last_step)),
    ]:
        logged = [line["global_step"] for line in run.training]
        assert logged == due(interval, run.last_step, also=1), f"logging_steps {interval}"
    evaluated = [line["global_step"] for line in one_process.evaluations]
    assert evaluated == due(EVAL_STEPS, one_process.last_step, also=0)

    # `pass_in_parts` saves at this interval and keeps all, `uninterrupted` keeps the last one.
    for folder in ("checkpoints", "actors"):
        assert saved_steps(in_parts, folder) == due(a_pass + 1, in_parts.last_step), folder
        keeps_last = runs.uninterrupted(bench)
        assert saved_steps(keeps_last, folder) == [keeps_last.last_step], folder

    for run in (one_process, runs.two_processes(bench)):
        check_linear_schedule(run)
    if not bench.generates:
        # The console has a line such as `data /x/train_33.jsonl: 20 usable rows`.
        found = re.search(r"^data .*/train_\S*: (\d+) usable rows", one_process.console, re.M)
        rows = int(found[1])
        counted = (one_process.last_step, one_process.training[-1]["samples"])
        assert counted == (2 * updates_in(rows), 2 * rows), "updates and samples of 2 epochs"


def test_values(bench):
    """What is recorded of single samples adds up to the logged numbers, and names each sample."""
    made = {"one process": runs.one_process(bench), "padding rows": runs.two_processes(bench)}
    engines = ["zero3"] if bench.quick else runs.ENGINES
    made |= {name: runs.on_engine(bench, name) for name in engines}
    if bench.has("share_prompts"):
        made["shared prompts"] = runs.packed(bench)
    made["lines of 4 updates"] = runs.uninterrupted(bench)
    made["overflows"] = runs.at_scale(bench, runs.HIGH_SCALE)
    for name, run in made.items():
        table = run.values
        samples_of = {"": [], "eval/": []}
        for sample in table.to_pylist():
            samples_of["eval/" if sample["source"].startswith("eval") else ""].append(sample)
        lines = {"": run.training, "eval/": run.evaluations if samples_of["eval/"] else []}
        for prefix in lines:
            before = 0
            for line in lines[prefix]:
                step = line["global_step"]
                first = step if prefix else before + 1
                of_line = [
                    each for each in samples_of[prefix] if first <= each["global_step"] <= step
                ]
                check_sums(f"{name}, update {step}", prefix, line, of_line, table.schema)
                before = step
        assert all(each["weight"] and each["row"] > 0 for each in samples_of[""]), name
        for line in run.training:
            trained = {
                (each["global_step"], each["row"], each["response"])
                for each in samples_of[""]
                if each["global_step"] <= line["global_step"]
            }
            apart = abs(len(trained) - line["samples"])
            within(f"{name}: samples, update {line['global_step']}", apart, 0)


def check_sums(what: str, prefix: str, line: dict, samples: list[dict], schema) -> None:
    """Whether the recorded values of samples add up to a line: as exactly as fp64 can say."""
    names = [name.removesuffix(":count") for name in schema.names if name.endswith(":count")]
    assert samples and "loss" in names, f"{what}: nothing is recorded"
    for name in names:
        counted = [each for each in samples if each[f"{name}:count"]]
        values = [each[name] for each in counted]
        reduce = schema.field(name).metadata[b"reduce"].decode()
        if not counted:
            assert prefix + name not in line, f"{what}: {name} counts nowhere"
        elif reduce != "mean":
            assert line[prefix + name] == {"min": min, "max": max}[reduce](values), what
        else:
            weights = [each["weight"] * each[f"{name}:count"] for each in counted]
            parts = [value * weight / sum(weights) for value, weight in zip(values, weights)]
            apart = abs(math.fsum(parts) - line[prefix + name])
            within(f"{what}: {name}", apart, 1e-12 * math.fsum(map(abs, parts)))


def due(interval: int, last: int, also: int | None = None) -> list[int]:
    """Returns the steps at which something is due: `due(4, 6, also=0)` is `[0, 4, 6]`."""
    steps = {*range(interval, last + 1, interval), last}
    return sorted(steps if also is None else {also, *steps})


def saved_steps(run: Finished, folder: str) -> list[int]:
    """Returns the updates whose checkpoints, or actors, a run has."""
    return [folders.step_of(path) for path in folders.by_step(run.folder / folder)]


def check_linear_schedule(run: Finished) -> None:
    """Whether each line logs the learning rate that its own update was made with.

    The first update has the peak rate. The rates fall in equal steps, which would reach 0 one
    update after the last. Only this shape is checked, since a fork may give its groups rates of
    their own.
    """
    peak = run.training[0]["learning_rate"]
    for line in run.training:
        updates_left = run.last_step + 1 - line["global_step"]  # the line's own is among them
        off_by = abs(line["learning_rate"] / peak - updates_left / run.last_step)
        within(f"learning_rate, update {line['global_step']}", off_by, 1e-6)


def test_evaluation(bench):
    """An evaluation has no dropout, and leaves no trace in the training."""
    often = runs.uninterrupted(bench)  # with dropout, if the model's config has one
    seldom = bench.run("seldom-evaluated", "ddp", **{**runs.INTERRUPTED, "eval_steps": 0})
    same_lines("with more evaluations", seldom.training, often.training, exact=True)
    same_models("with more evaluations", seldom, often, exact=True)
    # The first evaluation, before any update, of a run whose config has no dropout.
    without_dropout = runs.two_processes(bench).evaluations[:1]
    same_lines("without dropout", without_dropout, often.evaluations[:1])


# ============================================================ interrupted, repeated


def test_resume(bench):
    """Killed and resumed, a run ends as if it had not been killed."""
    for launcher in ("ddp",) if bench.quick else ("ddp", "plain", "zero3"):
        expected = bench.run(f"uninterrupted-{launcher}", launcher, **runs.INTERRUPTED)
        found = runs.killed_twice(bench, launcher)
        same_lines(launcher, expected.lines, found.lines, exact=True)
        assert samples(found.folder) == samples(expected.folder)
        assert found.values.equals(expected.values)
        same_models(launcher, expected, found, exact=True)


def test_overflow(bench):
    """The applied updates of a run that overflows in fp16 are those of a run that never does."""
    overflowed = runs.at_scale(bench, runs.HIGH_SCALE)
    fitting = round(math.log2(overflowed.training[-1]["loss_scale"]))
    clean = runs.at_scale(bench, fitting)
    for line in overflowed.training:
        halved = runs.HIGH_SCALE - math.log2(line["loss_scale"])
        apart = abs(line["skipped_steps"] - halved)
        within(f"skipped_steps, update {line['global_step']}", apart, 0)
    # At one micro-batch size these are equal bit for bit, whatever the loss was multiplied by.
    only = {"learning_rate", "critic_learning_rate", "samples", "tokens"}
    same_lines("after overflows", clean.training, overflowed.training, only, exact=True)
    # Gradients in half precision round: far less than this. One Adam step too many makes far more.
    for line, other in zip(clean.training, overflowed.training):
        for tag in ("loss", "grad_norm"):
            apart = abs(line[tag] - other[tag]) / max(abs(line[tag]), 1e-2)
            within(f"after overflows: {tag}, update {line['global_step']}", apart, 1e-2)
    # Relative to how far training has moved the weights.
    start, one, other = map(
        weights_of, (bench.model_folder(), clean.folder / "actor", overflowed.folder / "actor")
    )
    moved = distance(one, {name: start.get(name, torch.zeros(())) for name in one})
    within("after overflows: actor", distance(one, other) / moved, 5e-2)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    squares = [float((one[name].double() - other[name].double()).square().sum()) for name in one]
    return math.sqrt(sum(squares))


def test_seed(bench):
    """The same seed is the same run; another seed, and another epoch, have another order."""
    once = runs.one_process(bench)
    # In a new interpreter, which has another seed of Python's hashes.
    again = bench.run("again", fresh=True, **runs.SAVED_AT_END)
    same_lines("twice", once.lines, again.lines, exact=True)
    same_models("twice", once, again, exact=True)
    # Responses show the seed, and so does the order of rows.
    unlike("another seed", once.training[:1], runs.other_seed(bench).training[:1])
    if not bench.generates:
        per_epoch = runs.updates_of_a_pass(bench)
        lines = runs.unclipped(bench).training  # at learning rate 0 the same order logs the same
        unlike("another epoch", lines[:per_epoch], lines[per_epoch : 2 * per_epoch])


# ============================================================ what is saved


def test_still(bench):
    """A learning rate of 0 moves nothing, in spite of the weight decay."""
    made = {"ddp": runs.pass_in_parts(bench)}
    for name in () if bench.quick else ("zero2", "zero3"):
        changes = {**runs.NO_LEARNING, "micro_train_batch_size": 2, "save_steps": 2}
        made[name] = bench.run(f"no-learning-{name}", name, **changes)
    for name, run in made.items():
        saved = folders.by_step(run.folder / "checkpoints")
        first, last = saved[0], saved[-1]
        for model in ("actor", "critic"):
            if (first / model).is_dir():
                before, after = weights_of(first / model), weights_of(last / model)
                same_weights(f"{name}, {model}", before, after, exact=True)
        # And since the start, of which a new adapter has nothing.
        start, end = weights_of(bench.model_folder()), weights_of(run.folder / "actor")
        names = start.keys() & end.keys()
        if names:
            # A model may be stored in another dtype than it was loaded from.
            before, after = ({key: of[key].float() for key in names} for of in (start, end))
            same_weights(f"{name}, since the start", before, after, exact=True)


def test_actor(bench):
    """The saved actor is the trained one, and loads anywhere."""
    made = {"plain": runs.one_process(bench)}
    for name in () if bench.quick else ("zero3", "fsdp2"):
        made[name] = runs.on_engine(bench, name)
    reference: Changes = {}
    if bench.arguments.get("kl_coef", 1) and bench.has("ref_model_name_or_path"):
        # That of the first run, which by default is the model that it started from.
        given = bench.arguments["ref_model_name_or_path"] or bench.model_folder()
        reference = {"ref_model_name_or_path": given}
    for name, run in made.items():
        actor = run.folder / "actor"
        check_loads(actor, bench.model_folder())
        last = folders.by_step(run.folder / "checkpoints")[-1]
        in_checkpoint = weights_of(last / "actor")
        same_weights(f"{name}: in the checkpoint", in_checkpoint, weights_of(actor), exact=True)
        # A new run on it begins with what the last evaluation logged.
        on_it: Changes = {"model_name_or_path": actor, "max_steps": 1}
        new = bench.run(f"on-actor-{name}", **on_it, **reference)
        expected = {**run.evaluations[-1], "global_step": 0}
        same_lines(f"{name}: a new run on it", [expected], new.evaluations[:1])
        if reference and name == "plain":
            other = bench.run("reference-itself", **on_it, ref_model_name_or_path=actor)
            unlike("another reference", new.lines, other.lines)


def check_loads(folder: Path, start: Path) -> None:
    """Loads a model as somebody without this repository would; it has what its start had."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(start).chat_template
    if (folder / "adapter_config.json").is_file():
        from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification

        is_scorer = '"SEQ_CLS"' in (folder / "adapter_config.json").read_text()
        if is_scorer:
            model = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1)
        else:
            model = AutoPeftModelForCausalLM.from_pretrained(folder)
    else:
        is_scorer = "ForSequenceClassification" in (folder / "config.json").read_text()
        kind = AutoModelForSequenceClassification if is_scorer else AutoModelForCausalLM
        model, info = kind.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        name = "generation_config.json"
        assert is_scorer or (folder / name).is_file() or not (start / name).is_file()
    ids = torch.tensor([tokenizer("12").input_ids])
    with torch.no_grad():
        assert model.float()(ids).logits.isfinite().all()
