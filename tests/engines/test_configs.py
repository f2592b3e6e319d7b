"""The YAMLs and JSONs: no key that nobody reads, each launched and giving the numbers of fp32."""

import json

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from deepspeed.runtime.config import DeepSpeedConfig
from safetensors.torch import load_file

from runs import (
    REPOSITORY,
    config_launcher,
    launch,
    letters,
    recipe,
    training_lines,
    weights,
    write_jsonl,
)

FOLDER = REPOSITORY / "accelerate_configs"
YAMLS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
JSONS = sorted(path.stem for path in FOLDER.glob("*.json"))
# What a run says of itself, and what DeepSpeed's engine then is.
ADAM, OFFLOADED_ADAM = ("AdamW", [False, False]), ("DeepSpeedCPUAdam", [True, True])
LAUNCHED = {
    "single_gpu": ("one process bf16", None),
    "ds_zero1": ("DeepSpeed ZeRO-1 bf16", (1, "torch.bfloat16", *ADAM)),
    "ds_zero1_fp16": ("DeepSpeed ZeRO-1 fp16", (1, "torch.float16", *ADAM)),
    "ds_zero3_fp16": ("DeepSpeed ZeRO-3 fp16", (3, "torch.float16", *ADAM)),
    "ds_zero3_offload": ("DeepSpeed ZeRO-3 bf16", (3, "torch.bfloat16", *OFFLOADED_ADAM)),
}
LAUNCHED_ELSEWHERE = {
    "cpu": "test_launch.py", "multi_node": "test_nodes.py",
    **dict.fromkeys(["ddp", "fsdp2", "ds_fp16", "ds_zero2", "ds_zero3"], "test_strategies.py"),
}  # fmt: skip


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
    ports = {name: yaml.safe_load((FOLDER / f"{name}.yaml").read_text()) for name in YAMLS}
    ports = {name: content.get("main_process_port") for name, content in ports.items()}
    assert ports.pop("single_gpu") is None  # one process, which listens nowhere
    assert ports.pop("multi_node") == 29500
    assert set(ports.values()) == {0}


def test_every_yaml_is_launched_by_a_test():
    assert sorted([*LAUNCHED, *LAUNCHED_ELSEWHERE]) == YAMLS
    for name, file in LAUNCHED_ELSEWHERE.items():
        assert f'"{name}"' in (REPOSITORY / "tests/engines" / file).read_text()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Every window holds the same 8 rows: a window that an overflow skips changes nothing."""
    folder = letters(tmp_path_factory.mktemp("configs"), 8)
    launch([], recipe("sft"), *flags(folder, folder / "fp32"))
    return folder


def flags(inputs, output):
    return ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "sft.jsonl", "--output_dir", output, "--train_batch_size", 8,
            "--micro_train_batch_size", 2, "--max_steps", 3, "--warmup_steps", 0, "--learning_rate", 1e-2, "--report_to", "none",
            "--logging_steps", 1]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHED)
def test_a_yaml_as_it_is_gives_the_numbers_of_fp32(request, inputs, name):
    """Three updates with a rate that falls by thirds: losses, gradient norms and where the weights went."""
    description, engine = LAUNCHED[name]
    if engine and engine[2] == "DeepSpeedCPUAdam":
        request.getfixturevalue("cpu_adam")
    output, found = inputs / name, inputs / f"{name}.json"
    launcher = config_launcher(name, 2 if engine else 1)
    script = [REPOSITORY / "tests/engine_probe.py", recipe("sft")] if engine else [recipe("sft")]
    result = launch(
        launcher, *script, *flags(inputs, output), env={"PROBE": str(found)}, fresh=True
    )
    assert f"{description} on cpu" in result.stdout
    assert "Warning: " not in result.stdout
    for line, exact in zip(training_lines(output), training_lines(inputs / "fp32"), strict=True):
        assert line["loss"] == pytest.approx(exact["loss"], rel=2e-2)
        assert line["grad_norm"] == pytest.approx(exact["grad_norm"], rel=5e-2)
        assert (
            line["learning_rate"] == pytest.approx(exact["learning_rate"])
            and line["samples"] == exact["samples"]
        )
    start = weights(inputs, "model")
    moved, expected = weights(output) - start, weights(inputs / "fp32") - start
    assert (moved - expected).norm() <= 0.15 * expected.norm()  # seen: 0.02 in fp16, 0.07 in bf16
    if engine:
        real = json.loads(found.read_text())
        assert (real["stage"], real["dtype"], real["optimizer"], real["offloaded"]) == engine
        held, saved = torch.load(f"{found}.pt"), load_file(output / "actor/model.safetensors")
        assert {name.removeprefix("model.") for name in held} == set(saved)
        assert all(
            saved[name.removeprefix("model.")].equal(parameter) for name, parameter in held.items()
        )  # bit for bit, in its dtype
        if "fp16" in name:
            assert real["scaler"] == {
                "dynamic": True,
                "scale_window": 1000,
                "delayed_shift": 2,
                "min_scale": 1,
            }


SUMMED = ["ds_zero2", "ds_zero3"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in SUMMED])
def test_many_micro_batches_sum_to_one(tmp_path_factory, name):
    """DeepSpeed would sum in half precision, where what is small beside the sum is lost."""
    folder = letters(tmp_path_factory.mktemp("summed"), 512)
    say = lambda role, text: [{"role": role, "content": text}]
    alike = [{"messages": say("user", str(n)) + say("assistant", "ab")} for n in range(512)]
    write_jsonl(folder / "sft.jsonl", alike)  # their gradients have one direction
    norms = []
    for micro in (64, 1):
        output = folder / f"{name}-{micro}"
        more = ["--train_batch_size", 512, "--micro_train_batch_size", micro, "--max_steps", 1]
        launch(config_launcher(name), recipe("sft"), *flags(folder, output), *more)
        norms += [line["grad_norm"] for line in training_lines(output)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
