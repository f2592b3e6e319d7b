"""Under every chat template, what is learned is what the model reads and writes when it is used.

The templates are those of current models, from TRL's wheel, and three of our own; see templates.py. What is expected is
computed here from `apply_chat_template` and a table of what templates write in front of an answer.
"""

import copy
import datetime
import json
import runpy
import types

import jinja2
import pytest
from transformers import AutoTokenizer

import templates
from preference_recipes.data import chat, rendering
from preference_recipes.data.formats import labelled_row, preference_row, standard
from preference_recipes.data.messages import BadRow
from preference_recipes.data.prompts import prompt_row
from preference_recipes.data.rendering import stop_tokens
from preference_recipes.models import load
from runs import message, recipe, refuses, write_jsonl
from templates import load_rows

sft = runpy.run_path(str(recipe("sft")))
sft_row = sft["sft_row"]
reward_row = runpy.run_path(str(recipe("reward")))["reward_row"]

NAMES = templates.names()
# What a template writes between its generation prompt and an answer without thinking.
LEADS = {
    "qwen3": "<think>\n\n</think>\n\n",
    "qwen3_5_think": "\n</think>\n\n",
    "qwen3_6": "\n</think>\n\n",
    "qwen3_8": "\n</think>\n\n",
    "nemotron_3_5_lightning": "</think>",
    "nemotron_3_nano": "</think>",
    "nemotron_3_super": "</think>",
    "nemotron_3_ultra": "</think>",
    "glm4moe": "\n<think></think>\n",
    "gptoss": "<|channel|>final<|message|>",
    "muse_glimmer": " to=user<|message|>",
}
# What stands between an answer and the token that ends it.
BEFORE_END = {"cohere2": "<|END_RESPONSE|>"}
# Templates whose generation prompt ends with what an answer without thinking does not continue.
OPEN_THOUGHT = {
    "deepseek_r1_distill": "<think>\n",
    "deepseekv3": "<think>\n",
    "own_thinks": "<think>",
}


pytestmark = pytest.mark.usefixtures("own_cache")


def base(name: str) -> str:
    """TRL's training variants write what the model's own template writes."""
    return name.removesuffix("_training")


def inference_ids(name: str, history: list[dict]) -> list[int]:
    """Ids of the history and the generation prompt, by transformers alone."""
    how = dict(add_generation_prompt=True, return_dict=False)
    return templates.tokenizer(name).apply_chat_template(history, **how)


def context_ids(name: str, history: list[dict]) -> list[int]:
    """The same without a thought that an answer without thinking does not continue."""
    tokenizer = templates.tokenizer(name)
    text = tokenizer.decode(inference_ids(name, history))
    text = text.removesuffix(OPEN_THOUGHT.get(base(name), ""))
    return tokenizer(text, add_special_tokens=False).input_ids


def plain_answer(name: str, content: str) -> str:
    lead = LEADS.get(base(name), "")
    return lead + content + BEFORE_END.get(base(name), "") + templates.end_of(name)


def learned(row: dict) -> list[tuple[list[int], list[int]]]:
    """(ids before it, ids of it) of each run of targets, sequence after sequence."""
    found = []
    start = 0
    for length in row["sequence_lengths"]:
        ids = row["input_ids"][start : start + length]
        targets = [False, *row["learned"][start : start + length], False]
        for begin in range(1, len(targets)):
            if targets[begin - 1] or not targets[begin]:
                continue
            end = targets.index(False, begin)
            found.append((ids[: begin - 1], ids[begin - 1 : end - 1]))
        start += length
    assert start == len(row["input_ids"]) == len(row["learned"]) == row["length"]
    return found


def answers_of(tokenizer, row: dict) -> list[str]:
    """The text of each run of targets."""
    return [tokenizer.decode(ids) for _, ids in learned(row)]


CHAT = [
    message("user", "one two"),
    message("assistant", "three four."),
    message("user", "five"),
    message("assistant", "six seven"),
]
FIVE = [message("user", "five")]


@pytest.mark.parametrize("name", NAMES)
def test_two_answers_without_thinking(name):
    templates.folder()
    tokenizer = templates.tokenizer(name)
    row = sft_row({"messages": CHAT}, tokenizer, 10_000, "assistant")
    found = learned(row)
    expected = [plain_answer(name, CHAT[place]["content"]) for place in (1, 3)]
    assert answers_of(tokenizer, row) == expected
    assert [before for before, _ in found] == [context_ids(name, CHAT[:place]) for place in (1, 3)]
    assert row["prompt_ids"] == inference_ids(name, CHAT[:3])
    assert row["n_targets"] == sum(len(ids) for _, ids in found)
    assert row["reason"] == "" and not row["truncated"]
    # One sequence, where the history of the second answer begins with the first answer as it was learned.
    first = found[0][0] + found[0][1]
    assert len(row["sequence_lengths"]) == 2 - (found[1][0][: len(first)] == first)


@pytest.mark.parametrize("name", NAMES)
def test_of_an_answer_that_begins_a_conversation_only_the_answer_is_learned(name):
    """What the template writes before it, such as a system message of its own, was learned, too."""
    tokenizer = templates.tokenizer(name)
    turns = [message("assistant", "zz three"), *CHAT[2:]]
    try:
        whole = tokenizer.apply_chat_template(turns[:1], tokenize=False)
    except jinja2.TemplateError as error:
        pytest.skip(f"the template refuses it: {error}")
    row = sft_row({"messages": turns}, tokenizer, 10_000, "assistant")
    texts = answers_of(tokenizer, row)
    expected = [plain_answer(name, turns[place]["content"]) for place in (0, 2)]
    if name == "qwen3":  # it writes an empty thought after questions alone
        expected[0] = expected[0].removeprefix(LEADS["qwen3"])
    assert texts == expected
    before = tokenizer.decode(learned(row)[0][0])
    assert whole.startswith(before.rstrip().removesuffix("<think>")) and "zz" not in before


