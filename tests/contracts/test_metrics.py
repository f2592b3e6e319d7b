"""What a log line holds besides the means of test_references.py: rates, seconds, what rollouts add; and DPO's losses."""

import math
import runpy
import time
import types

import pytest
import torch

from common.metrics import PEAK_FLOPS, Means
from common.run import Run, Update
from runs import lines, recipe, training_lines


def test_equal_rewards_are_no_success():
    """The policy as it starts ranks no pair right: an accuracy counts what is strictly above."""
    module = runpy.run_path(str(recipe("dpo")))
    logps = -torch.rand(4, 5)  # two pairs of answers of 5 tokens
    output = {"logps": logps, "mean_logits": logps}
    # The second pair's chosen answer is above its reference's.
    ref_logps = logps.sum(1) - torch.tensor([0.0, 0.5, 0.0, 0.0])
    batch = {"mask": torch.ones(4, 5, dtype=torch.bool), "ref_logps": ref_logps}
    args = module["Args"](beta=0.3)
    _, values = module["pair_losses"](lambda batch, extras: output, object(), batch, args)
    assert values["rewards/accuracies"].tolist() == [0.0, 1.0]


def run_without_bar(folder, report_to=("none",), **given) -> tuple[Run, Means]:
    """A run of 8 samples an update on one process, with means for its lines."""
    accelerator = types.SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        is_main_process=True,
        optimizer_step_was_skipped=False,
        gather=lambda table: table,
        reduce=lambda number, reduction: number,
        log=lambda values, step: None,
        state=types.SimpleNamespace(deepspeed_plugin=None),
    )
    settings = dict(train_batch_size=8, max_epochs=1, max_steps=0)
    args = types.SimpleNamespace(output_dir=folder, report_to=report_to, **settings, **given)
    run = Run(accelerator, args, 64, flop=(6e9, 2e9), bar_metric="loss", charts={})
    run.logger.bar = types.SimpleNamespace(
        update=lambda: None, set_postfix=lambda *args, **kwargs: None
    )
    return run, Means(accelerator)


def update_of(n_tokens: int) -> Update:
    return Update(range(8), [], divisor=1, n_sequences=0, n_tokens=n_tokens, loss_scale=None)


def add_losses(means: Means, loss: float = 1.0) -> None:
    means.add({"loss": torch.full((8,), loss)}, torch.ones(8))


@pytest.mark.parametrize(
    "kind, smoothing, expected",
    [
        ("sigmoid", 0.0, lambda right, wrong: right),
        ("sigmoid", 0.2, lambda right, wrong: 0.8 * right + 0.2 * wrong),
        ("robust", 0.2, lambda right, wrong: (0.8 * right - 0.2 * wrong) / 0.6),
        ("hinge", 0.0, lambda right, wrong: 1 - 0.3 * 2),
        ("ipo", 0.0, lambda right, wrong: (3 / 5 - 1 / 4 - 1 / 0.6) ** 2),
    ],
)
def test_the_preference_losses_of_a_pair(kind, smoothing, expected):
    """Of log-ratios 3 (5 tokens) and 1 (4 tokens) at beta 0.3."""
    preference_loss = runpy.run_path(str(recipe("dpo")))["preference_loss"]
    pair = [torch.tensor([number]) for number in (3.0, 1.0, 5.0, 4.0)]
    loss = preference_loss(*pair, 0.3, kind, smoothing).item()
    right = math.log1p(math.exp(-0.6))
    assert loss == pytest.approx(expected(right, right + 0.6), rel=1e-6)


@pytest.mark.parametrize(
    "gpu, share",
    [
        ("NVIDIA H200", 0.4),
        ("NVIDIA H100 NVL", 0.4 * 989 / 835),
        ("NVIDIA T400", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_the_share_of_the_gpu_that_is_used(tmp_path, monkeypatch, gpu, share):
    """6e9 operations a token and 2e9 a target, in a second; no number where the GPU's peak is not known."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**29)
    run, means = run_without_bar(tmp_path)
    # There is no GPU to hold the counts of one.
    run.accelerator.device = torch.device("cuda")
    run.speed.peak = PEAK_FLOPS.get(gpu)
    of_one = 989e12 * 0.2  # an update; there are two
    tokens = 25_000
    targets = [0] * int((of_one - 6e9 * tokens) / 2e9)
    padding = {"n_tokens": 10**9, "targets": targets}
    for applied in (False, True):  # a skipped update was computed, too
        run.accelerator.optimizer_step_was_skipped = not applied
        add_losses(means)
        run.count_flop({"n_tokens": tokens, "targets": targets}, torch.ones(8))
        run.count_flop(padding, torch.zeros(1))
        assert run.count(update_of(10**6), 1.0) == applied
        means.close_update(applied, grad_norm=1.0, loss_scale=1.0)
    monkeypatch.setattr(time, "perf_counter", lambda: run.speed.since + 1.0)
    run.log(means.reduce())
    (line,) = training_lines(tmp_path)
    assert (
        line.get("perf/mfu") == (share and pytest.approx(share, rel=1e-4))
        and line["perf/peak_memory_gib"] == 1.5
    )


def test_the_seconds_and_the_rates_of_each_line(tmp_path, monkeypatch):
    """Two lines: 10 seconds of which 4 are paused, twice 1 second of data; then 5 seconds with none of either."""
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    run, means = run_without_bar(tmp_path)

    def spend(seconds, name=None):
        if name is None:
            now[0] += seconds
            return
        with run.timed(name):
            now[0] += seconds

    def update():
        add_losses(means)
        means.close_update(run.count(update_of(120), 1.0), grad_norm=1.0)

    for seconds, name in ((1, "data"), (4, "paused"), (1, "data"), (4, None)):
        spend(seconds, name)
    update()
    run.log(means.reduce())
    spend(5)
    update()
    update()
    run.log(means.reduce())
    first, second = training_lines(tmp_path)
    assert first["perf/data_seconds"] == 2.0 and second["perf/data_seconds"] == 0.0
    assert first["perf/samples_per_second"] == 8 / 6 and first["perf/tokens_per_second"] == 20.0
    assert second["perf/samples_per_second"] == 16 / 5 and second["perf/tokens_per_second"] == 48.0
    assert not any("paused" in name for line in (first, second) for name in line)
    assert (first["epoch"], second["epoch"]) == (1 / 8, 3 / 8)


def test_what_rollouts_added_after_the_last_update_is_a_line_of_its_own(tmp_path):
    """They led to none, or the engine skipped all of theirs. Else no line would hold their rewards."""
    run, means = run_without_bar(tmp_path)
    means.add_rollout({"reward": torch.tensor([2.0, 0.0])})
    add_losses(means, 3.0)
    means.close_update(run.count(update_of(9), 1.0), grad_norm=1.0)
    run.log(means.reduce())
    means.add_rollout({"reward": torch.tensor([4.0, 0.0])})
    run.log(means.reduce())  # no update since the last line
    run.log(means.reduce())  # nothing is left
    first, last = lines(tmp_path)
    assert (first["loss"], first["reward"]) == (3.0, 1.0)
    assert last == {"global_step": 1, "epoch": 1 / 8, "reward": 2.0}
