"""What is saved of a model, taken out of a checkpoint, kept as the best one, and uploaded."""

import json
import shutil
import types

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import runs
from common import console, folders, saving
from common.actor import ActorSaver, Best
from preference_recipes.tools import export
from recipes import ANSWER_REWARD
from small_run import small_run


def flags(inputs, output, **more):
    updates = runs.ROLLOUTS | dict(reward_function=ANSWER_REWARD, max_steps=2, save_steps=2)
    return runs.short_run(inputs, "ppo", output, **updates | more)


def test_save_dtype_converts_saved_actors_and_no_checkpoint(inputs, tmp_path):
    output = tmp_path / "out"
    given = flags(inputs, output, save_dtype="bfloat16", save_actor_steps=1)
    runs.launch([], runs.recipe("ppo"), *given)
    exact = load_file(output / "checkpoints/global_step_000002/actor/model.safetensors")
    assert {tensor.dtype for tensor in exact.values()} == {torch.float32}
    for folder in ("actors/global_step_000002", "actor"):
        saved = load_file(output / folder / "model.safetensors")
        assert saved.keys() == exact.keys()
        for key, tensor in exact.items():
            assert torch.equal(saved[key], tensor.bfloat16()), key
        assert AutoModelForCausalLM.from_pretrained(output / folder).dtype == torch.bfloat16
    # It decides nothing of the run: another value resumes.
    resumed = flags(inputs, output, resume="auto", max_steps=3)
    assert "resumed from" in runs.launch([], runs.recipe("ppo"), *resumed).stdout
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
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    export.export(checkpoint, tmp_path / "link")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["config.json"]

    name = "actor/../../secret"
    manifest.write_text(json.dumps({**entries, name: folders.describe(checkpoint / name)}))
    call = lambda: export.export(checkpoint, tmp_path / "other")
    runs.refuses(f"its manifest names {name!r}", call=call)
    manifest.write_text(json.dumps({"state.json": entries["state.json"]}))
    runs.refuses("holds no actor", call=call)


# ============================================================ the best actor


LOWER_IS_BETTER = ["eval/loss", "eval/kl", "eval/length:min"]
LOWER_IS_BETTER += ["eval/kl/reverse", "eval/code/kl/forward", "eval/kl/reverse/math"]
HIGHER_IS_BETTER = ["eval/exact_match", "eval/rewards/accuracies", "eval/loss:max"]
HIGHER_IS_BETTER += ["eval/kl/reverse:max", "eval/kl/exact_match"]


@pytest.mark.parametrize("given", LOWER_IS_BETTER + HIGHER_IS_BETTER)
def test_the_direction_of_a_metric(tmp_path, given):
    nan = float("nan")
    for value, before, is_better in [
        (1.0, None, True),
        (nan, None, False),
        (1.0, 2.0, given in LOWER_IS_BETTER),
        (2.0, 2.0, False),
        (3.0, 2.0, given in HIGHER_IS_BETTER),
        (nan, 2.0, False),
    ]:
        saver = small_run(tmp_path, keep_best=given).saver
        saver.best = Best(value=before)
        saver.save_if_best({given.removesuffix(":max").removesuffix(":min"): value})
        assert saver.best.since == (not is_better), (value, before)
        assert saver.best.value == (value if is_better else before)


def best_flags(inputs, output, **more):
    """SFT at a learning rate that makes the loss rise soon: the best evaluation is neither first nor last."""
    rates = dict(learning_rate=0.3, warmup_steps=4, lr_scheduler_type="constant_with_warmup")
    keeping = dict(max_steps=30, eval_steps=1, save_actor_steps=1, keep_best="eval/loss")
    held_out = inputs / "sft.jsonl"
    given = rates | keeping | {"eval_dataset_name": held_out} | more
    return runs.short_run(inputs, "sft", output, **given)


@pytest.mark.parametrize("launcher", ["plain", runs.slow("zero3")])
def test_the_best_actor_is_kept_and_a_run_that_gets_no_better_ends(inputs, tmp_path, launcher):
    output = tmp_path / "out"
    given = best_flags(inputs, output, stop_after=3)
    result = runs.launch(runs.LAUNCHERS[launcher], runs.recipe("sft"), *given)
    losses = [line["eval/loss"] for line in runs.evaluation_lines(output)]
    step = losses.index(min(losses))
    assert 0 < step == len(losses) - 4, losses
    best = runs.weights(output, f"actors/global_step_{step:06d}")
    assert torch.equal(runs.weights(output, "actor_best"), best)
    assert not torch.equal(runs.weights(output, "actor_best"), runs.weights(output))
    kept = f"eval/loss {losses[step]:.4g} at update {step}"
    assert f"best: {kept}, saved in {output}/actor_best\n" in result.stdout
    assert "stopped early: 3 evaluations without a better one" in result.stdout
    assert f"done: {step + 3} updates" in result.stdout


def test_an_early_end_survives_a_resume(inputs, tmp_path):
    """From any checkpoint: beyond the best evaluation, or before it."""
    whole = tmp_path / "whole"
    saving = dict(stop_after=3, save_steps=1, save_total_limit=0)
    runs.launch([], runs.recipe("sft"), *best_flags(inputs, whole, **saving))
    end = runs.evaluation_lines(whole)[-1]["global_step"]
    # As if killed after update end - 1, with two evaluations counted: what came later is removed.
    for seen_last in (end - 1, end - 4):
        killed = shutil.copytree(whole, tmp_path / str(seen_last))
        shutil.rmtree(killed / "actor")
        for step in range(seen_last + 1, end + 1):
            shutil.rmtree(killed / f"checkpoints/global_step_{step:06d}")
        resumed = best_flags(inputs, killed, **saving, resume="auto")
        said = runs.launch([], runs.recipe("sft"), *resumed).stdout
        assert f"global_step_{seen_last:06d}: {seen_last} updates" in said
        assert runs.timeless(killed) == runs.timeless(whole)
        for folder in ("actor", "actor_best"):
            assert torch.equal(runs.weights(killed, folder), runs.weights(whole, folder))
        assert (killed / "best.json").read_text() == (whole / "best.json").read_text()
        # The best one lay beyond the earlier checkpoint, so it was set aside and made again.
        is_beyond = seen_last == end - 4
        assert bool([*killed.glob("actor_best.before_resume")]) == is_beyond


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
    made.saver.unwrapped.model.can_generate = lambda: True
    made.run.start()
    console.finish_run(made.saver)
    assert asked == [
        ("mine", {"private": True, "exist_ok": True}),
        {"repo_id": "me/mine", "folder_path": tmp_path / "actor"},
    ]
    assert f"uploaded {tmp_path}/actor to" in capsys.readouterr().out
    Api.upload_folder = lambda self, **settings: 1 / 0
    again = f"--push_to_hub mine: division by zero. To repeat it: hf upload --private mine {tmp_path}/actor"
    runs.refuses(again, call=lambda: console.finish_run(made.saver))


def test_a_run_of_no_update_saves_no_actor(tmp_path):
    made = small_run(tmp_path)
    made.run.skipped_steps = 3
    said = "no update was applied, 3 were skipped: no actor is saved"
    runs.refuses(said, call=lambda: ActorSaver.save(made.saver))
    assert not (tmp_path / "actor").exists()


def test_weights_that_a_dtype_cannot_hold_are_said(capsys):
    assert saving.converted(torch.tensor([1e5]), "float16").tolist() == [torch.inf]
    assert "WARNING: weights are too large for float16" in capsys.readouterr().out
    assert saving.converted(torch.tensor([1.0, torch.nan]), "float16")[0] == 1
