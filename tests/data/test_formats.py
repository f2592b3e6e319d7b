"""Data as people have it, and as other tools write it."""

import gzip
import json

import datasets
import pytest

import templates
from preference_recipes.data import files, formats, messages
from preference_recipes.data.formats import preference_row
from preference_recipes.data.messages import BadRow
from preference_recipes.data.prompts import prompt_row
from recipes import load as load_recipe
from runs import forked, message, refuses, write_jsonl
from runs import write_rows as write
from templates import left_out, load_rows

sft_row = load_recipe("sft").sft_row
distill_row = load_recipe("gkd", forked("gkd")).row_with_completion


def completed_row(row, tokenizer, max_length, max_new_tokens, **settings):
    """A row of a distillation that learns from completions, too."""
    row = {**row, "label": None}
    return distill_row(row, tokenizer, max_length, max_new_tokens, [], None, True, **settings)


SETTINGS = {
    sft_row: {"loss_on": "assistant"},
    preference_row: {},
    formats.labelled_row: {},
    prompt_row: {"max_new_tokens": 8},
    completed_row: {"max_new_tokens": 8},
}


pytestmark = pytest.mark.usefixtures("own_cache")


def load(accelerator, tokenizer, path, function=sft_row):
    """The usable rows of a file."""
    settings = SETTINGS[function]
    return load_rows(accelerator, path, function, tokenizer, max_length=4000, **settings)


def conversation(row: dict, as_messages=False, reader=formats.read_chat) -> tuple:
    """The prompt and the answers of a row, strings as strings."""
    prompt, answers, _, is_text = reader(row, as_messages)
    parts = [prompt, *answers]
    return tuple(map(messages.text_of, parts)) if is_text else tuple(parts)


def preference(row: dict, as_messages=False) -> tuple:
    return conversation(row, as_messages, formats.read_pair)


def rows_of(path, split="train") -> list[dict]:
    """The rows of a data set as a row function gets them."""
    rows = files.find(str(path), split)
    return list(rows.select(range(len(rows))))


@pytest.mark.parametrize("name", ["run[1].jsonl", "a*.jsonl", "run[1].csv", "run[1].parquet"])
def test_a_name_is_a_name_and_no_pattern(tmp_path, name):
    """Beside each file stands one that its name would match."""
    write(tmp_path / name, [{"text": "mine"}])
    write(tmp_path / name.replace("[1]", "1").replace("*", "b"), [{"text": "other"}])
    assert rows_of(tmp_path / name) == [{"text": "mine"}]


def test_the_name_of_a_folder_is_no_pattern_either(tmp_path):
    for folder in ("set[1]", "set1"):
        for part in ("train", "test"):
            write(tmp_path / folder / f"{part}-[0].csv", [{"text": f"{folder} {part}"}])
    assert rows_of(tmp_path / "set[1]") == [{"text": "set[1] train"}]
    assert rows_of(tmp_path / "set[1]", "test") == [{"text": "set[1] test"}]


def test_a_link_to_a_file_whose_name_says_no_format(tokenizer, accelerator, tmp_path):
    """As `hf_hub_download` returns: the hub's cache keeps files under their hashes."""
    (tmp_path / "train.jsonl").symlink_to(write_jsonl(tmp_path / "0a1b2c", [{"text": "a"}]))
    assert rows_of(tmp_path / "train.jsonl") == [{"text": "a"}]


