"""Every bad input is one clear error before any training.

The error names the value, where it is, and what would be valid.
"""

import ast
import concurrent.futures
import dataclasses
import gzip
import io
import json
import re
import runpy
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import datasets
import peft
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.hf_argparser import HfArg

import architectures
from common import hub
from common.arguments import (
    NAMES_ELSEWHERE,
    accumulation_steps,
    load_function,
    parse,
)
from common.launch import quiet
from common.shared_args import SharedArgs
from contracts.proof import plain
from preference_recipes.data import dataset, files, formats
from preference_recipes.data.pairs import preference_row
from preference_recipes.models import checks, load, merge
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.rollouts.rewards import answer_reward
from recipes import RECIPES
from recipes import load as load_recipe
from runs import ASSETS, LAUNCHERS, REPOSITORY, launch, recipe, refuses, tiny_llama, write_jsonl

sft_row = runpy.run_path(str(recipe("sft")))["sft_row"]

DEFAULTS = SharedArgs()
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"))


# ---------------------------------------------------------------------------------------------- sizes and intervals


@pytest.mark.parametrize("train, micro, processes, parts", [
    (200, 6, 2, ["200", "6 x 2 processes = 12", "192 or 204", "--micro_train_batch_size 5"]),
    (5, 8, 1, ["--train_batch_size 8", "--micro_train_batch_size 5"]),
    (3, 1, 2, ["2 or 4"]),
])  # fmt: skip
def test_sizes_that_do_not_divide(train, micro, processes, parts):
    refuses(*parts, call=lambda: accumulation_steps(train, micro, processes))
    assert accumulation_steps(192, 6, 1) == 32 and accumulation_steps(192, 6, 2) == 16
    assert accumulation_steps(200, 6, 3, 1000) == 67


# ---------------------------------------------------------------------------------------------- arguments


@dataclasses.dataclass
class Args:
    model_name_or_path: str | None = HfArg(default=None, help="100% of it")
    dataset_name: str | None = HfArg(default=None, help="data")
    eval_dataset_name: list[str] | None = HfArg(default=None, help="sets")
    beta: float = HfArg(default=0.1, help="strength")
    weights: list[float] | None = HfArg(default=None, help="of sets")
    learning_rate: float = HfArg(default=1e-5, help="rate")
    gradient_checkpointing: bool = HfArg(default=False, help="less memory")
    logging_steps: float = HfArg(default=1, help="lines")
    eval_steps: float = HfArg(default=0, help="evaluations")
    save_steps: float = HfArg(default=0, help="checkpoints")
    save_actor_steps: float = HfArg(default=0, help="actors")
    keep_best: str | None = HfArg(default=None, help="best")
    stop_after: int = HfArg(default=0, help="patience")


def parsed(*argv) -> Args:
    return parse(
        Args,
        demo=ASSETS / "sft.yaml",
        argv=["--model_name_or_path", "m", "--dataset_name", "d", *argv],
    )


def parse_yaml(path, text: str, *argv) -> Args:
    path.write_text(text)
    return parse(Args, demo=ASSETS / "sft.yaml", argv=[str(path), *argv])


def refuses_arguments(capsys, *parts, call) -> None:
    with pytest.raises(SystemExit) as refusal:
        call()
    usage, *error = capsys.readouterr().err.strip().splitlines()
    assert refusal.value.code == 2 and usage.startswith("usage:") and len(error) == 1
    assert all(part in error[0] for part in parts), error


def test_a_function_that_is_not_there():
    assert (
        load_function("reward_function", "preference_recipes.rollouts.rewards:answer_reward")
        is answer_reward
    )
    missing = lambda: load_function("reward_function", "preference_recipes.rollouts.rewards:none")
    refuses(
        "--reward_function preference_recipes.rollouts.rewards:none", "MODULE:NAME", call=missing
    )


def test_flags(capsys):
    assert parsed("--beta", "0.5").beta == 0.5
    refuses_arguments(
        capsys, "--bet 0.5", "abbreviated", "--help", call=lambda: parsed("--bet", "0.5")
    )
    refuses_arguments(capsys, "--foo", call=lambda: parsed("--foo", "1"))
    refuses_arguments(
        capsys,
        "unknown argument --learning-rat 1",
        "did you mean --learning_rate?",
        call=lambda: parsed("--learning-rat", "1"),
    )
    refuses_arguments(
        capsys,
        "instead of --per_device_train_batch_size use --micro_train_batch_size;",
        "instead of --use_peft use --lora_r",
        call=lambda: parsed("--per_device_train_batch_size=4", "--use_peft"),
    )
    refuses_arguments(
        capsys, "--beta", "'strong'", "float", call=lambda: parsed("--beta", "strong")
    )
    refuses_arguments(capsys, "late.yaml", "first", call=lambda: parsed("late.yaml"))
    refuses_arguments(
        capsys,
        "--model_name_or_path",
        "missing",
        call=lambda: parse(Args, ASSETS / "sft.yaml", ["--dataset_name", "d"]),
    )


