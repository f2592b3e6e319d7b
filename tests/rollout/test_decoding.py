"""A decoding step of fixed addresses draws what transformers' generation draws."""

import contextlib
import gc
import types
import weakref

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

import pretended_device
from architectures import ARCHITECTURES, build
from bare_runs import bare_sampler
from preference_recipes.rollouts import decoding, generation
from runs import slow_but

FAST = {"llama", "qwen3", "gpt_neox", "phi3"}
# xlstm cannot be generated from at all, see test_generation.py.
NAMES = slow_but(FAST, [name for name in ARCHITECTURES if name != "xlstm"])
# Padding on the left of some, and each of the first two twice, so that their keys are copied.
PROMPTS = [[*range(20, 36)], [40, 41, 42, 43]] * 2 + [[60, 61], [*range(70, 79)]]


def draw(sampler, temperature: float, new_tokens: int = 20):
    uniforms = np.random.default_rng(5).random((len(PROMPTS), new_tokens))
    return generation.generate(
        sampler, PROMPTS, new_tokens, temperature=temperature, uniforms=uniforms
    )


def as_a_gpu_records_them(monkeypatch):
    """Steps run one by one. Small numbers of places, so that some steps see more of them than others."""
    monkeypatch.setattr(decoding, "RECORDED_ON", {"cpu", "meta"})
    monkeypatch.setattr(decoding, "PLACES", 8)
    monkeypatch.setattr(decoding.Decoder, "stream", "none is needed")
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


def of_given_tokens(self, scores, uniform):
    """Takes the place of a draw, which rounding would move now and then: the numbers alone decide."""
    token = (uniform * scores.shape[1]).long()
    return token, scores.log_softmax(-1).gather(1, token)


@pytest.mark.parametrize("name", sorted(FAST))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probs_of_steps_are_those_of_whole_passes_under_autocast(
    accelerator, tokenizer, name, dtype, monkeypatch
):
    """There keys are fp32 and values are not, unless they were read with the prompt."""
    monkeypatch.setattr(accelerator, "autocast", lambda: torch.autocast("cpu", dtype))
    monkeypatch.setattr(generation.SampleByUniform, "tokens", of_given_tokens)
    sampler = bare_sampler(accelerator, tokenizer, build(name))
    sampler.stop_tokens = lambda: set(range(0, 300, 15))
    found = draw(sampler, 1.0)
    monkeypatch.setattr(decoding, "has_fixed_step", lambda sampler, cache: False)
    for response, expected in zip(found, draw(sampler, 1.0), strict=True):
        assert response.ids == expected.ids
        np.testing.assert_allclose(response.logps, expected.logps, atol=2e-2)


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
        model(ids[:, :-1], use_cache=True, **{decoding.CACHE: cache})
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
    """Notes whether it ran or was recorded. Three tokens more, and it reads other places."""

    rows, read, is_recorded, keep, recording = 4, 125, True, None, False
    drawn = torch.zeros(4, 8)

    def __init__(self):
        self.calls = []

    def places(self, tokens):
        return 128 if tokens <= 128 else 256

    def __call__(self):
        self.calls.append("recorded" if self.recording else "ran")


@pytest.mark.parametrize("fails", [False, True])
def test_each_shape_is_recorded_once(monkeypatch, capsys, fails):
    """There is no GPU here, so this is torch's interface as its documentation has it."""
    step = CountedStep()
    current = ["main"]

    @contextlib.contextmanager
    def of_stream(name):
        before = current[0]
        current[0] = name
        yield
        current[0] = before

    @contextlib.contextmanager
    def graph(of_step, pool, stream, capture_error_mode):
        step.recording, current[0] = True, "recording"
        try:
            yield
        finally:
            step.recording = False
        if fails:  # torch then does not leave the stream
            raise RuntimeError("not permitted when stream is capturing")
        current[0] = "side"

    side = types.SimpleNamespace(wait_stream=lambda other: None)
    fakes = dict(
        Stream=lambda: side,
        current_stream=lambda: side,
        stream=lambda stream: of_stream("side"),
        graph_pool_handle=lambda: None,
        CUDAGraph=lambda: types.SimpleNamespace(replay=lambda: step.calls.append("replayed")),
        graph=graph,
    )
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(decoding, "RECORDED_ON", {"cuda"})
    monkeypatch.setattr(decoding.Decoder, "stream", None)
    decoding.Decoder(step).advance(6)
    expected = ["ran", "recorded", "replayed", "replayed", "ran", "recorded", "replayed"]
    assert step.calls == (["ran", "recorded", *["ran"] * 4] if fails else expected)
    assert current == ["main"]
    assert (set() if fails else {"cuda"}) == decoding.RECORDED_ON
    assert ("not recorded" in capsys.readouterr().out) == fails


def test_keys_are_freed_with_their_batch(accelerator, tokenizer, monkeypatch):
    """At once: on a GPU they are gigabytes, and Python looks for circles only now and then.

    Those of the prompts are freed layer by layer, so that both are never there.
    """
    made = []
    read = []
    hold = decoding.FixedLayer.__init__

    def begin(layer, of_prompts, step):
        assert all(earlier() is None for earlier in read)
        read.append(weakref.ref(of_prompts))
        made.append(weakref.ref(layer))
        hold(layer, of_prompts, step)

    monkeypatch.setattr(decoding.FixedLayer, "__init__", begin)
    gc.disable()
    draw(bare_sampler(accelerator, tokenizer, build("llama")), 1.0)
    gc.enable()
    assert made and all(layer() is None for layer in made)
