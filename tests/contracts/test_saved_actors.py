"""What is saved of a model and taken out of a checkpoint: its dtype is said, and only files of the manifest are copied."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from common import actor, export, folders
from runs import LAUNCHERS, launch, recipe, refuses, tiny_inputs

PPO = [
    "--rollout_batch_size",
    8,
    "--generate_batch_size",
    8,
    "--score_batch_size",
    8,
    "--max_new_tokens",
    4,
    "--reward_function",
    "common.rollout.rewards:answer_reward",
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return tiny_inputs(tmp_path_factory.mktemp("saved"))


def flags(inputs, name, output, *more):
    return ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / f"{name}.jsonl", "--output_dir", output, "--train_batch_size", 8,
            "--max_steps", 2, "--save_steps", 2, "--report_to", "none", *(PPO if name == "ppo" else []), *more]  # fmt: skip


@pytest.mark.parametrize(
    "name, launcher, dtype",
    [("sft", "plain", "bfloat16"), ("reward", "plain", "float16"), ("dpo", "plain", "bfloat16"), ("ppo", "plain", "bfloat16"),
     pytest.param("sft", "zero3", "bfloat16", marks=pytest.mark.slow), pytest.param("dpo", "fsdp2", "float16", marks=pytest.mark.slow)],
)  # fmt: skip
def test_save_dtype_converts_saved_actors_and_no_checkpoint(
    inputs, tmp_path, name, launcher, dtype
):
    output = tmp_path / "out"
    result = launch(
        LAUNCHERS[launcher],
        recipe(name),
        *flags(inputs, name, output, "--save_dtype", dtype, "--save_actor_steps", 1),
    )
    exact = load_file(output / "checkpoints/global_step_000002/actor/model.safetensors")
    assert {tensor.dtype for tensor in exact.values()} == {torch.float32}
    kind = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    for folder in ("actors/global_step_000002", "actor"):
        saved = load_file(output / folder / "model.safetensors")
        assert saved.keys() == exact.keys()
        for key, tensor in exact.items():
            assert torch.equal(saved[key], tensor.to(getattr(torch, dtype))), key
        assert kind.from_pretrained(output / folder).dtype == getattr(torch, dtype)
        assert f"saved the actor in {dtype} (by --save_dtype): {output}/{folder}\n" in result.stdout
    assert f"in {dtype} (by --save_dtype): {output}/actors/global_step_000001\n" in result.stdout
    # It decides nothing of the run: another value resumes.
    result = launch(
        LAUNCHERS[launcher],
        recipe(name),
        *flags(inputs, name, output, "--resume", "auto", "--max_steps", 3),
    )
    assert "resumed from" in result.stdout and "left behind" not in result.stdout
    assert f"saved the actor in float32 (as trained): {output}/actor\n" in result.stdout
    assert {tensor.dtype for tensor in load_file(output / "actor/model.safetensors").values()} == {
        torch.float32
    }


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


def test_where_there_is_no_whole_checkpoint_the_newest_is_named(tmp_path):
    """In the place of a checkpoint: its run, the folder of all, one that was deleted, one that is torn."""
    run = tmp_path / "run"
    last = run / "checkpoints/global_step_000012"
    torn = run / "checkpoints/global_step_000104"
    for folder in (last, last.with_name("global_step_000008"), torn):
        folder.mkdir(parents=True)
    deleted = last.with_name("global_step_000004")
    for path, newest in [
        (run, torn), (run / "checkpoints", torn), (deleted, torn), (run / "actor", torn), (torn, last),
    ]:  # fmt: skip
        refuses(
            f"{path} is not a whole checkpoint: {path / 'manifest.json'} is missing. "
            f"Take {newest} instead, the newest of this run",
            call=lambda: export.export(path, tmp_path / "out"),  # noqa: B023
        )
    with pytest.raises(SystemExit) as error:
        export.export(tmp_path / "nothing/near", tmp_path / "out")
    assert str(error.value).endswith("near/manifest.json is missing")


def test_export_follows_no_link_of_the_manifest(checkpoint, tmp_path):
    weights = checkpoint / "actor/model.safetensors"
    shutil.move(weights, tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")  # the same content: the checksum agrees
    assert folders.fault_of(checkpoint) is None
    refuses(
        "its manifest names 'actor/model.safetensors', which is a link",
        call=lambda: export.export(checkpoint, tmp_path / "out"),
    )
    weights.unlink()
    shutil.move(tmp_path / "elsewhere", weights)
    shutil.move(checkpoint / "actor/sub", tmp_path / "sub")
    (checkpoint / "actor/sub").symlink_to(tmp_path / "sub")
    refuses(
        "its manifest names 'actor/sub/code.py', which is a link",
        call=lambda: export.export(checkpoint, tmp_path / "out"),
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["actor/../../outside", "/etc/hostname"])
def test_export_does_not_leave_the_checkpoint(checkpoint, tmp_path, name):
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
    refuses("its manifest names no actor", call=lambda: export.export(checkpoint, tmp_path / "out"))


def test_a_checkpoint_without_a_critic_says_so(checkpoint, tmp_path):
    refuses(
        "holds no critic: only checkpoints of recipes/ppo.py do",
        call=lambda: export.export(checkpoint, tmp_path / "out", model="critic"),
    )


def test_universal_reads_no_pickle_that_the_manifest_does_not_name(checkpoint, tmp_path):
    engine = checkpoint / "engine/pytorch_model"
    engine.mkdir(parents=True)
    (engine / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"not ours")
    refuses(
        "its manifest does not name engine/pytorch_model/bf16_zero_pp_rank_0",
        call=lambda: export.universal(checkpoint, tmp_path / "out"),
    )
    assert not (tmp_path / "out").exists()