MIXED = [
    {"prompt": "a", "answer": "046", "when": "2024-01-31", "n": 1},
    {"prompt": "b", "answer": 46, "when": "2024-02-01T10:00:00", "n": 1.5},
    {"prompt": "c], [{é\u2028", "answer": True, "when": None, "n": [1, "x"], "late": {"deep": "1"}},
    {"prompt": "d", "answer": None, "late": {"deep": 1, "other": 12345678901234567890}},
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "folder"])
def test_each_row_keeps_the_types_of_its_json(tmp_path, name):
    """Lines end at a line feed alone, not at what Unicode takes for an end of line."""
    path = tmp_path / name
    text = "".join(json.dumps(row, ensure_ascii=False) + "\r\n\n" for row in MIXED)
    if name == "folder":
        path.mkdir()
        write_jsonl(path / "0.jsonl", MIXED[:2])
        write_jsonl(path / "1.jsonl", MIXED[2:])
    elif name.endswith("gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        text = json.dumps(MIXED, indent=1) if name.endswith("json") else text
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    names = ["prompt", "answer", "when", "n", "late"]
    expected = [{column: row.get(column) for column in names} for row in MIXED]
    assert json.dumps(rows_of(path)) == json.dumps(expected)  # 1 is not True, and not 1.0
    rows = files.find(str(path), "train")
    assert list(rows.select(range(1, 3))) == expected[1:3]


def test_answers_keep_their_types_in_the_columns_of_prompts(tmp_path, accelerator, tokenizer):
    answers = ["2024-01-31", "046", 46, None]
    rows = [{"prompt": "when?", "answer": answer} for answer in answers]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    prompts = load(accelerator, tokenizer, path, prompt_row)
    assert [json.loads(columns)["answer"] for columns in prompts["row_json"]] == answers
    assert prompts["answer"][:] == ["2024-01-31", "046", "46", ""]


@pytest.mark.parametrize("name, text, parts", [
    ("a.jsonl", '{"text": "a"}\n{"text": \n', ["row 2", "Expecting value"]),
    ("a.jsonl", '{"text": "a"}\n["text"]\n', ["row 2", "a JSON object", '["text"]']),
    ("a.jsonl", '{"text": "a"}\n{"text": 5}\n', ["row 2", "column 'text'", "a string, found 5"]),
    # Half a character.
    ("a.jsonl", '{"text": "a"}\n{"text": "\\ud83d"}\n', ["row 2", "TypeError"]),
    ("a.json", '[{"text": "a"},\n {"text": "b"}', ["',' delimiter", "line 2 column 15"]),
    ("a.json", '[{"text": "a"},\n 2]', ["row 2", "a JSON object", "found 2"]),
])  # fmt: skip
def test_an_error_names_the_row_at_fault(tmp_path, accelerator, tokenizer, name, text, parts):
    (tmp_path / name).write_text(text)
    refuses(name, *parts, call=lambda: load(accelerator, tokenizer, tmp_path / name))


# ---------------------------------------------------------------------------------------------- formats


def said(sender: str, value: str) -> dict:
    return {"from": sender, "value": value}


SYSTEM, QUESTION = message("system", "Be brief."), message("user", "Why?")
YES, NO = message("assistant", "Because."), message("assistant", "No.")
BEFORE = FIRST, REPLY = message("user", "One?"), message("assistant", "One.")
MORE = message("user", "And?")
HH = "\n\nHuman: Why?\n\nAssistant:"


@pytest.mark.parametrize("row, expected", [
    ({"messages": [QUESTION, YES]}, ([], [QUESTION, YES])),
    ({"text": "abc"}, ("", "abc")),
    ({"prompt": "Why?", "completion": "Because."}, ("Why?", "Because.")),
    ({"prompt": "Why?", "completion": [YES]}, ([QUESTION], [YES])),
    ({"prompt": [QUESTION], "completion": "Because."}, ([QUESTION], [YES])),
    ({"prompt": QUESTION, "completion": YES}, ([QUESTION], [YES])),
    # A key that only other rows have comes as null: templates ask whether it is there.
    ({"messages": [{**QUESTION, "tool_calls": None}, YES]}, ([], [QUESTION, YES])),
    # An empty prompt asks nothing: it was learned as an empty turn of the user.
    ({"prompt": "", "completion": [YES]}, ([], [YES])),
    ({"prompt": [], "completion": [YES]}, ([], [YES])),
])  # fmt: skip
def test_conversations(row, expected):
    assert conversation(row) == expected


ROWS_OF_MESSAGES = [
    (sft_row, {"messages": [SYSTEM, QUESTION, YES]}),
    (sft_row, {"messages": [QUESTION, message("critic", "Hm."), YES]}),
    (sft_row, {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]}),
    (sft_row, {"prompt": [QUESTION], "completion": [YES]}),
    (preference_row, {"prompt": [SYSTEM, QUESTION], "chosen": [YES], "rejected": [NO]}),
    (preference_row, {"chosen": [QUESTION, YES], "rejected": [QUESTION, NO]}),
    (preference_row, {"prompt": "Why?", "chosen": YES, "rejected": NO}),
    (formats.labelled_row, {"prompt": QUESTION, "completion": [YES], "label": True}),
    (formats.labelled_row, {"messages": [QUESTION, YES], "label": False}),
    (prompt_row, {"prompt": [SYSTEM, QUESTION]}),
    (completed_row, {"prompt": [QUESTION], "completion": [YES]}),
]  # fmt: skip


