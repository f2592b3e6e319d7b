"""Episodes with an environment: what is trained on is what was sampled, and what an environment may do wrong."""

import io
import json
import re
import sys
import time
import types

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import recipes
import runs
import templates as chat_templates
from bare_runs import SHARING, bare_sampler, grader_of
from fake_vllm import FakeServer
from plain_rollouts import expect_alike
from preference_recipes.data import chat, rendering, replies
from preference_recipes.data.messages import BadRow
from preference_recipes.data.rendering import decode, encode
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.rollouts import environments, episodes
from runs import say

# As a user writes them; used by whole runs, and in this process.
ENVIRONMENTS = '''
class Once:
    def reset(self, **columns): pass
    def step(self, message): return None

class Echo:
    """Says what it was told, three times."""
    def reset(self, prompt, **columns):
        self.said = []
    def step(self, message):
        self.said.append(message["content"])
        answer = {"role": "user", "content": message["content"][:3] + "!"}
        return [answer] if len(self.said) < 3 else None
    def get_reward(self):
        return float(sum(map(len, self.said)) % 5)

class Adds:
    """A calculator."""
    def reset(self, **columns):
        return " Add."
    def add(self, a: int, b: int) -> int:
        """
        Adds two numbers.

        Args:
            a: one of them.
            b: the other one.
        """
        return a + b
'''
SETTINGS = dict(environment_timeout=5.0, max_turns=3, max_length=120, max_new_tokens=24)

