"""A response is the one that its prompt gets alone, also where a model cannot read padding on the left, or a batch."""

import pytest
import torch

from architectures import ARCHITECTURES, build
from bare_runs import bare_sampler
from preference_recipes.rollouts import generation
from preference_recipes.rollouts.generation import ALONE

FAST = {*ALONE, "llama", "mamba2", "qwen3_next"}
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


@pytest.mark.parametrize("name", NAMES)
def test_responses_are_those_of_each_prompt_alone(accelerator, tokenizer, name):
    model = made(name)
    sampler = bare_sampler(accelerator, tokenizer, model)
    sampler.stop_tokens = lambda: {-1}  # nothing ends them
    respond = lambda: [response.ids for response in generation.generate(sampler, PROMPTS, 6)]
    expected = [alone(model, prompt) for prompt in PROMPTS]
    assert respond() == expected
    if name in ALONE:
        model.config.model_type = "llama"
        assert respond() != expected  # so it matters
