"""Under FSDP2 the main process alone reads weights, and only the actor is gathered to generate."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from runs import REPOSITORY, config_launcher, launch, recipe, tiny_inputs, tiny_llama

# 15 million parameters, more than half of them embeddings: 59 MB in fp32.
SIZES = dict(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1376,
    num_attention_heads=8,
    num_key_value_heads=8,
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The folder of a model in bf16, what each of two processes said, and the weights that they gathered."""
    folder = tmp_path_factory.mktemp("loading")
    model = tiny_llama(folder / "model", **SIZES)
    LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(model)
    script = REPOSITORY / "tests/loading.py"
    result = launch(config_launcher("fsdp2", 2), script, model, folder / "out")
    found = {}
    for line in result.stdout.splitlines():
        if line.startswith("FOUND "):
            _, rank, values = line.split(maxsplit=2)
            found[int(rank)] = json.loads(values)
    gathered = {rank: torch.load(folder / f"out/{rank}.pt") for rank in found}
    return model, found, gathered


def test_the_other_process_holds_no_weights_while_models_are_loaded(loaded):
    model, found, _ = loaded
    one_model = 4 * sum(x.numel() for x in load_file(model / "model.safetensors").values())
    assert one_model > 50e6
    assert (
        found[0]["loading"] > 2.5 * one_model
    )  # an actor, a critic with half as many embeddings, a reference
    assert found[1]["loading"] < 0.3 * one_model


def test_every_process_has_the_weights_of_the_file(loaded):
    """The critic's new head is drawn from the seed; buffers are the main process's, and saved ones are still saved."""
    model, found, gathered = loaded
    saved = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    head = 0.1 * torch.randn(1, 512, generator=generator) / 513**0.5
    for rank in (0, 1):
        assert found[rank]["cut"] == [True, True] and found[rank]["optimizer"]
        assert found[rank]["saved buffers"] == ["model.model.saved"]
        policy, reference = gathered[rank]["policy"], gathered[rank]["reference"]
        assert policy["model.model.saved"].tolist() == [1, 1, 1]
        assert policy["critic.model.score.weight"].equal(head)
        frequencies = 10000 ** -(torch.arange(0, 64, 2) / 64)
        for name in ("model.model", "critic.model.model"):
            torch.testing.assert_close(policy[f"{name}.rotary_emb.inv_freq"], frequencies)
        for name, value in saved.items():
            assert policy[f"model.{name}"].equal(value.float()), name
            assert reference[f"model.{name}"].equal(value), name  # a frozen model's stays in bf16
            if name != "lm_head.weight":
                assert policy[f"critic.model.{name}"].equal(value.float()), name


def test_only_the_actor_is_gathered_to_generate(loaded):
    _, found, _ = loaded
    for rank in (0, 1):
        cut = found[rank]["cut while it generates"]
        assert cut == {"actor": [False, False], "critic": [True, True]}


def test_after_generation_weights_are_sharded_when_they_were_before(loaded):
    """After a forward pass: those of the layers, not the root's, or none, as the launch config says."""
    _, found, _ = loaded
    for rank in (0, 1):
        in_training, after_generation, without_resharding = found[rank]["cut after forward"]
        assert any(in_training) and not all(in_training)
        assert after_generation == in_training
        assert without_resharding == [False] * len(in_training)


@pytest.mark.slow
def test_what_the_main_process_cannot_load_ends_all(tmp_path):
    inputs = tiny_inputs(tmp_path)
    weights = inputs / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    flags = ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "sft.jsonl"]
    result = launch(
        config_launcher("fsdp2", 2),
        recipe("sft"),
        *flags,
        "--output_dir",
        tmp_path / "out",
        "--train_batch_size",
        8,
        check=False,
        timeout=100,
    )
    message = "cannot be loaded by AutoModelForCausalLM"
    assert result.returncode and message in result.stdout, result.stdout
