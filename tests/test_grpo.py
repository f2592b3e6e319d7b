"""Whole runs of recipes/grpo.py against a plain reference; what a rollout leaves out; what is refused."""

import json
import math
import runpy
import types

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import batches
from runs import (
    launch,
    recipe,
    tiny_llama,
    training_lines,
    weights,
    without_timings,
    write_jsonl,
)
from test_ppo import STOPS, alone

grpo = types.SimpleNamespace(**runpy.run_path(str(recipe("grpo"))))

REWARDING = """
def length(prompts, responses, response_ids, **columns):
    return [float(len(ids) // 2) for ids in response_ids]

def vowels(prompts, responses, weight, **columns):
    return [None if w == 2 else w * sum(c in "aeiouAEIOU" for c in text) for w, text in zip(weight, responses)]

def same(prompts, responses, **columns):
    return [1.0] * len(responses)
"""
SHARED = dict(
    seed=3, rollout_batch_size=4, n_samples_per_prompt=3, generate_batch_size=5, score_batch_size=5, max_new_tokens=6, train_batch_size=4,
    micro_train_batch_size=2, max_length=60, learning_rate=3e-3, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5,
)  # fmt: skip
# 7 prompts: 4 and 3 an epoch, 12 and 9 samples.
WHOLE = {
    "defaults": dict(SHARED, max_epochs=2),
    "two passes, kl, length": dict(SHARED, num_epochs_per_rollout=2, advantage_std="group", average="sequence", kl_coef=0.3, temperature=0.8, overlong_buffer=3,
                                   overlong_penalty=0.4, max_steps=9),
    "refilled": dict(SHARED, rollout_batch_size=2, train_batch_size=3, micro_train_batch_size=3, refill_rounds=2, loss_type="cispo", average="constant", max_epochs=2, mask_truncated=True),
    "no baseline": dict(SHARED, baseline="none", advantage_std="none", ratio="sequence", kl_coef=0.2, kl_estimator="k2", max_epochs=1, drop_equal_groups=False, clip_range_high=0.01),
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo")
    tiny_llama(folder / "model", attention_dropout=0.2, eos_token_id=1)
    settings = json.loads((folder / "model/generation_config.json").read_text())
    # Random weights rarely end a response: more tokens do.
    (folder / "model/generation_config.json").write_text(
        json.dumps({**settings, "eos_token_id": STOPS})
    )
    rows = [
        {"prompt": [{"role": "user", "content": "ab3" * (1 + 5 * row % 7)}], "weight": 1 + row % 3}
        for row in range(7)
    ]
    write_jsonl(folder / "prompts.jsonl", rows)
    (folder / "rewarding_of_test.py").write_text(REWARDING)
    return folder


def run(inputs, output, settings, *more, launcher=(), check=True):
    flags = ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / "prompts.jsonl", "--output_dir", output]  # fmt: skip
    if "--reward_function" not in more:
        flags += [
            "--reward_function",
            "rewarding_of_test:length",
            "rewarding_of_test:vowels",
            "--reward_weights",
            1,
            0.5,
        ]
    flags += [part for name, value in settings.items() for part in (f"--{name}", value)]
    return launch(list(launcher), recipe("grpo"), *flags, *more, cwd=inputs, check=check)


