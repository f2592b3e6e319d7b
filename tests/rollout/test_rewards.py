"""Reward functions: what they are given, how their scores are added, and how they may fail."""

import asyncio
import copy
import decimal
import json
import math
import sys

import pytest
import torch
from datasets import Dataset

from bare_runs import bare_grader, bare_sampler, data_of, grader_of
from preference_recipes.rollouts import rewards
from preference_recipes.rollouts.samples import Samples
from runs import LAUNCHERS, REPOSITORY, launch, refuses

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
    row_json, row_numbers = [rows[i] for i in twice], [i + 11 for i in twice]
    return Samples([[5, 6]] * 6, responses, row_json, row_numbers, ended, per_prompt=2)


def score(accelerator, tokenizer, grader, samples=None, step: int = 7) -> rewards.Scores:
    sampler = bare_sampler(accelerator, tokenizer)
    sampler.run.global_step = step
    return grader.score(sampler, samples or samples_of(tokenizer))


def length(prompts, responses):
    return [len(response) for response in responses]


# ---------------------------------------------------------------------------------------------- what it is given


def test_a_function_is_called_once_with_what_its_signature_names(accelerator, tokenizer):
    seen = []

    def function(prompts, responses, **columns):
        seen.append((prompts, responses, columns))
        return [0] * len(prompts)

    def named(prompts, responses, weight, step):
        return [value * step for value in weight]

    columns = dict(weight=[1, 2, 3], step=["x", "y", "z"], prompts=[0, 0, 0])
    samples = samples_of(tokenizer, **columns)
    found = score(accelerator, tokenizer, grader_of(f=function, named=named), samples)
    ((prompts, responses, given),) = seen
    assert prompts == ["p0", "p0", "p1", "p1", "p2", "p2"] and responses == TEXTS
    assert given == {
        "weight": [1, 1, 2, 2, 3, 3],
        "response_ids": samples.responses,
        "truncated": [False, False, True, False, False, False],
        "rendered_prompts": [tokenizer.decode(prompt) for prompt in samples.prompts],
        "step": 7,  # of the run: a column of that name gives way
    }
    assert found.parts["named"].tolist() == [7, 7, 14, 14, 21, 21]


def test_what_a_function_changes_reaches_neither_samples_nor_the_next_one(accelerator, tokenizer):
    seen = []

    def meddles(prompts, responses, **columns):
        seen.append(copy.deepcopy((prompts, responses, columns)))
        for value in (prompts, *columns["response_ids"], *columns["tests"]):
            value.pop()
        responses[:] = ["x"]
        columns["tests"][0][0]["in"].append(7)
        return [1.0] * 6

    tests = [[{"in": [row]}, {"in": []}] for row in range(3)]
    samples = samples_of(tokenizer, tests=tests)
    before = copy.deepcopy(samples)
    score(accelerator, tokenizer, grader_of(one=meddles, two=meddles), samples)
    assert (samples.prompts, samples.responses) == (before.prompts, before.responses)
    assert seen[0] == seen[1] and seen[1][1] == TEXTS


def test_async_functions_share_one_event_loop(accelerator, tokenizer):
    """A client that a function keeps from call to call is bound to the loop that made it."""
    loops = []

    async def function(prompts, responses, step):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [step] * len(responses)

    for step in (1, 2):
        found = score(accelerator, tokenizer, grader_of(f=function), step=step)
        assert found.total.tolist() == [step] * 6
    assert loops[0] is loops[1] and not loops[0].is_closed()


# ---------------------------------------------------------------------------------------------- the sum


def test_the_total_is_the_weighted_sum_of_the_parts_that_are_there(accelerator, tokenizer):
    def some(prompts, responses, **columns):
        return [None if len(text) == 2 else 10.0 for text in responses]

    grader = grader_of(length=length, some=some, weights={"length": 0.5, "some": -2.0})
    found = score(accelerator, tokenizer, grader)
    assert found.total.dtype == found.parts["some"].dtype == torch.float32
    assert found.total.tolist() == [1, 2 - 20, 1, 1, 0.5 - 20, 2 - 20]
    assert found.parts["length"].tolist() == [2, 4, 2, 2, 1, 4]
    assert found.parts["some"].nan_to_num(-1).tolist() == [-1, 10, -1, -1, 10, 10]


