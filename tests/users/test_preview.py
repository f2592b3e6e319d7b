"""`--preview`: what it marks is what a run trains on."""

import pytest
import torch
from accelerate import Accelerator

import recipes
import templates
from preference_recipes.data import dataset
from preference_recipes.data.formats import preference_row
from preference_recipes.data.sequences import Sequences
from preference_recipes.models.packing import Packer
from preference_recipes.tools import preview
from runs import write_jsonl
from templates import load_rows

SETTINGS = {"max_length": 200, "strings_as_messages": False}
ASKED = [{"role": "user", "content": "2+3="}]
said = lambda text: [{"role": "assistant", "content": text}]
ROWS = {
    "messages": {"messages": [*ASKED, *said("5"), *ASKED, *said("It is 9.")]},
    "prompt and completion": {"prompt": "2+3=", "completion": "5"},
    "text": {"text": "a text without any turn"},
    "pair of messages": {"prompt": ASKED, "chosen": said("5"), "rejected": said("It is six.")},
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
    data = load_rows(Accelerator(), str(path), function, tokenizer, **settings)
    if is_pair:
        [row] = data
        prompts = [row["prompt_ids"]] * 2
        answers = [row["chosen_ids"], row["rejected_ids"]]
        mask = Packer(torch.device("cpu"), share=True).make_batch(prompts, answers)["loss_mask"]
        trained = [[False] * len(row["prompt_ids"])]
        trained += [[True] * int(of_answer.sum()) for of_answer in mask]
    else:
        sequences = Sequences(data)
        cut = sequences[range(len(sequences))]
        ids = cut["input_ids"]
        batch = Packer(torch.device("cpu")).make_batch([[] for _ in ids], ids, cut["loss_mask"])
        trained = [mask[: len(row)].tolist() for mask, row in zip(batch["loss_mask"], ids)]
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
