"""Data as people have it: names are names, values keep their type, and the formats of other tools are read as they are."""

import gzip
import json
import runpy

import datasets
import pytest

import templates
from preference_recipes.data import files, formats, messages
from preference_recipes.data.messages import BadRow
from preference_recipes.data.pairs import preference_row
from preference_recipes.data.prompts import prompt_row
from runs import recipe, refuses, write_jsonl
from templates import load_rows

sft_row = runpy.run_path(str(recipe("sft")))["sft_row"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def load(accelerator, tokenizer, path, function=sft_row, columns=(), split="train", **settings):
    """The usable rows of a file."""
    if function is sft_row:
        settings["loss_on"] = "assistant"
    if function is prompt_row:
        settings["max_new_tokens"] = 8
    named = formats.column_names(list(columns))
    return load_rows(
        accelerator,
        str(path),
        function,
        tokenizer,
        columns=named,
        split=split,
        max_length=4000,
        **settings,
    )


def rows_of(path, split="train") -> list[dict]:
    """The rows of a data set as a row function gets them."""
    rows = files.load(str(path), split)
    return list(rows.read(0, rows.number))


# ---------------------------------------------------------------------------------------------- names


NAMES = ["run[1].jsonl", "a*.jsonl", "run[1].csv", "run[1].parquet"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_name_and_no_pattern(tmp_path, name):
    """Beside each file stands one that its name would match."""

    def write(path, row: dict) -> None:
        content = json.dumps([row] if ".json" in path.suffixes else row).encode()
        if path.suffix == ".csv":
            content = f"text\n{row['text']}\n".encode()
        if path.suffix == ".parquet":
            datasets.Dataset.from_list([row]).to_parquet(path)
        else:
            path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)

    write(tmp_path / name, {"text": "mine"})
    write(
        tmp_path / name.replace("[1]", "1").replace("*", "b").replace("?", "1"), {"text": "other"}
    )
    assert rows_of(tmp_path / name) == [{"text": "mine"}]


@pytest.mark.parametrize("suffix", [".csv"])
def test_the_name_of_a_folder_is_no_pattern_either(tmp_path, suffix):
    for folder in ("set[1]", "set1"):
        (tmp_path / folder).mkdir()
        for part in ("train", "test"):
            text = f"{folder} {part}"
            lines = json.dumps({"text": text}) if suffix == ".jsonl" else f"text\n{text}"
            (tmp_path / folder / f"{part}-[0]{suffix}").write_text(f"{lines}\n")
    assert rows_of(tmp_path / "set[1]") == [{"text": "set[1] train"}]
    assert rows_of(tmp_path / "set[1]", "test") == [{"text": "set[1] test"}]
    assert rows_of(tmp_path / "set1") == [{"text": "set1 train"}]


# ---------------------------------------------------------------------------------------------- values


MIXED = [
    {"prompt": "a", "answer": "046", "when": "2024-01-31", "n": 1},
    {"prompt": "b", "answer": 46, "when": "2024-02-01T10:00:00", "n": 1.5},
    {"prompt": "c", "answer": True, "when": None, "n": [1, "x"], "late": {"deep": "1"}},
    {"prompt": "d", "answer": None, "late": {"deep": 1, "other": 12345678901234567890}},
]  # fmt: skip


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "folder"])
def test_each_row_keeps_the_types_of_its_json(tmp_path, name):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
        write_jsonl(path / "0.jsonl", MIXED[:2])
        write_jsonl(path / "1.jsonl", MIXED[2:])
    else:
        text = (
            json.dumps(MIXED, indent=1)
            if name.endswith("json")
            else "".join(json.dumps(row) + "\r\n\n" for row in MIXED)
        )
        path.write_bytes(
            gzip.compress(text.encode()) if name.endswith("gz") else b"\xef\xbb\xbf" + text.encode()
        )
    names = ["prompt", "answer", "when", "n", "late"]
    expected = [{column: row.get(column) for column in names} for row in MIXED]
    assert json.dumps(rows_of(path)) == json.dumps(expected)  # 1 is not True, and not 1.0
    assert json.dumps(rows_of(path, "train[1:3]")) == json.dumps(expected[1:3])
    assert json.dumps(rows_of(path, "train[75%:]+train[:1]")) == json.dumps(
        [expected[3], expected[0]]
    )


