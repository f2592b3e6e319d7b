"""Ten rows written by hand lead to an actor that loads, by README's command: a model, a data set, no sizes."""

import pytest
import torch
from safetensors.torch import load_file

from contracts.test_recipe import check_loads
from recipes import ANSWER_REWARD, TAUGHT
from runs import ASSETS, launch, lines, pair_of, recipe, say, training_lines, write_jsonl

MODEL = ASSETS / "model"
# Questions, their answers and wrong ones.
FACTS = [(f"{n} plus {n}?", str(2 * n), f"{n} and {n}") for n in range(10)]
CHAT = ["--strings_as_messages"]
REWARDS = ["--reward_function", "my_rewards:brief", ANSWER_REWARD, "--max_new_tokens", 4]
BRIEF = """
def brief(prompts, responses, **columns):
    return [-len(response) / 100 for response in responses]
"""
# By recipe: how a row is written, and what the command needs besides.
CASES = {
    "sft": (lambda q, a, b: {"messages": say("user", q) + say("assistant", a)}, []),
    "reward": (
        lambda q, a, b: {
            "chosen": f"\n\nHuman: {q}\n\nAssistant: {a}",
            "rejected": f"\n\nHuman: {q}\n\nAssistant: {b}",
        },
        CHAT,
    ),
    "dpo": (lambda q, a, b: {"prompt": q, "chosen": a, "rejected": b}, CHAT),
    "kto": (pair_of, []),
    "grpo": (
        lambda q, a, b: {"question": q, "answer": f"So #### {a}"},
        [*CHAT, "--columns", "prompt=question", *REWARDS],
    ),
    "distill": (lambda q, a, b: {"prompt": say("user", q)}, [*TAUGHT, "--max_new_tokens", 4]),
}


@pytest.mark.parametrize("name", CASES)
def test_ten_rows_lead_to_an_actor_that_loads(name, tmp_path):
    as_row, more = CASES[name]
    (tmp_path / "my_rewards.py").write_text(BRIEF)
    data = write_jsonl(tmp_path / "rows.jsonl", [as_row(*fact) for fact in FACTS])
    flags = ["--model_name_or_path", MODEL, "--dataset_name", data, "--output_dir", "run", *more]
    said = launch([], recipe(name), *flags, cwd=tmp_path).stdout
    assert f"data {data}: 10 usable rows" in said
    (trained,) = training_lines(tmp_path / "run")  # ten rows are one update
    assert trained["global_step"] == 1
    # Eight responses to each prompt; groups that score alike are left out.
    assert trained["samples"] in (range(8, 81, 8) if name == "grpo" else [10])
    assert lines(tmp_path / "run")[-1] == trained  # no held-out set was given
    check_loads(tmp_path / "run/actor", MODEL)
    before, after = (load_file(f / "model.safetensors") for f in (MODEL, tmp_path / "run/actor"))
    common = before.keys() & after.keys()
    assert not any(torch.equal(after[part].float(), before[part].float()) for part in common)
