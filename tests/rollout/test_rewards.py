"""Reward functions: what they are given, how their scores are added, and how they may fail."""

import asyncio
import copy
import itertools
import json
import math
import time

import pytest
import torch

from bare_runs import SHARING, alone_in, bare_sampler, data_of
from preference_recipes.rollouts import rewards
from preference_recipes.rollouts.samples import Samples, share_of_groups
from runs import LAUNCHERS, REPOSITORY, launch, lines, recipe, refuses, tiny_inputs

# Three prompts with two responses each; the third response does not end.
TEXTS = ["12", "3456", "78", "90", "1", "5555"]


def samples_of(tokenizer, **columns) -> Samples:
    """Samples of the texts above; `columns` holds a value for each prompt."""
    rows = [
        json.dumps({"prompt": f"p{row}", **{name: values[row] for name, values in columns.items()}})
        for row in range(3)
    ]
    responses = [[*tokenizer(text).input_ids, 1] for text in TEXTS]
    responses[2].pop()
    ended = torch.tensor([response[-1] == 1 for response in responses])
    twice = [0, 0, 1, 1, 2, 2]
    return Samples(
        [[5, 6]] * 6, responses, [rows[i] for i in twice], [i + 11 for i in twice], ended, per_prompt=2
    )  # fmt: skip


def judge_of(weights: dict | None = None, **functions) -> rewards.Judge:
    judge = rewards.Judge(bare_sampler())
    judge.functions = functions
    judge.weights = weights or dict.fromkeys(functions, 1.0)
    return judge


def score(accelerator, tokenizer, judge, samples=None, step: int = 7) -> rewards.Scores:
    sampler = bare_sampler(accelerator, tokenizer)
    sampler.progress.global_step = step
    return judge.score(sampler, samples or samples_of(tokenizer), SHARING)


def length(prompts, responses):
    return [len(response) for response in responses]


# ---------------------------------------------------------------------------------------------- what it is given


def test_a_function_is_called_once_with_all_of_its_process(accelerator, tokenizer):
    seen = []

    def function(prompts, responses, **columns):
        seen.append((prompts, responses, columns))
        return [0] * len(prompts)

    samples = samples_of(tokenizer, answer=["a", "b", "c"], step=["x", "y", "z"], prompts=[0, 0, 0])
    score(accelerator, tokenizer, judge_of(f=function), samples)
    ((prompts, responses, columns),) = seen
    assert prompts == ["p0", "p0", "p1", "p1", "p2", "p2"] and responses == TEXTS
    assert columns == {
        "answer": ["a", "a", "b", "b", "c", "c"],
        "response_ids": samples.responses,
        "truncated": [False, False, True, False, False, False],
        "rendered_prompts": [tokenizer.decode(prompt) for prompt in samples.prompts],
        "step": 7,  # of the run: a column of that name gives way
    }


def test_a_part_of_weight_0_does_not_stand_for_a_reward(accelerator, tokenizer):
    """It only measures. So a response that no other part scores has no reward."""
    none = lambda prompts, responses: [None] * 6
    some = lambda prompts, responses: [1.0] * 6
    judge = judge_of(right=none, brief=some)
    judge.weights = {"right": 1.0, "brief": 0.0}
    refuses("the reward of data row 11 is None", call=lambda: score(accelerator, tokenizer, judge))
    judge.weights = {"right": 0.0, "brief": 1.0}
    assert score(accelerator, tokenizer, judge).total.tolist() == [1.0] * 6


def test_what_a_function_changes_reaches_neither_the_samples_nor_the_next_function(
    accelerator, tokenizer
):
    seen = []

    def meddles(prompts, responses, **columns):
        seen.append(copy.deepcopy((prompts, responses, columns)))
        for value in (prompts, *columns["response_ids"], *columns["tests"]):
            value.pop()
        responses[:] = ["x"]
        columns["answer"].clear()
        columns["tests"][0][0]["in"].append(7)
        columns["truncated"].reverse()
        return [1.0] * 6

    async def meddles_later(prompts, responses, tests, response_ids, **columns):
        await asyncio.sleep(0)
        return meddles(prompts, responses, tests=tests, response_ids=response_ids, **columns)

    tests = [[{"in": [row]}, {"in": []}] for row in range(3)]
    samples = samples_of(tokenizer, answer=["a", "b", "c"], tests=tests)
    before = copy.deepcopy(samples)
    score(accelerator, tokenizer, judge_of(one=meddles, two=meddles_later, three=meddles), samples)
    assert (samples.prompts, samples.responses) == (before.prompts, before.responses)
    assert (samples.row_texts, samples.data_rows) == (before.row_texts, before.data_rows)
    assert seen[0] == seen[1] == seen[2]
    assert seen[2][1] == TEXTS and seen[2][2]["response_ids"] == before.responses


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_prompts_samples_are_never_split_between_processes(processes):
    shares = [share_of_groups(alone_in(rank, processes), 3, 2) for rank in range(processes)]
    assert [*itertools.chain(*shares)] == [0, 1, 2, 3, 4, 5]
    assert all(len(share) % 2 == 0 for share in shares)
    assert max(map(len, shares)) - min(map(len, shares)) <= 2


