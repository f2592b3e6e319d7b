"""What is saved of a model, taken out of a checkpoint, kept as the best one, and uploaded."""

import json
import shutil
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
)

from common import actor, best, console, folders
from preference_recipes.data.conversion import Converter
from preference_recipes.data.dataset import Data, load_evaluation_sets
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

PPO = ["--rollout_batch_size", 8, "--generate_batch_size", 8, "--score_batch_size", 8, "--max_new_tokens", 4,
       "--reward_function", "preference_recipes.rollouts.rewards:answer_reward"]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return tiny_inputs(tmp_path_factory.mktemp("saved"))


def flags(inputs, name, output, *more):
    return ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / f"{name}.jsonl", "--output_dir", output, "--train_batch_size", 8,
            "--max_steps", 2, "--save_steps", 2, "--report_to", "none", *(PPO if name == "ppo" else []), *more]  # fmt: skip


@pytest.mark.parametrize(
    "name, launcher, dtype",
    [("ppo", "plain", "bfloat16"),
     pytest.param("sft", "zero3", "bfloat16", marks=pytest.mark.slow)],
)  # fmt: skip
def test_save_dtype_converts_saved_actors_and_no_checkpoint(
    inputs, tmp_path, name, launcher, dtype
):
    output = tmp_path / "out"
    given = flags(inputs, name, output, "--save_dtype", dtype, "--save_actor_steps", 1)
    said = launch(LAUNCHERS[launcher], recipe(name), *given).stdout
    exact = load_file(output / "checkpoints/global_step_000002/actor/model.safetensors")
    assert {tensor.dtype for tensor in exact.values()} == {torch.float32}
    for folder in ("actors/global_step_000002", "actor"):
        assert f"saved the actor: {output}/{folder}\n" in said
        saved = load_file(output / folder / "model.safetensors")
        assert saved.keys() == exact.keys()
        for key, tensor in exact.items():
            assert torch.equal(saved[key], tensor.to(getattr(torch, dtype))), key
        loaded = AutoModelForCausalLM.from_pretrained(output / folder)
        assert loaded.dtype == getattr(torch, dtype)
    # It decides nothing of the run: another value resumes.
    resumed = flags(inputs, name, output, "--resume", "auto", "--max_steps", 3)
    assert "resumed from" in launch(LAUNCHERS[launcher], recipe(name), *resumed).stdout
    saved = load_file(output / "actor/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def test_what_a_dtype_cannot_hold_is_said(capsys):
    large = torch.tensor([1.0, 1e5])
    assert actor.converted("head", large, "float16").tolist() == [1.0, torch.inf]
    assert "NOTE: values of head are too large for float16" in capsys.readouterr().out
    assert actor.converted("head", large, "bfloat16").dtype == torch.bfloat16
    assert actor.converted("ids", torch.tensor([70000]), "float16").tolist() == [70000]
    assert capsys.readouterr().out == ""


@pytest.fixture
def checkpoint(tmp_path):
    """A whole checkpoint, as far as export reads it."""
    folder = tmp_path / "global_step_000001"
    for name, text in {
        "actor/config.json": "{}",
        "actor/model.safetensors": "w",
        "actor/sub/code.py": "c",
        "state.json": "{}",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    folders.write_manifest(folder, folders.describe_files(folder))
    return folder


def test_export_copies_what_the_manifest_names_and_nothing_else(checkpoint, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("private")
    (checkpoint / "actor/notes.txt").write_text("mine")
    (checkpoint / "actor/key").symlink_to(secret / "key")
    (checkpoint / "actor/linked").symlink_to(secret)
    (checkpoint / "actor/sub/more").mkdir()
    export.export(checkpoint, tmp_path / "out")
    found = {
        str(path.relative_to(tmp_path / "out")): path.read_text()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert found == {"config.json": "{}", "model.safetensors": "w", "sub/code.py": "c"}
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_export_does_not_leave_the_checkpoint(checkpoint, tmp_path):
    name = "actor/../../outside"
    (tmp_path / "outside").write_text("private")
    entries = json.loads((checkpoint / "manifest.json").read_text())
    path = checkpoint / name
    folders.write_manifest(
        checkpoint, {**entries, name: [path.stat().st_size, folders.checksum(path)]}
    )
    refuses(
        f"its manifest names {name!r}", call=lambda: export.export(checkpoint, tmp_path / "out")
    )
    folders.write_manifest(
        checkpoint, {name: value for name, value in entries.items() if "actor" not in name}
    )
    refuses("holds no actor", call=lambda: export.export(checkpoint, tmp_path / "out"))


# ============================================================ the best actor


def test_the_direction_of_a_metric():
    for given, metric, lower in [
        ("eval/loss", "eval/loss", True), ("eval/kl", "eval/kl", True), ("eval/exact_match", "eval/exact_match", False),
        ("eval/rewards/accuracies", "eval/rewards/accuracies", False), ("eval/loss:max", "eval/loss", False),
        ("eval/length:min", "eval/length", True),
    ]:  # fmt: skip
        assert best.metric_of(given) == (metric, lower), given
    nan = float("nan")
    for value, before, lower, expected in [
        (1.0, None, True, True), (nan, None, True, False), (1.0, 2.0, True, True), (1.0, 2.0, False, False),
        (2.0, 2.0, True, False), (2.0, 2.0, False, False), (3.0, 2.0, False, True), (nan, 2.0, False, False),
    ]:  # fmt: skip
        found = best.Best(value=before).is_beaten_by(value, lower)
        assert found == expected, (value, before, lower)


def best_flags(inputs, output, *more):
    """SFT at a learning rate that makes the loss rise soon: the best evaluation is neither first nor last."""
    return ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "sft.jsonl", "--eval_dataset_name", inputs / "sft.jsonl",
            "--output_dir", output, "--train_batch_size", 8, "--max_steps", 30, "--learning_rate", 0.3, "--warmup_steps", 4, "--eval_steps", 1,
            "--lr_scheduler_type", "constant_with_warmup", "--save_actor_steps", 1, "--report_to", "none", "--keep_best", "eval/loss", *more]  # fmt: skip


@pytest.mark.parametrize(
    "launcher",
    ["plain", pytest.param("zero3", marks=pytest.mark.slow)],
)
def test_the_best_actor_is_kept_and_a_run_that_gets_no_better_ends(inputs, tmp_path, launcher):
    output = tmp_path / "out"
    way = LAUNCHERS[launcher]
    result = launch(way, recipe("sft"), *best_flags(inputs, output, "--stop_after", 3))
    losses = [line["eval/loss"] for line in evaluation_lines(output)]
    step = losses.index(min(losses))
    assert 0 < step == len(losses) - 4, losses
    assert torch.equal(
        weights(output, "actor_best"), weights(output, f"actors/global_step_{step:06d}")
    )
    assert not torch.equal(weights(output, "actor_best"), weights(output))
    kept = f"eval/loss {losses[step]:.4g} at update {step}"
    assert f"best: {kept}, saved in {output}/actor_best\n" in result.stdout
    assert "stopped early: 3 evaluations without a better one" in result.stdout
    assert f"done: {step + 3} updates" in result.stdout


def test_an_early_end_survives_a_resume(inputs, tmp_path):
    """From any checkpoint: beyond the best evaluation, or before it."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    saving = ["--stop_after", 3, "--save_steps", 1, "--save_total_limit", 0]
    launch([], recipe("sft"), *best_flags(inputs, whole, *saving))
    end = evaluation_lines(whole)[-1]["global_step"]
    # As if killed after update end - 1, with two evaluations counted: what came later is removed.
    for seen_last in (end - 1, end - 4):
        shutil.copytree(whole, killed)
        shutil.rmtree(killed / "actor")
        for step in range(seen_last + 1, end + 1):
            shutil.rmtree(killed / f"checkpoints/global_step_{step:06d}")
        resumed = best_flags(inputs, killed, *saving, "--resume", "auto")
        result = launch([], recipe("sft"), *resumed)
        assert f"global_step_{seen_last:06d}: {seen_last} updates" in result.stdout
        assert timeless(killed) == timeless(whole)
        for folder in ("actor", "actor_best"):
            assert torch.equal(weights(killed, folder), weights(whole, folder))
        assert json.loads((killed / "best.json").read_text()) == json.loads((whole / "best.json").read_text())  # fmt: skip
        # The best one lay beyond that checkpoint, so it was set aside and made again.
        assert ("--keep_best begins anew" in result.stdout) == (seen_last == end - 4)
        moved = list(killed.glob("actor_best.before_resume"))
        assert bool(moved) == (seen_last == end - 4)
        shutil.rmtree(killed)


def test_the_answers_of_held_out_rows_are_part_of_their_content(accelerator, tmp_path):
    """Those of exact match: no model reads them. The fingerprint of training data is as before."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "model")
    found = []
    for text, answer in [("a", "1"), ("a", "2"), ("b", "1"), ("a", "1")]:
        folder = tmp_path / str(len(found))
        folder.mkdir()
        rows = [{"prompt": text, "completion": "c", "answer": answer}]
        file = str(write_jsonl(folder / "rows.jsonl", rows))
        settings = dict(max_length=64, max_new_tokens=4, strings_as_messages=False)
        converter = Converter(prompt_row, tokenizer, {}, settings)
        sets = load_evaluation_sets(accelerator, [file], "train", converter)
        assert list(sets) == ["eval/"] and sets["eval/"]["answer"] == [answer]
        found.append(Data(sets["eval/"], None, sets, None).fingerprints)
    assert len({data["held-out data"]["eval/"] for data in found}) == 3
    assert found[0] == found[3] and found[0]["data"] == sets["eval/"]._fingerprint


# ============================================================ the hub


def test_the_actor_is_uploaded_to_a_private_repository_of_its_own(monkeypatch, capsys):
    asked = []

    class Api:
        def create_repo(self, name, **settings):
            asked.append((name, settings))
            return types.SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, **settings):
            asked.append(settings)

    monkeypatch.setattr(console, "HfApi", Api)
    console.upload(Path("out/actor"), "mine")
    assert asked == [
        ("mine", {"private": True, "exist_ok": True}),
        {"repo_id": "me/mine", "folder_path": Path("out/actor")},
    ]
    assert "uploaded out/actor to" in capsys.readouterr().out
