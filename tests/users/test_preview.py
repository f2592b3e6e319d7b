"""`--preview`: what it marks is what a run trains on, and it needs no model."""

import json
import shutil

import pytest
import torch
from accelerate import Accelerator

import recipes
import templates
from preference_recipes.data import dataset
from preference_recipes.data.pairs import preference_row
from preference_recipes.data.prompts import prompt_row
from preference_recipes.data.sequences import Sequences
from preference_recipes.models.packing import Packer
from preference_recipes.rollouts import rewards
from preference_recipes.tools import preview
from runs import ASSETS, launch, recipe, write_jsonl

SETTINGS = {"max_length": 200, "strings_as_messages": False}
ROWS = {
    "messages": {
        "messages": [
            {"role": "user", "content": "2+3="},
            {"role": "assistant", "content": "5"},
            {"role": "user", "content": "and 4?"},
            {"role": "assistant", "content": "It is 9."},
        ]
    },
    "prompt and completion": {"prompt": "2+3=", "completion": "5"},
    "text": {"text": "a text without any turn"},
    "pair of messages": {
        "prompt": [{"role": "user", "content": "2+3="}],
        "chosen": [{"role": "assistant", "content": "5"}],
        "rejected": [{"role": "assistant", "content": "It is six."}],
    },
    "pair of strings": {"prompt": "2+3=", "chosen": "5", "rejected": "It is six."},
}
TEMPLATES = ["qwen3", "llama3", "gemma", "own_alpaca", "own_thinks"]


def shown(lines: list[str]) -> list[list[bool]]:
    """Which tokens of each sequence are in brackets."""
    tokens = [line.split(maxsplit=1)[1] for line in lines if line.startswith("    tokens ")]
    words = [line.split(preview.SEPARATOR) for line in tokens]
    return [[word[:1] == "⟦" and word[-1:] == "⟧" for word in line] for line in words]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("format", ROWS)
def test_what_is_marked_is_what_a_run_trains_on(format, template, tmp_path):
    """Against the mask of the batch that training makes of the same file."""
    tokenizer = templates.tokenizer(template)
    path = write_jsonl(tmp_path / "rows.jsonl", [ROWS[format]])
    is_pair = "chosen" in ROWS[format]
    settings = {**SETTINGS} if is_pair else {**SETTINGS, "loss_on": "assistant"}
    function = preference_row if is_pair else recipes.load("sft").sft_row
    converter = dataset.Converter(function, tokenizer, {}, settings)
    values = converter.convert_row(ROWS[format], 0)
    lines = preview.describe_row(ROWS[format], values, converter)
    data = dataset.load(Accelerator(), str(path), "train", function, tokenizer, {}, **settings)
    if is_pair:
        [row] = data
        prompts = [row["prompt_ids"]] * 2
        answers = [row["chosen_ids"], row["rejected_ids"]]
        mask = Packer(torch.device("cpu"), share=True).make_batch(prompts, answers)["mask"]
        trained = [[False] * len(row["prompt_ids"])]
        trained += [[True] * int(of_answer.sum()) for of_answer in mask]
    else:
        sequences = Sequences(data)
        cut = sequences[range(len(sequences))]
        batch = Packer(torch.device("cpu")).make_batch(
            [[] for _ in cut["input_ids"]], cut["input_ids"], cut["targets"]
        )
        trained = [
            of_sequence[: len(ids)].tolist()
            for of_sequence, ids in zip(batch["mask"], cut["input_ids"])
        ]
    assert shown(lines) == trained
    ids = [list(map(int, line.split()[1:])) for line in lines if line.startswith("    ids ")]
    assert [len(each) for each in ids] == [len(each) for each in trained]
    assert all(any(each) for each in trained[-1:])


def test_a_reward_model_is_trained_on_the_last_token_of_each_answer():
    """Its loss takes the scores, which are read there."""
    tokenizer = templates.tokenizer("qwen3")
    converter = dataset.Converter(recipes.load("reward").reward_row, tokenizer, {}, SETTINGS)
    row = ROWS["pair of messages"]
    marks = shown(preview.describe_row(row, converter.convert_row(row, 0), converter))
    assert [sum(of_part) for of_part in marks] == [0, 1, 1]
    assert all(of_part[-1] for of_part in marks[1:])


