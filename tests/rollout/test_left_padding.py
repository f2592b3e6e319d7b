"""A response is the one that its prompt gets alone, also where a model cannot read padding on the left, or a batch."""

import pytest
import torch

from architectures import ARCHITECTURES, build
from bare_runs import bare_sampler
from preference_recipes.rollouts import generation

# With transformers 5.23. The others continue all prompts together.
NOT_TOGETHER = {"recurrent_gemma", "minimax", "rwkv"}
FAST = {*NOT_TOGETHER, "llama", "mamba2", "qwen3_next"}
NAMES = [
    # xlstm cannot be generated from at all: its second step refuses its own cache.
    pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST))
    for name in ARCHITECTURES
    if name != "xlstm"
]
PROMPTS = [[*range(20, 36)], [40, 41, 42, 43], [*range(50, 66)], [60, 61], [70, 71, 72, 73]]


def made(name: str):
    """Its tokenizer's token for padding has an embedding, as that of a trained model may."""
    model = build(name)
    with torch.no_grad():
        model.get_input_embeddings().weight[0].normal_()
    return model


@torch.no_grad()
def alone(model, prompt: list[int]) -> list[int]:
    """The six likeliest next tokens by whole forward passes over one row."""
    ids = list(prompt)
    for _ in range(6):
        ids.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item())
    return ids[len(prompt) :]


def respond(sampler, **how) -> list[list[int]]:
    """Greedy responses of six tokens, none of which ends them."""
    return [response.ids for response in generation.generate(sampler, PROMPTS, 6, **how)]


@pytest.fixture(autouse=True)
def no_stops(monkeypatch):
    monkeypatch.setattr(generation.chat, "stop_tokens", lambda *_: {-1})


@pytest.mark.parametrize("name", NAMES)
def test_responses_are_those_of_each_prompt_alone(accelerator, tokenizer, name):
    model = made(name)
    sampler = bare_sampler(accelerator, tokenizer, model)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    assert respond(sampler) == expected
    if name in NOT_TOGETHER:
        model.config.model_type = "llama"
        assert respond(sampler) != expected  # so it matters


def test_prompts_of_one_length_stay_together(accelerator, tokenizer, monkeypatch):
    """Each length is a batch, and each response stays with its prompt."""
    model, batches = made("recurrent_gemma"), []
    sampler = bare_sampler(accelerator, tokenizer, model)
    plain = model.generate
    monkeypatch.setattr(
        model, "generate", lambda ids, **how: batches.append(ids.tolist()) or plain(ids, **how)
    )
    first = respond(sampler)
    assert sorted(batches) == [PROMPTS[0:3:2], PROMPTS[1:5:3], [[60, 61]]]
    batches.clear()
    assert respond(sampler, batch_size=2) == first
    assert [{len(row) for row in batch} for batch in batches] == [{16}, {4}, {2}]
