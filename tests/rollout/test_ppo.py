"""PPO by value, against plain references.

Its functions are compared with loops over ragged rows, generation with one unpadded row at a
time. Whole runs, rollouts and updates are compared with a plain reference that has neither padding,
cache, batches nor engine.
"""

import functools
import itertools
import json
import math
import runpy
import shutil
import types

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma2Config,
    GPTNeoXConfig,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3Config,
)

from architectures import build
from bare_runs import SHARING, alone_in, bare_sampler
from common import arguments, batches
from preference_recipes.models.load import score_model
from preference_recipes.rollouts import answers, generation
from preference_recipes.rollouts.samples import Collected, Samples
from preference_recipes.tools import export
from runs import (
    ASSETS,
    LAUNCHERS,
    launch,
    lines,
    recipe,
    timeless,
    tiny_llama,
    weights,
    write_jsonl,
)

ppo = types.SimpleNamespace(**runpy.run_path(str(recipe("ppo")), run_name="ppo"))
LENGTHS = [5, 1, 3, 7]
MASK = torch.arange(7) < torch.tensor(LENGTHS)[:, None]


def ragged(seed: int, scale: float = 1.0) -> torch.Tensor:
    """Random `[4, 7]`, absurd behind the ends: nothing may come from there."""
    values = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed)) * scale
    return torch.where(MASK, values, 1e9)


def expect(found: torch.Tensor, of_token) -> None:
    """`of_token(row, t)` at every real token."""
    for row, length in enumerate(LENGTHS):
        for t in range(length):
            assert found[row, t].item() == pytest.approx(
                float(of_token(row, t)), rel=1e-5, abs=1e-6
            ), (row, t)


# ---------------------------------------------------------------------------------------------- the functions


def test_kl_estimates():
    p, q = (
        torch.randn(9, generator=torch.Generator().manual_seed(seed)).log_softmax(0)
        for seed in (1, 2)
    )
    exact = sum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist()))
    estimates = {name: ppo.kl_estimate(p, q, name) for name in ("k1", "k2", "k3")}
    for token, (a, b) in enumerate(zip(p.tolist(), q.tolist())):
        closed = {"k1": a - b, "k2": (a - b) ** 2 / 2, "k3": math.exp(b - a) - 1 - (b - a)}
        assert {name: value[token].item() for name, value in estimates.items()} == pytest.approx(
            closed, rel=1e-5, abs=1e-6
        )
    for name in ("k1", "k3"):  # unbiased: the mean over what the policy samples is the divergence
        assert (p.exp() * estimates[name]).sum().item() == pytest.approx(exact, rel=1e-5)
    assert estimates["k2"].min() >= 0 and estimates["k3"].min() >= 0 > estimates["k1"].min()


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (0.8, 1.0), (0.7, 0.0)])
def test_advantages(gamma, lam):
    rewards, values = torch.where(MASK, ragged(1), 0.0), ragged(2)
    advantages, returns = ppo.gae(rewards, values, MASK, gamma, lam)

    def delta(row, t):
        after = values[row, t + 1].item() if t + 1 < LENGTHS[row] else 0.0
        return rewards[row, t].item() + gamma * after - values[row, t].item()

    advantage = lambda row, t: sum(
        (gamma * lam) ** (s - t) * delta(row, s) for s in range(t, LENGTHS[row])
    )
    expect(advantages, advantage)
    expect(returns, lambda row, t: advantage(row, t) + values[row, t].item())
    if lam == 1:
        expect(
            returns,
            lambda row, t: sum(
                gamma ** (s - t) * rewards[row, s].item() for s in range(t, LENGTHS[row])
            ),
        )
    assert (advantages[~MASK] == 0).all() and (returns[~MASK] == 0).all()


@pytest.mark.parametrize("low, high, dual", [(0.2, 0.2, 0.0), (0.1, 0.4, 0.0), (0.2, 0.3, 1.5)])
def test_policy_losses(low, high, dual):
    logps, old, advantages = ragged(4, 0.6), ragged(5, 0.6), ragged(6)
    losses, clipped = ppo.policy_losses(logps, old, advantages, low, high, dual)
    seen = set()

    def loss(row, t):
        ratio, a = math.exp(logps[row, t] - old[row, t]), advantages[row, t].item()
        bound = 1 + high if a > 0 else dual if dual and ratio > dual else None
        if (a > 0 and ratio > 1 + high) or (a < 0 and dual and ratio > dual):
            kind, value = "above", -a * bound
        elif a < 0 and ratio < 1 - low:
            kind, value = "below", -a * (1 - low)
        else:
            kind, value = "free", -a * ratio
        assert clipped[row, t].item() == (kind != "free")
        seen.add((kind, a > 0))
        return value

    expect(losses, loss)
    assert seen >= {("above", True), ("below", False), ("free", True)} and (
        ("above", False) in seen
    ) == bool(dual)


@pytest.mark.parametrize("clip", [0.2, 0.0])
def test_value_losses(clip):
    values, old, returns = ragged(7), ragged(8), ragged(9)
    losses, clipped = ppo.value_losses(values, old, returns, clip)

    def loss(row, t):
        v, o, r = (part[row, t].item() for part in (values, old, returns))
        free, near = (
            (v - r) ** 2,
            (min(max(v, o - clip), o + clip) - r) ** 2 if clip else (v - r) ** 2,
        )
        assert clipped[row, t].item() == (near > free)
        return 0.5 * max(free, near)

    expect(losses, loss)
    near = [
        part[None] * 0.05
        for part in torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    ]  # rounding is no clipping
    assert not ppo.value_losses(*near, torch.ones(1, 1000), 0.5)[1].any()


def test_explained_variance():
    """Over all tokens together, against numpy; a constant error changes nothing."""
    values, returns = ragged(2), ragged(3)
    real = lambda tensor: tensor[MASK].double().numpy()
    expected = 1 - np.var(real(returns) - real(values)) / np.var(real(returns))
    assert ppo.explained_variance(values, returns, MASK).item() == pytest.approx(expected)
    assert ppo.explained_variance(returns + 5, returns, MASK).item() == pytest.approx(1)
    constant = torch.full((4, 7), 3.0)
    assert ppo.explained_variance(constant, returns, MASK).item() == pytest.approx(0)
    assert ppo.explained_variance(values, constant, MASK).isnan()
    assert ppo.explained_variance(values, constant + returns * 1e-7, MASK).isnan()