def test_answers_that_look_like_dates_or_numbers_stay_text(tmp_path, accelerator, tokenizer):
    answers = ["2024-01-31", "2024-02-01", "046"]
    rows = [{"prompt": "when?", "completion": answer, "answer": answer} for answer in answers]
    path = write_jsonl(
        tmp_path / "rows.jsonl", [*rows, {"prompt": "n", "completion": "46", "answer": 46}]
    )
    data = load(accelerator, tokenizer, path)
    assert data["answer"][:] == [*answers, "46"]
    prompts = load(accelerator, tokenizer, path, prompt_row)
    assert [json.loads(columns)["answer"] for columns in prompts["columns"]] == [*answers, 46]


def test_a_column_that_appears_late_is_read(tmp_path, accelerator, tokenizer):
    chat = [message("user", "a"), message("assistant", "b")]
    rows = [{"messages": chat, "pad": "x" * 20_000}] * 1500 + [{"messages": chat, "answer": "7"}]
    data = load(accelerator, tokenizer, write_jsonl(tmp_path / "rows.jsonl", rows))
    assert len(data) == 1501 and data["answer"][-2:] == ["", "7"]
    named = load(accelerator, tokenizer, tmp_path / "rows.jsonl", columns=["answer=pad"])
    assert named["answer"][-2:] == ["x" * 20_000, ""]
    refuses("no column 'none'", "['messages', 'pad', 'answer']",
            call=lambda: load(accelerator, tokenizer, tmp_path / "rows.jsonl", columns=["text=none"]))  # fmt: skip


@pytest.mark.parametrize("name, text, parts", [
    ("a.jsonl", '{"text": "a"}\n{"text": \n', ["row 2", "Expecting value"]),
    ("a.jsonl", '{"text": "a"}\n["text"]\n', ["row 2", "a JSON object", '["text"]']),
    ("a.jsonl", '{"text": "a"}\n{"text": 5}\n', ["row 2", "column 'text'", "a string", "found 5"]),
    ("a.json", '[{"text": "a"},\n {"text": "b"}', ["',' delimiter", "line 2 column 15"]),
    ("a.json", '[{"text": "a"},\n 2]', ["row 2", "a JSON object", "found 2"]),
])  # fmt: skip
def test_an_error_names_the_row_at_fault(tmp_path, accelerator, tokenizer, name, text, parts):
    (tmp_path / name).write_text(text)
    refuses(name, *parts, call=lambda: load(accelerator, tokenizer, tmp_path / name))


def test_every_row_of_a_file_comes_as_it_is(tmp_path):
    rows = [{"a": '], "[{é\u2028'}, {}, {"b": [{"c": 1.5e3}, "\\", None]}, {"d": {"e": {}}}]
    for text in (json.dumps(rows), f" {json.dumps(rows, indent=3, ensure_ascii=False)}\n\n"):
        (tmp_path / "a.json").write_text(text, encoding="utf-8")
        assert list(files.checked_rows(tmp_path / "a.json")) == rows
        # Lines end at a line feed alone, not at what Unicode takes for an end of line.
        (tmp_path / "b.jsonl").write_text(
            "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8"
        )
        assert list(files.checked_rows(tmp_path / "b.jsonl")) == rows


# ---------------------------------------------------------------------------------------------- preferences


SYSTEM, QUESTION = message("system", "Be brief."), message("user", "Why?")
YES, NO = message("assistant", "Because."), message("assistant", "No.")
BEFORE = [message("user", "One?"), message("assistant", "One.")]


