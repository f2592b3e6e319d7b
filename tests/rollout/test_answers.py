"""Whether a response gives the right answer: a table of what people and models write."""

import collections
import copy
import sys

import datasets
import pytest

import architectures
import templates
from bare_runs import bare_sampler
from plain_rollouts import alone
from preference_recipes.data import chat, dataset
from preference_recipes.rollouts import answers, results, rewards
from preference_recipes.rollouts.answers import decode_responses
from preference_recipes.rollouts.context import Response

# What a response says, the column `answer`, and whether the response is right.
TABLE = [
    # GSM8K's mark, LaTeX's box, a sentence.
    ("#### 4", "1 + 1 is 2, twice #### 4", True),
    ("#### 18\n\nQuestion: the next one", "18", True),
    (r"So it is \boxed{18}.", "18", True),
    (r"\boxed{8} or rather \boxed{18}", "18", True),
    (r"\boxed{18} and \boxed{8", "18", True),
    (r"\boxed{x^{2}+1}", "x^{2}+1", True),
    (r"\boxed{\dfrac{3}{4}}", r"Hence \boxed{\frac{3}{4}}.", True),
    (r"\boxed{\text{Paris}}", "Paris", True),
    (r"\mbox{42} \boxed{4}", "42", False),
    (r"\boxed{\tfrac34}", r"\frac{3}{4}", True),
    ("The final answer is $18$. I hope it is correct.", "18", True),
    ("**Answer:** 18", "18", True),
    ("The answer is 8. No, the answer is 18.", "18", True),
    ("The answer is 18.5.", "18.5", True),
    # Units and currencies.
    ("#### $18", "18", True),
    ("#### 18 dollars", "18", True),
    ("x = 18", "18", True),
    ("18x", "18", False),
    # Numbers by their value.
    ("1,200", "1200", True),
    (r"1{,}200", "1200", True),
    ("$1,200.50", "1200.5", True),
    ("1,2", "12", False),
    ("#### 40", 4.0, False),
    ("\u22125", "-5", True),
    # More than one number is no answer.
    ("18 or 19", "18", False),
    ("10:30", "10", False),
    # Per cent is a unit, not a hundredth.
    ("25%", "25", True),
    ("0.25", "25%", False),
    # Fractions are texts.
    ("1/2", "0.5", False),
    # Texts.
    ("The answer is Paris.", "paris", True),
    ("The answer is  New\nYork", "New York", False),
    ("new  york.", "New York", True),
    ("The answer is (B).", "B", True),
    ("", "18", False),
    # Digits that begin with a zero are a text: the demo's sums are of three digits.
    ("063", "63", False),
    # Thoughts do not count.
    ("<think>\n\n</think>\n\n4", "4", True),
    ("<think>4</think>5", "4", False),
    ("<reasoning>4</reasoning>5", "5", True),
    ("<answer>5</answer>\n<reasoning>because 2 + 3</reasoning>", "5", True),
    ("#### 2. Add\n9+9\n\n**Answer:** 18", "18", True),
    ("\\boxed{5}\n#### Note\nDone", "5", True),
    ("The answer is 0.00001", 1e-05, True),
    ("It is 2e3 or 3", "2000", False),
    ("It is 90\u00b0.", "90", True),
    (r"\boxed{90}", r"90^{\circ}", True),
    (r"\boxed{18^\circ C}", "18", True),
    ("10²³", "10", False),
    ("**Answer:**\n18", "18", True),
    ("The answer is 5.\nAnswer: ", "5", True),
    ("The answer is:\n- 18", "18", True),
    ("The answer to 3.5 + 1 is 4.5.", "4.5", True),
    (r"The area is \(18 \text{ cm}^{2}\).", "18", True),
    ("x^2 + 1", r"x^{2} + 1", True),
    ("25°C", "25°F", False),
    ("The area is 25cm².", "25", True),
    ("5x²", "5", False),
    ("The answer is 1e99999999999999999999", "18", False),  # no Decimal holds it
    ("1e99999999999999999999", "1e99999999999999999999", True),
    ("x\u00b2 = 25", "25", True),
    ("<|channel>thought\nThe answer is 4", "4", False),
    ("[THINK]The answer is 4", "4", False),
    # Whichever mark is last; Markdown's headings are marks, too.
    (r"\boxed{17}, no: #### 18", "18", True),
    ("#### 18 as in \\boxed{17", "18", False),
    ("<answer>17</answer> or <answer>18</answer>", "18", True),
    # MATH-500: spaces and sizes of fractions do not count.
    (r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)", True),
    (r"\boxed{\dfrac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}", True),
    ("now here", "nowhere", False),
    # Thousands between thin, no-break and figure spaces, or apostrophes; an ordinary space is none.
    ("It is 1\u00a0234\u00a0567.", "1,234,567", True),
    ("\u2212\u200912\u2009345,5", "12345", False),
    ("1'200", "1\u2019200", True),
    ("1\u2019234\u2019567.50", "1234567.5", True),
    (r"1\,200", "1\u2009200", True),
    ("1 200", "1200", False),
    ("1\u00a020", "120", False),
    ("0\u00a0200", "200", False),
    ("3.141\u00a0592", "3141592", False),
    ("5\u00a0or\u00a06", "5", False),
    ("18\u00a0km", "18", True),
    ("\u2212\u200918", "-18", True),
    ("Answer:\u00a018", "18", True),
    ("New\u00a0York", "New York", True),
    # Characters that take no room; joiners are left out on both sides.
    ("#### 1\ufeff8", "18", True),
    ("18", "\u200e18\u200f", True),
    ("co\u00adop", "coop", True),
    # Digits and signs of other keyboards, but not superscripts.
    ("\uff11\uff0c\uff12\uff10\uff10", "1200", True),
    ("18", "\u0661\u0668", True),
    ("\U0001d7cf\U0001d7d6\uff05", "18", True),
    ("answer\uff1a\uff0d5", "-5", True),
    ("\uff08\uff22\uff09", "B", True),
    # Typographic quotes.
    ("It\u2019s \u201cso\u201d", 'it\'s "so"', True),
    ("f\u2032(x)", "f'(x)", True),
    # A unit of one letter counts as one where LaTeX says that it is a text.
    (r"5\,\mathrm{m/s}", "5", True),
    (r"\boxed{5~\text{m}}", "5", True),
    (r"5\ \mathrm{m}", "5", True),
    (r"5\mathrm{m/s}", "5", True),
    ("5m/s", "5", False),
    ("5 m/s", "5", True),
    ("18km/h", "1.8e1", True),
    (r"2\text{B}", "2B", True),
    (r"3\,x", "3x", True),
    # A tag that is only mentioned.
    ("so <answer> </answer> tags. The answer is 5", "5", True),
    ("I open <answer> and write <answer>18</answer>", "18", True),
    ("I use <answer>...</answer>.\n#### 5", "5", True),
]