def test_a_first_answer_that_a_template_changes_is_left_out_or_made_whole():
    """Llama's takes it for the user's where there are tools; Qwen's drops its thought, and the lines after it."""
    tokenizer = templates.tokenizer("llama3_1")
    tool = {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": {}},
    }
    turns = [message("assistant", "Welcome"), *CHAT[2:]]
    row = sft_row({"messages": turns, "tools": [tool]}, tokenizer, 10_000, "assistant")
    assert not any("Welcome" in text for text in answers_of(tokenizer, row))
    assert [note for note in row["notes"] if note.startswith(chat.DROPS_ANSWER)]
    tokenizer = templates.tokenizer("qwen3")
    turns[0] = message("assistant", "<think>\nWhy\n</think>\n\nWelcome")
    row = sft_row({"messages": turns}, tokenizer, 10_000, "assistant")
    assert answers_of(tokenizer, row)[0] == turns[0]["content"] + "<|im_end|>"


@pytest.mark.parametrize("name", NAMES)
def test_preferences_and_prompts(name):
    """DPO and reward read the prompt of inference and learn the answers as SFT does; PPO generates from that prompt."""
    tokenizer = templates.tokenizer(name)
    given = {"prompt": CHAT[:3], "chosen": CHAT[3:], "rejected": [message("assistant", "six")]}
    for function in (preference_row, reward_row):
        row = function(given, tokenizer, 10_000)
        assert row["prompt_ids"] == context_ids(name, CHAT[:3])
        texts = [tokenizer.decode(row[key]) for key in ("chosen_ids", "rejected_ids")]
        assert texts == [plain_answer(name, content) for content in ("six seven", "six")]
        # Each answer's ids follow its prompt as in the template's own text, or as generated behind the prompt.
        for key, text in zip(("chosen_ids", "rejected_ids"), texts):
            whole = tokenizer.decode(row["prompt_ids"]) + text
            alone = tokenizer(text, add_special_tokens=False).input_ids
            behind = tokenizer(whole, add_special_tokens=False).input_ids
            assert row[key] in (alone, behind[len(row["prompt_ids"]) :])
    row = prompt_row({"prompt": CHAT[:3]}, tokenizer, 10_000, 8)
    assert row["prompt_ids"] == inference_ids(name, CHAT[:3])


# How templates write a thought that the content holds, and where they drop it how it is learned all the same.
THOUGHT = "<think>\none two\n</think>\n\nthree four."
# These take it for the answer, after an empty thought or in its channel, unless it is in a field.
MOVED = ("qwen3_8", "gptoss", "gemma4", "diffusion_gemma", "muse_glimmer")
KEEP_OPENER = {
    *("deepseek_r1_distill", "deepseekv3", "qwen3_5_think", "qwen3_6", "own_thinks"),
    *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
}
REWRITTEN = {
    "glm4moe": "\n<think>one two</think>\nthree four.",
    "own_thinks": "\none two\n</think>\n\nthree four.",
}


def thinking_answer(name: str) -> str:
    """What is learned of an answer with thinking in its content."""
    name = base(name)
    if name in REWRITTEN:
        return REWRITTEN[name]
    if name in KEEP_OPENER:  # the prompt has written what opens it
        return THOUGHT.removeprefix("<think>\n")
    return in_field(name) if name.startswith(MOVED) else THOUGHT


def in_field(name: str) -> str:
    """What is learned of an answer with the same thinking in a field."""
    begins = [beginning for beginning in FIELD_BY_NAME if name.startswith(beginning)]
    return FIELD_BY_NAME[begins[0]] if begins else THOUGHT


@pytest.mark.parametrize("name", NAMES)
def test_thinking_inside_the_content_is_learned_whole(name):
    tokenizer = templates.tokenizer(name)
    thinks = message("assistant", THOUGHT)
    chat = [*FIVE, thinks, message("user", "six"), thinks]
    read = chat
    if name.startswith(MOVED):
        read = [*FIVE, message("assistant", "three four.", reasoning_content="one two"), *chat[2:]]
    row = sft_row({"messages": chat}, tokenizer, 10_000, "assistant")
    expected = thinking_answer(name) + BEFORE_END.get(base(name), "") + templates.end_of(name)
    found = learned(row)
    assert answers_of(tokenizer, row) == [expected] * 2
    for place, (before, _) in zip((1, 3), found):
        prompt = inference_ids(name, read[:place])
        assert before == prompt[: len(before)]
        assert before == prompt or base(name) == "qwen3_5_nothink"
    completion = sft_row({"messages": chat}, tokenizer, 10_000, "completion")
    assert learned(completion) == found[1:]


FIELD_BY_NAME = {
    "diffusion_gemma": "<|channel>thought\none two\n<channel|>three four.",
    "gemma4": "<|channel>thought\none two\n<channel|>three four.",
    "glm4moe": "\n<think>one two</think>\nthree four.",
    "gptoss": "<|channel|>analysis<|message|>one two<|end|><|start|>assistant<|channel|>final<|message|>three four.",
    "lfm2_2_5": "<think>one two</think>three four.",
    "muse_glimmer": " to=self<|message|>one two<|eom|><|start|>assistant to=user<|message|>three four.",
    "nemotron_3_5_lightning": "one two</think>three four.",
    "nemotron_3_nano": "one two\n</think>\nthree four.",
    "nemotron_3_super": "one two\n</think>\nthree four.",
    "nemotron_3_ultra": "one two</think>three four.",
    "qwen3_5_nothink": "<think>\none two\n</think>\n\nthree four.",
    "qwen3_8": "one two\n</think>\n\nthree four.",
    "deepseek": "one two\n</think>\n\nthree four.",
    "own_thinks": "\none two\n</think>\n\nthree four.",
    "qwen3_5_think": "one two\n</think>\n\nthree four.",
    "qwen3_6": "one two\n</think>\n\nthree four.",
}