# ---------------------------------------------------------------------------------------------- generation

LOADING = bare_sampler().args  # how models are loaded
SMALL = dict(vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64,
             initializer_range=0.3, pad_token_id=0, bos_token_id=None, eos_token_id=1)  # fmt: skip
ARCHITECTURES = {
    "llama": LlamaConfig(**SMALL, num_key_value_heads=1),
    "qwen3": Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=16),
    "gpt_neox": GPTNeoXConfig(**SMALL),
    "jamba": JambaConfig(
        **SMALL,
        num_key_value_heads=1,
        use_mamba_kernels=False,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
    ),
    "lfm2": Lfm2Config(
        **SMALL, num_key_value_heads=1, full_attn_idxs=[1]
    ),  # its other layer remembers by a convolution
    "gemma2": Gemma2Config(
        **SMALL, num_key_value_heads=1, head_dim=16, sliding_window=6, query_pre_attn_scalar=16
    ),  # logits soft-capped, too
}
PROMPTS = [
    [10 + (7 * row + place * place) % 200 for place in range(length)]
    for row, length in enumerate((3, 9, 1, 6, 9, 2, 12))
]
ROOM, TEMPERATURE = 24, 0.7
STOPS = [1, *range(30, 60)]  # so many that most responses end early


def made(architecture: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]).eval()
    model.generation_config.eos_token_id = STOPS[1:]  # EOS itself is the tokenizer's
    return model


@torch.no_grad()
def alone(model, prompt, numbers, temperature, stops, room):
    """A response from whole forward passes over one unpadded row, and the logits of each step."""
    ids, seen = list(prompt), []
    while len(ids) < len(prompt) + room and (len(ids) == len(prompt) or ids[-1] not in stops):
        logits = model(torch.tensor([ids])).logits[0, -1].double().numpy()
        seen.append(logits)
        chances = np.exp((logits - logits.max()) / (temperature or 1.0))
        below = np.cumsum(chances / chances.sum())
        ids.append(
            int((below <= numbers[len(seen) - 1]).sum()) if temperature else int(logits.argmax())
        )
    return ids[len(prompt) :], seen


def log_probs_of(response: list[int], logits: list[np.ndarray], temperature: float) -> list[float]:
    """The log-prob of each token of a response, from the logits of each step."""
    scaled = [torch.tensor(step) / temperature for step in logits]
    return [step.log_softmax(-1)[token].item() for step, token in zip(scaled, response)]


