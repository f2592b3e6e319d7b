"""Every format and file kind becomes the token ids that the chat template writes, once."""

import functools
import json
import os
import types

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, models, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from common.batches import indices_of_update, split
from common.shared_args import SharedArgs
from preference_recipes.data import chat, dataset, files, formats, unread
from preference_recipes.data.formats import preference_row
from preference_recipes.data.messages import BadRow
from preference_recipes.data.rendering import stop_tokens
from preference_recipes.models.load import causal_lm
from recipes import load as load_recipe
from runs import message, refuses, write_jsonl
from runs import write_rows as write
from templates import byte_level_bpe, load_rows

sft_row = load_recipe("sft").sft_row

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = [
    "What is the capital of France? Paris is the capital of France.",
    "yes no maybe Question: Answer: one two three four five",
] * 20

U1, A1, U2, A2 = "What is one?", "one is one", "And two?", "two is two"
PROMPT, CHOSEN, REJECTED = "Question: the capital?\nAnswer:", " Paris is", " yes"


user = functools.partial(message, "user")
assistant = functools.partial(message, "assistant")


def make_tokenizer(
    template=CHATML, bos=None, pad="<pad>", adds=None, backend=None
) -> PreTrainedTokenizerFast:
    """A tokenizer that merges. `adds`: what it writes around every text, such as `<s> $A </s>`."""
    specials = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>"]
    backend = backend or byte_level_bpe(CORPUS, 340, special_tokens=specials)
    if adds:
        ids = [(token, backend.token_to_id(token)) for token in specials]
        backend.post_processor = processors.TemplateProcessing(single=adds, special_tokens=ids)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token="<|im_end|>", pad_token=pad
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


pytestmark = pytest.mark.usefixtures("own_cache")