def test_what_is_left_out_or_cut_is_said():
    tokenizer = templates.tokenizer("qwen3")
    converter = dataset.Converter(preference_row, tokenizer, {}, {**SETTINGS, "max_length": 8})
    pair = {"prompt": "2+3=", "chosen": "a long answer to it", "rejected": "a short one"}
    values = converter.convert_row(pair, 0)
    assert "  CUT to --max_length 8" in preview.describe_row(pair, values, converter)
    equal = {**pair, "rejected": pair["chosen"]}
    lines = preview.describe_row(equal, converter.convert_row(equal, 0), converter)
    assert "  LEFT OUT: chosen equal to rejected" in lines


def test_lengths_are_counted():
    rows = {"length": [5] * 7 + [30, 31], "truncated": [False] * 8 + [True]}
    lines = preview.describe_lengths(dataset.datasets.Dataset.from_dict(rows), max_length=31)
    assert lines[0] == "lengths of 9 usable rows, 1 of them (11.1%) cut; --max_length 31"
    words = [line.replace(",", "").split() for line in lines[1:]]
    counted = {(int(low), int(high)): int(rows) for low, _, high, _, rows, *_ in words}
    assert counted.pop((5, 7)) == 7 and counted.pop((29, 31)) == 2
    assert not any(counted.values())


def test_a_preview_needs_no_weights_and_leaves_nothing(tmp_path):
    """One command of a recipe with rewards, with a model's folder that lacks the weights."""
    model = tmp_path / "model"
    shutil.copytree(ASSETS / "model", model)
    (model / "model.safetensors").unlink()
    flags = ["--model_name_or_path", model, "--dataset_name", ASSETS / "prompts_train.jsonl"]
    flags += ["--reward_function", "preference_recipes.rollouts.rewards:answer_reward"]
    flags += ["--max_length", 64, "--max_new_tokens", 8]
    done = launch([], recipe("grpo"), *flags, "--preview", 2, cwd=tmp_path)
    first, second = (
        json.loads(line) for line in (ASSETS / "prompts_train.jsonl").open().readlines()[:2]
    )
    assert f"row 1 of {ASSETS / 'prompts_train.jsonl'}" in done.stdout
    assert done.stdout.count("  as given   ") == 2
    for row in (first, second):
        assert f"answer_reward scores the response {row['answer']!r}: 1" in done.stdout
    assert done.stdout.count("answer_reward scores the response 'I do not know.': 0") == 2
    assert "columns for a reward function: answer" in done.stdout
    assert "usable rows, 0 of them (0.0%) cut; --max_length 64" in done.stdout
    assert not (tmp_path / "runs").exists() and "output in" not in done.stdout


def test_a_reward_function_that_fails_ends_the_preview(monkeypatch, capsys):
    """With the row and the place, as in training. One that wants an episode is not called."""

    def fails(prompts, responses, **columns):
        raise ValueError("no such column")

    def judges(prompts, responses, environments):
        return [1.0] * len(environments)

    monkeypatch.setattr(rewards, "load_functions", lambda names: {"fails": fails})
    tokenizer = templates.tokenizer("qwen3")
    settings = {**SETTINGS, "max_new_tokens": 8}
    converter = dataset.Converter(prompt_row, tokenizer, {}, settings)
    values = converter.convert_row({"prompt": "2+3=", "answer": "5"}, 6)
    args = type("Args", (), {"reward_function": ["fails"]})
    with pytest.raises(SystemExit) as refused:
        preview.describe_scores(args, values, tokenizer)
    assert "raised ValueError: no such column" in refused.value.code
    assert "called with data row 7" in refused.value.code
    monkeypatch.setattr(rewards, "load_functions", lambda names: {"judges": judges})
    *_, last = preview.describe_scores(args, values, tokenizer)
    assert last == "  judges is not called: it takes what only an episode gives"