@pytest.mark.parametrize("as_messages", [False, True])
@pytest.mark.parametrize("function, row", ROWS_OF_MESSAGES)
def test_messages_may_be_written_as_json(function, row, as_messages):
    """As parquet writers do; what they hold was trained on as a text. Python's `str` is no JSON."""
    tokenizer = templates.tokenizer("qwen2_5")
    settings = SETTINGS[function] | {"strings_as_messages": as_messages}
    expected = function(formats.normalize_columns(row, {}), tokenizer, 1000, **settings)
    held = {key for key, value in row.items() if isinstance(value, (list, dict))}
    for spelled in (json.dumps, lambda value: json.dumps(json.dumps(value, indent=1))):
        given = {key: spelled(row[key]) if key in held else row[key] for key in row}
        assert (
            function(formats.normalize_columns(given, {}), tokenizer, 1000, **settings) == expected
        )
    for column in held:
        python = str(row[column])
        numpy = python.replace("}, {", "}\n {")
        for printed in (python, numpy, f"array({python}, dtype=object)"):
            with pytest.raises(BadRow, match=f"column '{column}' holds messages as Python prints"):
                formats.normalize_columns(row | {column: printed}, {})


@pytest.mark.parametrize("text", [
    *['[{"role": "CEO", "content": "Ann"}]', '{"from": "USD", "value": "EUR"}', "[]", "{}"],
    *['["user"]', '{"role": "user"}', "[{'name': 'Ann'}]", '"So."', "[1] So.", '[{"role": '],
])  # fmt: skip
def test_an_answer_that_is_json_of_another_kind_stays_text(text):
    row = {"prompt": "Who?", "completion": text}
    assert conversation(formats.normalize_columns(row, {})) == ("Who?", text)
    row = {"prompt": text, "chosen": text, "rejected": "No."}
    assert preference(formats.normalize_columns(row, {})) == (text, text, "No.")


BEGUN = [SYSTEM, *BEFORE, QUESTION]


# One row a case: prompt, chosen and rejected, as they are given, then as they are read.
@pytest.mark.parametrize("row, expected", [
    (("Why?", "Because.", "No."), ("Why?", "Because.", "No.")),
    (([QUESTION], "Because.", "No."), ([QUESTION], [YES], [NO])),
    (("Why?", [YES], [NO]), ([QUESTION], [YES], [NO])),
    ((None, [QUESTION, YES], [QUESTION, NO]), ([QUESTION], [YES], [NO])),
    # UltraFeedback repeats its string prompt inside both lists; some sets put messages before it.
    (("  Why?", [QUESTION, YES], [QUESTION, NO]), ([QUESTION], [YES], [NO])),
    (("Why?", [*BEGUN, YES], [*BEGUN, NO]), (BEGUN, [YES], [NO])),
    # Equal answers: the prompt is not the whole conversation, so the pair is left out, not refused.
    ((None, [*BEFORE, QUESTION, YES], [*BEFORE, QUESTION, YES]), ([*BEFORE, QUESTION], [YES], [YES])),
    # They part at a user's message: the answer begins with the assistant's turn before it.
    ((None, [FIRST, REPLY, QUESTION, YES], [FIRST, REPLY, MORE, NO]),
     ([FIRST], [REPLY, QUESTION, YES], [REPLY, MORE, NO])),
    ((None, HH + " Because.", HH + " Be silent."), (HH, " Because.", " Be silent.")),  # they begin alike
    ((HH, HH + " So.", HH + " No."), (HH, " So.", " No.")),
    (("", HH + " So.", HH + " No."), (HH, " So.", " No.")),
    ((None, HH + " So." + HH + " Noon.", HH + " So." + HH + " One."), (HH + " So." + HH, " Noon.", " One.")),
    # Nothing says so of other strings: an answer may begin with the question.
    (("2+2", "2+2=4", "2+2=5"), ("2+2", "2+2=4", "2+2=5")),
])  # fmt: skip
def test_preferences(row, expected):
    assert preference(dict(zip(("prompt", "chosen", "rejected"), row))) == expected