@pytest.mark.parametrize("prompt, inside, whole", [
    ([SYSTEM, QUESTION], [SYSTEM, QUESTION], [SYSTEM, QUESTION]),
    ([QUESTION], [SYSTEM, QUESTION], [SYSTEM, QUESTION]),
    ("Why?", [SYSTEM, *BEFORE, QUESTION], [SYSTEM, *BEFORE, QUESTION]),
    ("Be brief.", [SYSTEM, QUESTION], [SYSTEM, QUESTION]),
    ([message("human", "Why?")], [QUESTION], [QUESTION]),
])  # fmt: skip
def test_nothing_of_a_prompt_is_lost_beside_conversations(prompt, inside, whole):
    row = {"prompt": prompt, "chosen": [*inside, YES], "rejected": [*inside, NO]}
    assert formats.preference(row) == (whole, [YES], [NO])


PAIR_OF_STRINGS = {"chosen": "Because.", "rejected": "No."}
PAIR_OF_LISTS = {"chosen": [YES], "rejected": [NO]}
TRANSCRIPTS = {
    "chosen": "\n\nHuman: Why?\n\nAssistant: Because.",
    "rejected": "\n\nHuman: Why?\n\nAssistant: No.",
}


@pytest.mark.parametrize(
    "row, as_messages",
    [
        ({"prompt": "Why?", **PAIR_OF_STRINGS}, True),
        (TRANSCRIPTS, True),
        ({"prompt": "Why?", **PAIR_OF_LISTS}, False),
        ({"chosen": [QUESTION, YES], "rejected": [QUESTION, NO]}, False),
        ({"prompt": [QUESTION], **PAIR_OF_LISTS}, False),
        ({"prompt": QUESTION, "chosen": YES, "rejected": NO}, True),
        ({"prompt": "\n\nHuman: Why?\n\nAssistant:", **TRANSCRIPTS}, True),
        ({"prompt": [], "chosen": [QUESTION, YES], "rejected": [QUESTION, NO]}, False),
    ],
)
def test_a_column_system_begins_the_chat(row, as_messages):
    """Beside strings, too, where they are turns; with an empty one the row is as without."""
    found = formats.standard({**row, "system": SYSTEM["content"]}, as_messages)
    prompt, *answers = formats.preference(found)
    if as_messages:
        prompt, *answers = formats.as_turns(prompt, *answers)
    assert (prompt, *answers) == ([SYSTEM, QUESTION], [YES], [NO])
    plain = formats.standard(row, as_messages)
    assert formats.standard({**row, "system": ""}, as_messages) == {**plain, "system": ""}


@pytest.mark.parametrize("as_messages", [False, True])
def test_a_single_message_is_read_as_a_list_of_one(as_messages, tokenizer):
    """With a column `system` it was lost, or the system message came after it; as turns it ended in a traceback."""
    row = {"prompt": QUESTION, "completion": YES}
    assert formats.standard(row, as_messages) == row  # reward functions get it as it is
    ids = [
        prompt_row(given, tokenizer, 1000, 8, strings_as_messages=as_messages)["prompt_ids"]
        for given in (row, {"prompt": [QUESTION]})
    ]
    assert ids[0] == ids[1]
    alone = formats.standard({"prompt": QUESTION, "system": "Be brief."}, as_messages)
    assert alone["prompt"] == [SYSTEM, QUESTION]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", **PAIR_OF_STRINGS},
        {"prompt": "Why?", "completion": "Because."},
        {"prompt": "Why?"},
        TRANSCRIPTS,
    ],
)
def test_a_column_system_beside_plain_strings_is_refused(row):
    with pytest.raises(BadRow, match=r"column 'system' is next to strings.*strings_as_messages"):
        formats.standard({**row, "system": "Be brief."})
    answer = {"completion": "Because."} if "completion" in row else {}
    if answer:
        found = formats.standard({**row, "system": "Be brief."}, True)
        assert formats.conversation(found) == ([SYSTEM, QUESTION], [YES])
    text = {"text": "Be brief. Why? Because.", "system": "Be brief."}
    assert formats.standard(text) == text


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_next_to_messages_asks_nothing(prompt):
    """It was learned as an empty turn of the user."""
    row = {"prompt": prompt, "completion": [YES]}
    assert formats.conversation(row) == ([], [YES])
    pair = {"prompt": prompt, "chosen": [YES], "rejected": [NO]}
    assert formats.preference(pair) == ([], [YES], [NO])


