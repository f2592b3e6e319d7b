"""What would be read, loaded or trained otherwise than was meant is refused before any training."""

import ast
import dataclasses
import gc
import gzip
import io
import json
import runpy
import shutil
import sys
import types

import datasets
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import architectures
from common import print_once
from common.arguments import parse
from common.launch import quiet
from common.shared_args import SharedArgs, arg
from preference_recipes.data import files
from preference_recipes.data.formats import preference_row
from preference_recipes.models import load, scores
from preference_recipes.tools import export
from runs import ASSETS, REPOSITORY, recipe, refuses, tiny_llama, write_jsonl
from templates import load_rows

sft_row = runpy.run_path(str(recipe("sft")))["sft_row"]

DEFAULTS = SharedArgs()
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.fixture(autouse=True)
def offline(own_cache, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"))


@dataclasses.dataclass
class Args(SharedArgs):
    center_coef: float = arg(0.1, "weight", above=0)


def parsed(*argv) -> Args:
    return parse(Args, demo=ASSETS / "reward.yaml", argv=list(map(str, argv)))


def parsed_yaml(path, text: str) -> Args:
    path.write_text(text)
    return parsed(path)


def test_yaml_of_defaults(tmp_path):
    path = tmp_path / "defaults.yaml"
    text = "model_name_or_path: m\ndataset_name: '{assets}/d'\neval_dataset_name: [x, y]\n"
    text += "center_coef: 0.3\nlearning_rate: 1e-4\ngradient_checkpointing: true\n"
    path.write_text(text)
    settings = dict(center_coef=0.3, learning_rate=1e-4, gradient_checkpointing=True)
    expected = Args("m", [f"{ASSETS}/d"], eval_dataset_name=["x", "y"], **settings)
    assert parsed(path) == expected
    flags = ["--center_coef", 0.7, "--gradient_checkpointing", "false", "--eval_dataset_name", "z"]
    changed = dict(center_coef=0.7, gradient_checkpointing=False, eval_dataset_name=["z"])
    assert parsed(path, *flags) == dataclasses.replace(expected, **changed)
    assert parsed_yaml(path, text.replace("0.3", "null")).center_coef == 0.1
    with pytest.raises(SystemExit, match=r"error: .*defaults\.yaml: seed is there 3 times"):
        parsed_yaml(path, "seed: 1\n'seed': 2\nbeta: 1\nseed: null\n")


def test_a_home_is_that_of_the_user(tmp_path, monkeypatch):
    """A shell expands `~` where it stands alone, and neither in a YAML nor after `=`."""
    monkeypatch.setenv("HOME", "/home/me")
    given = parsed_yaml(
        tmp_path / "a.yaml", "model_name_or_path: ~/m\ndataset_name: [~/d, ~e, f~/g]\n"
    )
    assert (given.model_name_or_path, given.dataset_name) == (
        "/home/me/m",
        ["/home/me/d", "~e", "f~/g"],
    )
    given = parsed(
        "--output_dir=~", "--resume=~/r/c", "--columns", "prompt=~/x", "--report_to", "none"
    )
    assert (given.output_dir, given.resume) == ("/home/me", "/home/me/r/c")
    assert given.columns == ["prompt=/home/me/x"]  # as in --teacher NAME=PATH
    assert given.model_name_or_path == f"{ASSETS}/model"


def test_the_demo_is_run_only_where_neither_model_nor_data_is_given(capsys, monkeypatch):
    """With one thread, unless the user says how many."""
    threads = []
    print_once.cache_clear()  # another test may have run the demo
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert parsed("--model_name_or_path=m", "--dataset_name=d") == Args("m", ["d"])
    assert "demo" not in capsys.readouterr().out
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert parsed("--center_coef", 2).model_name_or_path == f"{ASSETS}/model"
    assert "running the demo" in capsys.readouterr().out
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    parsed()
    assert threads == [1]
    assert (
        gc.get_freeze_count() > 100_000
    )  # or a run would look through all modules again and again


# Torn, which is not read in part.
TORN = gzip.compress((json.dumps(PAIR) + "\n").encode() * 100, mtime=0)[:-20]
TWICE = b"prompt,chosen,,prompt,\na,b,,c,\n"


@pytest.mark.parametrize(
    "name, content, parts",
    [
        ("a.csv", b'prompt,chosen\n"a,b\n', ["a.csv", "row 1", "unexpected end of data"]),
        ("a.csv", b"prompt,chosen\na,b,c\n", ["row 1", "more cells than the header", "quote"]),
        ("a.csv", TWICE, ["a.csv", "row 1", "two columns are named 'prompt'"]),
        ("a.jsonl", b'{"a": 1}\n{"a": [{"b": 1, "b": 2}]}\n', ["row 2", "two keys are named 'b'"]),
        ("a.json", b'[{"a": 1}, {"a": 3, "c": 1, "a": 2}]', ["two keys are named 'a'"]),
        ("a.txt", b"text", ["a.txt", ".jsonl .json .csv .parquet", ".gz"]),
        ("a.jsonl.gz", TORN, ["end-of-stream"]),
    ],
)
def test_files_that_cannot_be_read(tmp_path, capfd, name, content, parts):
    path = tmp_path / name
    path.write_bytes(content)
    quiet()
    refuses(path, *parts, call=lambda: len(files.find(str(path), "train")))
    assert "Failed" not in capfd.readouterr().err


# The last is what a YAML gives that has a list of mappings there.
@pytest.mark.parametrize("name", ["owner/mistyped", "folder/file/none", "{'name': 'x'}"])
def test_a_name_of_nothing_is_told_in_one_line(name):
    said = f"data set {name!r} is no file or folder here, and on the hub: "
    refuses(said, call=lambda: files.find(name, "train"))


@pytest.mark.parametrize("kind", ["rows", "splits"])
def test_folders_that_are_no_data_set(tmp_path, kind):
    refuses("doesn't contain any data files", call=lambda: files.find(str(tmp_path), "train"))
    rows = datasets.Dataset.from_list([PAIR])
    saved = rows if kind == "rows" else datasets.DatasetDict(train=rows)
    saved.save_to_disk(tmp_path)
    said = (repr(str(tmp_path)), "`save_to_disk`", "`to_parquet`")
    refuses(*said, call=lambda: files.find(str(tmp_path), "train"))


@pytest.mark.parametrize(
    "function, rows, parts",
    [
        (
            preference_row,
            [{"prompt": "a", "chosen": "b"}],
            ["row 1", "no 'rejected'", "['chosen', 'prompt']", "--columns rejected=YOURS"],
        ),
        (
            preference_row,
            [{**PAIR, "prompt": "long" * 9}],
            ["no usable row", "left out (prompt fills max_length): 1 of 1 rows"],
        ),
        (sft_row, [], ["no usable row of 0"]),
    ],
)
def test_rows_that_do_not_fit(accelerator, tokenizer, tmp_path, function, rows, parts):
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    settings = {"max_length": 20} | ({"loss_on": "assistant"} if function is sft_row else {})
    call = lambda: load_rows(accelerator, path, function, tokenizer, **settings)
    for _ in range(2):  # a refused set leaves nothing in the cache
        refuses(path, *parts, call=call)


# ============================================================ models


def copy(model, folder, **config):
    shutil.copytree(model, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **config}))
    return folder