LONG = message("system", "Be long.")
LACK_THE_PROMPT = "do not begin with all of the prompt in"
OTHER_PROMPTS = "do not begin with the same prompt"


@pytest.mark.parametrize("prompt, chosen, rejected, why", [
    ([LONG, QUESTION], [SYSTEM, QUESTION, YES], [SYSTEM, QUESTION, NO], LACK_THE_PROMPT),
    ([SYSTEM, QUESTION], [QUESTION, YES], [QUESTION, NO], LACK_THE_PROMPT),
    (None, [QUESTION, YES], [SYSTEM, NO], OTHER_PROMPTS),
    # Else the user's message would be learned, or rejected, as part of an answer.
    ([QUESTION], [YES], [QUESTION, NO], OTHER_PROMPTS),
    ([QUESTION], [QUESTION, YES], [NO], OTHER_PROMPTS),
    (None, "Because.", "No.", "no column 'prompt'"),
])  # fmt: skip
def test_pairs_that_contradict_themselves_are_refused(prompt, chosen, rejected, why):
    with pytest.raises(BadRow, match=why):
        preference({"prompt": prompt, "chosen": chosen, "rejected": rejected})


INSIDE = {"chosen": [QUESTION, YES], "rejected": [QUESTION, NO]}  # with the prompt
TRANSCRIPTS = {"chosen": HH + " Because.", "rejected": HH + " No."}


@pytest.mark.parametrize("row, as_messages", [
    ({"prompt": "Why?", "chosen": "Because.", "rejected": "No."}, True),
    (TRANSCRIPTS, True),
    ({"prompt": HH, **TRANSCRIPTS}, True),
    ({"prompt": "Why?", "chosen": [YES], "rejected": [NO]}, False),
    (INSIDE, False),
    ({"prompt": [QUESTION], "chosen": [YES], "rejected": [NO]}, False),
    ({"prompt": QUESTION, "chosen": YES, "rejected": NO}, True),
    ({"prompt": [], **INSIDE}, False),
    ({"prompt": "Why?", **INSIDE}, False),
    ({"conversations": [said("human", "Why?")], "chosen": YES, "rejected": NO}, False),
    ({"messages": [QUESTION, YES], **INSIDE}, False),
])  # fmt: skip
def test_a_column_system_begins_the_chat(row, as_messages):
    """Beside strings, too, where they are turns; with an empty one the row is as without."""

    def chat(**system):
        given = formats.normalize_columns(row | system, {})
        return preference(given, as_messages)

    assert chat(system=SYSTEM["content"]) == ([SYSTEM, QUESTION], [YES], [NO])
    assert chat(system="") == chat() == ([QUESTION], [YES], [NO])


def test_a_column_system_beside_other_columns():
    begun = {"messages": [SYSTEM, QUESTION, YES], "system": "Be long."}
    assert conversation(begun) == ([], [SYSTEM, QUESTION, YES])
    found = conversation({"prompt": "", "completion": [YES], "system": "Be brief."})
    assert found == ([SYSTEM], [YES])
    assert conversation({"text": "Because.", "system": "Be brief."}, True) == ("", "Because.")
    strings = {"prompt": "Why?", "completion": "Because.", "system": "Be brief."}
    assert conversation(strings, True) == ([SYSTEM, QUESTION], [YES])
    for row, as_messages in [(strings, False), (strings | {"prompt": ""}, True)]:
        with pytest.raises(BadRow, match=r"column 'system' is next to strings"):
            conversation(row, as_messages)


