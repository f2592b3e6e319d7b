"""PPO by value: responses against one unpadded row at a time, whole runs against a plain reference."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers import AutoModelForSequenceClassification as CLASSIFIER
from transformers import LlamaForSequenceClassification as LlamaClassifier

import plain_rollouts
import recipes
import runs
from common import batches
from plain_loop import expect_weights, vector
from preference_recipes.tools import export

ppo = recipes.load("ppo")
FORKED = runs.forked("adaptive_kl", "dual_clip")
adaptive = recipes.load("adaptive", FORKED)


def test_the_estimates_of_the_kl():
    logps, ref_logps = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5])
    expected = {"k1": [1, -0.5], "k2": [0.5, 0.125], "k3": [math.exp(-1), math.exp(0.5) - 1.5]}
    for estimator, values in expected.items():
        assert ppo.kl_estimate(logps, ref_logps, estimator).tolist() == pytest.approx(values)


REWARDING = """
def reward(prompts, responses, weight, **columns):
    return [w * (len(text) % 5 - 2.0) for text, w in zip(responses, weight)]
"""
SETTINGS = plain_rollouts.SHARED | dict(rollout_batch_size=4, n_samples_per_prompt=2)
SETTINGS |= dict(num_epochs_per_rollout=2, max_epochs=1, critic_learning_rate=2e-2)
SETTINGS |= dict(max_grad_norm=0.0, adam_epsilon=1e-5, missing_eos_penalty=0.6, clip_range=0.15)
SETTINGS |= dict(gamma=0.95, gae_lambda=0.8)
# 7 prompts: rollouts of 4 and 3 prompts, 8 and 6 samples, with two epochs of updates of 4, 4 and of
# 4, 2 samples: 8 updates a pass over the prompts. By name: the settings, the reference, the scores.
WHOLE = {
    "kl in the reward": (
        SETTINGS
        | dict(kl_coef=0.3, kl_estimator="k1", kl_in="reward", kl_target=2.0, kl_horizon=100.0)
        | dict(temperature=0.8, max_grad_norm=0.5, vf_coef=0.4, clip_range_high=0.25)
        | dict(value_clip_range=0.2, reward_clip=2.5, normalize_reward=True, max_steps=10),
        "reference",
        "both",
    ),
    "kl in the loss": (
        SETTINGS
        | dict(kl_coef=0.2, kl_estimator="k3", kl_in="loss", temperature=1.3, vf_coef=0.1)
        | dict(dual_clip=1.1, value_clip_range=0.0, gae_lambda=1.0),
        "model",
        "function",
    ),
    "no reference": (dict(SETTINGS, kl_coef=0.0, gae_lambda=1.0, max_steps=6), None, "function"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    plain_rollouts.make_inputs(folder, lambda row: {"weight": 1 + row % 3})
    runs.tiny_llama(folder / "reference", initializer_range=0.2)
    torch.manual_seed(5)
    head = dict(num_labels=1, initializer_range=0.15)
    config = LlamaConfig.from_pretrained(folder / "model", **head)
    config.update({"reward_mean": 0.1, "reward_std": 0.7})
    LlamaClassifier(config).save_pretrained(folder / "reward")
    AutoTokenizer.from_pretrained(runs.ASSETS / "model").save_pretrained(folder / "reward")
    (folder / "rewarding_of_test.py").write_text(REWARDING)
    return folder


def run(inputs, output, name, *more, **changes) -> None:
    """Runs the recipe with the settings of `WHOLE`; `more` flags win over them."""
    settings, ref, scored = WHOLE[name]
    flags = runs.short_run(inputs, "prompts", output, **{**settings, **changes})
    flags += ["--reward_function", "rewarding_of_test:reward"]
    flags += ["--ref_model_name_or_path", inputs / str(ref)] * bool(ref)
    flags += ["--reward_model_name_or_path", inputs / "reward"] * (scored == "both")
    file = FORKED if {"kl_target", "dual_clip"} & set(settings) else runs.recipe("ppo")
    runs.launch([], file, *flags, *more, cwd=inputs)


class Reference(plain_rollouts.PlainRun):
    def __init__(self, inputs, settings, ref, scored):
        super().__init__(inputs, adaptive.Args(), settings)
        classifier = CLASSIFIER.from_pretrained
        self.reference = self.load(ref or "model")
        self.grader = classifier(inputs / "reward").eval() if scored == "both" else None
        if self.grader:
            self.critic = classifier(inputs / "reward").eval()
        else:
            self.critic = classifier(inputs / "model", num_labels=1).eval()
            generator = torch.Generator().manual_seed(self.set.seed)
            head = 0.1 * torch.randn(1, 32, generator=generator) / math.sqrt(33)
            self.critic.score.weight.data.copy_(head)
        self.adams.append(self.adam(self.critic))
        self.begins = []
        self.kl_coef = self.set.kl_coef

    def values(self, sample) -> torch.Tensor:
        ids = torch.tensor([sample.prompt + sample.response])
        states = self.critic.model(ids).last_hidden_state[0, len(sample.prompt) - 1 : -1]
        return states @ self.critic.score.weight[0]

    def score(self, sample, weight: float) -> None:
        text = self.tokenizer.decode(sample.response, skip_special_tokens=True)
        sample.own_score = total = weight * (len(text) % 5 - 2.0)
        if self.grader:
            logits = self.grader(torch.tensor([sample.prompt + sample.response])).logits
            sample.judged = (logits.item() - 0.1) / 0.7
            total += sample.judged
        limit = self.set.reward_clip or math.inf
        missing = self.set.missing_eos_penalty * (not sample.ended)
        sample.score = min(max(total, -limit), limit) - missing

    def kl(self, logps, ref_logps):
        gap = logps - ref_logps
        if self.set.kl_estimator == "k1":
            return gap
        return gap * gap / 2 if self.set.kl_estimator == "k2" else (-gap).exp() - 1 + gap

    def estimate(self, sample) -> None:
        """Its advantages and returns."""
        s = self.set
        kl = self.kl(sample.logps, sample.ref_logps)
        in_reward = s.kl_in == "reward"
        rewards = -self.kl_coef * kl * in_reward
        sample.kl = kl.sum().item()
        sample.penalty = rewards.sum().item()
        rewards[-1] += sample.score
        advantages, advantage, next_value = [], 0.0, 0.0
        for reward, value in zip(reversed(rewards.tolist()), reversed(sample.values.tolist())):
            delta = reward + s.gamma * next_value - value
            advantage = delta + s.gamma * s.gae_lambda * advantage
            advantages.insert(0, advantage)
            next_value = value
        sample.advantages = torch.tensor(advantages)
        sample.returns = sample.advantages + sample.values

    @torch.no_grad()
    def roll_out(self, number: int) -> tuple[list, dict]:
        """The samples of a rollout, and what is logged of it."""
        s, samples = self.set, []
        rows = batches.indices_of_update(len(self.rows), s.rollout_batch_size, s.seed, number)
        for row, of_prompt in zip(rows, self.uniforms(len(rows), number, 1)):
            prompt = self.encode(self.rows[row]["prompt"])
            for numbers in of_prompt:
                sample = self.respond(self.policy, prompt, numbers)
                sample.logps, _ = self.of_tokens(self.policy, sample)
                sample.ref_logps, _ = self.of_tokens(self.reference, sample)
                sample.values = self.values(sample)
                self.score(sample, self.rows[row]["weight"])
                self.estimate(sample)
                samples.append(sample)
        joined = lambda name: torch.cat([getattr(each, name) for each in samples]).double().numpy()
        advantages, returns, values = map(joined, ("advantages", "returns", "values"))
        for sample in samples:
            sample.white = (sample.advantages - advantages.mean()) / advantages.std()
        mean = lambda value: float(np.mean([value(sample) for sample in samples]))
        line = {
            "objective/entropy": mean(lambda x: -x.logps.sum().item()),
            "objective/scores": mean(lambda x: x.score),
            "objective/non_score_reward": mean(lambda x: x.penalty),
            "objective/rlhf_reward": mean(lambda x: x.score + x.penalty),
            "objective/kl_coef": self.kl_coef,
            "val/explained_variance": 1 - np.var(returns - values) / np.var(returns),
            "val/returns_avg": returns.mean(),
            **plain_rollouts.lengths_of(samples, "responses", mean="length"),
            "responses/eos_rate": mean(lambda x: x.ended),
            "rewards/reward/mean": mean(lambda x: x.own_score),
        }
        if s.kl_coef:
            line["objective/kl"] = mean(lambda x: x.kl)
        if self.grader:
            line["rewards/reward_model/mean"] = mean(lambda x: x.judged)
        return samples, line

    def losses_of(self, sample, kl_coef: float) -> dict:
        """The loss of each token, and what is logged as means over tokens."""
        s = self.set
        logps, entropy = self.of_tokens(self.policy, sample)
        values = self.values(sample)
        ratio, advantage = (logps - sample.logps).exp(), sample.white
        high = 1 + (s.clip_range if s.clip_range_high is None else s.clip_range_high)
        low = 1 - s.clip_range
        gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        is_clipped = torch.where(advantage > 0, ratio > high, ratio < low)
        if s.dual_clip:
            is_clipped |= (advantage < 0) & (ratio > s.dual_clip)
            gain = torch.where(advantage < 0, gain.maximum(s.dual_clip * advantage), gain)
        error = (values - sample.returns) ** 2
        error_near = torch.zeros_like(error)
        if s.value_clip_range:
            step = (values - sample.values).clamp(-s.value_clip_range, s.value_clip_range)
            error_near = (sample.values + step - sample.returns) ** 2
        value_loss = 0.5 * torch.maximum(error, error_near)
        loss = s.vf_coef * value_loss - gain
        if s.kl_in == "loss":
            loss = loss + kl_coef * self.kl(logps, sample.ref_logps)
        return {
            "loss": loss,
            "loss/policy_avg": -gain,
            "loss/value_avg": value_loss,
            "policy/approxkl_avg": (logps - sample.logps) ** 2 / 2,
            "policy/clipfrac_avg": is_clipped.float(),
            "policy/entropy_avg": entropy,
            "val/clipfrac_avg": (error_near > error).float(),
            "val/ratio": ratio,
        }

    def update(self, samples, kl_coef: float, total: int) -> dict:
        """One step of both models; returns its log line."""
        each = [self.losses_of(sample, kl_coef) for sample in samples]
        means = {name: torch.cat([losses[name] for losses in each]).mean() for name in each[0]}
        rates = dict(
            learning_rate=self.set.learning_rate, critic_learning_rate=self.set.critic_learning_rate
        )
        line = self.step(samples, means["loss"], total=total, **rates)
        return line | {name: value.item() for name, value in means.items()}

    def go(self):
        """Trains; fills `lines`, and `begins` with the first update of each rollout."""
        s = self.set
        of_rollouts = [
            s.num_epochs_per_rollout * math.ceil(n * s.n_samples_per_prompt / s.train_batch_size)
            for n in (4, 3)
        ]
        total = s.max_steps or sum(of_rollouts)
        while len(self.lines) < total:
            number = len(self.begins)
            self.begins.append(len(self.lines) + 1)
            samples, line = self.roll_out(number)
            kl_coef = self.kl_coef
            for index in range(min(of_rollouts[number % 2], total - len(self.lines))):
                seed = (s.seed, number, 2)
                rows = batches.indices_of_update(len(samples), s.train_batch_size, seed, index)
                found = self.update([samples[row] for row in rows], kl_coef, total)
                epoch = {"epoch": (len(self.lines) + 1) / sum(of_rollouts)}
                self.lines.append(found | epoch | (line if index == 0 else {}))
            if s.kl_target:
                error = min(max(line["objective/kl"] / s.kl_target - 1, -0.2), 0.2)
                self.kl_coef *= 1 + error * len(samples) / s.kl_horizon
        return self


@pytest.fixture(scope="module", params=["kl in the reward", "kl in the loss"])
def whole(request, inputs):
    """A run with all its checkpoints and actors, and its reference."""
    output = inputs / request.param.replace(" ", "_")
    saving = ["--save_steps", 3, "--save_total_limit", 0, "--save_actor_steps", 1]
    run(inputs, output, request.param, *saving)
    return output, Reference(inputs, *WHOLE[request.param]).go()


def test_every_logged_number_of_a_run(whole):
    output, reference = whole
    found = plain_rollouts.expect_run(output, reference, without=("val/max_rounding",), abs=2e-6)
    for line in found:
        if line["global_step"] in reference.begins:
            # Bit for bit: the actor has not moved.
            assert (line["val/ratio"], line["policy/approxkl_avg"]) == (1, 0)
            assert "sampling/sampling_logp_difference/max" in line
        assert line.get("val/max_rounding", 0.0) < 1e-5
    # The run is one in which everything happens.
    column = lambda tag: [line[tag] for line in found if tag in line]
    assert 0 < min(column("responses/eos_rate")) < 1
    assert max(column("policy/clipfrac_avg")) > 0 and max(column("policy/approxkl_avg")) > 1e-3
    if reference.set.value_clip_range and reference.set.kl_target and reference.grader:
        assert max(column("val/clipfrac_avg")) > 0 and min(column("grad_norm")) > 0.5
        # A pass over the prompts and the beginning of the next.
        assert column("epoch")[-1] == 1.25 and len(set(column("objective/kl_coef"))) == 3


def test_the_weights_of_actor_and_critic_after_a_run(whole, tmp_path):
    """The critic is taken out of a checkpoint, as a sequence classifier that anyone can load."""
    output, reference = whole
    last = f"checkpoints/global_step_{len(reference.lines):06d}"
    assert torch.equal(runs.weights(output), runs.weights(output, f"{last}/actor"))
    export.export(output / last, tmp_path / "critic", model="critic")
    critic, info = CLASSIFIER.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert critic.config.num_labels == 1 and not info["missing_keys"]
    expect_weights(runs.weights(output), reference.policy, bound=1e-5)
    expect_weights(vector(critic), reference.critic, bound=1e-5)


def test_evaluation(inputs):
    """Greedy responses, scored as in training; of three prompts two have an answer, one is right."""
    model = AutoModelForCausalLM.from_pretrained(inputs / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    texts, is_cut = [], []
    prompts = [runs.say("user", "ab" * (1 + row)) for row in range(3)]
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        how = (0.0, plain_rollouts.STOPS, SETTINGS["max_new_tokens"])
        response, _ = plain_rollouts.alone(model, ids, None, *how)
        texts.append(tokenizer.decode(response, skip_special_tokens=True))
        is_cut.append(response[-1] not in plain_rollouts.STOPS)
    answers = [texts[0], "never said", ""]
    rows = [{"prompt": p, "answer": a, "weight": 1} for p, a in zip(prompts, answers)]
    output = inputs / "evaluation"
    more = ["--eval_dataset_name", runs.write_jsonl(inputs / "eval.jsonl", rows)]
    run(inputs, output, "no reference", *more, max_steps=2, learning_rate=0)
    first, last = [line for line in runs.timeless(output) if "eval/scores" in line]
    assert first["eval/exact_match"] == 0.5
    assert first["eval/eos_rate"] == pytest.approx(1 - np.mean(is_cut))
    reward = np.mean([len(text) % 5 - 2.0 for text in texts])
    assert first["eval/rewards/reward/mean"] == pytest.approx(reward)
    assert first["eval/scores"] == pytest.approx(reward - 0.6 * np.mean(is_cut))
    assert last == {**first, "global_step": 2}  # nothing was learned
