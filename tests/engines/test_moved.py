"""`update/*`: which weights an update moves in the precision in which they are read, and the warning where few move."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import moved
from preference_recipes.models import rounding
from preference_recipes.models.logprobs import LogProbModel
from runs import (
    ASSETS,
    REPOSITORY,
    config_launcher,
    first_rows,
    launch,
    recipe,
    tiny_llama,
    training_lines,
)

PROBE = REPOSITORY / "tests/moved_probe.py"
FLAGS = ["--max_steps", 3, "--eval_steps", 0, "--warmup_steps", 0, "--learning_rate", 1e-4]
WAYS = {
    "single_gpu": (config_launcher("single_gpu", 1), []),
    "ds_zero3": (config_launcher("ds_zero3", 2), []),
    "ddp": (config_launcher("ddp", 2), []),
    "fsdp2": (config_launcher("fsdp2", 2), []),
    "ds_fp16": (config_launcher("ds_fp16", 2), []),
    "ds_zero1": (config_launcher("ds_zero1", 2), []),
    "ds_zero2": (config_launcher("ds_zero2", 2), []),
    "ds_zero2, adapters": (config_launcher("ds_zero2", 2), ["--lora_r", 8]),
    "ds_zero3, padded shards": (config_launcher("ds_zero3", 3), ["--train_batch_size", 48]),
}
FAST = ("single_gpu", "ds_zero3")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way not in FAST)) for way in WAYS]
)
def test_what_moved_is_counted_exactly(way, tmp_path):
    """As from whole weights, whatever a process holds of them: every number of every update's line."""
    launcher, more = WAYS[way]
    output = tmp_path / "output"
    flags = [*FLAGS, "--micro_train_batch_size", 16, "--logging_steps", 1, *more]
    script = [PROBE, recipe("sft"), *flags, "--output_dir", output]
    launch(launcher, *script, env={"PROBE": str(tmp_path / "probe.jsonl")})
    lines = (tmp_path / "probe.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in lines]
    assert len(lines) == len(training_lines(output)) == 3
    for (counted, reported), logged in zip(lines, training_lines(output)):
        assert {name: logged[name] for name in reported} == reported
        assert reported.keys() == counted.keys()
        for name, value in counted.items():
            assert reported[name] == pytest.approx(value, rel=1e-9)
        assert 0 < reported["update/moved"] < 1


def test_the_dead_zone_is_said_once(tmp_path):
    """Weights on the grid of bf16, and steps of a hundredth of half a cell: the masters move, what is read does not, and the
    run warns after 20 updates, with the updates that a median weight needs."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path / "model"))
    model.bfloat16().float().save_pretrained(tmp_path / "model")
    flags = [
        "--model_name_or_path",
        tmp_path / "model",
        "--dataset_name",
        ASSETS / "sft_train.jsonl",
    ]
    flags += ["--train_batch_size", 2, "--micro_train_batch_size", 2, "--max_length", 64]
    flags += [*FLAGS, "--max_steps", 25, "--learning_rate", 1e-6, "--lr_scheduler_type", "constant"]
    done = launch(
        config_launcher("single_gpu", 1),
        recipe("sft"),
        *flags,
        *("--logging_steps", 10, "--save_steps", 0, "--output_dir", tmp_path / "output"),
    )
    for line in training_lines(tmp_path / "output"):
        # Only small weights, norms (which fp32 reads) and embeddings have cells so small.
        assert line["update/norm"] > 0
    [warning] = re.findall(r"WARNING: 20 updates changed (.*)% of the weights.*", done.stdout)
    assert float(warning) < 5
    weights = torch.cat([weight.flatten() for weight in model.parameters()]).abs()
    half_cell = 2.0 ** torch.log2(weights.median()).floor() * 2**-8
    [updates] = re.findall(r"moves for some ([\d,]+) updates", done.stdout)
    assert int(updates.replace(",", "")) == round(half_cell.item() / 1e-6)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_weights_are_drawn_evenly_from_their_cells(half, monkeypatch):
    """Next to 1 the numbers of bf16 are 1 - 2^-8 and 1 + 2^-7: the cell of 1 ends half-way to each."""
    step = torch.finfo(half).eps
    weights = torch.tensor([1.0, -0.75, 0.0, 1 + step / 4, 3e-3]).to(torch.float32).repeat(40_000)
    weights[4::5] = weights[4::5].to(half).float()
    monkeypatch.setattr(rounding, "AT_ONCE", 1000)
    uniforms = rounding.uniforms_of("seed", 0, len(weights))
    parts = [rounding.uniforms_of("seed", start, 40_000) for start in range(0, 200_000, 40_000)]
    assert torch.equal(torch.cat(parts), uniforms)  # the same for any shard
    assert torch.equal(rounding.uniforms_of("seed", 1234, 5678), uniforms[1234 : 1234 + 5678])
    assert not torch.equal(rounding.uniforms_of("other", 0, 1000), uniforms[:1000])
    drawn = rounding.drawn_in_cells(weights, uniforms, half).view(-1, 5)
    assert torch.equal(drawn.flatten().to(half), weights.to(half))
    assert torch.equal(drawn[:, 2:4], weights.view(-1, 5)[:, 2:4])  # zero, and what is on no grid
    cells = {0: (1 - step / 4, 1 + step / 2), 1: (-0.75 - step / 4, -0.75 + step / 4)}
    for column, (low, high) in cells.items():
        place = (drawn[:, column] - low) / (high - low)
        assert 0 <= place.min() < 0.001 and 0.999 < place.max() <= 1
        assert place.mean() == pytest.approx(0.5, abs=0.01)
        assert place.var() == pytest.approx(1 / 12, abs=0.002)


def test_spread_masters_change_no_bit_of_what_is_read(tmp_path):
    """At learning rate 0 under ZeRO-3: the checkpoint's masters are the draws of the whole weights, though each process drew
    its shard alone, and the actor is the folder's, bit for bit."""
    folder = tiny_llama(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder).bfloat16()
    model.float().save_pretrained(folder)
    flags = ["--model_name_or_path", folder, "--dataset_name", ASSETS / "sft_train.jsonl"]
    flags += ["--micro_train_batch_size", 16, "--max_steps", 1, "--save_steps", 1, "--seed", 3]
    flags += ["--learning_rate", 0, "--spread_masters", "true", "--output_dir", tmp_path / "output"]
    launch(config_launcher("ds_zero3", 2), recipe("sft"), *flags)
    pattern = "checkpoints/global_step_000001/**/*zero_pp_rank_0*optim_states.pt"
    [states] = (tmp_path / "output").glob(pattern)
    masters = get_fp32_state_dict_from_zero_checkpoint(states.parent.parent, states.parent.name)
    actor = AutoModelForCausalLM.from_pretrained(tmp_path / "output/actor").state_dict()
    n_spread = 0
    for name, weight in model.float().state_dict().items():
        uniforms = rounding.uniforms_of(f"3 model.{name}", 0, weight.numel())
        drawn = rounding.drawn_in_cells(weight.flatten(), uniforms, torch.bfloat16)
        assert torch.equal(masters[f"model.{name}"].flatten(), drawn)
        assert torch.equal(actor[name].float(), weight)
        n_spread += drawn.ne(weight.flatten()).sum()
    assert n_spread > 30_000


def test_the_dead_zone_in_three_numbers(tmp_path):
    """What three updates at 1e-5 gain of the same rows, from weights on the grid of bf16: in bf16 a fraction of what fp32
    gains, with spread masters as much."""
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "model").bfloat16().float()
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(ASSETS / "model").save_pretrained(tmp_path / "model")
    rows = first_rows(tmp_path / "rows.jsonl", ASSETS / "sft_train.jsonl", 16)
    flags = ["--model_name_or_path", tmp_path / "model", "--dataset_name", rows]
    flags += ["--train_batch_size", 16, "--micro_train_batch_size", 16, "--max_epochs", 4]
    flags += ["--learning_rate", 1e-5, "--warmup_steps", 0, "--lr_scheduler_type", "constant"]
    gained = {}
    for name, launcher, more in (
        ("fp32", [], []),
        ("bf16", config_launcher("single_gpu", 1), []),
        ("spread", config_launcher("single_gpu", 1), ["--spread_masters", "true"]),
    ):
        output = tmp_path / name
        launch(launcher, recipe("sft"), *flags, *more, "--output_dir", output)
        losses = [line["loss"] for line in training_lines(output)]
        gained[name] = losses[0] - losses[3]
    assert gained["fp32"] > 0.01
    assert gained["bf16"] < 0.6 * gained["fp32"]
    assert gained["spread"] == pytest.approx(gained["fp32"], rel=0.15)


