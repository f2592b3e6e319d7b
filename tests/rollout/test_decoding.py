"""A decoding step of fixed addresses draws what transformers' generation draws."""

import contextlib
import gc
import types
import weakref

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache

import pretended_device
from architectures import ARCHITECTURES, build
from bare_runs import bare_sampler
from preference_recipes.models import prepare
from preference_recipes.rollouts import decoding, generation, sharing
from runs import slow_but

FAST = {"llama", "qwen3", "gpt_neox", "phi3"}
# xlstm cannot be generated from at all, see test_generation.py.
NAMES = slow_but(FAST, [name for name in ARCHITECTURES if name != "xlstm"])
# Padding on the left of some, and each of the first two twice, so that their keys are copied.
PROMPTS = [[*range(20, 36)], [40, 41, 42, 43]] * 2 + [[60, 61], [*range(70, 79)]]
# Groups of unlike size, in order; one prompt has no keys but those of its last token.
GROUPS = [[*range(20, 36)]] * 4 + [[40, 41, 42, 43]] * 3 + [[60]] * 2 + [[*range(70, 79)]]


def draw(sampler, temperature: float, new_tokens: int = 20, prompts=PROMPTS, batch_size: int = 0):
    uniforms = np.random.default_rng(5).random((len(prompts), new_tokens))
    how = dict(temperature=temperature, uniforms=uniforms, batch_size=batch_size)
    return generation.generate(sampler, prompts, new_tokens, **how)


@pytest.fixture
def shared(monkeypatch):
    """Prompts are shared, however short. Returns a list of the rows and prompts of each batch that shares any."""
    monkeypatch.setattr(sharing, "LEAST_SAVED", {"cpu": 0, "meta": 0})
    seen = []
    arrange = sharing.SharedPrompts.arrange

    def noted(self, prompt_of_row):
        arrange(self, prompt_of_row)
        seen.append((len(self.slots), len(self.rows)))

    monkeypatch.setattr(sharing.SharedPrompts, "arrange", noted)
    return seen


def expect_drawn_by_generate(monkeypatch, found, *how, atol=2e-5, **more) -> None:
    """Responses are those of transformers' generation, at the same places and with the same log-probs."""
    monkeypatch.setattr(decoding, "has_fixed_step", lambda sampler, cache: False)
    for response, expected in zip(found, draw(*how, **more), strict=True):
        assert response.ids == expected.ids
        np.testing.assert_allclose(response.logps, expected.logps, atol=atol)


def as_a_gpu_records_them(monkeypatch):
    """Steps run one by one. Small numbers of places, so that some steps see more of them than others."""
    monkeypatch.setattr(decoding, "RECORDED_ON", {"cpu", "meta"})
    monkeypatch.setattr(decoding, "SLOTS", 8)
    monkeypatch.setattr(decoding.Decoder, "stream", "none is needed")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(decoding.Decoder, "replay", lambda self: self.step())


def sampler_of(accelerator, tokenizer, name: str):
    """Of an architecture whose steps are not left to transformers."""
    model = build(name)
    sampler = bare_sampler(accelerator, tokenizer, model)
    # As all recipes that sample do. The layers then hold another config than the model.
    prepare.disable_dropout(sampler.unwrapped)
    # Of 300 tokens these end a response: rows leave the batch at several places.
    sampler.stop_tokens = lambda: set(range(0, 300, 15))
    cache = DynamicCache(config=model.config)
    if not model._supports_default_dynamic_cache() or not decoding.has_fixed_step(sampler, cache):
        pytest.skip("transformers generates")
    return sampler, model, cache


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("prompts", [PROMPTS, GROUPS])
@pytest.mark.parametrize("name", NAMES)
def test_steps_draw_the_same_tokens(
    request, accelerator, tokenizer, name, prompts, is_recorded, monkeypatch
):
    """Where prompts are shared, a prompt leaves with its last row; a batch of 5 cuts through groups."""
    shared = request.getfixturevalue("shared") if prompts is GROUPS else []
    if is_recorded:
        as_a_gpu_records_them(monkeypatch)
    sampler, model, _ = sampler_of(accelerator, tokenizer, name)
    sizes = (5, 10) if prompts is GROUPS else (0,)
    cases = [dict(temperature=t, prompts=prompts, batch_size=n) for t in (0.0, 1.0) for n in sizes]
    found = [draw(sampler, **case) for case in cases]
    assert bool(shared) == (prompts is GROUPS and model._supports_attention_backend)
    if prompts is GROUPS and name in FAST:
        assert (10, 4) in shared and any(0 < rows < 10 and left < 4 for rows, left in shared)
    for case, responses in zip(cases, found):
        with monkeypatch.context() as once:
            expect_drawn_by_generate(once, responses, sampler, **case)


