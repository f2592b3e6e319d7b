"""Under every chat template, what is learned is what the model reads and writes when it is used.

The templates are those of current models, from TRL's wheel, and three of our own; see templates.py. What is expected is
computed here from `apply_chat_template` and a table of what templates write after their generation prompt.
"""

import copy
import datetime
import fnmatch
import functools
import itertools
import json
import types
from typing import NamedTuple

import jinja2
import pytest
from transformers import AutoTokenizer

import templates
from common.shared_args import SharedArgs
from preference_recipes.data import chat, odd_templates, rendering
from preference_recipes.data.formats import labelled_row, normalize_columns, preference_row
from preference_recipes.data.messages import BadRow
from preference_recipes.data.prompts import prompt_row
from preference_recipes.models import load
from recipes import load as load_recipe
from runs import message, refuses, write_jsonl
from templates import left_out, load_rows

sft_row = load_recipe("sft").sft_row
reward_row = load_recipe("reward").reward_row

pytestmark = pytest.mark.usefixtures("own_cache")

user = functools.partial(message, "user")
say = functools.partial(message, "assistant")
NAMES = templates.names()

# ============================================================ what templates write, in one table
THOUGHT = "<think>\none two\n</think>\n\nthree four."
OPENED = THOUGHT.removeprefix("<think>\n")  # where the prompt has opened the thought
EMPTY = "<think>\n\n</think>\n\n"
CHANNEL = "<|channel>thought\none two\n<channel|>three four."
ANALYSIS = "<|channel|>analysis<|message|>%s<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TO_SELF = " to=self<|message|>one two<|eom|><|start|>assistant to=user<|message|>three four."


class Written(NamedTuple):
    """What follows a template's generation prompt, up to the token that ends the answer."""

    lead: str = ""  # before the content of an answer without thinking
    in_field: str = THOUGHT  # with thinking in a field of the message; put back if it is dropped
    in_content: str = THOUGHT  # with thinking in its content
    tail: str = ""  # after the content
    rest: str = ""  # the end of the prompt that an answer without thinking does not continue


# By the names of templates; the first pattern that fits counts.
WRITTEN = {
    "cohere2": Written(tail="<|END_RESPONSE|>"),
    "deepseek*": Written("", OPENED, OPENED, rest="<think>\n"),
    "gemma4*": Written("", CHANNEL, CHANNEL),
    "diffusion_gemma": Written("", CHANNEL, CHANNEL),
    "glm4moe": Written("\n<think></think>\n", *["\n<think>one two</think>\nthree four."] * 2),
    "gptoss": Written(FINAL, *[ANALYSIS % "one two" + FINAL + "three four."] * 2),
    "lfm2_2_5*": Written("", "<think>one two</think>three four."),
    "muse_glimmer": Written(" to=user<|message|>", TO_SELF, TO_SELF),
    "nemotron_3_[ns]*": Written("</think>", "one two\n</think>\nthree four.", OPENED),
    "nemotron*": Written("</think>", "one two</think>three four.", OPENED),
    "qwen3": Written(EMPTY),
    "qwen3_5_think": Written("\n</think>\n\n", OPENED, OPENED),
    "qwen3_[68]": Written("\n</think>\n\n", OPENED, OPENED),
    "own_thinks": Written("", "\n" + OPENED, "\n" + OPENED, rest="<think>"),
    "*": Written(),
}
# These take thinking from a field alone: one in a content is moved there, in the history, too.
MOVED = ("qwen3_8", "gptoss", "gemma4", "diffusion_gemma", "muse_glimmer")


def written(name: str) -> Written:
    """TRL's training variants write what the model's own template writes."""
    name = name.removesuffix("_training")
    return next(WRITTEN[pattern] for pattern in WRITTEN if fnmatch.fnmatchcase(name, pattern))


def ended(name: str, text: str) -> str:
    return text + written(name).tail + templates.end_of(name)


def plain_answer(name: str, content: str) -> str:
    return ended(name, written(name).lead + content)


def inference_ids(name: str, history: list[dict]) -> list[int]:
    """Ids of the history and the generation prompt, by transformers alone."""
    settings = dict(add_generation_prompt=True, return_dict=False)
    return templates.tokenizer(name).apply_chat_template(history, **settings)


def context_ids(name: str, history: list[dict]) -> list[int]:
    """The same without a thought that an answer without thinking does not continue."""
    tokenizer = templates.tokenizer(name)
    text = tokenizer.decode(inference_ids(name, history)).removesuffix(written(name).rest)
    return tokenizer(text, add_special_tokens=False).input_ids


# ============================================================ what is learned
def sft(tokenizer, *messages: dict, loss_on="assistant", length=10_000, **columns) -> dict:
    """What SFT makes of a conversation; `tokenizer` may be the name of a template."""
    tokenizer = templates.tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    return sft_row({"messages": [*messages], **columns}, tokenizer, length, loss_on)


