"""What every recipe repeats is alike in all of them, so that copies cannot drift apart unseen.

A recipe is one file on purpose: what a forker would change is duplicated. These tests compare the duplicates: the
sections, the lines of set-up and of the loop that belong to no algorithm, and arguments that a recipe overrides.
"""

import ast
import dataclasses
import difflib
import re
import typing

import pytest

from common.shared_args import RewardArgs, RolloutArgs, SharedArgs
from recipes import NAMES, load
from runs import REPOSITORY, recipe

BANNER = "# " + "=" * 60 + " "

# In this order. Those in brackets are in some recipes only.
SECTIONS = """
imports
arguments
the algorithm
[the rollout]
[the updates of a rollout]
accelerator
data
model and optimizer
[reference]
[reference and rewards]
[teachers]
the loop
evaluation
[refusals]
"""
# Lines of `main`, in this order. What belongs to the algorithm is between them.
MAIN = """
args = arguments.parse(Args, demo=common.ASSETS / "NAME.yaml")
# This also fills in output_dir and the size of micro-batches.
accelerator = launch.make_accelerator(args, "NAME")
lora.complete_settings(accelerator, args)  # fills in lora_alpha
tokenizer = load.tokenizer_of_run(accelerator, args)
data = dataset.load_data(
prepare.choose_parameters(accelerator, UNWRAPPED, args)  # what is trained: all, or adapters
optimizer = optim.adamw(
scheduler = optim.scheduler(optimizer, args, progress.total_steps)
model, optimizer = prepare.for_training(accelerator, UNWRAPPED, optimizer, args.debug_overflow)
metrics = Metrics(
accelerator,
args,
progress,
charts=CHARTS,
flop=lora.flop(UNWRAPPED),
)
run = Run(
accelerator=accelerator,
args=args,
tokenizer=tokenizer,
data=data,
model=model,
unwrapped=UNWRAPPED,
optimizer=optimizer,
scheduler=scheduler,
progress=progress,
metrics=metrics,
models=lora.fingerprints(accelerator, UNWRAPPED),
checkpoint.begin(run)
console.begin(
guard = guards.FiniteLosses(run)
EVALUATE
while not progress.finished:
# All processes agree on the samples of this update. Each takes its share of them.
micro_batches = batches.split_update(run,
divisor = engine.begin_update(run, micro_batches)
loss_scale = engine.loss_scale(run)
for micro_batch in micro_batches:
with metrics.timed("data"):
weights = batches.send(micro_batch.weights, run.device)  # 0: a padding row
with accelerator.accumulate(model):
losses,
guard.check(
loss = (losses *
accelerator.backward(loss)
if accelerator.sync_gradients:
grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
optimizer.step()
optimizer.zero_grad()
metrics.pending.add(logged)
metrics.count_flop(batch, micro_batch.weights)
applied = not accelerator.optimizer_step_was_skipped  # skipped: gradients overflowed
progress.update_done(
metrics.update_done(
if applied:
scheduler.step()
"""
# What follows an update, whatever the algorithm is.
AFTER_AN_UPDATE = """
if progress.log_due(args.logging_steps):
metrics.log()
if progress.evaluation_due(args.eval_steps):
EVALUATE
if progress.save_due(args.save_steps):
checkpoint.save(run)
if progress.save_due(args.save_actor_steps):
actor.publish_step(run)
checkpoint.stop_if_asked(run)
"""
AT_THE_END = """
actor.publish(run)
metrics.close()
console.end(run)
hub.push(run)
"""