def test_fp32_rounds_nothing(tmp_path):
    flags = ["--max_steps", 1, "--spread_masters", "true", "--output_dir", tmp_path]
    done = launch([], recipe("sft"), *FLAGS, *flags)
    assert "NOTE: --spread_masters changes nothing: this run computes in fp32" in done.stdout
    assert not [name for line in training_lines(tmp_path) for name in line if "update/" in name]


def test_large_weights_are_sampled_and_nothing_rounded_is_no_warning(monkeypatch):
    """Autocast of a model with recurrent layers rounds no weight in every use."""
    monkeypatch.setattr(moved, "MOST_COMPARED", 4)
    monkeypatch.setattr(moved, "UPDATES_TO_WARN", 1)
    monkeypatch.setattr(moved.engine, "half_precision", lambda accelerator: torch.bfloat16)
    monkeypatch.setattr(moved.rounding, "rounded_when_read", lambda accelerator, model: set())
    model = torch.nn.Linear(8, 2)
    accelerator = SimpleNamespace(reduce=lambda tensor: tensor, is_main_process=True)
    watch = moved.Watch(SimpleNamespace(accelerator=accelerator, unwrapped=model, device="cpu"))
    with torch.no_grad():
        model.weight.view(-1)[::4] += 1  # of the 16, the four that are looked at
    # They stand for all 16 of the weight, and the bias, which stays, for itself: 2 numbers.
    expected = {"update/moved": 16 / 18, "update/norm": 4.0, "update/read_norm": 4.0}
    assert watch.update_done() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("learning_rate, weight", [(0.0, 0.5), (1e-6, 0.0), (1e-6, 0.5)])