def learned(row: dict) -> list[tuple[list[int], list[int]]]:
    """(ids before it, ids of it) of each run of targets, sequence after sequence."""
    found = []
    start = 0
    for length in row["sequence_lengths"]:
        ids = row["input_ids"][start : start + length]
        targets = [False, *row["loss_mask"][start : start + length], False]
        edges = [place for place in range(length + 1) if targets[place] != targets[place + 1]]
        found += [(ids[:begin], ids[begin:end]) for begin, end in zip(edges[::2], edges[1::2])]
        start += length
    assert start == len(row["input_ids"]) == len(row["loss_mask"]) == row["length"]
    return found


def answers_of(tokenizer, row: dict) -> list[str]:
    """The text of each run of targets."""
    tokenizer = templates.tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    return [tokenizer.decode(ids) for _, ids in learned(row)]


CHAT = [user("one two"), say("three four."), user("five"), say("six seven")]
FIVE = [user("five")]
SIX = [say("six")]


# ============================================================ every template
@pytest.mark.parametrize("name", NAMES)
def test_two_answers_without_thinking(name):
    templates.folder()
    row = sft(name, *CHAT)
    found = learned(row)
    assert answers_of(name, row) == [plain_answer(name, CHAT[n]["content"]) for n in (1, 3)]
    assert [before for before, _ in found] == [context_ids(name, CHAT[:n]) for n in (1, 3)]
    assert row["prompt_ids"] == inference_ids(name, CHAT[:3])
    assert row["n_targets"] == sum(len(ids) for _, ids in found) and not row["truncated"]
    # One sequence, where the history of the second answer begins with the first answer as it was learned.
    first = found[0][0] + found[0][1]
    assert len(row["sequence_lengths"]) == 2 - (found[1][0][: len(first)] == first)


@pytest.mark.parametrize("name", NAMES)
def test_of_an_answer_that_begins_a_conversation_only_the_answer_is_learned(name):
    turns = [say("zz three"), *CHAT[2:]]
    try:
        whole = templates.tokenizer(name).apply_chat_template(turns[:1], tokenize=False)
    except jinja2.TemplateError as error:
        pytest.skip(f"the template refuses it: {error}")
    row = sft(name, *turns)
    expected = [plain_answer(name, turns[n]["content"]) for n in (0, 2)]
    if name == "qwen3":  # it writes an empty thought after questions alone
        expected[0] = expected[0].removeprefix(EMPTY)
    assert answers_of(name, row) == expected
    before = templates.tokenizer(name).decode(learned(row)[0][0])
    assert whole.startswith(before.rstrip().removesuffix("<think>")) and "zz" not in before


@pytest.mark.parametrize("name", NAMES)
def test_preferences_and_prompts(name):
    """DPO and reward read the prompt of inference and learn the answers as SFT does; PPO generates from that prompt."""
    tokenizer = templates.tokenizer(name)
    given = {"prompt": CHAT[:3], "chosen": CHAT[3:], "rejected": SIX}
    for function in (preference_row, reward_row):
        row = function(given, tokenizer, 10_000)
        assert row["prompt_ids"] == context_ids(name, CHAT[:3])
        for key, content in (("chosen_ids", "six seven"), ("rejected_ids", "six")):
            text = tokenizer.decode(row[key])
            assert text == plain_answer(name, content)
            # An answer's ids follow its prompt as in the template's own text, or as generated after the prompt.
            alone = tokenizer(text, add_special_tokens=False).input_ids
            whole = tokenizer.decode(row["prompt_ids"]) + text
            after = tokenizer(whole, add_special_tokens=False).input_ids[len(row["prompt_ids"]) :]
            assert row[key] in (alone, after)
    row = prompt_row({"prompt": CHAT[:3]}, tokenizer, 10_000, 8)
    assert row["prompt_ids"] == inference_ids(name, CHAT[:3])


@pytest.mark.parametrize("name", NAMES)
def test_thinking_in_the_content_is_learned_whole(name):
    messages = [*FIVE, say(THOUGHT), user("six"), say(THOUGHT)]
    read = messages
    if name.startswith(MOVED):
        read = [*FIVE, say("three four.", reasoning_content="one two"), *messages[2:]]
    row = sft(name, *messages)
    found = learned(row)
    assert answers_of(name, row) == [ended(name, written(name).in_content)] * 2
    for place, (before, _) in zip((1, 3), found):
        prompt = inference_ids(name, read[:place])
        assert before == prompt[: len(before)]
        assert before == prompt or name.startswith("qwen3_5_nothink")
    assert learned(sft(name, *messages, loss_on="completion")) == found[1:]


