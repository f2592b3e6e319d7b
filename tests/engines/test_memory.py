"""`python -m preference_recipes.tools.memory` says what a launch holds, and refuses what it does not know."""

import importlib.util
import json
import sys
import types

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig

from contracts.proof import warm
from preference_recipes.tools.memory import (
    Counts,
    Setup,
    activations,
    count,
    main,
    read_setup,
    table,
)
from runs import CONFIGS, REPOSITORY, refuses

spec = importlib.util.spec_from_file_location(
    "benchmark_of_memory", REPOSITORY / "benchmarks/memory.py"
)
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)
OWN = REPOSITORY / "accelerate_configs"
PARAMETERS = 1_000_000  # divisible by the processes used here


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(CONFIGS / "zero1.json", marks=pytest.mark.slow),
        OWN / "ds_fp16.yaml",
        OWN / "ds_zero3.yaml",
        OWN / "ddp.yaml",
    ],
    ids=lambda p: p.stem,
)
@pytest.mark.parametrize("rank", [0, pytest.param(16, marks=pytest.mark.slow)])
def test_the_estimate_is_what_two_processes_hold(config, rank, monkeypatch):
    monkeypatch.setattr(benchmark, "subprocess", types.SimpleNamespace(run=warm.run))
    result = benchmark.launch(config, 2, lora_r=rank)
    n = result["parameters"]
    for moment, guess in result["estimated"].items():
        measured = result["measured"][moment]
        if rank and config.stem == "ds_zero3":
            # At most all weights: some of the base's are freed, since no gradient is computed of them.
            assert 0 <= measured["gathered"] <= guess["gathered"]
            measured["gathered"] = guess["gathered"]
        half_gradients = 0.2 * n if rank and config.stem in ("ds_fp16", "zero1") else 0
        # Each state by itself, within padding and the norms' parameter group, whose fp32 gradients come after those of the matrices.
        assert {state: measured[state] / n for state in guess} == pytest.approx(
            {s: b / n for s, b in guess.items()}, abs=0.01 + half_gradients / n
        )
        assert sum(guess.values()) == pytest.approx(
            sum(measured[state] for state in guess), rel=0.001, abs=half_gradients
        )


def sums(setup: Setup, trained: int = 1, frozen: int = 0, **counts) -> dict[str, tuple]:
    """Bytes per parameter at the three moments, by place."""
    return {
        row.place: tuple(size / PARAMETERS for size in row[2:])
        for row in table(setup, Counts(PARAMETERS, **counts), trained, frozen)
        if row.state == "sum"
    }


