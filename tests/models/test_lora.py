"""Adapters: which layers get one, what is trained, saved, merged and refused.

test_invariance.py (the base as the reference, too) and test_resume.py have cases with adapters.
"""

import functools
import json
import sys
from pathlib import Path

import peft
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import architectures
import runs
from common import arguments, engine, folders
from common.shared_args import SharedArgs
from preference_recipes.models import architecture, cost, load, lora, prepare, scores
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer
from preference_recipes.tools import export as exporting
from recipes import RECIPES
from recipes import load as load_recipe

LORA = dict(lora_r=4, lora_alpha=16)


def flags(inputs, name, output, **more):
    rates = dict(learning_rate=0.01, weight_decay=0.1, warmup_steps=0)
    given = dict(rates, micro_train_batch_size=4, max_steps=4, logging_steps=1)
    return runs.short_run(inputs, name, output, **given | more)


def adapted(model, **given):
    """A wrapper around a model with adapters, as the recipes make it."""
    accelerator = Accelerator(cpu=True)
    args = SharedArgs(**{"lora_r": 4, **given})
    wrapper = (scores.ScoreModel if hasattr(model, "score") else LogProbModel)(model)
    prepare.choose_parameters(accelerator, wrapper, args)
    return wrapper


@pytest.mark.parametrize("name", RECIPES)
def test_adapters_have_a_learning_rate_of_their_own(name):
    """Ten times that of all weights. One that is given is taken, also if it is the other default."""
    recipe = load_recipe(name)
    default = recipe.Args().learning_rate

    def rate(*argv, of="learning_rate"):
        return getattr(arguments.parse(recipe.Args, f"{name}.yaml", list(map(str, argv))), of)

    own = ["--model_name_or_path", "m", "--dataset_name", "d.jsonl"]
    assert rate(*own) == default and rate(*own, "--lora_r", 8) == pytest.approx(10 * default)
    if name == "ppo":
        critic = "critic_learning_rate"
        assert (rate(*own, of=critic), rate(*own, "--lora_r", 8, of=critic)) == (1e-5, 1e-4)
    assert rate(*own, "--lora_r", 8, "--learning_rate", default) == default


def test_a_target_that_cannot_have_an_adapter_is_refused(inputs):
    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    call = lambda: adapted(model, lora_target_modules=["q_proj", "lm_head"])
    said = "--lora_target_modules lm_head: no linear layer of LlamaForCausalLM"
    runs.refuses(said, "there are down_proj, gate_proj, k_proj", call=call)


# ============================================================ which layers
OF_LLAMA = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.mark.parametrize(
    "name, kinds, count",
    [
        ("llama", OF_LLAMA, 14),
        ("gpt2", ["c_attn", "c_fc", "c_proj"], 8),  # Conv1D
        # Its experts are one tensor, and get none.
        ("mixtral", ["k_proj", "o_proj", "q_proj", "v_proj"], 8),
    ],
)
def test_all_linear_layers_but_the_output_layer_get_an_adapter(name, kinds, count):
    model = architectures.build(name)
    layers = lora.layers_to_adapt(model, ["all-linear"])
    assert len(layers) == count and sorted({layer.rpartition(".")[2] for layer in layers}) == kinds


@pytest.mark.parametrize(
    "name, left_out",
    [
        ("phimoe", 2),  # routers
        ("llama4_text", 2),  # routers, too, which return several results
        ("jamba", 1),  # `dt_proj`, whose weights are given to a function
        ("gemma3n_text", 2),  # in training alone
        ("zamba2", 16),  # a block that three layers share has the small ones of all
        ("bart", 8),  # attention to an encoder
        ("deepseek_v4", 2),  # of groups
        ("jetmoe", 0),  # which reads values, so that it is not tried
        ("llama", 0),
    ],
)
def test_every_adapter_learns(name, left_out):
    """Layers that are not called as such, or never, get none."""
    model = architectures.build(name)
    backbone = architecture.backbone_of(model)
    is_linear = [isinstance(part, architecture.LINEAR) for part in backbone.modules()]
    wrapper = adapted(model).train()
    ids = torch.arange(3, 163)[None] if name == "deepseek_v4" else torch.arange(3, 43)[None]
    wrapper.model(ids, use_cache=False).logits.sum().backward()
    trained = engine.trained_parameters(wrapper)
    assert len(trained) == 2 * (sum(is_linear) - left_out)
    assert [name for name, p in trained.items() if p.grad is None] == []


