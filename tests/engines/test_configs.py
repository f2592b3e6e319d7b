"""The YAMLs and JSONs: no key that nobody reads, each launched as it is and giving the numbers of fp32."""

import json
import types

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from deepspeed.runtime.config import DeepSpeedConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import runs
from preference_recipes.models import prepare

FOLDER = runs.REPOSITORY / "accelerate_configs"
YAMLS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
JSONS = sorted(path.stem for path in FOLDER.glob("*.json"))
FAST = "ds_zero3"
# What a run says of itself, and what DeepSpeed's engine then is. multi_node.yaml is launched by test_nodes.py.
LAUNCHED = {
    "cpu": ("DDP fp32", None),
    "single_gpu": ("one process bf16", None),
    "ddp": ("DDP bf16", None),
    "fsdp2": ("FSDP2 bf16", None),
    "ds_fp16": ("DeepSpeed ZeRO-2 fp16", [2, "AdamW"]),
    "ds_zero1": ("DeepSpeed ZeRO-1 bf16", [1, "AdamW"]),
    "ds_zero1_fp16": ("DeepSpeed ZeRO-1 fp16", [1, "AdamW"]),
    "ds_zero2": ("DeepSpeed ZeRO-2 bf16", [2, "AdamW"]),
    "ds_zero3": ("DeepSpeed ZeRO-3 bf16", [3, "AdamW"]),
    "ds_zero3_fp16": ("DeepSpeed ZeRO-3 fp16", [3, "AdamW"]),
    "ds_zero3_offload": ("DeepSpeed ZeRO-3 bf16", [3, "DeepSpeedCPUAdam"]),
}
COMPARED = ["loss", "logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected"]


@pytest.mark.parametrize("name", YAMLS)
def test_accelerate_knows_every_key_of_a_yaml(name):
    load_config_from_file(str(FOLDER / f"{name}.yaml"))  # raises for an unknown one


@pytest.mark.parametrize("name", JSONS)
def test_deepspeed_knows_every_key_of_a_json(name):
    """It raises for those below the top. Every setting of the loss scale is said."""
    content = json.loads((FOLDER / f"{name}.json").read_text())
    sizes = dict(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    config = DeepSpeedConfig(content | sizes | {"gradient_clipping": 1.0})  # "auto", as in a run
    assert config.zero_optimization_stage == content["zero_optimization"]["stage"]
    scale = {"loss_scale": 0.0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
    for half, settings in (("fp16", config.float16_config), ("bf16", config.bfloat16_config)):
        assert settings.enabled == (half in content)
    assert content.get("fp16", {"enabled": True, **scale}) == {"enabled": True, **scale}


def test_two_runs_on_one_machine_take_two_ports():
    """accelerate would start both at port 29500. Only several nodes must agree on a port."""
    contents = {name: yaml.safe_load((FOLDER / f"{name}.yaml").read_text()) for name in YAMLS}
    ports = {name: content.get("main_process_port") for name, content in contents.items()}
    assert ports.pop("single_gpu") is None  # one process, which listens nowhere
    assert ports.pop("multi_node") == 29500
    assert set(ports.values()) == {0}


# ============================================================ each as it is


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Every update holds the same 8 pairs: one that an overflow skips changes nothing."""
    folder = runs.tiny_inputs(tmp_path_factory.mktemp("configs"))
    runs.tiny_llama(folder / "model", tie_word_embeddings=True)
    runs.first_rows(folder / "rows.jsonl", folder / "dpo.jsonl", 8)
    runs.launch(runs.LAUNCHERS["plain"], runs.recipe("dpo"), *flags(folder, folder / "fp32"))
    return folder


def flags(inputs, output, **more):
    updates = dict(micro_train_batch_size=2, max_steps=3, warmup_steps=0, learning_rate=1e-2)
    held_out = {"eval_dataset_name": inputs / "rows.jsonl", "logging_steps": 1}
    return runs.short_run(inputs, "rows", output, **updates | held_out | more)


def test_every_yaml_is_launched_by_a_test():
    assert sorted([*LAUNCHED, "multi_node"]) == YAMLS


@pytest.mark.parametrize("name", runs.slow_but([FAST], LAUNCHED))
def test_a_yaml_as_it_is_gives_the_numbers_of_fp32(request, inputs, name):
    """Three updates at a falling rate: their log lines, where the weights went, and what is saved."""
    if name == "ds_zero3_offload":
        request.getfixturevalue("cpu_adam")
    said, engine = LAUNCHED[name]
    output, file = inputs / name, inputs / f"{name}.pt"
    launcher = runs.config_launcher(name, 1 if name == "single_gpu" else 2)
    words = [runs.HOLDING, runs.recipe("dpo"), *flags(inputs, output)]
    result = runs.launch(launcher, *words, env={"HELD": str(file)})
    assert f"{said} on cpu" in result.stdout

    error = 5e-3 if "fp16" in said else 2e-2
    for line, exact in zip(
        runs.training_lines(output), runs.training_lines(inputs / "fp32"), strict=True
    ):
        for tag in COMPARED:
            assert line[tag] == pytest.approx(exact[tag], rel=error, abs=error), tag
        assert line["grad_norm"] == pytest.approx(exact["grad_norm"], rel=5e-2)
        assert line["learning_rate"] == pytest.approx(exact["learning_rate"])
        assert line["samples"] == exact["samples"]
    start = runs.weights(inputs, "model")
    moved, expected = runs.weights(output) - start, runs.weights(inputs / "fp32") - start
    assert (moved - expected).norm() <= 0.15 * expected.norm()
    # The reference is the policy as it starts, bit for bit.
    assert runs.evaluation_lines(output)[0]["eval/rewards/margins"] == 0

    saved = load_file(output / "actor/model.safetensors")
    # Under autocast and FSDP2 the weights themselves are fp32.
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}[said[-4:]] if engine else torch.float32
    assert {tensor.dtype for tensor in saved.values()} == {half}
    assert "lm_head.weight" not in saved
    held, kind = torch.load(file)
    assert kind == engine and saved.keys() == held.keys()
    assert all(saved[name].equal(held[name]) for name in held)  # what the forward pass used


def test_buffers_are_not_rounded_with_the_weights(tmp_path):
    """DeepSpeed's `module.half()` rounds the rotary frequencies, too.

    On short rows that is too little to be seen in a number.
    """
    model = AutoModelForCausalLM.from_pretrained(runs.tiny_llama(tmp_path))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    plugin = types.SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": 2}})
    engine = types.SimpleNamespace(
        device="cpu",
        is_fsdp2=False,
        mixed_precision="fp16",
        prepare=lambda model, optimizer: (model.half(), optimizer),
        state=types.SimpleNamespace(deepspeed_plugin=plugin),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    prepared, _ = prepare.for_training(engine, model, optimizer)
    assert before and {parameter.dtype for parameter in prepared.parameters()} == {torch.float16}
    for name, buffer in prepared.named_buffers():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, before[name])