@pytest.mark.parametrize("name", NAMES)
def test_thinking_in_a_field_is_learned_whole(name):
    """Also where the template knows no such field: never silently less than the user gave."""
    tokenizer = templates.tokenizer(name)
    answer = message("assistant", "three four.", reasoning_content="one two")
    row = sft_row({"messages": [*FIVE, answer]}, tokenizer, 10_000, "assistant")
    expected = in_field(name) + BEFORE_END.get(base(name), "") + templates.end_of(name)
    assert answers_of(tokenizer, row) == [expected]
    chat = [*FIVE, answer]
    written = tokenizer.apply_chat_template(chat, tokenize=False)
    is_dropped = any("drops the thinking" in note for note in row.get("notes", []))
    assert is_dropped == ("one two" not in written)


# A thought as people write it into a content; the last two begin where a prompt ends.
SPELLED = ["<think>\none two\n</think>\n\nthree four.", "\n<think>one two</think>three four."]
SPELLED += ["one two\n</think>\n\nthree four.", "one two</think>three four."]
EMPTY_ONES = [
    "<think>\n\n</think>\n\nthree four.",
    "<think></think>three four.",
    "</think>three four.",
]
ADDS = {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]}


def rows_with(answer: dict, before: list[dict]) -> list[tuple]:
    """An answer, and one with it in the history, in every format: row function, row, settings."""
    six = [message("assistant", "six")]
    later = [*before, answer, message("user", "five")]
    formats_of_pairs = [
        {"prompt": before, "chosen": [answer], "rejected": six},
        {"prompt": before, "chosen": six, "rejected": [answer]},
        {"chosen": [*before, answer], "rejected": [*before, *six]},
        {"prompt": later, "chosen": six, "rejected": [message("assistant", "one")]},
    ]
    return [
        *[(preference_row, row, {}) for row in formats_of_pairs],
        (reward_row, formats_of_pairs[0], {}),
        (labelled_row, {"messages": [*before, answer], "label": True}, {}),
        (labelled_row, {"prompt": before, "completion": [answer], "label": False}, {}),
        (sft_row, {"messages": [*before, answer]}, {"loss_on": "assistant"}),
        (sft_row, {"messages": [*later, answer]}, {"loss_on": "assistant"}),
        (sft_row, {"prompt": before, "completion": [answer]}, {"loss_on": "completion"}),
        (prompt_row, {"prompt": later}, {"max_new_tokens": 8}),
    ]


@pytest.mark.parametrize("variables", [None, '{"enable_thinking": false}'])
@pytest.mark.parametrize("more", [{}, ADDS], ids=["", "calls"])
@pytest.mark.parametrize(
    "name, content",
    [("qwen3_8", content) for content in [*SPELLED, *EMPTY_ONES]]
    # Under these a text may speak of a marker that closes a thought.
    + [
        (name, content)
        for name in ("gptoss", "gemma4", "gemma4_v5", "muse_glimmer")
        for content in [*SPELLED[:2], *EMPTY_ONES[:2]]
    ],
)
def test_thinking_in_the_content_is_read_as_in_a_field(name, content, more, variables):
    """It was learned as a part of the answer, under Qwen3.8 after an empty thought."""
    tokenizer = copy.deepcopy(templates.tokenizer(name))
    if variables and "enable_thinking" in rendering.variables(tokenizer):
        rendering.set_defaults(tokenizer, variables)
    thought = {} if content in EMPTY_ONES else {"reasoning_content": "one two"}
    text = "" if more and name == "gptoss" else "three four."  # which writes a thought or a text
    content = content.replace("three four.", text)
    given = message("assistant", content, **more)
    meant = message("assistant", text, **thought, **more)
    for one, other in zip(rows_with(given, FIVE), rows_with(meant, FIVE)):
        function, row, settings = one
        rows = [function(each, tokenizer, 1000, **settings) for each in (row, other[1])]
        for each in rows:
            each.pop("columns", None)
        assert rows[0] == rows[1], row
    both = message("assistant", content, **thought, **more)  # as some servers return it
    rows = [
        sft_row({"messages": [*FIVE, each]}, tokenizer, 1000, "assistant") for each in (both, meant)
    ]
    assert rows[0] == rows[1]


def test_thinking_in_strings_is_read_as_in_messages():
    tokenizer = templates.tokenizer("qwen3_8")
    meant = message("assistant", "three four.", reasoning_content="one two")
    expected = sft_row({"messages": [*FIVE, meant]}, tokenizer, 1000, "assistant")
    assert answers_of(tokenizer, expected) == ["one two\n</think>\n\nthree four.<|im_end|>"]
    alpaca = standard({"instruction": "five", "output": THOUGHT}, {})
    strings = {"prompt": "five", "completion": THOUGHT}
    assert sft_row(alpaca, tokenizer, 1000, "assistant") == expected
    assert sft_row(strings, tokenizer, 1000, "assistant", strings_as_messages=True) == expected
    pair = {"prompt": "five", "chosen": THOUGHT, "rejected": "six"}
    row = preference_row(pair, tokenizer, 1000, strings_as_messages=True)
    assert tokenizer.decode(row["chosen_ids"]) == "one two\n</think>\n\nthree four.<|im_end|>"
    assert tokenizer.decode(row["rejected_ids"]) == "\n</think>\n\nsix<|im_end|>"


@pytest.mark.parametrize("content", [
    *["End with `</think>`, then answer.", "The </think> tag ends it.", "Six <think>one</think> two"],
    *["Use '<think>' and '</think>'.", "</thinker> one", "<think>one"],
])  # fmt: skip
@pytest.mark.parametrize("name", ["qwen3_8", "gptoss", "gemma4_v5", "muse_glimmer"])
def test_a_content_that_speaks_of_thinking_has_none(name, content):
    tokenizer = templates.tokenizer(name)
    row = sft_row(
        {"messages": [*FIVE, message("assistant", content)]}, tokenizer, 1000, "assistant"
    )
    assert answers_of(tokenizer, row) == [plain_answer(name, content)] and row["notes"] == []


