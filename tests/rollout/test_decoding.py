"""A decoding step of fixed addresses draws what transformers' generation draws."""

import contextlib
import types

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

import pretended_device
from architectures import ARCHITECTURES, build
from bare_runs import bare_sampler
from preference_recipes.rollouts import decoding, generation

FAST = {"llama", "qwen3", "gpt_neox", "phi3"}
# xlstm cannot be generated from at all, see test_generation.py.
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST))
    for name in ARCHITECTURES
    if name != "xlstm"
]
# Padding on the left of some, and each of the first two twice, so that their keys are copied.
PROMPTS = [
    [*range(20, 36)],
    [40, 41, 42, 43],
    [*range(20, 36)],
    [40, 41, 42, 43],
    [60, 61],
    [*range(70, 79)],
]


def draw(sampler, temperature: float, new_tokens: int = 20):
    uniforms = np.random.default_rng(5).random((len(PROMPTS), new_tokens))
    return generation.generate(
        sampler, PROMPTS, new_tokens, temperature=temperature, uniforms=uniforms
    )


def as_a_gpu_records_them(monkeypatch):
    """Steps run one by one. Small numbers of places, so that some steps see more of them than others."""
    monkeypatch.setattr(decoding, "RECORDED_ON", ("cpu", "meta"))
    monkeypatch.setattr(decoding, "PLACES", 8)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(decoding.Decoder, "replay", lambda self: self.step())


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_steps_draw_the_same_tokens(accelerator, tokenizer, name, is_recorded, monkeypatch):
    if is_recorded:
        as_a_gpu_records_them(monkeypatch)
    model = build(name)
    sampler = bare_sampler(accelerator, tokenizer, model)
    # Of 300 tokens these end a response: rows leave the batch at several places.
    sampler.stop_tokens = lambda: set(range(0, 300, 15))
    found = [draw(sampler, temperature) for temperature in (0.0, 1.0)]
    monkeypatch.setattr(decoding, "has_fixed_step", lambda sampler, cache: False)
    for temperature, responses in zip((0.0, 1.0), found):
        for response, expected in zip(responses, draw(sampler, temperature)):
            assert response.ids == expected.ids
            np.testing.assert_allclose(response.logps, expected.logps, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_asks_nothing_of_the_host(accelerator, name, monkeypatch):
    """So a GPU can record it."""
    as_a_gpu_records_them(monkeypatch)
    model = build(name)
    sampler = bare_sampler(accelerator, None, model)
    cache = DynamicCache(config=model.config)
    if not model._supports_default_dynamic_cache() or not decoding.has_fixed_step(sampler, cache):
        pytest.skip("not recorded")
    # A CPU has no histogram of whole numbers, by which transformers counts the tokens of an expert on a GPU.
    counts = lambda ids, bins, **_: torch.nn.functional.one_hot(ids.long(), bins).sum(0)
    monkeypatch.setattr(torch, "histc", counts)
    with torch.no_grad(), pretended_device.device(monkeypatch) as device:
        there = pretended_device.DEVICE
        model.to(there)
        ids = torch.tensor([prompt[:2] for prompt in PROMPTS]).to(there)
        model(ids[:, :-1], past_key_values=cache, use_cache=True)
        uniforms = torch.rand(len(PROMPTS), 8, dtype=torch.float64).to(there)
        draw = generation.SampleByUniform(uniforms, temperature=1.0)
        padding = np.zeros(len(PROMPTS), dtype=int)
        step = decoding.Step(generation.Batch(sampler, ids, padding, cache, draw), 8)
        step.visible = 8
        device.waits.clear()
        for _ in range(2):
            step()
        assert device.waits == []
        assert step.drawn.tolist()


class CountedStep:
    """Notes whether it ran or was recorded."""

    rows, visible, is_recorded, keep, recording, calls = 4, 128, True, None, False, ()

    def __call__(self):
        self.calls = [*self.calls, "recorded" if self.recording else "ran"]


@pytest.mark.parametrize("fails", [False, True])
def test_each_shape_is_recorded_once(monkeypatch, capsys, fails):
    """There is no GPU here, so this is torch's interface as its documentation has it."""
    step = CountedStep()

    @contextlib.contextmanager
    def graph(of_step, pool, stream, capture_error_mode):
        step.recording = True
        try:
            yield
        finally:
            step.recording = False
        if fails:
            raise RuntimeError("not permitted when stream is capturing")

    def replay():
        step.calls = [*step.calls, "replayed"]

    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    fakes = dict(
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda stream: contextlib.nullcontext(),
        graph_pool_handle=lambda: None,
        CUDAGraph=lambda: types.SimpleNamespace(replay=replay),
        graph=graph,
    )
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    decoder = decoding.Decoder(step)
    for step.visible in (128, 128, 256, 256, 128):
        decoder.replay()
    again = "ran" if fails else "replayed"
    assert step.calls == ["ran", "recorded", again, "ran", "recorded", again, again]
    assert ("not recorded" in capsys.readouterr().out) == fails