@pytest.mark.parametrize("name", NAMES)
def test_thinking_in_a_field_is_learned_whole(name):
    """Also where the template knows no such field: never silently less than the user gave."""
    messages = [*FIVE, say("three four.", reasoning_content="one two")]
    row = sft(name, *messages)
    assert answers_of(name, row) == [ended(name, written(name).in_field)]
    text = templates.tokenizer(name).apply_chat_template(messages, tokenize=False)
    assert (odd_templates.DROPS_THOUGHT in row["notes"]) == ("one two" not in text)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("own_alpaca")])
@pytest.mark.parametrize("times, after", [(1, ""), (1, "\n"), (2, "")])
def test_an_end_that_a_content_has_is_learned_once(name, times, after):
    end = templates.end_of(name) * times + after
    turns = [turn | {"content": turn["content"] + end * (turn["role"] != "user")} for turn in CHAT]
    assert sft(name, *turns) == sft(name, *CHAT)


@pytest.mark.parametrize("name", NAMES)
def test_a_thought_that_is_never_closed_is_learned_or_the_row_is_left_out(name):
    messages = [*FIVE, say("<think>one two")]
    if "one two" in templates.tokenizer(name).apply_chat_template(messages, tokenize=False):
        assert "one two" in answers_of(name, sft(name, *messages))[0]
    else:
        assert left_out(sft, name, *messages) == odd_templates.DROPS_ANSWER


# Gemma's first template refuses system messages in its own words.
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name.removesuffix("_training") != "gemma"]
)
def test_system_messages_and_tools_are_read(name):
    parameters = {"type": "object", "properties": {"x": {"type": "number"}}}
    function = {"name": "add", "description": "adds", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    row = sft(name, message("system", "be brief"), *CHAT[:2], tools=tools, length=100_000)
    text = templates.tokenizer(name).decode(row["input_ids"])
    assert ("be brief" in text) != ("role 'system'" in " ".join(row["notes"]))
    assert answers_of(name, row) == [plain_answer(name, CHAT[1]["content"])]


def test_what_ends_an_answer_ends_a_response():
    model = types.SimpleNamespace(generation_config=types.SimpleNamespace(eos_token_id=None))
    for name in NAMES:
        tokenizer = templates.tokenizer(name)
        ends = tokenizer.convert_tokens_to_ids([tokenizer.eos_token, templates.end_of(name)])
        assert rendering.stop_tokens(tokenizer, model) == set(ends), name


# ============================================================ thinking in a content, read as in a field
# A thought as people write it; the last two begin where a prompt ends.
SPELLED = [THOUGHT, "\n<think>one two</think>three four.", OPENED, "one two</think>three four."]
EMPTY_ONES = [f"{thought}three four." for thought in (EMPTY, "<think></think>", "</think>")]
ADD = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
CALL = say("", tool_calls=[ADD])


def rows_with(answer: dict) -> list[tuple]:
    """Row function, row and settings: an answer, or one with it in the history, in every format."""
    later = [*FIVE, answer, *FIVE]
    pairs = [
        {"prompt": FIVE, "chosen": [answer], "rejected": SIX},
        {"prompt": FIVE, "chosen": SIX, "rejected": [answer]},
        {"chosen": [*FIVE, answer], "rejected": [*FIVE, *SIX]},
        {"prompt": later, "chosen": SIX, "rejected": [say("one")]},
    ]
    return [
        *[(preference_row, row, {}) for row in pairs],
        (reward_row, pairs[0], {}),
        (labelled_row, {"messages": [*FIVE, answer], "label": True}, {}),
        (labelled_row, {"prompt": FIVE, "completion": [answer], "label": False}, {}),
        (sft_row, {"messages": [*FIVE, answer]}, {"loss_on": "assistant"}),
        (sft_row, {"messages": [*later, answer]}, {"loss_on": "assistant"}),
        (sft_row, {"prompt": FIVE, "completion": [answer]}, {"loss_on": "completion"}),
        (prompt_row, {"prompt": later}, {"max_new_tokens": 8}),
    ]


@pytest.mark.parametrize("variables", [None, '{"enable_thinking": false}'])
@pytest.mark.parametrize("more", [{}, {"tool_calls": [ADD]}], ids=["", "calls"])
@pytest.mark.parametrize("name, content", [
    *[("qwen3_8", content) for content in SPELLED + EMPTY_ONES],
    # Under these a text may speak of a marker that closes a thought.
    *itertools.product(["gptoss", "gemma4", "gemma4_v5", "muse_glimmer"], SPELLED[:2] + EMPTY_ONES[:2]),
])  # fmt: skip
def test_thinking_in_the_content_is_read_as_in_a_field(name, content, more, variables):
    """It was learned as a part of the answer, under Qwen3.8 after an empty thought."""
    tokenizer = copy.deepcopy(templates.tokenizer(name))
    if variables and "enable_thinking" in rendering.variables(tokenizer):
        rendering.set_defaults(tokenizer, variables)
    thought = {} if content in EMPTY_ONES else {"reasoning_content": "one two"}
    # With a call these write a thought or a text.
    text = "" if more and name in ("gptoss", "muse_glimmer") else "three four."
    content = content.replace("three four.", text)
    meant = rows_with(say(text, **thought, **more))
    both = say(content, **thought, **more)  # as some servers return it
    for answer in (say(content, **more), both):
        for (function, row, settings), (_, other, _) in zip(rows_with(answer), meant):
            rows = [function(each, tokenizer, 1000, **settings) for each in (row, other)]
            assert rows[0] | {"row_json": ""} == rows[1] | {"row_json": ""}, row


def test_thinking_in_strings_is_read_as_in_messages():
    tokenizer = templates.tokenizer("qwen3_8")
    expected = sft("qwen3_8", *FIVE, say("three four.", reasoning_content="one two"))
    alpaca = normalize_columns({"instruction": "five", "output": THOUGHT}, {})
    strings = {"prompt": "five", "completion": THOUGHT}
    assert sft_row(alpaca, tokenizer, 1000, "assistant") == expected
    assert sft_row(strings, tokenizer, 1000, "assistant", strings_as_messages=True) == expected
    pair = {"prompt": "five", "chosen": THOUGHT, "rejected": "six"}
    row = preference_row(pair, tokenizer, 1000, strings_as_messages=True)
    assert tokenizer.decode(row["chosen_ids"]) == OPENED + "<|im_end|>"
    assert tokenizer.decode(row["rejected_ids"]) == "\n</think>\n\nsix<|im_end|>"


@pytest.mark.parametrize("content", [
    *["End with `</think>`, then answer.", "The </think> tag ends it.", "Six <think>one</think> two"],
    *["Use '<think>' and '</think>'.", "</thinker> one", "<think>one"],
])  # fmt: skip
@pytest.mark.parametrize("name", ["qwen3_8", "gptoss", "gemma4_v5", "muse_glimmer"])
def test_a_content_that_speaks_of_thinking_has_none(name, content):
    row = sft(name, *FIVE, say(content))
    assert answers_of(name, row) == [plain_answer(name, content)] and row["notes"] == []


@pytest.mark.parametrize("content, is_named", [
    *[(f"{beginning}one{end}two", True) for beginning, end in [("[THINK]", "[/THINK]"), ("", "\n</reasoning>")]],
    *[("<reasoning>one</reasoning>two", True), ("<think>one</think>two", False), ("two", False)],
])  # fmt: skip
@pytest.mark.parametrize("name", ["gptoss", "qwen3", "gemma4", "qwen2_5"])
def test_thinking_between_markers_that_a_template_does_not_know_is_named(name, content, is_named):
    """It is learned as it is, since a user may want it so; Qwen2.5's template knows no thinking."""
    row = sft(name, *FIVE, say(content))
    assert (chat.KEEPS_THOUGHT in row["notes"]) == (is_named and name != "qwen2_5")
    assert answers_of(name, row) == [plain_answer(name, content)] or not is_named


# ============================================================ templates of our own
def own_template(answer: str, prompt_end: str = ""):
    """A tokenizer whose template writes answers, and ends its generation prompt, in its own way."""
    return with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{{% if m.role == 'assistant' %}}{answer}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        f"{prompt_end}{{% endif %}}"
    )


