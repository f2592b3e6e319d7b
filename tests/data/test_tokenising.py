"""Tokenising takes no longer than it must: a prompt once, a large set in several processes, the same ids in either case."""

import datetime
import multiprocessing
import os
import sys
import time
from functools import partial
from pathlib import Path

import datasets
import psutil
import pytest

import templates
from common import launch
from preference_recipes.data import dataset, workers
from preference_recipes.data.pairs import preference_row
from runs import LAUNCHERS, REPOSITORY, letters, recipe, refuses, write_jsonl
from runs import launch as launch_script

# ---------------------------------------------------------------------------------------------- a prompt once

QUESTION = {"role": "user", "content": "What is the capital of Xanadu?"}
PAIR = {
    "prompt": [QUESTION, {"role": "assistant", "content": "one"}, {"role": "user", "content": "two"}],
    "chosen": [{"role": "assistant", "content": "Paris is the capital."}],
    "rejected": [{"role": "assistant", "content": "\nthree"}],
}  # fmt: skip


def encoded_texts(monkeypatch, tokenizer, row: dict) -> list[str]:
    """The texts that the tokenizer is given for one pair."""
    preference_row(row, tokenizer, max_length=10_000)  # what is found out of a template once
    texts = []
    encode = type(tokenizer).__call__

    def recorded(self, text, *args, **kwargs):
        texts.append(text)
        return encode(self, text, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(type(tokenizer), "__call__", recorded)
        preference_row(row, tokenizer, max_length=10_000)
    return texts


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma3", "phi3", "gptoss"])
def test_the_prompt_of_a_pair_is_encoded_once(monkeypatch, name):
    texts = encoded_texts(monkeypatch, templates.tokenizer(name), PAIR)
    assert sum(QUESTION["content"] in text for text in texts) == 1
    assert max(map(len, texts[1:])) < len(texts[0])


def test_a_plain_prompt_is_encoded_alone_and_in_front_of_each_answer(monkeypatch):
    """No special token shows where such a text can be cut, so its ids may depend on what follows."""
    row = {"prompt": "What is the capital of Xanadu?", "chosen": " Paris", "rejected": " one"}
    texts = encoded_texts(monkeypatch, templates.tokenizer("own_alpaca"), row)
    texts.remove("a")  # whether the tokenizer adds a BOS
    assert texts == [
        row["prompt"], row["prompt"] + " Paris", row["prompt"] + " one",
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------- several processes


class Square:
    """Squares numbers. Of several bad ones the first takes longest to be found."""

    def __init__(self, bad: tuple[int, ...] = ()):
        self.bad = bad

    def __call__(self, span: range) -> list[int]:
        for number in span:
            if number in self.bad:
                time.sleep(0.3 if number == min(self.bad) else 0)
                raise ValueError(f"number {number}")
        return [number**2 for number in span]


SPANS = [range(start, start + 3) for start in range(0, 60, 3)]


def test_two_processes_keep_the_order():
    assert list(workers.map_in_order(list, SPANS, processes=2)) == [list(span) for span in SPANS]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_first_error_is_told(processes):
    parts = workers.map_in_order(Square(bad=(10, 13)), SPANS, processes)
    assert [next(parts), next(parts), next(parts)] == [[0, 1, 4], [9, 16, 25], [36, 49, 64]]
    with pytest.raises(ValueError, match=r"^number 10$"):
        next(parts)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    "cores, here, rows, number",
    [
        (64, 1, 39_999, 1),  # the start would cost more than it saves
        (64, 1, 40_000, 2),
        (64, 1, 10_000_000, workers.MOST_WORKERS),
        (64, 8, 10_000_000, 8),
        (2, 8, 10_000_000, 1),
        (1, 1, 10_000_000, 1),
    ],
)
def test_the_number_of_processes_follows_the_rows_and_the_cores_of_this_process(
    monkeypatch, cores, here, rows, number
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    # A process of pytest-xdist has none.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "recipe.py", raising=False)
    assert workers.number_for(rows, Square()) == number


def test_a_function_that_cannot_be_sent_is_called_here(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "recipe.py", raising=False)
    assert workers.number_for(10_000_000, Square()) == 4
    assert workers.number_for(10_000_000, lambda span: span) == 1
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert workers.number_for(10_000_000, Square()) == 1


@pytest.fixture
def many(monkeypatch, tmp_path):
    """A file of 2,500 pairs, for which two processes are worth their start."""
    monkeypatch.setattr(workers, "ROWS_PER_WORKER", 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    # A process of pytest-xdist has no file, which the workers would import.
    recipe_file = tmp_path / "recipe.py"
    recipe_file.touch()
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(recipe_file), raising=False)
    say = lambda text: [{"role": "assistant", "content": text}]
    rows = [
        {"prompt": [{"role": "user", "content": f"question {n}"}], "chosen": say(f"{n} one"),
         "rejected": say(f"{n} two"), "answer": str(n)}
        for n in range(2500)
    ]  # fmt: skip
    return write_jsonl(tmp_path / "many.jsonl", rows)


def load(accelerator, monkeypatch, path, cache, **settings):
    """Tokenises a file into a cache of its own; returns rows, fingerprint and the bytes of the cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    settings = {"max_length": 64, "strings_as_messages": False, **settings}
    tokenizer = templates.tokenizer("qwen3")
    rows = dataset.load(accelerator, str(path), "train", preference_row, tokenizer, {}, **settings)
    (file,) = (cache / "tokenised").iterdir()
    return rows[:], rows._fingerprint, file.name, file.read_bytes()


@pytest.mark.slow
def test_two_processes_write_the_same_file_as_one(accelerator, monkeypatch, many, tmp_path):
    counts = []
    each = workers.map_in_order
    count = lambda function, spans, number: counts.append(number) or each(function, spans, number)
    monkeypatch.setattr(workers, "map_in_order", count)
    by_two = load(accelerator, monkeypatch, many, tmp_path / "two")
    monkeypatch.setattr(workers, "ROWS_PER_WORKER", 10_000)
    by_one = load(accelerator, monkeypatch, many, tmp_path / "one")
    assert counts == [2, 1] and by_two == by_one
    assert len(by_one[0]["row"]) == 2500 and by_one[0]["answer"][-1] == "2499"


@pytest.mark.slow
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
        monkeypatch.setattr(workers, "ROWS_PER_WORKER", number)
        cache = tmp_path / f"cache{number}"
        refuses(expected, call=partial(load, accelerator, monkeypatch, many, cache))
        assert not list((cache / "tokenised").iterdir())  # nor is half a file left
    assert not multiprocessing.active_children()


def killed_row(row: dict, **settings) -> dict:
    os.kill(os.getpid(), 9)


@pytest.mark.slow
def test_a_killed_process_ends_the_run_in_one_line(accelerator, monkeypatch, many, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    call = lambda: dataset.load(
        accelerator, str(many), "train", killed_row, templates.tokenizer("qwen3"), {}, max_length=9
    )
    refuses(str(many), "processes that tokenise it died", call=call)
    assert not multiprocessing.active_children()


def wait_in_a_worker(folder: Path, span: range) -> None:
    (folder / f"{os.getpid()}").touch()
    time.sleep(600)


def start_waiting(folder: Path) -> None:
    next(workers.map_in_order(partial(wait_in_a_worker, folder), SPANS, processes=2))


@pytest.mark.slow
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    parent = multiprocessing.get_context("spawn").Process(target=start_waiting, args=(tmp_path,))
    parent.start()
    deadline = time.time() + 120
    while len(list(tmp_path.iterdir())) < 2 and time.time() < deadline:
        time.sleep(0.2)
    started = [psutil.Process(int(file.name)) for file in tmp_path.iterdir()]
    parent.kill()
    parent.join()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert len(started) == 2 and not alive


RUN_WITH_TWO_WORKERS = """
import os, runpy, sys
from preference_recipes.data import workers

if __name__ == "__main__":
    workers.ROWS_PER_WORKER = 600
    os.sched_getaffinity = lambda _: range(2 * int(os.environ["LOCAL_WORLD_SIZE"]))
    started = workers.map_in_order
    def each(function, spans, processes):
        print(f"tokenised by {processes} processes")  # not before the first part is asked for
        yield from started(function, spans, processes)
    workers.map_in_order = each
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_two_training_processes_wait_for_two_that_tokenise(tmp_path):
    """The row function is the recipe's own, and the launcher's surroundings reach the workers."""
    inputs = letters(tmp_path, 1300)
    script = tmp_path / "script.py"
    script.write_text(RUN_WITH_TWO_WORKERS)
    done = launch_script(
        LAUNCHERS["ddp"], script, recipe("sft"), "--model_name_or_path", inputs / "model", "--dataset_name",
        inputs / "sft.jsonl", "--output_dir", tmp_path / "run", "--train_batch_size", 4, "--micro_train_batch_size", 2,
        "--max_steps", 1, "--warmup_steps", 0, "--report_to", "none", fresh=True,
        env={"HF_DATASETS_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.stdout.count("tokenised by 2 processes") == 1, done.stdout
    assert "sft.jsonl: 1300 usable rows" in done.stdout


# ---------------------------------------------------------------------------------------------- waiting


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("engine", ["ddp", "deepspeed", "fsdp"])
def test_the_others_wait_for_hours(monkeypatch, on_cpu, engine):
    """The processes of a run wait for the one that tokenises: NCCL would give up after 10 minutes, gloo after 30."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    launcher = launch.Launcher(
        processes=2, on_cpu=on_cpu, deepspeed=engine == "deepspeed", fsdp=engine == "fsdp"
    )
    (settings,) = launch.process_group_settings(launcher)
    assert settings.to_kwargs()["timeout"] >= datetime.timedelta(hours=12)


def test_a_run_says_what_it_reads_before_it_does(accelerator, tmp_path, monkeypatch):
    texts = []
    monkeypatch.setattr(accelerator, "print", lambda text, **_: texts.append(text))
    path = str(write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}]))

    def row(row, **settings):
        assert texts == [f"reading {path} ..."]
        return {"input_ids": [1], "length": 1, "reason": "", "truncated": False}

    tokenizer = templates.tokenizer("qwen3")
    dataset.load(accelerator, path, "train", row, tokenizer, {}, max_length=9)
    assert texts[1:] == [f"data {path}: 1 usable rows"]
