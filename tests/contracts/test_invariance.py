"""The same samples give the same update and the same logged numbers, however they are split.

test_recipe.py shows it of processes, micro-batches and engines. Here prompts are shared, activations are computed
again, log-probs of the reference are known before, and adapters are trained, whose base is the reference.
"""

import pytest
from transformers import LlamaConfig, LlamaForSequenceClassification

from contracts.proof.compare import same_lines, same_models
from recipes import TAUGHT
from runs import tiny_llama

SHARED, AGAIN = {"share_prompts": True}, {"gradient_checkpointing": True}
KNOWN = {"precompute_ref_log_probs": True}
BY_TOKENS = {"micro_train_tokens": 180, "micro_train_batch_size": 4}
TWOS, FOURS = {"micro_train_batch_size": 2}, {"micro_train_batch_size": 4}
# What a recipe does not start without.
REWARDED = ["--reward_function", "rewarding:vowels"]
OF_RECIPE = {"ppo": REWARDED, "grpo": REWARDED, "distill": TAUGHT}
LORA = {"lora_r": 4, "lora_alpha": 16}
# What differs from one process with one micro-batch an update, and the recipes.
FAST = [
    ("ddp", TWOS | SHARED | KNOWN, ["dpo", "grpo"]),
    ("ddp", BY_TOKENS | SHARED, ["reward", "ppo", "distill"]),
    ("fsdp2", FOURS, ["sft"]),
    ("ddp", TWOS | SHARED | LORA, ["ppo"]),
]
SLOW = [
    ("plain", BY_TOKENS | KNOWN | AGAIN, ["dpo", "ppo"]),
    ("ddp", TWOS | SHARED, ["kto"]),
    ("zero3", BY_TOKENS | SHARED | AGAIN, ["ppo"]),
    ("fsdp2", FOURS | SHARED, ["ppo"]),
    # torch.compile is tried with PPO, whose actor is a policy like the others.
    ("compiled", FOURS | SHARED, ["ppo"]),
    # DeepSpeed's own Adam: the norms of the groups reach into it.
    ("offload", TWOS, ["ppo"]),
    ("zero2", BY_TOKENS | LORA, ["ppo"]),
    ("zero3", BY_TOKENS | SHARED | AGAIN | LORA, ["ppo"]),
    ("fsdp2", FOURS | SHARED | LORA, ["dpo"]),
]
CASES = [
    pytest.param(name, launcher, changes, id=f"{name}-{launcher}-{'-'.join(changes)}", marks=marks)
    for rows, marks in ((FAST, []), (SLOW, [pytest.mark.slow]))
    for launcher, changes, names in rows
    for name in names
]
# How the runs of a recipe differ from the proof's. Those of the others make 6 updates.
SETTINGS = {
    # Rollouts of 16 and 4 prompts.
    "ppo": dict(reward_function="rewarding:vowels", reward_model_name_or_path="scorer")
    | dict(normalize_reward=True)
    | dict(n_rows=20, n_samples_per_prompt=2, num_epochs_per_rollout=2, max_steps=11)
    | dict(critic_learning_rate=0.003, learning_rate=0.003),
    # Without the responses that are cut, so that updates differ in size.
    "grpo": dict(reward_function=["rewarding:ties", "rewarding:brief"], reward_weights=[1, 0.5])
    | dict(n_rows=20, rollout_batch_size=8, n_samples_per_prompt=4, max_steps=7)
    | dict(learning_rate=0.003, kl_coef=0.1, mask_truncated=True),
    # Rollouts of 8, 8 and 4 prompts, two updates each.
    "distill": dict(n_rows=20, rollout_batch_size=8, n_samples_per_prompt=2)
    | dict(num_epochs_per_rollout=2, learning_rate=0.003, loss_type="sampled", max_steps=7),
}
REWARDING = """
def vowels(prompts, responses, **columns):
    return [len(set(text) & set("aeiou0123456789ABCDEFGHIJ")) - len(text) / 5 for text in responses]


def brief(prompts, responses, response_ids, **columns):
    # None for prompts of odd length: not its own.
    is_own = [len(prompt[0]["content"]) % 2 == 0 for prompt in prompts]
    return [float(len(ids) < 3) if own else None for own, ids in zip(is_own, response_ids)]


def ties(prompts, responses, **columns):
    return [float(len(text) % 3 == 0) for text in responses]
"""


@pytest.fixture(scope="module", autouse=True)
def current_directory(tmp_path_factory):
    """Has a reward model, `scorer`, and the reward functions."""
    folder = tmp_path_factory.mktemp("current")
    config = LlamaConfig.from_pretrained(tiny_llama(folder / "scorer"), num_labels=1)
    config.update({"reward_mean": 0.1, "reward_std": 0.7})
    LlamaForSequenceClassification(config).save_pretrained(folder / "scorer")
    (folder / "rewarding.py").write_text(REWARDING)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def run(bench_of, name: str, launcher: str, changes: dict):
    bench = bench_of(name, *OF_RECIPE.get(name, []))
    settings = SETTINGS.get(name, {"learning_rate": 0.01})
    given = {"save_steps": 1000, "max_grad_norm": 0.5, "max_new_tokens": 6, **settings, **changes}
    return bench.run("-".join([launcher, *changes]), launcher, **given)


@pytest.mark.parametrize("name, launcher, changes", CASES)
def test_every_split_is_the_same_run(bench_of, request, name, launcher, changes):
    """With adapters, too. Their base is the reference, as if it were named: a model of its own."""
    if launcher == "offload":
        request.getfixturevalue("cpu_adam")
    base = bench_of(name, *OF_RECIPE.get(name, [])).model_folder()
    whole = LORA | {"ref_model_name_or_path": base} if "lora_r" in changes else {}
    expected = run(bench_of, name, "plain", whole)
    assert len(expected.training) == SETTINGS.get(name, {}).get("max_steps", 6)
    sizes = {"generate_batch_size": 3, "score_batch_size": 5}
    found = run(bench_of, name, launcher, changes | sizes)
    is_shared = "prompts are computed once" in found.console
    assert is_shared == ("share_prompts" in changes)
    same_lines(name, expected.lines, found.lines)
    same_models(name, expected, found)
