"""Reference and reward models: a change is noticed at a resume, and cached log-probs are those of this engine."""

import gc
import json
import os
import shutil
import types
import weakref

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file

import runs
from architectures import build
from common.batches import Rows
from common.shared_args import SharedArgs
from preference_recipes.models import load, prepare, reference, scores
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer
from preference_recipes.models.reference import precompute
from runs import ROLLOUTS, launch, recipe, short_run, training_lines


def change(model, by=0.1):
    """Moves one value of a saved model; size and names stay the same."""
    state = load_file(model / "model.safetensors")
    state[max(state)].view(-1)[0] += by
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})


def test_the_base_below_adapters_is_held_in_half(accelerator, monkeypatch):
    """Log-probs and gradients of the adapters are the same, bit for bit; the adapters stay in fp32."""
    monkeypatch.setattr(accelerator.state, "_mixed_precision", "bf16")
    policy = LogProbModel(build("llama"))
    prepare.choose_parameters(accelerator, policy, SharedArgs(lora_r=4))
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    for parameter in trained:  # at zero, where B begins, A would get no gradient
        torch.nn.init.normal_(parameter)
    batch = Packer(torch.device("cpu")).make_batch([[5, 6]], [[7, 8, 9]])

    def learn() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            logps = policy(batch)["logps"]
        return [logps, *torch.autograd.grad(logps.sum(), trained)]

    before = learn()
    prepare.round_frozen(accelerator, policy)
    assert all(map(torch.equal, before, learn()))
    in_half = {name for name, p in policy.named_parameters() if p.dtype == torch.bfloat16}
    layers = {name for name, _ in policy.named_parameters() if "base_layer" in name}
    assert in_half == layers and len(layers) == 14


def test_a_fingerprint_is_that_of_the_content(inputs, tmp_path):
    model, copy = inputs / "model", tmp_path / "copy"
    shutil.copytree(model, copy)
    os.utime(copy / "model.safetensors", (0, 0))
    (copy / "README.md").write_text("notes")
    config = types.SimpleNamespace(_commit_hash="abc")
    first = load.describe_weights(str(model), config)
    assert load.describe_weights(str(copy), config) == first
    change(copy)
    assert load.describe_weights(str(copy), config) != first
    change(copy, by=-0.1)
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**settings, "rope_theta": 5.0}))
    assert load.describe_weights(str(copy), config) != first
    assert load.describe_weights("org/hub-name", config) == "commit abc of org/hub-name"


@pytest.mark.parametrize("name, part", [("dpo", "reference"), ("ppo", "reward")])
def test_a_changed_model_is_noticed_at_a_resume(inputs, tmp_path, name, part):
    for folder in ("reference", "reward"):
        shutil.copytree(inputs / "model", tmp_path / folder)
    given = {"ref_model_name_or_path": tmp_path / "reference", "save_steps": 1}
    if name == "ppo":
        name_of_base = str(inputs / "model")
        tokenizer = load.load_tokenizer(name_of_base)
        model = scores.score_model(name_of_base, tokenizer, SharedArgs())
        model.save_pretrained(tmp_path / "reward")
        given |= ROLLOUTS | {"reward_model_name_or_path": tmp_path / "reward"}
    flags = short_run(inputs, name, tmp_path / "out", **given)
    again = [*flags, "--max_steps", 2, "--resume", "auto"]
    launch([], recipe(name), *flags, "--max_steps", 1)
    change(tmp_path / part)
    result = launch([], recipe(name), *again, check=False)
    said = f"belongs to another run: {part} model: 'weights "
    assert result.returncode and said in result.stdout and "Traceback" not in result.stdout
    change(tmp_path / part, by=-0.1)
    os.utime(tmp_path / part / "model.safetensors")
    assert "resumed from" in launch([], recipe(name), *again).stdout
    assert [line["global_step"] for line in training_lines(tmp_path / "out")] == [1, 2]


def test_precomputing_frees_the_reference(accelerator):
    """Nothing holds the model any more; each row has the log-probs of both its answers."""
    held = reference.Reference.__new__(reference.Reference)
    args = SharedArgs(micro_train_batch_size=2, micro_train_tokens=0)
    held.model = LogProbModel(build("llama"))
    model = weakref.ref(held.model)
    packer = Packer(torch.device("cpu"))
    columns = {
        "prompt_ids": [[5, 6], [7], [5, 6]],
        "chosen_ids": [[8], [9, 8], [4]],
        "rejected_ids": [[7, 6, 5], [3], [9, 9]],
        "length": [8, 5, 7],
    }

    def collate(some: dict, packer: Packer) -> dict:
        return packer.make_batch(some["prompt_ids"] * 2, some["chosen_ids"] + some["rejected_ids"])

    expected = held.logps(collate(columns, packer)).sum(1).view(2, 3).T
    data = Rows(datasets.Dataset.from_dict(columns))
    again = Rows(datasets.Dataset.from_dict(columns))
    precompute(accelerator, args, held, data, [again], collate, packer)
    for rows in (data, again):
        torch.testing.assert_close(torch.tensor(rows.added["ref_logps"]), expected)
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("launcher, rows, micro", [("plain", 44, 4), ("ddp", 5, 1)])
def test_precomputed_log_probs_change_no_bit(inputs, tmp_path, launcher, rows, micro):
    """Equal rewards stay equal in the first update; the padding row of two processes counts once."""
    data = runs.first_rows(tmp_path / "pairs.jsonl", inputs / "dpo.jsonl", rows)
    found = []
    for is_known in (False, True):
        output = tmp_path / str(is_known)
        more = dict(precompute_ref_log_probs=is_known, learning_rate=0.01)
        held_out = dict(dataset_name=data, eval_dataset_name=data, micro_train_batch_size=micro)
        flags = short_run(inputs, "dpo", output, **more, **held_out, share_prompts=False)
        launch(runs.LAUNCHERS[launcher], recipe("dpo"), *flags)
        found.append(runs.timeless(output))
    assert found[0] == found[1]
    first = next(line for line in found[1] if "loss" in line)
    assert first["rewards/accuracies"] == first["rewards/margins"] == 0
    assert found[1][-1]["eval/rewards/margins"] != 0