def test_a_function_gets_what_its_signature_names(accelerator, tokenizer):
    def named(prompts, responses, weight, step):
        return [value * step for value in weight]

    samples = samples_of(tokenizer, weight=[1, 2, 3], answer=["a", "b", "c"])
    found = score(accelerator, tokenizer, judge_of(named=named, length=length), samples)
    assert found.parts["named"].tolist() == [7, 7, 14, 14, 21, 21]
    assert found.total.tolist() == [9, 11, 16, 16, 22, 25]


# ---------------------------------------------------------------------------------------------- the sum


def test_the_total_is_the_weighted_sum_of_the_parts_that_are_there(accelerator, tokenizer):
    def some(prompts, responses, **columns):
        return [None if len(text) == 2 else 10.0 for text in responses]

    judge = judge_of(length=length, some=some, weights={"length": 0.5, "some": -2.0})
    found = score(accelerator, tokenizer, judge)
    assert found.total.dtype == found.parts["some"].dtype == torch.float32
    assert found.total.tolist() == [1, 2 - 20, 1, 1, 0.5 - 20, 2 - 20]
    assert list(found.parts) == ["length", "some"]
    assert found.parts["length"].tolist() == [2, 4, 2, 2, 1, 4]
    torch.testing.assert_close(
        found.parts["some"],
        torch.tensor([math.nan, 10, math.nan, math.nan, 10, 10]),
        equal_nan=True,
    )


@pytest.mark.parametrize(
    "returned",
    [
        (1, 2, 3, 4, 5, 6),
        torch.tensor([1, 2, 3, 4, 5, 6]),
        torch.arange(1.0, 7.0).numpy(),
        [torch.tensor(float(n)) for n in range(1, 7)],
        [True, 2, 3.0, 4, 5, 6],
    ],
)
def test_what_may_be_returned(accelerator, tokenizer, returned):
    found = score(accelerator, tokenizer, judge_of(f=lambda prompts, responses: returned))
    assert found.total.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_sample_that_nothing_scored_is_refused(accelerator, tokenizer):
    none = lambda prompts, responses: [None] * 2 + [1.0] + [None] * 3
    other = lambda prompts, responses: [0.0] * 3 + [None] + [0.0] * 2
    refuses(
        "the reward of data row 12 is None", "'none': 1.0, 'other': 1.0",
        call=lambda: score(accelerator, tokenizer, judge_of(none=none, other=other)),
    )  # fmt: skip


def test_a_sum_that_fp32_does_not_hold_is_refused(accelerator, tokenizer):
    large = lambda prompts, responses: [0, 0, 3e38, 0, 0, 0]
    weights = {"large": 2.0, "length": -1.0}
    refuses(
        "data row 12 is 6e+38", "fp32", "{'large': 2.0, 'length': -1.0}",
        call=lambda: score(
            accelerator, tokenizer, judge_of(large=large, length=length, weights=weights)
        ),
    )  # fmt: skip