def test_weights_that_stay_are_a_warning_unless_nothing_is_to_move(
    learning_rate, weight, monkeypatch
):
    """A learning rate of 0 ended the run at update 20, and so did a process that holds only zeros."""
    monkeypatch.setattr(moved, "UPDATES_TO_WARN", 1)
    monkeypatch.setattr(moved.engine, "half_precision", lambda accelerator: torch.bfloat16)
    monkeypatch.setattr(moved.rounding, "rounded_when_read", lambda accelerator, model: {"weight"})
    model = torch.nn.Linear(8, 2)
    torch.nn.init.constant_(model.weight, weight)
    said = []
    run = SimpleNamespace(
        accelerator=SimpleNamespace(reduce=lambda tensor: tensor, is_main_process=True),
        args=SimpleNamespace(learning_rate=learning_rate, spread_masters=False),
        metrics=SimpleNamespace(warn=said.append),
        unwrapped=model,
        device="cpu",
    )
    assert moved.Watch(run).update_done()["update/moved"] == 0
    assert len(said) == (learning_rate > 0)
    assert ["moves for some 1,953 updates" in text for text in said] == [weight > 0] * len(said)


@pytest.mark.parametrize("saved_in", [torch.float16, torch.bfloat16, torch.float32])
def test_a_model_saved_in_fp16_is_named_where_bf16_would_make_it_jump(saved_in, tmp_path, capsys):
    """One in eight numbers of fp16 is halfway between two of bf16, and hardly any of fp32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path)).to(saved_in).float()
    wrapper = LogProbModel(model)
    for precision, all_are_rounded in (("bf16", False), ("bf16", True), ("fp16", True), ("no", 0)):
        accelerator = SimpleNamespace(
            mixed_precision=precision,
            is_fsdp2=all_are_rounded,  # norms and embeddings, too
            state=SimpleNamespace(deepspeed_plugin=None),
            device=torch.device("cpu"),
            process_index=0,
            print=print,
        )
        rounding.note_ties(accelerator, wrapper)
        said = capsys.readouterr().out
        if saved_in is torch.float16 and precision == "bf16":
            [share] = re.findall(r"NOTE: (\d+)% of the weights are halfway between two bf16", said)
            assert int(share) in (12, 13)
        else:
            assert said == ""