def with_template(template):
    tokenizer = copy.deepcopy(templates.tokenizer("qwen2_5"))
    tokenizer.chat_template = template
    return tokenizer


CONTENT = "{{ m.content }}"
NO_THOUGHT = "{{ m.content.split('</think>')[-1].strip() }}"
FIELD_ALONE = "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{{ m.content }}"
WHY = "<think>\nwhy\n</think>\n\n"
# Whole thoughts: a model answers after them. One is as Seed-OSS's, which says how much may be thought.
WHOLE = ["<think></think>", "[THINK]\n[/THINK]\n", "<|channel>thought\n<channel|>"]
WHOLE += ["<think>\n[none]\n</think>\n", "<think><budget>0</budget></think>"]

# By what the run says: how a template writes an answer and ends its prompt; an answer's content and thought;
# what of the end of the prompt stays in the context, and what is learned.
OWN = {
    odd_templates.DROPS_THOUGHT: [
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
    odd_templates.FOLLOWS_LESS: [
        (CONTENT, "<think>", "two", "", "", "two"),  # an open one: no model would go on without thinking
        (CONTENT, "<|assistant_header|>", "two", "", "", "two"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("note, answer, prompt_end, content, thought, kept, expected", [
    (note, *case) for note in OWN for case in OWN[note]
])  # fmt: skip
def test_under_a_template_of_its_own(note, answer, prompt_end, content, thought, kept, expected):
    tokenizer = own_template(answer, prompt_end)
    given = say(content, **({"reasoning_content": thought} if thought else {}))
    context, [found], notes = chat.encode_answers(tokenizer, FIVE, [[given]])
    prompt = tokenizer.apply_chat_template(FIVE, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(context) == prompt.removesuffix(prompt_end) + kept
    assert tokenizer.decode(found.ids) == expected + "<|im_end|>"
    assert notes == [note] * bool(note)


def test_what_a_template_drops_from_a_marker_on_is_noticed():
    tokenizer = own_template("{{ m.content.split('<think>')[0] }}")
    why = left_out(chat.encode_answers, tokenizer, FIVE, [[say("six <think>one")]])
    assert why == odd_templates.DROPS_ANSWER


def test_a_first_answer_that_a_template_changes_is_left_out_or_made_whole():
    """Llama's takes it for the user's where there are tools; Qwen's drops its thought, and the lines after it."""
    function = {"name": "add", "description": "adds", "parameters": {}}
    tools = [{"type": "function", "function": function}]
    row = sft("llama3_1", say("Welcome"), *CHAT[2:], tools=tools)
    assert not any("Welcome" in text for text in answers_of("llama3_1", row))
    assert odd_templates.DROPS_ANSWER in row["notes"]
    thinks = say("<think>\nWhy\n</think>\n\nWelcome")
    texts = answers_of("qwen3", sft("qwen3", thinks, *CHAT[2:]))
    assert texts[0] == thinks["content"] + "<|im_end|>"


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
    pair = {"prompt": CHAT[:1], "chosen": [say(THOUGHT)], "rejected": CHAT[1:2]}
    row = preference_row(pair, tokenizer, 1000)
    assert row["prompt_ids"] == context_ids("deepseekv3", CHAT[:1])
    texts = [tokenizer.decode(row[key]) for key in ("chosen_ids", "rejected_ids")]
    assert texts == [text + templates.end_of("deepseekv3") for text in (THOUGHT, "three four.")]


MISTRAL = (  # its v3: the system message stands in the last message of the user
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' }}"
    "{% if loop.last and system %}{{ system + '\n\n' }}{% endif %}{{ m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)


def test_a_system_message_in_the_last_question_is_read_before_each_answer():
    """Once the question is answered Mistral leaves it out: the question was learned with the answer."""
    tokenizer = with_template(MISTRAL)
    history = [message("system", "be brief"), *CHAT[:3]]
    prompt = tokenizer.apply_chat_template(history, return_dict=False)
    assert "[INST] be brief\n\nfive[/INST]" in tokenizer.decode(prompt)
    row = preference_row({"prompt": history, "chosen": CHAT[3:], "rejected": SIX}, tokenizer, 1000)
    assert row["prompt_ids"] == prompt and row["notes"] == []
    assert tokenizer.decode(row["chosen_ids"]) == " six seven<|im_end|>"
    row = sft(tokenizer, *history, *CHAT[3:])
    found = [(tokenizer.decode(before), tokenizer.decode(ids)) for before, ids in learned(row)]
    assert found == [
        ("<bos>[INST] be brief\n\none two[/INST]", " three four.<|im_end|>"),
        (tokenizer.decode(prompt), " six seven<|im_end|>"),
    ]
    assert row["notes"] == []


# ============================================================ calls, tools and other roles
@pytest.mark.parametrize("arguments", ['{"x": true}', {"x": True}])
def test_arguments_are_json_under_a_template_that_prints_them_as_they_are(arguments):
    """It would print an object as Python does, `{'x': True}`."""
    tokenizer = own_template(
        "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    row = sft(tokenizer, *FIVE, say("", tool_calls=[call]))
    assert answers_of(tokenizer, row) == ['add{"x": true}<|im_end|>']


CALLS = {
    "qwen2_5": '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
    "gptoss": ' to=functions.add<|channel|>commentary json<|message|>{"x": 1}<|call|>',
    "gemma4": "<|tool_call>call:add{x:1}<tool_call|><|tool_response>",
    "lfm2_v2": "<|tool_call_start|>[add(x=1)]<|tool_call_end|><|im_end|>",
    "llama3_2": '{"name": "add", "parameters": {"x": 1}}<|eot_id|>',
}


@pytest.mark.parametrize("name, content", [
    *[(name, "") for name in CALLS], ("qwen2_5", "e"), ("lfm2_v2", "e"), ("llama3_2", "e"),
])  # fmt: skip
def test_a_tool_call_is_learned_up_to_its_end_with_its_thinking(name, content):
    """The call is what the answer is for, also where the template drops its thinking and its content."""
    texts = []
    for thought in ("", "one two"):
        row = sft(name, *FIVE, {**CALL, "content": content, "reasoning_content": thought})
        ((before, _),) = learned(row)
        assert before == inference_ids(name, FIVE)
        texts += answers_of(name, row)
    assert texts[0].endswith(CALLS[name]) and texts[1].endswith(CALLS[name])
    assert "one two" in texts[1] and (content or texts[0] == CALLS[name])


@pytest.mark.parametrize("name", ["gptoss", "qwen2_5", "gemma4"])
def test_a_template_that_writes_one_of_several_calls(name):
    """gpt-oss drops all but the first."""
    other = {"type": "function", "function": {"name": "sub", "arguments": {"x": 1}}}
    messages = [*FIVE, say("", tool_calls=[ADD, other])]
    if name == "gptoss":
        assert left_out(sft, name, *messages) == odd_templates.DROPS_CALLS
    else:
        [text] = answers_of(name, sft(name, *messages))
        assert "add" in text and "sub" in text


def test_a_header_of_the_next_turn_is_not_learned_after_a_call():
    """Command A writes one after each message, and calls end otherwise than answers."""
    tokenizer = with_template(
        "{% for m in messages %}<|im_start|>{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
        "{% else %}{{ m.content }}!{% endif %}<|im_end|>{% endfor %}<|im_start|>"
    )
    row = sft(tokenizer, *FIVE, CALL, *CHAT[:2])
    assert answers_of(tokenizer, row) == ["add<|im_end|>", "three four.!<|im_end|>"]


RESULT = message("tool", "six", name="add")


def test_an_answer_that_goes_on_with_the_turn_of_its_call_is_learned_alone():
    """Gemma 4 writes it after what the call says: the call and its result were learned again."""
    turns = [*FIVE, {**CALL, "content": "one"}, RESULT]
    row = sft("gemma4_v5", *turns, say("zq seven"))
    assert learned(row)[1][0] == inference_ids("gemma4_v5", turns)
    assert answers_of("gemma4_v5", row)[1] == "zq seven<turn|>"


def test_a_second_call_in_the_block_of_the_first_is_refused():
    """DeepSeek-V3 opens the block once: the second call would be learned without what opens it."""
    with pytest.raises(BadRow, match="writes the history differently"):
        sft("deepseekv3", *FIVE, *[CALL, RESULT] * 2, say("seven"))


@pytest.mark.parametrize("name", ["gemma3", "own_alpaca"])
def test_a_tool_call_that_the_template_does_not_write_is_left_out_and_counted(
    name, accelerator, tmp_path, capsys
):
    tokenizer = templates.tokenizer(name)
    turns = [*FIVE, CALL, user("six"), say("seven")]
    rows = [{"messages": turns}, {"messages": turns[:2]}, {"messages": [turns[0], turns[3]]}]
    path = str(write_jsonl(tmp_path / "calls.jsonl", rows))
    data = load_rows(accelerator, path, sft_row, tokenizer, max_length=10_000, loss_on="assistant")
    texts = [answers_of(tokenizer, row) for row in data]
    assert data["row"][:] == [1, 3] and texts == [[plain_answer(name, "seven")]] * 2
    reason = "tool calls are not learned, because the chat template does not write them"
    said = capsys.readouterr().out
    assert f"left out ({reason}): 1 of 3 rows" in said and f"; {reason}: 1 of 3 rows" in said
    row = {"prompt": turns[:1], "chosen": [CALL], "rejected": turns[3:]}
    assert left_out(preference_row, row, tokenizer, 10_000) == reason


@pytest.mark.parametrize("name, role", [
    *[("phi3", "tool"), ("own_alpaca", "system"), ("own_alpaca", "critic"), ("qwen2_5", "tool")],
])  # fmt: skip
def test_a_message_that_the_template_does_not_write_is_said(name, role):
    secret = message(role, "a secret")
    asked = [secret, *FIVE] if role == "system" else [*FIVE, secret]
    row = sft(name, *asked, *SIX)
    is_written = "a secret" in templates.tokenizer(name).decode(row["input_ids"])
    assert is_written == (name == "qwen2_5")
    note = f"messages that the chat template does not write (role '{role}')"
    assert (note in row["notes"]) != is_written
    assert answers_of(name, row) == [plain_answer(name, "six")]
    # After the last answer nothing is read, so nothing is missed there.
    assert note not in sft(name, *FIVE, *SIX, secret)["notes"]


def test_of_several_templates_the_one_for_tools_writes_tools():
    plain = templates.tokenizer("qwen2_5").chat_template
    tokenizer = with_template({"default": plain, "tool_use": "TOOLS " + plain})
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert sft(tokenizer, *CHAT) == sft("qwen2_5", *CHAT)
    row = sft(tokenizer, *CHAT, tools=tools)
    assert tokenizer.decode(row["input_ids"]).startswith("TOOLS")
    assert answers_of(tokenizer, row)[0] == "three four.<|im_end|>"


@pytest.mark.parametrize("loss_on", ["assistant", "completion"])
@pytest.mark.parametrize("thinking", [None, "Tool says 5"])
def test_an_answer_whose_history_is_rewritten_by_it_is_learned_after_the_prompt(loss_on, thinking):
    """gpt-oss drops the thinking of a call once the result is answered: the result was learned with the answer."""
    thought = {"thinking": thinking} if thinking else {}
    messages = [user("2+3?"), {**CALL, "thinking": "Use it"}, RESULT, say("It is 5.", **thought)]
    row = sft("gptoss", *messages, loss_on=loss_on)
    assert row["sequence_lengths"] == [row["length"]] and row["notes"] == []
    texts = answers_of("gptoss", row)
    before = ANALYSIS % thinking if thinking else ""
    assert texts[-1] == before + FINAL + "It is 5.<|return|>"
    assert len(texts) == (2 if loss_on == "assistant" else 1)
    called = ANALYSIS % "Use it" + " to=functions.add"
    assert loss_on == "completion" or texts[0].startswith(called)
    assert learned(row)[-1][0] == inference_ids("gptoss", messages[:3])


# ============================================================ which turns are learned, and how much of them
NOT_LEARNED = [("train", False), ("weight", 0), ("loss_weight", 0.0), ("loss_mask", 0)]
NOT_LEARNED += [("loss_scale", 0.0), ("loss", False), ("training", False)]


@pytest.mark.parametrize("key, value", NOT_LEARNED)
def test_a_turn_that_says_so_is_not_learned(key, value):
    asked, answer, *rest = CHAT
    whole = sft("qwen2_5", *CHAT)
    for learns in (True, 1):
        assert sft("qwen2_5", asked, {**answer, key: learns}, *rest) == whole
    turns = [asked, {**answer, key: value}, *rest]
    row = sft("qwen2_5", *turns)
    assert answers_of("qwen2_5", row) == ["six seven<|im_end|>"]
    assert row["input_ids"] == whole["input_ids"]
    with pytest.raises(BadRow, match="--loss_on all"):
        sft("qwen2_5", *turns, loss_on="all")
    assert left_out(sft, "qwen2_5", *turns[:2]) == "no answer that is to be learned"


UNCLEAR = [("weight", 0.5), ("loss", "no"), ("mask", True), ("skip_loss", 1)]
UNCLEAR += [("train_detail", "0:8"), ("train_on_turn", False)]


@pytest.mark.parametrize("key, value", UNCLEAR)
def test_a_turn_that_is_unclear_about_its_loss_is_refused(key, value):
    said = f"message 2, {key} {value!r}: every learned turn counts alike"
    with pytest.raises(BadRow, match=said):
        sft("qwen2_5", CHAT[0], {**CHAT[1], key: value})


def test_all_of_a_conversation_is_learned_in_one_sequence_or_not_at_all():
    text = templates.tokenizer("qwen2_5").apply_chat_template(CHAT, tokenize=False)
    row = sft("qwen2_5", *CHAT, loss_on="all")
    expected = text.removeprefix("<|im_start|>").removesuffix("\n")
    assert answers_of("qwen2_5", row)[-1] == expected
    assert left_out(sft, "qwen3", *CHAT, loss_on="all") == chat.REWRITES_TURNS


def test_max_length_holds_for_each_sequence():
    turns = [turn for text in ("one", "two", "five") for turn in (user(text), say("six seven"))]
    whole = sft("qwen3", *turns)
    lengths = whole["sequence_lengths"]
    assert len(lengths) == 3 and not whole["truncated"]
    # The third is cut within its answer, then before it; the second is cut within its answer.
    for length, kept in (
        (lengths[2] - 2, [lengths[0], lengths[1], lengths[2] - 2]),
        (lengths[1] - 1, [lengths[0], lengths[1] - 1]),
    ):
        row = sft("qwen3", *turns, length=length)
        assert row["sequence_lengths"] == kept and row["length"] == sum(kept) and row["truncated"]
        assert row["n_targets"] == sum(row["loss_mask"]) == sum(len(ids) for _, ids in learned(row))
    assert left_out(sft, "qwen3", *turns, length=5) == "nothing to learn within max_length"


# ============================================================ strings
TRANSCRIPT = "\n\nHuman: one\n\nAssistant: two\n\nHuman: five\n\nAssistant:"  # as hh-rlhf's


@pytest.mark.parametrize("prompt, turns", [
    ("five", FIVE), (TRANSCRIPT, [user("one"), say("two"), *FIVE]),
])  # fmt: skip
def test_strings_become_turns_where_asked(prompt, turns):
    tokenizer = templates.tokenizer("qwen2_5")
    strings = {"prompt": prompt, "completion": "six", "chosen": "six", "rejected": "one"}
    messages = {"prompt": turns, "completion": SIX, "chosen": SIX, "rejected": [say("one")]}
    for function, *settings in (
        (sft_row, "assistant"),
        (preference_row,),
        (reward_row,),
    ):
        expected = function(messages, tokenizer, 1000, *settings)
        assert function(strings, tokenizer, 1000, *settings, True) == expected
        assert function(strings, tokenizer, 1000, *settings) != expected
    found = prompt_row(strings, tokenizer, 1000, 8, True)
    assert found["prompt_ids"] == inference_ids("qwen2_5", turns)


# ============================================================ the user's own template, and its date
def saved(folder, name: str = "qwen2_5") -> str:
    """A folder with a tokenizer of a template."""
    templates.tokenizer(name).save_pretrained(folder)
    return str(folder)


def test_variables_of_the_template_are_saved_with_it(accelerator, tmp_path):
    folder = saved(tmp_path / "model", "qwen3")
    values = {"enable_thinking": False}
    plain = load.load_tokenizer(folder)
    args = SharedArgs(folder, chat_template_kwargs=json.dumps(values))
    tokenizer = load.tokenizer_of_run(accelerator, args)
    tokenizer.save_pretrained(tmp_path / "actor")
    again = AutoTokenizer.from_pretrained(tmp_path / "actor")

    def ids(tokenizer, **values):
        settings = dict(add_generation_prompt=True, return_dict=False)
        return tokenizer.apply_chat_template(CHAT[:1], **settings, **values)

    expected = ids(plain, **values)
    assert prompt_row({"prompt": CHAT[:1]}, tokenizer, 1000, 8)["prompt_ids"] == expected
    assert ids(again) == expected != ids(plain)
    # Whoever gives the variable decides.
    assert ids(again, enable_thinking=True) == ids(plain, enable_thinking=True)
    assert rendering.fingerprint(tokenizer) != rendering.fingerprint(plain)


def test_only_what_a_template_reads_as_a_variable_can_be_set():
    """gpt-oss has a field `thinking` of messages: to set it changed nothing, and was recommended."""
    assert "enable_thinking" in rendering.variables(templates.tokenizer("qwen3"))
    gpt_oss = templates.tokenizer("gptoss")
    assert "reasoning_effort" in rendering.variables(gpt_oss)
    call = lambda: rendering.set_defaults(gpt_oss, '{"thinking": true}')
    refuses("has no variable 'thinking' to set; it has: ", "reasoning_effort", call=call)
    both = with_template({"default": "{{ a }}{{ bos_token }}", "tool_use": "{{ b }}{{ tools }}"})
    assert rendering.variables(both) == {"a", "b"}


def test_variables_reach_the_template_as_they_are_in_json(accelerator, tmp_path):
    values = {"a": None, "b": [True, False, -1.5e-7, 10**20]}
    values["c"] = {"quo\"te'": "\\n\n{{ x }} %} é😀"}
    template = tmp_path / "own.jinja"
    template.write_text("{{ [a, b, c] | tojson }}{{ a is none }}")
    args = SharedArgs(saved(tmp_path / "model"), chat_template=str(template))
    args.chat_template_kwargs = json.dumps(values)
    tokenizer = load.tokenizer_of_run(accelerator, args)
    rendered = tokenizer.apply_chat_template([user("a")], tokenize=False)
    assert rendered.endswith("True")
    assert json.loads(rendered.removesuffix("True")) == list(values.values())


def test_a_date_is_that_of_the_run(accelerator, tmp_path, monkeypatch):
    folder = saved(tmp_path / "model", "own_dated")

    def on(date: str, folder: str = folder):
        monkeypatch.setattr(load, "date_of_run", lambda args: date)
        return load.tokenizer_of_run(accelerator, SharedArgs(folder))

    rows = [sft(on(date), *CHAT) for date in ("2020-02-29", "2020-02-29", "2021-03-01")]
    assert rows[0] == rows[1] and "29 Feb 2020" in on("2020-02-29").decode(rows[0]["input_ids"])
    assert "01 Mar 2021" in on("2020-02-29").decode(rows[2]["input_ids"])
    assert rendering.fingerprint(on("2020-02-29")) != rendering.fingerprint(on("2021-03-01"))
    # Where no date is printed, the day is no part of what the ids depend on.
    undated = saved(tmp_path / "undated")
    first, second = (on(date, undated) for date in ("2020-02-29", "2021-03-01"))
    assert rendering.fingerprint(first) == rendering.fingerprint(second)
    assert not hasattr(first, "chat_date")
    # The saved tokenizer prints the day on which it is used.
    on("2020-02-29").save_pretrained(tmp_path / "actor")
    saved_one = AutoTokenizer.from_pretrained(tmp_path / "actor")
    text = saved_one.apply_chat_template(CHAT[:1], tokenize=False)
    assert f"{datetime.date.today():%d %b %Y}" in text
