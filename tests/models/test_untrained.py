"""What text never reaches stands still under every engine; an expert that no token visits does not."""

import copy
import functools

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import runs
from architectures import config_of
from preference_recipes.models import prepare

SAYS = "such as model.multi_modal_projector.mm_input_projection_weight (text never reaches them)"
RATE, DECAY, UPDATES = 0.01, 0.5, 3
SETTINGS = dict(train_batch_size=4, micro_train_batch_size=1, max_steps=UPDATES, max_length=60)
SETTINGS |= dict(learning_rate=RATE, weight_decay=DECAY, lr_scheduler_type="constant")
ENGINES = runs.slow_but(["zero3"], ["ddp", "zero3", "fsdp2"])


def save_model(folder, name: str, **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name, **changes), dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(runs.ASSETS / "model").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untrained")
    sizes = dict(vocab_size=272, eos_token_id=1, bos_token_id=None)
    text = {**config_of("gemma3").text_config.to_dict(), **sizes, "initializer_range": 0.1}
    save_model(folder / "tower", "gemma3", text_config=text, image_token_index=270)
    # Of 16 experts a token visits one, and there are few tokens.
    few = dict(num_local_experts=16, num_experts_per_tok=1, output_router_logits=True)
    small = dict(sizes, vocab_size=264, initializer_range=0.1)
    save_model(folder / "mixture", "qwen3_moe", **few, **small)
    pairs = [runs.pair_of(str(n), "ab" * (n % 3 + 1), "b") for n in range(12)]
    chats = [{"messages": pair["prompt"] + pair["chosen"]} for pair in pairs]
    runs.write_jsonl(folder / "sft.jsonl", chats)
    runs.write_jsonl(folder / "reward.jsonl", pairs)
    return folder


def run(inputs, model: str, engine: str, name: str = "sft"):
    output = inputs / f"{model}-{engine}-{name}"
    if not output.exists():
        settings = SETTINGS | {"model_name_or_path": inputs / model, "warmup_steps": 0}
        flags = runs.short_run(inputs, name, output, **settings)
        said = runs.launch(runs.LAUNCHERS[engine], runs.recipe(name), *flags).stdout
        (output / "said").write_text(said)
    return output


def assert_the_tower_stands_still(start, end) -> None:
    """Bit for bit; the rest moves, the norms of the decoder too."""
    before, after = (load_file(folder / "model.safetensors") for folder in (start, end))
    still = {name for name in before if name in after and torch.equal(before[name], after[name])}
    towers = {name for name in before if "vision_tower" in name or "multi_modal" in name}
    assert towers and still == towers & set(after) and len(after) > len(still) > 5


def assert_same_weights(one, other) -> None:
    first, second = runs.weights(one), runs.weights(other)
    assert (first - second).norm() <= 1e-5 * first.norm()


def test_a_tower_is_not_trained(inputs):
    for name in ("sft", "reward"):
        output = run(inputs, "tower", "plain", name)
        assert (output / "said").read_text().count(SAYS) == 1
        assert_the_tower_stands_still(inputs / "tower", output / "actor")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tower_stands_still_under_every_engine(inputs, engine):
    output, alone = run(inputs, "tower", engine), run(inputs, "tower", "plain")
    assert (output / "said").read_text().count(SAYS) == 1
    assert_the_tower_stands_still(inputs / "tower", output / "actor")
    assert_same_weights(alone, output)
    for one, other in zip(runs.training_lines(alone), runs.training_lines(output), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_an_expert_that_no_token_visits_is_decayed(inputs):
    """As ZeRO does it: its gradient is zero, so it shrinks by the learning rate times the decay."""
    output = run(inputs, "mixture", "plain")
    folders = inputs / "mixture", output / "actor"
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    experts = [name for name in before if "experts" in name and "down_proj" in name]
    shrunk = (1 - RATE * DECAY) ** UPDATES
    visited = [not torch.allclose(after[name], before[name] * shrunk) for name in experts]
    assert 0 < sum(visited) < len(visited) == 32
    said = (output / "said").read_text()
    assert said.count("not trained: the router's auxiliary loss") == 1
    assert said.count("not trained") == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_a_mixture_is_the_same_under_every_engine(inputs, engine):
    assert_same_weights(run(inputs, "mixture", "plain"), run(inputs, "mixture", engine))


def test_a_missing_gradient_is_one_of_zeros(accelerator):
    """Of experts that are modules of their own: momentum and decay go on where none is visited."""
    torch.manual_seed(0)
    experts = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(3)])
    expected = copy.deepcopy(experts)
    adamw = functools.partial(torch.optim.AdamW, lr=RATE, weight_decay=DECAY)
    _, optimizer = prepare.for_training(accelerator, experts, adamw(experts.parameters()))
    plain = adamw(expected.parameters())
    for visited in (0, 1):
        accelerator.backward(experts[visited](torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        for number, layer in enumerate(expected):
            layer.weight.grad = torch.full((2, 2), float(number == visited))
        plain.step()
    for one, other in zip(experts, expected):
        torch.testing.assert_close(one.weight, other.weight)
