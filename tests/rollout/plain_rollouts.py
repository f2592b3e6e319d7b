"""A run that samples, in plain torch, which recipes are compared with: a subclass adds the algorithm.

Every row is read alone, in whole forward passes over unpadded ids; the loss of an update at once.
"""

import json
import math
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import runs
from plain_loop import AdamW, clip, expect_lines, schedule, vector
from runs import say, tiny_llama, training_lines, write_jsonl

STOPS = [1, *range(30, 60)]  # so many that most responses end early
SHARED = dict(seed=3, max_length=60, max_new_tokens=6, generate_batch_size=3, score_batch_size=5)
SHARED |= dict(train_batch_size=4, micro_train_batch_size=2, learning_rate=3e-3, warmup_steps=2)
SHARED |= dict(weight_decay=0.1, max_grad_norm=0.5)


@torch.no_grad()
def alone(model, prompt, numbers, temperature, stops, room, vocab_size=None):
    """A response from whole forward passes over one unpadded row, and the logits of each step."""
    ids, seen = list(prompt), []
    while len(ids) < len(prompt) + room and (len(ids) == len(prompt) or ids[-1] not in stops):
        logits = model(torch.tensor([ids])).logits[0, -1, :vocab_size].double().numpy()
        seen.append(logits)
        chances = np.exp((logits - logits.max()) / (temperature or 1.0))
        below = np.cumsum(chances / chances.sum())
        drawn = (below <= numbers[len(seen) - 1]).sum() if temperature else logits.argmax()
        ids.append(int(drawn))
    return ids[len(prompt) :], seen


def make_inputs(folder: Path, of_row=lambda row: {}, **changes) -> None:
    """A policy with dropout, which must be off, and 7 prompts with what `of_row` adds to them."""
    tiny_llama(folder / "model", attention_dropout=0.2, **changes)
    # Random weights rarely end a response: more tokens do.
    file = folder / "model/generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": STOPS}))
    prompts = [say("user", "ab3" * (1 + 5 * row % 7)) for row in range(7)]
    rows = [{"prompt": prompt, **of_row(row)} for row, prompt in enumerate(prompts)]
    write_jsonl(folder / "prompts.jsonl", rows)