def test_a_tower_gets_no_adapter_though_its_layers_have_the_same_names():
    """Nor where peft finds the layers by the names that are saved, which it shortens if there are many."""
    layers = 3
    text = architectures.config_of("gemma3").text_config.to_dict()
    text |= dict(num_hidden_layers=layers, layer_types=["full_attention"] * layers)
    wrapper = adapted(architectures.build("gemma3", text_config=text))
    trained = engine.trained_parameters(wrapper)
    assert len(trained) == 2 * 7 * layers and all("language_model" in name for name in trained)
    again = architectures.build("gemma3", text_config=text)
    again.add_adapter(wrapper.model.peft_config["default"])
    assert {f"model.{name}" for name in engine.trained_parameters(again)} == set(trained)


def test_the_formula_and_what_is_trained(inputs):
    """`W + alpha / r * B A`, by hand; every other weight is frozen, and B is zero at first."""
    plain = AutoModelForCausalLM.from_pretrained(inputs / "model")
    torch.manual_seed(5)
    wrapper = adapted(AutoModelForCausalLM.from_pretrained(inputs / "model"), lora_alpha=12.0)
    trained = engine.trained_parameters(wrapper)
    assert set(trained) == {name for name, _ in wrapper.named_parameters() if "lora_" in name}
    ids = torch.arange(3, 20)[None]
    assert torch.equal(wrapper.model(ids).logits, plain(ids).logits)
    with torch.no_grad():
        for parameter in trained.values():
            parameter.normal_(std=0.1)
        for name, layer in plain.named_modules():
            if isinstance(layer, torch.nn.Linear) and name != "lm_head":
                a, b = (trained[f"model.{name}.lora_{part}.default.weight"] for part in "AB")
                layer.weight += 12 / 4 * b @ a
    torch.testing.assert_close(wrapper.model(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-5)


def test_the_draw_follows_from_the_seed_alone(inputs):
    def drawn(used_up: int):
        torch.manual_seed(3)
        torch.rand(used_up)  # as an engine may do while it loads
        wrapper = adapted(AutoModelForCausalLM.from_pretrained(inputs / "model"))
        return engine.trained_parameters(wrapper), torch.rand(1)

    (one, after), (other, _) = drawn(0), drawn(100)
    assert all(torch.equal(one[name], other[name]) for name in one)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))  # and no later number depends on it


def test_the_operations_of_training_by_hand(inputs):
    """Embeddings take none; the output layer computes targets alone; of experts a token visits some."""
    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    head = model.lm_head.weight.numel()
    layers = sum(p.numel() for p in model.parameters()) - head
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    layers -= 0 if tied else model.model.embed_tokens.weight.numel()
    assert cost.flop(LogProbModel(model))[:2] == (6 * layers, 6 * head)
    wrapper = adapted(
        AutoModelForCausalLM.from_pretrained(inputs / "model"), lora_target_modules=["q_proj"]
    )
    adapters = 2 * 2 * 4 * 32  # layers, A and B, rank, width
    assert cost.flop(wrapper)[:2] == (4 * layers + 6 * adapters, 4 * head)

    mixture = architectures.build("mixtral")
    layers = sum(p.numel() for name, p in mixture.named_parameters() if ".layers." in name)
    experts = sum(p.numel() for name, p in mixture.named_parameters() if ".experts." in name)
    norm = mixture.model.norm.weight.numel()
    visited = layers - experts + experts * 2 / 4 + norm
    assert cost.flop(LogProbModel(mixture))[0] == 6 * visited
    experts = dict(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16)
    another_name = architectures.build("gemma4_text", **experts)
    assert cost.flop(LogProbModel(another_name))[:2] == (0, 0)