@pytest.mark.parametrize(
    "value", ["-1e-5", "-1E+3", "-2.5e-6", "-.5e1", "-3.", "-7", "-0.25", "-1_0"]
)
def test_a_negative_number_is_no_flag(capsys, tmp_path, value):
    number = float(value)
    assert parsed("--beta", value).beta == number
    assert parsed("--weights", "1", value, value, "--beta", "2").weights == [1, number, number]
    text = f"model_name_or_path: m\ndataset_name: d\nbeta: {value}\nweights: [1, {value}]\n"
    args = parse_yaml(tmp_path / "defaults.yaml", text)
    assert (args.beta, args.weights) == (number, [1, number])


@pytest.mark.parametrize("value", ["-inf", "-nan", "-Infinity"])
def test_a_negative_number_that_is_not_finite_is_refused_as_such(capsys, value):
    call = lambda: parsed("--beta", value)
    refuses_arguments(capsys, f"--beta {float(value)}: expected a finite number", call=call)


@pytest.mark.parametrize("argument, value, expected", [
    ("learning_rate", "-1", "at least 0"), ("learning_rate", "nan", "a finite number"), ("weight_decay", "-0.1", "at least 0"),
    ("adam_epsilon", "-1e-8", "at least 0"), ("warmup_steps", "-1", "at least 0"), ("save_total_limit", "-1", "at least 0"),
    ("max_grad_norm", "inf", "a finite number"), ("seed", "-1", "at least 0 and below 4294967296"),
    ("seed", str(2**32), "at least 0 and below 4294967296"), ("train_batch_size", "0", "at least 1"),
    ("micro_train_batch_size", "-1", "at least 1"), ("micro_train_tokens", "-7", "at least 0"), ("max_length", "-1", "at least 2"),
    ("save_steps", "2.5", "0, a share below 1, or a whole number of updates"), ("save_steps", "-1", "at least 0"),
    ("eval_steps", "1.5", "0, a share below 1, or a whole number of updates"),
])  # fmt: skip
@pytest.mark.parametrize("name", RECIPES)
def test_numbers_that_mean_nothing(capsys, name, argument, value, expected):
    demo = ASSETS / f"{name}.yaml"
    call = lambda: parse(load_recipe(name).Args, demo, [f"--{argument}={value}"])
    refuses_arguments(capsys, f"--{argument} ", f"expected {expected}", call=call)


def test_names_of_other_libraries_are_no_arguments_here():
    """Else a hint would send away from an argument that there is."""
    known = {field.name for name in RECIPES for field in dataclasses.fields(load_recipe(name).Args)}
    assert not known & NAMES_ELSEWHERE.keys()
    for hint in NAMES_ELSEWHERE.values():
        for flag in re.findall(r"--(\w+)", hint):
            assert flag in known | {"config_file"}, hint


@pytest.mark.parametrize(
    "argv",
    [
        ["--model-name-or-path", "m", "--dataset-name", "d"],
        ["--model_name_or_path=m", "--dataset_name=d"],
    ],
)
def test_no_demo_where_a_model_is_given_in_another_spelling(capsys, argv):
    """The parser takes dashes, too; the demo's other settings must not slip in."""
    assert (
        parse(Args, ASSETS / "sft.yaml", argv) == Args("m", "d")
        and "demo" not in capsys.readouterr().out
    )


def test_help_with_a_percent_sign(capsys):
    with pytest.raises(SystemExit) as done:
        parsed("--help")
    text = capsys.readouterr().out
    assert (
        done.value.code == 0
        and "100% of it" in text
        and all(text.count(f"--{field.name} ") == 1 for field in dataclasses.fields(Args))
        and "--model-name-or-path" not in text
    )


def test_yaml_of_defaults(capsys, tmp_path):
    path = tmp_path / "defaults.yaml"
    text = "model_name_or_path: m\ndataset_name: '{assets}/sft_eval.jsonl'\neval_dataset_name: [x, y]\nbeta: 0.3\nlearning_rate: 1e-4\ngradient_checkpointing: true\n"
    expected = Args("m", f"{ASSETS}/sft_eval.jsonl", ["x", "y"], 0.3, None, 1e-4, True)
    assert parse_yaml(path, text) == expected
    overridden = parse_yaml(
        path, text, "--beta", "0.7", "--gradient_checkpointing", "false", "--eval_dataset_name", "z"
    )
    assert overridden == dataclasses.replace(
        expected, beta=0.7, gradient_checkpointing=False, eval_dataset_name=["z"]
    )
    assert parse_yaml(path, text + "beta: null\n").beta == 0.1
    name = str(path)
    refuses_arguments(
        capsys, name, "'betta'", "--help", call=lambda: parse_yaml(path, text + "betta: 1\n")
    )
    refuses_arguments(capsys, name, "flat mapping", call=lambda: parse_yaml(path, "beta: {a: 1}\n"))
    refuses_arguments(capsys, name, "flat mapping", call=lambda: parse_yaml(path, "- beta\n"))
    refuses_arguments(
        capsys,
        name,
        "cannot be read as YAML",
        "line 1",
        call=lambda: parse_yaml(path, "beta: [1\n"),
    )
    refuses_arguments(
        capsys, "--beta", "'strong'", call=lambda: parse_yaml(path, text.replace("0.3", "strong"))
    )
    path.unlink()
    refuses_arguments(
        capsys, name, "does not exist", call=lambda: parse(Args, ASSETS / "sft.yaml", [name])
    )