@pytest.mark.parametrize("calls", ["[]", []])
def test_a_message_without_a_content_must_call_something(calls):
    """Data that hold calls as JSON say "[]" where there are none."""
    empty = {"role": "assistant", "content": None, "tool_calls": calls}
    with pytest.raises(BadRow, match="expected a list of messages"):
        formats.conversation({"messages": [QUESTION, empty]})


@pytest.mark.parametrize("prompt", ["", []])
def test_a_system_message_begins_the_prompt_of_a_completion_that_nobody_asks_for(prompt):
    """It came after an empty message of the user, or into the completion."""
    row = {"prompt": prompt, "completion": [YES], "system": "Be brief."}
    assert formats.conversation(formats.standard(row)) == ([SYSTEM], [YES])


@pytest.mark.parametrize("prompt, inside", [
    ([message("system", "Be long."), QUESTION], [SYSTEM, QUESTION]),
    ([SYSTEM, QUESTION], [QUESTION]),  # the system message would be lost
    # The same words by somebody else.
    ([message("user", "Because.")], [QUESTION, YES, message("user", "And?")]),
])  # fmt: skip
def test_a_prompt_that_contradicts_its_conversations_is_refused(prompt, inside):
    row = {"prompt": prompt, "chosen": [*inside, YES], "rejected": [*inside, NO]}
    with pytest.raises(BadRow, match="do not begin with all of the prompt in column 'prompt'"):
        formats.preference(row)


# ---------------------------------------------------------------------------------------------- the formats of other tools


# What a chat template is given stands in the ids as JSON, so that a test can read it back.
AS_JSON = (
    "{% if tools %}{{ 'tools' + (tools | tojson) + '\\n' }}{% endif %}"
    "{% for m in messages %}{{ (m | tojson) + '<|end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '' }}{% endif %}"
)


@pytest.fixture
def reader(tokenizer, accelerator, tmp_path, monkeypatch):
    """A function that loads rows and returns the messages and the tools that the template was given."""
    monkeypatch.setattr(tokenizer, "chat_template", AS_JSON)

    def read(
        rows: list[dict], function=sft_row, name="rows.jsonl", ids="input_ids", **settings
    ) -> list[tuple[list[dict], object]]:
        path = tmp_path / name
        if name.endswith(".parquet"):
            datasets.Dataset.from_list(rows).to_parquet(path)
        else:
            write_jsonl(path, rows)
        data = load(accelerator, tokenizer, path, function, **settings)
        found = []
        for row in data[ids]:
            lines = tokenizer.decode(row).replace("<|end|>", "").strip().split("\n")
            tools = (
                json.loads(lines.pop(0).removeprefix("tools"))
                if lines[0].startswith("tools")
                else None
            )
            messages = [json.loads(line) for line in lines]
            for given in messages:
                given.pop("thinking", None)  # transformers' second name for `reasoning_content`
            found.append((messages, tools))
        return found

    return read


def call(name: str, **arguments) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def said(sender: str, value: str) -> dict:
    return {"from": sender, "value": value}