@pytest.mark.parametrize("case", ["a mask of its own", "half precision"])
def test_where_prompts_cannot_be_shared(accelerator, tokenizer, case, monkeypatch, shared):
    """The attention is more than scores of keys, or products would be rounded too early."""
    sampler = bare_sampler(accelerator, tokenizer, build("llama"))
    called = []
    if case == "half precision":
        sampler.unwrapped.model.bfloat16()
    else:
        attend = lambda *args, **more: (
            called.append(1) or sharing.attend(*args[:4], "a mask", **more)
        )
        monkeypatch.setitem(AttentionInterface._global_mapping, sharing.ATTENTION, attend)
    found = draw(sampler, 1.0, prompts=GROUPS)
    assert len(called) == (case != "half precision")
    monkeypatch.setattr(sharing, "LEAST_SAVED", {"cpu": 2**40})
    assert found == draw(sampler, 1.0, prompts=GROUPS)


def of_given_tokens(self, scores, uniform):
    """Takes the place of a draw, which rounding would move now and then: the numbers alone decide."""
    token = (uniform * scores.shape[1]).long()
    return token, scores.log_softmax(-1).gather(1, token)


@pytest.mark.parametrize("name", sorted(FAST))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prompts", [PROMPTS, GROUPS])
def test_log_probs_of_steps_are_those_of_whole_passes_under_autocast(
    request, accelerator, tokenizer, name, dtype, prompts, monkeypatch
):
    """Keys are fp32 there. So is attention to shared prompts, which is further from transformers'."""
    if prompts is GROUPS:
        request.getfixturevalue("shared")
    monkeypatch.setattr(accelerator, "autocast", lambda: torch.autocast("cpu", dtype))
    monkeypatch.setattr(generation.SampleByUniform, "draw", of_given_tokens)
    sampler, *_ = sampler_of(accelerator, tokenizer, name)
    found = draw(sampler, 1.0, prompts=prompts)
    atol = 0.1 if prompts is GROUPS else 2e-2
    expect_drawn_by_generate(monkeypatch, found, sampler, 1.0, prompts=prompts, atol=atol)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_asks_nothing_of_the_host(accelerator, name, shares, monkeypatch, shared):
    """So a GPU can record it."""
    as_a_gpu_records_them(monkeypatch)
    sampler, model, cache = sampler_of(accelerator, None, name)
    # A CPU has no histogram of whole numbers, by which transformers counts the tokens of an expert on a GPU.
    counts = lambda ids, bins, **_: torch.nn.functional.one_hot(ids.long(), bins).sum(0)
    monkeypatch.setattr(torch, "histc", counts)
    with torch.no_grad(), pretended_device.device(monkeypatch) as device:
        there = pretended_device.DEVICE
        model.to(there)
        ids = torch.tensor([prompt[:2] for prompt in PROMPTS]).to(there)
        model(ids[:, :-1], use_cache=True, **{decoding.CACHE_ARGUMENT: cache})
        uniforms = torch.rand(len(PROMPTS), 8, dtype=torch.float64).to(there)
        draw = generation.SampleByUniform(uniforms, temperature=1.0)
        padding = np.zeros(len(PROMPTS), dtype=int)
        batch = generation.Batch(sampler, ids, padding, cache, draw)
        prompts = None
        if shares and model._supports_attention_backend:
            cache.reorder_cache(torch.arange(2).to(there))
            batch, prompts = sharing.share(batch, [0, 1, 0, 1, 1, 1])
        step = decoding.Step(batch, 8, prompts)
        step.visible = 8
        device.waits.clear()
        for _ in range(2):
            step()
        assert device.waits == []
        assert step.drawn.tolist()


class CountedStep:
    """Notes whether it ran or was recorded. Three tokens more, and it reads more slots."""

    rows, read, is_recorded, keep, recording, n_drawn = 4, 125, True, None, False, 1
    drawn = torch.zeros(4, 8)

    def __init__(self):
        self.calls = []

    def n_slots(self, tokens):
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


@pytest.mark.parametrize("prompts", [PROMPTS, GROUPS])
def test_keys_are_freed_with_their_batch(request, accelerator, tokenizer, prompts, monkeypatch):
    """At once: on a GPU they are gigabytes, and Python looks for circles only now and then."""
    shared = request.getfixturevalue("shared") if prompts is GROUPS else []
    made = []
    read = []
    hold = decoding.FixedLayer.__init__

    def begin(layer, of_prompts, step):
        assert shared or all(earlier() is None for earlier in read)
        read.append(weakref.ref(of_prompts))
        made.append(weakref.ref(layer))
        hold(layer, of_prompts, step)
        # 4 prompts of up to 15 tokens without their last ones, and 10 rows with theirs.
        if shared:
            numbers = [each for each in vars(layer).values() if isinstance(each, torch.Tensor)]
            assert sum(each.numel() for each in numbers) == 2 * 2 * 8 * (4 * 15 + 10 * 20)

    monkeypatch.setattr(decoding.FixedLayer, "__init__", begin)
    gc.disable()
    draw(bare_sampler(accelerator, tokenizer, build("llama")), 1.0, prompts=prompts)
    gc.enable()
    assert made and all(layer() is None for layer in [*made, *read])