def lines_of(name: str) -> list[str]:
    """A recipe's lines without their indentation, and with one word for what has another name in each."""
    text = recipe(name).read_text()
    text = re.sub(r"\b(policy|scorer)\b", "UNWRAPPED", text)
    text = re.sub(r"^ *evaluate\(.*\)$", "EVALUATE", text, flags=re.M)
    text = re.sub(
        r"\brun\.(progress|metrics)\b", r"\1", text
    )  # in functions that are given the run
    text = text.replace("state = checkpoint.begin(run)", "checkpoint.begin(run)")
    text = text.replace(f'"{name}"', '"NAME"').replace(f'"{name}.yaml"', '"NAME.yaml"')
    return [line.strip() for line in text.splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_sections_are_in_the_same_order(name):
    text = recipe(name).read_text()
    banners = [line.strip() for line in text.splitlines() if line.strip().startswith(BANNER)]
    found = [banner.removeprefix(BANNER) for banner in banners]
    listed = SECTIONS.split("\n")[1:-1]
    assert found == [
        section for section in (line.strip("[]") for line in listed) if section in found
    ]
    assert {line for line in listed if not line.startswith("[")} <= set(found)
    # The docstring says how to start the recipe, and where to read more about it.
    docstring = ast.get_docstring(ast.parse(text))
    titles = [line for line in docstring.splitlines() if re.fullmatch(r"\w.*:", line)]
    assert titles[-4:] == ["Demo, offline:", "One GPU:", "N GPUs:", "DeepSpeed fp16:"]
    assert docstring.endswith(f"Every metric: docs/{name}.md. Every argument: docs/arguments.md")


@pytest.mark.parametrize("name", NAMES)
def test_the_lines_of_main_are_in_the_same_order(name):
    lines = lines_of(name)
    rest = iter(lines[lines.index("def main():") :])
    for expected in MAIN.strip().splitlines():
        # `any` goes on after the line that it found.
        assert any(line.startswith(expected) for line in rest), expected


@pytest.mark.parametrize("name", NAMES)
def test_what_follows_an_update_is_alike(name):
    text = "\n".join(lines_of(name))
    assert AFTER_AN_UPDATE in text
    assert AT_THE_END in text
    # What logs an evaluation keeps the best actor.
    sampler = REPOSITORY / "preference_recipes/rollouts/evaluation.py"
    source = recipe(name).read_text() + sampler.read_text()
    logged = re.findall(r"log_evaluation\(line, .*\)\n(.*)", source)
    assert logged and set(logged) == {"    actor.keep_best(run, line)"}


@pytest.mark.parametrize("name", NAMES[1:])
def test_every_recipe_looks_for_its_own_common_first(name):
    def block(name: str) -> str:
        after = recipe(name).read_text().partition("import common\n")[2]
        return after.partition("\n\nimport ")[0]

    assert block(name) == block("sft") and "check_recipe(__file__)" in block(name)


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_that_a_recipe_overrides_is_another_one(name):
    """Of another default or another meaning, but of the same type and range."""
    arguments = load(name).Args
    base = arguments.__base__
    assert base in (SharedArgs, RolloutArgs, RewardArgs)
    shared = {field.name: field for field in dataclasses.fields(base)}
    own = {field.name: field for field in dataclasses.fields(arguments)}
    overridden = arguments.__annotations__.keys() & shared.keys()
    assert overridden
    types, types_before = typing.get_type_hints(arguments), typing.get_type_hints(base)
    for argument in overridden:
        before, after = shared[argument], own[argument]
        assert types[argument] == types_before[argument], argument
        assert after.metadata.get("bounds") == before.metadata.get("bounds"), argument
        meanings = [(field.default, field.metadata["help"]) for field in (before, after)]
        assert meanings[0] != meanings[1], f"{argument} is that of {base.__name__}"


def test_the_difference_of_two_recipes_is_their_algorithm():
    """`main` of DPO differs from that of the reward model, outside of the section on the reference, in few lines."""
    mains = []
    for name in ("reward", "dpo"):
        text = "\n".join(lines_of(name)).partition("\ndef main():\n")[2]
        text = re.sub(rf"{BANNER}reference\n.*?(?={BANNER})", "", text, flags=re.S)
        mains.append(text.partition("\ndef log_evaluate_save")[0].splitlines())
    changes = [line for line in difflib.ndiff(*mains) if re.match(r"[+-] .", line)]
    assert len(changes) <= 30, "\n".join(changes)


def test_the_recipes_listed_here_are_all():
    assert sorted(NAMES) == sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.py"))
