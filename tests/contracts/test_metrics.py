"""What a log line holds besides means: rates, seconds, what rollouts add; and DPO's losses."""

import math
import runpy
import time
import types

import pytest
import torch

from common.metrics import Flop
from preference_recipes.models.cost import PEAK_FLOPS
from runs import lines, recipe, training_lines
from small_run import small_run


def test_equal_rewards_are_no_success():
    """The policy as it starts ranks no pair right: an accuracy counts what is strictly above."""
    module = runpy.run_path(str(recipe("dpo")))
    logps = -torch.rand(4, 5)  # two pairs of answers of 5 tokens
    output = {"logps": logps, "mean_logits": logps}
    # The second pair's chosen answer is above its reference's.
    ref_logps = logps.sum(1) - torch.tensor([0.0, 0.5, 0.0, 0.0])
    batch = {"loss_mask": torch.ones(4, 5, dtype=torch.bool), "ref_logps": ref_logps}
    args = module["Args"](beta=0.3)
    _, values = module["pair_losses"](lambda batch, extra_outputs: output, object(), batch, args)
    assert values["rewards/accuracies"].tolist() == [0.0, 1.0]


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
    run = small_run(tmp_path).run
    run.start()
    run.flop = Flop(6e9, 2e9, PEAK_FLOPS.get(gpu))
    device = torch.device("cuda")  # there is no GPU to hold the counts of one
    run.accelerator = types.SimpleNamespace(device=device, reduce=lambda number, how: number)
    of_one = 989e12 * 0.2  # an update; there are two
    targets = [0] * int((of_one - 6e9 * 25_000) / 2e9)
    for _ in range(2):
        run.count_flop({"n_tokens": 25_000, "targets": targets}, torch.ones(8))
    run.count_flop({"n_tokens": 10**9, "targets": targets}, torch.zeros(1))  # padding
    monkeypatch.setattr(time, "perf_counter", lambda: run.since + 1.0)
    values = run.speed()
    assert values.get("perf/mfu") == (share and pytest.approx(share, rel=1e-4))
    assert values["perf/peak_memory_gib"] == 1.5


def update(checkpoint, loss: float = 1.0) -> None:
    """An update of 8 samples and 120 tokens."""
    checkpoint.means.add({"loss": torch.full((8,), loss)}, torch.ones(8))
    checkpoint.run.update_done(True, n_samples=8, n_tokens=120)
    update = types.SimpleNamespace(loss_scale=None)
    checkpoint.means.close_update(True, update, grad_norm=1.0)


def test_the_seconds_and_the_rates_of_each_line(tmp_path, monkeypatch):
    """A line of 10 seconds, 4 of them paused and 2 of data; then one of 5 seconds with none of either."""
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    made = small_run(tmp_path)
    made.run.start()
    run = made.run
    for seconds, name in ((1, "data"), (4, "excluded"), (1, "data")):
        with run.timed(name):
            now[0] += seconds
    now[0] += 4
    update(made)
    run.log(made.means.reduce_and_reset())
    now[0] += 5
    update(made)
    update(made)
    run.log(made.means.reduce_and_reset())
    first, second = training_lines(tmp_path)
    assert first["perf/data_seconds"] == 2.0 and second["perf/data_seconds"] == 0.0
    assert first["perf/samples_per_second"] == 8 / 6 and first["perf/tokens_per_second"] == 20.0
    assert second["perf/samples_per_second"] == 16 / 5 and second["perf/tokens_per_second"] == 48.0
    assert not any("excluded" in name for line in (first, second) for name in line)
    assert (first["epoch"], second["epoch"]) == (1 / 25, 3 / 25)


def test_what_rollouts_added_after_the_last_update_is_a_line_of_its_own(tmp_path):
    """They led to none, or the engine skipped all of theirs. Else no line would hold their rewards."""
    made = small_run(tmp_path)
    made.run.start()
    run, means = made.run, made.means
    means.add_rollout({"reward": torch.tensor([2.0, 0.0])})
    update(made, loss=3.0)
    run.log(means.reduce_and_reset())
    means.add_rollout({"reward": torch.tensor([4.0, 0.0])})
    run.log(means.reduce_and_reset())  # no update since the last line
    run.log(means.reduce_and_reset())  # nothing is left
    first, last = lines(tmp_path)
    assert (first["loss"], first["reward"]) == (3.0, 1.0)
    assert last == {"global_step": 1, "epoch": 1 / 25, "reward": 2.0}