@pytest.mark.filterwarnings("error::FutureWarning")  # what transformers is about to take away
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("batch_size", [3, 4, 100])
def test_responses_of_a_prompt_share_its_prefill(
    accelerator, tokenizer, monkeypatch, architecture, batch_size
):
    """They are those of the prompt alone, and so are the log-probs that the sampler returns.

    A batch of 3 holds prompts of unequal length, with one response each.
    """
    model = made(architecture)
    read = []  # tokens of each forward pass
    forward = type(model).forward

    def watched(self, input_ids=None, **inputs):
        read.append(input_ids.numel())
        return forward(self, input_ids, **inputs)

    n = 1 if batch_size == 3 else 3
    columns = {"prompt_ids": PROMPTS, "columns": ["{}"] * len(PROMPTS), "row": [*range(1, 8)]}
    uniforms = np.random.default_rng(2).random((n * len(PROMPTS), ROOM))
    for temperature in (0.0, TEMPERATURE):
        expected = [
            alone(model, PROMPTS[sample // n], uniforms[sample], temperature, STOPS, ROOM)
            for sample in range(n * len(PROMPTS))
        ]
        monkeypatch.setattr(type(model), "forward", watched)
        read.clear()
        sampler = bare_sampler(accelerator, tokenizer, model, generate_batch_size=batch_size)
        samples = generation.sample(
            sampler, columns, uniforms.reshape(len(PROMPTS), n, ROOM), temperature
        )
        monkeypatch.undo()
        assert samples.responses == [response for response, _ in expected]
        assert samples.per_prompt == n and len(samples) == len(expected)
        assert samples.data_rows == [row for row in range(1, 8) for _ in range(n)]
        assert samples.ended.tolist() == [response[-1] in STOPS for response, _ in expected]
        assert samples.prompts == [prompt for prompt in PROMPTS for _ in range(n)]
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
        assert not shares or read[1] == n * len(PROMPTS)


def test_new_tokens_do_not_copy_the_cache(accelerator, tokenizer, monkeypatch):
    """Its keys and values are those of transformers' own layer, bit for bit, also after rows end.

    Rows 0 and 2 share a prompt, and one of three rows is dropped after every second round.
    """
    model = build("llama")
    sampler = bare_sampler(accelerator, tokenizer, model)
    found, copies = {}, {}
    for is_roomy in (True, False):
        if not is_roomy:
            monkeypatch.setattr(generation, "with_room", lambda cache, places: cache)
        draws = torch.from_numpy(np.random.default_rng(2).random((3, 30)))
        drawing = generation.SampleByUniform(draws, 1.0)
        rows = generation.Rows(sampler, [[5, 6, 7], [8], [5, 6, 7]], 30, {-1}, drawing)
        rows.read_prompts()
        places = []
        with torch.no_grad():
            for number in range(6):
                for _ in range(5):
                    rows.extend(1)
                    places.append(rows.cache.layers[0].keys.data_ptr())
                if number in (1, 3):
                    rows.keep([0, 2][: len(rows.prompt_of_row) - 1])
        of_layers = [tensor for layer in rows.cache.layers for tensor in (layer.keys, layer.values)]
        found[is_roomy] = [rows.ids, drawing.logps, *of_layers]
        copies[is_roomy] = sum(one != other for one, other in itertools.pairwise(places))
    assert found[True][2].shape[-2] == 32  # the last token is not read
    assert all(torch.equal(*pair) for pair in zip(found[True], found[False]))
    assert copies[True] == 2 and copies[False] > 15  # two times other rows


def test_settings_of_the_model_do_not_change_the_draw(accelerator, tokenizer):
    """Log-probs are of the whole distribution at `--temperature`: a generation config that cuts it would make them wrong."""
    model, uniforms = made("llama"), np.random.default_rng(1).random((len(PROMPTS), ROOM))
    sampler = bare_sampler(accelerator, tokenizer, model)
    draw = lambda: generation.generate(
        sampler, PROMPTS, ROOM, batch_size=4, temperature=1.0, uniforms=uniforms
    )
    before = draw()
    others = dict(temperature=0.1, top_k=1, top_p=0.1, repetition_penalty=3.0, no_repeat_ngram_size=1, do_sample=True, num_beams=2,
                  min_new_tokens=20, forced_eos_token_id=2, use_cache=False, cache_implementation="static")  # fmt: skip
    model.generation_config.update(**others)
    model.train()
    model.lm_head.eval()
    assert draw() == before
    assert (
        model.training and model.model.training and not model.lm_head.training
    )  # modes are left as they were
    assert {
        name: getattr(model.generation_config, name) for name in others
    } == others  # it is saved with the actor


@pytest.mark.parametrize("name", ["mixtral", "llama4"])
def test_a_router_that_is_asked_for_its_logits_generates_too(accelerator, tokenizer, name):
    """Prompts of unequal length have a mask, which fits only the tokens of the first step."""
    model = build(name)
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    prompts = [PROMPTS[0], PROMPTS[0][:2], PROMPTS[1]]
    sampler = bare_sampler(accelerator, tokenizer, model)
    found = {}
    for wanted in (False, True):
        for config in configs:
            config.output_router_logits = wanted
        found[wanted] = generation.generate(sampler, prompts, 6, batch_size=4)
    assert found[True] == found[False] and len(set(map(len, prompts))) > 1
    assert all(config.output_router_logits is True for config in configs)
    with pytest.raises(ZeroDivisionError), generation.ready_to_generate(sampler):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise ZeroDivisionError
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_sampling_is_the_inverse_of_the_cumulative_probability():
    scores = torch.tensor([[-torch.inf, 0.3, -torch.inf, 1.2, -0.8, 2.0, -torch.inf]])
    chances = np.exp(scores[0].numpy() / TEMPERATURE)
    chances = chances / chances.sum()
    n = 4000

    def drawn(numbers):
        uniforms = torch.tensor(numbers, dtype=torch.float64)[:, None]
        sample = generation.SampleByUniform(uniforms, TEMPERATURE)
        return (
            sample(torch.zeros(len(numbers), 1), scores.expand(len(numbers), -1)).argmax(-1).numpy()
        )

    even = drawn((np.arange(n) + 0.5) / n)  # evenly spaced: every count is exact to one draw
    assert (
        np.abs(np.bincount(even, minlength=7) - n * chances).max() <= 1
        and (np.diff(even) >= 0).all()
    )
    random = np.bincount(drawn(np.random.default_rng(0).random(n)), minlength=7)
    possible = chances > 0
    assert (
        (random - n * chances)[possible] ** 2 / (n * chances)[possible]
    ).sum() < 16.3 and not random[~possible].any()  # p = 0.001
    assert drawn([0.0, 1 - 2**-53]).tolist() == [
        1,
        5,
    ]  # the ends, beside tokens of probability zero


# ---------------------------------------------------------------------------------------------- scores


def stub_samples(tokenizer):
    """Three responses of which the second does not end; the first prompt holds the token that pads."""
    prompts, responses = [[5, 0, 8], [9], [7, 6]], [[40, 41, 1], [50, 51, 52, 53], [1]]
    # A column "responses", of the data, gives way to what is meant by that name.
    columns = [
        json.dumps({"prompt": f"p{row}", "responses": "old", "weight": row + 1, "answer": "x"})
        for row in range(3)
    ]
    return Samples(
        prompts, responses, columns, data_rows=[1, 2, 3], ended=torch.tensor([True, False, True])
    )


def sequence_classifier(folder, **changes):
    """A tiny reward model with a random head, as recipes/reward.py saves one."""
    torch.manual_seed(5)
    config = LlamaConfig(
        **{**SMALL, "initializer_range": 0.15, "num_key_value_heads": 1, "num_labels": 1, **changes}
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ASSETS / "model").save_pretrained(folder)
    return folder


def test_a_sampler_that_was_not_finite_stops_the_run_though_the_later_pass_is(tokenizer, tmp_path):
    """As where only the cache of generation overflows: the last token of the vocabulary was drawn then."""
    samples = stub_samples(tokenizer)
    samples.sampler_logps = [[-0.5] * 3, [-0.5, math.nan, -0.5, -0.5], [-0.5]]
    old = {"logps": torch.full((3, 4), -1.0), "values": torch.zeros(3, 4)}
    sampler = bare_sampler(output_dir=tmp_path)
    check = lambda: samples.check_finite(sampler, scores=torch.ones(3, 1), **old)
    with pytest.raises(FloatingPointError, match=r"rows 2\. .*Not finite: sampler_logps\. "):
        check()
    samples.sampler_logps[1][1] = -0.5
    check()
    old["values"][2, 0] = math.nan
    with pytest.raises(FloatingPointError, match=r"because of data rows 3\. Nothing"):
        check()


def test_a_padding_row_is_read_but_not_kept():
    samples = Samples([[5, 6]], [[7, 8, 9]], [""], [1], torch.tensor([True]))
    sampler = bare_sampler(alone_in(1, 2))
    ((rows, batch),) = samples.scoring_batches(sampler, SHARING)
    assert rows == [] and batch["mask"].shape == (1, 3)
    collected = Collected(sampler.accelerator)
    collected.add(rows, batch["mask"], logps=torch.ones(1, 3), values=torch.ones(1, 3))
    assert collected.of_sample == {}


def test_collected_values_are_padded_with_zeros(accelerator):
    collected = Collected(accelerator)
    mask = torch.tensor([[True, True], [True, False]])
    collected.add(
        [2, 0], mask, logps=torch.tensor([[1.0, 2.0], [3.0, 9.0]]), values=-torch.ones(2, 2)
    )
    collected.add(
        [1],
        torch.ones(1, 3, dtype=torch.bool),
        logps=torch.tensor([[4.0, 5.0, 6.0]]),
        values=torch.zeros(1, 3),
    )
    found = collected.gather()
    assert found["logps"].tolist() == [[3.0, 0.0, 0.0], [4.0, 5.0, 6.0], [1.0, 2.0, 0.0]]
    assert found["values"].tolist() == [[-1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [-1.0, -1.0, 0.0]]


# ---------------------------------------------------------------------------------------------- the schedule


# ---------------------------------------------------------------------------------------------- refusals


def refusal_of(recipe, settings: dict, capsys) -> str:
    """What a recipe says against these settings of its demo; empty if it takes them."""
    argv = [f"--{name}={'' if value is None else value}" for name, value in settings.items()]
    name = recipe.__name__  # ppo or grpo
    try:
        args = arguments.parse(recipe.Args, ASSETS / f"{name}.yaml", argv)
        recipe.check_settings(args)
    except SystemExit as refusal:
        message = capsys.readouterr().err if refusal.code == 2 else refusal.code
        return message.strip().splitlines()[-1]
    return ""


def test_an_empty_value_takes_a_list_of_the_demo_away():
    """As in `--reward_function=`, to train the demo against a reward model alone."""
    parse = lambda *argv: arguments.parse(ppo.Args, ASSETS / "ppo.yaml", list(argv))
    assert parse().reward_function == ["preference_recipes.rollouts.rewards:answer_reward"]
    assert parse("--reward_function=").reward_function is None
    assert parse("--reward_function", "a:b", "c:d").reward_function == ["a:b", "c:d"]


@pytest.mark.parametrize("settings, parts", [
    ({"normalize_reward": True}, ["--normalize_reward", "--reward_model_name_or_path"]),
    ({"kl_in": "loss"}, ["--kl_in loss --kl_estimator k1", "Use k2, or k3"]),
    ({"kl_target": 6.0, "kl_coef": 0.0}, ["--kl_target", "--kl_coef", "above 0"]),
    ({"kl_target": 6.0, "kl_horizon": 25.0, "n_samples_per_prompt": 8}, ["= 128 samples", "--kl_horizon above a fifth of them (25.6)"]),
    ({"kl_coef": 0.0, "ref_model_name_or_path": "R"}, ["--ref_model_name_or_path R: not used", "--kl_coef above 0"]),
    ({"kl_coef": 0.0, "kl_estimator": "k3"}, ["--kl_estimator k3: not used", "--kl_coef above 0"]),
    ({"kl_coef": 0.0, "kl_in": "loss"}, ["--kl_in loss: not used", "--kl_coef above 0"]),
    ({"kl_horizon": 500.0}, ["--kl_horizon 500.0: not used", "--kl_target above 0"]),
    ({"eval_samples": 4}, ["--eval_samples 4", "--eval_temperature above 0"]),
])  # fmt: skip
def test_settings_that_would_be_ignored_or_cannot_work(settings, parts, capsys):
    good = {"rollout_batch_size": 16, "train_batch_size": 8}
    assert refusal_of(ppo, good, capsys) == ""
    message = refusal_of(ppo, {**good, **settings}, capsys)
    assert all(part in message for part in parts), message


# ---------------------------------------------------------------------------------------------- whole runs

REWARDING = """
import json, os

def reward(prompts, responses, weight, **columns):
    with open(os.environ["CALLS"], "a") as file:
        file.write("".join(json.dumps(call) + "\\n" for call in zip(prompts, responses, weight)))
    return [w * (len(text) % 5 - 2.0) for text, w in zip(responses, weight)]

def explosive(prompts, responses, weight, **columns):
    return [3e19 if w == 2 else 0.0 for w in weight]  # finite, but its square is not
"""
SHARED = dict(
    seed=3, rollout_batch_size=4, n_samples_per_prompt=2, generate_batch_size=3, score_batch_size=5, num_epochs_per_rollout=2, max_new_tokens=6,
    train_batch_size=4, micro_train_batch_size=2, max_epochs=1, max_length=60, learning_rate=3e-3, critic_learning_rate=2e-2, warmup_steps=2,
    adam_epsilon=1e-5, weight_decay=0.1, missing_eos_penalty=0.6, clip_range=0.15, gamma=0.95, gae_lambda=0.8,
)  # fmt: skip
# 7 prompts: rollouts of 4 and 3 prompts, 8 and 6 samples, 2 epochs of windows 4, 4 and of 4, 2: 8 updates a pass over the prompts.
WHOLE = {
    "kl in the reward": dict(SHARED, kl_coef=0.3, kl_estimator="k1", kl_in="reward", kl_target=2.0, kl_horizon=100.0, temperature=0.8, max_grad_norm=0.5,
                             vf_coef=0.4, clip_range_high=0.25, value_clip_range=0.2, reward_clip=2.5, normalize_reward=True, max_steps=10, ref="reference", scored="both"),
    "kl in the loss": dict(SHARED, kl_coef=0.2, kl_estimator="k3", kl_in="loss", temperature=1.3, max_grad_norm=0.0, vf_coef=0.1, dual_clip=1.1,
                             value_clip_range=0.0, gae_lambda=1.0, ref="model", scored="function"),
    # One epoch, so 2 windows of each rollout; the actor learns from the fifth update on, and its Adam has not counted those before.
    "critic first": dict(SHARED, num_epochs_per_rollout=1, critic_warmup_rollouts=2, max_steps=8, kl_coef=0.4, kl_estimator="k2", kl_in="loss", kl_target=0.5, kl_horizon=100.0,
                         ref="reference", scored="function"),
    "no reference": dict(SHARED, kl_coef=0.0, gae_lambda=1.0, max_steps=6, ref=None, scored="function"),
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    tiny_llama(
        folder / "model", attention_dropout=0.2, eos_token_id=1
    )  # what dropout would change, were it on
    tiny_llama(folder / "reference", initializer_range=0.2)
    sequence_classifier(folder / "reward", reward_mean=0.1, reward_std=0.7, attention_dropout=0.2)
    rows = [
        {"prompt": [{"role": "user", "content": "ab3" * (1 + 5 * row % 7)}], "weight": 1 + row % 3}
        for row in range(7)
    ]
    write_jsonl(folder / "prompts.jsonl", rows)
    (folder / "rewarding_of_test.py").write_text(REWARDING)
    # Random weights rarely end a response: a bias towards EOS, by an output row that points along the mean state, would change the model's
    # kind, so the stop tokens of its generation config are many.
    settings = json.loads((folder / "model/generation_config.json").read_text())
    (folder / "model/generation_config.json").write_text(
        json.dumps({**settings, "eos_token_id": STOPS})
    )
    return folder


def run(inputs, output, settings, *more, launcher=(), check=True):
    """A run of the recipe with these settings; `more` flags win over them."""
    settings = dict(settings)
    ref, scored = settings.pop("ref"), settings.pop("scored")
    flags = ["--ref_model_name_or_path", inputs / ref] if ref else []
    flags += ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "prompts.jsonl",
             "--output_dir", output, "--reward_function", "rewarding_of_test:reward"]  # fmt: skip
    flags += ["--reward_model_name_or_path", inputs / "reward"] * (scored == "both")
    flags += [part for name, value in settings.items() for part in (f"--{name}", value)]
    env = {"CALLS": str(inputs / f"{output.name}.calls")}
    return launch(list(launcher), recipe("ppo"), *flags, *more, cwd=inputs, env=env, check=check)


class Reference:
    """The same run in plain torch: every row alone, in whole forward passes; loops; one AdamW; the loss of a window at once."""

    def __init__(self, inputs, scored, ref, **settings):
        self.set, self.scored = types.SimpleNamespace(**{**vars(ppo.Args()), **settings}), scored
        self.tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
        load = lambda name, kind=AutoModelForCausalLM: kind.from_pretrained(inputs / name).eval()
        self.actor, self.reference, self.judge = (
            load("model"),
            load(ref or "model"),
            load("reward", AutoModelForSequenceClassification),
        )
        if scored == "both":
            self.critic = load("reward", AutoModelForSequenceClassification)
        else:
            self.critic = AutoModelForSequenceClassification.from_pretrained(
                inputs / "model", num_labels=1
            ).eval()
            generator = torch.Generator().manual_seed(self.set.seed)
            head = 0.1 * torch.randn(1, 32, generator=generator) / math.sqrt(33)
            self.critic.score.weight.data.copy_(head)
        self.rows = [
            json.loads(line) for line in (inputs / "prompts.jsonl").read_text().splitlines()
        ]
        groups = [
            {"params": [p for p in model.parameters() if (p.ndim > 1) == matrix], "lr0": rate, "weight_decay": self.set.weight_decay * matrix}
            for model, rate in ((self.actor, self.set.learning_rate), (self.critic, self.set.critic_learning_rate)) for matrix in (True, False)
        ]  # fmt: skip
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, eps=self.set.adam_epsilon)
        self.lines, self.rollouts, self.begins, self.kl_coef = [], [], [], self.set.kl_coef

    def read(self, prompt, response):
        """log-probs, the reference's, values and entropies of a response's tokens."""
        ids, start = torch.tensor([prompt + response]), len(prompt)
        found = []
        for model in (self.actor, self.reference):
            logps = (model(ids).logits[0, start - 1 : -1] / self.set.temperature).log_softmax(-1)
            found.append(logps.gather(1, ids[0, start:, None])[:, 0])
            if model is self.actor:
                entropy = -(logps.exp() * logps).sum(-1)
        states = self.critic.model(ids).last_hidden_state[0, start - 1 : -1]
        return *found, (states @ self.critic.score.weight[0]), entropy

    def score(self, row, prompt, response):
        text, s = self.tokenizer.decode(response, skip_special_tokens=True), self.set
        value = own_score = row["weight"] * (len(text) % 5 - 2.0)
        modelled = None
        if self.scored == "both":
            state = self.judge.model(torch.tensor([prompt + response])).last_hidden_state[0, -1]
            modelled = ((state @ self.judge.score.weight[0]).item() - 0.1) / 0.7
            value += modelled
        if s.reward_clip:
            value = min(max(value, -s.reward_clip), s.reward_clip)
        return value - (0 if response[-1] in STOPS else s.missing_eos_penalty), own_score, modelled

    def kl(self, logps, ref):
        d = logps - ref
        return {"k1": d, "k2": d * d / 2, "k3": (ref - logps).exp() - 1 - (ref - logps)}[
            self.set.kl_estimator
        ]

    @torch.no_grad()
    def roll_out(self, number):
        s, samples = self.set, []
        prompts = np.repeat(
            batches.rows_of_update(len(self.rows), s.rollout_batch_size, s.seed, number),
            s.n_samples_per_prompt,
        )
        uniforms = np.random.default_rng([s.seed, number, 1]).random(
            (len(prompts), s.max_new_tokens)
        )
        for row, numbers in zip(prompts, uniforms):
            text = self.tokenizer.apply_chat_template(
                self.rows[row]["prompt"], add_generation_prompt=True, tokenize=False
            )
            prompt = self.tokenizer(text).input_ids
            response, _ = alone(self.actor, prompt, numbers, s.temperature, STOPS, s.max_new_tokens)
            logps, ref, values, _ = self.read(prompt, response)
            score, own_score, modelled = self.score(self.rows[row], prompt, response)
            kl = self.kl(logps, ref)
            penalties = (
                (-self.kl_coef * kl).tolist() if s.kl_in == "reward" else [0.0] * len(response)
            )
            rewards = [*penalties[:-1], penalties[-1] + score]
            advantages, after, after_value = [], 0.0, 0.0
            for reward, value in zip(rewards[::-1], values.tolist()[::-1]):
                after = reward + s.gamma * after_value - value + s.gamma * s.gae_lambda * after
                advantages.insert(0, after)
                after_value = value
            samples.append(types.SimpleNamespace(
                prompt=prompt, response=response, logps=logps, ref=ref, values=values, score=score, own_score=own_score, modelled=modelled, kl=kl.sum().item(), penalty=sum(penalties),
                advantages=torch.tensor(advantages), returns=torch.tensor(advantages) + values,
            ))  # fmt: skip
        every = torch.cat([sample.advantages for sample in samples]).double().numpy()
        for sample in samples:
            sample.white = torch.tensor(
                (sample.advantages.double().numpy() - every.mean()) / every.std()
            ).float()
        mean = lambda value: float(np.mean([value(sample) for sample in samples]))
        returns, values = (
            np.concatenate([getattr(x, name) for x in samples]).astype(float)
            for name in ("returns", "values")
        )
        lengths = [len(x.response) for x in samples]
        line = {
            "objective/entropy": mean(lambda x: -x.logps.sum().item()),
            "objective/scores": mean(lambda x: x.score), "objective/non_score_reward": mean(lambda x: x.penalty),
            "objective/rlhf_reward": mean(lambda x: x.score + x.penalty), "objective/kl_coef": self.kl_coef,
            "val/explained_variance": 1 - np.var(returns - values) / np.var(returns), "val/returns_avg": returns.mean(),
            "responses/min_length": min(lengths), "responses/max_length": max(lengths),
            "rewards/reward/mean": mean(lambda x: x.own_score), "responses/length": mean(lambda x: len(x.response)), "responses/eos_rate": mean(lambda x: x.response[-1] in STOPS),
        }  # fmt: skip
        if s.kl_coef:
            line["objective/kl"] = mean(lambda x: x.kl)
        if self.scored == "both":
            line["rewards/reward_model/mean"] = mean(lambda x: x.modelled)
        return samples, line

    def update(self, window, kl_coef, learns, total_steps):
        s, step, tokens, each = self.set, len(self.lines), sum(len(x.response) for x in window), []
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr0"] * (
                step / s.warmup_steps
                if step < s.warmup_steps
                else (total_steps - step) / (total_steps - s.warmup_steps)
            )
        for group in [] if learns else self.optimizer.param_groups[:2]:  # the actor's
            group["lr"] = 0.0
        high = s.clip_range if s.clip_range_high is None else s.clip_range_high
        for x in window:
            logps, _, values, entropy = self.read(x.prompt, x.response)
            ratio, a = (logps - x.logps).exp(), x.white
            gain = torch.where(
                a > 0, ratio.clamp(max=1 + high) * a, ratio.clamp(min=1 - s.clip_range) * a
            )
            clipped = torch.where(a > 0, ratio > 1 + high, ratio < 1 - s.clip_range)
            if s.dual_clip:
                clipped = clipped | ((a < 0) & (ratio > s.dual_clip))
                gain = torch.where(a < 0, torch.maximum(gain, s.dual_clip * a), gain)
            errors, near = (values - x.returns) ** 2, torch.zeros_like(values)
            if s.value_clip_range:
                near = (
                    x.values
                    + (values - x.values).clamp(-s.value_clip_range, s.value_clip_range)
                    - x.returns
                ) ** 2
            value_loss = 0.5 * torch.maximum(errors, near)
            actor_loss = -gain + (kl_coef * self.kl(logps, x.ref) if s.kl_in == "loss" else 0.0)
            loss = s.vf_coef * value_loss + (actor_loss if learns else 0.0)
            each.append({
                "loss": loss, "loss/policy_avg": -gain, "loss/value_avg": value_loss, "policy/approxkl_avg": (logps - x.logps) ** 2 / 2,
                "policy/clipfrac_avg": clipped.float(), "policy/entropy_avg": entropy, "val/clipfrac_avg": (near > errors).float(), "val/ratio": ratio,
            })  # fmt: skip
        sums = {name: sum(part[name].sum() for part in each) / tokens for name in each[0]}
        self.optimizer.zero_grad()
        sums["loss"].backward()
        parameters = [*self.actor.parameters(), *self.critic.parameters()]
        norm = math.sqrt(sum((p.grad**2).sum().item() for p in parameters if p.grad is not None))
        if s.max_grad_norm and norm > s.max_grad_norm:
            for p in parameters:
                p.grad = None if p.grad is None else p.grad * (s.max_grad_norm / norm)
        self.optimizer.step()
        rates = {
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "critic_learning_rate": self.optimizer.param_groups[2]["lr"],
        }
        self.lines.append(
            {
                "global_step": step + 1,
                **{name: value.item() for name, value in sums.items()},
                "grad_norm": norm,
                **rates,
            }
        )

    def go(self):
        s = self.set
        per_pass = math.ceil(len(self.rows) / s.rollout_batch_size)
        n_prompts = [
            len(batches.rows_of_update(len(self.rows), s.rollout_batch_size, s.seed, i))
            for i in range(per_pass)
        ]
        windows = [
            math.ceil(n * s.n_samples_per_prompt / s.train_batch_size) * s.num_epochs_per_rollout
            for n in n_prompts
        ]
        total_steps, samples_seen, tokens_seen = s.max_steps or s.max_epochs * sum(windows), 0, 0
        while len(self.lines) < total_steps:
            number = len(self.rollouts)
            samples, line = self.roll_out(number)
            self.rollouts.append(samples)
            self.begins.append(len(self.lines) + 1)
            coefficient, order, of_rollout = self.kl_coef, [], windows[number % per_pass]
            for index in range(min(of_rollout, total_steps - len(self.lines))):
                rows = batches.rows_of_update(
                    len(samples), s.train_batch_size, (s.seed, number, 2), index
                )
                order.append(sorted(rows.tolist()))
                self.update(
                    [samples[row] for row in rows],
                    coefficient,
                    number >= s.critic_warmup_rollouts,
                    total_steps,
                )
                samples_seen += len(rows)
                tokens_seen += sum(
                    len(samples[row].prompt) + len(samples[row].response) for row in rows
                )
                counted = {
                    "samples": samples_seen,
                    "tokens": tokens_seen,
                    "skipped_steps": 0,
                    "epoch": len(self.lines) / sum(windows),
                }
                self.lines[-1] |= counted | (line if index == 0 else {})
            if (
                len(order) == of_rollout > 2
            ):  # each epoch takes every sample once, and in other minibatches
                first, second = order[: of_rollout // 2], order[of_rollout // 2 :]
                assert (
                    sorted(itertools.chain(*first))
                    == sorted(itertools.chain(*second))
                    == list(range(len(samples)))
                )
                assert first != second or number  # of so few samples chance can repeat them
            if s.kl_target and number >= s.critic_warmup_rollouts:
                error = min(max(line["objective/kl"] / s.kl_target - 1, -0.2), 0.2)
                self.kl_coef *= 1 + error * len(samples) / s.kl_horizon
        return self


@pytest.fixture(scope="module")
def reference(inputs):
    """`name -> the finished Reference` of a run of WHOLE."""
    return functools.cache(lambda name: Reference(inputs, **WHOLE[name]).go())


@pytest.fixture(scope="module")
def finished(inputs):
    """`(name, launcher) -> folder and console` of a run of WHOLE, with checkpoints."""

    @functools.cache
    def done(name, launcher):
        output = inputs / f"{name} {launcher}".replace(" ", "_")
        saving = "--save_steps", 3, "--save_total_limit", 0
        micro = (
            ("--generate_batch_size", 2, "--score_batch_size", 3) if launcher == "ddp" else ()
        )  # several each, of 6 samples fillers too
        return output, run(
            inputs, output, WHOLE[name], *saving, *micro, launcher=LAUNCHERS[launcher]
        ).stdout

    return done


@pytest.fixture(
    scope="module",
    params=[
        ("kl in the reward", "plain"),
        ("kl in the reward", "ddp"),
        ("kl in the loss", "plain"),
        ("no reference", "plain"),
    ],
    ids=" ".join,
)
def whole(request, finished, reference):
    return *finished(*request.param), reference(request.param[0])


SAMPLER_DIFFERENCES = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
)


def expect_lines(output, reference):
    """Every line of a run, its tags and their values."""
    found = timeless(output)
    assert len(found) == len(reference.lines)
    for line, expected in zip(found, reference.lines):
        # One row at a time, the reference always rounds alike.
        for name in ("val/max_rounding", *SAMPLER_DIFFERENCES):
            assert line.pop(name, 0.0) < 1e-5
        assert line.keys() == expected.keys()
        for key in line:
            assert line[key] == pytest.approx(expected[key], rel=1e-4, abs=2e-6), (
                line["global_step"],
                key,
            )


def test_every_logged_number_of_a_run(whole):
    output, console, reference = whole
    assert (
        "4 prompts x 2 responses = 8 samples, x 2 / train_batch_size = 4 updates of up to 4 samples; 2 rollouts per epoch"
        in console
    )
    assert f"the last of 3 prompts, 4 updates; {len(reference.lines)} updates in all" in console
    expect_lines(output, reference)
    # The run is one in which everything happens.
    column = lambda key: [line[key] for line in lines(output) if key in line]
    assert max(column("policy/clipfrac_avg")) > 0 and max(column("policy/approxkl_avg")) > 1e-3
    assert 0 < min(column("responses/eos_rate")) < 1
    if reference.set.kl_coef:
        assert abs(column("objective/kl")[-1]) > 0.01
    for line in lines(output):
        if line["global_step"] in reference.begins:  # bit for bit: the actor has not moved
            assert (line["val/ratio"], line["policy/approxkl_avg"]) == (1, 0)
            assert "val/max_rounding" in line
            # The sampler cuts its batches differently, so it rounds differently.
            mean, largest = (line[name] for name in SAMPLER_DIFFERENCES)
            assert 0 <= mean <= largest < 1e-5
    assert min(column("responses/min_length")) < max(column("responses/max_length"))
    if reference.set.kl_target:  # a pass over the prompts and the beginning of the next
        assert (
            max(column("val/clipfrac_avg")) > 0
            and len(set(column("objective/kl_coef"))) == 3
            and min(column("grad_norm")) > 0.5
        )
        assert column("epoch")[-1] == 1.25 and [
            line["global_step"] for line in lines(output) if "objective/kl" in line
        ] == [1, 5, 9]


def carried_by(output, step: int):
    """What the recipe itself carries in a checkpoint."""
    file = output / f"checkpoints/global_step_{step:06d}/rollout.pt"
    of_recipe = [(ppo.PPOState, "__main__.PPOState"), (ppo.PPORollout, "__main__.PPORollout")]
    with torch.serialization.safe_globals(of_recipe):
        return torch.load(file, weights_only=True)


def test_the_weights_of_actor_and_critic_after_a_run(whole):
    output, _, reference = whole
    last = f"checkpoints/global_step_{len(reference.lines):06d}"
    saved = load_file(output / last / "engine/model.safetensors")
    for prefix, model in (("model.", reference.actor), ("critic.model.", reference.critic)):
        parts = dict(model.named_parameters())
        one = torch.cat([parts[name].detach().flatten() for name in sorted(parts)])
        other = torch.cat([saved[prefix + name].flatten() for name in sorted(parts)])
        assert (one - other).norm() <= 1e-5 * one.norm()
    assert torch.equal(weights(output), weights(output, f"{last}/actor"))


def test_the_critic_is_taken_out_of_a_checkpoint(whole, tmp_path, monkeypatch, tokenizer):
    """As a sequence classifier that anyone can load, and that begins the critic of another run."""
    output, _, reference = whole
    checkpoint_folder = output / f"checkpoints/global_step_{len(reference.lines):06d}"
    monkeypatch.setattr(
        "sys.argv", ["export", str(checkpoint_folder), str(tmp_path / "critic"), "--critic"]
    )
    export.main()
    found, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "critic", output_loading_info=True
    )
    assert found.config.num_labels == 1 and not info["missing_keys"] and not info["unexpected_keys"]
    saved = load_file(checkpoint_folder / "engine/model.safetensors")
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, saved[f"critic.model.{name}"])
    assert score_model(str(tmp_path / "critic"), tokenizer, LOADING).config.pad_token_id == 0
    sample = reference.rollouts[0][0]
    ids = torch.tensor([sample.prompt + sample.response])
    with torch.no_grad():
        for model in (found.eval(), reference.critic):
            states = model.model(ids).last_hidden_state @ model.score.weight[0]
            torch.testing.assert_close(model(ids).logits[:, 0], states[:, -1])
        torch.testing.assert_close(
            found(ids).logits, reference.critic(ids).logits, rtol=1e-4, atol=1e-4
        )