# ============================================================ the base
def test_switched_off_they_change_nothing_even_after_an_error(inputs):
    plain = LogProbModel(AutoModelForCausalLM.from_pretrained(inputs / "model"))
    wrapper = adapted(AutoModelForCausalLM.from_pretrained(inputs / "model"))
    for one in (plain, wrapper):
        prepare.disable_dropout(one)
    with torch.no_grad():
        for parameter in engine.trained_parameters(wrapper).values():
            parameter.normal_(std=0.1)
    batch = Packer(torch.device("cpu")).make_batch([[3, 4, 5]], [[6, 7]])
    base = lora.WithoutAdapters(wrapper)
    expected, moved = plain(batch)["logps"], wrapper(batch)["logps"]
    assert torch.equal(base(batch)["logps"], expected) and not torch.allclose(moved, expected)
    assert torch.equal(wrapper(batch)["logps"], moved)
    with pytest.raises(TypeError):
        base(None)
    assert torch.equal(wrapper(batch)["logps"], moved) and moved.requires_grad


# ============================================================ what is trained and saved
def mean_logp(model, tokenizer, rows) -> float:
    """The mean log-prob of the chosen answers by plain transformers, one row at a time."""
    total = 0.0
    encode = functools.partial(tokenizer.apply_chat_template, return_dict=False)
    for row in rows:
        start = len(encode(row["prompt"], add_generation_prompt=True))
        ids = torch.tensor([encode(row["prompt"] + row["chosen"])])
        with torch.no_grad():
            logps = model(ids).logits[0, :-1].float().log_softmax(-1)
        total += logps.gather(1, ids[0, 1:, None])[start - 1 :].sum().item()
    return total / len(rows)