def plain(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def sft(tokenizer, row: dict, max_length: int = 1000, loss_on: str = "assistant") -> dict:
    return sft_row(row, tokenizer, max_length, loss_on)


def pair(tokenizer, row: dict, max_length: int = 1000) -> dict:
    return preference_row(row, tokenizer, max_length)


# ---------------------------------------------------------------------------------------------- formats


def test_columns_hide_what_goes_before_and_an_answer_is_for_held_out_sets(
    tokenizer, accelerator, tmp_path
):
    rows = [{"body": "some text", "messages": [user("x"), assistant("y")]}] * 2
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    settings = dict(max_length=99, loss_on="assistant")

    def load(named: list[str]):
        columns = formats.column_names(named)
        return load_rows(accelerator, path, sft_row, tokenizer, columns, **settings)

    data = load(["text=body", "answer=gold"])
    assert data["input_ids"][:] == [[*plain(tokenizer, "some text"), tokenizer.eos_token_id]] * 2
    assert "answer" not in data.column_names
    said = "row 1: --columns text=other: found columns ['body', 'messages']"
    refuses(said, call=lambda: load(["text=other"]))


WITHOUT_END = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("template, eos, ends, stops", [
    (CHATML, "<|im_end|>", "<|im_end|>", ["<|im_end|>"]),
    # Gemma, Phi-3, base models of Qwen: EOS is not what ends a turn.
    (CHATML, "<s>", "<|im_end|>", ["<s>", "<|im_end|>"]),
    (WITHOUT_END, "<s>", None, ["<s>"]),
])  # fmt: skip
def test_a_turn_ends_where_its_template_ends_it(template, eos, ends, stops, tmp_path):
    """What is learned as its end is what ends a response, here and where the saved actor generates."""
    tokenizer = make_tokenizer(template)
    tokenizer.eos_token = eos
    ids = lambda *tokens: tokenizer.convert_tokens_to_ids(list(tokens))
    # EOS, where the template writes no end.
    turn = lambda text: plain(tokenizer, text) + ids(ends or eos)
    row = sft(tokenizer, {"messages": [user(U1), assistant(A1), user(U2), assistant(A2)]})
    learned = [token for token, target in zip(row["input_ids"], row["loss_mask"]) if target]
    assert learned == turn(A1) + turn(A2)
    assert (chat.APPENDS_EOS in row["notes"]) == (ends is None)
    within = f"{A2} <|im_start|> {A1}"  # a special token that ends nothing
    answers = {"chosen": [assistant(A1)], "rejected": [assistant(within)]}
    both = pair(tokenizer, {"prompt": [user(U1)], **answers})
    assert (both["chosen_ids"], both["rejected_ids"]) == (turn(A1), turn(within))
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=9, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    # As published, though transformers would not let it be made.
    settings = {"eos_token_id": 9, "temperature": 0.7, "do_sample": False}
    (tmp_path / "model/generation_config.json").write_text(json.dumps(settings))
    model = causal_lm(str(tmp_path / "model"), tokenizer, SharedArgs())
    assert stop_tokens(tokenizer, model) == {9, *ids(*stops)}
    model.save_pretrained(tmp_path / "actor")
    saved = json.loads((tmp_path / "actor/generation_config.json").read_text())
    assert saved["eos_token_id"] == sorted([9, *ids(*stops)])


# ---------------------------------------------------------------------------------------------- files


STRINGS = [("1+1=", "2", "3"), ('x\ny, "z"', "None", "NA"), ("é", "1e3", "true")]
STRINGS += [("empty", "", "4"), ("last", "04", "4")]
# No cell of a column says that it is text.
NUMBERS = [("1", "04", "4"), ("2.50", "1e3", "-0"), ("3", "5", "6")]


@pytest.mark.parametrize("strings", [STRINGS, NUMBERS])
def test_every_file_kind_gives_the_same_rows(tokenizer, accelerator, tmp_path, strings):
    rows = [dict(zip(("prompt", "chosen", "rejected"), row)) for row in strings]

    load = lambda path: load_rows(accelerator, path, preference_row, tokenizer, max_length=99)[:]
    expected = [pair(tokenizer, row) for row in rows if row["chosen"]]
    for name in ("a.jsonl", "a.json", "a.parquet", "a.csv", "a.jsonl.gz", "a.json.gz", "a.csv.gz"):
        data = load(write(tmp_path / name, rows))
        assert data["row"] == [number for number, row in enumerate(rows, 1) if row["chosen"]], name
        for key in expected[0].keys() - set(dataset.ONLY_COUNTED):
            assert data[key] == [row[key] for row in expected], (name, key)
    for kind in ("jsonl", "parquet", "csv", "jsonl.gz"):
        write(tmp_path / kind / f"part-1.{kind}", rows[2:])
        folder = write(tmp_path / kind / f"part-0.{kind}", rows[:2]).rpartition("/")[0]
        assert load(folder) == data, kind


def test_files_of_a_folder_that_are_in_no_split_are_named(tmp_path, capsys):
    for name in ("train", "parts/more", "test"):
        write(tmp_path / "set" / f"{name}.jsonl", [{"prompt": U1, "completion": name}])
    folder = str(tmp_path / "set")
    for _ in range(2):  # it is named once
        assert len(files.find(folder, "train")) == 1
    assert capsys.readouterr().out == (
        f"NOTE: folder {folder!r}: 1 file in none of the splits ['test', 'train'], so not read: "
        "parts/more.jsonl\n"
    )
    (tmp_path / "set" / "parts" / "more.jsonl").unlink()
    (tmp_path / "set" / "zz.jsonl").symlink_to(tmp_path / "set" / "train.jsonl")
    files.find(folder, "test")  # the link is read by the name of its file
    assert capsys.readouterr().out == ""


def test_a_folder_that_is_named_as_a_file(tmp_path):
    """As Spark writes it."""
    (tmp_path / "train.parquet").mkdir()
    write(tmp_path / "train.parquet" / "part-0.parquet", [{"prompt": U1}])
    assert len(files.find(str(tmp_path / "train.parquet"), "train")) == 1


# ---------------------------------------------------------------------------------------------- token ids


def reference_targets(
    tokenizer, messages: list[dict], learned: list[int]
) -> tuple[list[int], list[bool]]:
    """Ids of a ChatML conversation up to its last EOS, and whether each lies in a learned turn."""
    text, spans = "", []
    for i, m in enumerate(messages):
        start = len(text) + len(f"<|im_start|>{m['role']}\n")
        text += f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>"
        spans += [(start, len(text))] if i in learned else []
        text += "\n" if i < len(messages) - 1 else ""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    is_inside = lambda start, end: any(a <= start and end <= b for a, b in spans)
    return encoded.input_ids, [is_inside(*place) for place in encoded.offset_mapping]


CHAT = [message("system", "s"), user(U1), assistant(A1), user(U2), assistant(A2)]


@pytest.mark.parametrize(
    "loss_on, learned", [("assistant", [2, 4]), ("completion", [4]), ("all", [])]
)
@pytest.mark.parametrize("bos, adds", [(None, None), ("<s>", "<s> $A <|im_end|>")])
def test_targets_of_a_conversation(loss_on, learned, bos, adds):
    tokenizer = make_tokenizer(bos=bos, adds=adds)
    row = sft(tokenizer, {"messages": CHAT}, loss_on=loss_on)
    ids, targets = reference_targets(tokenizer, CHAT, learned)
    assert row["input_ids"] == ids
    assert row["loss_mask"] == ([False] + [True] * (len(ids) - 1) if loss_on == "all" else targets)
    whole = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert ids == whole[: len(ids)] and tokenizer.decode(whole[len(ids) :]) == "\n"
    assert ids[-1] == tokenizer.eos_token_id
    assert (row["n_targets"], row["length"]) == (sum(row["loss_mask"]), len(ids))
    settings = dict(return_dict=False, add_generation_prompt=True)
    assert row["prompt_ids"] == tokenizer.apply_chat_template(CHAT[:-1], **settings)


def test_prompt_and_completion_lists_learn_the_completion_only(tokenizer):
    for loss_on in ("assistant", "completion"):
        row = sft(tokenizer, {"prompt": CHAT[:3], "completion": CHAT[3:]}, loss_on=loss_on)
        assert (row["input_ids"], row["loss_mask"]) == reference_targets(tokenizer, CHAT, [4])
    trailing = sft(tokenizer, {"messages": [*CHAT, user("thanks")]})
    assert trailing["input_ids"] == sft(tokenizer, {"messages": CHAT})["input_ids"]


SHOWS_TOOLS = (
    "{% if tools %}{{ '<|im_start|>tools' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
    + CHATML.replace(
        "+ m['content']", "+ m['content'] + (m.tool_calls | tojson if m.tool_calls else '')"
    )
)


def test_tools_are_rendered_without_the_keys_of_other_rows(accelerator, tmp_path):
    """A parquet file gives each call the arguments of all, null."""
    tokenizer = make_tokenizer(SHOWS_TOOLS)
    rows = []
    texts = []
    for name, key, value in (("weather", "city", "Paris"), ("search", "text", "one")):
        kinds = {"type": "object", "properties": {key: {"type": "string"}}}
        tools = [{"type": "function", "function": {"name": name, "parameters": kinds}}]
        function = {"name": name, "arguments": {key: value}}
        call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
        others = [message("tool", "two"), assistant(A1)]
        rows.append({"messages": [user(U1), {**call, "content": None}, *others], "tools": tools})
        chat = [user(U1), {**call, "content": ""}, *others]
        texts.append(tokenizer.apply_chat_template(chat, tools, tokenize=False))
    path = tmp_path / "calls.parquet"
    datasets.Dataset.from_list(rows).to_parquet(path)
    data = load_rows(accelerator, path, sft_row, tokenizer, max_length=1000, loss_on="assistant")
    assert data["input_ids"][:] == [plain(tokenizer, text.removesuffix("\n")) for text in texts]
    assert all("null" not in text and "tools[" in text for text in texts)


def test_messages_without_a_template_are_refused():
    with pytest.raises(BadRow, match="no chat template"):
        sft(make_tokenizer(None), {"messages": CHAT})


@pytest.mark.parametrize("bos, adds, writes_bos", [
    (None, None, False),
    ("<s>", None, False),
    ("<s>", "<s> $A", True),
    ("<s>", "<s> $A <|im_end|>", True),
    (None, "$A <|im_end|>", False),
    ("<|im_end|>", "$A <|im_end|>", False),  # BOS and EOS are one token, as GPT-2's
])  # fmt: skip
def test_plain_text_gets_bos_and_eos_once(bos, adds, writes_bos):
    tokenizer = make_tokenizer(None, bos=bos, adds=adds, pad=None)
    front, eos = [tokenizer.convert_tokens_to_ids("<s>")] * writes_bos, [tokenizer.eos_token_id]
    prompt, chosen, rejected = (plain(tokenizer, text) for text in (PROMPT, CHOSEN, REJECTED))
    row = sft(tokenizer, {"prompt": PROMPT, "completion": CHOSEN})
    assert row["input_ids"] == front + prompt + chosen + eos
    assert row["loss_mask"] == [False] * len(front + prompt) + [True] * len(chosen + eos)
    assert row["prompt_ids"] == front + prompt
    both = pair(tokenizer, {"prompt": PROMPT, "chosen": CHOSEN, "rejected": REJECTED})
    assert (both["chosen_ids"], both["rejected_ids"]) == (chosen + eos, rejected + eos)
    assert both["prompt_ids"] == front + prompt
    assert both["length"] == 2 * len(front + prompt) + len(chosen + rejected) + 2
    # Text that a template wrote before holds its own.
    for text in ("<s>" * writes_bos + A1, A1 + "<|im_end|>", A1):
        row = sft(tokenizer, {"text": text}, loss_on="all")
        assert row["input_ids"] == front + plain(tokenizer, A1) + eos
        assert row["loss_mask"] == [False] + [True] * (len(row["input_ids"]) - 1)


def test_a_merge_over_the_boundary_loses_no_character():
    tokens = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "d", "bc", "ab"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [("b", "c"), ("a", "b")]))
    tokenizer = make_tokenizer(None, backend=backend)
    tokens_of = tokenizer.convert_ids_to_tokens
    assert tokens_of(plain(tokenizer, "abcd")) == ["a", "bc", "d"]
    row = pair(tokenizer, {"prompt": "ab", "chosen": "cd", "rejected": "dd"})
    assert tokens_of(row["prompt_ids"]) == ["ab"]
    assert tokens_of(row["chosen_ids"]) == ["c", "d", "<|im_end|>"]
    assert tokens_of(row["rejected_ids"]) == ["d", "d", "<|im_end|>"]
    row = sft(tokenizer, {"prompt": "ab", "completion": "cd"})
    assert tokens_of(row["input_ids"]) == ["ab", "c", "d", "<|im_end|>"] and row["n_targets"] == 3


