"""Each file of forks/ computes what its paper says, or what a peer does."""

import contextlib
import json
import math
import types

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from bare_runs import bare_sampler
from peers import trl_grpo
from preference_recipes.data import chat
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.rollouts.samples import Samples
from runs import ASSETS, say
from test_grpo_values import advantages, args_of, load_fork, losses_of, means_of


def dppo_of_verl(loss_type: str, logp: float, sampler: float, advantage: float) -> float:
    """The derivative of a token's loss by its log-prob, as in verl's `compute_policy_loss_dppo_*`."""
    p, q = math.exp(logp), math.exp(sampler)
    log_ratio = min(max(logp - sampler, -20.0), 20.0)
    if loss_type == "dppo_tv":
        is_valid = p - q <= 0.1 if advantage > 0 else p - q >= -0.05
    else:
        kl = -q * log_ratio + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        is_valid = (kl <= 0.1 or p <= q) if advantage > 0 else (kl <= 0.05 or p >= q)
    return -min(math.exp(log_ratio), 20.0) * advantage * is_valid


@pytest.mark.parametrize("loss_type", ["dppo_tv", "dppo_kl"])
def test_the_losses_of_dppo_are_those_of_verl(loss_type):
    """At random, and at corners: a tiny probability tenfold, one of nearly 1, an advantage of 0."""
    draw = torch.Generator().manual_seed(1)
    p, q, old = torch.rand(3, 60, 5, generator=draw, dtype=torch.float64)
    p[0] = torch.tensor([1e-4, 1e-12, 0.999999, 0.5, 0.3])
    q[0] = torch.tensor([1e-5, 0.9, 0.2, 0.5, 0.31])
    signed = torch.randn(60, generator=draw, dtype=torch.float64)
    signed[0], signed[1] = 1.0, 0.0
    given = dict(loss_mask=p > 0, advantages=signed, logps=p.log(), ref_logps=p.log())
    given |= dict(old_logps=old.log(), sampler_logps=q.log())
    settings = dict(loss_type=loss_type, average="token", ratio="token", kl_coef=0.0)
    settings |= dict(clip_range=0.05, clip_range_high=0.1)
    args = args_of("sequence_mask", **settings)
    logps, losses, weights, logged = losses_of(given, args, load_fork("dppo"))
    (gradient,) = torch.autograd.grad((losses * weights).sum(), logps)
    tokens = zip(logps.flatten(), q.log().flatten(), signed.repeat_interleave(5))
    expected = [dppo_of_verl(loss_type, *(each.item() for each in token)) for token in tokens]
    expected = torch.tensor(expected, dtype=torch.float64).view_as(p)
    assert torch.allclose(gradient, expected, atol=1e-9)
    assert torch.allclose(losses, (expected * logps).mean(1), atol=1e-9)
    # Ten times as likely and still allowed: its ratio of 10 is beyond any range of clipping.
    assert gradient[0, 0].item() == pytest.approx(-10)
    means = means_of(logged, len(losses))
    for name, is_side in (("low", signed < 0), ("high", signed > 0)):
        share = ((expected == 0) & is_side[:, None]).double().mean().item()
        assert means[f"clip_ratio/{name}_mean"] == pytest.approx(share) and share > 0.05
    assert not any(name.startswith("sampling") for name in means)


def test_advantages_of_maxrl():
    scores = torch.tensor([0.0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0.5, 0.25, 0.25, 1])
    found = advantages(scores, 4, "group", "mean", module=load_fork("maxrl"))
    assert found == pytest.approx([-1, 3, -1, -1, *[0] * 8, 0, -0.5, -0.5, 1])


