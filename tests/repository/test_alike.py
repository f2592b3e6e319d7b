"""The lines that recipes should share stand in all of them, so that copies cannot drift apart unseen.

A recipe is one file on purpose: what a forker would change is duplicated. These tests compare the duplicates: the
sections, the arguments that all recipes share, and the lines of the loop that belong to no algorithm.
"""

import ast
import dataclasses
import difflib
import re

import pytest

from recipes import NAMES, load
from runs import REPOSITORY, recipe

BANNER = "# " + "=" * 60 + " "

# Arguments whose default, or whose help, belongs to the algorithm. All others must be alike.
OWN_DEFAULTS = {
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "train_batch_size",
    "max_new_tokens",
    "max_length",
}
OWN_HELP = {
    "model_name_or_path", "dataset_name", "eval_dataset_name", "output_dir", "seed", "train_batch_size",
    "micro_train_batch_size", "micro_train_tokens", "max_epochs", "max_length", "share_prompts", "learning_rate",
    "max_grad_norm", "max_new_tokens",
}  # fmt: skip

# What follows an update, whatever the algorithm is. EVALUATION stands for the recipe's own evaluation.
TAIL = """
        if progress.log_due(args.logging_steps):
            metrics.log()
        if progress.due(args.eval_steps):
            with metrics.timed("paused"):
                EVALUATION
        if args.save_steps and progress.due(args.save_steps):
            with metrics.timed("paused"):
                checkpoint.save(run)
        if args.save_actor_steps and progress.due(args.save_actor_steps):
            with metrics.timed("paused"):
                folder = f"{args.output_dir}/actors/global_step_{progress.global_step:06d}"
                actor.publish(
                    accelerator,
                    model,
                    UNWRAPPED,
                    tokenizer,
                    folder,
                    args.save_actor_limit,
                    args.save_dtype,
                )
        checkpoint.stop_if_asked(run)

    folder = f"{args.output_dir}/actor"
    actor.publish(accelerator, model, UNWRAPPED, tokenizer, folder, dtype=args.save_dtype)
    metrics.close()
"""
# Single lines of the loop, in this order.
LOOP = """
    checkpoint.resume(run)
    guard = guards.FiniteLosses(accelerator, progress, args.output_dir)
    max_grad_norm = args.max_grad_norm if args.max_grad_norm > 0 else math.inf
    if progress.updates_seen == 0:
    model.train()
    metrics.start_interval()
    while not progress.finished:
        # All processes agree on the samples of this update. Each takes its share of them.
        micro_batches = batches.split(
            accelerator,
            update_rows,
            lengths,
            args.micro_train_batch_size,
            args.micro_train_tokens,
        divisor = engine.begin_update(accelerator, model, micro_batches)
        loss_scale = engine.loss_scale(accelerator, model)
        for micro_batch in micro_batches:
            with metrics.timed("data"):
                weights = batches.send(micro_batch.weights, accelerator.device)
            with accelerator.accumulate(model):
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            for values, value_weights in logged:
                metrics.pending.add(values, value_weights)
            metrics.computed(inputs, micro_batch.weights)
        applied = not accelerator.optimizer_step_was_skipped  # skipped: an fp16 overflow
        if applied:
            scheduler.step()
"""


def source(name: str) -> str:
    """The recipe's text, with one word for the model inside the prepared one and one line for each evaluation."""
    text = re.sub(r"\b(policy|scorer)\b", "UNWRAPPED", recipe(name).read_text())
    text = text.replace(
        "            update_sequences,\n", "            update_rows,\n"
    )  # SFT's rows may hold several
    text = text.replace(
        'if position["prompts_seen"] == 0:', "if progress.updates_seen == 0:"
    )  # GRPO's rollouts may hold no update
    evaluations = re.findall(
        r"metrics\.log_evaluation\(.*?\n?.*?\)\n(?=\s+(?:if |model\.train))", text, re.S
    )
    # Before the first update, and in the loop; GRPO's last rollouts may hold no update.
    assert len(evaluations) == (3 if name == "grpo" else 2)
    for call in evaluations:
        text = text.replace(call, "EVALUATION\n")
    return text


