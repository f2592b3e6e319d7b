"""The same samples give the same update and the same logged numbers, however they are split.

They are split into processes, micro-batches, shards, packed rows and shared prompts.
"""

import json
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from recipes import RECIPES
from runs import (
    LAUNCHERS,
    evaluation_lines,
    launch,
    recipe,
    tiny_llama,
    training_lines,
    weights,
    without_timings,
    write_jsonl,
)

ROWS, BATCH = (
    33,
    16,
)  # two epochs of windows 16, 16, 1: in the last one process of two has no real row
# Launcher, rows of a micro-batch or "tokens", and what computes less, or once again: each two of the former meet.
SPLITS = {
    ("plain", 16): "", ("plain", 4): "pack", ("plain", "tokens"): "cached again", ("ddp", 2): "pack cached", ("ddp", "tokens"): "pack",
    ("zero1", 2): "cached", ("zero2", "tokens"): "cached", ("zero3", "tokens"): "pack again", ("fsdp2", 4): "pack cached", ("compiled", 4): "pack",
}  # fmt: skip
REFERENCE = "plain", 16  # one micro-batch a window, nothing packed, shared or cached
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
    settings = json.loads(
        (folder / "model/generation_config.json").read_text()
    )  # random weights rarely write EOS: more ends a response
    (folder / "model/generation_config.json").write_text(
        json.dumps({**settings, "eos_token_id": [1, *range(20, 60)]})
    )
    return folder


def run(inputs, name: str, launcher: str, micro: int | str, *extra):
    output = inputs / f"{name}-{launcher}-{micro}{'-'.join(map(str, extra))}"
    less = SPLITS.get((launcher, micro), "")
    if not output.exists():
        files = [
            "--dataset_name",
            inputs / f"{name}.jsonl",
            "--eval_dataset_name",
            inputs / f"{name}_eval.jsonl",
        ]
        flags = [
            *ARGUMENTS,
            *files,
            "--model_name_or_path",
            inputs / "model",
            "--output_dir",
            output,
        ]
        size = 4 if micro == "tokens" else micro
        flags += (
            RECIPES[name].split_flags
            + ["--generate_batch_size", size, "--score_batch_size", size + 1]
            * RECIPES[name].generates
            + (
                ["--micro_train_tokens", 180]
                if micro == "tokens"
                else ["--micro_train_batch_size", micro]
            )
            + [f"--{RECIPES[name].shares}", "pack" in less]
            + ["--precompute_ref_log_probs", "cached" in less] * (name == "dpo")
            + ["--gradient_checkpointing", "again" in less]
        )
        said = launch(LAUNCHERS[launcher], recipe(name), *flags, *extra, cwd=inputs).stdout
        assert any(
            what in said for what in ("once for both", "once for their", "rows are packed")
        ) == ("pack" in less)
    return output


def assert_same_run(one, other, base=None):
    """Args: base: the norm of what is not trained and in no saved actor."""
    a, b = weights(one), weights(other)
    whole = math.hypot(a.norm(), base or 0)
    assert (a - b).norm() <= 1e-5 * whole
    for lines in (training_lines, evaluation_lines):
        assert [line["global_step"] for line in lines(one)] == [
            line["global_step"] for line in lines(other)
        ]
        for first, second in zip(lines(one), lines(other)):
            keys = without_timings(first).keys()
            assert keys == without_timings(second).keys()
            # Rewards and KTO's `kl` are differences of summed log-probs, and as exact as these: fp32
            # rounds one of -195 to 8e-6.
            size = max([1.0, *(abs(first[key]) for key in keys if "logps" in key)])
            margins = abs(first.get("rewards/margins", first.get("eval/rewards/margins", 1)))
            for key in keys:
                if key.endswith("rewards/accuracies") and margins < 1e-4:
                    continue  # the first update's margins are rounding around zero
                # Later it is that of weights which may differ by 1e-5; adapters are scaled by 4.
                later = 3e-6 if base is None else 1e-5
                loss_bound = 1e-6 if first["global_step"] < 2 else later
                bound = (
                    loss_bound * max(1, abs(first[key]))
                    if key.endswith("loss")
                    else 1e-5 * max(size, abs(first[key]))
                )
                assert abs(first[key] - second[key]) <= bound, (
                    key,
                    first["global_step"],
                    first[key],
                    second[key],
                )