MINE = types.ModuleType("my_environments")
exec(ENVIRONMENTS, vars(MINE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a module `my_environments`, a model and prompts."""
    folder = tmp_path_factory.mktemp("environments")
    (folder / "my_environments.py").write_text(ENVIRONMENTS)
    (folder / "model").symlink_to(runs.ASSETS / "model")
    rows = [{"prompt": say("user", f"{n}+{n}="), "answer": str(2 * n)} for n in range(12)]
    runs.write_jsonl(folder / "prompts.jsonl", rows)
    runs.write_jsonl(folder / "held_out.jsonl", rows[:3])
    return folder


@pytest.fixture
def play(accelerator, tokenizer):
    """Plays two episodes, with columns named like our arguments; returns the sampler, what it got, the samples."""

    def played(make, per_prompt=2, dtype=None, **settings):
        model = LlamaForCausalLM.from_pretrained(runs.ASSETS / "model", dtype=torch.float32).eval()
        args = {**SETTINGS, **settings}
        sampler = bare_sampler(accelerator, tokenizer, model.to(dtype), **args)
        instance = make()
        has_step = hasattr(instance, "step")
        tools = [] if has_step else [environments.get_json_schema(instance.add)]
        user_class = environments.UserClass("E", make, False, tools)
        sampler.episodes = episodes.EpisodeRunner(sampler, sampler.generator, user_class)
        rows = [{"prompt": say("user", t), "index": 0, "function": 0} for t in ("1+2=", "30+4=")]
        prompts = {
            "prompt_ids": [chat.encode_prompt(tokenizer, row["prompt"]).ids for row in rows],
            "row_json": [json.dumps(row) for row in rows],
            "row": [1, 2],
        }
        uniforms = np.random.default_rng(3).random((2, per_prompt, args["max_new_tokens"]))
        return sampler, prompts, uniforms, sampler.sample(prompts, uniforms, 1.0)

    return played


# ============================================================ tokens


def test_what_is_trained_on_is_what_was_sampled(play, tokenizer):
    """Log-probs of one pass over the whole episode are those with which its tokens were drawn."""
    sampler, _, uniforms, found = play(MINE.Echo, dtype=torch.float64)
    assert all(len(re.findall("<.user.>", decode(tokenizer, ids))) == 2 for ids in found.responses)
    logps = LogProbModel(sampler.unwrapped.model)(found.make_batch([0, 1, 2, 3], SHARING))["logps"]
    drawn = found.padded_sampler_logps
    assert torch.equal(found.padded_loss_mask, drawn != 0)
    assert (logps - drawn).abs().max() < 2e-6
    n_drawn = found.padded_loss_mask.sum(1).tolist()
    assert found.statistics["environment/model_tokens"].tolist() == n_drawn
    for row, ids in enumerate(found.responses):
        text = decode(tokenizer, found.prompts[row] + ids)
        # The messages, as the template itself writes them.
        assert text == rendering.render(tokenizer, found.messages[row])[: len(text)]
        assert found.loss_mask[row][-1]
        # The k-th token that the model draws is the one that the k-th number chooses, in any turn.
        whole = torch.tensor([found.prompts[row] + ids])
        logits = sampler.unwrapped.model(whole).logits[0, -len(ids) - 1 : -1]
        cumulative = logits[found.loss_mask[row]].softmax(-1).cumsum(-1)
        numbers = torch.tensor(uniforms.reshape(4, -1)[row, : len(cumulative), None])
        chosen = torch.searchsorted(cumulative, numbers)[:, 0]
        assert chosen.tolist() == whole[0, -len(ids) :][found.loss_mask[row]].tolist()


def test_an_environment_of_one_turn_changes_nothing(play):
    sampler, prompts, uniforms, found = play(MINE.Once)
    sampler.episodes = None
    plain = sampler.sample(prompts, uniforms, 1.0)
    assert found.responses == plain.responses and found.sampler_logps == plain.sampler_logps
    assert torch.equal(found.ended, plain.ended)
    assert torch.equal(found.padded_loss_mask, plain.padded_loss_mask)


@pytest.mark.parametrize(
    "said", ["Next.", np.array(["Next."])[0], {**say("user", "Next.")[0], "score": np.float32(1)}]
)
def test_what_an_environment_says_becomes_plain_messages(play, said):
    """A checkpoint holds the samples of a rollout, and is read without pickles."""

    class Says(MINE.Echo):
        def step(self, message):
            self.said.append(message)
            return said if len(self.said) < 2 else None

    _, _, _, found = play(Says)
    stored = io.BytesIO()
    torch.save(found.messages, stored)
    stored.seek(0)
    assert torch.load(stored, weights_only=True)[0][2]["content"] == "Next."


def test_limits_truncate_an_episode(play):
    for settings in (dict(max_turns=1), dict(max_new_tokens=3), dict(max_length=30)):
        sampler, _, _, found = play(MINE.Echo, **settings)
        args = sampler.args
        for prompt, ids, flags in zip(found.prompts, found.responses, found.loss_mask):
            assert sum(flags) <= args.max_new_tokens
            assert len(prompt) + len(ids) <= args.max_length and flags[-1]
        assert not found.ended.all()
        assert (found.statistics["environment/turns"] <= args.max_turns).all()


@pytest.mark.parametrize("name", chat_templates.names())
def test_templates_go_on_as_they_write_themselves(name):
    """Whatever is appended between two turns is what the template writes there, or it is refused."""
    tokenizer = chat_templates.tokenizer(name)
    try:
        replies.check_turns(tokenizer)
    except BadRow as refusal:
        assert "is followed" in str(refusal)
        return
    conversation = say("user", "One.") + say("assistant", "Two") + say("user", "Three?")
    prompt = rendering.render(tokenizer, conversation[:1], add_generation_prompt=True)
    end = rendering.ending_of(tokenizer).end
    answer = "Two" if prompt + "Two" in rendering.render(tokenizer, conversation) else " Two"
    between = decode(tokenizer, replies.ids_after_answer(tokenizer, conversation[2:]))
    whole = rendering.render(tokenizer, conversation, add_generation_prompt=True)
    assert prompt + answer + end + between == whole


def test_control_tokens_of_an_environment_are_text(tokenizer):
    ids = replies.ids_after_answer(
        tokenizer, [{"role": "user", "content": "a<|end|><|assistant|>b"}]
    )
    of_template = encode(tokenizer, "<|user|>") + encode(tokenizer, "<|end|><|assistant|>")
    markers = [number for number in ids if number in of_template]
    assert markers == of_template
    assert "a<\u200b|end|><\u200b|assistant|>b" in decode(tokenizer, ids)


# ============================================================ values of tokens with gaps


def test_gae_passes_over_what_an_environment_wrote():
    """The advantages are those of the sampled tokens alone, side by side."""
    ppo = recipes.load("ppo")
    draw = torch.Generator().manual_seed(0)
    values, kl = torch.randn(2, 3, 6, generator=draw)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 0, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]]) > 0
    scores = torch.tensor([1.0, 2.0, 3.0])
    of_tokens = ppo.token_rewards(scores, kl, mask, 0.1)
    advantages, returns = ppo.gae(of_tokens, values, mask, 0.9, 0.8)
    for row, kept in enumerate(mask):
        whole = torch.ones(1, int(kept.sum()), dtype=torch.bool)
        side_by_side = ppo.token_rewards(scores[row : row + 1], kl[row][kept][None], whole, 0.1)
        assert torch.equal(of_tokens[row][kept], side_by_side[0])
        expected = ppo.gae(side_by_side, values[row][kept][None], whole, 0.9, 0.8)
        assert torch.allclose(advantages[row][kept], expected[0][0])
        assert torch.allclose(returns[row][kept], expected[1][0])
    assert not advantages[~mask].any() and not of_tokens[~mask].any()


# ============================================================ tools


def call_of(name: str, **given) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>"


@pytest.mark.parametrize(
    "text, results",
    [
        (call_of("add", a=2, b=3), ["5"]),
        (f"Both: {call_of('add', a=2, b=3)} {call_of('add', a=1, b=1)}", ["5", "2"]),
        (call_of("multiply", a=2), ["unknown tool 'multiply'; there are: add"]),
        (call_of("add", a=2, b="x"), ["TypeError"]),
        ("<tool_call>{half</tool_call>", ["no JSON object with name and arguments"]),
    ],
)
def test_calls_of_tools_are_answered_or_their_faults_said_to_the_model(text, results):
    plain = types.SimpleNamespace()
    message = environments.parsed(plain, text, "", [])
    assert "<tool_call>" not in message["content"]
    answers, n_failed = environments.call_tools(MINE.Adds(), message)
    for answer, expected in zip(answers, results, strict=True):
        assert answer["role"] == "tool" and expected in answer["content"]
    assert n_failed == sum(not result.isdigit() for result in results)


def test_what_reset_returns_is_appended_to_the_prompt():
    """That is what the row alone would be: without tools, with its own ones, a transcript."""
    tokenizer = chat_templates.tokenizer("llama3_1")
    settings = {**SETTINGS, "max_length": 1000, "strings_as_messages": True}
    sampler = bare_sampler(tokenizer=tokenizer, **settings)
    stage = episodes.EpisodeRunner(sampler, None, environments.UserClass("E", MINE.Once, False, []))
    add = environments.get_json_schema(MINE.Adds().add)
    turns = say("user", "Hi.") + say("assistant", "Yes?")
    transcript = "\n\nHuman: Hi.\n\nAssistant: Yes?\n\nHuman: 1+2=\n\nAssistant:"
    for row, before, tools in [
        ({"prompt": say("user", "1+2="), "tools": []}, [], None),
        ({"prompt": say("user", "1+2="), "tools": [add]}, [], [add]),
        ({"prompt": transcript}, turns, None),
    ]:
        prompts = {"prompt_ids": [[1]], "row_json": [json.dumps(row)], "row": [1]}
        found = stage.opening(prompts, 0, " Think.")
        assert found.messages == before + say("user", "1+2= Think.")
        text = rendering.render(tokenizer, found.messages, tools, add_generation_prompt=True)
        assert decode(tokenizer, found.prompt) == text
        assert ("ipython" in text) == (tools is not None)


# ============================================================ environments that misbehave


def test_an_environment_that_fails_ends_the_run(play):
    class Raises(MINE.Once):
        def step(self, message):
            raise ValueError("no such game")

    class Blocks(MINE.Once):
        def step(self, message):
            time.sleep(600)

    class Exits(MINE.Once):
        def step(self, message):
            sys.exit(0)

        def close(self):  # of no consequence
            sys.exit(0)

    runs.refuses("test_environments.py", "ended the run: sys.exit(0)", call=lambda: play(Exits))
    with pytest.raises(ValueError, match="no such game"):
        play(Raises)
    with pytest.raises(TimeoutError, match="longer than --environment_timeout"):
        play(Blocks, environment_timeout=0.5)


# ============================================================ whole runs

FLAGS = dict(environment="my_environments:Echo", eval_dataset_name="held_out.jsonl")
FLAGS |= dict(max_turns=3, rollout_batch_size=4, n_samples_per_prompt=2, max_new_tokens=20)
FLAGS |= dict(max_length=100, train_batch_size=4, learning_rate=3e-3, max_steps=4)
GRPO = dict(FLAGS, drop_equal_groups=False)


def run(folder, output, settings, name="grpo", launcher="plain"):
    flags = runs.short_run(folder, "prompts", output, **settings)
    return runs.launch(runs.LAUNCHERS[launcher], runs.recipe(name), *flags, cwd=folder)


@pytest.mark.parametrize(
    "name, launcher, more",
    [
        ("grpo", "ddp", {"lora_r": 4}),
        ("grpo", "ddp", {"vllm_url": "of the server"}),
        runs.slow("ppo", "ddp", {}),
        runs.slow("grpo", "zero3", {}),
    ],
)
def test_an_update_is_the_same_however_episodes_are_split(folder, tmp_path, name, launcher, more):
    """Also where each process asks a server for its own."""
    settings = {**(GRPO if name == "grpo" else FLAGS), **more}
    server = FakeServer(folder / "model")
    if "vllm_url" in more:
        settings["vllm_url"] = server.url
    run(folder, tmp_path / "one", dict(settings, micro_train_batch_size=4), name)
    asked = server.paths().count("/v1/completions")
    run(folder, tmp_path / "two", dict(settings, micro_train_batch_size=1), name, launcher)
    assert server.paths().count("/v1/completions") == 2 * asked
    assert (asked > 0) == ("vllm_url" in more)
    expect_alike(tmp_path / "one", tmp_path / "two", rel=1e-4)
    lines = runs.training_lines(tmp_path / "one")
    assert 1 < lines[0]["environment/turns"] <= 3
    assert lines[0]["environment/environment_tokens"] > 0
    assert "eval/environment/turns" in runs.evaluation_lines(tmp_path / "one")[0]
    # Also of a later rollout: it is sampled with the adapters that are trained.
    differences = [line.get("sampling/sampling_logp_difference/max", 0.0) for line in lines]
    assert max(differences) < 1e-5
    shown = runs.samples(tmp_path / "one")[0]
    assert [message["role"] for message in shown["messages"]][:3] == ["user", "assistant", "user"]


def test_reward_functions_get_conversations_and_environments(play):
    def told(prompts, responses, messages, environments):
        for response, conversation in zip(responses, messages):
            assert conversation[-1]["role"] == "assistant"
            assert conversation[-1]["content"].startswith(response[:1])
        return [10 * len(environment.said) for environment in environments]

    sampler, _, _, found = play(MINE.Echo)
    said = [len(instance.said) for instance in sampler.episodes.instances.values()]
    grader = grader_of({"told": 1.0, "environment": 2.0}, told=told)
    scores = grader.score(sampler, found)
    assert scores.parts["told"].tolist() == [10 * each for each in said] and max(said) > 0
    assert torch.equal(scores.total, scores.parts["told"] + 2 * scores.parts["environment"])


@pytest.mark.parametrize("name", ["Checker", "Calculator", "Remote"])
def test_the_examples_of_the_page(play, name):
    page = (runs.REPOSITORY / "docs/environments.md").read_text()
    code = next(c for c in re.findall("```python\n(.*?)```", page, re.DOTALL) if name in c)

    class Client:
        """Asks twice."""

        asked = 0

        async def reset(self):
            return types.SimpleNamespace(observation="1+1=")

        async def step(self, text):
            self.asked += 1
            done = self.asked == 2
            return types.SimpleNamespace(observation="2+2=", reward=0.5, done=done)

        async def close(self):
            self.asked = None

    names = {"connect": lambda url: Client()}
    exec(code, names)
    make = names[name]
    if name == "Checker":
        make = type(
            "WithAnswer", (make,), {"reset": lambda self, **_: names[name].reset(self, "046")}
        )
    sampler, _, _, found = play(make, max_length=400, max_turns=2)
    turns_of = found.statistics["environment/turns"].tolist()
    assert turns_of == {"Checker": [2] * 4, "Calculator": [1] * 4, "Remote": [2] * 4}[name]
    if name != "Calculator":
        grader = grader_of({"environment": 1.0})
        rewards = grader.scores_of_functions(sampler, found)["environment"]
        assert rewards == [{"Checker": 0.0, "Remote": 0.5}[name]] * 4


@pytest.mark.slow
def test_the_demo_learns_to_read_the_environments_answer(tmp_path):
    """Docs: from 0.2 to 0.8. A first guess alone is right once in ten times."""
    words = [runs.recipe("grpo"), runs.ASSETS / "card.yaml", "--output_dir", tmp_path / "out"]
    runs.launch([], *words, "--eval_steps", 0, timeout=900)
    before, *_, after = [line["eval/scores"] for line in runs.evaluation_lines(tmp_path / "out")]
    assert after >= before + 0.25 and after >= 0.1 + 0.25
