"""A decoding step of fixed shapes and addresses draws what transformers' generation draws."""

import contextlib
import types

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

import pretended_device
from architectures import ARCHITECTURES, build
from bare_runs import bare_sampler
from preference_recipes.rollouts import generation, recorded

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


@pytest.fixture
def here(monkeypatch):
    """Steps run as they are, one by one. Small numbers of places, so that some steps see more of them than others."""

    class AsItIs(recorded.Recorder):
        def __init__(self, step):
            self.step = step
            self.n_tokens = 0

        def __call__(self):
            self.step()

    monkeypatch.setattr(recorded, "DEVICES", ("cpu",))
    monkeypatch.setattr(recorded, "Recorder", AsItIs)
    monkeypatch.setattr(recorded, "PLACES", 8)
    monkeypatch.setattr(generation, "TOKENS_AT_ONCE", 4)


def draw(sampler, temperature: float, new_tokens: int = 20):
    uniforms = np.random.default_rng(5).random((len(PROMPTS), new_tokens))
    return generation.generate(
        sampler, PROMPTS, new_tokens, temperature=temperature, uniforms=uniforms
    )


@pytest.mark.parametrize("name", NAMES)
def test_recorded_steps_draw_the_same_tokens(accelerator, tokenizer, name, here, monkeypatch):
    model = build(name)
    sampler = bare_sampler(accelerator, tokenizer, model)
    # Of 300 tokens these end a response: rows leave the batch at several places.
    sampler.stop_tokens = lambda: set(range(0, 300, 15))
    found = [draw(sampler, temperature) for temperature in (0.0, 1.0)]
    monkeypatch.setattr(recorded, "DEVICES", ())
    for temperature, responses in zip((0.0, 1.0), found):
        for response, expected in zip(responses, draw(sampler, temperature)):
            assert response.ids == expected.ids
            np.testing.assert_allclose(response.logps, expected.logps, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_asks_nothing_of_the_host(accelerator, name, here, monkeypatch):
    """So a GPU can record it."""
    model = build(name)
    sampler = bare_sampler(accelerator, None, model)
    cache = DynamicCache(config=model.config)
    if not model._supports_default_dynamic_cache() or not recorded.can_record(sampler, cache):
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
        step = recorded.Step(generation.Batch(sampler, ids, padding, cache, draw), 8)
        step.visible = 8
        device.waits.clear()
        for _ in range(2):
            step()
        assert device.waits == []
        assert step.drawn.tolist()


class CountedStep:
    """Notes whether it ran or was recorded."""

    rows, visible, recording, calls = 4, 128, False, ()

    def __call__(self):
        self.calls = [*self.calls, "recorded" if self.recording else "ran"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_recorder_records_each_shape_once(monkeypatch, capsys, fails):
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
    record = recorded.Recorder(step)
    for step.visible in (128, 128, 256, 256, 128):
        record()
    again = "ran" if fails else "replayed"
    assert step.calls == ["ran", "recorded", again, "ran", "recorded", again, again]
    assert ("not recorded" in capsys.readouterr().out) == fails