# The two of a pair are as costly as they are alike: each recipe leaves one of them out. torch.compile is tried with PPO,
# whose actor is a policy like the others.
FURTHER = ("zero1", "zero2", "zero3", "fsdp2", "compiled")
# The loops of the others meet these engines alike; test_recipe.py proves each under ZeRO-3.
ON_FURTHER = ("sft", "dpo", "ppo")
RUNS = [
    (name, *split)
    for split in SPLITS
    for name, of_recipe in RECIPES.items()
    if split != REFERENCE
    and split not in of_recipe.splits_left_out
    and (name in ON_FURTHER or split[0] not in FURTHER)
    and not (name == "sft" and split[0] in ("plain", "ddp", "zero3"))  # test_recipe.py has these
]


def case(name, launcher, micro):
    fast = [("fsdp2", "sft"), ("zero3", "dpo"), ("zero3", "ppo")]
    further = launcher in FURTHER and (launcher, name) not in fast
    return pytest.param(
        name,
        launcher,
        micro,
        id=f"{launcher}-{micro}-{name}",
        marks=[pytest.mark.slow] * further,
    )


@pytest.mark.parametrize("name, launcher, micro", [case(*one) for one in RUNS])
def test_every_split_is_the_same_run(inputs, name, launcher, micro):
    reference = run(inputs, name, *REFERENCE)
    assert not RECIPES[name].generates or all(
        {"perf/generate_seconds", "perf/score_seconds"} <= line.keys()
        for line in training_lines(reference)
    )
    assert (
        len(training_lines(reference)) == RECIPES[name].split_updates
        and torch.isfinite(weights(reference)).all()
    )
    assert_same_run(reference, run(inputs, name, launcher, micro))


LORA = ["--lora_r", 4, "--lora_alpha", 16]
LORA_SPLITS = [("zero3", "tokens"), ("ddp", 2), ("fsdp2", 4), ("zero2", "tokens")]
FAST_LORA = [("ppo", "ddp")]


@pytest.mark.parametrize(
    "name, launcher, micro",
    [
        pytest.param(name, *split, marks=[pytest.mark.slow] * ((name, split[0]) not in FAST_LORA))
        for split in LORA_SPLITS
        for name in ("dpo", "ppo")
    ],
)
def test_with_adapters_every_split_is_the_same_run(inputs, name, launcher, micro):
    """The reference of DPO, PPO and GRPO is the base below the adapters."""
    reference = run(inputs, name, *REFERENCE, *LORA)
    first, *_, last = training_lines(reference)
    assert first["loss"] != last["loss"] and weights(reference).isfinite().all()
    base = weights(inputs, "model").norm()
    assert_same_run(reference, run(inputs, name, launcher, micro, *LORA), base)


def test_the_kl_coefficient_is_adapted_to_a_kl_near_its_target(inputs):
    """Far from it the step is clipped, and every split would adapt alike, whichever KL it took."""
    reference = training_lines(run(inputs, "ppo", *REFERENCE))
    *_, before, after = [
        line["objective/kl_coef"] for line in reference if "objective/kl_coef" in line
    ]
    longest_step = 0.2 * 16 * 2 / 50  # of 16 prompts with 2 responses each, and the horizon
    assert 0 < abs(after / before - 1) < 0.9 * longest_step


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
def test_offloaded_to_the_cpu_it_is_the_same_run(inputs):
    """DeepSpeed's own Adam takes the place of PyTorch's: the critic's warm-up and the norms of the groups reach into it."""
    assert_same_run(run(inputs, "ppo", *REFERENCE), run(inputs, "ppo", "offload", 2))
