"""fp16 through DeepSpeed: what overflows leaves no trace but its count, the rest is the fp32 run."""

import ast
import re

import pytest
import torch

import runs
from common import stopping
from common.progress import Progress
from recipes import ANSWER_REWARD, TEACHER, TIES

TESTS = runs.REPOSITORY / "tests"
# One rollout of 48 samples, twice, is as many updates as two epochs of the others' rows.
OF_PPO = dict(runs.ROLLOUTS, rollout_batch_size=48, max_new_tokens=6, num_epochs_per_rollout=2)
OF_PPO |= dict(reward_function=ANSWER_REWARD, critic_learning_rate=0.01, max_epochs=1)
# Recipe, ZeRO stage, processes, settings.
OVERFLOWING = [
    ("dpo", 1, 1, {"max_epochs": 2}),
    ("ppo", 2, 1, OF_PPO),
    ("reward", 3, 2, {"max_epochs": 2}),
    ("sft", 1, 1, {"max_epochs": 2}),
    ("kto", 1, 1, {"max_epochs": 2}),
]
# A scale that is lowered only after the hundredth overflow.
KEPT_SCALE = {"initial_scale_power": 8, "hysteresis": 100}
GROWING = {"initial_scale_power": 4, "loss_scale_window": 2}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = runs.tiny_inputs(tmp_path_factory.mktemp("fp16"))
    runs.tiny_llama(folder / "still")  # no dropout: a skipped window would use up random numbers
    return folder


def run(inputs, launcher, mode: str, windows: str, name: str, output, **settings) -> str:
    """Runs a recipe through overflowing_recipe.py; returns what it printed."""
    script = [TESTS / "overflowing_recipe.py", mode, windows, runs.recipe(name)]
    given = {"model_name_or_path": inputs / "still", "micro_train_batch_size": 2}
    flags = runs.short_run(inputs, name, output, **given | {"warmup_steps": 0} | settings)
    return runs.launch(launcher, *script, *flags).stdout


@pytest.mark.parametrize("name, stage, processes, own", OVERFLOWING)
def test_what_overflows_leaves_no_trace(inputs, name, stage, processes, own):
    """The first window, the one after a logged update, two in a row, and the last."""
    launcher = runs.fp16_launcher(inputs / f"{stage}.json", stage, processes, **KEPT_SCALE)
    windows = "0,4,6,7,11"
    poisoned, lacking = inputs / f"poisoned-{name}", inputs / f"lacking-{name}"
    # A warm-up does not depend on the horizon, in which the two runs differ.
    more = dict(own, lr_scheduler_type="constant_with_warmup", warmup_steps=4)
    more |= dict(learning_rate=0.003, logging_steps=3)
    said = run(inputs, launcher, "overflow", windows, name, poisoned, **more)
    assert "done: 7 updates, 5 skipped" in said
    run(inputs, launcher, "lack", windows, name, lacking, **more, max_steps=7)
    found, expected = runs.timeless(poisoned), runs.timeless(lacking)
    counted = [(line["global_step"], line["skipped_steps"]) for line in found]
    assert counted == [(1, 1), (3, 1), (6, 4), (7, 5)]
    assert all(line.pop("loss_scale") == 256 for line in found + expected)
    for line in found + expected:
        del line["skipped_steps"], line["epoch"]
    assert found == expected and torch.equal(runs.weights(poisoned), runs.weights(lacking))


@pytest.mark.parametrize("stage", [2, 3])
def test_no_update_is_halved_where_the_scale_grows(tmp_path, stage):
    """DeepSpeed 0.19.8 halves it. Micro-batches are summed in fp32, as the norm shows.

    Where the last assertion fails, a newer one does not, and `zero.delay_scale_growth` can go.
    """
    launcher = runs.fp16_launcher(tmp_path / "ds.json", stage, 1, **GROWING)
    output = runs.launch(launcher, TESTS / "growing_loss_scale.py", tmp_path / "out").stdout
    guarded, unguarded = map(ast.literal_eval, re.findall(r"guarded (.*)", output))
    scales = [16, 16, 16, 32, 32]
    norm = pytest.approx(0.5 + 2**-13, rel=1e-6)
    assert guarded == [(0.5, norm, scale) for scale in scales]
    assert [taken for taken, *_ in unguarded] == [0.5, 0.5, 0.25, 0.5, 0.25]


@pytest.mark.parametrize("scale, said", [(2.0, " at loss scale 2"), (None, "")])
def test_skips_are_said_and_without_end_end(scale, said, capsys):
    progress = Progress(1000, 1, 1, 1000, global_step=20)
    with pytest.raises(ValueError, match=f"update 21 was skipped 100 times .* finite{said}. Lower"):
        while True:
            progress.update_done(applied=False, n_samples=1, n_tokens=1)
            stopping.check_skips(progress, scale)
    assert progress.skipped_steps == 100 and progress.global_step == 20
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 99
    assert lines[0] == f"WARNING: update 21 was skipped: its gradients are not finite{said}"


@pytest.mark.parametrize(
    "name, own",
    [
        ("grpo", dict(reward_function=TIES, drop_equal_groups=False)),
        ("distill", dict(teacher_model_name_or_path=TEACHER, loss_type="sampled")),
    ],
)
def test_until_an_update_is_applied_the_policy_has_not_moved(inputs, name, own):
    """Ratios are 1 until then. Of rollouts of four updates, two overflow at the start and one at an end."""
    output = inputs / f"{name}-skipped"
    launcher = runs.fp16_launcher(inputs / "kept.json", 2, 2, **KEPT_SCALE)
    more = dict(own, learning_rate=0.01, max_steps=8, rollout_batch_size=8)
    more |= dict(n_samples_per_prompt=4, max_new_tokens=6, lr_scheduler_type="linear")
    said = run(inputs, launcher, "overflow", "0,1,7", name, output, **more)
    assert "done: 8 updates, 3 skipped" in said
    found = runs.training_lines(output)
    rates = [line["learning_rate"] for line in found]  # a skipped update is no step of the schedule
    assert rates == pytest.approx([0.01 * (1 - n / 8) for n in range(8)])
    # Rollouts begin after 0, 4 and 8 updates seen: their first applied ones are the updates 1, 3 and 6.
    firsts = [line["global_step"] for line in found if "completions/mean_length" in line]
    assert firsts == [1, 3, 6]
    sampled = "sampling/sampling_logp_difference/mean"
    for line in found:
        is_first = line["global_step"] in firsts
        assert (sampled in line) == is_first
        if name == "grpo":
            assert (line["val/ratio"] == 1 and line["policy/approxkl_avg"] == 0) == is_first