@pytest.mark.parametrize("launcher", ["plain", runs.slow("zero3"), runs.slow("ds_fp16")])
def test_every_way_to_load_the_adapter_gives_the_model_that_was_trained(inputs, tmp_path, launcher):
    """Its log-probs are those of the last evaluation, and the base stands still to the last bit."""
    way = runs.config_launcher(launcher, 2) if launcher == "ds_fp16" else runs.LAUNCHERS[launcher]
    output = tmp_path / "out"
    more = dict(LORA, eval_dataset_name=inputs / "dpo.jsonl", save_steps=4)
    given = flags(inputs, "dpo", output, **more)
    env = {"HELD": str(tmp_path / "held.pt")}
    said = runs.launch(way, runs.HOLDING, runs.recipe("dpo"), *given, env=env).stdout
    assert "saved the actor: " in said

    base = load_file(inputs / "model/model.safetensors")
    held, _ = torch.load(tmp_path / "held.pt")
    held = {name.replace(".base_layer", ""): held[name] for name in held if "lora" not in name}
    assert held.keys() == base.keys()
    assert all(torch.equal(held[name], base[name].to(held[name].dtype)) for name in base)

    checkpoint = output / "checkpoints/global_step_000004"
    for source, out, merging in (
        (checkpoint, tmp_path / "adapter", []),
        (checkpoint, tmp_path / "merged", ["--merge"]),
        (output / "actor", tmp_path / "of_actor", ["--merge"]),  # a run may have no checkpoint
    ):
        export(source, out, *merging)
    assert folders.describe_files(tmp_path / "of_actor") == folders.describe_files(
        tmp_path / "merged"
    )
    assert (output / "actor/adapter_config.json").is_file()  # what was merged is a copy of it
    config = json.loads((output / "actor/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(inputs / "model") and config["inference_mode"]
    assert (tmp_path / "adapter/adapter_model.safetensors").read_bytes() == (
        output / "actor/adapter_model.safetensors"
    ).read_bytes()
    assert "library_name: peft" in (output / "actor/README.md").read_text()
    assert not (tmp_path / "merged/adapter_config.json").exists()

    tokenizer = AutoTokenizer.from_pretrained(output / "actor")
    rows = [json.loads(line) for line in (inputs / "dpo.jsonl").read_text().splitlines()]
    logged = runs.evaluation_lines(output)[-1]["eval/logps/chosen"]
    assert abs(logged - runs.evaluation_lines(output)[0]["eval/logps/chosen"]) > 0.05
    for model in (
        peft.AutoPeftModelForCausalLM.from_pretrained(output / "actor", dtype=torch.float32),
        AutoModelForCausalLM.from_pretrained(output / "actor", dtype=torch.float32),
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
    ):
        exactness = 1e-3 if launcher == "ds_fp16" else 1e-5
        assert mean_logp(model.eval(), tokenizer, rows) == pytest.approx(logged, rel=exactness)


def export(*arguments) -> None:
    """Runs `python -m preference_recipes.tools.export` in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["export", *map(str, arguments)])
        exporting.main()


@pytest.mark.slow
def test_a_scorer_is_saved_with_its_head(inputs, tmp_path):
    """Its scores by plain transformers are those of the adapter merged by hand."""
    scorer, whole = tmp_path / "reward", tmp_path / "scorer"
    held_out = inputs / "reward.jsonl"
    given = flags(inputs, "reward", scorer, eval_dataset_name=held_out, **LORA)
    runs.launch([], runs.recipe("reward"), *given)
    export(scorer / "actor", whole, "--merge")

    ids = torch.arange(3, 20)[None]
    adapter = load_file(scorer / "actor/adapter_model.safetensors")
    assert "base_model.model.score.weight" in adapter
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    with torch.no_grad():
        for name, layer in base.model.named_modules():
            if isinstance(layer, torch.nn.Linear):
                a, b = (
                    adapter[f"base_model.model.model.{name}.lora_{part}.weight"] for part in "AB"
                )
                layer.weight += 16 / 4 * b @ a
        expected = (
            base.model(ids).last_hidden_state[:, -1] @ adapter["base_model.model.score.weight"].T
        )
    merged = AutoModelForSequenceClassification.from_pretrained(whole)
    torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(whole)
    assert merged.config.pad_token_id == tokenizer.pad_token_id  # else padded rows fail
    moments = json.loads((scorer / "actor/reward_moments.json").read_text())
    assert moments["reward_std"] > 0
    assert {name: getattr(merged.config, name) for name in moments} == moments


# ============================================================ an adapter as a model
def test_a_merged_adapter_is_the_base_of_the_next_one(inputs, tmp_path):
    """A resumed run takes that base as it is, and so does a merge. One that has changed is another model."""
    sft, whole, dpo = tmp_path / "sft", tmp_path / "whole", tmp_path / "dpo"
    runs.launch([], runs.recipe("sft"), *flags(inputs, "sft", sft, **LORA))
    export(sft / "actor", whole, "--merge")

    def run(check=True, **more):
        given = flags(inputs, "dpo", dpo, **LORA, save_steps=2, model_name_or_path=whole, **more)
        return runs.launch([], runs.recipe("dpo"), *given, check=check)

    run()
    config = json.loads((dpo / "actor/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(whole)
    assert "resumed from" in run(resume="auto", max_steps=5).stdout
    file = whole / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"\x01")
    refused = run(check=False, resume="auto", max_steps=6)
    assert refused.returncode and "base model: 'weights " in refused.stdout

    merged, moved = tmp_path / "merged", tmp_path / "moved"
    checkpoint = dpo / "checkpoints/global_step_000004"
    for source in (dpo / "actor", checkpoint):
        merge = lambda *more: export(source, merged, "--merge", *more)  # noqa: B023
        runs.refuses(f"{whole} is not the adapter's base any more: that had weights ", call=merge)
    whole.rename(moved)
    runs.refuses(f"the model's folder {str(whole)!r} does not exist", call=merge)
    runs.refuses(f"{moved} is not the adapter's base", call=lambda: merge("--base", moved))
    (moved / "model.safetensors").write_bytes(content)
    merge("--base", moved)
    assert folders.read_json(merged / "config.json")["rope_theta"] == 10_000  # for other readers
    one = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(moved), checkpoint / "actor"
    )
    ids = torch.arange(3, 20)[None]
    other = AutoModelForCausalLM.from_pretrained(merged)
    torch.testing.assert_close(one(ids).logits, other(ids).logits, rtol=1e-5, atol=1e-5)


def test_an_adapter_is_refused_wherever_a_model_is_named(inputs, tmp_path, monkeypatch):
    """A folder, also one with a config beside the adapter's, or a hub name: the base would be loaded with it."""
    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    name = str(tmp_path / "adapter")
    model.save_pretrained(name)
    model.config.save_pretrained(name)
    AutoTokenizer.from_pretrained(inputs / "model").save_pretrained(name)
    tokenizer = load.load_tokenizer(str(inputs / "model"))
    args = SharedArgs()
    ways = [
        load.load_tokenizer,
        lambda name: load.causal_lm(name, tokenizer, args),
        lambda name: load.causal_lm(name, tokenizer, args, frozen=True),
        lambda name: scores.score_model(name, tokenizer, args),
    ]
    command = f"python -m preference_recipes.tools.export {name} OUT"
    for way in ways:
        runs.refuses(f"{name!r} is an adapter", command, call=functools.partial(way, name))
    find = load.find_adapter_config_file
    monkeypatch.setattr(
        load, "find_adapter_config_file", lambda name: name if name == "org/name" else find(name)
    )
    runs.refuses("'org/name' is an adapter", call=lambda: load.load_tokenizer("org/name"))

    # That command takes a hub name, too.
    monkeypatch.setattr("huggingface_hub.snapshot_download", {"org/name": name}.get)
    exporting.export(Path("org/name"), tmp_path / "out", merge_adapter=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() > 0


def test_a_merge_that_makes_another_model_is_refused(tmp_path):
    """peft 0.21 adds an adapter on one of two tied layers to the matrix that both share."""
    folder = runs.tiny_llama(tmp_path / "base", tie_word_embeddings=True)
    base = AutoModelForCausalLM.from_pretrained(folder)
    lora_config = peft.LoraConfig(
        r=2, task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["lm_head"]
    )
    peft.get_peft_model(base, lora_config).save_pretrained(tmp_path / "adapter")
    runs.refuses(
        "the whole model would be another one: its logits differ by",
        call=lambda: exporting.merge(str(tmp_path / "adapter"), tmp_path / "whole"),
    )
    assert not (tmp_path / "whole").exists()


# ============================================================ a base of 4 bits


def test_a_base_of_4_bits_is_the_base_of_its_rounded_weights(inputs, tmp_path):
    """The run whose base holds the weights that the packed ones stand for; and it resumes bit for bit."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    model = AutoModelForCausalLM.from_pretrained(inputs / "model")
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and name != "lm_head":
                packed, state = quantize_4bit(
                    layer.weight.data, compress_statistics=True, quant_type="nf4"
                )
                layer.weight.copy_(dequantize_4bit(packed, state))
    model.save_pretrained(tmp_path / "rounded")
    AutoTokenizer.from_pretrained(inputs / "model").save_pretrained(tmp_path / "rounded")

    more = dict(LORA, eval_dataset_name=inputs / "dpo.jsonl", save_steps=2)
    packed, rounded, again = tmp_path / "packed", tmp_path / "out", tmp_path / "again"
    runs.launch([], runs.recipe("dpo"), *flags(inputs, "dpo", packed, load_in_4bit=True, **more))
    base = {"model_name_or_path": tmp_path / "rounded"}
    runs.launch([], runs.recipe("dpo"), *flags(inputs, "dpo", rounded, **base, **more))
    for one, other in zip(runs.timeless(packed), runs.timeless(rounded), strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)
    more |= dict(load_in_4bit=True, save_dtype="bfloat16")
    resumed = flags(inputs, "dpo", again, resume=packed / "checkpoints/global_step_000002", **more)
    assert "resumed from" in runs.launch([], runs.recipe("dpo"), *resumed).stdout
    saved = load_file(again / "actor/adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert torch.equal(runs.weights(again), runs.weights(packed).bfloat16().double())