@pytest.mark.parametrize("content, said", [
    ("[THINK]one[/THINK]two", True),
    ("<reasoning>one</reasoning>two", True),
    ("one\n</reasoning>two", True),
    ("<think>one</think>two", False),
    ("two", False),
])  # fmt: skip
@pytest.mark.parametrize("name", ["gptoss", "qwen3", "gemma4", "qwen2_5"])
def test_thinking_between_markers_that_a_template_does_not_know_is_named(name, content, said):
    """It is learned as it is, since a user may want it so; Qwen2.5's template knows no thinking."""
    tokenizer = templates.tokenizer(name)
    row = sft_row(
        {"messages": [*FIVE, message("assistant", content)]}, tokenizer, 1000, "assistant"
    )
    assert (chat.KEEPS_THOUGHT in row["notes"]) == (said and name != "qwen2_5")
    [text] = answers_of(tokenizer, row)
    assert text == plain_answer(name, content) or not said


def own_template(answer: str, prompt_end: str = ""):
    """A tokenizer whose template writes answers, and ends its generation prompt, in its own way."""
    tokenizer = copy.deepcopy(templates.tokenizer("qwen2_5"))
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{{% if m.role == 'assistant' %}}{answer}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        f"{prompt_end}{{% endif %}}"
    )
    return tokenizer


CONTENT = "{{ m.content }}"
NO_THOUGHT = "{{ m.content.split('</think>')[-1].strip() }}"
FIELD_ALONE = "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{{ m.content }}"
WHY = "<think>\nwhy\n</think>\n\n"
EMPTY = "<think>\n\n</think>\n\n"
# Whole thoughts: a model answers after them. One is as Seed-OSS's, which says how much may be thought.
WHOLE = ["<think></think>", "[THINK]\n[/THINK]\n", "<|channel>thought\n<channel|>"]
WHOLE += ["<think>\n[none]\n</think>\n", "<think><budget>0</budget></think>"]


# By what the run says: how a template writes an answer and ends its prompt; an answer's content and thought;
# what of the end of the prompt stays in the context, and what is learned.
OWN = {
    chat.DROPS_THOUGHT: [
        # It is put in front of the content, also where that occurs in a header, or again after it.
        (CONTENT, "", "i", "why", "", WHY + "i"),
        ("{{ m.content.strip() }}", "", " yes", "why", "", WHY + "yes"),
        (" {{ m.content }}", "", " yes", "why", "", " " + WHY + "yes"),
        (CONTENT + "i yes final:", "", "i", "why", "", WHY + "ii yes final:"),
        # It is learned as it was written, with the whitespace that is stripped.
        (NO_THOUGHT, "", "<think>why</think>\n\nyes", "", "", "<think>why</think>\n\nyes"),
        (NO_THOUGHT, "", "<think>yes</think>yes", "", "", "<think>yes</think>yes"),
        # It stands in place of a whole thought that the prompt has.
        *[(CONTENT, whole, "yes", "why", "", WHY + "yes") for whole in (WHOLE[0], *WHOLE[3:])],
        (CONTENT, WHOLE[1], "yes", "why", "", "[THINK]\nwhy\n[/THINK]\n\nyes"),
        (CONTENT, WHOLE[2], "yes", "why", "", "<|channel>thought\nwhy\n<channel|>yes"),
        # An empty thought in front of every answer gives way to a real one, as in DeepSeek-V3.1.
        (EMPTY + CONTENT, "", "i", "why", "", WHY + "i"),
        (EMPTY + CONTENT, "", "<think>why</think>i", "", "", WHY + "i"),
        ("[THINK][/THINK]" + CONTENT, "", "[THINK]why[/THINK]i", "", "", "[THINK]\nwhy\n[/THINK]\n\ni"),
        *[(empty + CONTENT, empty, "yes", "why", "", WHY + "yes") for empty in (EMPTY, "</think>")],
        # A thought that the prompt opens is opened once.
        (EMPTY + NO_THOUGHT, "<think>\n", WHY + "yes", "", "<think>\n", "why\n</think>\n\nyes"),
        (CONTENT, "◁think▷", "yes", "why", "◁think▷", "\nwhy\n◁/think▷\n\nyes"),  # Kimi's writes no closing one
    ],
    "": [
        ("<think>\n" + CONTENT, "<think>\n\n", "one</think>two", "", "<think>\n\n", "one</think>two"),
        *[(CONTENT, whole, "yes", "", whole, "yes") for whole in WHOLE],
        *[(empty + CONTENT, empty, "yes", "", empty, "yes") for empty in (EMPTY, "</think>")],
        (CONTENT, "<think>\n", "why\n</think>\n\nyes", "", "<think>\n", "why\n</think>\n\nyes"),
        # A template that writes an empty thought where there is none in the field, as Qwen3.8's.
        (FIELD_ALONE, "<think>\n", "<think>why</think>yes", "", "<think>\n", "why\n</think>\n\nyes"),
        (FIELD_ALONE, "", "<think>\n</think>yes", "", "", EMPTY + "yes"),
    ],
    chat.FOLLOWS_LESS: [
        (CONTENT, "<think>", "two", "", "", "two"),  # an open one: no model would go on without thinking
        (CONTENT, "<|assistant_header|>", "two", "", "", "two"),
    ],
    # What a template drops from a marker on is noticed.
    chat.DROPS_ANSWER: [("{{ m.content.split('<think>')[0] }}", "", "six <think>one", "", "", "")],
}  # fmt: skip


