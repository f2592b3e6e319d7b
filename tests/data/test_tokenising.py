"""Tokenising takes no longer than it must: a prompt once, a large set in several processes."""

import copy
import datetime
import functools
import os
import types
from pathlib import Path

import datasets
import pytest
from transformers import AutoTokenizer

import templates
from common import launch
from preference_recipes.data import dataset, rendering
from preference_recipes.data.formats import preference_row
from runs import message, pair_of, refuses, say, write_jsonl
from templates import load_rows

QUESTION = message("user", "What is the capital of Xanadu?")
PAIR = {
    "prompt": [QUESTION, message("assistant", "one"), message("user", "two")],
    "chosen": say("assistant", "Paris is the capital."),
    "rejected": say("assistant", "\nthree"),
}


def encoded_texts(monkeypatch, tokenizer, row: dict) -> list[str]:
    """The texts that are encoded for one pair."""
    preference_row(row, tokenizer, max_length=10_000)  # what is found out of a template once
    texts = []
    encode = rendering.encode.__wrapped__

    @functools.lru_cache(maxsize=rendering.encode.cache_parameters()["maxsize"])
    def recorded(tokenizer, text):
        texts.append(text)
        return encode(tokenizer, text)

    with monkeypatch.context() as patch:
        patch.setattr(rendering, "encode", recorded)
        preference_row(row, tokenizer, max_length=10_000)
    return texts


@pytest.mark.parametrize("name", ["qwen3", "phi3", "gptoss"])
def test_the_prompt_of_a_pair_is_encoded_once(monkeypatch, name):
    texts = encoded_texts(monkeypatch, templates.tokenizer(name), PAIR)
    assert sum(QUESTION["content"] in text for text in texts) == 1
    assert max(map(len, texts[1:])) < len(texts[0])


def test_a_plain_prompt_is_encoded_alone_and_its_end_in_front_of_each_answer(monkeypatch):
    """No special token shows where such a text can be cut, so its ids may depend on what follows."""
    tokenizer = templates.tokenizer("own_alpaca")
    row = {"prompt": "Xanadu? " * 4, "chosen": " Paris", "rejected": " one"}
    whole = row["prompt"]
    assert encoded_texts(monkeypatch, tokenizer, row) == [whole, whole + " Paris", whole + " one"]
    row["prompt"] = whole = "What is the capital of Xanadu? " * 20
    end = " the capital of Xanadu? "
    texts = encoded_texts(monkeypatch, tokenizer, row)
    assert texts == [whole, end, end + " Paris", end + " one"]
    ids = tokenizer(whole + " Paris", add_special_tokens=False).input_ids
    found = preference_row(row, tokenizer, max_length=10_000)
    assert found["prompt_ids"] + found["chosen_ids"] == [*ids, tokenizer.eos_token_id]


@pytest.fixture
def many(monkeypatch, tmp_path):
    """A file of 2,500 pairs, for which two processes are worth their start."""
    monkeypatch.setattr(dataset, "ROWS_PER_PROCESS", 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    rows = [
        pair_of(f"question {n}", f"{n} one", f"{n} two") | {"answer": str(n)} for n in range(2500)
    ]
    return write_jsonl(tmp_path / "many.jsonl", rows)


def load(accelerator, monkeypatch, path, cache, **settings):
    """Tokenises a file into a cache of its own; returns rows, fingerprint and how many files hold them."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    settings = {"max_length": 64, "strings_as_messages": False, **settings}
    tokenizer = templates.tokenizer("qwen3")
    rows = load_rows(accelerator, str(path), preference_row, tokenizer, **settings)
    return rows[:], rows._fingerprint, len(list((cache / "tokenised").rglob("*.arrow")))


@pytest.mark.parametrize("unusable", [0, 1250])
def test_two_processes_make_the_same_rows_as_one(
    accelerator, monkeypatch, many, tmp_path, unusable
):
    """Also if one of them finds no usable row."""
    lines = ['{"prompt": "", "chosen": "a", "rejected": "b"}'] * unusable
    lines += many.read_text().splitlines()
    many.write_text("\n".join(lines[:2500]))
    *by_two, files_of_two = load(accelerator, monkeypatch, many, tmp_path / "two")
    monkeypatch.setattr(dataset, "ROWS_PER_PROCESS", 10_000)
    *by_one, files_of_one = load(accelerator, monkeypatch, many, tmp_path / "one")
    assert (files_of_two, files_of_one) == (1 if unusable else 2, 1) and by_two == by_one
    assert by_one[0]["row"] == list(range(unusable + 1, 2501))
    assert by_one[0]["answer"][-1] == str(2499 - unusable)


def test_a_bad_row_is_named_by_two_processes_as_by_one(accelerator, monkeypatch, many, tmp_path):
    lines = many.read_text().splitlines()
    lines[1200] = '{"prompt": "text", "chosen": 7, "rejected": "two"}'
    lines[2400] = '{"prompt": "text"}'
    many.write_text("\n".join(lines))
    expected = (
        f"data set '{many}', row 1201: column 'chosen': expected a string or a list of messages "
        "with role and content, found 7"
    )
    for number in (1000, 10_000):
        monkeypatch.setattr(dataset, "ROWS_PER_PROCESS", number)
        cache = tmp_path / f"cache{number}"
        refuses(expected, call=functools.partial(load, accelerator, monkeypatch, many, cache))
        assert not list((cache / "tokenised").iterdir())  # nor is half a file left


def test_a_full_disk_of_the_cache_is_named(accelerator, monkeypatch, many, tmp_path):
    full = lambda *_, **__: Path("/dev/full").write_text("x")
    monkeypatch.setattr(dataset, "ArrowWriter", full)
    said = f"{tmp_path}/tokenised cannot be written: [Errno 28] "
    refuses(said, call=lambda: load(accelerator, monkeypatch, many, tmp_path))
    assert not list((tmp_path / "tokenised").iterdir())


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_others_wait_for_hours(monkeypatch, on_cpu):
    """The processes of a run wait for the one that tokenises: NCCL would give up after 10 minutes, gloo after 30."""
    asked = {}

    def accelerator(**given):
        asked.update(given)
        return types.SimpleNamespace(mixed_precision="no")

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(launch, "Accelerator", accelerator)
    launch.build(None, on_cpu, 1)
    (settings,) = asked["kwargs_handlers"]
    assert settings.backend == ("gloo" if on_cpu else "nccl")
    assert settings.to_kwargs()["timeout"] >= datetime.timedelta(hours=12)


def test_a_backend_that_truncates_and_pads_does_neither(tmp_path):
    """tokenizer.json may hold both; transformers' own call switches them off."""
    tokenizer = copy.deepcopy(templates.tokenizer("qwen3"))
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    loaded.backend_tokenizer.enable_truncation(2)
    text = "What is the capital of Xanadu?"
    assert rendering.encode(loaded, text) == loaded(text, add_special_tokens=False).input_ids
    assert len(rendering.encode(loaded, text)) > 5