ALPACA = {
    "instruction": "Describe a process of making crepes.",
    "input": "",
    "output": "Making crepes is easy.",
}
ALPACA_INPUT = {"instruction": "识别并解释", "input": "细胞理论和日心说。", "output": "细胞理论是"}
QUESTIONS = [
    [message("user", ALPACA["instruction"])],
    [message("user", "识别并解释\n细胞理论和日心说。")],
]
PARAMETERS = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
BARE_TOOL = {"name": "search", "description": "Search", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": BARE_TOOL}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_alpaca(reader, name):
    rows = [ALPACA, ALPACA_INPUT, {**ALPACA, "input": None}]
    answers = [[message("assistant", row["output"])] for row in rows]
    questions = [*QUESTIONS, QUESTIONS[0]]
    assert reader(rows, name=name) == [
        (prompt + answer, None) for prompt, answer in zip(questions, answers)
    ]
    assert reader(rows, prompt_row, name, ids="prompt_ids") == [
        (prompt, None) for prompt in questions
    ]
    more = {**ALPACA, "system": "Be brief.", "history": [["One?", "One."]]}
    assert reader([more], name=name) == [([SYSTEM, *BEFORE, *QUESTIONS[0], *answers[0]], None)]
    pair = {"instruction": "Why?", "input": "", "chosen": "Because.", "rejected": "No."}
    assert reader([pair], preference_row, name, ids="chosen_ids") == [([YES], None)]
    assert reader([pair], preference_row, name, ids="rejected_ids") == [([NO], None)]


def test_only_the_output_of_alpaca_is_learned(tokenizer, accelerator, tmp_path):
    (row,) = load(accelerator, tokenizer, write_jsonl(tmp_path / "rows.jsonl", [ALPACA_INPUT]))
    learned = [token for token, target in zip(row["input_ids"], row["targets"]) if target]
    assert tokenizer.decode(learned) == ALPACA_INPUT["output"] + "<|end|>"
    # The reward function of PPO gets the row's own columns.
    (row,) = load(accelerator, tokenizer, tmp_path / "rows.jsonl", prompt_row)
    assert {**json.loads(row["columns"]), **ALPACA_INPUT} == json.loads(row["columns"])


# As in the original file: everything once more, as a text.
ALPACA_TEXT = {**ALPACA_INPUT, "text": "Below is an instruction ... ### Response:\n细胞理论是"}


@pytest.mark.parametrize("row", [
    ALPACA_TEXT,
    {"prompt": QUESTIONS[1], "completion": ALPACA_INPUT["output"], "text": ALPACA_TEXT["text"]},
    {"conversations": [said("human", "识别并解释\n细胞理论和日心说。"), said("gpt", "细胞理论是")], "text": "a"},
])  # fmt: skip
def test_a_column_text_beside_another_format_is_learned_only_on_request(
    row, tokenizer, accelerator, tmp_path
):
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    (found,) = load(accelerator, tokenizer, path)
    learned = [token for token, target in zip(found["input_ids"], found["targets"]) if target]
    assert tokenizer.decode(learned) == ALPACA_INPUT["output"] + "<|end|>"
    (found,) = load(accelerator, tokenizer, path, columns=["text=text"])
    assert tokenizer.decode(found["input_ids"]).removesuffix("<|end|>") == row["text"]
    assert all(found["targets"][1:])


@pytest.mark.parametrize("more, is_read", [
    ({"image": {"path": "a.png"}}, False), ({"image": "python:3.12"}, True),
])  # fmt: skip
def test_a_prompt_with_an_image(more, is_read, tokenizer, accelerator, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": [QUESTION], **more}])
    read = lambda: load(accelerator, tokenizer, path, prompt_row)
    if is_read:  # the name of a container's image
        assert len(read()) == 1
    else:
        refuses("row 1", "only text is supported", call=read)


def test_columns_of_alpaca_may_have_other_names(reader):
    """As in Dolly: `context` and `response`."""
    row = {
        "instruction": "识别并解释",
        "context": "细胞理论和日心说。",
        "response": "细胞理论是",
        "text": "a",
    }
    for other in ({}, {"conversations": [said("human", "a"), said("gpt", "b")]}, {"prompt": "a"}):
        found = reader([row | other], columns=["input=context", "output=response"])
        assert found == [(QUESTIONS[1] + [message("assistant", "细胞理论是")], None)]


@pytest.mark.parametrize("name, written", [
    ("qwen2_5", '{"name": "add", "arguments": {"x": 1}}'),
    ("llama3_2", '{"name": "add", "parameters": {"x": 1}}'),
    ("qwen3", '{"name": "add", "arguments": {"x": 1}}'),
    ("deepseekv3", 'add\n```json\n{"x": 1}\n```'),  # its template takes only texts
])  # fmt: skip
@pytest.mark.parametrize("given", ['{"x": 1}', {"x": 1}])
def test_the_arguments_of_a_call_may_be_a_text(name, written, given):
    """As OpenAI's API has them, and as only they fit into a column of a parquet file."""
    call = {"type": "function", "id": "0", "function": {"name": "add", "arguments": given}}
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tokenizer = templates.tokenizer(name)
    row = sft_row({"messages": messages}, tokenizer, 1000, "assistant")
    assert written in tokenizer.decode(row["input_ids"])


def calls_written(name: str, content, calls) -> str:
    """How a template writes tool calls."""
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    tokenizer = templates.tokenizer(name)
    row = sft_row({"messages": [QUESTION, message]}, tokenizer, 1000, "assistant")
    return tokenizer.decode(row["input_ids"])


@pytest.mark.parametrize("name", ["qwen2_5", "gptoss", "deepseekv3"])
@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize("given", ['{"x": 1}', {"x": 1}])
def test_a_call_may_have_its_name_outside_of_function(name, key, given):
    """Most templates refused it, or wrote a call without arguments."""
    function = {"name": "add", "arguments": {"x": 1}}
    expected = calls_written(name, "", [{"id": "c1", "type": "function", "function": function}])
    call = {"id": "c1", "name": "add", key: given}
    assert calls_written(name, [], [call]) == expected
    assert calls_written(name, "", call) == calls_written(name, "", json.dumps([call])) == expected


ABSENT = object()


@pytest.mark.parametrize("name", ["qwen2_5", "deepseekv3"])
@pytest.mark.parametrize("form", ["nested", "flat", "json"])
@pytest.mark.parametrize(
    "given, meant",
    [
        (json.dumps('{"x": 1}'), {"x": 1}),
        ("", {}),
        (None, {}),
        (ABSENT, {}),
    ],
)
def test_what_else_arguments_may_be(name, form, given, meant):
    """A JSON text inside one was quoted; without `arguments` a nested call ended the run, a flat one not."""
    function = {"name": "add"} | ({} if given is ABSENT else {"arguments": given})
    calls = [{"id": "c1", "type": "function", "function": function}]
    if form != "nested":
        calls = [{"id": "c1", **function}]
    whole = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": meant}}
    expected = calls_written(name, "", [whole])
    assert calls_written(name, "", json.dumps(calls) if form == "json" else calls) == expected


@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize("given", ["x", "[1]", [1], 3])
def test_arguments_that_are_no_object_are_refused(key, given):
    """They were learned as a quoted text, or whatever the template made of them."""
    for call in ({"name": "add", key: given}, {"function": {"name": "add", key: given}}):
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        row = {"messages": [QUESTION, answer]}
        with pytest.raises(BadRow, match="the arguments of a call of 'add'"):
            sft_row(row, templates.tokenizer("qwen2_5"), 1000, "assistant")


def test_the_value_of_sharegpt_is_the_content_whatever_else_the_message_has():
    found = messages.as_messages([{"from": "gpt", "value": "So.", "content": ""}], "user")
    assert found == [{"role": "assistant", "content": "So."}]


@pytest.mark.parametrize("none", ["", "[]", " null", []])
def test_no_calls_may_be_written_as_json(none):
    row = {"messages": [{**QUESTION, "tool_calls": none}, {**YES, "tool_calls": none}]}
    tokenizer = templates.tokenizer("qwen2_5")
    plain = sft_row({"messages": [QUESTION, YES]}, tokenizer, 1000, "assistant")
    assert sft_row(row, tokenizer, 1000, "assistant") == plain


def test_a_pair_that_ends_with_the_users_turn_is_left_out(tokenizer):
    """The turn was learned as the end of the answer."""
    row = {"prompt": [QUESTION], "chosen": [YES, message("user", "And?")], "rejected": [NO]}
    assert preference_row(row, tokenizer, 100)["reason"].startswith("answer that does not end with")


def test_transcripts_that_repeat_the_column_prompt_are_learned_without_it():
    prompt = "\n\nHuman: Why?\n\nAssistant:"
    for stated in (prompt, "", "\n\nHuman: Why?"):
        row = {"prompt": stated, "chosen": prompt + " So.", "rejected": prompt + " No."}
        assert formats.preference(row) == (prompt, " So.", " No.")
    # Nothing says so of other strings: an answer may begin with the question.
    row = {"prompt": "2+2", "chosen": "2+2=4", "rejected": "2+2=5"}
    assert formats.preference(row) == ("2+2", "2+2=4", "2+2=5")


SHAREGPT = [
    said("human", "A film?"),
    said("function_call", '{"name": "search", "arguments": {"title": "Inception", "year": null}}'),
    said("observation", '{"year": 2010}'),
    said("gpt", "It is of 2010."),
]
SHAREGPT_AS_CHAT = [
    message("user", "A film?"),
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("search", title="Inception", year=None)],
    },
    message("tool", '{"year": 2010}'),
    message("assistant", "It is of 2010."),
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_sharegpt(reader, name):
    tools = json.dumps([BARE_TOOL])
    assert reader([{"conversations": SHAREGPT, "tools": tools}], name=name) == [
        (SHAREGPT_AS_CHAT, [TOOL])
    ]
    assert reader([{"conversations": SHAREGPT[:1] + SHAREGPT[3:], "tools": "[]"}], name=name) == [
        ([SHAREGPT_AS_CHAT[0], SHAREGPT_AS_CHAT[3]], None)
    ]
    both = [{"conversations": [said("system", "Be brief."), said("human", "Why?"), said("gpt", "Because.")]},
            {"conversations": [said("human", "Why?"), said("gpt", "Because.")], "system": "Be brief."}]  # fmt: skip
    for row in both:
        assert reader([row], name=name) == [([SYSTEM, QUESTION, YES], None)]
        assert reader([{**row, "conversations": row["conversations"][:-1], "chosen": said("gpt", "Because."), "rejected": said("gpt", "No.")}],
                      preference_row, name, ids="prompt_ids") == [([SYSTEM, QUESTION], None)]  # fmt: skip
    named = [{"dialog": SHAREGPT[:1] + SHAREGPT[3:], "functions": tools}]
    assert reader(named, name=name, columns=["messages=dialog", "tools=functions"]) == [
        ([SHAREGPT_AS_CHAT[0], SHAREGPT_AS_CHAT[3]], [TOOL])
    ]


def test_several_calls_of_one_turn(reader):
    calls = [{"name": "a", "arguments": {"x": 1}}, {"name": "b"}]
    turn = said("function_call", json.dumps(calls))
    assert reader([{"conversations": [SHAREGPT[0], turn]}])[0][0][1]["tool_calls"] == [
        call("a", x=1),
        call("b"),
    ]


def parts(role: str, *given: tuple[str, str], key="value", **more) -> dict:
    return {"role": role, "content": [{"type": kind, key: value} for kind, value in given], **more}


def test_content_as_parts(reader):
    text = '{"name": "search", "arguments": {"title": "Inception"}}'
    rows = [
        {"messages": [parts("user", ("text", "Why?"), loss_weight=0.0), parts("assistant", ("text", "Be"), ("text", "cause."), loss_weight=1.0)]},
        {"messages": [parts("user", ("text", "Why?"), key="text"), parts("assistant", ("text", "Because."), key="text")]},
        {"messages": [parts("user", ("text", "Why?")), parts("assistant", ("reasoning", "Hm."), ("tool_call", text), ("tool_call", text)),
                      parts("tool", ("text", "2010")), parts("assistant", ("reasoning", "So."), ("text", "Because."))], "tools": json.dumps([TOOL])},
    ]  # fmt: skip
    searched = call("search", title="Inception")
    expected = [
        ([{**QUESTION, "loss_weight": 0.0}, {**YES, "loss_weight": 1.0}], None),
        ([QUESTION, YES], None),
        ([QUESTION, {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [searched, searched]},
          message("tool", "2010"), {**YES, "reasoning_content": "So."}], [TOOL]),
    ]  # fmt: skip
    assert reader(rows) == expected
    assert [
        reader([row], name=f"{number}.parquet")[0] for number, row in enumerate(rows)
    ] == expected
    # An empty part says nothing, and a field of this name that a message has already is kept.
    empty = [{"type": "thinking", "thinking": ""}, {"type": "text", "text": "So."}]
    kept = {"role": "assistant", "content": empty, "reasoning_content": "Why"}
    assert formats.conversation({"messages": [QUESTION, kept]})[1][1]["reasoning_content"] == "Why"
    thinking = [QUESTION, {**YES, "reasoning_content": "So."}]
    assert reader([{"messages": thinking}]) == [(thinking, None)]


IMAGE = {"type": "image_url", "image_url": {"url": "a.png"}}


@pytest.mark.parametrize("row, words", [
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}, YES]}, ["message 1", "'image_url'", "expected text"]),
    ({"messages": [QUESTION, YES], "images": ["a.png"]}, ["column 'images'", "only text"]),
    ({"messages": [QUESTION, YES], "label": True}, ["column 'label'", "recipes/kto.py"]),
    ({"messages": [QUESTION, {**YES, "loss_weight": 0.5}]}, ["message 2", "loss_weight 0.5"]),
    ({"messages": [QUESTION, {**YES, "train": "no"}]}, ["message 2", "train 'no'"]),
    ({"conversations": [said("human", "a"), said("moon", "b")]}, ["message 2", "'moon'", "function_call"]),
    ({"conversations": [said("human", "a"), said("function_call", "look up b")]}, ["message 2", "JSON", "look up b"]),
    ({"instruction": "a", "output": 5}, ["column 'output'", "a string", "found 5"]),
])  # fmt: skip
def test_what_no_text_holds_is_refused_with_its_row(tokenizer, accelerator, tmp_path, row, words):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [QUESTION, YES]}, row])
    refuses("rows.jsonl", "row 2", *words, call=lambda: load(accelerator, tokenizer, path))


