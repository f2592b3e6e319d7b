"""Reference and reward models: a change is noticed at a resume, and cached log-probs are those of this engine."""

import json
import math
import os
import shutil
import types

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from architectures import build, config_of
from common import checkpoint, engine
from common.shared_args import SharedArgs
from preference_recipes.models import load, lora, prepare
from preference_recipes.models.logprobs import LogProbModel, ScoreModel
from preference_recipes.models.packing import Packer
from runs import (
    LAUNCHERS,
    config_launcher,
    launch,
    recipe,
    timeless,
    tiny_inputs,
    training_lines,
    weights,
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return tiny_inputs(tmp_path_factory.mktemp("frozen"))


def change(model, by=0.1):
    """Moves one value of a saved model; size and names stay the same."""
    state = load_file(model / "model.safetensors")
    state[max(state)].view(-1)[0] += by
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})


def test_a_frozen_model_drops_nothing_out_and_learns_nothing(accelerator):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5)).train()
    frozen = prepare.frozen(accelerator, model)
    assert not any(module.training for module in frozen.modules())
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


LINEAR = {f"self_attn.{name}_proj" for name in "qkvo"} | {
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
}


def bf16(device="cpu", is_fsdp2=False, precision="bf16", stage=None):
    plugin = stage and types.SimpleNamespace(
        deepspeed_config={"zero_optimization": {"stage": stage}}
    )
    return types.SimpleNamespace(
        mixed_precision=precision,
        device=torch.device(device),
        is_fsdp2=is_fsdp2,
        state=types.SimpleNamespace(deepspeed_plugin=plugin),
    )


def in_half(model) -> set[str]:
    return {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}


def linear_weights(prefix="", suffix=".weight") -> set[str]:
    return {f"{prefix}layers.{layer}.{name}{suffix}" for layer in range(2) for name in LINEAR}


def test_a_frozen_model_holds_half_weights_where_autocast_rounds_them_anyway():
    """Two bytes less for each weight of a linear layer; on a GPU for the output layer's, too, if it is not the embeddings'."""

    def rounded(name, accelerator):
        model = LogProbModel(build(name)).requires_grad_(False)
        prepare.round_frozen(accelerator, model)
        return in_half(model)

    linear = linear_weights("model.model.")
    assert rounded("llama", bf16()) == linear
    assert rounded("llama", bf16("cuda")) == linear | {"model.lm_head.weight"}
    assert rounded("llama tied", bf16("cuda")) == linear
    assert rounded("llama", bf16(precision="no")) == set()
    assert rounded("llama", bf16(stage=2)) == set()  # `prepare.frozen` rounds the whole model
    everything = {name for name, _ in LogProbModel(build("llama")).named_parameters()}
    assert rounded("llama", bf16(is_fsdp2=True)) == everything