@pytest.mark.parametrize(
    "function", [preference_row, formats.labelled_row, prompt_row, completed_row]
)
@pytest.mark.parametrize("prompt, answers", [("", "ab"), ("", [[YES], [NO]]), ([], [[YES], [NO]])])
def test_a_row_that_asks_nothing_is_left_out_whatever_its_system_message(
    tokenizer, function, prompt, answers
):
    row = {"prompt": prompt, "system": "Be brief.", "completion": answers[0], "label": True}
    if function is preference_row:
        row |= {"chosen": answers[0], "rejected": answers[1]}
    settings = {**SETTINGS[function], "strings_as_messages": True}
    assert left_out(function, row, tokenizer, 100, **settings) == "empty prompt"


def test_columns_name_the_users_own():
    columns = formats.column_names(["prompt=question", "completion=answer"])
    assert columns == {"prompt": "question", "completion": "answer"}
    row = {"question": "2+2?", "answer": "4", "messages": [QUESTION], "text": "a"}
    found = conversation(formats.normalize_columns(row, columns))
    assert found == ("2+2?", "4")
    found = formats.normalize_columns(row, formats.column_names(["text=text"]))
    assert conversation(found) == ("", "a")
    for pairs in (["prompt"], ["other=a"], ["text=a", "text=b"]):
        call = lambda pairs=pairs: formats.column_names(pairs)
        refuses("each once, such as prompt=question", call=call)


# ---------------------------------------------------------------------- the formats of other tools


def call(name: str, **arguments) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def read(row: dict, tmp_path, name="rows.parquet", mixed=None) -> dict:
    """A row as a file gives it, with the columns of our own formats."""
    path = tmp_path / name
    if name.endswith("jsonl"):
        write_jsonl(path, [row])
    else:
        rows = datasets.Dataset.from_list([row], on_mixed_types=mixed)
        rows.to_csv(path) if name.endswith("csv") else rows.to_parquet(path)
    return formats.normalize_columns(rows_of(path)[0], {})


ALPACA = {"instruction": "识别并解释", "input": "细胞理论和日心说。", "output": "细胞理论是"}
ASKED = message("user", "识别并解释\n细胞理论和日心说。")
ANSWERED = message("assistant", "细胞理论是")
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


REPEATED = "Below is an instruction ... ### Response:\n细胞理论是"


@pytest.mark.parametrize("row, expected", [
    (ALPACA, ([ASKED], [ANSWERED])),
    ({**ALPACA, "input": None, "instruction": ASKED["content"]}, ([ASKED], [ANSWERED])),
    ({**ALPACA, "input": "", "instruction": ""}, ([], [ANSWERED])),  # nothing is asked
    # As in the original file: everything once more, as a text.
    ({**ALPACA, "text": REPEATED}, ([ASKED], [ANSWERED])),
    ({"conversations": [said("human", "Why?"), said("gpt", "Because.")], "text": "a"}, ([], [QUESTION, YES])),
    ({"prompt": "Why?", "completion": "Because.", "text": "a"}, ("Why?", "Because.")),
])  # fmt: skip
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_alpaca_and_sharegpt(row, expected, name, tmp_path):
    standard = read(row, tmp_path, name)
    assert conversation(standard) == expected
    # What is no column of ours stays as it is.
    assert all(standard[key] == row[key] for key in row.keys() - {"messages", "prompt"})


def test_calls_and_tools_of_sharegpt(tmp_path):
    calls = [{"name": "search", "arguments": {"title": "Inception", "year": None}}, {"name": "b"}]
    row = {
        "conversations": [
            said("human", "A film?"),
            said("function_call", json.dumps(calls)),
            said("observation", '{"year": 2010}'),
            said("gpt", "It is of 2010."),
        ],
        "tools": json.dumps([TOOL["function"]]),
    }
    found = read(row, tmp_path)
    assert found["tools"] == [TOOL]
    called = [call("search", title="Inception", year=None), call("b")]
    assert conversation(found)[1] == [
        message("user", "A film?"),
        message("assistant", "", tool_calls=called),
        message("tool", '{"year": 2010}'),
        message("assistant", "It is of 2010."),
    ]
    flat = {"type": "function", **TOOL["function"]}  # as in OpenAI's Responses API
    assert formats.standard_tools([flat]) == [TOOL]
    for none in ("[]", "null", " "):
        assert formats.standard_tools(none) is None
    with pytest.raises(BadRow, match="column 'tools': expected a list of JSON schemas"):
        formats.standard_tools("[{")