def test_weights_that_would_be_random_are_refused(model, tmp_path):
    tokenizer = load.load_tokenizer(str(model))
    torn = copy(model, tmp_path / "torn")
    state = load_file(model / "model.safetensors")
    state.pop("lm_head.weight")
    save_file(state, torn / "model.safetensors", {"format": "pt"})
    refuses("lm_head", "at random", call=lambda: load.causal_lm(str(torn), tokenizer, DEFAULTS))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "no_eos")
    refuses("no_eos", "no EOS", call=lambda: load.load_tokenizer(str(tmp_path / "no_eos")))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    """transformers makes an empty one of this, by which every text has no tokens."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    refuses("holds no tokenizer", call=lambda: load.load_tokenizer(str(tmp_path)))


AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForSequenceClassification")
OF_MODEL = {"AutoConfig": "own.Config", **dict.fromkeys(AUTO_CLASSES, "own.Model")}


@pytest.fixture
def own(model, tmp_path, monkeypatch):
    """A folder of a model whose code would leave a trace, as would its tokenizer's."""
    trace, folder = tmp_path / "trace", tmp_path / "own"
    copy(model, folder, model_type="own", architectures=["Model"], auto_map=OF_MODEL)
    file = folder / "tokenizer_config.json"
    auto_map = {"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]}
    settings = json.loads(file.read_text()) | {"tokenizer_class": "Own", "auto_map": auto_map}
    file.write_text(json.dumps(settings))
    (folder / "own.py").write_text(f"open({str(trace)!r}, 'w')\n")
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    answers = io.StringIO("y\n" * 20)
    monkeypatch.setattr(sys, "stdin", answers)
    yield str(folder)
    assert not trace.exists() and answers.tell() == 0


def test_code_that_a_model_brings_along_is_not_run(own, model, tmp_path):
    """Not even if a pipe says `y` where transformers would ask."""
    tokenizer = load.load_tokenizer(str(model))
    adapter = tmp_path / "adapter"
    peft.LoraConfig(base_model_name_or_path=own, task_type="CAUSAL_LM").save_pretrained(adapter)
    for call in (
        lambda: load.causal_lm(own, tokenizer, DEFAULTS),
        lambda: scores.score_model(own, tokenizer, DEFAULTS),
        lambda: load.load_tokenizer(own),
    ):
        refuses(repr(own), "cannot be loaded", "custom code", call=call)
    with pytest.raises(ValueError, match="custom code"):
        export.merge(str(adapter), tmp_path / "merged")
    # A reference without a tokenizer that can be read is taken as it is.
    load.refuse_another_vocabulary(own, tokenizer)


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
    assert {"load.py auto_class", "export.py AutoTokenizer"} <= set(places)


def test_a_tokenizer_is_never_that_of_mistral_common(model, monkeypatch):
    """Where that is installed, transformers takes it for a folder with tekken.json: no row is read."""
    asked = []
    of_transformers = AutoTokenizer.from_pretrained

    def from_pretrained(name, **settings):
        asked.append(settings.get("mistral_format"))
        return of_transformers(name, **settings)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    load.refuse_another_vocabulary(str(model), load.load_tokenizer(str(model)))
    assert asked == [False, False]


def test_a_reward_model_is_no_policy(tmp_path):
    """With tied embeddings transformers would load it without complaint."""
    for tied in (True, False):
        folder = tiny_llama(tmp_path / str(tied), tie_word_embeddings=tied)
        tokenizer = load.load_tokenizer(str(folder))
        scorer = scores.score_model(str(folder), tokenizer, DEFAULTS)
        scorer.save_pretrained(folder)
        call = lambda: load.causal_lm(str(folder), tokenizer, DEFAULTS)  # noqa: B023
        refuses(folder, "LlamaForSequenceClassification", "reward model", call=call)
        scores.score_model(str(folder), tokenizer, DEFAULTS, frozen=True)


def test_a_reference_with_another_tokenizer(model, tmp_path):
    tokenizer = load.load_tokenizer(str(model))
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
    call = lambda: load.causal_lm(str(copied), tokenizer, DEFAULTS)
    refuses(copied, model, "another tokenizer", repr(first), repr(second), call=call)
    for file in copied.glob("*token*"):
        file.unlink()
    load.causal_lm(str(copied), tokenizer, DEFAULTS)  # weights alone are taken as they are


def test_tokens_without_an_embedding(model, tmp_path):
    """In the data, or where a policy may draw what others read. A padded or unused rest passes."""
    tokenizer = load.load_tokenizer(str(model))
    tokenizer.add_tokens([f"<{n}>" for n in range(len(tokenizer), 266)])  # of 264 embeddings
    tokenizer.pad_token = "<265>"  # nothing draws it
    padded, grown = (tiny_llama(tmp_path / str(n), vocab_size=n) for n in (300, 265))

    def sizes(largest: int, *names, draws: bool = False) -> list[int]:
        """Of these models, where `largest` is the largest id of the data."""
        refuse = lambda n_rows, name: n_rows > largest or sys.exit(f"{largest}: none in {name}")
        converter = types.SimpleNamespace(tokenizer=tokenizer)
        data = types.SimpleNamespace(refuse_ids_beyond=refuse, converter=converter)
        found = load.check_embeddings(data, *(name and str(name) for name in names), draws=draws)
        return list(found.values())

    assert sizes(263, model, None, padded) == [264, 300]
    assert sizes(263, model, padded, draws=True) == [264, 300]  # it cannot draw <264>
    assert sizes(264, padded, grown) == sizes(263, padded, grown, draws=True) == [300, 265]
    for names in ([model], [padded, model], [padded, None, grown, model]):
        refuses(f"264: none in {model}", call=lambda names=names: sizes(264, *names))
    said = (
        "has 264 embeddings, and none for token 264, '<264>'",
        f"which {str(padded)!r} may draw",
    )
    refuses(model, *said, call=lambda: sizes(263, padded, model, grown, draws=True))


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_rows_beyond_a_table_of_positions_are_refused(name, model, tmp_path):
    """Rotary positions have no end."""
    architectures.build(name).save_pretrained(tmp_path)
    load.load_tokenizer(str(model)).save_pretrained(tmp_path)
    tokenizer = load.load_tokenizer(str(tmp_path))
    call = lambda most: load.causal_lm(str(tmp_path), tokenizer, SharedArgs(max_length=most))
    call(64)
    if name == "llama":
        call(65)
        return
    refuses("--max_length 65", tmp_path, "has 64 positions: give 64", call=lambda: call(65))


def test_weights_that_are_not_loaded_are_named(tmp_path, capsys):
    """Llama 4's causal language model leaves the tower of its folder behind."""
    folder = tiny_llama(tmp_path)
    state = load_file(folder / "model.safetensors")
    state |= {"tower.a": torch.ones(2), "tower.b": torch.ones(2)}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    tokenizer = load.load_tokenizer(str(folder))
    for _ in range(2):  # policy and reference
        load.causal_lm(str(folder), tokenizer, DEFAULTS)
    said = capsys.readouterr().out
    assert said.count("NOTE") == said.count("2 weights that LlamaForCausalLM does not have") == 1
    assert "of tower: no saved actor has them" in said
