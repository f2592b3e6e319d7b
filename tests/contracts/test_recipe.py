"""The proof: a recipe, or a fork of one, keeps each promise of docs/forking.md, where each has a section.

    make prove RECIPE=~/work/my_dpo.py                                          on every engine, ten minutes
    make prove RECIPE=~/work/my_dpo.py ARGS=--quick                             on fewer, two minutes
    pytest tests/contracts/test_recipe.py --recipe ~/work/my_dpo.py -k "split or resume"
    pytest tests/contracts --recipe "my_dpo.py --model_name_or_path MODEL --dataset_name pairs.jsonl"

The recipe runs many times on its demo, or on the model and the data that its arguments name, cut to a few rows, on the
CPU in fp32 (one promise in fp16). A promise that cannot be checked, or not wholly, is skipped with the reason. Without
`--recipe` the recipes of this repository are proved. The promises' code is in proof/promises.py.
"""

import os
import signal

import pytest

from contracts.proof.bench import Bench, RunFailed, Unchecked
from contracts.proof.outcomes import Proof
from recipes import NAMES
from runs import REPOSITORY, recipe

# The first promise may wait for runs of all of them. What hangs is killed sooner, see `bench.HANG_SECONDS`.
pytestmark = pytest.mark.timeout(2400)


# What depends on a recipe's own loop. SFT and DPO show the other promises, which come from `common`; in CI each recipe
# is proved whole every week.
OF_EACH = {"test_split", "test_engines", "test_means", "test_last_update", "test_resume"}


def pytest_generate_tests(metafunc):
    given = metafunc.config.getoption("recipe")
    if given:
        proved = [pytest.param(given, id=given[0].stem)]
    else:
        # Each other recipe repeats on its own what SFT shows.
        marks = {name: [pytest.mark.slow] * (name != "sft") for name in NAMES}
        proved = [
            pytest.param([recipe(name)], id=name, marks=marks[name])
            for name in NAMES
            if name in ("sft", "dpo") or metafunc.function.__name__ in OF_EACH
        ]
    metafunc.parametrize("proof", proved, indirect=True, scope="module")


def promise_of(test: str) -> str:
    """`last-update` of `test_last_update`."""
    return test.removeprefix("test_").replace("_", "-")


@pytest.fixture(scope="module")
def proof(request, tmp_path_factory):
    """The proof of one recipe: all its promises that were asked for are being checked at once."""
    file, *arguments = request.param
    options = request.config.option
    # Of the recipes here one is proved on every engine.
    is_quick = options.quick or (not options.recipe and file.stem != "dpo")
    wanted = [
        promise_of(item.originalname)
        for item in request.session.items
        if item.path == request.path and item.callspec.params["proof"] == request.param
    ]
    bench = Bench(file, arguments, tmp_path_factory.mktemp("proof"), is_quick)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    with pytest.MonkeyPatch.context() as patch:
        # Copies of recipes import this repository's `common`.
        patch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
        try:
            bench.prepare()
        except (RunFailed, Unchecked) as error:
            pytest.fail(f"nothing can be checked: {error}", pytrace=False)
        else:
            proof = Proof(bench, wanted)
            yield proof
            proof.stop()
        finally:
            bench.stop()
            signal.signal(signal.SIGTERM, before)


def keeps(proof: Proof, promise: str) -> None:
    """Passes if the recipe keeps the promise; shows what was measured."""
    outcome = proof.outcome(promise)
    if outcome.is_red:
        missing = f"\nnot checked: {outcome.unchecked}" * bool(outcome.unchecked)
        where = f"see docs/forking.md#{promise}"
        pytest.fail(f"RED {promise}\n{outcome}{missing}\n{where}", pytrace=False)
    print(outcome)
    if outcome.unchecked:
        pytest.skip(outcome.unchecked)


# ============================================================ the same update


def test_split(proof):
    """An update is the same however its samples are split."""
    keeps(proof, "split")


def test_engines(proof):
    """An update is the same under every engine."""
    keeps(proof, "engines")


def test_packed(proof):
    """An update is the same with rows packed or prompts shared."""
    keeps(proof, "packed")


def test_last_update(proof):
    """The last, short update weighs each sample 1/n."""
    keeps(proof, "last-update")


# ============================================================ what is logged


def test_means(proof):
    """A logged metric is the exact mean over all samples."""
    keeps(proof, "means")


def test_log_lines(proof):
    """Lines, evaluations, checkpoints and learning rates are where the flags say."""
    keeps(proof, "log-lines")


def test_evaluation(proof):
    """An evaluation has no dropout and leaves no trace in the training."""
    keeps(proof, "evaluation")


# ============================================================ interrupted, repeated


def test_resume(proof):
    """Killed and resumed, a run ends as if it had never been killed."""
    keeps(proof, "resume")


def test_overflow(proof):
    """An fp16 overflow leaves no trace."""
    keeps(proof, "overflow")


def test_seed(proof):
    """The same seed is the same run, another seed another."""
    keeps(proof, "seed")


# ============================================================ what is saved


def test_still(proof):
    """A learning rate of 0 moves nothing."""
    keeps(proof, "still")


def test_actor(proof):
    """The saved actor is the trained one, and loads anywhere."""
    keeps(proof, "actor")