@pytest.mark.parametrize(
    "pairs", [["prompt"], ["prompt="], ["promt=question"], ["prompt=a", "prompt=b"]]
)
def test_columns_argument(pairs):
    refuses(
        "--columns " + " ".join(pairs),
        "messages|prompt",
        "such as prompt=question",
        call=lambda: formats.column_names(pairs),
    )


# ---------------------------------------------------------------------------------------------- data files

GOOD = b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n'


@pytest.mark.parametrize("name, content, parts", [
    ("a.jsonl", GOOD + b'{"prompt": \n', ["a.jsonl, row 2", "malformed JSON", "Expecting value"]),
    ("a.jsonl.gz", GOOD * 2 + b'{"prompt" "a"}\n', ["a.jsonl.gz, row 3", "malformed JSON", "delimiter"]),
    ("a.json", b'[{"a": 1},\n {"a": }]', ["a.json", "malformed JSON", "line 2"]),
    ("a.jsonl", GOOD + b'{"prompt": "\\ud83d\\ude00", "b": "\\uDE00"}\n', ["row 2", "'\\ude00' is one half of a character"]),
    ("a.json", b'[{"a": 1}, {"\\ud800": 2}]', ["row 2", "'\\ud800' is one half of a character, without the other"]),
    ("a.jsonl", GOOD + b"[1, 2]\n", ["row 2", "JSON object", "[1, 2]"]),
    ("a.jsonl", b'"text"\n' + GOOD, ["row 1", "JSON object", "text"]),
    ("a.json", b'[{"a": 1}, 2]', ["row 2", "JSON object", "found 2"]),
    ("a.csv", b'prompt,chosen\n"a,b\n', ["a.csv", "row 1", "unexpected end of data"]),
    ("a.csv", b"prompt,chosen\na,b,c\n", ["a.csv", "row 1", "more cells than the header", "quote"]),
    ("a.csv", b"prompt,chosen\na,b\na,b,c\n", ["a.csv", "row 2", "more cells"]),
    ("a.parquet", b"nonsense", ["a.parquet", "could not be read"]),
    ("a.txt", b"text", ["a.txt", ".jsonl .json .parquet .csv", ".gz"]),
    ("a.jsonl", b"", ["a.jsonl", "holds no rows"]), ("a.jsonl", b"\n\n", ["holds no rows"]), ("a.jsonl.gz", b"", ["holds no rows"]),
    ("a.json", b"[]", ["holds no rows"]), ("a.csv", b"", ["holds no rows"]), ("a.csv", b"prompt,chosen\n", ["holds no rows"]),
])  # fmt: skip
def test_files_that_cannot_be_read(tmp_path, capfd, name, content, parts):
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    quiet()
    refuses(path, *parts, call=lambda: files.load(str(path), "train"))
    assert "Failed" not in capfd.readouterr().err