def test_responses_that_became_unlikely_by_hand():
    """Bad ones whose mean loss of log-prob is above 0.5, over the tokens that count."""
    lost = torch.tensor([[0.9, 0.2, 9], [0.9, 0.0, 9], [0.9, 0.2, 9]])
    mask, signed = torch.tensor([[1.0, 1, 0]] * 3), torch.tensor([[-1.0], [-1], [1]])
    fork = load_fork("off_policy")
    found = fork.is_off_policy(-1 - lost, -torch.ones(3, 3), mask, signed, limit=0.5)
    assert found.tolist() == [[True], [False], [False]]


def test_each_reward_is_normalised_in_its_group_before_they_are_added():
    """arXiv:2601.05242. A reward of 100 does not drown one of 0.1, and equal ones add nothing."""
    parts = {
        "large": torch.tensor([100.0, 0.0, 0.0, 100.0, 5.0, 5.0, 5.0, 5.0]),
        "small": torch.tensor([0.1, 0.1, 0.0, 0.0, 0.3, 0.1, math.nan, 0.2]),
    }
    fork = load_fork("gdpo")
    found = fork.scale_each(parts, {"large": 1.0, "small": 2.0}, group_size=4)
    expected = []
    for first in (0, 4):
        total = np.zeros(4)
        for name, weight in (("large", 1.0), ("small", 2.0)):
            rewards = parts[name][first : first + 4].double().numpy()
            spread = np.nanstd(rewards, ddof=1)
            if spread > 0:
                scaled = (rewards - np.nanmean(rewards)) / (spread + fork.EPSILON)
                total += weight * np.nan_to_num(scaled)
        expected += total.tolist()
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert found[6] == 0


def test_length_normalised_dpo_is_that_of_trl():
    """TRL's `sigmoid_norm` as it is written there: summed log-ratios over the lengths of the answers."""
    fork = load_fork("dpo_norm")
    draw = torch.Generator().manual_seed(3)
    chosen, rejected = 3 * torch.randn(2, 20, generator=draw, dtype=torch.float64)
    lengths = torch.randint(1, 30, (2, 20), generator=draw)
    delta = chosen / lengths[0] - rejected / lengths[1]
    for smoothing in (0.0, 0.1):
        found = fork.preference_loss(chosen, rejected, *lengths, 5.0, "sigmoid_norm", smoothing)
        right, wrong = (1 + (-5 * delta).exp()).log(), (1 + (5 * delta).exp()).log()
        assert torch.allclose(found, (1 - smoothing) * right + smoothing * wrong, atol=1e-12)
    same = fork.preference_loss(chosen, rejected, *lengths, 5.0, "sigmoid")
    assert torch.allclose(same, (1 + (-5 * (chosen - rejected)).exp()).log(), atol=1e-12)


def test_prompts_are_drawn_the_more_often_the_less_they_were_solved():
    fork = load_fork("curriculum")
    state = fork.CurriculumState(solved=torch.zeros(4), tried=torch.zeros(4))
    state.note(np.array([2, 0]), torch.tensor([[1, 1, 0], [0, 0, 0]]) > 0)
    state.note(np.array([2, 1]), torch.tensor([[1, 1, 1], [1, 1, 1]]) > 0)
    # 0 of 3, 3 of 3, 5 of 6, none tried, with half a success and half a failure before.
    chances = [3.5 / 4, 0.5 / 4, 1.5 / 7, 0.5]
    assert state.chances().tolist() == pytest.approx(chances)

    args = types.SimpleNamespace(seed=1)
    sampler = types.SimpleNamespace(args=args, data=types.SimpleNamespace(train=np.arange(4)))
    first = np.zeros(4)
    for _ in range(5_000):
        state.prompts_taken += 4 - state.prompts_taken % 4  # a new epoch
        _, numbers = state.draw_prompts(sampler, 3)
        assert len(set(numbers)) == 3
        first[numbers[0]] += 1
        assert len(state.draw_prompts(sampler, 3)[1]) == 1  # to the end of the epoch
    assert first / 5_000 == pytest.approx(np.array(chances) / sum(chances), abs=0.02)