def test_a_reward_model_keeps_its_score_head_in_fp32():
    config = config_of("llama", num_labels=1)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    scorer = ScoreModel(model).eval().requires_grad_(False)
    batch = Packer(torch.device("cpu")).make_batch([[5, 6]], [[7, 8, 9]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = scorer(batch)
        prepare.round_frozen(bf16("cuda"), scorer)
        assert torch.equal(scorer(batch), before)
    assert in_half(scorer) == linear_weights("model.model.")


def test_the_base_below_adapters_is_held_in_half():
    """Outputs and gradients of the adapters are the same, bit for bit; the adapters stay in fp32."""
    policy = LogProbModel(build("llama"))
    settings = types.SimpleNamespace(
        lora_r=4, lora_alpha=8.0, lora_dropout=0.0, lora_target_modules=["all-linear"]
    )
    accelerator = bf16()
    accelerator.print = lambda text: None
    lora.add_adapters(accelerator, policy, settings)
    batch = Packer(torch.device("cpu")).make_batch([[5, 6]], [[7, 8, 9]])
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:  # it starts at zero, and A would get no gradient
            torch.nn.init.normal_(parameter)

    def learn() -> list[torch.Tensor]:
        policy.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logps = policy(batch)["logps"]
        logps.sum().backward()
        return [logps, *(p.grad for p in policy.parameters() if p.requires_grad)]

    before = [value.clone() for value in learn()]
    prepare.round_frozen(accelerator, policy)
    after = learn()
    assert len(before) == 1 + 2 * 7 * 2
    assert all(map(torch.equal, before, after))
    assert in_half(policy) == linear_weights("model.model.", ".base_layer.weight")


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


def test_what_decides_the_reference_s_values_is_in_the_key():
    """The same weights under bf16 autocast, under ZeRO-2's bf16 weights, in fp32, and with another attention: four keys."""

    def key(stage=0, precision="bf16", attention="sdpa"):
        plugin = (
            types.SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": stage}})
            if stage
            else None
        )
        state = types.SimpleNamespace(
            deepspeed_plugin=plugin,
            dynamo_plugin=types.SimpleNamespace(backend=types.SimpleNamespace(value="NO")),
        )
        accelerator = types.SimpleNamespace(
            distributed_type=DistributedType.DEEPSPEED if stage else DistributedType.NO, num_processes=1, mixed_precision=precision,
            device=torch.device("cpu"), state=state,
        )  # fmt: skip
        model = types.SimpleNamespace(config=types.SimpleNamespace(_attn_implementation=attention))
        return json.dumps(engine.decides_values(accelerator, model))

    assert (
        len({key(), key(stage=2), key(stage=3), key(precision="no"), key(attention="eager")}) == 5
    )
    assert key() == key()


PPO = [
    "--rollout_batch_size",
    8,
    "--generate_batch_size",
    8,
    "--score_batch_size",
    8,
    "--max_new_tokens",
    4,
]


@pytest.mark.parametrize(
    "name, part", [("dpo", "reference"), ("ppo", "reference"), ("ppo", "reward")]
)
def test_a_changed_model_is_noticed_at_a_resume(inputs, tmp_path, name, part):
    for folder in ("reference", "reward"):
        shutil.copytree(inputs / "model", tmp_path / folder)
    flags = ["--model_name_or_path", inputs / "model", "--ref_model_name_or_path", tmp_path / "reference", "--dataset_name", inputs / f"{name}.jsonl",
             "--output_dir", tmp_path / "out", "--train_batch_size", 8, "--save_steps", 1, "--report_to", "none"]  # fmt: skip
    if name == "ppo":
        name_of_base = str(inputs / "model")
        tokenizer = load.tokenizer_of(name_of_base)
        model = load.score_model(name_of_base, tokenizer, SharedArgs(), new_head=True)
        model.save_pretrained(tmp_path / "reward")
        flags += [*PPO, "--reward_model_name_or_path", tmp_path / "reward"]
    launch([], recipe(name), *flags, "--max_steps", 1)
    change(tmp_path / part)
    result = launch([], recipe(name), *flags, "--max_steps", 2, "--resume", "auto", check=False)
    assert (
        result.returncode
        and f"belongs to another run: {part} model: 'weights " in result.stdout
        and "Traceback" not in result.stdout
    )
    change(tmp_path / part, by=-0.1)
    os.utime(tmp_path / part / "model.safetensors")
    result = launch([], recipe(name), *flags, "--max_steps", 2, "--resume", "auto")
    assert "resumed from" in result.stdout and [
        line["global_step"] for line in training_lines(tmp_path / "out")
    ] == [1, 2]


def test_a_checkpoint_that_knows_no_fingerprint_is_resumed(tmp_path):
    accelerator = types.SimpleNamespace(
        distributed_type=DistributedType.NO, num_processes=1, mixed_precision="no"
    )
    now = checkpoint.Checkpoint.__new__(checkpoint.Checkpoint)
    now.accelerator = accelerator
    now.run = types.SimpleNamespace(args=types.SimpleNamespace(beta=1, may_change=set()))
    now.actor = types.SimpleNamespace(tokenizer=None)
    now.identity = {"data": "d", "reference model": "weights 1"}
    before = {"beta": 1, "data": "d", "world": "no"}
    now.refuse_another_run(tmp_path, before)
    with pytest.raises(
        SystemExit, match="reference model: 'weights 2' in the checkpoint, 'weights 1' now"
    ):
        now.refuse_another_run(tmp_path, {**before, "reference model": "weights 2"})


def dpo(inputs, output, launcher, *more):
    flags = ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "dpo.jsonl", "--output_dir", output, "--train_batch_size", 8,
             "--micro_train_batch_size", 2, "--learning_rate", 0.01, "--max_steps", 4, "--report_to", "none", *more]  # fmt: skip
    return launch(launcher, recipe("dpo"), *flags)


@pytest.mark.slow
def test_log_probs_precomputed_under_zero3(inputs, tmp_path):
    dpo(inputs, tmp_path / "plain", [], "--precompute_ref_log_probs")
    dpo(inputs, tmp_path / "each", LAUNCHERS["zero3"])
    result = dpo(inputs, tmp_path / "once", LAUNCHERS["zero3"], "--precompute_ref_log_probs")
    assert "taken from the cache" not in result.stdout  # that of one process is not this engine's
    again = dpo(inputs, tmp_path / "again", LAUNCHERS["zero3"], "--precompute_ref_log_probs")
    assert again.stdout.count("taken from the cache") == 1
    assert timeless(tmp_path / "again") == timeless(tmp_path / "once") and torch.equal(
        weights(tmp_path / "again"), weights(tmp_path / "once")
    )
    for one, other in zip(
        training_lines(tmp_path / "each"), training_lines(tmp_path / "once"), strict=True
    ):
        for key in ("loss", "rewards/margins", "rewards/chosen", "grad_norm", "samples", "tokens"):
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=1e-6), key
    one, other = weights(tmp_path / "each"), weights(tmp_path / "once")
    assert (one - other).norm() <= 1e-5 * one.norm()


@pytest.mark.slow
def test_half_weights_do_not_take_the_log_probs_of_autocast(inputs, tmp_path):
    """bf16 by autocast, then as ZeRO-2's weights: before the first update policy and reference are the same, so the loss is log 2."""
    autocast = [*config_launcher("cpu"), "--mixed_precision", "bf16"]
    for name, launcher in {"autocast": autocast, "weights": config_launcher("ds_zero2")}.items():
        dpo(inputs, tmp_path / name, launcher, "--precompute_ref_log_probs", "--max_steps", 1)
        (line,) = training_lines(tmp_path / name)
        assert line["loss"] == pytest.approx(math.log(2), abs=3e-5), name