def test_torn_files_and_missing_ones(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(GOOD * 100)[:-20])
    refuses(path, "end-of-stream", call=lambda: files.load(str(path), "train"))
    path.write_bytes(GOOD)
    refuses(path, "Not a gzipped file", call=lambda: files.load(str(path), "train"))
    missing = str(tmp_path / "missing.jsonl")
    refuses(missing, "does not exist", call=lambda: files.load(missing, "train"))
    refuses("someone/set", "could not be read", call=lambda: files.load("someone/set", "train"))
    good = str(write_jsonl(tmp_path / "good.jsonl", [PAIR]))
    refuses(good, "'test'", "['train']", call=lambda: files.load(good, "test"))
    datasets.Dataset.from_dict({"prompt": []}).to_parquet(tmp_path / "none.parquet")
    refuses(
        "none.parquet",
        "holds no rows",
        call=lambda: files.load(str(tmp_path / "none.parquet"), "train"),
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    refuses(folder, "data files", call=lambda: files.load(str(folder), "train"))
    shutil.copy(good, folder / "a.jsonl")
    (folder / "b.csv").write_text("prompt\na\n")
    refuses(folder, "['csv', 'json']", "one kind", call=lambda: files.load(str(folder), "train"))


def test_both_halves_are_a_character_and_an_escaped_half_is_none(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "\\ud83d\\ude00 \\\\ud83d"}\n')
    rows = files.load(str(path), "train")
    assert next(rows.read(0, 1)) == {"a": "\U0001f600 \\ud83d"}


def test_data_that_are_not_there_are_missed_before_any_are_read(tmp_path, monkeypatch):
    """The held-out ones as well, though they are read after the training data are tokenised."""
    monkeypatch.chdir(tmp_path)
    there = str(write_jsonl(tmp_path / "there.jsonl", [PAIR]))

    def read(*names):
        flags = ["--model_name_or_path", "m", "--dataset_name", there, "--eval_dataset_name"]
        dataset.check_names(parse(Args, ASSETS / "sft.yaml", [*flags, *names]))

    read(there, "owner/set", "set", str(tmp_path))
    refuses("data file 'gone.jsonl' does not exist", call=lambda: read(there, "gone.jsonl"))
    for name in (f"{tmp_path}/gone", "./gone", "gone/with/parts"):
        refuses(f"data folder {name!r} does not exist", call=lambda name=name: read(name))


@pytest.fixture
def no_network(monkeypatch):
    """The hub is not cut off by settings, but cannot be reached."""
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    asked = []

    def refuse(address, timeout):
        asked.append((address, timeout))
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "create_connection", refuse)
    hub.reach.cache_clear()
    yield asked
    hub.reach.cache_clear()


def test_a_hub_that_cannot_be_reached_is_given_up_at_once(no_network, capsys):
    """It is asked once, for a model and a data set together."""
    start = time.time()
    refuses(
        "no tokenizer could be loaded from 'someone/model'",
        call=lambda: load.tokenizer_of("someone/model"),
    )
    refuses("someone/set", "could not be read", call=lambda: files.load("someone/set", "train"))
    assert time.time() - start < 10
    assert no_network == [(("huggingface.co", 443), hub.SECONDS)]
    said = capsys.readouterr().out
    assert (
        said
        == "huggingface.co cannot be reached (Name or service not known): only what was downloaded before is used\n"
    )


def test_behind_a_proxy_the_hub_is_not_tried(no_network, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    hub.reach()
    assert no_network == [] and not constants.HF_HUB_OFFLINE


# ---------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("recipe_name, rows, parts", [
    ("dpo", [PAIR, {**PAIR, "rejected": 5}], ["row 2", "column 'rejected'", "string or a list of messages", "found 5"]),
    ("dpo", [{**PAIR, "prompt": 5}], ["row 1", "column 'prompt'", "found 5"]),
    ("dpo", [PAIR, PAIR, {**PAIR, "chosen": [{"role": "assistant"}]}], ["row 3", "column 'chosen'", "role and content"]),
    ("dpo", [PAIR, {**PAIR, "chosen": {"a": 1}}], ["row 2", "column 'chosen'", "{'a': 1}"]),  # pyarrow has no type for the column
    ("dpo", [{"prompt": "a", "chosen": "b"}], ["row 1", "no 'rejected'", "['chosen', 'prompt']", "--columns rejected=YOURS"]),
    ("dpo", [{"chosen": "b", "rejected": "c"}], ["row 1", "no column 'prompt'", "--columns prompt=YOURS", "Assistant:"]),
    ("sft", [{"question": "a", "answer": "b"}], ["row 1", "no 'prompt'", "['answer', 'question']", "--columns prompt=YOURS"]),
    ("sft", [{"messages": [{"role": "user", "content": "a"}]}, {"messages": "a"}], ["row 2", "column 'messages'", "found 'a'"]),
    ("sft", [{"messages": [{"role": "user", "content": 1}]}], ["row 1", "column 'messages'", "found"]),
    ("sft", [{"text": 1}], ["row 1", "column 'text'", "a string", "found 1"]),
    ("sft", [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}], ["row 2", "no 'completion'"]),
    ("dpo", [{**PAIR, "chosen": ""}] * 2, ["no usable row", "2 of 2 left out (empty answer): rows 1, 2"]),
    ("dpo", [{**PAIR, "prompt": "long" * 9}], ["no usable row", "1 of 1 left out (prompt fills --max_length 20, the longest has 38 tokens): row 1"]),
    ("sft", [{"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]}], ["1 of 1 left out (no message of role assistant, found bot, user): row 1"]),
    ("sft", [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}], ["1 of 1 left out (empty answer): row 1"]),
    ("sft", [{"prompt": "long" * 9, "completion": "a"}], ["no usable row", "1 of 1 left out (nothing to learn within --max_length 20, the longest has 38 tokens): row 1"]),
])  # fmt: skip
def test_rows_that_do_not_fit(accelerator, model, tmp_path, recipe_name, rows, parts):
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    function, settings = {"dpo": (preference_row, {}), "sft": (sft_row, {"loss_on": "assistant"})}[
        recipe_name
    ]
    call = lambda: dataset.load(
        accelerator,
        path,
        "train",
        function,
        AutoTokenizer.from_pretrained(model),
        {},
        max_length=20,
        **settings,
    )
    for _ in range(2):  # a refused set leaves nothing in the cache
        refuses(path, *parts, call=call)