def test_the_advantage_of_a_token_is_what_the_better_answer_changes(accelerator, tokenizer):
    """SDPO: the log-probs after both prompts by plain transformers, a row at a time."""
    fork = load_fork("sdpo")
    model = LlamaForCausalLM.from_pretrained(ASSETS / "model", dtype=torch.float64).eval()
    sampler = bare_sampler(accelerator, tokenizer, model)
    sampler.model = sampler.unwrapped = LogProbModel(model)
    rows = [{"prompt": say("user", text)} for text in ("1+2=", "30+4=")]
    prompts = [chat.encode_prompt(tokenizer, row["prompt"]).ids for row in rows]
    responses = [[*tokenizer(text).input_ids, 1] for text in ("3", "45", "34", "4")]
    samples = Samples(
        prompts=[prompts[0]] * 2 + [prompts[1]] * 2,
        responses=responses,
        row_json=[json.dumps(rows[number // 2]) for number in range(4)],
        row_numbers=[1, 1, 2, 2],
        ended=torch.ones(4) > 0,
        per_prompt=2,
        sampler_logps=[[0.0] * len(ids) for ids in responses],
    )
    scores = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    taught, has_teacher = fork.as_taught(samples, scores, sampler)
    # Neither of two equal ones is better.
    assert has_teacher.tolist() == [False, True, False, False]
    asked = say("user", "1+2=" + fork.DEMONSTRATION.format("3"))
    assert taught.prompts[1] == chat.encode_prompt(tokenizer, asked).ids
    assert [taught.prompts[row] for row in (0, 2, 3)] == [samples.prompts[row] for row in (0, 2, 3)]

    settings = dict(mask_truncated=False, baseline="group", advantage_std="none")
    settings |= dict(num_epochs_per_rollout=1, train_batch_size=4, drop_equal_groups=False)
    args = fork.Args(sdpo_weight=0.25, n_samples_per_prompt=2, **settings)
    run = types.SimpleNamespace(
        args=args, global_step=0, timed=lambda name: contextlib.nullcontext()
    )
    sampler.sample_rollout = lambda *_: samples
    grader = types.SimpleNamespace(score=lambda *_: types.SimpleNamespace(total=scores.flatten()))
    fork.make_rollout.__globals__["log_rollout"] = lambda *_: None
    state = types.SimpleNamespace(take_prompts=lambda *_: None)
    made = fork.make_rollout(run, sampler, grader, None, state, average=None)

    def logp(prompt, response):
        ids = torch.tensor([prompt + response])
        logits = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return logits.gather(1, torch.tensor(response)[:, None])[:, 0]

    found = made.experience["advantages"]
    gain = logp(taught.prompts[1], responses[1]) - logp(prompts[0], responses[1])
    expected = (0.75 * -0.5 + 0.25 * gain).tolist()
    assert found[1, : len(responses[1])].tolist() == pytest.approx(expected, abs=1e-5)
    assert found[0].tolist() == [0.375] * found.shape[1] and found[2:].eq(0).all()


def test_what_the_environment_says_is_learned_by_cross_entropy():
    """ECHO: of all tokens that the policy did not draw, and of no other."""
    fork = load_fork("echo")
    given = trl_grpo.tensors()
    is_drawn = given["loss_mask"] & (torch.arange(given["loss_mask"].shape[1]) % 3 != 1)
    args = args_of(loss_type="clip", average="token", ratio="token", kl_coef=0.0, echo_coef=0.1)
    logps, _, _, logged = losses_of(
        {**given, "loss_mask": is_drawn}, args, fork, batch={"loss_mask": given["loss_mask"]}
    )
    means = means_of(logged, len(logps))
    said = given["loss_mask"] & ~is_drawn
    assert said.sum() > 5
    assert means["echo/loss"] == pytest.approx(-logps[said].mean().item(), abs=1e-12)
    expected = losses_of({**given, "loss_mask": is_drawn}, args)[3]["loss"][0]
    assert torch.equal(logged["loss"][0], expected)