NULLS = {"year": None, "of": [{"title": None}]}


@pytest.mark.parametrize("name, spelled, mixed, kept", [
    ("rows.jsonl", list, None, True),
    ("rows.parquet", list, None, False),  # there a key that other rows have is null
    ("rows.parquet", json.dumps, None, True),
    ("rows.parquet", list, "use_json", True),  # a type of `datasets`, which holds what JSON holds
    ("rows.csv", json.dumps, None, True),
])  # fmt: skip
def test_nulls_are_the_users_own_unless_a_type_puts_them(name, spelled, mixed, kept, tmp_path):
    calls = [call("search", title="Inception", **NULLS)]
    tools = [{"type": "function", "function": {"name": "search", "parameters": NULLS}}]
    if mixed:  # values that have no type in common
        calls.append(call("search", title=1))
        tools.append({"type": "function", "function": {"name": "b", "parameters": {"of": 1}}})
    chat = [QUESTION, message("assistant", "", tool_calls=calls)]
    row = {"messages": spelled(chat), "tools": spelled(tools)}
    found = read(row, tmp_path, name, mixed)
    expected = NULLS if kept else {"of": [{}]}
    assert found["tools"][0]["function"]["parameters"] == expected
    _, (_, answer) = conversation(found)
    called = answer["tool_calls"][0]["function"]["arguments"]
    assert called == {"title": "Inception", **expected}


def test_columns_of_alpaca_may_have_other_names():
    """As in Dolly: `context` and `response`."""
    named = {"instruction": "instruction", "input": "context", "output": "response"}
    row = {named[key]: value for key, value in ALPACA.items()} | {"text": "a"}
    columns = formats.column_names(["input=context", "output=response"])
    for other in ({}, {"conversations": [said("human", "a"), said("gpt", "b")]}, {"prompt": "a"}):
        found = formats.normalize_columns(row | other, columns)
        assert conversation(found) == ([ASKED], [ANSWERED])


def parts(*given: tuple[str, str], key: str | None = "value", **more) -> dict:
    """An answer of parts; `key` None: a part's text is under the name of its kind."""
    content = [{"type": kind, key or kind: value} for kind, value in given]
    return {"role": "assistant", "content": content, **more}


CALL_TEXT = '{"name": "search", "arguments": {"title": "Inception"}}'
TWO_CALLS = [("tool_call", CALL_TEXT)] * 2
CALLED = message("assistant", "", tool_calls=[call("search", title="Inception")] * 2)
BECAUSE = ("text", "Because.")


@pytest.mark.parametrize("given, expected", [
    (parts(("text", "Be"), ("text", "cause."), loss_weight=1.0), {**YES, "loss_weight": 1.0}),
    (parts(BECAUSE, key="text"), YES),
    (parts(("reasoning", "Hm."), *TWO_CALLS), {**CALLED, "reasoning_content": "Hm."}),
    (parts(("thinking", "So."), BECAUSE, key=None), {**YES, "reasoning_content": "So."}),
    # An empty part says nothing, and a field of this name that a message has already is kept.
    (parts(("thinking", ""), BECAUSE, reasoning_content="Why"), {**YES, "reasoning_content": "Why"}),
])  # fmt: skip
def test_content_as_parts(given, expected, tmp_path):
    found = read({"messages": [QUESTION, given]}, tmp_path, "rows.jsonl")
    assert conversation(found) == ([], [QUESTION, expected])


IMAGE = {"type": "image_url", "image_url": {"url": "a.png"}}
WITH_IMAGE = {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}
CALLS_AS_TEXT = {"role": "assistant", "content": None, "tool_calls": "[]"}
CALLED_IN_WORDS = [said("human", "a"), said("function_call", "look up b")]
ASKED_TWICE = {"prompt": "Why?", "completion": [SYSTEM, QUESTION, YES]}


