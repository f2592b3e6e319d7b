"""The runs of the promise that an fp16 overflow leaves no trace, and what is compared of them."""

import json
import math

import pytest

from contracts.proof import compare, runs
from contracts.proof.bench import BATCH, ROLLOUT, Bench, Changes, Finished, weights_of
from contracts.proof.compare import COUNTERS, Difference
from runs import deepspeed_launcher

# Powers of 2, more than enough for the gradients of any model in fp16.
HIGH_SCALES = (24, 40, 60)
# Gradients in half precision round: far less than this. One Adam step too many makes far more.
HALF = 1e-2
# The same weights and samples in half precision.
SAME_HALF = 1e-4
# The weights of two such runs, relative to how far training has moved them. The saved ones are
# rounded to half precision, too.
HALF_WEIGHTS = 5e-2


def overflowed_and_clean(bench: Bench) -> tuple[Finished, Finished, int]:
    """Returns a run that overflows at first, one that never does, and the first one's scale.

    Both meet the same samples at every update, since their data are one update long.
    """
    settings = settings_of_one_update(bench)
    for power in HIGH_SCALES:
        overflowed = bench.run(f"overflow-{power}", at_scale(bench, power), **settings)
        if not overflowed.training:
            return overflowed, overflowed, power
        last = overflowed.training[-1]
        if "loss_scale" not in last or "skipped_steps" not in last:
            pytest.skip("the recipe does not log loss_scale and skipped_steps")
        fitting = power_of(last["loss_scale"])
        if fitting < power:
            clean = bench.run("no-overflow", at_scale(bench, fitting), **settings)
            return overflowed, clean, power
    return pytest.skip(f"nothing overflows at a loss scale of 2**{HIGH_SCALES[-1]}")


def settings_of_one_update(bench: Bench) -> Changes:
    """Returns the settings of four updates of the same samples."""
    same: Changes = {"max_steps": 4, "micro_train_batch_size": 4, "eval_steps": 0}
    if not bench.generates:
        return {**same, "n_rows": BATCH}
    bench.need("num_epochs_per_rollout")
    # All updates are of one rollout: another one would have other responses.
    prompts = BATCH // 2
    return {
        **same,
        "n_rows": prompts,
        "rollout_batch_size": prompts,
        "n_samples_per_prompt": 2,
        "num_epochs_per_rollout": 100,
    }


def at_scale(bench: Bench, power: int) -> list[str]:
    """Returns the launcher of one process in fp16 whose first loss scale is a power of 2."""
    auto = ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "gradient_clipping")
    scale = {"initial_scale_power": power, "loss_scale_window": 1000, "hysteresis": 1}
    config: Changes = {
        "fp16": {"enabled": True, "loss_scale": 0.0, "min_loss_scale": 1, **scale},
        "zero_optimization": {"stage": 2},
        **dict.fromkeys(auto, "auto"),
    }
    path = bench.folder / f"fp16_{power}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return deepspeed_launcher(path, 1)


def power_of(loss_scale: float) -> int:
    """Returns which power of 2 a loss scale is."""
    return round(math.log2(loss_scale))


def skips(run: Finished, power: int) -> Difference:
    """Whether a line counts as many skips as the scale was halved until then, from 2**power."""
    differences = []
    for line in run.training:
        expected = power - math.log2(line.get("loss_scale", 2.0**power))
        found = line["skipped_steps"]
        where = f"skipped_steps, update {line['global_step']}: {found}, expected {expected:g}"
        differences.append(Difference(abs(found - expected), 0, where))
    return compare.first_or_nearest(differences)


def losses(expected: Finished, found: Finished) -> Difference:
    """Compares losses and gradient norms up to the rounding of half precision."""
    differences = []
    for line, other in zip(expected.training, found.training):
        for tag in ("loss", "grad_norm"):
            if tag in line and tag in other:
                measured = abs(line[tag] - other[tag]) / max(abs(line[tag]), 1e-2)
                where = f"{tag}, update {line['global_step']}: {line[tag]:.6g}, {other[tag]:.6g}"
                differences.append(Difference(measured, HALF, where))
    return compare.first_or_nearest(differences)


def weights(bench: Bench, expected: Finished, found: Finished) -> Difference:
    """Returns how far two actors are from each other, relative to how far one is from its start."""
    start = weights_of(bench.model_folder())
    one = weights_of(expected.folder / "actor")
    other = weights_of(found.folder / "actor")
    if not start.keys() & one.keys():  # an adapter, which at learning rate 0 stays as it begins
        start = weights_of(runs.pass_in_parts(bench).folder / "actor")
    square = lambda one, other: float((one.double() - other.double()).square().sum())
    moved = math.sqrt(sum(square(one[name], start[name]) for name in one if name in start))
    apart = math.sqrt(sum(square(one[name], other[name]) for name in one))
    if moved == 0:
        pytest.skip("four updates in fp16 move nothing")
    return Difference(apart / moved, HALF_WEIGHTS, "actor")


def after_overflows(bench: Bench, power: int) -> Difference:
    """The first applied update has the samples that follow those of the skipped ones, and no other.

    At learning rate 0 a run that never overflows meets the same weights there. Its data are of
    several updates, so each update has other samples.
    """
    settings: Changes = {"micro_train_batch_size": 4, "eval_steps": 0}
    bound = SAME_HALF
    if bench.generates:
        # One rollout of 48 samples, 16 an update. Before an update is applied a recipe may take the
        # old log-probs from the pass that trains, later from the one that scores: these round
        # otherwise.
        settings |= {"n_rows": ROLLOUT, "num_epochs_per_rollout": 100, "score_batch_size": 4}
        bound = HALF
    overflowed = bench.run("overflow-data", at_scale(bench, power), **settings, max_steps=1)
    if not overflowed.training:
        pytest.skip("on data of several updates none was applied after the overflows")
    line = overflowed.training[0]
    # Lower than what fits here: the gradients of the other samples may be larger.
    low = at_scale(bench, max(power_of(line["loss_scale"]) - 6, 0))
    settings |= {**runs.NO_LEARNING, "max_steps": line["skipped_steps"] + 1}
    expected = bench.run("no-overflow-data", low, **settings).training[-1]
    if expected["skipped_steps"]:
        pytest.skip("on data of several updates one overflows at a lower loss scale, too")
    differences = []
    for tag, value in expected.items():
        if tag in COUNTERS or compare.is_of_last_update(tag):
            continue
        measured = abs(value - line.get(tag, math.inf)) / max(1.0, abs(value))
        where = f"{tag}, update 1: {line.get(tag)}, expected {value}"
        differences.append(Difference(measured, bound, where))
    return compare.first_or_nearest(differences)