def test_a_sample_without_a_reward_is_refused_and_a_sum_beyond_fp32(accelerator, tokenizer):
    """A part of weight 0 only measures. So a response that no other part scores has no reward."""
    none = lambda prompts, responses: [None] * 6
    some = lambda prompts, responses: [1.0] * 6
    large = lambda prompts, responses: [0, 0, 3e38, 0, 0, 0]
    grader = grader_of(right=none, brief=some, weights={"right": 0.0, "brief": 1.0})
    assert score(accelerator, tokenizer, grader).total.tolist() == [1.0] * 6
    grader.weights = {"right": 1.0, "brief": 0.0}
    refuses("the reward of data row 11 is nan", call=lambda: score(accelerator, tokenizer, grader))
    grader = grader_of(large=large, length=length, weights={"large": 2.0, "length": -1.0})
    refuses("data row 12 is inf", "fp32", call=lambda: score(accelerator, tokenizer, grader))


class Scorer(torch.nn.Module):
    """A reward model that gives these scores to the samples, one micro-batch after the other."""

    def __init__(self, scores):
        super().__init__()
        self.left = list(scores)

    def forward(self, inputs):
        count = len(inputs["loss_mask"])
        scores, self.left = self.left[:count], self.left[count:]
        return torch.tensor(scores)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_reward_model_that_is_not_finite_ends_the_run(accelerator, tokenizer, bad):
    """NaN is not None: with a function beside it, it would count as no score."""
    grader = grader_of(length=length, weights={"reward_model": 1.0, "length": 1.0})
    grader.model = Scorer([0.5, 1.0, 2.0, 3.0, 4.0, 6.5])
    found = score(accelerator, tokenizer, grader).parts["reward_model"].tolist()
    assert sorted(found) == [0.5, 1, 2, 3, 4, 6.5]
    grader.model = Scorer([0.5, 1.0, 2.0, 3.0, bad, 6.5])
    refuses("the reward", str(bad), call=lambda: score(accelerator, tokenizer, grader))


# ---------------------------------------------------------------------------------------------- what it may return


@pytest.mark.parametrize(
    "returned",
    [
        (True, 2, 3.0, 4, decimal.Decimal(5), 6),
        torch.arange(1.0, 7.0),
        torch.arange(1.0, 7.0).numpy(),
        Dataset.from_dict({"score": range(1, 7)}).to_pandas()["score"],
        dict(enumerate(range(1, 7))).values(),
        (number for number in range(1, 7)),
    ],
    ids=lambda returned: type(returned).__name__,
)
def test_what_may_be_returned(accelerator, tokenizer, returned):
    found = score(accelerator, tokenizer, grader_of(f=lambda prompts, responses: returned))
    assert found.total.tolist() == [1, 2, 3, 4, 5, 6]