def test_labels_of_other_data_are_no_format(tokenizer, accelerator, tmp_path):
    """A class beside a text, and a label beside a pair, are columns like any other."""
    classes = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "label": True}])
    assert len(load(accelerator, tokenizer, classes)) == 1
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "label": True}
    pairs = write_jsonl(tmp_path / "b.jsonl", [pair])
    assert len(load(accelerator, tokenizer, pairs, preference_row)) == 1


def test_a_link_to_a_file_whose_name_says_no_format(tokenizer, accelerator, tmp_path):
    """As `hf_hub_download` returns: the hub's cache keeps files under their hashes."""
    blob = write_jsonl(tmp_path / "0a1b2c", [{"messages": [QUESTION, YES]}])
    (tmp_path / "train.jsonl").symlink_to(blob)
    assert len(load(accelerator, tokenizer, tmp_path / "train.jsonl")) == 1


def test_folders_of_save_to_disk(tokenizer, accelerator, tmp_path):
    rows = {
        name: datasets.Dataset.from_list([{"text": name, "n": 1}]) for name in ("train", "test")
    }
    rows["train"].save_to_disk(tmp_path / "one")
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "both")
    for path, split in (("one", "train"), ("both", "train"), ("both", "test")):
        before = sorted((tmp_path / path).rglob("*"))
        data = load(accelerator, tokenizer, tmp_path / path, split=split)
        assert tokenizer.decode(data[0]["input_ids"]) == f"{split}<|end|>"
        assert sorted((tmp_path / path).rglob("*")) == before  # nothing is written beside the data


# ---------------------------------------------------------------------------------------------- roles


def test_a_set_has_the_roles_of_its_rows(accelerator, tokenizer, tmp_path):
    chat = [message("user", "a"), message("assistant", "b")]
    rows = [{"messages": [message("user", "a")]}, {"messages": chat}, {"text": "c"}]
    data = load(accelerator, tokenizer, write_jsonl(tmp_path / "rows.jsonl", rows))
    assert data["row"][:] == [2, 3] and data["roles"][:] == ["user assistant", ""]


@pytest.mark.parametrize("bare, whole", [("chosen", "rejected"), ("rejected", "chosen")])
def test_one_answer_that_repeats_the_prompt_and_one_that_does_not_are_refused(bare, whole):
    """Else the user's message would be learned, or rejected, as part of an answer."""
    row = {"prompt": [QUESTION], bare: [YES], whole: [QUESTION, NO]}
    with pytest.raises(BadRow, match="do not begin with the same prompt"):
        formats.preference(row)
    answers = {**row, whole: [NO]}
    assert formats.preference(answers)[0] == [QUESTION]
