"""Conversations whose history is rewritten, and the date of a run."""

import json
import shutil
import sys
from datetime import datetime

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import runs
from common.batches import indices_of_update
from preference_recipes.data.sequences import Sequences
from preference_recipes.models import load
from recipes import load as load_recipe

# The last answer is written with a mark, which is gone when another turn follows.
REWRITING = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{{ '.' if loop.last and m.role == 'assistant' else '' }}{{ m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
BY_NUMBER, BY_TOKENS = {"micro_train_batch_size": 3}, {"micro_train_tokens": 150}
ROWS, BATCH = 13, 6  # updates of 6, 6 and 1 conversation
SPLITS = [("plain", BY_NUMBER), ("ddp", BY_TOKENS), runs.slow("zero2", BY_NUMBER)]


def conversation(row: int) -> list[dict]:
    """One to four answers of uneven lengths."""
    return [
        runs.message(role, runs.some_letters(row, 2 * turn + (role == "user"), longest=12))
        for turn in range(1 + row % 4)
        for role in ("user", "assistant")
    ]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequences")
    runs.tiny_llama(folder / "model")
    runs.write_jsonl(folder / "sft.jsonl", [{"messages": conversation(row)} for row in range(ROWS)])
    (folder / "rewriting.jinja").write_text(REWRITING)
    return folder


def run(inputs, launcher: str, output, micro: dict):
    given = {"eval_dataset_name": inputs / "sft.jsonl", "warmup_steps": 0, "learning_rate": 0.01}
    given |= {"chat_template": inputs / "rewriting.jinja", "train_batch_size": BATCH} | micro
    flags = runs.short_run(inputs, "sft", output, **given)
    return runs.launch(runs.LAUNCHERS[launcher], runs.recipe("sft"), *flags)


@pytest.fixture(scope="module")
def reference(inputs, tmp_path_factory):
    output = tmp_path_factory.mktemp("reference") / "run"
    said = run(inputs, "plain", output, {"micro_train_batch_size": BATCH}).stdout
    assert f"data {inputs / 'sft.jsonl'}: {ROWS} usable rows\n" in said
    assert f"{ROWS} samples / train_batch_size {BATCH} = 3 updates" in said
    return output


def test_sequences_are_numbered_in_the_order_of_their_rows():
    """Rows of one, three and two sequences, and again of one: where each begins and ends, and its row."""
    lengths = [[4], [2, 1, 3], [1, 2], [2]]
    whole = [4, 6, 3, 2]
    numbers = iter(range(100))
    ids = [[next(numbers) for _ in range(length)] for length in whole]
    columns = {
        "input_ids": ids,
        "loss_mask": [[number % 3 == 0 for number in row] for row in ids],
        "row": [11, 12, 13, 14],
        "sequence_lengths": lengths,
    }
    several = Sequences(datasets.Dataset.from_dict(columns))
    assert len(several) == 7 and several.lengths.tolist() == [4, 2, 1, 3, 1, 2, 2]
    assert several.sequences_of([2, 0, 1]).tolist() == [4, 5, 0, 1, 2, 3]
    cut = several[[5, 0, 3]]
    assert cut["input_ids"] == [[11, 12], [0, 1, 2, 3], [7, 8, 9]]
    assert cut["loss_mask"] == [[number % 3 == 0 for number in part] for part in cut["input_ids"]]
    assert cut["row"] == [13, 11, 12]

    columns["sequence_lengths"] = [[length] for length in whole]
    single = Sequences(datasets.Dataset.from_dict(columns))
    assert len(single) == 4 and single.lengths.tolist() == whole
    assert single.sequences_of([3, 1]).tolist() == [3, 1] and single[[2]]["input_ids"] == [ids[2]]


def test_the_first_update_by_hand(inputs, reference):
    """The loss is the mean over the targets of all sequences, each read by itself."""
    model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    tokenizer.chat_template = REWRITING
    losses = []
    counted = []
    for update in range(3):
        rows = indices_of_update(ROWS, BATCH, 0, update)
        tokens = 0
        for chat in map(conversation, rows):
            for end in range(2, len(chat) + 1, 2):
                before = tokenizer.apply_chat_template(
                    chat[: end - 1], add_generation_prompt=True, return_dict=False
                )
                ids = tokenizer.apply_chat_template(chat[:end], return_dict=False)
                tokens += len(ids)
                if update == 0:
                    with torch.no_grad():
                        logps = model(torch.tensor([ids])).logits[0].log_softmax(-1)
                    losses += [-logps[n - 1, ids[n]] for n in range(len(before), len(ids))]
        counted.append((len(rows), tokens))
    found = runs.training_lines(reference)
    assert found[0]["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    totals = np.cumsum(counted, 0).tolist()
    assert [[line["samples"], line["tokens"]] for line in found] == totals
    assert totals[-1][0] == ROWS
    assert runs.evaluation_lines(reference)[0]["eval/mean_token_accuracy"] >= 0


@pytest.mark.parametrize("launcher, micro", SPLITS)
def test_any_split_is_the_same_update(inputs, reference, tmp_path, launcher, micro):
    run(inputs, launcher, tmp_path / "run", micro)
    for line, other in zip(runs.timeless(tmp_path / "run"), runs.timeless(reference), strict=True):
        assert line == pytest.approx(other, rel=1e-5, abs=1e-6)
    base = runs.weights(reference)
    assert (runs.weights(tmp_path / "run") - base).norm() < 1e-5 * base.norm()
    assert AutoTokenizer.from_pretrained(tmp_path / "run/actor").chat_template == REWRITING


DATED = REWRITING.replace("{% for", "{{ strftime_now('%d %b %Y') }}{% for", 1)


class LeapDay(datetime):
    @classmethod
    def now(cls, zone):
        return cls(2020, 2, 29, tzinfo=zone)


def test_a_run_keeps_its_date_when_it_is_resumed_on_another_day(
    inputs, accelerator, tmp_path, monkeypatch
):
    template = tmp_path / "dated.jinja"
    template.write_text(DATED)
    given = dict(train_batch_size=BATCH, micro_train_batch_size=3, learning_rate=0.01, save_steps=1)

    def flags(output, **more) -> list[str]:
        return runs.short_run(inputs, "sft", tmp_path / output, **given, **more)

    def date_of(checkpoint) -> str:
        return json.loads((checkpoint / "state.json").read_text())["arguments"]["date"]

    with monkeypatch.context() as patch:
        patch.setattr(load, "datetime", LeapDay)
        patch.setattr(sys, "argv", ["sft.py", *flags("cut", chat_template=template, max_steps=1)])
        load_recipe("sft").main()
    alone = shutil.move(tmp_path / "cut/checkpoints/global_step_000001", tmp_path / "alone")
    assert date_of(alone) == "2020-02-29"
    # On today's date, from a copy of the template under another name, and of the checkpoint alone.
    given["chat_template"] = template.rename(tmp_path / "renamed.jinja")
    for resume, last in ((alone, 2), ("auto", 3)):
        runs.launch([], runs.recipe("sft"), *flags("moved", resume=resume, max_steps=last))
    assert date_of(tmp_path / "moved/checkpoints/global_step_000003") == "2020-02-29"