WRONG = {
    "nothing": (None, ["expected 6 numbers", "got None"]),
    "one for all": ([1.0], ["expected 6 numbers", "got [1.0]"]),
    "texts": (["good"] * 6, ["got ['good'"]),
    # Numbers all of them, and none a score.
    "texts of digits": (list("123456"), ["expected 6 numbers", "got ['1'"]),
    "a text of digits": ("123456", ["expected 6 numbers", "got '123456'"]),
    "bytes": (b"123456", ["expected 6 numbers", "got b'123456'"]),
    "a dict": (dict.fromkeys(range(6), 1.0), ["expected 6 numbers", "got {0: 1.0"]),
    "its keys": (dict.fromkeys(range(6)).keys(), ["expected 6 numbers", "got dict_keys"]),
    "a set": (set(range(6)), ["expected 6 numbers", "got {0, 1"]),
    "a table": (Dataset.from_dict({str(n): [0.5] for n in range(6)}).to_pandas(), ["got 0 1"]),
    "beyond fp32": ([0, 0, 0, -1e39, 0, 0], ["row 12", "-inf", "fp32"]),
    "NaN": ([0, 0, 0, math.nan, 0, 0], ["expected 6 numbers", "nan"]),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_may_not_be_returned(accelerator, tokenizer, kind):
    returned, parts = WRONG[kind]
    grader = grader_of(length=length, mine=lambda prompts, responses: returned)
    refuses("mine", *parts, call=lambda: score(accelerator, tokenizer, grader))


@pytest.mark.parametrize("code", [0, None, 3, ""])
def test_an_exit_without_a_word_says_where(accelerator, tokenizer, code):
    def exits(prompts, responses):
        sys.exit(code)

    call = lambda: score(accelerator, tokenizer, grader_of(f=exits))
    refuses(__file__, ", ended the run: sys.exit(code)", call=call)


def test_an_exit_in_an_async_function_is_an_error(accelerator, tokenizer):
    """Else it would end the event loop, and the run would wait forever."""

    async def late(prompts, responses):
        await asyncio.sleep(0)
        exit()

    with pytest.raises(RuntimeError, match=r"sys.exit\(None\)"):
        score(accelerator, tokenizer, grader_of(f=late))


# ---------------------------------------------------------------------------------------------- names and signatures


def test_functions_are_loaded_with_their_names_and_weights(tmp_path, monkeypatch):
    def load(functions, weights=None):
        settings = dict(reward_function=functions, reward_weights=weights)
        return bare_grader(data=data_of(['{"prompt": "p", "a": 1}']), **settings)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "script_of_test.py").write_text("import sys\nsys.exit(0)\n")
    script = lambda: load(["script_of_test:good"])
    refuses("script_of_test.py, line 2, ended the run: sys.exit(0)", call=script)
    for module in ("one_of_test", "two_of_test"):
        (tmp_path / f"{module}.py").write_text("def good(p, r): ...\ndef reward_model(p, r): ...\n")
    names = ["one_of_test:good", "preference_recipes.rollouts.rewards:answer_reward"]
    grader = load(names)
    assert grader.weights == {"good": 1.0, "answer_reward": 1.0}
    assert grader.columns == ["prompt", "a"]
    same = ["one_of_test:good", "two_of_test:good", "two_of_test:reward_model"]
    assert load(same, [1, 0, 2]).weights == dict(zip(same, [1, 0, 2]))
    for order in ("responses, prompts", "completions, **columns"):
        (tmp_path / "swapped_of_test.py").write_text(f"def swapped({order}): ...\n")
        swapped = lambda: load(["swapped_of_test:swapped"])
        refuses("prompts and responses come first, in this order", call=swapped)
        sys.modules.pop("swapped_of_test")
    refused = ["--reward_weights", "expected 2 finite numbers", "good, answer_reward"]
    for weights in ([1.0], [1.0, math.nan]):
        refuses(*refused, call=lambda weights=weights: load(names, weights))


def test_the_columns_of_several_sets_are_those_of_all_its_sets(accelerator, tokenizer):
    """A call may have rows of one set alone. It gets None for what only the others have."""
    seen = []

    def function(prompts, responses, answer, level, other=0):
        seen.append((answer, level, other))
        return [0.0] * len(responses)

    sets = [{"answer": "1"}, {"level": 2, "other": 3}]
    texts = [[json.dumps({"prompt": "p", **row})] * 3 for row in sets]
    grader = bare_grader(data=data_of(*texts))
    grader.functions = {"f": function}
    grader.weights = {"f": 1.0}
    score(accelerator, tokenizer, grader, samples_of(tokenizer, answer=["a", "b", "c"]))
    assert seen == [(["a", "a", "b", "b", "c", "c"], [None] * 6, [None] * 6)]


# ---------------------------------------------------------------------------------------------- runs

TWO = """
import sys
sys.path[:0] = [{tests!r}, {tests!r} + "/rollout", {repository!r}]
import os
from accelerate import Accelerator
from transformers import AutoTokenizer
import test_rewards

def on_the_second(prompts, responses, **columns):
    if os.environ["RANK"] == "1":
        return {body}
    return [1.0] * len(responses)

accelerator = Accelerator(cpu=True)
tokenizer = AutoTokenizer.from_pretrained({tests!r} + "/../assets/model")
grader = test_rewards.grader_of(on_the_second=on_the_second)
scores = test_rewards.score(accelerator, tokenizer, grader)
print("scores", accelerator.process_index, scores.total.tolist(), flush=True)
"""


@pytest.mark.parametrize("body", ["[2.0] * len(responses)", "[]", "exit(0)"])
def test_two_processes_share_the_prompts_and_a_failure_of_one_ends_both(tmp_path, body):
    script = tmp_path / "two_of_test.py"
    tests = str(REPOSITORY / "tests")
    script.write_text(TWO.format(tests=tests, repository=str(REPOSITORY), body=body))
    done = launch(LAUNCHERS["ddp"], script, check=False)
    said = {"[]": "expected 2 numbers", "exit(0)": "two_of_test.py, line 11, ended the run"}
    if body in said:
        assert done.returncode and "[1.0" not in done.stdout
        assert said[body] in done.stdout
    else:  # two of the three prompts are the first process's
        assert done.stdout.count("[1.0, 1.0, 1.0, 1.0, 2.0, 2.0]") == 2