def test_evaluation_by_sampling(inputs):
    """Each prompt's responses are drawn by numbers that are the same in every evaluation."""
    k, room, temperature = 4, 5, 1.4
    model = AutoModelForCausalLM.from_pretrained(inputs / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    uniforms = np.random.default_rng([3, 0, 3]).random((3 * k, room))
    texts = []
    for row in range(3 * k):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": "ab" * (1 + row // k)}],
            add_generation_prompt=True,
            return_dict=False,
        )
        response, _ = alone(model, ids, uniforms[row], temperature, STOPS, room)
        texts.append(tokenizer.decode(response, skip_special_tokens=True))
    assert len(set(texts)) > 3
    # One of the four responses to the first prompt is right, none to the second; the third has no answer.
    rows = [
        {"prompt": [{"role": "user", "content": "ab" * (1 + row)}], "answer": answer, "weight": 1}
        for row, answer in enumerate([texts[2], "never said", ""])
    ]
    right = [answers.is_right(text, texts[2]) for text in texts[:k]]
    settings = {
        **WHOLE["no reference"],
        "max_steps": 2,
        "learning_rate": 0,
        "critic_learning_rate": 0,
        "max_new_tokens": room,
    }
    output = inputs / "sampled_evaluation"
    more = ["--eval_dataset_name", write_jsonl(inputs / "eval.jsonl", rows)]
    run(inputs, output, settings, *more, "--eval_temperature", temperature, "--eval_samples", k)
    first, last = [line for line in timeless(output) if "eval/scores" in line]
    assert first["eval/avg_at_4"] == sum(right) / k / 2 > 0 and first["eval/pass_at_4"] == 0.5
    assert first["eval/scores"] == pytest.approx(
        np.mean([len(text) % 5 - 2.0 for text in texts]) - 0.6 * (1 - first["eval/eos_rate"])
    )
    assert first["eval/rewards/reward/mean"] == pytest.approx(
        np.mean([len(text) % 5 - 2.0 for text in texts])
    )
    assert "eval/exact_match" not in first
    assert last == {
        **first,
        "global_step": 2,
    }  # nothing was learned: the same draws, the same values


