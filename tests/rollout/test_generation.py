"""Responses are those that each prompt gets alone, in whole forward passes over one unpadded row."""

import copy
import functools
import math

import numpy as np
import pytest
import torch

from architectures import ARCHITECTURES, build
from bare_runs import bare_sampler
from plain_rollouts import STOPS, alone
from preference_recipes.rollouts import decoding, generation
from preference_recipes.rollouts.generation import UNBATCHABLE
from preference_recipes.rollouts.samples import Samples
from runs import slow_but

PROMPTS = [
    [10 + (7 * row + place * place) % 200 for place in range(length)]
    for row, length in enumerate((3, 9, 1, 6, 9, 2, 12))
]
ROOM, TEMPERATURE = 24, 0.7


def made(architecture: str):
    model = build(architecture)
    model.generation_config.eos_token_id = STOPS[1:]  # EOS itself is the tokenizer's
    return model


def log_probs_of(response: list[int], logits: list[np.ndarray], temperature: float) -> list[float]:
    """The log-prob of each token of a response, from the logits of each step."""
    scaled = [torch.tensor(step) / temperature for step in logits]
    return [step.log_softmax(-1)[token].item() for step, token in zip(scaled, response)]


@pytest.mark.filterwarnings("error::FutureWarning")  # what transformers is about to take away
@pytest.mark.parametrize("architecture", ["llama", "jamba"])
@pytest.mark.parametrize("batch_size", [3, 4, 100])
def test_responses_of_a_prompt_share_its_prefill(
    accelerator, tokenizer, monkeypatch, architecture, batch_size
):
    """They are those of the prompt alone, and so are the log-probs that the sampler returns."""
    model = made(architecture)
    read = []  # tokens of each forward pass
    forward = type(model).forward

    @functools.wraps(forward)  # `generate` looks at what it takes
    def watched(self, input_ids=None, **inputs):
        read.append(input_ids.numel())
        return forward(self, input_ids, **inputs)

    n = 1 if batch_size == 3 else 3
    columns = {"prompt_ids": PROMPTS, "row_json": ["{}"] * len(PROMPTS), "row": [*range(1, 8)]}
    uniforms = np.random.default_rng(2).random((n * len(PROMPTS), ROOM))
    for temperature in (0.0, TEMPERATURE):
        expected = [
            alone(model, PROMPTS[sample // n], uniforms[sample], temperature, STOPS, ROOM)
            for sample in range(n * len(PROMPTS))
        ]
        monkeypatch.setattr(type(model), "forward", watched)
        read.clear()
        sampler = bare_sampler(accelerator, tokenizer, model, generate_batch_size=batch_size)
        samples = sampler.sample(columns, uniforms.reshape(len(PROMPTS), n, ROOM), temperature)
        monkeypatch.undo()
        assert samples.responses == [response for response, _ in expected]
        assert samples.row_numbers == [row for row in range(1, 8) for _ in range(n)]
        assert samples.ended.tolist() == [response[-1] in STOPS for response, _ in expected]
        if temperature:
            for found, (response, logits) in zip(samples.sampler_logps, expected, strict=True):
                closed = log_probs_of(response, logits, temperature)
                np.testing.assert_allclose(found, closed, rtol=1e-3, atol=1e-4)
        else:
            assert samples.sampler_logps == [[]] * len(expected)
    if batch_size == 100:
        longest = max(map(len, PROMPTS))
        shares = architecture != "jamba"  # its cache cannot be repeated
        assert read[0] == (len(PROMPTS) * (longest - 1) if shares else n * len(PROMPTS) * longest)


@pytest.mark.parametrize("takes_steps", [True, False])
def test_the_host_reads_each_token_once(accelerator, tokenizer, monkeypatch, takes_steps):
    """It read all tokens so far after each few: for 128 rows of 8,192 tokens that took 35 seconds."""
    monkeypatch.setattr(decoding, "has_fixed_step", lambda sampler, cache: takes_steps)
    sampler = bare_sampler(accelerator, tokenizer, build("llama"))
    sampler.stop_tokens = lambda: {-1}  # nothing ends them
    n_read = 0

    def counted(method):
        def call(tensor, *args):
            nonlocal n_read
            n_read += tensor.numel()
            return method(tensor, *args)

        return call

    for name in ("tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
    for length in (16, 48):
        n_read = 0
        uniforms = np.random.default_rng(3).random((len(PROMPTS), length))
        how = dict(temperature=1.0, uniforms=uniforms)
        generation.generate(sampler, PROMPTS, length, **how)
        # Whether it is a stop, the token and its log-prob; and a few more that are not of tokens.
        assert 3 * uniforms.size <= n_read <= 3 * uniforms.size + 50


@pytest.mark.parametrize(
    "architecture", slow_but(["gpt2", "opt"], ["gpt2", "opt", "gpt_bigcode", "gpt_neo", "biogpt"])
)
@pytest.mark.parametrize("batch_size", [3, 100])
def test_no_response_goes_beyond_the_positions_of_a_model(
    accelerator, tokenizer, architecture, batch_size
):
    """Of 64 positions each prompt leaves its own room, whatever others are in the batch."""
    model = made(architecture)
    lengths = [63, 20, 50, 41, 20, 62, 3]
    prompts = [[10 + (7 * n + place) % 200 for place in range(n)] for n in lengths]
    uniforms = np.random.default_rng(3).random((len(prompts), ROOM))
    sampler = bare_sampler(accelerator, tokenizer, model)
    given = dict(batch_size=batch_size, temperature=TEMPERATURE, uniforms=uniforms)
    found = generation.generate(sampler, prompts, ROOM, **given)
    rooms = [min(ROOM, 64 - length) for length in lengths]
    expected = [
        alone(model, prompt, draws, TEMPERATURE, STOPS, room)[0]
        for prompt, draws, room in zip(prompts, uniforms, rooms)
    ]
    assert [response.ids for response in found] == expected
    assert [len(response.logps) for response in found] == [len(ids) for ids in expected]
    assert any(len(ids) == room < ROOM for ids, room in zip(expected, rooms))


def test_settings_of_the_model_do_not_change_the_draw(accelerator, tokenizer):
    """Log-probs are of the whole distribution: a generation config that cuts it would make them wrong."""
    model, uniforms = made("llama"), np.random.default_rng(1).random((len(PROMPTS), ROOM))
    sampler = bare_sampler(accelerator, tokenizer, model)
    draw = lambda: generation.generate(
        sampler, PROMPTS, ROOM, batch_size=4, temperature=1.0, uniforms=uniforms
    )
    before = draw()
    sampler.tokenizer = copy.deepcopy(tokenizer)
    sampler.tokenizer.add_tokens([f"<{n}>" for n in range(len(tokenizer), 301)])
    sampler.tokenizer.pad_token = "<300>"  # it was added, and has no embedding
    assert draw() == before
    sampler.tokenizer = tokenizer
    others = dict(temperature=0.1, top_k=1, top_p=0.1, repetition_penalty=3.0, num_beams=2)
    others |= dict(no_repeat_ngram_size=1, min_new_tokens=20, forced_eos_token_id=2)
    others |= dict(do_sample=True, use_cache=False, cache_implementation="static")
    model.generation_config.update(**others)
    model.train()
    model.lm_head.eval()
    assert draw() == before
    # Modes and settings are left as they were: the latter are saved with the actor.
    assert model.training and model.model.training and not model.lm_head.training
    assert {name: getattr(model.generation_config, name) for name in others} == others


def test_sampling_is_the_inverse_of_the_cumulative_probability():
    scores = torch.tensor([[-torch.inf, 0.3, -torch.inf, 1.2, -0.8, 2.0, -torch.inf]])
    chances = np.exp(scores[0].numpy() / TEMPERATURE)
    chances = chances / chances.sum()

    def drawn(numbers):
        uniforms = torch.tensor(numbers, dtype=torch.float64)[:, None]
        sample = generation.SampleByUniform(uniforms, TEMPERATURE)
        each = scores.expand(len(numbers), -1)
        return sample(torch.zeros(len(numbers), 1), each).argmax(-1).numpy()

    n = 4000
    even = drawn((np.arange(n) + 0.5) / n)  # evenly spaced: every count is exact to one draw
    assert np.abs(np.bincount(even, minlength=7) - n * chances).max() <= 1
    assert (np.diff(even) >= 0).all()
    # The ends, beside tokens of probability zero.
    assert drawn([0.0, 1 - 2**-53]).tolist() == [1, 5]


def test_a_sampler_that_was_not_finite_stops_the_run_though_the_later_pass_is(tmp_path):
    """As where only the cache of generation overflows: the last token of the vocabulary was drawn then."""
    samples = Samples(
        [[5], [9]], [[40, 1], [50, 51]], ["{}"] * 2, [1, 2], torch.tensor([True, False])
    )
    samples.sampler_logps = [[-0.5, -0.5], [-0.5, math.nan]]
    old = {"old_logps": torch.full((2, 2), -1.0), "old_values": torch.zeros(2, 2)}
    sampler = bare_sampler(output_dir=tmp_path)
    with pytest.raises(FloatingPointError, match=r"rows 2\. .*Not finite: sampler_logps\. "):
        samples.check_finite(sampler, scores=torch.ones(2, 1), **old)


# ---------------------------------------------------------------------------------------------- 70 architectures

FAST = {*UNBATCHABLE, "llama", "mamba2", "qwen3_next"} - {"gpt_neo"}
# xlstm cannot be generated from at all: its second step refuses its own cache.
NAMES = slow_but(FAST, [name for name in ARCHITECTURES if name != "xlstm"])
LONG_AND_SHORT = [[*range(20, 36)], [40, 41, 42, 43], [*range(50, 66)], [60, 61], [70, 71, 72, 73]]


@pytest.mark.parametrize("name", NAMES)
def test_responses_are_those_of_each_prompt_alone(accelerator, tokenizer, name):
    model = build(name)
    with torch.no_grad():  # padding has an embedding, as that of a trained model may
        model.get_input_embeddings().weight[0].normal_()
    sampler = bare_sampler(accelerator, tokenizer, model)
    sampler.stop_tokens = lambda: {-1}  # nothing ends them
    respond = lambda: [response.ids for response in generation.generate(sampler, LONG_AND_SHORT, 6)]
    expected = [alone(model, prompt, None, 0.0, {-1}, 6)[0] for prompt in LONG_AND_SHORT]
    assert respond() == expected
    if name in UNBATCHABLE and name != "gpt_neo":
        model.config.model_type = "llama"
        assert respond() != expected  # so it matters
