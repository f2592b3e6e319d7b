"""Whole runs of recipes/grpo.py against a plain reference; what a rollout leaves out."""

import itertools

import numpy as np
import pytest
import torch

import plain_rollouts
import recipes
import runs
from plain_rollouts import PlainRun, expect_run, lengths_of, make_inputs

DAPO = runs.forked("dapo")
dapo = recipes.load("dapo", DAPO)

REWARDING = """
def length(prompts, responses, response_ids, **columns):
    return [float(len(ids) // 2) for ids in response_ids]

def vowels(prompts, responses, weight, **columns):
    counts = [sum(c in "aeiouAEIOU" for c in text) for text in responses]
    return [None if w == 2 else w * count for w, count in zip(weight, counts)]

def same(prompts, responses, **columns):
    return [1.0] * len(responses)
"""
SHARED = dict(plain_rollouts.SHARED, rollout_batch_size=4, n_samples_per_prompt=3)
PENALISED = SHARED | dict(overlong_buffer=3, overlong_penalty=0.4)
TWO_PASSES = SHARED | dict(num_epochs_per_rollout=2, advantage_std="group", average="sequence")
TWO_PASSES |= dict(kl_coef=0.3, temperature=0.8, max_steps=9)
REFILLED = PENALISED | dict(train_batch_size=3, micro_train_batch_size=3, refill_rounds=2)
REFILLED |= dict(max_epochs=2, average="constant", mask_truncated=True)
# 7 prompts: 4 and 3 an epoch, 12 and 9 samples.
WHOLE = {
    "defaults": dict(SHARED, max_epochs=2),
    "two passes, kl": TWO_PASSES,
    "refilled, length": REFILLED,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo")
    make_inputs(folder, lambda row: {"weight": 1 + row % 3}, eos_token_id=1)
    (folder / "rewarding_of_test.py").write_text(REWARDING)
    return folder


def run(inputs, output, settings, *more, check=True):
    flags = runs.short_run(inputs, "prompts", output, **settings)
    if "--reward_function" not in more:
        flags += ["--reward_function", "rewarding_of_test:length", "rewarding_of_test:vowels"]
        flags += ["--reward_weights", 1, 0.5]
    is_dapo = "overlong_buffer" in settings or "--overlong_buffer" in more
    file = DAPO if is_dapo else runs.recipe("grpo")
    return runs.launch([], file, *flags, *more, cwd=inputs, check=check)


class Reference(PlainRun):
    def __init__(self, inputs, **settings):
        super().__init__(inputs, dapo.Args(), settings)
        self.reference = self.load("model")
        self.prompts_taken = self.rollouts_seen = 0

    def score(self, row, response):
        text = self.tokenizer.decode(response, skip_special_tokens=True)
        weight = self.rows[row]["weight"]
        parts = {
            "length": float(len(response) // 2),
            "vowels": None if weight == 2 else float(weight * sum(c in "aeiouAEIOU" for c in text)),
        }
        total = parts["length"] + 0.5 * (parts["vowels"] or 0.0)
        raw = total
        if self.set.overlong_buffer:
            beyond = len(response) - (self.set.max_new_tokens - self.set.overlong_buffer)
            total -= self.set.overlong_penalty * max(beyond, 0) / self.set.overlong_buffer
        return total, raw, parts

    @torch.no_grad()
    def sample_rollout(self, prompts, round_number):
        groups = []
        uniforms = self.uniforms(len(prompts), self.rollouts_seen, 1, round_number)
        for row, of_prompt in zip(prompts, uniforms):
            prompt = self.encode(self.rows[row]["prompt"])
            group = [self.respond(self.policy, prompt, numbers) for numbers in of_prompt]
            for x in group:
                x.score, x.raw, x.parts = self.score(row, x.response)
                x.old, _ = self.of_tokens(self.policy, x)
                x.ref, _ = self.of_tokens(self.reference, x)
            groups.append(group)
        return groups

    def roll_out(self):
        """Groups to learn from, and the line of all that were sampled."""
        s, kept, sampled = self.set, [], []
        n = len(self.rows)
        for round_number in range(1 + s.refill_rounds):
            epoch, place = divmod(self.prompts_taken, n)
            order = np.random.default_rng([s.seed, epoch]).permutation(n)
            prompts = order[place : place + s.rollout_batch_size - len(kept)]
            self.prompts_taken += len(prompts)
            groups = self.sample_rollout(prompts, round_number)
            sampled += groups
            for group in groups:
                # The penalty for length makes no difference, and a KL teaches all.
                differs = len({sample.raw for sample in group}) > 1
                if differs or s.kl_coef or not s.drop_equal_groups:
                    kept.append(group)
            if len(kept) == s.rollout_batch_size or self.prompts_taken % n == 0:
                break
        flat = [sample for group in sampled for sample in group]
        equal = [len({sample.score for sample in group}) == 1 for group in sampled]
        spreads = [np.std([sample.score for sample in group], ddof=1) for group in sampled]
        line = {
            "reward": np.mean([sample.score for sample in flat]),
            "reward_std": np.mean(spreads),
            "frac_reward_zero_std": np.mean(equal),
            "frac_groups_dropped": 1 - len(kept) / len(sampled),
            "rewards/length/mean": np.mean([sample.parts["length"] for sample in flat]),
            **lengths_of(flat, "completions"),
            "completions/clipped_ratio": np.mean([not sample.ended for sample in flat]),
        }
        vowels = [sample.parts["vowels"] for sample in flat if sample.parts["vowels"] is not None]
        if vowels:
            line["rewards/vowels/mean"] = np.mean(vowels)
        return kept, line

    def advantages(self, groups):
        s = self.set
        for group in groups:
            mean = np.mean([sample.score for sample in group])
            for sample in group:
                sample.advantage = sample.score - mean
        for group in groups:
            others = groups if s.advantage_std == "batch" else [group]
            flat = itertools.chain(*others)
            over = [x.advantage for x in flat if x.ended or not s.mask_truncated]
            squares = sum(each**2 for each in over)
            deviation = (squares / (len(over) - 1)) ** 0.5 + 1e-4 if len(over) > 1 else 1.0
            for sample in group:
                sample.scaled = float(sample.advantage / deviation)

    def update(self, samples, is_first):
        s, each = self.set, []
        for x in samples:
            logps, entropy = self.of_tokens(self.policy, x)
            old = logps.detach() if is_first else x.old
            ratio = (logps - old).exp()
            a = torch.tensor(x.scaled)
            least, most = 1 - s.clip_range, 1 + s.clip_range_high
            loss = -a * (ratio.clamp(max=most) if a > 0 else ratio.clamp(min=least))
            low, high = (ratio < least) & (a < 0), (ratio > most) & (a > 0)
            kl = (x.ref - logps).exp() - 1 + logps - x.ref
            loss = loss + s.kl_coef * kl * ratio
            clipped = {"clip_ratio/low_mean": low.float(), "clip_ratio/high_mean": high.float()}
            moved = {"policy/approxkl_avg": (logps - old) ** 2 / 2, "val/ratio": ratio}
            each.append({"loss": loss, "entropy": entropy, "kl": kl, **clipped, **moved})
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
        line["loss"] = loss.item()
        self.lines.append(line | self.step(samples, loss, learning_rate=s.learning_rate))

    def go(self):
        s, n = self.set, len(self.rows)
        is_done = lambda: self.prompts_taken >= s.max_epochs * n
        if s.max_steps:
            is_done = lambda: len(self.lines) >= s.max_steps
        while not is_done():
            groups, line = self.roll_out()
            assert groups, "every rollout of these settings has an update"
            self.advantages(groups)
            for samples in self.updates_of(self.rollouts_seen, list(itertools.chain(*groups))):
                if s.max_steps and len(self.lines) == s.max_steps:
                    break
                self.update(samples, is_first=bool(line))
                self.lines[-1] |= {"epoch": self.prompts_taken / n, **line}
                line = {}
            self.rollouts_seen += 1
        return self


@pytest.mark.parametrize("name", WHOLE)
def test_a_run_is_that_of_the_plain_reference(inputs, name):
    settings = WHOLE[name]
    output = inputs / name.replace(" ", "-")
    run(inputs, output, settings)
    found = expect_run(output, Reference(inputs, **settings).go())
    assert len(found) > 4
    firsts = [line for line in found if "reward" in line]
    assert all("sampling/sampling_logp_difference/max" in line for line in firsts)
    assert all(line["val/ratio"] == 1 and line["policy/approxkl_avg"] == 0 for line in firsts)


# ---------------------------------------------------------------------------------------------- what is left out


def test_rollouts_without_an_advantage_make_no_update(inputs):
    """The run ends with an error when its prompts are used up, since it has trained nothing."""
    output = inputs / "nothing"
    more = ["--reward_function", "rewarding_of_test:same"]
    more += ["--eval_dataset_name", inputs / "prompts.jsonl"]
    more += ["--max_epochs", 1, "--overlong_buffer", 6, "--save_steps", 1]
    result = run(inputs, output, SHARED, *more, check=False)
    said = result.stdout
    assert result.returncode == 1 and "Traceback" not in said
    assert said.count("has no response to train on") == 2  # 4 and 3 prompts
    assert "The last 7 prompts, a whole epoch, led to no update, so the run ends here" in said
    assert not (output / "actor").exists() and not (output / "checkpoints").exists()
    assert runs.training_lines(output) == []
    before, of_rollouts = runs.lines(output)
    assert before["global_step"] == of_rollouts["global_step"] == 0 and "eval/scores" in before
    assert of_rollouts["epoch"] == of_rollouts["frac_groups_dropped"] == 1
    assert of_rollouts["rewards/same/mean"] == 1


def test_a_run_whose_last_rollouts_hold_no_update_still_evaluates_and_saves(inputs):
    """The reward is constant from the first update on: the end comes without an update, and again if resumed."""
    rows = [{"prompt": f"{number}+1", "answer": None} for number in range(3)]
    held_out = runs.write_jsonl(inputs / "unanswered.jsonl", rows)
    (inputs / "rewarding_once.py").write_text(
        "def once(prompts, responses, response_ids, step, **columns):\n"
        "    return [float(len(ids)) if step == 0 else 1.0 for ids in response_ids]\n"
    )
    output = inputs / "early"
    settings = dict(SHARED, train_batch_size=12, micro_train_batch_size=3)
    more = ["--reward_function", "rewarding_once:once", "--save_steps", 5, "--max_epochs", 3]
    more += ["--eval_dataset_name", held_out, "--resume", "auto"]
    run(inputs, output, settings, *more)
    ended = runs.timeless(output)
    assert "The run had ended there" in run(inputs, output, settings, *more).stdout
    assert runs.timeless(output) == ended
    assert [line["global_step"] for line in runs.lines(output)] == [0, 1, 1, 1]
    # The rewards of every rollout are in a line.
    rewarded = [line for line in runs.lines(output) if "reward" in line]
    assert ["loss" in line for line in rewarded] == [True, False]
    of_rollouts = [sample for sample in runs.samples(output) if sample["source"] == "rollout"]
    for step, line in enumerate(rewarded):
        scores = [sample["score"] for sample in of_rollouts if sample["global_step"] == step]
        assert line["reward"] == pytest.approx(sum(scores) / len(scores)) and len(scores) > 8
    assert rewarded[-1]["epoch"] == 11 / 7
    evaluations = runs.evaluation_lines(output)
    assert [line["global_step"] for line in evaluations] == [0, 1]
    tags = {"scores", "length", "eos_rate", "rewards/once/mean"}
    assert evaluations[0].keys() == {"global_step", *(f"eval/{tag}" for tag in tags)}
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["global_step_000001"]
    assert list((output / "actor").glob("*.safetensors"))


# The first rollout's scores are all equal, those of the others are not.
LATER = """
import os, signal

def later(prompts, responses, response_ids, held_out, **columns):
    if held_out[0]:
        return [0.0] * len(responses)
    file = f"sampled-{os.environ.get('RANK', 0)}"
    if os.path.exists(file):
        return [float(len(ids) // 2) for ids in response_ids]
    open(file, "w")
    if "STOP" in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)
    return [1.0] * len(responses)
"""


@pytest.mark.parametrize("launcher", ["plain", runs.slow("ddp")])
def test_stopped_before_the_first_update_and_resumed_is_the_run_never_stopped(
    inputs, tmp_path, launcher
):
    """The evaluation before training is there once."""
    rows = [{"prompt": "ab3" * (1 + 5 * row % 7), "held_out": False} for row in range(7)]
    data = runs.write_jsonl(tmp_path / "rows.jsonl", rows)
    asked = [{"prompt": f"{row}+1", "held_out": True} for row in range(3)]
    held_out = runs.write_jsonl(tmp_path / "held_out.jsonl", asked)
    more = ["--dataset_name", data, "--eval_dataset_name", held_out]
    more += ["--reward_function", "rewarding_later:later", "--max_epochs", 2, "--resume", "auto"]
    outputs = []
    for name, ways in {"whole": [{}], "stopped": [{"STOP": "1"}, {}]}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "rewarding_later.py").write_text(LATER)
        outputs.append(folder / "out")
        flags = [*runs.short_run(inputs, "prompts", outputs[-1], **SHARED), *more]
        for env in ways:
            how = dict(cwd=folder, env=env, check="STOP" not in env)
            result = runs.launch(runs.LAUNCHERS[launcher], runs.recipe("grpo"), *flags, **how)
        assert ("resumed from" in result.stdout) == (name == "stopped")
    whole, stopped = outputs
    assert (stopped / "checkpoints/global_step_000000").exists()
    assert runs.timeless(stopped) == runs.timeless(whole)
    assert runs.samples(stopped) == runs.samples(whole)
    assert torch.equal(runs.weights(stopped), runs.weights(whole))
    assert [line["global_step"] for line in runs.evaluation_lines(stopped)].count(0) == 1
