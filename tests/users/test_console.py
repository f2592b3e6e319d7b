"""What the console's encoding cannot show never ends a run: in the locale C, Python would stop at the first character that is not ASCII."""

import pytest

from runs import LAUNCHERS, launch, lines, recipe, tiny_inputs, write_jsonl

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
PROMPT, ANSWER = "你好, čaj?", "grüß 👋"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tiny_inputs(tmp_path_factory.mktemp("console"))
    say = lambda role, text: [{"role": role, "content": text}]
    rows = [
        {
            "prompt": say("user", f"{PROMPT} {n}"),
            "chosen": say("assistant", ANSWER),
            "rejected": say("assistant", "no"),
            "answer": ANSWER,
        }
        for n in range(8)
    ]
    write_jsonl(folder / "dpo-text.jsonl", rows)
    write_jsonl(
        folder / "ppo-text.jsonl", [{"prompt": row["prompt"], "answer": ANSWER} for row in rows]
    )
    return folder


@pytest.mark.parametrize(
    "name, launcher",
    [
        ("ppo", "plain"),
        pytest.param("dpo", "ddp", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_run_in_the_locale_c(inputs, name, launcher):
    data, output = inputs / f"{name}-text.jsonl", inputs / f"out-{name}-{launcher}"
    more = [
        "--rollout_batch_size",
        4,
        "--generate_batch_size",
        4,
        "--score_batch_size",
        4,
        "--reward_function",
        "preference_recipes.rollouts.rewards:answer_reward",
    ]
    result = launch(
        LAUNCHERS[launcher], recipe(name), "--model_name_or_path", inputs / "model", "--dataset_name", data, "--eval_dataset_name", data,
        "--output_dir", output, "--train_batch_size", 4, "--micro_train_batch_size", 2, "--max_steps", 2, "--save_steps", 1,
        "--max_new_tokens", 4, *(more if name == "ppo" else []), env=ASCII, fresh=True,
    )  # fmt: skip
    assert [line["global_step"] for line in lines(output)] == [0, 1, 2, 2]
    assert "done: 2 updates" in result.stdout and r"\u4f60" in result.stdout
    assert f"{output}: metrics.jsonl, samples.jsonl, actor/\n" in result.stdout
    assert (output / "samples.jsonl").exists()