# ---------------------------------------------------------------------------------------------- what is left out


def test_truncation_and_rows_left_out(tokenizer, accelerator, tmp_path, capsys):
    prompt, answer = "a" * 6, "b" * 10  # no merges: a token each
    assert len(plain(tokenizer, prompt + answer)) == 16
    rows = [
        (prompt, "bbbbb", "cc"),  # it just fits, as row 17 does
        (prompt, answer + "x", "cc"),  # cut
        *[("", "bb", "cc"), ([user("")], "bb", "cc")],
        *[(prompt, "", "cc"), (prompt, "bb", ""), ([user("a")], [assistant("")], "b")],
        (prompt, "bb", "bb"),
        *[(prompt, answer + x, answer + "y") for x in "xyz"],  # equal only after truncation
        *[("a" * length, "b", "cc") for length in range(12, 17)],
        (prompt, "gg", "kkkkk"),
    ]
    rows = [dict(zip(("prompt", "chosen", "rejected"), row)) for row in rows]
    path = str(write_jsonl(tmp_path / "a.jsonl", rows))
    data = load_rows(accelerator, path, preference_row, tokenizer, max_length=12)
    assert data["row"][:] == [1, 2, 17]
    assert data["chosen_ids"][1] == plain(tokenizer, "b" * 6) and data["length"][:] == [21, 21, 21]
    assert capsys.readouterr().out == (
        f"reading {path} ...\n"
        f"data {path}: 3 usable rows; left out (chosen equal to rejected): 4 of 17 rows; "
        "left out (empty answer): 3 of 17 rows; left out (empty prompt): 2 of 17 rows; "
        "left out (prompt fills max_length): 5 of 17 rows; truncated: 1 of 17 rows\n"
    )


