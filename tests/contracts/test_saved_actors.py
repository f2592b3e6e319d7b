"""What is saved of a model, taken out of a checkpoint, kept as the best one, and uploaded."""

import json
import shutil
import types

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import actor, console, folders
from common.actor import Best
from preference_recipes.data import dataset
from preference_recipes.data.dataset import Converter, Data
from preference_recipes.data.prompts import prompt_row
from preference_recipes.tools import export
from runs import (
    ASSETS,
    LAUNCHERS,
    evaluation_lines,
    launch,
    recipe,
    refuses,
    timeless,
    tiny_inputs,
    weights,
    write_jsonl,
)
from small_run import small_run

PPO = ["--rollout_batch_size", 8, "--generate_batch_size", 8, "--score_batch_size", 8, "--max_new_tokens", 4,
       "--reward_function", "preference_recipes.rollouts.rewards:answer_reward"]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return tiny_inputs(tmp_path_factory.mktemp("saved"))


def flags(inputs, name, output, *more):
    return ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / f"{name}.jsonl", "--output_dir", output, "--train_batch_size", 8,
            "--max_steps", 2, "--save_steps", 2, "--report_to", "none", *(PPO if name == "ppo" else []), *more]  # fmt: skip


@pytest.mark.parametrize(
    "name, launcher", [("ppo", "plain"), pytest.param("sft", "zero3", marks=pytest.mark.slow)]
)
def test_save_dtype_converts_saved_actors_and_no_checkpoint(inputs, tmp_path, name, launcher):
    output = tmp_path / "out"
    given = flags(inputs, name, output, "--save_dtype", "bfloat16", "--save_actor_steps", 1)
    launch(LAUNCHERS[launcher], recipe(name), *given)
    exact = load_file(output / "checkpoints/global_step_000002/actor/model.safetensors")
    assert {tensor.dtype for tensor in exact.values()} == {torch.float32}
    for folder in ("actors/global_step_000002", "actor"):
        saved = load_file(output / folder / "model.safetensors")
        assert saved.keys() == exact.keys()
        for key, tensor in exact.items():
            assert torch.equal(saved[key], tensor.bfloat16()), key
        assert AutoModelForCausalLM.from_pretrained(output / folder).dtype == torch.bfloat16
    # It decides nothing of the run: another value resumes.
    resumed = flags(inputs, name, output, "--resume", "auto", "--max_steps", 3)
    assert "resumed from" in launch(LAUNCHERS[launcher], recipe(name), *resumed).stdout
    saved = load_file(output / "actor/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def test_export_takes_what_the_manifest_names_and_does_not_leave_the_checkpoint(tmp_path):
    checkpoint = tmp_path / "global_step_000001"
    (checkpoint / "actor").mkdir(parents=True)
    for name in ("actor/config.json", "state.json"):
        (checkpoint / name).write_text("{}")
    entries = folders.describe_files(checkpoint)
    manifest = checkpoint / "manifest.json"
    manifest.write_text(json.dumps(entries))
    secret = tmp_path / "secret"
    secret.write_text("private")
    (checkpoint / "actor/linked").symlink_to(secret)
    export.export(checkpoint, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]

    name = "actor/../../secret"
    size = [(checkpoint / name).stat().st_size, folders.checksum(checkpoint / name)]
    manifest.write_text(json.dumps({**entries, name: size}))
    call = lambda: export.export(checkpoint, tmp_path / "other")
    refuses(f"its manifest names {name!r}", call=call)
    manifest.write_text(json.dumps({"state.json": entries["state.json"]}))
    refuses("holds no actor", call=call)


# ============================================================ the best actor


def test_the_direction_of_a_metric(tmp_path):
    nan = float("nan")
    for given, lower in [
        ("eval/loss", True), ("eval/kl", True), ("eval/exact_match", False), ("eval/rewards/accuracies", False),
        ("eval/loss:max", False), ("eval/length:min", True), ("eval/kl/reverse", True), ("eval/code/kl/forward", True),
        ("eval/kl/reverse/math", True), ("eval/kl/reverse:max", False), ("eval/kl/exact_match", False),
    ]:  # fmt: skip
        for value, before, is_better in [
            (1.0, None, True), (nan, None, False), (1.0, 2.0, lower), (2.0, 2.0, False), (3.0, 2.0, not lower), (nan, 2.0, False),
        ]:  # fmt: skip
            actor = small_run(tmp_path, keep_best=given).actor
            actor.best = Best(value=before)
            actor.keep_best({given.removesuffix(":max").removesuffix(":min"): value})
            assert actor.best.since == (not is_better), (given, value, before)
            assert actor.best.value == (value if is_better else before)


def best_flags(inputs, output, *more):
    """SFT at a learning rate that makes the loss rise soon: the best evaluation is neither first nor last."""
    return ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "sft.jsonl", "--eval_dataset_name", inputs / "sft.jsonl",
            "--output_dir", output, "--train_batch_size", 8, "--max_steps", 30, "--learning_rate", 0.3, "--warmup_steps", 4, "--eval_steps", 1,
            "--lr_scheduler_type", "constant_with_warmup", "--save_actor_steps", 1, "--report_to", "none", "--keep_best", "eval/loss", *more]  # fmt: skip