def coarsened(logps: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of some tokens, and of all the others together."""
    top = logps.double().gather(1, ids)
    return torch.cat([top, (1 - top.exp().sum(1, keepdim=True)).log()], 1)


class PlainRun:
    """What such runs have alike.

    Attributes:
        set: the settings, those of the recipe's defaults where a test gives none.
        lines: what should be logged of each update.
        adams: the optimizers of the models that are trained, the policy's first.
        vocab_size: how many tokens have a probability, the first ones; None: all.
    """

    def __init__(self, inputs: Path, defaults, settings: dict):
        self.set = types.SimpleNamespace(**{**vars(defaults), **settings})
        self.inputs = inputs
        self.tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
        self.policy = self.load("model")
        texts = (inputs / "prompts.jsonl").read_text().splitlines()
        self.rows = [json.loads(text) for text in texts]
        self.lines: list[dict] = []
        self.samples_seen = self.tokens_seen = 0
        self.adams = [self.adam(self.policy)]
        self.vocab_size: int | None = None

    def load(self, name: str):
        return AutoModelForCausalLM.from_pretrained(self.inputs / name).eval()

    def adam(self, model) -> AdamW:
        return AdamW(model, self.set.adam_epsilon, self.set.weight_decay)

    def encode(self, messages: list[dict]) -> list[int]:
        how = dict(add_generation_prompt=True, return_dict=False)
        return self.tokenizer.apply_chat_template(messages, **how)

    def uniforms(self, prompts: int, *seeds: int) -> np.ndarray:
        shape = (prompts, self.set.n_samples_per_prompt, self.set.max_new_tokens)
        return np.random.default_rng([self.set.seed, *seeds]).random(shape)

    def respond(self, model, prompt: list[int], numbers) -> types.SimpleNamespace:
        """A sample: `prompt`, `response`, whether it `ended`."""
        how = (self.set.temperature, STOPS, self.set.max_new_tokens, self.vocab_size)
        response, _ = alone(model, prompt, numbers, *how)
        return types.SimpleNamespace(prompt=prompt, response=response, ended=response[-1] in STOPS)

    def logps(self, model, prompt: list[int], response: list[int]) -> torch.Tensor:
        """Log-probs of all tokens before each one of the response, `[length, vocabulary]`."""
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        return (logits[:, : self.vocab_size] / self.set.temperature).log_softmax(-1)

    def of_tokens(self, model, sample) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the response's own tokens, and the entropy before each."""
        logps = self.logps(model, sample.prompt, sample.response)
        own = logps.gather(1, torch.tensor(sample.response)[:, None])[:, 0]
        return own, -(logps.exp() * logps).sum(-1)

    def updates_of(self, number: int, samples: list) -> Iterator[list]:
        """The samples of each update of a rollout: in each pass the groups in a seeded order."""
        s, n = self.set, self.set.n_samples_per_prompt
        for passed in range(s.num_epochs_per_rollout):
            draw = np.random.default_rng([s.seed, number, 2, passed])
            groups = draw.permutation(len(samples) // n)
            ordered = [samples[group * n + place] for group in groups for place in range(n)]
            if getattr(s, "mask_truncated", False):
                ordered = [sample for sample in ordered if sample.ended]
            count = -(-len(ordered) // s.train_batch_size)
            for places in np.array_split(np.arange(len(ordered)), count):
                yield [ordered[place] for place in places]

    def step(self, samples: list, loss: torch.Tensor, *, total: int = 100, **peaks) -> dict:
        """One step of each model, whose peak rates are by their tags; returns what its line has of it."""
        s, step = self.set, len(self.lines)
        for adam in self.adams:
            for parameter in adam.parameters:
                parameter.grad = None
        loss.backward()
        parameters = [parameter for adam in self.adams for parameter in adam.parameters]
        norm = clip(parameters, s.max_grad_norm or math.inf)
        rates = {}
        for adam, (tag, peak) in zip(self.adams, peaks.items(), strict=True):
            rates[tag] = schedule(s.lr_scheduler_type, step, s.warmup_steps, total, peak)
            adam.step(rates[tag])
        self.samples_seen += len(samples)
        self.tokens_seen += sum(len(each.prompt) + len(each.response) for each in samples)
        counts = {"samples": self.samples_seen, "tokens": self.tokens_seen, "skipped_steps": 0}
        return {"global_step": step + 1, "grad_norm": norm, **rates, **counts}


def expect_run(
    output: Path, reference: PlainRun, without: tuple[str, ...] = (), abs: float = 1e-5
) -> list[dict]:
    """The lines of a run, which it returns, and its weights are those of a reference that has gone."""
    found = training_lines(output)
    named = [f"sampling/sampling_logp_difference/{kind}" for kind in ("mean", "max")]
    assert all(name in found[0] for name in named)
    compared = [{tag: line[tag] for tag in line.keys() - {*named, *without}} for line in found]
    assert all(0 <= line[name] < 1e-5 for line in found for name in named if name in line)
    expect_lines(compared, reference.lines, rel=1e-4, abs=abs)
    weights = runs.weights(output)
    change = (weights - runs.weights(reference.inputs, "model")).norm()
    assert change > 0.01
    assert (weights - vector(reference.policy)).norm() <= 1e-4 * change
    return found


def expect_alike(one: Path, two: Path, rel: float = 1e-5) -> None:
    """Two runs wrote the same samples and, up to rounding, the same lines and weights."""
    assert runs.samples(one) == runs.samples(two)
    for line, other in zip(runs.timeless(one), runs.timeless(two), strict=True):
        assert line.keys() == other.keys()
        for tag, value in line.items():
            if not tag.startswith(("val/max_rounding", "sampling/")):
                assert other[tag] == pytest.approx(value, rel=rel, abs=1e-5), (tag, value)
    weights = runs.weights(one)
    assert (weights - runs.weights(two)).norm() <= 1e-5 * weights.norm()


def lengths_of(samples: list, prefix: str, mean: str = "mean_length") -> dict[str, float]:
    """The tags of the responses' lengths."""
    lengths = [len(sample.response) for sample in samples]
    tags = {mean: np.mean(lengths), "min_length": min(lengths), "max_length": max(lengths)}
    return {f"{prefix}/{tag}": value for tag, value in tags.items()}