def test_sft_rows_left_out(tokenizer, accelerator, tmp_path, capsys):
    prompt = "a" * 6
    rows = [
        {"prompt": prompt, "completion": "b" * 5},
        {"prompt": prompt, "completion": "b" * 6},  # EOS does not fit
        {"prompt": prompt, "completion": ""},
        {"prompt": "a" * 12, "completion": "b"},
        {"messages": [user("a"), assistant("")]},
        {"messages": [user("a")]},
        {"messages": []},
        {"messages": [user("a"), message("bot", "b")]},
    ]
    path = str(write_jsonl(tmp_path / "a.jsonl", rows))
    data = load_rows(accelerator, path, sft_row, tokenizer, max_length=12, loss_on="assistant")
    assert data["row"][:] == [1, 2] and data["length"][:] == [12, 12]
    assert data["n_targets"][:] == [6, 6]
    assert [ids[-1] == tokenizer.eos_token_id for ids in data["input_ids"]] == [True, False]
    assert capsys.readouterr().out == (
        f"reading {path} ...\n"
        f"data {path}: 2 usable rows; left out (empty answer): 3 of 8 rows; "
        "left out (no message of role assistant, found bot, user): 1 of 8 rows; "
        "left out (no message of role assistant, found user): 1 of 8 rows; "
        "left out (nothing to learn within max_length): 1 of 8 rows; truncated: 1 of 8 rows\n"
    )