DEGENERATE = [
    "*",
    "**Answer** ",
    "the answer ",
    "<think>",
    "answer",
    "\\boxed{",
    "\\boxed{1 <answer>",
    "<answer>",
    "<answer> </answer>",
    "#### ",
    "#### 1 a\n",
    "####\n",
    "answer is\n",
    "{",
    "^ ",
    "'200",
    " ",
]


def lines_run(text: str) -> int:
    """Lines of `answers.py` that judging a response runs."""
    counts = collections.Counter()

    def trace(frame, event, argument):
        if frame.f_code.co_filename == answers.__file__:
            counts[event] += 1
            return trace

    sys.settrace(trace)
    try:
        assert not answers.is_right(text, "5")
    finally:
        sys.settrace(None)
    return counts["line"]


@pytest.mark.parametrize("before", ["The answer", "^", "\\boxed{"])
@pytest.mark.parametrize("repeated", DEGENERATE)
def test_a_degenerate_response_is_judged_in_linear_time(before, repeated):
    """Lines of Python are counted. A pattern that starts over at each place shows in the long text, by its minutes."""
    text = lambda length: before + repeated * (length // len(repeated))
    assert lines_run(text(2**12)) <= 2.1 * lines_run(text(2**11))
    assert not answers.is_right(text(2**17), "5")


@pytest.mark.parametrize("response, answer, right", TABLE)
def test_a_response_is_right(response, answer, right):
    assert answers.is_right(response, answer) == right
    found = rewards.answer_reward(["", ""], [response, str(answer)], [answer, answer])
    assert found == [float(right), 1.0]


def test_markers_of_thoughts_that_are_special_tokens_stay_in_the_text():
    """Without them the thought runs into the answer, or, if the prompt opened it, hides all of it."""
    tokenizer = copy.deepcopy(templates.tokenizer("qwen2_5"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    texts = ["[THINK]The answer is 5[/THINK]4<|im_end|>", "one<|im_end|>"]
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    (thought, plain) = decode_responses(tokenizer, ids)
    assert plain == tokenizer.decode(ids[1], skip_special_tokens=True) == "one"
    assert "[THINK]" in thought and "[/THINK]" in thought and "<|im_end|>" not in thought
    assert answers.is_right(thought, "4") and not answers.is_right(thought, "5")


@pytest.mark.parametrize("thought", [None, "I add 3 and 4"])
@pytest.mark.parametrize("name", ["gptoss", "muse_glimmer", "glm4moe"])
def test_what_is_learned_of_a_right_answer_is_right(name, thought):
    """`final` and `to=user`, which stand in front of an answer, were read as parts of it."""
    tokenizer = templates.tokenizer(name)
    question = {"role": "user", "content": "3 + 4?"}
    answer = {"role": "assistant", "content": "It is 7", "reasoning_content": thought}
    prompt, [learned], _ = chat.encode_answers(tokenizer, [question], [[answer]])
    [text] = decode_responses(tokenizer, [learned.ids])
    assert answers.is_right(text, "It is 7", tokenizer.decode(prompt))
    assert text == "It is 7" or name == "glm4moe"  # that has a thought, and maybe an empty one
    if thought and name != "glm4moe":
        cut = learned.ids[: learned.ids.index(tokenizer("I").input_ids[-1]) + 5]
        assert decode_responses(tokenizer, [cut, tokenizer("4").input_ids[-1:]]) == ["", "4"]


def test_a_thought_that_the_prompt_opened_and_nothing_closed_is_no_answer():
    prompts = ["<bot><think>\n", "<bot><think>\n", "<bot><seed:think>", "<bot>", "<bot>"]
    responses = ["The answer is 46.", "So 46.</think>46", "It is 46.", "It is 46.", "<think>46"]
    found = rewards.answer_reward(["data"] * 5, responses, ["46"] * 5, rendered_prompts=prompts)
    assert found == [0.0, 1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("answer", [["2", "two"], ("2", None, "two", ""), [2.0, "two"]])
def test_of_a_list_any_entry_is_right(answer):
    """As in nq_open and TriviaQA. A text that looks like a list is a text."""
    responses = ["2", "The answer is Two.", "#### 2", "3", "2 or 3"]
    expected = [1.0, 1.0, 1.0, 0.0, 0.0]
    assert rewards.answer_reward([""] * 5, responses, [answer] * 5) == expected
    kept = dataset.answer_text(answer)
    assert [float(answers.is_right(text, kept)) for text in responses] == expected
    assert answers.is_right("The answer is [1, 2]", dataset.answer_text("[1, 2]"))
    assert not answers.is_right("1", dataset.answer_text("[1, 2]"))


def test_a_row_without_an_answer_is_not_scored():
    none = ["4", "", None, [], ["", None]]
    assert rewards.answer_reward([""] * 5, ["4"] * 5, none) == [1.0, None, None, None, None]


@pytest.mark.parametrize("answer", [{"value": "2"}, [{"value": "2"}], [["2"], "two"]])
def test_an_answer_that_is_an_object_is_refused(answer):
    with pytest.raises(ValueError, match="column 'answer' holds an object"):
        rewards.answer_reward(["a", "b"], ["2", "2"], ["2", answer])


@pytest.mark.parametrize(
    ("limit", "rows", "share"), [(None, [11, 12, 14], 2 / 3), (2, [11, 12], 1), (0, [], None)]
)
def test_exact_match_over_some_rows(accelerator, tokenizer, monkeypatch, limit, rows, share):
    """Two rows have no answer. Each other one is compared with its own: the response is its number, less 10."""
    ids = {"row": [10, 11, 12, 13, 14], "prompt_ids": [[5 + n] * (5 + n) for n in range(5)]}
    eval_set = datasets.Dataset.from_dict({**ids, "answer": ["", "1", "2", "", "5"]})
    said = lambda ids: Response(tokenizer(str(ids[0] - 5)).input_ids, [])
    generate = lambda sampler, prompts, *_, **settings: list(map(said, prompts))
    monkeypatch.setattr(results, "generate", generate)
    sizes = dict(max_new_tokens=3, exact_match_rows=limit)
    sampler = bare_sampler(accelerator, tokenizer, architectures.build("llama"), **sizes)
    asked = (sampler.run, sampler.model, tokenizer)
    shares, examples = results.exact_match(*asked, eval_set, "eval/sums/")
    assert [example["row"] for example in examples] == rows
    assert [example["right"] for example in examples] == [row != 14 for row in rows]
    assert shares == ({"eval/sums/exact_match": pytest.approx(share)} if rows else {})


def test_a_prompt_that_fills_all_positions_is_left_out(accelerator, tokenizer, capsys):
    """GPT-2 reads 64 tokens here; the second prompt leaves room for one."""
    ids = {"row": [10, 11, 12], "prompt_ids": [[5] * 64, [6] * 63, [7] * 70]}
    eval_set = datasets.Dataset.from_dict({**ids, "answer": ["1", "1", "1"]})
    model = architectures.build("gpt2")
    sampler = bare_sampler(accelerator, tokenizer, model, max_new_tokens=3, exact_match_rows=None)
    asked = (sampler.run, sampler.model, tokenizer)
    _, (example,) = results.exact_match(*asked, eval_set, "eval/")
    expected, _ = alone(model, [6] * 63, None, 0.0, sampler.stop_tokens(), 1)
    assert (example["row"], example["response"]) == (11, tokenizer.decode(expected))
    said = "eval/exact_match: left out (64 positions are too few): 2 rows"
    assert said in capsys.readouterr().out
    assert results.exact_match(*asked, eval_set.select([0]), "eval/") == ({}, [])