def test_the_end_of_a_polynomial_schedule_is_that_of_the_actors_rate(inputs):
    """transformers takes it as 1e-7, by the optimizer's own rate; the critic's ends in proportion."""
    output, settings = (
        inputs / "polynomial",
        {**WHOLE["kl in the loss"], "warmup_steps": 0, "max_steps": 2},
    )
    run(inputs, output, settings, "--lr_scheduler_type", "polynomial")
    half = (3e-3 - 1e-7) / 2 + 1e-7
    assert [line["learning_rate"] for line in lines(output)] == pytest.approx(
        [3e-3, half], rel=1e-6
    )
    assert [line["critic_learning_rate"] for line in lines(output)] == pytest.approx(
        [2e-2, half * 2e-2 / 3e-3], rel=1e-6
    )


def test_resumed_in_the_middle_of_a_rollout(finished, inputs):
    """From the third of the four updates of the first rollout: what is left of it, and an adapted coefficient after it."""
    (whole, _), output = finished("kl in the reward", "plain"), inputs / "resumed"
    shutil.copytree(whole, output)
    shutil.rmtree(output / "actor")
    for step in (6, 9, 10):
        shutil.rmtree(output / f"checkpoints/global_step_{step:06d}")
    again = ["--save_steps", 3, "--save_total_limit", 0, "--resume", "auto"]
    result = run(
        inputs, output, WHOLE["kl in the reward"], *again, "--max_new_tokens", 5, check=False
    )
    # Other draws would follow.
    assert result.returncode and "max_new_tokens: 6 in the checkpoint, 5 now" in result.stdout
    result = run(inputs, output, WHOLE["kl in the reward"], *again)
    assert "global_step_000003: 3 updates, 0 skipped" in result.stdout
    assert timeless(output) == timeless(whole)
    for folder in (
        "actor",
        "checkpoints/global_step_000006/actor",
        "checkpoints/global_step_000010/actor",
    ):
        assert torch.equal(weights(output, folder), weights(whole, folder))
    engines = [
        load_file(run / "checkpoints/global_step_000010/engine/model.safetensors")
        for run in (output, whole)
    ]
    assert engines[0].keys() == engines[1].keys() and all(
        torch.equal(engines[0][name], engines[1][name]) for name in engines[0]
    )
    one, two = (carried_by(folder, 9) for folder in (output, whole))
    assert one.kl_coef == two.kl_coef != one.rollout.kl_coef != WHOLE["kl in the reward"]["kl_coef"]
    calls = lambda name: (inputs / f"{name}.calls").read_text().splitlines()
    assert calls(output.name) == calls(whole.name)[8:]  # the first rollout is not scored again