def test_the_json_files_of_a_hub_set_are_read_row_by_row(tmp_path, monkeypatch):
    rows = [{"prompt": "a", "answer": "007"}, {"prompt": "b", "answer": 7}, {"prompt": ["c"]}]
    for name, part in (("train.jsonl", rows), ("test.jsonl.gz", rows[:1])):
        write(tmp_path / "set" / name, part)
    builder = datasets.load_dataset_builder(str(tmp_path / "set"))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: builder)
    read = lambda split: list(files.find("owner/set", split).select(range(9)))
    assert read("train") == [*rows[:2], {"prompt": ["c"], "answer": None}]
    assert read("test") == rows[:1]
    refuses("has no split 'train[:1]'", "train, test", call=lambda: read("train[:1]"))


# ---------------------------------------------------------------------------------------------- the cache

CALLS = []


def counted(row, **settings):
    CALLS.append(row)
    return sft_row(row, **settings)


def test_tokenised_once_and_again_when_anything_changes(accelerator, tmp_path):
    path = tmp_path / "a.jsonl"

    def write_rows(prompt):
        write_jsonl(path, [{"prompt": prompt, "other": "zz", "completion": "bb cc"}] * 3)

    def load(tokenizer=None, columns=None, **changes):
        settings = {"max_length": 50, "loss_on": "assistant", **changes}
        before = len(CALLS)
        tokenizer = tokenizer or make_tokenizer()
        data = load_rows(accelerator, str(path), counted, tokenizer, columns, **settings)
        return len(CALLS) - before, data[0]["input_ids"], sum(data[0]["loss_mask"])

    write_rows("aa")
    first = load()
    # More calls than rows: a few rows are read once more without each of their columns.
    assert first[0] >= 3 and load() == (0, *first[1:])
    with_bos = make_tokenizer(bos="<s>", adds="<s> $A")
    changes = [dict(max_length=3), dict(loss_on="all")]
    changes += [dict(columns={"prompt": "other"}), dict(tokenizer=with_bos)]
    for change in changes:
        calls, *values = load(**change)
        assert calls >= 3 and tuple(values) != first[1:], change
        assert load(**change)[0] == 0 and load() == (0, *first[1:]), change
    assert load(tokenizer=make_tokenizer(WITHOUT_END))[0] >= 3
    os.utime(path, (1, 1))  # the file's time tells, whatever the clock's grain
    write_rows("zz")
    calls, ids, _ = load()
    assert calls >= 3 and ids != first[1]


def test_two_runs_that_tokenise_the_same_at_once_do_not_disturb_each_other(
    accelerator, tmp_path, monkeypatch
):
    """The second one is done before the first one: its file stays where it is. In containers both may be process 1."""
    path = str(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "aa", "completion": "bb"}]))
    settings = {"max_length": 50, "loss_on": "assistant"}
    load = lambda: load_rows(accelerator, path, sft_row, make_tokenizer(), **settings)
    describe = unread.describe
    seconds = []

    def while_another_run_begins(*given):
        monkeypatch.setattr(unread, "describe", describe)
        second = load()
        seconds.append((second[:], os.stat(second.cache_files[0]["filename"]).st_ino))
        return describe(*given)

    monkeypatch.setattr(unread, "describe", while_another_run_begins)
    first = load()
    assert seconds == [(first[:], os.stat(first.cache_files[0]["filename"]).st_ino)]