# One row a case: a row of data, and what is said against it.
@pytest.mark.parametrize("row, words", [
    ({"messages": [WITH_IMAGE, YES]}, ["images: this recipe, or --vllm_url, reads no images"]),
    ({"messages": [QUESTION, {**YES, "content": ["Be", "cause."]}]}, ["message 2", "expected text", "found 'Be'"]),
    ({"instruction": "a", "output": ["b", "c"]}, ["column 'output'", "a string, found ['b', 'c']"]),
    ({"instruction": "a", "output": "b", "input": float("nan")}, ["column 'input'", "a string, found nan"]),
    ({"messages": [QUESTION, YES], "system": 5}, ["column 'system'", "a string, found 5"]),
    ({"prompt": [QUESTION], "completion": "b", "system": float("nan")}, ["column 'system'", "found nan"]),
    ({"messages": [QUESTION, YES], "label": True}, ["'label'", "recipes/kto.py"]),
    ({"messages": [QUESTION, {**YES, "loss_weight": 0.5}]}, ["message 2", "loss_weight 0.5"]),
    ({"messages": [QUESTION, {**YES, "train": "no"}]}, ["message 2", "train 'no'"]),
    ({"messages": [QUESTION, CALLS_AS_TEXT]}, ["column 'messages'", "a list of messages"]),
    ({"conversations": [said("human", "a"), said("moon", "b")]}, ["message 2", "'moon'", "function_call"]),
    ({"conversations": CALLED_IN_WORDS}, ["message 2", "JSON", "look up b"]),
    ({"messages": [QUESTION, YES, {"role": "user"}]}, ["column 'messages'", "found {'role': 'user'} as message 3"]),
    ({"prompt": [QUESTION, {}], "completion": "b"}, ["column 'prompt'", "found {} as message 2"]),
    # These were learned: bad answers, an answer that is asked for twice, one without the call before it.
    ({"prompt": "a", "completion": "b", "label": "1"}, ["'label'", "recipes/kto.py"]),
    ({**ALPACA, "kto_tag": False}, ["'kto_tag'", "recipes/kto.py"]),
    ({"messages": [QUESTION, YES], "kto_tag": 0}, ["'kto_tag'", "recipes/kto.py"]),
    (ASKED_TWICE, ["'completion'", "--columns messages=completion"]),
    ({"messages": [QUESTION, message("tool_call", CALL_TEXT), YES]}, ["message 2", "`tool_calls`"]),
])  # fmt: skip
def test_what_no_text_holds_is_refused_with_its_row(tokenizer, accelerator, tmp_path, row, words):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [QUESTION, YES]}, row])
    refuses("rows.jsonl", "row 2", *words, call=lambda: load(accelerator, tokenizer, path))


def test_columns_of_other_data_are_no_format():
    """A class beside a text, a label beside a pair."""
    assert conversation({"text": "a", "label": True}) == ("", "a")
    assert conversation({"messages": [QUESTION, YES], "label": 0}) == ([], [QUESTION, YES])
    assert conversation({"prompt": "a", "completion": "b", "label": 2}) == ("a", "b")
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "label": True}
    assert preference(pair) == ("a", "b", "c")
    pair = {
        "messages": [QUESTION, {**YES, "weight": 0.5}],
        "prompt": None,
        "chosen": [QUESTION, YES],
        "rejected": [QUESTION, NO],
    }
    assert preference(formats.normalize_columns(pair, {})) == ([QUESTION], [YES], [NO])


def test_a_pair_that_ends_with_the_users_turn_or_without_an_answer_is_left_out(tokenizer):
    row = {"prompt": [QUESTION], "chosen": [YES, message("user", "And?")], "rejected": [NO]}
    assert left_out(preference_row, row, tokenizer, 100).startswith("answer that does not end with")
    row["chosen"].append(message("assistant", ""))
    assert left_out(preference_row, row, tokenizer, 100) == "empty answer"


OLD_CALL = {"name": "clock", "arguments": "{}"}
OLD = message("assistant", "", function_call=OLD_CALL)
NOON = message("function", "12:00", name="clock")
PAIR = {"prompt": [QUESTION], "chosen": [YES], "rejected": [NO]}


