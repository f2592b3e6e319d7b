"""The same samples give the same update and the same logged numbers, however they are split.

They are split into processes, micro-batches, shards and shared prompts.
"""

import functools
import json
import math
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForSequenceClassification

from contracts.proof.compare import LATER_LOSS, same_lines
from recipes import RECIPES
from runs import (
    LAUNCHERS,
    launch,
    recipe,
    timeless,
    tiny_llama,
    training_lines,
    weights,
    write_jsonl,
)

# Two epochs of updates of 16, 16 and 1 row: in the last one process of two has no real row.
ROWS, BATCH = 33, 16
# One micro-batch an update, nothing shared, cached or computed again.
REFERENCE = "plain", 16
# Launcher, rows of a micro-batch or "tokens", what else differs, and the recipes. The proof of each recipe
# (test_recipe.py) has one and two processes and ZeRO-3, with nothing shared.
FAST = [
    ("ddp", 2, "share cached", ["dpo", "grpo"]),
    ("ddp", "tokens", "share", ["reward", "ppo", "distill"]),
    ("fsdp2", 4, "", ["sft"]),
]
SLOW = [
    ("plain", "tokens", "cached again", ["dpo", "ppo"]),
    ("ddp", 2, "share cached", ["kto"]),
    ("zero1", 2, "", ["sft"]),
    ("zero2", "tokens", "cached", ["dpo"]),
    ("zero3", "tokens", "share again", ["dpo", "ppo"]),
    ("fsdp2", 4, "share", ["ppo"]),
    # torch.compile is tried with PPO, whose actor is a policy like the others.
    ("compiled", 4, "share", ["ppo"]),
    # DeepSpeed's own Adam: the critic's warm-up and the norms of the groups reach into it.
    ("offload", 2, "", ["ppo"]),
]
LORA = ["--lora_r", 4, "--lora_alpha", 16]
FAST_LORA = [("ddp", 2, "share", ["ppo"])]
SLOW_LORA = [
    ("zero2", "tokens", "", ["ppo"]),
    ("zero3", "tokens", "share again", ["dpo"]),
    ("fsdp2", 4, "share", ["dpo"]),
]
ARGUMENTS = ["--train_batch_size", BATCH, "--max_epochs", 2, "--learning_rate", 0.01, "--max_length", 96, "--warmup_steps", 0,
             "--max_grad_norm", 0.5, "--weight_decay", 0.1, "--eval_steps", 3, "--report_to", "none"]  # fmt: skip
REWARDING = """
def vowels(prompts, responses, **columns):
    return [len(set(text) & set("aeiou0123456789ABCDEFGHIJ")) - len(text) / 5 for text in responses]


def brief(prompts, responses, response_ids, **columns):
    # None for prompts of odd length: not its own.
    return [None if len(prompt[0]["content"]) % 2 else float(len(ids) < 3) for prompt, ids in zip(prompts, response_ids)]


def ties(prompts, responses, **columns):
    return [float(len(text) % 3 == 0) for text in responses]
"""


def text(row: int, salt: int) -> str:
    """Uneven lengths, from 1 to 40 characters."""
    return "".join(
        chr(97 + (row * 7 + salt * 3 + i * i) % 26) for i in range(1 + (row * 11 + salt * 17) % 40)
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    tiny_llama(folder / "model")
    user = [[{"role": "user", "content": text(row, 1)}] for row in range(ROWS + 5)]
    replies = [
        [[{"role": "assistant", "content": text(row, salt)}] for row in range(ROWS + 5)]
        for salt in (2, 3)
    ]
    pairs = [{"prompt": p, "chosen": a, "rejected": b} for p, a, b in zip(user, *replies)]
    chats = [{"messages": p + a} for p, a in zip(user, replies[0])]
    prompts = [{"prompt": p} for p in user[: 20 + 5]]
    kinds = {"sft": chats, "preferences": pairs, "prompts": prompts}
    for name, of_recipe in RECIPES.items():
        rows = kinds[of_recipe.data]
        write_jsonl(folder / f"{name}.jsonl", rows[:-5])
        write_jsonl(folder / f"{name}_eval.jsonl", rows[-5:])  # 5 rows: divides nothing
    (folder / "rewarding.py").write_text(REWARDING)
    tiny_llama(folder / "scorer")
    config = LlamaConfig.from_pretrained(folder / "scorer", num_labels=1)
    config.update({"reward_mean": 0.1, "reward_std": 0.7})
    LlamaForSequenceClassification(config).save_pretrained(folder / "scorer")
    # Random weights rarely write EOS: more ends a response.
    file = folder / "model/generation_config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "eos_token_id": [1, *range(20, 60)]})
    )
    return folder