@pytest.mark.parametrize(
    "setup, models, expected",
    [  # bytes per parameter in the forward, backward, step
        (Setup("plain", "no", 1), {}, (16, 16, 16)),
        (Setup("plain", "bf16", 1), {"frozen": 2}, (26, 24, 24)),
        (Setup("ddp", "bf16", 4), {"trained": 2, "frozen": 1}, (48, 44, 44)),
        (Setup("fsdp2", "bf16", 4), {}, (4 + 4 - 1, 4, 4)),
        (Setup("fsdp2", "bf16", 4), {"frozen": 2}, (7 + 1, 5, 5)),
        (Setup("plain", "bf16", 1), {"frozen": 2, "rounded": PARAMETERS // 2}, (24, 22, 22)),
        (Setup("plain", "no", 1), {"frozen": 1, "rounded": PARAMETERS // 2}, (20, 20, 20)),
        (
            Setup("zero", "bf16", 4, 2),
            {"frozen": 1, "rounded": PARAMETERS // 2},
            (2 + 3.5 + 2, 2 + 4 + 2, 2 + 3 + 1.5 + 2),
        ),
        (Setup("zero", "bf16", 4, 1), {}, (2 + 2 + 3, 2 + 3.5, 2 + 3 + 1.5)),
        (Setup("zero", "fp16", 4, 2), {}, (2 + 3.5, 2 + 4, 2 + 3 + 1.5)),
        (
            Setup("zero", "fp16", 4, 2),
            {"trained": 2, "frozen": 2},
            (4 + 7 + 4, 4 + 8 + 4, 4 + 9 + 4),
        ),
        (Setup("zero", "no", 4, 2), {}, (4 + 4, 4 + 5, 4 + 5)),
        (Setup("zero", "bf16", 4, 3, live=10**9, sub_group=10**9), {}, (4 + 2, 4, 5)),
        (
            Setup("zero", "bf16", 4, 3, live=PARAMETERS // 2, sub_group=PARAMETERS // 8),
            {"frozen": 1},
            (4 + 1 + 0.5, 4.5, 4.5 + 0.5),
        ),
        (Setup("zero", "bf16", 1, 3, live=10**9, sub_group=10**9), {}, (16, 16, 20)),
    ],
)
def test_closed_form(setup, models, expected):
    assert "CPU" not in sums(setup, **models)
    assert sums(setup, **models)["GPU"] == pytest.approx(expected)


def test_adapters_and_a_base_of_4_bits_by_hand(tmp_path):
    """A hundredth of the parameters learns; what is frozen takes a frozen model's bytes."""
    few = PARAMETERS // 100
    assert sums(Setup("plain", "no", 1), adapter=few)["GPU"] == pytest.approx([4 + 0.16] * 3)
    # Under autocast each frozen weight is kept as a half copy for the backward pass, too.
    autocast = sums(Setup("plain", "bf16", 1), adapter=few)["GPU"]
    assert autocast == pytest.approx([4 + 0.16 + 2.02, 4 + 0.16, 4 + 0.16])
    # Of those that are held in half there is no copy.
    in_half = sums(Setup("plain", "bf16", 1), adapter=few, rounded=3 * PARAMETERS // 4)["GPU"]
    assert in_half == pytest.approx([2.5 + 0.16 + 0.52, 2.5 + 0.16, 2.5 + 0.16])
    zero3 = Setup("zero", "bf16", 4, 3, live=10**9, sub_group=10**9)
    assert sums(zero3, adapter=few)["GPU"] == pytest.approx(
        (0.5 + 0.04 + 2.02, 0.5 + 0.04, 0.5 + 0.05)
    )
    packed = sums(Setup("plain", "no", 1), adapter=few, packed=3 * PARAMETERS // 4)["GPU"]
    # https://arxiv.org/abs/2305.14314 section 3: 0.127 bits a weight for the scales
    assert packed == pytest.approx([0.25 * 4 + 0.75 * (4 + 0.127) / 8 + 0.16] * 3, rel=1e-4)

    sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=3, vocab_size=100)
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    LlamaConfig(**sizes, **heads).save_pretrained(tmp_path)
    shapes = [(8, 8), (8, 4), (8, 4), (8, 8), (8, 16), (8, 16), (16, 8)]
    assert_counted(tmp_path, shapes)
    GPT2Config(n_embd=8, n_layer=3, n_head=2, vocab_size=100).save_pretrained(tmp_path)
    shapes = [(8, 24), (8, 8), (8, 32), (32, 8)]  # Conv1D
    assert_counted(tmp_path, shapes)


def assert_counted(model, shapes) -> None:
    """Adapters of rank 5 on three layers with these linear layers, and what `--load_in_4bit` packs."""
    counts = count(str(model), 5, load_in_4bit=True)
    assert counts.adapter == 5 * 3 * sum(a + b for a, b in shapes)
    assert counts.packed == 3 * sum(a * b for a, b in shapes)


@pytest.mark.parametrize(
    "setup, gpu, cpu",
    [
        (Setup("zero", "bf16", 4, 1, optimizer_on_cpu=True), (4, 2, 2), (4.5, 4.5, 4.5)),
        (Setup("zero", "bf16", 4, 2, optimizer_on_cpu=True), (2, 2, 2), (5, 5, 5)),
        (Setup("zero", "bf16", 4, 3, live=10**9, optimizer_on_cpu=True), (3, 1, 1), (4, 4, 4)),
        (
            Setup("zero", "bf16", 4, 3, live=10**9, optimizer_on_cpu=True, weights_on_cpu=True),
            (2.5, 0.5, 0.5),
            (4.5, 4.5, 4.5),
        ),
        (
            Setup("fsdp2", "bf16", 4, optimizer_on_cpu=True, weights_on_cpu=True),
            (4, 0, 0),
            (3, 4, 4),
        ),
    ],
)
def test_offload(setup, gpu, cpu):
    found = sums(setup)
    assert found["GPU"] == pytest.approx(gpu) and found["CPU"] == pytest.approx(cpu)


@pytest.mark.parametrize(
    "setup, expected",
    [
        (Setup("ddp", "bf16", 2), (4 + 8 + 4 + 2, 20, 20)),
        (Setup("fsdp2", "bf16", 4), (3, 4, 4)),
        (Setup("zero", "bf16", 4, 1), (5, 5.5, 6.5)),
        (Setup("zero", "bf16", 4, 2), (5, 5.5, 6.5)),
        (Setup("zero", "bf16", 4, 3, live=10**9, sub_group=10**9), (6, 4, 5)),
    ],
)
def test_without_accumulation_no_gradients_stand_in_the_forward(setup, expected):
    assert sums(setup._replace(accumulates=False))["GPU"] == pytest.approx(expected)


def test_what_does_not_grow_with_the_model_is_there_once():
    setup = Setup("zero", "bf16", 4, 3, bucket=3 * PARAMETERS)
    for models in (1, 2):
        rows = {row.state: row[2:] for row in table(setup, Counts(PARAMETERS), trained=models)}
        assert rows["reduction buffer"] == (*[6 * PARAMETERS] * 3,)
    counts = Counts(PARAMETERS, unit=7)
    rows = {row.state: row[2:] for row in table(Setup("fsdp2", "bf16", 4), counts, trained=2)}
    assert rows["gathered, one layer"] == (14, 0, 0) and rows["Adam"] == (*[4 * PARAMETERS] * 3,)


def test_the_configs_of_this_repository():
    zero = dict(bucket=500_000_000, buckets=1, live=1_000_000_000, sub_group=1_000_000_000)
    overlapping = zero | dict(bucket=200_000_000, buckets=2)
    assert {path.stem: read_setup(path) for path in OWN.glob("*.yaml")} == {
        "cpu": Setup("ddp", "no", 1),
        "single_gpu": Setup("plain", "bf16", 1),
        "ddp": Setup("ddp", "bf16", 2),
        "fsdp2": Setup("fsdp2", "bf16", 2),
        "ds_fp16": Setup("zero", "fp16", 1, 2, **overlapping),
        "ds_zero2": Setup("zero", "bf16", 1, 2, **overlapping),
        "ds_zero3": Setup("zero", "bf16", 1, 3, **zero),
        "ds_zero1": Setup("zero", "bf16", 1, 1, **overlapping),
        "ds_zero1_fp16": Setup("zero", "fp16", 1, 1, **overlapping),
        "ds_zero3_fp16": Setup("zero", "fp16", 1, 3, **zero),
        "ds_zero3_offload": Setup(
            "zero", "bf16", 1, 3, **zero, optimizer_on_cpu=True, weights_on_cpu=True
        ),
        "multi_node": Setup("ddp", "bf16", 16),
    }
    assert read_setup(OWN / "ds_zero2.yaml", 8).processes == 8


def test_parameters_are_counted_without_weights(tmp_path):
    sizes = dict(
        vocab_size=100,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    layer = 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8
    for tied in (True, False):
        LlamaConfig(**sizes, tie_word_embeddings=tied).save_pretrained(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
        counts = count(str(tmp_path))
        assert counts.parameters == 800 * (1 if tied else 2) + 3 * layer + 8
        assert (counts.unit, counts.hidden, counts.adapter, counts.packed) == (800, 8, 0, 0)
    LlamaConfig(**{**sizes, "vocab_size": 10}).save_pretrained(tmp_path)
    assert count(str(tmp_path)).unit == layer


def test_what_autocast_rounds_is_counted_without_weights(tmp_path):
    """All linear layers, on a GPU the output layer, too; not embeddings and norms."""
    sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=3, vocab_size=100)
    layers = 3 * (4 * 8 * 8 + 3 * 8 * 16)
    for tied in (True, False):
        LlamaConfig(
            **sizes,
            num_attention_heads=2,
            tie_word_embeddings=tied,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(tmp_path)
        assert count(str(tmp_path), device_type="cpu").rounded == layers
        assert count(str(tmp_path)).rounded == layers + (0 if tied else 800)


def test_the_printed_table(monkeypatch, capsys):
    flags = "--model assets/model --config accelerate_configs/ds_zero3.yaml --num_processes 2 --frozen 1 --micro_train_tokens 0"
    monkeypatch.setattr(sys, "argv", ["memory", *flags.split(" ")])
    monkeypatch.chdir(REPOSITORY)
    main()
    lines = capsys.readouterr().out.splitlines()
    n = 825472
    assert (
        lines[0].startswith(f"assets/model: {n:,} parameters")
        and lines[1] == "DeepSpeed ZeRO-3 bf16, N = 2, 1 trained, 1 frozen"
    )
    total = next(line for line in lines if line.startswith("GPU sum")).split()[2:]
    fixed = 2 * 500_000_000
    assert [float(x) for x in total] == pytest.approx(
        [(x * n + fixed) / 2**30 for x in (9 + 2 - 1 + 1 - 1, 9, 11)], abs=1e-3
    )


# How far the estimate is from the tensors that are kept: the larger one divided by the other.
@pytest.mark.parametrize(
    ("kind", "precision", "within"),
    [
        ("llama", "no", 1.01),
        ("qwen2", "bf16", 1.05),
        ("qwen3", "no", 1.16),  # norms of queries and keys
        ("gemma2", "no", 1.6),  # two more norms, and scores that are soft-capped
    ],
)
def test_activations_are_about_what_a_forward_pass_keeps(kind, precision, within):
    two, four = (bytes_kept(kind, precision, layers) for layers in (2, 4))
    of_a_layer = (four - two) / 2  # what embeddings keep is in both
    estimated = activations(Setup("plain", precision, 1), config_of(kind, 1), tokens=400)[0].bytes
    assert 1 / within < of_a_layer / estimated < within


def config_of(kind: str, layers: int):
    return AutoConfig.for_model(
        kind, vocab_size=512, hidden_size=256, intermediate_size=704, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, pad_token_id=0,
    )  # fmt: skip


def bytes_kept(kind: str, precision: str, layers: int) -> int:
    """Bytes of the tensors that a forward pass over 400 tokens keeps, parameters left out.

    The half copies that autocast makes of weights are left out, too: they are a state of their own.
    """
    decoder = AutoModelForCausalLM.from_config(config_of(kind, layers)).get_decoder()
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        decoder(torch.arange(3, 403).reshape(2, -1), use_cache=False)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    for parameter in decoder.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    copies = [2 * p.numel() for p in decoder.layers.parameters() if p.ndim == 2]
    return sum(storages.values()) - sum(copies) * (precision == "bf16")


def test_logits_and_checkpointing_by_hand():
    config = AutoConfig.for_model(
        "llama", vocab_size=1000, hidden_size=8, intermediate_size=20, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    half, whole = Setup("zero", "bf16", 1, stage=2), Setup("plain", "no", 1)
    a_layer = 20 * 8 + 2 * (3 * 8 + 4 * 4 + 4 * 20)
    bytes_of = lambda *given: [state.bytes for state in activations(*given)]
    assert bytes_of(half, config, 10) == [10 * 3 * a_layer, 10 * 1000 * 6]
    assert bytes_of(half, config, 10, True)[0] == 10 * (3 * 4 * 8 + a_layer)
    assert bytes_of(whole, config, 10)[0] == 10 * 3 * 4 * (4 * 8 + 3 * 8 + 4 * 4 + 4 * 20)
    assert bytes_of(whole, config, 10**6)[1] == 2**27 * 8  # a piece at a time
    # Of actor and critic each keeps its own.
    rows = table(whole, Counts(100), 2, 0, activations(whole, config, 10))
    (row,) = [row for row in rows if row.state == "activations, about"]
    assert (row.forward, row.backward, row.step) == (2 * bytes_of(whole, config, 10)[0], 0, 0)


def test_an_automatic_bucket_is_the_square_of_the_hidden_size(monkeypatch, capsys, tmp_path):
    """As accelerate fills it in; in half precision two bytes each, in each of two buffers."""
    LlamaConfig(
        hidden_size=4096,
        intermediate_size=64,
        num_hidden_layers=1,
        vocab_size=100,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)
    settings = json.loads((OWN / "ds_zero2.json").read_text())
    settings["zero_optimization"]["reduce_bucket_size"] = "auto"
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    (tmp_path / "ds.yaml").write_text(
        f"distributed_type: DEEPSPEED\ndeepspeed_config: {{deepspeed_config_file: {tmp_path / 'ds.json'}}}\n"
    )
    monkeypatch.setattr(
        sys, "argv", ["memory", "--model", str(tmp_path), "--config", str(tmp_path / "ds.yaml")]
    )
    main()
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "reduction buffer" in line)
    assert f"{2 * 2 * 4096**2 / 2**30:.3f}" in row.split()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"zero_optimization": {"stage": 0}}, "only ZeRO stages 1, 2 and 3"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "without data_types"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "only offloading to the CPU can be estimated",
        ),
    ],
)
def test_deepspeed_settings_that_are_not_known(tmp_path, change, message):
    settings = {**json.loads((OWN / "ds_zero2.json").read_text()), **change}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    (tmp_path / "config.yaml").write_text(
        f"distributed_type: DEEPSPEED\ndeepspeed_config: {{deepspeed_config_file: {tmp_path / 'ds.json'}}}\n"
    )
    with pytest.raises(SystemExit, match=message):
        read_setup(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "was found neither in"),
        ("- 1\n", "is no accelerate config"),
        ("distributed_type: DEEPSPEED\n", "names no deepspeed_config_file"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: nowhere.json}\n",
            "'nowhere.json' named by the accelerate YAML",
        ),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}\n", "fsdp_version 2"),
        ("distributed_type: 'NO'\nnum_processes: -1\n", "expected at least 1"),
    ],
)
def test_configs_that_cannot_be_used(tmp_path, text, message):
    if text:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(SystemExit, match=message):
        read_setup(tmp_path / "config.yaml")


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(SystemExit) as error:
        count(str(tmp_path))
    assert str(error.value).startswith(
        f"no causal language model could be built from the config of {str(tmp_path)!r}: "
    )
    assert "\n" not in str(error.value)


def test_code_beside_a_config_is_not_run_whoever_says_yes(tmp_path, monkeypatch):
    """transformers would ask on standard input, where a script's own input may begin with a y."""
    monkeypatch.setattr("builtins.input", lambda _: "y")
    (tmp_path / "mine.py").write_text(
        f"from transformers import LlamaConfig as Mine\nopen({str(tmp_path / 'ran')!r}, 'w')\n"
    )
    text = json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}})
    (tmp_path / "config.json").write_text(text)
    refuses(
        tmp_path, "needs Python code of its own", "never run", call=lambda: count(str(tmp_path))
    )
    assert not (tmp_path / "ran").exists()