def test_other_refusals_of_the_data(accelerator, model, tmp_path, monkeypatch):
    path, tokenizer = (
        str(write_jsonl(tmp_path / "rows.jsonl", [PAIR])),
        AutoTokenizer.from_pretrained(model),
    )

    def load(columns=None, **settings):
        dataset.load(
            accelerator,
            path,
            "train",
            preference_row,
            tokenizer,
            columns or {},
            **{"max_length": 20, **settings},
        )

    refuses(
        path,
        "'winner'",
        "['prompt', 'chosen', 'rejected']",
        call=lambda: load({"chosen": "winner"}),
    )
    path = str(
        write_jsonl(
            tmp_path / "chat.jsonl", [{**PAIR, "prompt": [{"role": "user", "content": "a"}]}]
        )
    )
    tokenizer.chat_template = None
    refuses(path, "row 1", "no chat template", "--chat_template FILE", call=load)
    # What a row holds as a JSON text may hold half of a character, too.
    call = {"from": "function_call", "value": '{"name": "\\ud83d"}'}
    turns = [[{"from": "human", "value": "a"}], [call], [{"from": "gpt", "value": "b"}]]
    row = dict(zip(("conversations", "chosen", "rejected"), turns))
    path = str(write_jsonl(tmp_path / "calls.jsonl", [row]))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ (m.tool_calls or [{'function': {}}])[0].function.name }}{% endfor %}"
    refuses(path, "row 1: a text holds one half of a character", call=load)
    path = str(tmp_path / "latin.jsonl")
    with open(path, "wb") as file:
        file.write('{"prompt": "é", "chosen": "b", "rejected": "c"}'.encode("latin-1"))
    refuses(path, "not UTF-8", call=load)


# ---------------------------------------------------------------------------------------------- models


def copy(model, folder, **config):
    shutil.copytree(model, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **config}))
    return folder


def test_models(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in (str(tmp_path / "missing"), str(tmp_path)):
        refuses(
            name,
            "tokenizer",
            "folder or a hub name",
            call=lambda name=name: load.tokenizer_of(name),
        )
    tokenizer = load.tokenizer_of(str(model))
    unknown = str(copy(model, tmp_path / "unknown", model_type="foo", architectures=["Foo"]))
    refuses(unknown, "`foo`", call=lambda: load.causal_lm(unknown, tokenizer, DEFAULTS))
    bare = copy(model, tmp_path / "bare")
    (bare / "config.json").unlink()
    refuses(bare, "config.json", call=lambda: load.causal_lm(str(bare), tokenizer, DEFAULTS))
    torn = copy(model, tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:1000])
    refuses(torn, "could be loaded", call=lambda: load.causal_lm(str(torn), tokenizer, DEFAULTS))
    state = load_file(model / "model.safetensors")
    save_file(
        {name: value for name, value in state.items() if "lm_head" not in name},
        torn / "model.safetensors",
        {"format": "pt"},
    )
    refuses(
        torn,
        "lm_head.weight",
        "at random",
        call=lambda: load.causal_lm(str(torn), tokenizer, DEFAULTS),
    )
    refuses(
        model,
        '"foo"',
        "eager",
        call=lambda: load.causal_lm(
            str(model), load.tokenizer_of(str(model)), SharedArgs(attn_implementation="foo")
        ),
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "no_eos")
    refuses(
        "no_eos",
        "no EOS",
        "tokenizer.eos_token",
        call=lambda: load.tokenizer_of(str(tmp_path / "no_eos")),
    )
    tokenizer = load.tokenizer_of(str(model))
    llama = load.causal_lm(str(model), tokenizer, DEFAULTS)
    tokenizer.add_tokens([f"<{i}>" for i in range(5)])
    refuses(
        model,
        len(tokenizer),
        "264",
        "resize",
        call=lambda: load.causal_lm(str(model), tokenizer, DEFAULTS),
    )
    assert len(tokenizer) > 264 and llama.dtype == torch.float32