@pytest.mark.parametrize("function, row, bad", [
    (sft_row, {"messages": [QUESTION, YES]}, {"messages": [QUESTION, OLD, NOON, YES]}),
    (sft_row, {"messages": [QUESTION, YES]}, {"messages": [QUESTION, OLD]}),
    (preference_row, PAIR, {**PAIR, "prompt": [QUESTION, OLD, NOON]}),
    (preference_row, PAIR, {**PAIR, "rejected": [OLD, NOON, NO]}),
    (formats.labelled_row, PAIR, {"prompt": [QUESTION], "completion": [OLD], "label": 0}),
    (prompt_row, PAIR, {"prompt": [QUESTION, OLD, NOON]}),
    (completed_row, PAIR, {"prompt": [QUESTION], "completion": [OLD, NOON, YES]}),
])  # fmt: skip
def test_a_call_that_is_not_read_leaves_out_its_row(
    tokenizer, accelerator, tmp_path, capsys, function, row, bad
):
    """The first row decides about no column's type."""
    text, called = json.dumps(bad), json.dumps(OLD_CALL)
    others = [text.replace("function_call", name) for name in ("function_calls", "toolCall")]
    others += [text.replace(called, json.dumps(called)), text.replace(called, "null")]
    path = write_jsonl(tmp_path / "rows.jsonl", [bad, row, *map(json.loads, others)])
    rows = load(accelerator, tokenizer, path, function)["row"][:]
    assert 2 in rows and not {1, 3, 4, 5} & {*rows}
    said = "left out (a call in '{}', and none in 'tool_calls'): {} of 6 rows"
    out = capsys.readouterr().out
    assert said.format("function_call", 2) in out and said.format("toolCall", 1) in out


def calls_written(name: str, content, calls) -> str:
    """How a template writes tool calls."""
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    tokenizer = templates.tokenizer(name)
    row = sft_row({"messages": [QUESTION, message]}, tokenizer, 1000, "assistant")
    return tokenizer.decode(row["input_ids"])


@pytest.mark.parametrize("name, written", [
    ("qwen2_5", '{"name": "add", "arguments": %s}'),
    ("llama3_2", '{"name": "add", "parameters": %s}'),
    ("gptoss", "to=functions.add<|channel|>commentary json<|message|>%s"),
    ("deepseekv3", "add\n```json\n%s\n```"),  # its template takes only texts
])  # fmt: skip
@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize("arguments", ['{"x": 1}', '{"x": null, "y": [{"z": null}]}'])
@pytest.mark.parametrize("spelled", [str, json.loads, json.dumps])
def test_a_call_may_be_flat_or_nested_and_its_arguments_a_text(
    name, written, key, arguments, spelled
):
    """As OpenAI's API has them, and as only they fit into a column of a parquet file."""
    function = {"name": "add", key: spelled(arguments)}
    nested = [{"type": "function", "id": "0", "function": function}]
    expected = calls_written(name, None, nested)
    assert written % arguments in expected
    flat = {"id": "0", **function}
    for calls in ([flat], flat, json.dumps([flat]), json.dumps(nested)):
        assert calls_written(name, "", calls) == expected


@pytest.mark.parametrize("given", [{}, {"arguments": ""}, {"arguments": None}])
def test_without_arguments_there_are_none(given):
    function = {"name": "add", **given}
    expected = {"type": "function", "function": {"name": "add", "arguments": {}}}
    for call in ({"type": "function", "function": function}, function):
        assert messages.as_call(call, "message 1") == expected


@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize("given", ["x", "[1]", [1], 3])
def test_arguments_that_are_no_object_are_refused(key, given):
    for call in ({"name": "add", key: given}, {"function": {"name": "add", key: given}}):
        with pytest.raises(BadRow, match="message 1: the arguments of a call of 'add'"):
            messages.as_call(call, "message 1")


@pytest.mark.parametrize("none", ["", "[]", " null", []])
def test_no_calls_may_be_written_as_json(none):
    given = [{**QUESTION, "tool_calls": none}, {**YES, "tool_calls": none}]
    assert messages.as_messages(given, "user") == [QUESTION, YES]


def test_the_value_of_sharegpt_is_the_content_whatever_else_the_message_has():
    found = messages.as_messages([{"from": "gpt", "value": "So.", "content": ""}], "user")
    assert found == [{"role": "assistant", "content": "So."}]