@pytest.mark.parametrize(
    "note, answer, prompt_end, content, thought, kept, expected",
    [(note, *case) for note in OWN for case in OWN[note]],
)
def test_under_a_template_of_its_own(note, answer, prompt_end, content, thought, kept, expected):
    tokenizer = own_template(answer, prompt_end)
    given = message("assistant", content, **({"reasoning_content": thought} if thought else {}))
    context, [found], notes = chat.encode_answers(tokenizer, FIVE, [[given]])
    prompt = tokenizer.apply_chat_template(FIVE, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(context) == prompt.removesuffix(prompt_end) + kept
    assert tokenizer.decode(found.ids) == (expected and expected + "<|im_end|>")
    assert notes == [note] * bool(note)


@pytest.mark.parametrize("arguments", ['{"x": true}', {"x": True}])
def test_arguments_are_json_under_a_template_that_prints_them_as_they_are(arguments):
    """Of an object it would print `{'x': True}`, as Python does."""
    tokenizer = own_template(
        "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    row = {"messages": [*FIVE, message("assistant", "", tool_calls=[call])]}
    row = sft_row(row, tokenizer, 10_000, "assistant")
    assert answers_of(tokenizer, row) == ['add{"x": true}<|im_end|>']


ADD = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
CALL = message("assistant", "", tool_calls=[ADD])
CALLS = {
    "qwen2_5": '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
    "gptoss": ' to=functions.add<|channel|>commentary json<|message|>{"x": 1}<|call|>',
    "gemma4": "<|tool_call>call:add{x:1}<tool_call|><|tool_response>",
    "lfm2_v2": "<|tool_call_start|>[add(x=1)]<|tool_call_end|><|im_end|>",
    "llama3_2": '{"name": "add", "parameters": {"x": 1}}<|eot_id|>',
}


@pytest.mark.parametrize(
    "name, content",
    [*[(name, "") for name in CALLS], ("qwen2_5", "e"), ("lfm2_v2", "e"), ("llama3_2", "e")],
)
def test_a_tool_call_is_learned_up_to_its_end_with_its_thinking(name, content):
    """The call is what the answer is for, also where the template drops its thinking and its content."""
    tokenizer = templates.tokenizer(name)
    texts = []
    for thought in ("", "one two"):
        answer = {**CALL, "content": content, "reasoning_content": thought}
        row = sft_row({"messages": [*FIVE, answer]}, tokenizer, 10_000, "assistant")
        ((before, ids),) = learned(row)
        assert before == inference_ids(name, FIVE)
        texts.append(tokenizer.decode(ids))
    assert texts[0].endswith(CALLS[name]) and texts[1].endswith(CALLS[name])
    assert "one two" in texts[1] and (content or texts[0] == CALLS[name])


@pytest.mark.parametrize(
    "name, reason", [("gptoss", chat.DROPS_CALLS), ("qwen2_5", ""), ("gemma4", "")]
)
def test_a_template_that_writes_one_of_several_calls(name, reason):
    """gpt-oss drops all but the first."""
    other = {"type": "function", "function": {"name": "sub", "arguments": {"x": 1}}}
    answer = message("assistant", "", tool_calls=[ADD, other])
    tokenizer = templates.tokenizer(name)
    row = sft_row({"messages": [*FIVE, answer]}, tokenizer, 10_000, "assistant")
    assert row["reason"] == reason
    texts = answers_of(tokenizer, row)
    assert not texts if reason else "add" in texts[0] and "sub" in texts[0]


def test_a_header_of_the_next_turn_is_not_learned_after_a_call():
    """Command A writes one after each message, and calls end otherwise than answers."""
    tokenizer = copy.deepcopy(templates.tokenizer("qwen2_5"))
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
        "{% else %}{{ m.content }}!{% endif %}<|im_end|>{% endfor %}<|im_start|>"
    )
    row = sft_row({"messages": [*FIVE, CALL, *CHAT[:2]]}, tokenizer, 1000, "assistant")
    assert answers_of(tokenizer, row) == ["add<|im_end|>", "three four.!<|im_end|>"]


def test_an_answer_that_goes_on_with_the_turn_of_its_call_is_learned_alone():
    """Gemma 4 writes it after what the call says: the call and its result were learned again."""
    tokenizer = templates.tokenizer("gemma4_v5")
    turns = [*FIVE, {**CALL, "content": "one"}, message("tool", "six", name="add")]
    row = {"messages": [*turns, message("assistant", "zq seven")]}
    before, ids = learned(sft_row(row, tokenizer, 10_000, "assistant"))[1]
    assert before == inference_ids("gemma4_v5", turns)
    assert tokenizer.decode(ids) == "zq seven<turn|>"


def test_a_second_call_in_the_block_of_the_first_is_refused():
    """DeepSeek-V3 opens the block once: the second call would be learned without what opens it."""
    turns = [*FIVE, *[CALL, message("tool", "six", name="add")] * 2]
    row = {"messages": [*turns, message("assistant", "seven")]}
    with pytest.raises(BadRow, match="writes the history differently"):
        sft_row(row, templates.tokenizer("deepseekv3"), 10_000, "assistant")


@pytest.mark.parametrize("name", ["gemma3", "own_alpaca"])
def test_a_tool_call_that_the_template_does_not_write_is_left_out_and_counted(
    name, accelerator, tmp_path, capsys
):
    tokenizer = templates.tokenizer(name)
    chat = [*FIVE, CALL, message("user", "six"), message("assistant", "seven")]
    rows = [{"messages": chat}, {"messages": chat[:2]}, {"messages": [chat[0], chat[3]]}]
    path = str(write_jsonl(tmp_path / "calls.jsonl", rows))
    data = load_rows(accelerator, path, sft_row, tokenizer, max_length=10_000, loss_on="assistant")
    texts = [answers_of(tokenizer, row) for row in data]
    assert data["row"][:] == [1, 3] and texts == [[plain_answer(name, "seven")]] * 2
    reason = "tool calls are not learned, because the chat template does not write them"
    said = capsys.readouterr().out
    assert f"left out ({reason}): 1 of 3 rows" in said and f"; {reason}: 1 of 3 rows" in said
    row = {"prompt": chat[:1], "chosen": [CALL], "rejected": chat[3:]}
    assert preference_row(row, tokenizer, 10_000)["reason"] == reason


@pytest.mark.parametrize(
    "name, role",
    [("phi3", "tool"), ("own_alpaca", "system"), ("own_alpaca", "critic"), ("qwen2_5", "tool")],
)
def test_a_message_that_the_template_does_not_write_is_said(name, role):
    tokenizer = templates.tokenizer(name)
    chat = [*FIVE, message(role, "a secret"), message("assistant", "six")]
    if role == "system":
        chat = [chat[1], chat[0], chat[2]]
    row = sft_row({"messages": chat}, tokenizer, 10_000, "assistant")
    is_written = "a secret" in tokenizer.decode(row["input_ids"])
    assert is_written == (name == "qwen2_5")
    note = f"messages that the chat template does not write (role '{role}')"
    assert (note in row["notes"]) != is_written
    assert answers_of(tokenizer, row) == [plain_answer(name, "six")]
    # Behind the last answer nothing is read, so nothing is missed there.
    behind = [message("user", "five"), message("assistant", "six"), message(role, "a secret")]
    row = sft_row({"messages": behind}, tokenizer, 10_000, "assistant")
    assert note not in row["notes"]


@pytest.mark.parametrize(
    "name", [name for name in NAMES if not name.startswith(("gemma_", "gemma2"))]
)
def test_system_messages_and_tools_are_read(name):
    if name == "gemma":
        pytest.skip("it refuses system messages with its own words")
    tokenizer = templates.tokenizer(name)
    parameters = {"type": "object", "properties": {"x": {"type": "number"}}}
    function = {"name": "add", "description": "adds", "parameters": parameters}
    schema = {"type": "function", "function": function}
    chat = [message("system", "be brief"), *CHAT[:2]]
    row = sft_row({"messages": chat, "tools": [schema]}, tokenizer, 100_000, "assistant")
    notes = " ".join(row.get("notes", []))
    text = tokenizer.decode(row["input_ids"])
    assert ("be brief" in text) != ("role 'system'" in notes)
    assert answers_of(tokenizer, row) == [plain_answer(name, CHAT[1]["content"])]


# ---------------------------------------------------------------------------------------------- strings


def test_strings_become_turns_where_asked():
    tokenizer = templates.tokenizer("qwen2_5")
    answers = {"chosen": [message("assistant", "six")], "rejected": [message("assistant", "one")]}
    row = {"messages": [*FIVE, *answers["chosen"]]}
    strings = {"prompt": "five", "completion": "six"}
    expected = sft_row(row, tokenizer, 1000, "assistant")
    assert sft_row(strings, tokenizer, 1000, "assistant", True) == expected
    assert sft_row(strings, tokenizer, 1000, "assistant") != expected
    pair = {"prompt": "five", "chosen": "six", "rejected": "one"}
    for function in (preference_row, reward_row):
        expected = function({"prompt": FIVE, **answers}, tokenizer, 1000)
        assert function(pair, tokenizer, 1000, True) == expected
    found = prompt_row({"prompt": "five"}, tokenizer, 1000, 8, True)
    assert found["prompt_ids"] == inference_ids("qwen2_5", FIVE)
    # hh-rlhf's transcripts hold several turns.
    prompt = "\n\nHuman: one\n\nAssistant: two\n\nHuman: five\n\nAssistant:"
    turns = [message("user", "one"), message("assistant", "two"), *FIVE]
    expected = preference_row({"prompt": turns, **answers}, tokenizer, 1000)
    for row in (
        {"chosen": f"{prompt} six", "rejected": f"{prompt} one"},
        {"prompt": prompt, "chosen": " six", "rejected": " one"},
    ):
        assert preference_row(row, tokenizer, 1000, True) == expected
    text = {"text": "five"}
    as_it_is = sft_row(text, tokenizer, 1000, "all")
    assert sft_row(text, tokenizer, 1000, "all", True) == as_it_is


# ---------------------------------------------------------------------------------------------- the user's own template


def saved(folder, name: str = "qwen2_5") -> str:
    """A folder with a tokenizer of a template."""
    templates.tokenizer(name).save_pretrained(folder)
    return str(folder)


def test_variables_of_the_template_are_saved_with_it(tmp_path):
    folder = saved(tmp_path / "model", "qwen3")
    values = {"enable_thinking": False}
    plain = load.tokenizer_of(folder)
    tokenizer = load.tokenizer_of(folder, None, json.dumps(values))
    tokenizer.save_pretrained(tmp_path / "actor")
    again = AutoTokenizer.from_pretrained(tmp_path / "actor")

    def ids(tokenizer, **values):
        how = dict(add_generation_prompt=True, return_dict=False)
        return tokenizer.apply_chat_template(CHAT[:1], **how, **values)

    expected = ids(plain, **values)
    assert prompt_row({"prompt": CHAT[:1]}, tokenizer, 1000, 8)["prompt_ids"] == expected
    assert ids(again) == expected != ids(plain)
    # Whoever gives the variable decides.
    assert ids(again, enable_thinking=True) == ids(plain, enable_thinking=True)
    assert rendering.fingerprint(tokenizer) != rendering.fingerprint(plain)


def test_only_what_a_template_reads_as_a_variable_can_be_set():
    """gpt-oss has a field `thinking` of messages: to set it changed nothing, and was recommended."""
    assert "enable_thinking" in rendering.variables(templates.tokenizer("qwen3"))
    gpt_oss = copy.deepcopy(templates.tokenizer("gptoss"))
    assert "reasoning_effort" in rendering.variables(gpt_oss)
    refuses(
        "the chat template has no variable 'thinking' to set; it has: ",
        "reasoning_effort",
        call=lambda: rendering.set_defaults(gpt_oss, '{"thinking": true}'),
    )
    gpt_oss.chat_template = {"default": "{{ a }}{{ bos_token }}", "tool_use": "{{ b }}{{ tools }}"}
    assert rendering.variables(gpt_oss) == {"a", "b"}


def test_variables_reach_the_template_as_they_are_in_json(tmp_path):
    values = {
        "a": None,
        "b": [True, False, -1.5e-7, 10**20],
        "c": {"quo\"te'": "\\n\n{{ x }} %} é😀"},
    }
    folder = saved(tmp_path / "model")
    template = tmp_path / "own.jinja"
    template.write_text("{{ [a, b, c] | tojson }}{{ a is none }}")
    tokenizer = load.tokenizer_of(folder, str(template), json.dumps(values))
    rendered = tokenizer.apply_chat_template([message("user", "a")], tokenize=False)
    assert rendered.endswith("True")
    assert json.loads(rendered.removesuffix("True")) == list(values.values())


# ---------------------------------------------------------------------------------------------- the date


def test_a_date_is_that_of_the_run(tmp_path):
    folder = saved(tmp_path / "model", "own_dated")
    on = lambda date: load.tokenizer_of(folder, date=date)
    days = ("2020-02-29", "2020-02-29", "2021-03-01")
    rows = [sft_row({"messages": CHAT}, on(date), 1000, "assistant") for date in days]
    assert rows[0] == rows[1] and "29 Feb 2020" in on("2020-02-29").decode(rows[0]["input_ids"])
    assert "01 Mar 2021" in on("2020-02-29").decode(rows[2]["input_ids"])
    assert rendering.fingerprint(on("2020-02-29")) != rendering.fingerprint(on("2021-03-01"))
    # Where no date is printed, the day is no part of what the ids depend on.
    undated = saved(tmp_path / "undated", "qwen2_5")
    first, second = (load.tokenizer_of(undated, date=date) for date in ("2020-02-29", "2021-03-01"))
    assert rendering.fingerprint(first) == rendering.fingerprint(second) and first.chat_date is None
    # The saved tokenizer prints the day on which it is used.
    on("2020-02-29").save_pretrained(tmp_path / "actor")
    saved_one = AutoTokenizer.from_pretrained(tmp_path / "actor")
    text = saved_one.apply_chat_template(CHAT[:1], tokenize=False)
    assert f"{datetime.date.today():%d %b %Y}" in text


def test_what_ends_an_answer_ends_a_response():
    model = types.SimpleNamespace(generation_config=types.SimpleNamespace(eos_token_id=None))
    for name in NAMES:
        tokenizer = templates.tokenizer(name)
        ends = tokenizer.convert_tokens_to_ids([tokenizer.eos_token, templates.end_of(name)])
        assert stop_tokens(tokenizer, model) == set(ends), name


MISTRAL = (  # its v3: the system message stands in the last message of the user, calls need ids
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' }}"
    "{% if loop.last and system %}{{ system + '\n\n' }}{% endif %}{{ m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] ' }}{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id|length != 9 %}{{ raise_exception('9 letters') }}{% endif %}"
    "{{ c.function.name + (c.function.arguments|tojson) + c.id }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id|length != 9 %}"
    "{{ raise_exception('9 letters') }}{% endif %}"
    "{{ '[TOOL_RESULTS] ' + m.content + m.tool_call_id }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)


def mistral():
    tokenizer = copy.deepcopy(templates.tokenizer("qwen2_5"))
    tokenizer.chat_template = MISTRAL
    return tokenizer


@pytest.mark.parametrize("function", [sft_row, preference_row])
def test_a_system_message_in_the_last_question_is_read_before_each_answer(function):
    """Once the question is answered Mistral leaves it out: the question was learned with the answer."""
    tokenizer = mistral()
    history = [message("system", "be brief"), *CHAT[:3]]
    prompt = tokenizer.apply_chat_template(history, return_dict=False)
    assert "[INST] be brief\n\nfive[/INST]" in tokenizer.decode(prompt)
    if function is preference_row:
        pair = {"prompt": history, "chosen": CHAT[3:], "rejected": [message("assistant", "six")]}
        row = preference_row(pair, tokenizer, 1000)
        assert row["prompt_ids"] == prompt and row["notes"] == []
        assert tokenizer.decode(row["chosen_ids"]) == " six seven<|im_end|>"
        return
    row = sft_row({"messages": [*history, *CHAT[3:]]}, tokenizer, 1000, "assistant")
    found = [(tokenizer.decode(before), tokenizer.decode(ids)) for before, ids in learned(row)]
    assert found == [
        ("<bos>[INST] be brief\n\none two[/INST]", " three four.<|im_end|>"),
        (tokenizer.decode(prompt), " six seven<|im_end|>"),
    ]
    assert row["notes"] == []


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("own_alpaca")])
@pytest.mark.parametrize("times, after", [(1, ""), (1, "\n"), (2, "")])
def test_an_end_that_a_content_has_is_learned_once(name, times, after):
    tokenizer = templates.tokenizer(name)
    turns = [{**turn} for turn in CHAT]
    for turn in (turns[1], turns[3]):
        turn["content"] += templates.end_of(name) * times + after
    rows = [sft_row({"messages": each}, tokenizer, 10_000, "assistant") for each in (turns, CHAT)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_thought_that_is_never_closed_is_learned_or_the_row_is_left_out(name):
    answer = message("assistant", "<think>one two")
    row = sft_row({"messages": [*CHAT[:1], answer]}, templates.tokenizer(name), 10_000, "assistant")
    text = templates.tokenizer(name).decode(learned(row)[0][1]) if not row["reason"] else ""
    assert ("one two" in text) != ("answers are not learned" in row["reason"])


def test_of_several_templates_the_one_for_tools_writes_tools():
    tokenizer = copy.deepcopy(templates.tokenizer("qwen2_5"))
    plain = tokenizer.chat_template
    tokenizer.chat_template = {"default": plain, "tool_use": "TOOLS " + plain}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = sft_row({"messages": CHAT}, tokenizer, 1000, "assistant")
    assert row == sft_row({"messages": CHAT}, templates.tokenizer("qwen2_5"), 1000, "assistant")
    row = sft_row({"messages": CHAT, "tools": tools}, tokenizer, 1000, "assistant")
    assert tokenizer.decode(row["input_ids"]).startswith("TOOLS")
    assert tokenizer.decode(learned(row)[0][1]) == "three four.<|im_end|>"


@pytest.mark.parametrize(
    "key, value",
    [
        *[("train", False), ("weight", 0), ("loss_weight", 0.0), ("loss_mask", 0)],
        *[("loss_scale", 0.0), ("loss", False), ("training", False)],
    ],
)
def test_a_turn_that_says_so_is_not_learned(key, value):
    tokenizer = templates.tokenizer("qwen2_5")
    chat_ = [CHAT[0], {**CHAT[1], key: value}, *CHAT[2:]]
    for learns in (True, 1):
        same = [CHAT[0], {**CHAT[1], key: learns}, *CHAT[2:]]
        rows = [sft_row({"messages": each}, tokenizer, 1000, "assistant") for each in (same, CHAT)]
        assert rows[0] == rows[1]
    row = sft_row({"messages": chat_}, tokenizer, 1000, "assistant")
    assert answers_of(tokenizer, row) == ["six seven<|im_end|>"]
    assert row["input_ids"] == rows[0]["input_ids"]
    with pytest.raises(BadRow, match="--loss_on all"):
        sft_row({"messages": chat_}, tokenizer, 1000, "all")
    none = sft_row({"messages": chat_[:2]}, tokenizer, 1000, "assistant")
    assert none["reason"] == "no answer that is to be learned"


@pytest.mark.parametrize(
    "key, value",
    [
        ("weight", 0.5),
        ("loss", "no"),
        ("mask", True),
        ("skip_loss", 1),
        ("train_detail", "0:8"),
        ("train_on_turn", False),
    ],
)
def test_a_turn_that_is_unclear_about_its_loss_is_refused(key, value):
    row = {"messages": [CHAT[0], {**CHAT[1], key: value}]}
    said = f"message 2, {key} {value!r}: every learned turn counts alike"
    with pytest.raises(BadRow, match=said):
        sft_row(row, templates.tokenizer("qwen2_5"), 1000, "assistant")


def test_contexts_of_a_pair_that_were_tokenised_apart_share_only_what_is_alike(monkeypatch):
    """A shorter context need not be the beginning of the longer one, token by token."""
    found = iter([([1, 2, 3], [4, 7], []), ([1, 5], [6], [])])
    monkeypatch.setattr(chat, "encode_turn", lambda *args: next(found))
    given = (templates.tokenizer("qwen3"), CHAT[:1], [CHAT[1:2]] * 2)
    prompt, (chosen, rejected), _ = chat.encode_answers(*given)
    assert prompt == [1] and rejected == ([5, 6], [True, True])
    assert chosen == ([2, 3, 4, 7], [True] * 4)


def test_one_answer_of_a_pair_thinks():
    """The prompt is what both answers continue; the one that thinks begins with what opens its thinking."""
    tokenizer = templates.tokenizer("deepseekv3")
    pair = {"chosen": [message("assistant", THOUGHT)], "rejected": CHAT[1:2]}
    row = preference_row({"prompt": CHAT[:1], **pair}, tokenizer, 1000)
    assert row["prompt_ids"] == context_ids("deepseekv3", CHAT[:1])
    end = templates.end_of("deepseekv3")
    texts = [tokenizer.decode(row[key]) for key in ("chosen_ids", "rejected_ids")]
    assert texts == [THOUGHT + end, "three four." + end]


@pytest.mark.parametrize("name, reason", [("qwen2_5", ""), ("qwen3", chat.REWRITES_TURNS)])
def test_all_of_a_conversation_is_learned_in_one_sequence_or_not_at_all(name, reason):
    tokenizer = templates.tokenizer(name)
    row = sft_row({"messages": CHAT}, tokenizer, 1000, "all")
    assert row["reason"] == reason
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    learned_text = text.removeprefix("<|im_start|>").removesuffix("\n")
    assert answers_of(tokenizer, row)[-1:] == ([] if reason else [learned_text])


def test_max_length_holds_for_each_sequence():
    tokenizer = templates.tokenizer("qwen3")
    answer = message("assistant", "six seven")
    chat = [turn for text in ("one", "two", "five") for turn in (message("user", text), answer)]
    whole = sft_row({"messages": chat}, tokenizer, 1000, "assistant")
    lengths = whole["sequence_lengths"]
    assert len(lengths) == 3 and not whole["truncated"]
    # The third is cut within its answer, then before it; the second is cut within its answer.
    for max_length, kept in (
        (lengths[2] - 2, [lengths[0], lengths[1], lengths[2] - 2]),
        (lengths[1] - 1, [lengths[0], lengths[1] - 1]),
    ):
        row = sft_row({"messages": chat}, tokenizer, max_length, "assistant")
        assert row["sequence_lengths"] == kept and row["length"] == sum(kept)
        assert row["truncated"] and row["reason"] == ""
        assert row["n_targets"] == sum(row["learned"]) == sum(len(ids) for _, ids in learned(row))
    short = sft_row({"messages": chat}, tokenizer, 5, "assistant")
    assert short["reason"] == "nothing to learn within max_length" and short["length"] == 5


@pytest.mark.parametrize("loss_on", ["assistant", "completion"])
@pytest.mark.parametrize("thinking", [None, "Tool says 5"])
def test_an_answer_whose_history_is_rewritten_by_it_is_learned_after_the_prompt(loss_on, thinking):
    """gpt-oss drops the thinking of a call once the result is answered: the result was learned with the answer.

    Later the answer's own thinking was lost, because it ends with what the prompt ends with.
    """
    tokenizer = templates.tokenizer("gptoss")
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 2}}}
    messages = [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": "", "thinking": "Use it", "tool_calls": [call]},
        {"role": "tool", "content": "5", "name": "add"},
        {"role": "assistant", "content": "It is 5."} | ({"thinking": thinking} if thinking else {}),
    ]
    row = sft_row({"messages": messages}, tokenizer, 4000, loss_on)
    assert row["sequence_lengths"] == [row["length"]] and row["notes"] == []
    texts = answers_of(tokenizer, row)
    analysis = lambda thought: f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    before = analysis(thinking) if thinking else ""
    assert texts[-1] == before + "<|channel|>final<|message|>It is 5.<|return|>"
    assert len(texts) == (2 if loss_on == "assistant" else 1)
    called = analysis("Use it") + " to=functions.add"
    assert loss_on == "completion" or texts[0].startswith(called)
    prompt = inference_ids("gptoss", messages[:3])
    assert learned(row)[-1][0] == prompt