CODE = """
from pathlib import Path

Path({trace!r}).touch()

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


class Config(LlamaConfig):
    model_type = "own"


class Model(LlamaForCausalLM):
    config_class = Config


class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
OF_MODEL = {
    "AutoConfig": "own.Config",
    "AutoModelForCausalLM": "own.Model",
    "AutoModelForSequenceClassification": "own.Model",
}


@pytest.fixture
def own(model, tmp_path, monkeypatch):
    """Folders whose model, whose tokenizer, and whose adapter's base need a file that leaves a trace; `y` in a pipe."""
    trace = tmp_path / "trace"
    folders = {name: tmp_path / f"own {name}" for name in ("model", "tokenizer", "adapter")}
    copy(model, folders["model"], model_type="own", architectures=["Model"], auto_map=OF_MODEL)
    copy(model, folders["tokenizer"], model_type="own")
    auto_map = {"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]}
    file = folders["tokenizer"] / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": "Own", "auto_map": auto_map}
    file.write_text(json.dumps(settings))
    folders["adapter"].mkdir()
    for folder in folders.values():
        (folder / "own.py").write_text(CODE.format(trace=str(trace)))
    adapter = peft.LoraConfig(
        base_model_name_or_path=str(folders["model"]), task_type="CAUSAL_LM", inference_mode=True
    )
    adapter.save_pretrained(folders["adapter"])
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    answers = io.StringIO("y\n" * 20)
    monkeypatch.setattr(sys, "stdin", answers)
    yield {name: str(folder) for name, folder in folders.items()}
    assert not trace.exists() and answers.tell() == 0


NEVER_RUN = ("needs Python code of its own", "never run", "SECURITY.md")


def test_code_that_a_model_brings_along_is_not_run(own, model, tmp_path):
    """Not even if a pipe says `y` where transformers would ask."""
    tokenizer = load.tokenizer_of(str(model))
    refusals = {
        "policy or reference": ("model", lambda: load.causal_lm(own["model"], tokenizer, DEFAULTS)),
        "reward model": ("model", lambda: load.score_model(own["model"], tokenizer, DEFAULTS)),
        "tokenizer": ("tokenizer", lambda: load.tokenizer_of(own["tokenizer"])),
        "base": ("model", lambda: merge.write(own["adapter"], tmp_path / "merged")),
    }
    for name, call in refusals.values():
        refuses(repr(own[name]), *NEVER_RUN, call=call)
    in_plain = [
        lambda: plain.load(Path(own["model"])),
        lambda: plain.load(Path(own["adapter"])),
        lambda: plain.lost_files(Path(own["model"]), tokenizer, Path(own["tokenizer"])),
        lambda: merge.load_base(own["model"], "SEQ_CLS"),
        lambda: merge.tokenizer_of(own["tokenizer"], own["tokenizer"]),
    ]
    for call in in_plain:
        with pytest.raises(ValueError, match="trust_remote_code"):
            call()
    # A reference without a tokenizer that can be read is taken as it is.
    load.refuse_another_vocabulary(own["tokenizer"], tokenizer)


def test_no_load_may_ask_whether_to_run_code():
    """Every call that could says that it may not. What is left out reads JSON, or is given its model."""
    reads_no_code = {"PeftConfig", "config", "GenerationConfig", "PeftModel", "load"}
    places = []
    roots = ("common", "preference_recipes", "recipes")
    for path in [path for root in roots for path in REPOSITORY.glob(f"{root}/**/*.py")]:
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            owner = ast.unparse(call.func.value).rpartition(".")[2]
            loads = call.func.attr in ("from_pretrained", "from_config")
            if loads and owner not in reads_no_code:
                settings = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                assert settings.get("trust_remote_code") == "False", f"{path.name}:{call.lineno}"
                places.append(f"{path.name} {owner}")
    assert {"load.py auto_class", "merge.py AutoTokenizer"} <= set(places)


def test_a_folder_without_a_tokenizer_and_one_that_holds_an_actor(tmp_path):
    run, bare = tmp_path / "run", tmp_path / "bare"
    (run / "actor").mkdir(parents=True)
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    tokenizer_of = lambda folder: load.tokenizer_of(str(folder))
    refuses(f"holds no config.json; take {run / 'actor'}", call=lambda: tokenizer_of(run))
    refuses(f"{str(bare)!r}: it holds none, such as", call=lambda: tokenizer_of(bare))
    (bare / "tokenizer.json").write_text("{")
    refuses("could be loaded", "expected a Hugging Face", call=lambda: tokenizer_of(bare))


def test_a_text_model_may_have_the_tokenizer_of_one_that_knows_images(tmp_path):
    """Gemma 3's 270M and 1B: 262,144 embeddings, and a tokenizer whose token for an image is beyond them."""
    folder = tiny_llama(tmp_path, vocab_size=261)
    image = {"image_token": "<image_soft_token>"}
    AutoTokenizer.from_pretrained(folder, extra_special_tokens=image).save_pretrained(folder)
    tokenizer = load.tokenizer_of(str(folder))
    assert tokenizer.image_token_id == 261 and len(tokenizer) == 262
    assert load.causal_lm(str(folder), tokenizer, DEFAULTS).config.vocab_size == 261
    tokenizer.add_tokens(["more"])
    refuses(
        "263 tokens", "261", "resize", call=lambda: load.causal_lm(str(folder), tokenizer, DEFAULTS)
    )


def test_a_reward_model_is_no_policy(tmp_path):
    """With tied embeddings transformers would load it without complaint."""
    for tied in (True, False):
        folder = tiny_llama(tmp_path / str(tied), tie_word_embeddings=tied)
        tokenizer = load.tokenizer_of(str(folder))
        scorer = load.score_model(str(folder), tokenizer, DEFAULTS, new_head=True)
        scorer.save_pretrained(folder)
        refuses(
            folder,
            "LlamaForSequenceClassification",
            "reward model",
            "causal language model",
            call=lambda: load.causal_lm(str(folder), tokenizer, DEFAULTS),  # noqa: B023
        )
        load.score_model(str(folder), tokenizer, DEFAULTS)


def test_a_reference_with_another_tokenizer(model, tmp_path):
    tokenizer = load.tokenizer_of(str(model))
    copied = tiny_llama(tmp_path / "copied")
    load.causal_lm(str(copied), tokenizer, DEFAULTS)
    # A token that only one of both has is no other tokenizer.
    AutoTokenizer.from_pretrained(copied, pad_token="<new>").save_pretrained(copied)
    load.causal_lm(str(copied), tokenizer, DEFAULTS)
    data = json.loads((copied / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (copied / "tokenizer.json").write_text(json.dumps(data))
    refuses(
        copied,
        model,
        "another tokenizer",
        repr(first),
        repr(second),
        "trained from",
        call=lambda: load.causal_lm(str(copied), tokenizer, DEFAULTS),
    )
    for file in copied.glob("*token*"):
        file.unlink()
    load.causal_lm(str(copied), tokenizer, DEFAULTS)  # weights alone are taken as they are


@pytest.mark.parametrize(
    "name, limit",
    [
        ("gpt2", 64),
        ("opt", 64),
        ("gptj", 64),
        ("gpt_neo", 64),
        ("gpt_bigcode", 64),
        ("biogpt", 64),
        ("mpt", 64),
        ("xglm", None),
        ("llama", None),
        ("gemma3", None),
        ("bloom", None),
        ("mamba", None),
    ],
)
def test_rows_longer_than_the_table_of_positions(name, limit):
    """What can be read is what the model itself can read."""
    model = architectures.build(name)
    wrapper = LogProbModel(model)
    checks.check_positions([wrapper], 64)
    with torch.no_grad():
        model(torch.zeros(1, 64, dtype=torch.long), use_cache=False)
    if limit is None:
        checks.check_positions([wrapper], 65)
        with torch.no_grad():
            model(torch.zeros(1, 65, dtype=torch.long), use_cache=False)
        return
    refuses(
        "--max_length 65",
        "table of 64 positions",
        "give --max_length 64",
        call=lambda: checks.check_positions([wrapper], 65),
    )
    with pytest.raises((IndexError, RuntimeError)), torch.no_grad():
        model(torch.zeros(1, 65, dtype=torch.long), use_cache=False)


@pytest.mark.filterwarnings("error::FutureWarning")  # what transformers is about to take away
def test_checkpointing_is_asked_for_by_its_present_name(model):
    tokenizer = load.tokenizer_of(str(model))
    for wanted in (False, True):
        loaded = load.causal_lm(str(model), tokenizer, SharedArgs(gradient_checkpointing=wanted))
        assert loaded.model.gradient_checkpointing == wanted


def test_weights_that_are_not_loaded_are_named(tmp_path, capsys):
    """Llama 4's causal language model leaves the tower of its folder behind."""
    folder = tiny_llama(tmp_path)
    state = load_file(folder / "model.safetensors")
    save_file({**state, "tower.a": torch.ones(2), "tower.b": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    tokenizer = load.tokenizer_of(str(folder))
    for _ in range(2):  # policy and reference
        load.causal_lm(str(folder), tokenizer, DEFAULTS)
    said = capsys.readouterr().out
    assert said.count("NOTE") == said.count("2 weights that LlamaForCausalLM does not have") == 1
    assert "of tower: they are not loaded" in said


# ---------------------------------------------------------------------------------------------- the recipes themselves


def test_recipes_end_with_one_line_and_before_training(model, tmp_path):
    data = write_jsonl(tmp_path / "pairs.jsonl", [PAIR] * 4)
    wrong = write_jsonl(tmp_path / "wrong.jsonl", [PAIR, {**PAIR, "chosen": 7}])
    used = tmp_path / "used"
    used.mkdir()
    (used / "metrics.jsonl").write_text("{}\n")
    small = tiny_llama(tmp_path / "small", vocab_size=200)
    gpt2 = tiny_llama(tmp_path / "gpt2")
    architectures.build("gpt2").save_pretrained(gpt2)
    sizes = {"--train_batch_size": 4, "--micro_train_batch_size": 2}
    cases = [
        ("plain", {"--train_batch_size": 5}, ["--train_batch_size 5", "4 or 6"]),
        (
            "plain",
            {"--dataset_name": tmp_path / "missing.jsonl"},
            ["missing.jsonl", "does not exist"],
        ),
        (
            "plain",
            {"--dataset_name": wrong},
            ["wrong.jsonl", "row 2", "column 'chosen'", "found 7"],
        ),
        ("plain", {"--output_dir": used}, [str(used), "another run", "no checkpoint"]),
        ("plain", {"--model_name_or_path": small}, ["261 tokens", "200"]),
        (
            "plain",
            {"--model_name_or_path": gpt2, "--max_length": 65},
            ["--max_length 65", str(gpt2), "64 positions", "give --max_length 64"],
        ),
        ("plain", {"--bet": 0.5}, ["--bet 0.5", "--help"]),
        ("plain", {"--logging_steps": 2.5}, ["--logging_steps 2.5", "whole number"]),
        ("ddp", {"--dataset_name": wrong}, ["wrong.jsonl", "row 2", "column 'chosen'", "found 7"]),
    ]

    def start(index: int):
        launcher, changes, _ = cases[index]
        arguments = {
            "--model_name_or_path": model,
            "--dataset_name": data,
            "--output_dir": tmp_path / f"new{index}",
            **sizes,
            **changes,
        }
        flags = (part for pair in arguments.items() for part in pair)
        return launch(LAUNCHERS[launcher], recipe("dpo"), *flags, check=False)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(start, range(len(cases))))
    for index, (process, (launcher, changes, parts)) in enumerate(zip(ended, cases)):
        said = [line for line in process.stdout.splitlines() if all(part in line for part in parts)]
        assert process.returncode != 0 and len(said) == 1, (changes, process.stdout)
        if launcher == "plain":
            assert (
                "Traceback" not in process.stdout
                and said[0] == process.stdout.rstrip().splitlines()[-1]
            ), process.stdout
        else:
            assert not re.search(r"\[rank\d\]|RuntimeError|Gloo|gloo", process.stdout), (
                process.stdout
            )
        assert not (tmp_path / f"new{index}" / "metrics.jsonl").exists(), changes
    assert (used / "metrics.jsonl").read_text() == "{}\n"


def test_help_of_a_recipe():
    text = launch([], recipe("sft"), "--help").stdout
    fields = [field.name for field in dataclasses.fields(load_recipe("sft").Args)]
    assert len(fields) > 20 and all(f"--{field}" in text for field in fields)


# Runs a recipe as `python RECIPE WORDS` does, for each line of stdin that holds both as JSON, in one process.
RUN_EACH = """
import contextlib, io, json, runpy, sys
for line in sys.stdin:
    sys.argv = json.loads(line)
    console, status = io.StringIO(), None
    with contextlib.redirect_stdout(console), contextlib.redirect_stderr(console):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, console.getvalue()]))
"""


def test_help_and_wrong_flags_of_every_recipe_and_of_a_copy(tmp_path):
    (tmp_path / "d.yaml").write_text("betta: 1")
    copy = tmp_path / "my_dpo.py"
    copy.write_text(
        recipe("dpo")
        .read_text()
        .replace("@dataclass\nclass Args", "BETAS = (0.1, math.pi)\n\n\n@dataclass\nclass Args")
        .replace("default=0.1,\n        above=0", "default=BETAS[1],\n        above=0")
    )
    wrong = [
        ["--help"],
        ["--betta", "1"],
        ["--seed", "x"],
        ["--seed", "-1"],
        ["--dataset_name", "d"],
        [str(tmp_path / "d.yaml")],
    ]
    scripts = [str(copy), *(str(recipe(name)) for name in RECIPES)]
    lines = "".join(json.dumps([script, *words]) + "\n" for script in scripts for words in wrong)
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH],
        input=lines,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer[0] for answer in answers] == [0, 2, 2, 2, 2, 2] * len(scripts)
    assert "(default: 3.14159" in answers[0][1]
    assert answers[1][1].endswith(
        "my_dpo.py: error: unknown argument --betta 1: did you mean --beta? --help lists all "
        "arguments (none can be abbreviated, and a file of defaults comes first)\n"
    )


@pytest.mark.parametrize(
    "flags, parts",
    [
        (
            ["--loss_type", "ipo", "--label_smoothing", 0.1],
            ["--label_smoothing 0.1", "--loss_type sigmoid or robust"],
        ),
        (
            ["--loss_type", "robust", "--label_smoothing", 0.5],
            ["--label_smoothing 0.5", "below 0.5"],
        ),
        (["--beta", 0], ["--beta 0.0", "above 0"]),
    ],
)
def test_settings_of_dpo_that_would_be_ignored_or_mean_nothing(tmp_path, flags, parts):
    result = launch(
        [],
        recipe("dpo"),
        *flags,
        "--output_dir",
        tmp_path / "out",
        "--report_to",
        "none",
        check=False,
    )
    assert result.returncode and "Traceback" not in result.stdout
    assert all(part in result.stdout for part in parts)