class Scorer(torch.nn.Module):
    """A reward model that gives these scores to the samples, one micro-batch after the other."""

    def __init__(self, scores):
        super().__init__()
        self.left = list(scores)

    def forward(self, inputs):
        count = len(inputs["mask"])
        scores, self.left = self.left[:count], self.left[count:]
        return torch.tensor(scores)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_model_that_is_not_finite_ends_the_run(accelerator, tokenizer, bad):
    """NaN is not None: with a function beside it, it would count as no score."""
    judge = judge_of(length=length, weights={"reward_model": 1.0, "length": 1.0})
    samples = samples_of(tokenizer)
    judge.model = Scorer([0.5, 1.0, 2.0, 3.0, 4.0, 6.5])
    found = score(accelerator, tokenizer, judge, samples).parts["reward_model"]
    assert sorted(found.tolist()) == [0.5, 1, 2, 3, 4, 6.5]
    position = found.tolist().index(4.0)
    judge.model = Scorer([0.5, 1.0, 2.0, 3.0, bad, 6.5])
    refuses(
        f"the reward model's score of data row {samples.data_rows[position]} is {bad}",
        call=lambda: score(accelerator, tokenizer, judge, samples),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- how it may fail


WRONG = {
    "nothing": (None, ["expected 6 numbers", "got None"]),
    "one for all": ([1.0], ["expected 6 numbers", "got [1.0]"]),
    "a table": (torch.zeros(6, 1), ["got [0.0]", "row 11"]),
    "a text": (["1"] * 6, ["got '1'", "row 11"]),
    "beyond fp32": ([0, 0, 0, -1e39, 0, 0], ["that fp32 holds", "got -1e+39", "row 12"]),
    "NaN": ([0, 0, 0, math.nan, 0, 0], ["got nan", "data row 12"]),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_may_not_be_returned(accelerator, tokenizer, kind):
    returned, parts = WRONG[kind]
    judge = judge_of(length=length, mine=lambda prompts, responses: returned)
    refuses("--reward_function mine", *parts, call=lambda: score(accelerator, tokenizer, judge))


def test_async_functions_share_one_event_loop(accelerator, tokenizer):
    """A client that a function keeps from call to call is bound to the loop that made it."""
    loops = []

    async def function(prompts, responses, step):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [step] * len(responses)

    judge = judge_of(f=function)
    for step in (1, 2):
        found = score(accelerator, tokenizer, judge, step=step)
        assert found.total.tolist() == [step] * 6
    assert loops[0] is loops[1] and not loops[0].is_closed()


# ---------------------------------------------------------------------------------------------- loading


def load(functions, weights=None):
    sampler = bare_sampler(
        data=data_of(['{"prompt": "p", "a": 1}']), reward_function=functions, reward_weights=weights
    )
    return rewards.Judge(sampler)


def test_functions_are_loaded_with_their_names_and_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module in ("one_of_test", "two_of_test"):
        (tmp_path / f"{module}.py").write_text("def good(p, r): ...\ndef reward_model(p, r): ...\n")
    names = ["one_of_test:good", "preference_recipes.rollouts.rewards:answer_reward"]
    judge = load(names)
    assert list(judge.functions) == list(judge.weights) == ["good", "answer_reward"]
    assert list(judge.weights.values()) == [1.0, 1.0] and judge.model is None
    assert judge.columns == ["prompt", "a"]
    judge = load(["one_of_test:good", "two_of_test:good", "two_of_test:reward_model"], [1, 0, 2])
    assert judge.weights == {
        "one_of_test:good": 1,
        "two_of_test:good": 0,
        "two_of_test:reward_model": 2,
    }
    for weights in ([1.0], [1.0, 2.0, 3.0], [1.0, math.nan]):
        refuses(
            "--reward_weights", "expected 2 finite numbers", "good, answer_reward",
            call=lambda weights=weights: load(names, weights),
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------- signatures


def check_signature(function, *rows: dict, held_out: dict | None = None) -> None:
    """Checks a function against a mixture of sets with such rows, and against a held-out set."""
    text = lambda row: json.dumps({"prompt": "p", **row})
    sets = [[text(row)] * 3 for row in rows or ({"answer": "1", "level": 2},)]
    eval_sets = {} if held_out is None else {"eval/": data_of([text(held_out)]).train}
    args = bare_sampler(reward_function=["tests:mine"], dataset_name="mine").args
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewards.arguments, "load_function", lambda *_: function)
        rewards.check_signatures(args, data_of(*sets, eval_sets=eval_sets))


def of_trl(completions, answer, **kwargs): ...
def of_trl_too(prompts, completions, **kwargs): ...
def wants_soluton(prompts, responses, soluton): ...
def swapped(responses, prompts): ...


@pytest.mark.parametrize("function, parts", [
    (wants_soluton, ["mine takes (prompts, responses, soluton): missing a required argument: 'soluton'", "answer, level, response_ids, truncated, rendered_prompts, step (of the training data)"]),
    (of_trl, ["mine takes (completions, answer, **kwargs): multiple values for argument 'answer'"]),
    (swapped, ["mine takes (responses, prompts)", "prompts and responses come first, in this order"]),
])  # fmt: skip
def test_a_signature_that_cannot_take_what_there_is(function, parts):
    refuses(f"--reward_function {parts[0]}", *parts, call=lambda: check_signature(function))


@pytest.mark.parametrize("function", [
    length, of_trl_too, rewards.answer_reward, rewards.format_reward,
    lambda p, r, step, level=None, other=0: 0, lambda *everything, **columns: 0,
    lambda prompts, responses, truncated, response_ids, answer: 0,
])  # fmt: skip
def test_a_signature_that_can_take_it(function):
    check_signature(function)


def test_the_columns_of_a_mixture_are_those_of_all_its_sets(accelerator, tokenizer):
    """A call may have rows of one set alone. It gets None for what only the others have."""
    seen = []

    def function(prompts, responses, answer, level, other="default"):
        seen.append((answer, level, other))
        return [0.0] * len(responses)

    sets = [{"answer": "1"}, {"level": 2, "other": 3}]
    check_signature(function, *sets)
    texts = [[json.dumps({"prompt": "p", **row})] * 3 for row in sets]
    judge = rewards.Judge(bare_sampler(data=data_of(*texts)))
    assert judge.columns == ["prompt", "answer", "level", "other"]
    judge.functions = {"f": function}
    judge.weights = {"f": 1.0}
    score(accelerator, tokenizer, judge, samples_of(tokenizer, answer=["a", "b", "c"]))
    assert seen == [(["a", "a", "b", "b", "c", "c"], [None] * 6, "default")]
    # Of a held-out set nothing is filled in: it would be scored as if it had no answers.
    refuses(
        "missing a required argument: 'level'", "(of eval)",
        call=lambda: check_signature(function, *sets, held_out={"answer": "1"}),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- runs


WAYWARD = """
import os
os.chdir("/")
def length(prompts, responses, **columns):
    os.chdir("/tmp")
    return [len(response) / 8 for response in responses]
"""


def test_a_function_that_goes_elsewhere_is_harmless(tmp_path):
    tiny_inputs(tmp_path)
    (tmp_path / "wayward.py").write_text(WAYWARD)
    command = [
        *("--model_name_or_path", "model", "--dataset_name", "grpo.jsonl", "--output_dir", "out"),
        *("--reward_function", "wayward:length", "--rollout_batch_size", 4, "--save_steps", 1),
        *("--n_samples_per_prompt", 4, "--train_batch_size", 8, "--max_new_tokens", 6),
        *("--resume", "auto", "--report_to", "none", "--max_steps"),
    ]
    for updates in (2, 3):
        launch([], recipe("grpo"), *command, updates, cwd=tmp_path)
    card = (tmp_path / "out/actor/README.md").read_text()
    assert "base_model" not in card and "datasets:" not in card  # no names of the hub
    assert [line["global_step"] for line in lines(tmp_path / "out")] == [1, 2, 3]


# ---------------------------------------------------------------------------------------------- two processes

TWO = """
import sys
sys.path[:0] = [{tests!r}, {tests!r} + "/rollout", {repository!r}]
import os
from accelerate import Accelerator
from transformers import AutoTokenizer
from preference_recipes.rollouts import reward_calls, rewards
import test_rewards

def on_the_second(prompts, responses, **columns):
    if os.environ["RANK"] == "1":
        return {body}
    return [1.0] * len(responses)

accelerator = Accelerator(cpu=True)
tokenizer = AutoTokenizer.from_pretrained({assets!r})
judge = test_rewards.judge_of(on_the_second=on_the_second)
scores = test_rewards.score(accelerator, tokenizer, judge)
print("scores", accelerator.process_index, scores.total.tolist(), flush=True)
"""
BODIES = {
    "scores": ("[2.0] * len(responses)", ""),
    "too few": ("[]", "expected 2 numbers"),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_failure_on_one_process_ends_all(tmp_path, kind):
    body, message = BODIES[kind]
    script = tmp_path / "two_of_test.py"
    tests = str(REPOSITORY / "tests")
    script.write_text(
        TWO.format(
            tests=tests,
            repository=str(REPOSITORY),
            assets=str(REPOSITORY / "assets/model"),
            body=body,
        )
    )
    start = time.perf_counter()
    done = launch(LAUNCHERS["ddp"], script, check=False)
    assert time.perf_counter() - start < 120
    if not message:
        # Two of the three prompts are the first process's.
        assert done.stdout.count("[1.0, 1.0, 1.0, 1.0, 2.0, 2.0]") == 2
        return
    assert done.returncode
    assert message in done.stdout
    assert "scores" not in done.stdout