def test_the_processes_of_a_machine_read_what_its_first_one_wrote(
    accelerator, tmp_path, monkeypatch
):
    """Two machines of two processes, each with a disk of its own."""
    written = []

    def load(accelerator, answer: str) -> list[dict]:
        rows = [{"prompt": "aa", "completion": answer}]
        path = str(write_jsonl(tmp_path / f"{answer}.jsonl", rows))
        settings = {"max_length": 50, "loss_on": "assistant"}
        data = load_rows(accelerator, path, sft_row, make_tokenizer(), **settings)
        return data[:]["input_ids"]

    tokenise = dataset.tokenise
    monkeypatch.setattr(
        dataset, "tokenise", lambda *task: written.append(tokenise(*task)) or written[-1]
    )
    first, second = load(accelerator, "bb"), load(accelerator, "cc")
    assert first != second and len(written) == 2
    gathered = [written[0], None, written[1], None]
    monkeypatch.setattr(dataset, "gather_object", lambda mine: gathered)
    for index, expected in enumerate([first, first, second, second]):
        process = types.SimpleNamespace(
            **dict(process_index=index, is_main_process=index == 0),
            **dict(local_process_index=index % 2, is_local_main_process=index % 2 == 0),
            print=lambda *_, **__: None,
        )
        assert load(process, "dd") == expected
    assert len(written) == 4  # two of them are the first of a machine


def test_several_sets_are_one(accelerator, tokenizer, tmp_path, capsys):
    """Their rows stand one after the other; a set that is named twice is taken twice an epoch."""
    pair = {"prompt": "a", "completion": "b", "answer": "b"}
    one = str(write_jsonl(tmp_path / "one.jsonl", [pair, pair | {"prompt": "c"}]))
    two = str(write_jsonl(tmp_path / "two.jsonl", [{"text": "d"}, {"text": ""}, {"text": "e"}]))
    args = SharedArgs(max_length=99)

    def load(*names):
        args.dataset_name = list(names)
        settings = dict(function=sft_row, loss_on="assistant")
        return dataset.load_data(accelerator, args, tokenizer, **settings)

    data = load(one, one, two)
    texts = [tokenizer.decode(ids) for ids in data.train["input_ids"]]
    first = ["ab<|im_end|>", "cb<|im_end|>"]
    assert texts == [*first, *first, "d<|im_end|>", "e<|im_end|>"]
    assert data.starts == [0, 2, 4]
    said = capsys.readouterr().out.splitlines()
    assert said[0::2] == [f"reading {name} ..." for name in (one, one, two)]
    assert said[1].startswith(f"data {one}: 2 usable rows") and said[3] == said[1]
    assert said[5].startswith(f"data {two}: 2 usable rows; left out (empty answer): 1 of 3")

    assert load(one, one, two).train._fingerprint == data.train._fingerprint
    others = [load(one), load(one, two), load(two, one, one)]
    assert len({data.train._fingerprint, *(other.train._fingerprint for other in others)}) == 4
    assert load(one).train["answer"][:] == ["b", "b"]
    capsys.readouterr()
    args.eval_dataset_name = ["none.jsonl"]
    refuses("'none.jsonl' does not exist", call=lambda: load(one))
    assert capsys.readouterr().out == ""  # before a set is read


