"""Ten rows written by hand, in each format of docs/data.md, lead to an actor that loads, by one command.

The command is README's: a model, a data set, and nothing else that the format does not need.
"""

import csv
import json
from pathlib import Path
from typing import NamedTuple

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from recipes import RECIPES
from runs import ASSETS, launch, lines, pair_of, recipe, say, training_lines, write_jsonl

MODEL = ASSETS / "model"
FACTS = [
    ("Capital of France?", "Paris", "Rome"),
    ("Two plus two?", "4", "5"),
    ("Colour of the sky?", "Blue", "Red"),
    ("Opposite of hot?", "Cold", "Warm"),
    ("First month?", "January", "May"),
    ("Largest planet?", "Jupiter", "Mars"),
    ("Who wrote Hamlet?", "Shakespeare", "Goethe"),
    ("What is H2O?", "Water", "Salt"),
    ("Days in a week?", "7", "8"),
    ("What says the cat?", "Meow", "Moo"),
]


class Form(NamedTuple):
    """How a row is written: a function of a question, its answer and a wrong one; flags; a file."""

    row: object
    flags: tuple = ()
    file: str = "rows.jsonl"


def chat(question: str, answer: str) -> list[dict]:
    return say("user", question) + say("assistant", answer)


def transcript(question: str, answer: str) -> str:
    return f"\n\nHuman: {question}\n\nAssistant: {answer}"


CHAT = ("--strings_as_messages",)
BRIEF = """
def brief(prompts, responses, **columns):
    return [-len(response) / 100 for response in responses]
"""
PAIRS = {
    "messages": Form(pair_of),
    "strings": Form(lambda q, a, b: {"prompt": q, "chosen": a, "rejected": b}, CHAT),
    "plain text": Form(lambda q, a, b: {"prompt": q, "chosen": a, "rejected": b}, (), "rows.csv"),
    "ultrafeedback": Form(
        lambda q, a, b: {"prompt": q, "chosen": chat(q, a), "rejected": chat(q, b)}
    ),
    "prompt inside": Form(
        lambda q, a, b: {"chosen": chat(q, a), "rejected": chat(q, b)}, (), "rows.parquet"
    ),
    "hh-rlhf": Form(
        lambda q, a, b: {"chosen": transcript(q, a), "rejected": transcript(q, b)}, CHAT
    ),
    "alpaca": Form(
        lambda q, a, b: {"instruction": q, "input": "", "chosen": a, "rejected": b}, (), "rows.json"
    ),
}
PROMPTS = {
    "messages": Form(lambda q, a, b: {"prompt": say("user", q), "answer": a}),
    "gsm8k": Form(
        lambda q, a, b: {"question": q, "answer": f"So #### {a}"},
        (*CHAT, "--columns", "prompt=question"),
    ),
}
CONVERSATIONS = {
    "messages": Form(lambda q, a, b: {"messages": chat(q, a)}),
    "prompt": Form(lambda q, a, b: {"prompt": say("user", q), "completion": say("assistant", a)}),
    "strings": Form(lambda q, a, b: {"prompt": q, "completion": a}, CHAT, "rows.csv"),
    "text": Form(lambda q, a, b: {"text": f"{q} {a}"}, (), "rows.parquet"),
    "sharegpt": Form(
        lambda q, a, b: {
            "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]
        },
        file="rows.json",
    ),
}
FORMS = {"sft": CONVERSATIONS, "preferences": PAIRS, "prompts": PROMPTS}
# A format for each recipe in `make test`; the others with one recipe that learns from such data.
CASES = [
    pytest.param(name, form, marks=[pytest.mark.slow] * (form != of_recipe.ten_rows_fast))
    for name, of_recipe in RECIPES.items()
    for form in FORMS[of_recipe.data]
    if name in ("sft", "dpo", "grpo") or form == of_recipe.ten_rows_fast
]


def write(path: Path, rows: list[dict]) -> None:
    """Writes rows as the suffix says."""
    if path.suffix == ".jsonl":
        write_jsonl(path, rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)


@pytest.mark.parametrize("name, form", CASES)
def test_ten_rows_lead_to_an_actor_that_loads(name, form, tmp_path):
    how = FORMS[RECIPES[name].data][form]
    write(tmp_path / how.file, [how.row(*fact) for fact in FACTS])
    flags = ["--model_name_or_path", MODEL, "--dataset_name", tmp_path / how.file, *how.flags]
    flags += RECIPES[name].ten_rows_flags
    if RECIPES[name].generates:
        (tmp_path / "my_rewards.py").write_text(BRIEF)
        flags += ["--max_new_tokens", 4]  # the model does not know when to stop here
    run = launch([], recipe(name), *flags, "--output_dir", "run", cwd=tmp_path)

    assert f"data {tmp_path / how.file}: 10 usable rows" in run.stdout
    (trained,) = training_lines(tmp_path / "run")  # ten rows are one update
    assert trained["global_step"] == 1
    if name == "grpo":  # eight responses to each prompt; groups that score alike are left out
        assert trained["samples"] in range(8, 81, 8)
    else:
        assert trained["samples"] == 10
    assert lines(tmp_path / "run")[-1] == trained  # no held-out set was given

    kind = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    folder = tmp_path / "run/actor"
    model = kind.from_pretrained(folder)
    before = load_file(MODEL / "model.safetensors")
    after = model.state_dict()
    moved = [name for name in before if not torch.equal(after[name].float(), before[name].float())]
    assert len(moved) > len(before) / 2
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer.apply_chat_template(
        say("user", FACTS[0][0]), add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    if name == "reward":
        assert model(**encoded).logits.shape == (1, 1)
        return
    length = encoded["input_ids"].shape[1]
    output = model.generate(**encoded, max_new_tokens=8, do_sample=False)
    assert length < output.shape[1] <= length + 8
