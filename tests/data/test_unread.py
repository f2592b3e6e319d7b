"""What a user gave and nothing reads is named: columns, keys of messages, of calls and of tools."""

import itertools
import json

import pytest

import templates
from preference_recipes.data import dataset, formats, prompts, unread
from recipes import load
from runs import write_jsonl
from templates import load_rows

pytestmark = pytest.mark.usefixtures("own_cache")

U = {"role": "user", "content": "12+30="}
A = {"role": "assistant", "content": "042"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}, "id": "c1"}


def said(function, tokenizer, *rows, columns=None, **settings):
    settings = {"max_length": 512, "strings_as_messages": False, **settings}
    converter = dataset.Converter(function, tokenizer, columns or {}, settings)
    return unread.describe(iter(rows), converter)


def sft(tokenizer, *rows, **more):
    return said(load("sft").sft_row, tokenizer, *rows, loss_on="assistant", **more)


WITH_OTHER_KEYS = {**A, "function_calls": [{"name": "add"}], "reasoning_details": [{"text": "hm"}]}


@pytest.mark.parametrize("rows, names", [
    ([{"messages": [U, A], "answer": "042"}], ""),
    ([{"prompt": "a", "completion": "b", "id": None, "tags": []}], ""),
    ([{"id": 7, "messages": [U, A]},
      {"id": 8, "messages": [{**U, "mood": "good"}, A], "meta": {"a": 1, "b": 2}}],
     '"id", "meta", "messages.mood"'),
    ([{"messages": [U, A], "text": "something else"}], '"text"'),
    # Calls, tools and thoughts under names that no template of ours reads.
    ([{"messages": [{**U, "functions": "[]"}, WITH_OTHER_KEYS], "functions": [{"name": "add"}]}],
     '"functions", "messages.functions", "messages.function_calls", "messages.reasoning_details"'),
    # A key that is read in a late row alone is read.
    ([{"messages": [U, {**A, "train": learns}]} for learns in (True, True, True, True, False)], ""),
    ([{"messages": [U, {**A, "train": learns}]} for learns in (1, 1, 1, 1, 0)], ""),
])  # fmt: skip
def test_columns_and_keys_of_messages_are_named(tokenizer, rows, names):
    assert sft(tokenizer, *rows) == (f"not read: {names}" if names else "")


def test_columns_that_the_user_names_take_the_place_of_messages(tokenizer):
    row = {"messages": [U, A], "text": "something else"}
    assert sft(tokenizer, row, columns={"text": "text"}) == 'not read: "messages"'


def test_pairs(tokenizer):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5}
    assert said(formats.preference_row, tokenizer, row) == 'not read: "margin"'


def test_columns_are_for_reward_functions_but_keys_of_messages_are_not(tokenizer):
    row = {"prompt": [{**U, "mood": "good"}], "reward_model": {"ground_truth": "042"}}  # as verl's
    found = said(prompts.prompt_row, tokenizer, row, max_new_tokens=8, tools=None)
    assert found == 'not read: "prompt.mood"'
    row = {"prompt": [U], "chat_template_kwargs": {"enable_thinking": False}}
    found = said(prompts.prompt_row, tokenizer, row, max_new_tokens=8)
    assert found == 'not read: "chat_template_kwargs"'


@pytest.mark.parametrize("name", ["qwen3", "llama3_1"])
def test_keys_of_calls_that_a_template_does_not_write(name):
    tokenizer = templates.tokenizer(name)
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    row = {"messages": [U, call, {"role": "tool", "content": "42", "name": "add"}, A]}
    found = sft(tokenizer, row)
    # Neither template writes the id of a call; what a call says is written.
    assert '"messages.tool_calls.id"' in found and "function" not in found


@pytest.mark.parametrize("name, said_of_them", [("qwen3", ""), ("own_alpaca", 'not read: "tools"')])
def test_tools_that_no_template_writes_are_named(name, said_of_them):
    tokenizer = templates.tokenizer(name)
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert sft(tokenizer, {"messages": [U, A], "tools": tools}) == said_of_them
    prompt = {"prompt": [U], "tools": json.dumps(tools)}
    assert said(prompts.prompt_row, tokenizer, prompt, max_new_tokens=8) == said_of_them


def test_of_a_large_set_the_first_rows_are_looked_at(tokenizer, monkeypatch):
    monkeypatch.setattr(unread, "MAX_ROWS", 3)
    rows = itertools.repeat({"id": 1, "prompt": "a", "completion": "b"}, 10)
    found = sft(tokenizer, {"prompt": "a", "completion": "b"}, *rows)
    assert found == 'not read: "id"'


def test_the_line_about_a_set_says_what_is_not_read(tokenizer, accelerator, tmp_path, capsys):
    """Also of rows that an earlier run tokenised."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"id": 7, "messages": [{**U, "mood": "good"}, A]}])
    settings = {"max_length": 512, "loss_on": "assistant"}
    said = f'data {path}: 1 usable rows; not read: "id", "messages.mood"\n'
    for _ in range(2):
        load_rows(accelerator, path, load("sft").sft_row, tokenizer, **settings)
        assert capsys.readouterr().out == f"reading {path} ...\n{said}"