@pytest.mark.parametrize("name", NAMES)
def test_sections_stand_in_the_same_order(name):
    text = recipe(name).read_text()
    found = [
        line.strip().removeprefix(BANNER)
        for line in text.splitlines()
        if line.strip().startswith(BANNER)
    ]
    shared = ["imports", "arguments", "the algorithm", "accelerator", "data", "model and optimizer", "the loop",
              "evaluation and saving"]  # fmt: skip
    assert [section for section in found if not section.startswith("reference")] == shared
    # The docstring says how to start the recipe, and where more of it is said.
    docstring = ast.get_docstring(ast.parse(text))
    assert [line for line in docstring.splitlines() if line.endswith(":") and not line.startswith(" ")][-4:] == [
        "Demo, offline:", "One GPU:", "N GPUs:", "DeepSpeed fp16:",
    ]  # fmt: skip
    assert docstring.endswith(f"Every argument, every metric: docs/{name}.md")


@pytest.mark.parametrize("name", NAMES[1:])
def test_arguments_of_one_name_are_alike(name):
    fields = {field.name: field for field in dataclasses.fields(load("sft").Args)}
    for field in dataclasses.fields(load(name).Args):
        if field.name not in fields:
            continue
        other = fields[field.name]
        assert field.type == other.type, field.name
        if field.name not in OWN_DEFAULTS:
            assert field.default == other.default, field.name
        if field.name not in OWN_HELP:
            assert field.metadata["help"] == other.metadata["help"], field.name


def test_the_arguments_of_rollouts_are_alike():
    """PPO and GRPO share them, and no other recipe has them."""
    own_defaults = {
        *OWN_DEFAULTS, "rollout_batch_size", "n_samples_per_prompt", "max_new_tokens", "max_length", "kl_coef", "kl_estimator",
        "clip_range_high",
    }  # fmt: skip
    own_help = {
        "ref_model_name_or_path", "n_samples_per_prompt", "kl_coef", "kl_estimator", "clip_range", "clip_range_high", "output_dir",
        "learning_rate", "max_grad_norm",
    }  # fmt: skip
    fields = {field.name: field for field in dataclasses.fields(load("ppo").Args)}
    compared = 0
    for field in dataclasses.fields(load("grpo").Args):
        if field.name not in fields:
            continue
        compared += 1
        other = fields[field.name]
        if field.name not in own_defaults:
            assert (field.type, field.default) == (other.type, other.default), field.name
        if field.name not in own_help:
            assert field.metadata["help"] == other.metadata["help"], field.name
    assert compared > 50


@pytest.mark.parametrize("name", NAMES)
def test_what_follows_an_update_is_alike(name):
    assert TAIL.strip("\n") in source(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_loops_lines_stand_in_the_same_order(name):
    lines = iter(source(name).splitlines())
    for expected in LOOP.strip("\n").splitlines():
        assert expected in lines, expected  # `in` goes on behind the line that it found


@pytest.mark.parametrize("name", NAMES[1:])
def test_every_recipe_looks_for_its_own_common_first(name):
    block = lambda name: (
        recipe(name).read_text().partition("import common\n")[2].partition("\n\nimport ")[0]
    )
    assert block(name) == block("sft") and "check_recipe(__file__)" in block(name)


def test_the_difference_of_two_recipes_is_their_algorithm():
    """Of `main`, outside of the section on the reference, little differs: nothing that this list does not hold."""
    mains = [source(name).partition("def main():")[2] for name in ("reward", "dpo")]
    mains[1] = re.sub(r"    # =+ reference\n.*?(?=    # =+ the loop)", "", mains[1], flags=re.S)
    changes = [line for line in difflib.ndiff(*(main.partition("# " + "=" * 60 + " evaluation")[0].splitlines() for main in mains))
               if line[0] in "+-" and line[1:].strip()]  # fmt: skip
    assert len(changes) <= 60, "\n".join(changes)


def test_the_recipes_listed_here_are_all():
    assert sorted(NAMES) == sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.py"))