def test_the_critic_learns_before_the_actor(reference, inputs):
    output, settings = inputs / "critic_first", WHOLE["critic first"]
    assert settings["weight_decay"] > 0  # which must move nothing, either
    run(inputs, output, settings, "--save_actor_steps", 1)
    expect_lines(output, reference("critic first"))
    moved = [
        not torch.equal(weights(inputs, "model"), weights(output, f"actors/global_step_{step:06d}"))
        for step in range(1, 9)
    ]
    learns = [False] * 4 + [True] * 4
    assert moved == learns and torch.equal(
        weights(output), weights(output, "actors/global_step_000008")
    )
    assert [line["learning_rate"] > 0 for line in lines(output)] == learns
    assert [line["critic_learning_rate"] > 0 for line in lines(output)] == [False] + [
        True
    ] * 7  # the first is warm-up's own zero


def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_rows(inputs):
    """The scores of one prompt overflow in the value loss: its rows are named, no other."""
    output, settings = inputs / "overflow", WHOLE["kl in the loss"]
    prompts = np.repeat(batches.rows_of_update(7, 4, settings["seed"], 0), 2)
    windows = [batches.rows_of_update(8, 4, (settings["seed"], 0, 2), index) for index in (0, 1)]
    bad = [
        [row for row in window if prompts[row] == 1] for window in windows
    ]  # weight 2: of this rollout the second data row alone
    step = next(i for i, rows in enumerate(bad, 1) if rows)
    more = ["--reward_function", "rewarding_of_test:explosive", "--micro_train_batch_size", 4]
    result = run(inputs, output, settings, *more, check=False)
    named = ["2"] * len(bad[step - 1])
    assert result.returncode and not (output / "actor").exists()
    assert (
        f"update {step} (updates_seen {step - 1}) is not finite, because of data rows {', '.join(named)}. Nothing was"
        in result.stdout
    )
    assert "Not finite: the loss. " in result.stdout
    assert [line["global_step"] for line in lines(output)] == [*range(1, step)] == [1]