def test_a_token_without_an_embedding_is_refused_by_the_row_that_has_it(accelerator, tmp_path):
    """In any set, in what a model reads; what is cut off or left out is read by none."""
    tokenizer = make_tokenizer()
    size = len(tokenizer)
    tokenizer.add_tokens(["<a>", "<b>", "<c>"])

    def write_set(name: str, *rows: tuple[str, str, str]) -> str:
        pairs = [dict(zip(("prompt", "chosen", "rejected"), row)) for row in rows]
        return str(write_jsonl(tmp_path / name, pairs))

    train = write_set("train.jsonl", ("x", "y", "z"), ("<a>", "y", "z"), ("x", "<b>", "<c>" * 9))
    held_out = write_set("held_out.jsonl", ("", "<c>", "z"), ("x", "y" * 9 + "<c>", "<b>"))
    args = SharedArgs(dataset_name=[train], eval_dataset_name=[held_out], max_length=8)
    data = dataset.load_data(accelerator, args, tokenizer, function=preference_row)
    data.refuse_ids_beyond(size + 3, "M")
    for n_rows, *said in [
        (size + 2, f"{train!r}, row 3: rejected_ids has token {size + 2}, '<c>'"),
        (size, f"{train!r}, row 2: prompt_ids has token {size}, '<a>'"),
        (size + 1, f"{train!r}, row 3: chosen_ids has token {size + 1}, '<b>'"),
    ]:
        refused = functools.partial(data.refuse_ids_beyond, n_rows, "M")
        refuses(*said, f"of 'M' has {n_rows} rows", call=refused)
    held_out_alone = data._replace(sets=data.sets[1:])
    refused = functools.partial(held_out_alone.refuse_ids_beyond, size, "M")
    refuses(f"{held_out!r}, row 2: rejected_ids has token {size + 1}, '<b>'", call=refused)


# ---------------------------------------------------------------------- the samples of an update


@pytest.mark.parametrize("n_rows, batch", [(10, 4), (8, 4), (3, 16), (257, 32)])
def test_windows_are_a_permutation_of_each_epoch(n_rows, batch):
    per_epoch = -(-n_rows // batch)
    rest = n_rows % batch
    epochs = []
    for epoch in range(3):
        numbers = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        windows = [indices_of_update(n_rows, batch, seed=5, index=number) for number in numbers]
        sizes = [batch] * (n_rows // batch) + ([rest] if rest else [])
        assert [len(window) for window in windows] == sizes
        epochs.append(np.concatenate(windows).tolist())
        assert sorted(epochs[-1]) == list(range(n_rows))
    if n_rows > 3:
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
        # The cut alone depends on the batch size.
        assert indices_of_update(n_rows, n_rows, 5, 0).tolist() == epochs[0]
        assert indices_of_update(n_rows, n_rows, 6, 0).tolist() not in epochs[:2]


@pytest.mark.parametrize("n_rows", [1, 5, 24])
@pytest.mark.parametrize("micro, processes", [(1, 1), (2, 3), (3, 4)])
@pytest.mark.parametrize("tokens", [0, 8, 20])
def test_a_window_is_dealt_out_exactly_once(n_rows, micro, processes, tokens):
    lengths = np.random.default_rng(n_rows).integers(1, 10, 100)
    window = indices_of_update(100, n_rows, 0, 1)
    worlds = [
        types.SimpleNamespace(num_processes=processes, process_index=index)
        for index in range(processes)
    ]
    limit = [tokens] if tokens else []  # by default there is none
    shares = [split(world, window, lengths, micro, *limit) for world in worlds]
    assert {len(share) for share in shares} == {len(shares[0])}
    batches = [micro_batch for step in zip(*shares) for micro_batch in step]
    in_order = [pair for rows, weights in batches for pair in zip(rows, weights)]
    real = [row for row, weight in in_order if weight == 1.0]
    assert sorted(real) == sorted(window.tolist())
    assert [weight for _, weight in in_order] == [1.0] * n_rows + [0.0] * (len(in_order) - n_rows)
    # Longest first, and the processes of a step next to each other.
    sizes = [lengths[row] for row, _ in in_order]
    assert sizes == sorted(sizes, reverse=True)
    if not tokens:
        assert len(shares[0]) == -(-n_rows // (micro * processes))
        assert max(len(rows) for rows, _ in batches) <= micro
        return
    held = [(len(rows) * lengths[rows].max(), len(rows)) for rows, _ in batches]  # with padding
    assert all(size <= tokens or count == 1 for size, count in held)
    # No fewer steps would do: one process less than all of one step less cannot hold the rows, cut
    # in any order of length.
    ordered, least = sorted(lengths[window], reverse=True), 0
    while ordered:
        least, ordered = least + 1, ordered[max(tokens // ordered[0], 1) :]
    assert len(shares[0]) == -(-least // processes)