@pytest.mark.parametrize("launcher", ["plain", pytest.param("zero3", marks=pytest.mark.slow)])
def test_the_best_actor_is_kept_and_a_run_that_gets_no_better_ends(inputs, tmp_path, launcher):
    output = tmp_path / "out"
    way = LAUNCHERS[launcher]
    result = launch(way, recipe("sft"), *best_flags(inputs, output, "--stop_after", 3))
    losses = [line["eval/loss"] for line in evaluation_lines(output)]
    step = losses.index(min(losses))
    assert 0 < step == len(losses) - 4, losses
    best = weights(output, f"actors/global_step_{step:06d}")
    assert torch.equal(weights(output, "actor_best"), best)
    assert not torch.equal(weights(output, "actor_best"), weights(output))
    kept = f"eval/loss {losses[step]:.4g} at update {step}"
    assert f"best: {kept}, saved in {output}/actor_best\n" in result.stdout
    assert "stopped early: 3 evaluations without a better one" in result.stdout
    assert f"done: {step + 3} updates" in result.stdout


def test_an_early_end_survives_a_resume(inputs, tmp_path):
    """From any checkpoint: beyond the best evaluation, or before it."""
    whole = tmp_path / "whole"
    saving = ["--stop_after", 3, "--save_steps", 1, "--save_total_limit", 0]
    launch([], recipe("sft"), *best_flags(inputs, whole, *saving))
    end = evaluation_lines(whole)[-1]["global_step"]
    # As if killed after update end - 1, with two evaluations counted: what came later is removed.
    for seen_last in (end - 1, end - 4):
        killed = shutil.copytree(whole, tmp_path / str(seen_last))
        shutil.rmtree(killed / "actor")
        for step in range(seen_last + 1, end + 1):
            shutil.rmtree(killed / f"checkpoints/global_step_{step:06d}")
        resumed = best_flags(inputs, killed, *saving, "--resume", "auto")
        said = launch([], recipe("sft"), *resumed).stdout
        assert f"global_step_{seen_last:06d}: {seen_last} updates" in said
        assert timeless(killed) == timeless(whole)
        for folder in ("actor", "actor_best"):
            assert torch.equal(weights(killed, folder), weights(whole, folder))
        assert (killed / "best.json").read_text() == (whole / "best.json").read_text()
        # The best one lay beyond the earlier checkpoint, so it was set aside and made again.
        is_beyond = seen_last == end - 4
        assert ("--keep_best begins anew" in said) == is_beyond
        assert bool([*killed.glob("actor_best.before_resume")]) == is_beyond


def test_the_answers_of_held_out_rows_are_part_of_their_content(accelerator, tmp_path):
    """Those of exact match, which no model reads."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "model")
    found = []
    for number, (text, answer) in enumerate([("a", "1"), ("a", "2"), ("b", "1"), ("a", "1")]):
        rows = [{"prompt": text, "completion": "c", "answer": answer}]
        (tmp_path / str(number)).mkdir()
        file = str(write_jsonl(tmp_path / f"{number}/rows.jsonl", rows))
        settings = dict(max_length=64, max_new_tokens=4, strings_as_messages=False)
        converter = Converter(prompt_row, tokenizer, {}, settings)
        rows = dataset.load(accelerator, file, "train", converter)
        found.append(Data(rows, None, {"": rows}, None).fingerprints["held-out data"][""])
    assert len(set(found)) == 3 and found[0] == found[3]


# ============================================================ the hub


def test_the_actor_is_uploaded_to_a_private_repository_of_its_own(tmp_path, monkeypatch, capsys):
    asked = []

    class Api:
        def create_repo(self, name, **settings):
            asked.append((name, settings))
            return types.SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, **settings):
            asked.append(settings)

    monkeypatch.setattr(console, "HfApi", Api)
    made = small_run(tmp_path, push_to_hub="mine")
    made.run.start()
    console.end(made.actor)
    assert asked == [
        ("mine", {"private": True, "exist_ok": True}),
        {"repo_id": "me/mine", "folder_path": tmp_path / "actor"},
    ]
    assert f"uploaded {tmp_path}/actor to" in capsys.readouterr().out


def test_weights_that_a_dtype_cannot_hold_are_said(capsys):
    assert actor.converted(torch.tensor([1e5]), "float16").tolist() == [torch.inf]
    assert "WARNING: weights are too large for float16" in capsys.readouterr().out
    assert actor.converted(torch.tensor([1.0, torch.nan]), "float16")[0] == 1