class Reference:
    """The same run in plain torch: every row alone, in whole forward passes; loops; the loss of an update at once."""

    def __init__(self, inputs, **settings):
        self.set = types.SimpleNamespace(**{**vars(grpo.Args()), **settings})
        self.tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
        self.policy = AutoModelForCausalLM.from_pretrained(inputs / "model").eval()
        self.reference = AutoModelForCausalLM.from_pretrained(inputs / "model").eval()
        self.rows = [
            json.loads(line) for line in (inputs / "prompts.jsonl").read_text().splitlines()
        ]
        groups = [
            {"params": [p for p in self.policy.parameters() if (p.ndim > 1) == matrix], "weight_decay": self.set.weight_decay * matrix}
            for matrix in (True, False)
        ]  # fmt: skip
        self.optimizer = torch.optim.AdamW(groups, lr=0.0)
        self.lines, self.prompts_seen, self.rollouts_seen = [], 0, 0

    def read(self, model, prompt, response):
        ids, start = torch.tensor([prompt + response]), len(prompt)
        logps = (model(ids).logits[0, start - 1 : -1] / self.set.temperature).log_softmax(-1)
        return logps.gather(1, ids[0, start:, None])[:, 0], -(logps.exp() * logps).sum(-1)

    def score(self, row, response):
        text = self.tokenizer.decode(response, skip_special_tokens=True)
        weight = self.rows[row]["weight"]
        parts = {
            "length": float(len(response) // 2),
            "vowels": None if weight == 2 else float(weight * sum(c in "aeiouAEIOU" for c in text)),
        }
        total = parts["length"] + 0.5 * (parts["vowels"] or 0.0)
        if self.set.overlong_buffer:
            beyond = len(response) - (self.set.max_new_tokens - self.set.overlong_buffer)
            total -= self.set.overlong_penalty * max(beyond, 0) / self.set.overlong_buffer
        return total, parts

    @torch.no_grad()
    def sample_round(self, prompts, round_number):
        s, groups = self.set, []
        draws = np.random.default_rng([s.seed, self.rollouts_seen, 1, round_number])
        uniforms = draws.random((len(prompts), s.n_samples_per_prompt, s.max_new_tokens))
        for row, of_prompt in zip(prompts, uniforms):
            text = self.tokenizer.apply_chat_template(
                self.rows[row]["prompt"], add_generation_prompt=True, tokenize=False
            )
            prompt = self.tokenizer(text).input_ids
            group = []
            for numbers in of_prompt:
                response, _ = alone(
                    self.policy, prompt, numbers, s.temperature, STOPS, s.max_new_tokens
                )
                score, parts = self.score(row, response)
                group.append(types.SimpleNamespace(
                    prompt=prompt, response=response, score=score, parts=parts, ended=response[-1] in STOPS,
                    old=self.read(self.policy, prompt, response)[0], ref=self.read(self.reference, prompt, response)[0],
                ))  # fmt: skip
            groups.append(group)
        return groups

    def roll_out(self):
        """Groups to learn from, and the line of all that were sampled."""
        s, kept, sampled = self.set, [], []
        n = len(self.rows)
        for round_number in range(1 + s.refill_rounds):
            epoch, place = divmod(self.prompts_seen, n)
            order = np.random.default_rng([s.seed, epoch]).permutation(n)
            prompts = order[place : place + s.rollout_batch_size - len(kept)]
            self.prompts_seen += len(prompts)
            groups = self.sample_round(prompts, round_number)
            sampled += groups
            for group in groups:
                differs = len({sample.score for sample in group}) > 1
                if differs or not s.drop_equal_groups:
                    kept.append(group)
            if len(kept) == s.rollout_batch_size or self.prompts_seen % n == 0:
                break
        flat = [sample for group in sampled for sample in group]
        lengths = [len(sample.response) for sample in flat]
        equal = [len({sample.score for sample in group}) == 1 for group in sampled]
        line = {
            "reward": np.mean([sample.score for sample in flat]),
            "reward_std": np.mean([np.std([sample.score for sample in group], ddof=1) for group in sampled]),
            "frac_reward_zero_std": np.mean(equal), "frac_groups_dropped": 1 - len(kept) / len(sampled),
            "rewards/length/mean": np.mean([sample.parts["length"] for sample in flat]),
            "completions/mean_length": np.mean(lengths), "completions/min_length": min(lengths), "completions/max_length": max(lengths),
            "completions/clipped_ratio": np.mean([not sample.ended for sample in flat]),
        }  # fmt: skip
        vowels = [sample.parts["vowels"] for sample in flat if sample.parts["vowels"] is not None]
        if vowels:
            line["rewards/vowels/mean"] = np.mean(vowels)
        return kept, line

    def advantages(self, groups):
        s = self.set
        for group in groups:
            scores = [sample.score for sample in group]
            for sample in group:
                sample.advantage = sample.score - (
                    np.mean(scores) if s.baseline == "group" else 0.0
                )
        for group in groups:
            over = [
                x.advantage
                for other in (groups if s.advantage_std == "batch" else [group])
                for x in other
            ]
            deviation = 1.0 if s.advantage_std == "none" else np.std(over, ddof=1) + 1e-4
            for sample in group:
                sample.scaled = float(sample.advantage / deviation)

    def update(self, samples, is_first):
        s, step, each = self.set, len(self.lines), []
        for x in samples:
            logps, entropy = self.read(self.policy, x.prompt, x.response)
            old = logps.detach() if is_first else x.old
            ratio = (
                (logps - old).exp()
                if s.ratio == "token"
                else (logps - old).mean().exp().expand(len(logps))
            )
            a = torch.tensor(x.scaled)
            if s.loss_type == "cispo":
                loss = -ratio.clamp(max=1 + s.clip_range_high).detach() * a * logps
                low, high = torch.zeros_like(ratio), ratio > 1 + s.clip_range_high
            else:
                bound = (
                    ratio.clamp(max=1 + s.clip_range_high)
                    if a > 0
                    else ratio.clamp(min=1 - s.clip_range)
                )
                loss = -bound * a
                low, high = (
                    (ratio < 1 - s.clip_range) & (a < 0),
                    (ratio > 1 + s.clip_range_high) & (a > 0),
                )
            d = logps - x.ref
            kl = d * d / 2 if s.kl_estimator == "k2" else (-d).exp() - 1 + d
            loss = loss + s.kl_coef * kl * (ratio.detach() if s.kl_estimator == "k2" else ratio)
            each.append({
                "loss": loss, "clip_ratio/low_mean": low.float(), "clip_ratio/high_mean": high.float(), "entropy": entropy, "kl": kl,
                "policy/approxkl_avg": (logps - old) ** 2 / 2, "val/ratio": ratio,
            })  # fmt: skip
        tokens = sum(len(x.response) for x in samples)
        line = {name: sum(part[name].sum() for part in each).item() / tokens for name in each[0]}
        if not s.kl_coef:
            del line["kl"]
        if s.average == "token":
            loss = sum(part["loss"].sum() for part in each) / tokens
        elif s.average == "sequence":
            loss = sum(part["loss"].mean() for part in each) / len(each)
        else:
            loss = sum(part["loss"].sum() for part in each) / s.max_new_tokens / len(each)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), s.max_grad_norm).item()
        rate = s.learning_rate * min(step / s.warmup_steps, 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.lines.append(
            {
                "global_step": step + 1,
                **line,
                "loss": loss.item(),
                "grad_norm": norm,
                "learning_rate": rate,
            }
        )

    def go(self):
        s, samples_seen, tokens_seen, n = self.set, 0, 0, len(self.rows)
        while (
            len(self.lines) < s.max_steps if s.max_steps else self.prompts_seen < s.max_epochs * n
        ):
            groups, line = self.roll_out()
            assert groups, "every rollout of these settings has an update"
            self.advantages(groups)
            updates = []
            for epoch in range(s.num_epochs_per_rollout):
                order = batches.rows_of_update(
                    len(groups), len(groups), (s.seed, self.rollouts_seen, 2), epoch
                )
                of_epoch = [
                    x for number in order for x in groups[number] if x.ended or not s.mask_truncated
                ]
                updates += [
                    of_epoch[i : i + s.train_batch_size]
                    for i in range(0, len(of_epoch), s.train_batch_size)
                ]
            for index, samples in enumerate(updates):
                if s.max_steps and len(self.lines) == s.max_steps:
                    break
                self.update(samples, index == 0)
                samples_seen += len(samples)
                tokens_seen += sum(len(x.prompt) + len(x.response) for x in samples)
                self.lines[-1] |= {
                    "samples": samples_seen,
                    "tokens": tokens_seen,
                    "skipped_steps": 0,
                    "epoch": self.prompts_seen / n,
                }
                self.lines[-1] |= line if index == 0 else {}
            self.rollouts_seen += 1
        return self


@pytest.mark.parametrize("name", WHOLE)
def test_a_run_is_that_of_the_plain_reference(inputs, name):
    settings = WHOLE[name]
    output = inputs / name.replace(" ", "-")
    run(inputs, output, settings, "--report_to", "none")
    reference = Reference(inputs, **settings).go()
    found = training_lines(output)
    assert len(found) == len(reference.lines) > 4
    sampled = ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max")
    for line, expected in zip(found, reference.lines):
        line = {tag: value for tag, value in without_timings(line).items()}
        if "reward" in line:
            assert all(0 <= line.pop(tag) < 1e-5 for tag in sampled)
            assert line["val/ratio"] == 1 and line["policy/approxkl_avg"] == 0
        assert line.keys() == expected.keys()
        for tag, value in expected.items():
            assert line[tag] == pytest.approx(value, rel=1e-4, abs=1e-5), (line["global_step"], tag)
    change = (weights(output) - weights(inputs, "model")).norm()
    assert change > 0.01
    assert distance(output, reference) <= 1e-4 * change


def distance(output, reference) -> float:
    """The distance of the saved actor from the reference's policy."""
    actor = AutoModelForCausalLM.from_pretrained(output / "actor").state_dict()
    own = reference.policy.state_dict()
    return math.sqrt(sum(((actor[name] - own[name]) ** 2).sum().item() for name in own))