@pytest.fixture(scope="module")
def reference(inputs):
    """`recipe, further flags -> folder` of its run in one process."""
    return functools.cache(lambda name, *more: run(inputs, name, *REFERENCE, "", *more))


def run(inputs, name: str, launcher: str, micro: int | str, differs: str, *more) -> Path:
    of_recipe = RECIPES[name]
    output = inputs / f"{name}-{launcher}-{micro}{len(more)}"
    flags = [*ARGUMENTS, "--output_dir", output, "--model_name_or_path", inputs / "model"]
    flags += ["--dataset_name", inputs / f"{name}.jsonl"]
    flags += ["--eval_dataset_name", inputs / f"{name}_eval.jsonl", *of_recipe.split_flags]
    size = 4 if micro == "tokens" else micro
    if of_recipe.generates:
        flags += ["--generate_batch_size", size, "--score_batch_size", size + 1]
    flags += ["--micro_train_batch_size", size]
    flags += ["--micro_train_tokens", 180] * (micro == "tokens")
    flags += ["--share_prompts", "share" in differs] * (name != "sft")
    flags += ["--precompute_ref_log_probs", "cached" in differs] * (name == "dpo")
    flags += ["--gradient_checkpointing", "again" in differs]
    said = launch(LAUNCHERS[launcher], recipe(name), *flags, *more, cwd=inputs).stdout
    shares = any(what in said for what in ("once for both", "once for their"))
    assert shares == ("share" in differs)
    return output


def expect_same_run(expected: Path, found: Path, base: float = 0.0) -> None:
    """Args: base: the norm of what is not trained and in no saved actor."""
    a, b = weights(expected), weights(found)
    assert (a - b).norm() <= 1e-5 * math.hypot(a.norm(), base)
    # A later loss is of weights which may differ by 1e-5; adapters are scaled by 4.
    later = 1e-5 if base else LATER_LOSS
    same_lines(found.name, timeless(expected), timeless(found), later_loss=later)


def cases(fast: list, slow: list) -> list:
    return [
        pytest.param(name, launcher, micro, differs, id=f"{launcher}-{micro}-{name}", marks=marks)
        for rows, marks in ((fast, []), (slow, [pytest.mark.slow]))
        for launcher, micro, differs, names in rows
        for name in names
    ]


@pytest.mark.parametrize("name, launcher, micro, differs", cases(FAST, SLOW))
def test_every_split_is_the_same_run(inputs, reference, request, name, launcher, micro, differs):
    if launcher == "offload":
        request.getfixturevalue("cpu_adam")
    expected = reference(name)
    assert len(training_lines(expected)) == RECIPES[name].split_updates
    expect_same_run(expected, run(inputs, name, launcher, micro, differs))


@pytest.mark.parametrize("name, launcher, micro, differs", cases(FAST_LORA, SLOW_LORA))
def test_with_adapters_every_split_is_the_same_run(
    inputs, reference, name, launcher, micro, differs
):
    """The reference of DPO, PPO and GRPO is the base below the adapters."""
    expected = reference(name, *LORA)
    first, *_, last = training_lines(expected)
    assert first["loss"] != last["loss"]
    base = weights(inputs, "model").norm()
    expect_same_run(expected, run(inputs, name, launcher, micro, differs, *LORA), base)


def test_the_kl_coefficient_is_adapted_to_a_kl_near_its_target(reference):
    """Far from it the step is clipped, and every split would adapt alike, whichever KL it took."""
    lines = training_lines(reference("ppo"))
    *_, before, after = [line["objective/kl_coef"] for line in lines if "objective/kl_coef" in line]
    longest_step = 0.2 * 16 * 2 / 50  # of 16 prompts with 2 responses each, and the horizon
    assert 0 < abs(after / before - 1) < 0.9 * longest_step
