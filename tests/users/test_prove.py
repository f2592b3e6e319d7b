"""The proof, contracts/test_recipe.py, is green for every fork in docs/, and red for each fault, under its name."""

import ast
import contextlib
import gzip
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from xml.etree import ElementTree

import psutil
import pytest
import torch

from contracts.proof import (
    bench,
    compare,
    interrupted,
    outcomes,
    processes,
    promises,
    rows,
    runs,
    warm,
)
from mutations import copy_repository
from planting import Plant, argument, drop_call, replace, together
from runs import ASSETS, OFFLINE, REPOSITORY, recipe, write_jsonl

FORKS = REPOSITORY / "docs/forks"
NAMES_OF_PROMISES = list(promises.PROMISES)


def prove(
    file: Path, folder: Path, *arguments, only=(), quick=True, repository: Path = REPOSITORY
) -> tuple[dict[str, str], str]:
    """What became of each promise, `green`, `red` or `unchecked`, and what was printed.

    Args:
        arguments: the recipe's.
        only: the promises that are checked; none: all.
    """
    report = folder / "report.xml"
    proof = repository / "tests/contracts/test_recipe.py"
    tests = [f"{proof}::test_{name.replace('-', '_')}" for name in only] or [str(proof)]
    words = ["--recipe", shlex.join(map(str, [file, *arguments])), *["--quick"] * quick]
    written = ["--basetemp", folder / "runs", "--junit-xml", report, "-p", "no:cacheprovider"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *tests, *words, *written, "-raP"],
        cwd=folder,
        env={**os.environ, **OFFLINE, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
    )
    output = result.stdout + result.stderr
    assert report.exists(), output
    statuses = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = re.sub(r"^test_|\[.*", "", case.get("name")).replace("_", "-")
        is_red = case.find("failure") is not None or case.find("error") is not None
        is_unchecked = case.find("skipped") is not None
        statuses[name] = "red" if is_red else "unchecked" if is_unchecked else "green"
    assert result.returncode == (1 if "red" in statuses.values() else 0), output
    return statuses, output


def of_status(statuses: dict[str, str], status: str) -> list[str]:
    return [name for name in NAMES_OF_PROMISES if statuses.get(name) == status]


# ============================================================ faults


class Fault(NamedTuple):
    """A wrong recipe, or a wrong `common`.

    Attributes:
        promise: the one that it breaks.
        recipe: the one that is proved.
        file: where it is planted: that recipe, or a file of `common`.
    """

    promise: str
    recipe: str
    file: str
    plant: Plant


FAULTS = {
    "the weights of padding rows are dropped from the loss": Fault(
        "split",
        "dpo",
        "recipes/dpo.py",
        replace("main", "(losses * weights).sum()", by="losses.sum()"),
    ),
    "a mean of means": Fault(
        "split",
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "(losses * token_weights).sum() * update.divisor / n_targets",
            by="(losses * token_weights).sum() / token_weights.sum().clamp(min=1)",
        ),
    ),
    "a logged mean of means": Fault(
        "means",
        "sft",
        "common/metrics.py",
        replace(
            "Sums.add",
            "torch.stack([number, weights.sum()])",
            by="torch.stack([number / weights.sum().clamp(min=1), counts.any().double()])",
        ),
    ),
    "the metric of rank 0": Fault(
        "means",
        "sft",
        "common/metrics.py",
        replace("Sums.reduce", "self.accelerator.gather(mine[None])", by="mine[None]"),
    ),
    "a second condition in the rule for log lines": Fault(
        "log-lines",
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "run.due(args.logging_steps, first=True)",
            by="run.due(args.logging_steps, first=True) and run.progress.samples % args.train_batch_size == 0",
        ),
    ),
    "a padding row is counted": Fault(
        "means",
        "sft",
        "common/batches.py",
        replace("micro_batch_of", "torch.zeros(1)", by="torch.ones(1)"),
    ),
    "the head is outside of the prepared module": Fault(
        "split",
        "reward",
        "recipes/reward.py",
        replace(
            "main",
            "scheduler = optim.scheduler(optimizer, args, run.total_steps)",
            by="scheduler = optim.scheduler(optimizer, args, run.total_steps)\n"
            "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model("
            "scorer, ['model.score.weight'])",
        ),
    ),
    "random states are not restored": Fault(
        "resume",
        "sft",
        "common/checkpoint.py",
        replace(
            "Checkpoint.load",
            "self.load_schedule(state['scheduler'])",
            by="self.load_schedule(state['scheduler']); torch.manual_seed(7 + accelerator.process_index)",
        ),
    ),
    "a checkpoint is written in place": Fault(
        "resume",
        "sft",
        "common/checkpoint.py",
        together(
            replace(
                "Checkpoint.save", "self.write(temporary, final)", by="self.write(final, final)"
            ),
            drop_call("Checkpoint.write", "folders.replace"),
        ),
    ),
    "a skipped update is counted": Fault(
        "overflow",
        "sft",
        "common/progress.py",
        replace(
            "Progress.update_done",
            "self.skipped_steps += 1",
            by="self.global_step += 1",
        ),
    ),
    "the schedule goes on with a skipped update": Fault(
        "overflow",
        "sft",
        "recipes/sft.py",
        replace("main", "if applied:\n    scheduler.step()", by="scheduler.step()"),
    ),
    "the actor is saved before the last update": Fault(
        "actor",
        "sft",
        "recipes/sft.py",
        together(
            replace("main", "actor.save()", by="pass"),
            replace(
                "main",
                "update = run.next_update(train)",
                by="update = run.next_update(train); actor.save()",
            ),
        ),
    ),
    "a learning rate of 0 with weight decay": Fault(
        "still",
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "optimizer.zero_grad()",
            by="""
optimizer.zero_grad()
with torch.no_grad():
    for parameter in policy.parameters():
        parameter.mul_(1 - 1e-6)
""",
        ),
    ),
    "the seed of the data order is none": Fault(
        "seed",
        "sft",
        "common/batches.py",
        replace(
            "epoch_order",
            "np.random.default_rng(np.append(seed, epoch))",
            by="np.random.default_rng()",
        ),
    ),
    "the seed is always the same": Fault(
        "seed",
        "sft",
        "common/batches.py",
        replace("epoch_order", "np.append(seed, epoch)", by="np.append(7, epoch)"),
    ),
    "a short update is divided by the size of a full one": Fault(
        "last-update",
        "dpo",
        "recipes/dpo.py",
        replace(
            "main",
            "(losses * weights).sum() * update.divisor / update.n_samples",
            by="(losses * weights).sum() * update.divisor / args.train_batch_size",
        ),
    ),
    "the sums of a log line are not emptied": Fault(
        "means",
        "sft",
        "common/metrics.py",
        replace("Sums.reduce", "self.sums = {}", by="pass"),
    ),
    "a skipped update is logged with the next one": Fault(
        "overflow",
        "sft",
        "common/metrics.py",
        replace(
            "Means.close_update",
            "self.pending.sums = {}",
            by="self.pending.sums = {} if applied else self.pending.sums",
        ),
    ),
    "a skipped update's samples are used again": Fault(
        "overflow",
        "sft",
        "common/run.py",
        replace("Run.next_update", "self.updates_seen", by="self.global_step"),
    ),
    "old checkpoints are deleted before the next one is written": Fault(
        "resume",
        "sft",
        "common/checkpoint.py",
        replace(
            "Checkpoint.save",
            "self.write(temporary, final)",
            by="[shutil.rmtree(path) for path in earlier if self.accelerator.is_main_process]; self.write(temporary, final)",
        ),
    ),
    "samples that a killed run wrote stay": Fault(
        "resume",
        "ppo",
        "common/checkpoint.py",
        replace(
            "Checkpoint.restore_logs",
            "not same(output_dir / name, log_in(path, name))",
            by="name == 'metrics.jsonl' and not same(output_dir / name, log_in(path, name))",
        ),
    ),
    "Adam's moments are not restored": Fault(
        "resume",
        "sft",
        "common/checkpoint.py",
        replace(
            "Checkpoint.load",
            "self.note_new_horizon(state)",
            by="self.note_new_horizon(state); self.optimizer.state.clear()",
        ),
    ),
    "the last rows of an epoch are dropped": Fault(
        "log-lines",
        "sft",
        "common/batches.py",
        replace(
            "rows_of_update",
            "math.ceil(mixture.samples / train_batch_size)",
            by="mixture.samples // train_batch_size",
        ),
    ),
    "the data order depends on the number of processes": Fault(
        "split",
        "sft",
        "common/run.py",
        replace("Run.next_update", "args.seed", by="args.seed + self.accelerator.num_processes"),
    ),
    "packed rows lose their last target": Fault(
        "packed",
        "sft",
        "recipes/sft.py",
        replace(
            "collate",
            "columns['targets']",
            by="[[*row[:-1], row[-1] and not packer.share] for row in columns['targets']]",
        ),
    ),
    "weights are changed past the engine": Fault(
        "engines",
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "optimizer.zero_grad()",
            by="""
optimizer.zero_grad()
with torch.no_grad():
    for parameter in policy.parameters():
        parameter.mul_(0.999)
""",
        ),
    ),
    "a running value is not in the checkpoint": Fault(
        "resume",
        "dpo",
        "recipes/dpo.py",
        together(
            replace(
                "main",
                "max_norm = args.max_grad_norm or math.inf",
                by="max_norm = args.max_grad_norm or math.inf\nfactor = 1.0",
            ),
            replace(
                "main",
                "(losses * weights).sum() * update.divisor / update.n_samples",
                by="(losses * weights).sum() * factor * update.divisor / update.n_samples",
            ),
            replace(
                "main",
                "if applied:\n    scheduler.step()",
                by="if applied:\n    scheduler.step()\n    factor *= 0.9",
            ),
        ),
    ),
    "gradients are clipped micro-batch by micro-batch": Fault(
        "split",
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "if accelerator.sync_gradients:\n"
            "    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)",
            by="grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        ),
    ),
    "one process alone clips": Fault(
        "split",
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "args.max_grad_norm or math.inf",
            by="args.max_grad_norm if accelerator.num_processes == 1 and args.max_grad_norm else math.inf",
        ),
    ),
    "the gradient norm is logged after clipping": Fault(
        "means",
        "sft",
        "recipes/sft.py",
        argument(
            "main",
            "means.close_update",
            "grad_norm",
            "min(grad_norm, args.max_grad_norm or math.inf)",
        ),
    ),
    "padding rows count in evaluations": Fault(
        "means",
        "sft",
        "recipes/sft.py",
        replace(
            "evaluate",
            "means.add(values, weights)",
            by="means.add(values, torch.ones_like(weights))",
        ),
    ),
    "an evaluation stops after its first micro-batch": Fault(
        "means",
        "sft",
        "recipes/sft.py",
        replace(
            "evaluate",
            "means.add(values, weights)",
            by="means.add(values, weights); break",
        ),
    ),
    "padding tokens count in metrics": Fault(
        "means",
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "means.add(values, weights)",
            by="means.add({name: (value, torch.ones_like(mask)) for name, (value, mask) in values.items()}, weights)",
        ),
    ),
    "evaluation leaves dropout on": Fault(
        "evaluation",
        "sft",
        "recipes/sft.py",
        replace("evaluate", "checks.evaluation_mode(actor.model)", by="torch.no_grad()"),
    ),
    "the model stays in evaluation mode": Fault(
        "evaluation",
        "sft",
        "recipes/sft.py",
        replace(
            "evaluate",
            "examples = []",
            by="examples = []\nif run.global_step:\n    actor.model.eval()",
        ),
    ),
    # All runs are then without dropout, but for one that is resumed: it begins with no evaluation.
    "the first evaluation leaves the model in evaluation mode": Fault(
        "resume",
        "sft",
        "recipes/sft.py",
        replace("evaluate", "examples = []", by="examples = []\nactor.model.eval()"),
    ),
    "evaluation draws from the random state of the training": Fault(
        "evaluation",
        "sft",
        "recipes/sft.py",
        replace("evaluate", "examples = []", by="examples = [] if len(torch.rand(1)) else []"),
    ),
    "the reference has dropout": Fault(
        "evaluation",
        "dpo",
        "recipes/dpo.py",
        replace(
            "main",
            "reference = Reference(accelerator, args, tokenizer, model)",
            by="reference = Reference(accelerator, args, tokenizer, model); reference.model.train()",
        ),
    ),
    "the learning rate is logged an update late": Fault(
        "log-lines",
        "sft",
        "recipes/sft.py",
        together(
            replace("main", "if applied:\n    scheduler.step()", by="pass"),
            replace(
                "main",
                "applied = run.count(update, grad_norm)",
                by="applied = run.count(update, grad_norm)\nif applied:\n    scheduler.step()",
            ),
        ),
    ),
    "a second condition in the rule for checkpoints": Fault(
        "log-lines",
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "checkpoint.save_if_due()",
            by="if run.progress.samples % args.train_batch_size == 0:\n    checkpoint.save_if_due()",
        ),
    ),
    "nothing is evaluated at the end": Fault(
        "log-lines",
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "run.due(args.eval_steps)",
            by="args.eval_steps and run.global_step % args.eval_steps == 0",
        ),
    ),
    "no checkpoint is written at the end": Fault(
        "log-lines",
        "dpo",
        "common/checkpoint.py",
        replace(
            "Checkpoint.save_if_due",
            "run.due(run.args.save_steps)",
            by="run.global_step % run.args.save_steps == 0",
        ),
    ),
    "old checkpoints stay": Fault(
        "log-lines",
        "sft",
        "common/checkpoint.py",
        replace(
            "Checkpoint.write",
            "folders.replace(temporary, final, self.run.args.save_total_limit)",
            by="folders.replace(temporary, final)",
        ),
    ),
    "old actors stay": Fault(
        "log-lines",
        "sft",
        "common/actor.py",
        replace(
            "write",
            "folders.replace(temporary, directory, keep)",
            by="folders.replace(temporary, directory)",
        ),
    ),
    "rows that fill no micro-batch are dropped": Fault(
        "last-update",
        "dpo",
        "recipes/dpo.py",
        replace(
            "main",
            "update = run.next_update(train)",
            by="""
update = run.next_update(train)
full = args.micro_train_batch_size * accelerator.num_processes
kept = update.rows[: max(update.n_samples // full * full, 1)]
update = run.update_of(kept, train.lengths, int(train.lengths[kept].sum()))
""",
        ),
    ),
    "every epoch has the same order": Fault(
        "seed",
        "sft",
        "common/batches.py",
        replace("epoch_order", "np.append(seed, epoch)", by="np.append(seed, 0)"),
    ),
    "the schedule starts again": Fault(
        "resume",
        "sft",
        "common/checkpoint.py",
        drop_call("Checkpoint.load_schedule", "scheduler.load_state_dict"),
    ),
    "the sums of an open line are lost": Fault(
        "resume",
        "sft",
        "common/checkpoint.py",
        drop_call("Checkpoint.load_open_sums", "self.means.open.load_state"),
    ),
    "all processes resume with the first one's random states": Fault(
        "resume",
        "sft",
        "common/checkpoint.py",
        replace(
            "Checkpoint.load",
            "self.load_schedule(state['scheduler'])",
            by="""
self.load_schedule(state['scheduler'])
from accelerate.utils import broadcast
torch.set_rng_state(broadcast(torch.get_rng_state()))
""",
        ),
    ),
    "the actor has no generation config": Fault(
        "actor",
        "sft",
        "common/actor.py",
        replace(
            "write",
            "tokenizer.save_pretrained(temporary)",
            by="tokenizer.save_pretrained(temporary)\n"
            "(temporary / 'generation_config.json').unlink()",
        ),
    ),
    "the reference learns": Fault(
        "actor",
        "dpo",
        "recipes/dpo.py",
        replace(
            "main",
            "reference = Reference(accelerator, args, tokenizer, model)",
            by="reference = Reference(accelerator, args, tokenizer, model); reference.model = model",
        ),
    ),
    "advantages are whitened in each micro-batch": Fault(
        "split",
        "ppo",
        "recipes/ppo.py",
        replace(
            "losses_and_metrics",
            "logps = output['logps']",
            by="logps = output['logps']\n"
            "old = {**old, 'advantages': whiten(old['advantages'], old['mask'])}",
        ),
    ),
    "generation reads its padding": Fault(
        "split",
        "ppo",
        "preference_recipes/rollouts/generation.py",
        replace("mask_of", "padding[:, None]", by="0 * padding[:, None]"),
    ),
    "a skipped update of a rollout is repeated": Fault(
        "overflow",
        "grpo",
        "recipes/grpo.py",
        replace(
            "main",
            "state.advance(args)",
            by="if applied:\n    state.advance(args)",
        ),
    ),
}


def planted(fault: Fault) -> str:
    tree = ast.parse((REPOSITORY / fault.file).read_text())
    fault.plant(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_fits_the_code(name):
    compile(planted(FAULTS[name]), FAULTS[name].file, "exec")
    assert FAULTS[name].promise in NAMES_OF_PROMISES


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_red_under_its_name(tmp_path, name):
    fault = FAULTS[name]
    repository = REPOSITORY
    if fault.file.startswith("recipes/"):
        file = tmp_path / "my_recipe.py"  # anywhere on the disk
        file.write_text(planted(fault))
    else:
        repository = tmp_path / "repository"
        copy_repository(repository)
        (repository / fault.file).write_text(planted(fault))
        file = repository / f"recipes/{fault.recipe}.py"
    report, output = prove(file, tmp_path, only=[fault.promise], repository=repository)
    assert report == {fault.promise: "red"}, output
    assert f"RED {fault.promise}\n" in output
    assert f"see docs/forking.md#{fault.promise}" in output
    # Which metric or model, where first, and by how much: not only that a run failed.
    assert re.search(r"off by \S+, bound \S+ First in \S+", output), output


# ============================================================ forks


def fork(folder: Path, base: str, name: str) -> Path:
    """A copy of a recipe outside of the repository, with a diff of docs/forks applied."""
    file = folder / f"my_{name}.py"
    if base:
        file.write_text(recipe(base).read_text())
    subprocess.run(
        ["patch", "--quiet", "--no-backup-if-mismatch", file, FORKS / f"{name}.diff"], check=True
    )
    return file


def test_every_diff_fits_its_recipe(tmp_path):
    for base, name in (("dpo", "simpo"), ("sft", "ema"), ("dpo", "kto"), ("", "rewards")):
        compile(fork(tmp_path, base, name).read_text(), name, "exec")
    assert not list(tmp_path.glob("*.rej")) + list(tmp_path.glob("*.orig"))
    # No reference is loaded, read or kept.
    words = set(re.findall(r"\w+", (tmp_path / "my_simpo.py").read_text()))
    assert not words & {"Reference", "ref_logps", "answer_logps", "ref_model_name_or_path"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("base, name", [("dpo", "simpo"), ("sft", "ema")])
def test_a_new_loss_and_a_running_value_keep_every_promise(tmp_path, base, name):
    report, output = prove(fork(tmp_path, base, name), tmp_path, quick=False)  # on every engine
    assert of_status(report, "green") == NAMES_OF_PROMISES, output


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_new_input_keeps_every_promise(tmp_path):
    with gzip.open(ASSETS / "preferences_train.jsonl.gz", "rt") as file:
        pairs = [json.loads(line) for line in itertools.islice(file, 80)]
    rows = [
        {"prompt": pair["prompt"], "completion": pair[answer], "label": answer == "chosen"}
        for pair, answer in zip(pairs, itertools.cycle(["chosen", "rejected"]))
    ]
    data = write_jsonl(tmp_path / "unpaired.jsonl", rows)
    file = fork(tmp_path, "dpo", "kto")
    flags = ["--model_name_or_path", ASSETS / "model", "--dataset_name", data]
    report, output = prove(file, tmp_path, *flags)
    # KTO's rows stand alone: there are no prompts to share.
    assert of_status(report, "unchecked") == ["packed"], output
    assert not of_status(report, "red"), output


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_new_reward_keeps_every_promise(tmp_path):
    fork(tmp_path, "", "rewards")
    functions = ["my_rewards:digits", "my_rewards:brief"]
    flags = ["--reward_function", *functions, "--reward_weights", 1, 0.2]
    report, output = prove(recipe("grpo"), tmp_path, *flags)
    assert of_status(report, "green") == NAMES_OF_PROMISES, output


@pytest.mark.slow
def test_an_average_that_a_resume_starts_again_is_red(tmp_path):
    """What is not handed to `Checkpoint` is not in one."""
    file = fork(tmp_path, "sft", "ema")
    text = file.read_text()
    kept = " average=average,"
    assert text.count(kept) == 1
    file.write_text(text.replace(kept, ""))
    report, output = prove(file, tmp_path, only=["resume"])
    assert of_status(report, "red") == ["resume"] and "ema, most in" in output, output


# ============================================================ what is asked


def without_flag(folder: Path, name: str, value: str) -> tuple[Path, Path]:
    """A copy of the repository that has dropped an argument, and its SFT, which has a fixed value in its place."""
    repository = folder / "repository"
    copy_repository(repository)
    shared = repository / "common/shared_args.py"
    text = shared.read_text()
    (field,) = re.findall(rf"    {name}: \w+ = arg\(.*?\)\n(?=    \w|\n)", text, re.S)
    shared.write_text(text.replace(field, ""))
    file = repository / "recipes/sft.py"
    file.write_text(file.read_text().replace(f"args.{name}", value))
    return repository, file


@pytest.mark.slow
def test_a_fork_without_a_flag_is_told_what_could_not_be_checked(tmp_path):
    repository, file = without_flag(tmp_path, "weight_decay", "0.0")
    only = ["still", "last-update"]
    report, output = prove(file, tmp_path, only=only, repository=repository)
    assert of_status(report, "unchecked") == ["still"] and of_status(report, "red") == [], output
    assert "the recipe has no --weight_decay" in output


@pytest.mark.slow
def test_a_fork_that_always_makes_one_epoch_is_not_red(tmp_path):
    repository, file = without_flag(tmp_path, "max_epochs", "1")
    only = ["means", "log-lines", "seed", "still"]
    report, output = prove(file, tmp_path, only=only, repository=repository)
    assert of_status(report, "red") == [] and of_status(report, "green") == ["still"], output
    assert of_status(report, "unchecked") == ["means", "log-lines", "seed"]
    assert "the recipe makes only one pass" in output
    assert "the recipe has no --max_epochs" in output


@pytest.mark.slow
def test_flags_that_a_tiny_run_cannot_have_make_nothing_red(tmp_path):
    flags = ["--save_actor_limit", 1, "--overlong_buffer", 16, "--max_new_tokens", 32]
    report, output = prove(recipe("grpo"), tmp_path, *flags, only=["log-lines"])
    assert of_status(report, "green") == ["log-lines"], output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_proof_leaves_no_run_behind(tmp_path, number):
    runs = tmp_path / "runs"
    process = subprocess.Popen(
        [
            *[sys.executable, "-m", "pytest", REPOSITORY / "tests/contracts/test_recipe.py"],
            *["--recipe", recipe("sft"), "-k", "split", "--basetemp", runs],
        ],
        cwd=tmp_path,
        env={**os.environ, **OFFLINE, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell has the children that it starts in the background ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not list(runs.glob("proof*/1x16*")):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, output

    def is_here(other: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return other.status() != psutil.STATUS_ZOMBIE and other.cwd() == str(tmp_path)
        return False

    latest = time.monotonic() + 60  # the server of the runs notices that its starter has gone
    while any(map(is_here, psutil.process_iter())):
        assert time.monotonic() < latest, [*filter(is_here, psutil.process_iter())]
        time.sleep(0.1)


@pytest.mark.slow
def test_rows_that_cannot_be_used_make_nothing_red(tmp_path):
    """Of the first 33 rows 13 can be used: they are one update an epoch."""
    rows = [json.loads(line) for line in (ASSETS / "sft_train.jsonl").read_text().splitlines()[:60]]
    unanswered = {
        **rows[0],
        "messages": [*rows[0]["messages"][:-1], {"role": "assistant", "content": ""}],
    }
    data = write_jsonl(tmp_path / "rows.jsonl", [unanswered] * 20 + rows)
    flags = ["--model_name_or_path", ASSETS / "model", "--dataset_name", data]
    report, output = prove(recipe("sft"), tmp_path, *flags, only=["seed", "last-update"])
    assert not of_status(report, "red"), output
    assert "another seed: an epoch is one update, in which no order of rows shows" in output
    assert "cannot be used: no usable row: 6 of 6 left out (empty answer" in output


@pytest.mark.slow
def test_an_overflow_with_adapters_leaves_no_trace(tmp_path):
    report, output = prove(recipe("dpo"), tmp_path, "--lora_r", 4, only=["overflow"])
    assert of_status(report, "green") == ["overflow"], output


@pytest.mark.slow
def test_a_recipe_that_does_not_start_says_why(tmp_path):
    report, output = prove(recipe("sft"), tmp_path, "--learning_rat", 1, only=["split"])
    assert report == {"split": "red"}
    assert "did you mean --learning_rate?" in output and "Traceback" not in output


def test_each_promise_is_a_test_and_explained():
    page = (REPOSITORY / "docs/forking.md").read_text()
    assert re.findall(r"^### ([a-z-]+)$", page, re.M) == NAMES_OF_PROMISES
    text = (REPOSITORY / "tests/contracts/test_recipe.py").read_text()
    tests = [name.replace("_", "-") for name in re.findall(r"^def test_(\w+)", text, re.M)]
    assert sorted(tests) == sorted(NAMES_OF_PROMISES)
    assert sorted(re.findall(r'keeps\(proof, "(.*)"\)', text)) == sorted(NAMES_OF_PROMISES)


def test_what_was_measured_before_a_run_fails_is_told():
    good, bad = compare.Difference(0, 1, "good"), compare.Difference(2, 1, "bad")
    failed, missing = bench.RunFailed("KeyError: 'loss'"), bench.Unchecked("no --seed")

    def judged(*steps) -> outcomes.Outcome:
        def check(_):
            for step in steps:
                if isinstance(step, Exception):
                    raise step
                yield compare.Check(f"of {step.where}", step)

        return outcomes.judge(check, None)

    assert not judged(good, good).is_red
    assert judged(good, failed).is_red
    said = str(judged(good, bad, failed)).splitlines()
    assert said[0] == "green  of good: off by 0, bound 1"
    assert said[1] == "RED    of bad: off by 2, bound 1. First in bad"
    assert said[2] == "KeyError: 'loss'"
    assert judged(good, missing).unchecked == "no --seed" and not judged(good, missing).is_red
    assert judged(bad, missing).is_red


def test_of_several_processes_the_error_of_the_first_is_shown(tmp_path):
    """The second one only says that its peer has gone, in more lines than are shown."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not os.path.exists(sys.argv[1]):\n"
        "        time.sleep(0.01)\n"
        "    sys.exit('this is wrong')\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('gone\\n' * 50))\n"
        "open(sys.argv[1], 'w').close()\n"
        "time.sleep(600)\n"
    )
    made = bench.Bench(script, [], tmp_path, quick=True)
    words = [str(script), str(tmp_path / "ready")]
    process, console = made.start("failing", words, "ddp")
    assert process.poll(300) == 1
    assert console.read_text().count("gone") == 50
    assert processes.end_of(console).splitlines()[-1] == "this is wrong"


def lines_with(**changes) -> list[dict]:
    """Three log lines, `loss_1=2.1` being the loss of the second one."""
    line = {"loss": 2.0, "logps/x": -50.0, "mean": 3.0, "samples": 100_000, "epoch": 1.0}
    line |= {"grad_norm": 4.0, "learning_rate": 1e-3}
    made = [{"global_step": step, **line} for step in (1, 2, 3)]
    for place, value in changes.items():
        tag, _, number = place.rpartition("_")
        made[int(number)][tag] = value
    return made


@pytest.mark.parametrize(
    "changes, exact, green",
    [
        ({}, True, True),
        ({"loss_0": 2.0 + 1.9e-6}, False, True),  # 1e-6 of its size
        ({"loss_0": 2.0 + 2.1e-6}, False, False),
        ({"loss_2": 2.0 + 5.9e-6}, False, True),  # of weights that may differ already
        ({"loss_2": 2.0 + 6.1e-6}, False, False),
        ({"loss_2": 2.0 + 1e-12}, True, False),
        ({"loss_1": math.nan}, False, False),
        ({"new_1": 1.0}, False, False),
        ({"grad_norm_1": 4.0 + 3.9e-5}, False, True),  # 1e-5 of its own size, not of the log-probs'
        ({"grad_norm_1": 4.0 + 4.1e-5}, False, False),
        ({"learning_rate_1": 1e-3 + 0.9e-12}, False, True),
        ({"learning_rate_1": 1e-3 + 1.1e-12}, False, False),
        ({"samples_1": 100_001}, False, False),
        ({"epoch_1": 1.0 + 1e-9}, False, False),
        ({"mean_1": 3.0 + 4.9e-4}, False, True),  # may be made of the log-probs
        ({"mean_1": 3.0 + 5.1e-4}, False, False),
    ],
)
def test_bounds_of_log_lines(changes, exact, green):
    assert compare.lines(lines_with(), lines_with(**changes), exact=exact).green == green


def test_what_is_not_finite_has_no_infinite_bound():
    for value in (math.inf, math.nan):
        assert not compare.lines(lines_with(mean_1=value), lines_with()).green
        # Nor has another metric of that line.
        beside = {"logps/x_1": value}
        expected, found = lines_with(**beside), lines_with(**beside, mean_1=3.1)
        assert not compare.lines(expected, found, only={"mean"}).green
    assert compare.lines(lines_with(mean_1=math.inf), lines_with(mean_1=math.inf)).green


def test_the_first_line_and_metric_beyond_its_bound_is_named():
    found = compare.lines(lines_with(), lines_with(loss_1=2.1, loss_2=3.0))
    assert found.where == "loss, update 2: 2, 2.1"
    assert found.measured == pytest.approx(0.1)
    assert "3 lines, 2" in compare.lines(lines_with(), lines_with()[:2]).where


@pytest.mark.parametrize(
    "rates, green",
    [
        ([0.3, 0.2, 0.1], True),
        ([0.2, 0.1, 0.0], False),  # those of the next update
        ([0.3, 0.25, 0.2], False),  # of twice as many updates
        ([0.0, 0.3, 0.2], False),  # a warm-up that no flag asks for
    ],
)
def test_learning_rates_of_a_linear_schedule(tmp_path, rates, green):
    lines = [
        {"global_step": step, "loss": 1.0, "learning_rate": rate}
        for step, rate in enumerate(rates, start=1)
    ]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    made = bench.Bench(Path("x.py"), [], tmp_path, quick=True)
    made.arguments = {"lr_scheduler_type": "linear", "warmup_steps": 0}
    (check,) = promises.linear_schedule(made, "alone", bench.Finished("", tmp_path))
    assert check.difference.green == green
    made.arguments = {}  # a fork with a schedule of its own
    assert list(promises.linear_schedule(made, "alone", bench.Finished("", tmp_path))) == []


@pytest.mark.parametrize(
    "losses, green", [([1.0, 2.0, 2.0, 1.0], True), ([1.0, 2.0, 1.0, 2.0], False)]
)
def test_epochs_have_orders_of_their_own(tmp_path, losses, green):
    lines = [{"global_step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    check = promises.order_of_epochs(bench.Finished("", tmp_path), 2)
    assert check.difference.green == green


def bench_of(folder: Path, **arguments) -> bench.Bench:
    """A bench of a recipe with these arguments, on the embedded model."""
    made = bench.Bench(Path("x.py"), [], folder, quick=True)
    made.arguments = {"model_name_or_path": str(ASSETS / "model"), "dataset_name": [], **arguments}
    made.train_rows = made.eval_rows = [[{"prompt": "1+1=", "completion": "2"}] * 8]
    return made


def test_flags_of_a_tiny_run_fit_each_other(tmp_path):
    asked = dict(save_actor_limit=1, max_new_tokens=32, overlong_buffer=16, max_length=1024)
    flags = bench_of(tmp_path, **asked).flags(tmp_path / "run")
    values = dict(zip(flags[::2], flags[1::2]))
    assert values["--save_actor_limit"] == "0"
    assert values["--max_new_tokens"] == "8" and values["--overlong_buffer"] == "4"
    assert values["--max_length"] == "256"


def test_which_settings_of_a_config_are_dropouts(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for config, has_dropout in (
        ({"attention_dropout": 0, "hidden_size": 8}, True),
        ({"resid_pdrop": 0.1}, True),
        ({"use_dropout": False, "hidden_size": 8}, False),
        ({"classifier_dropout": None}, False),
    ):
        (model / "config.json").write_text(json.dumps(config))
        (tmp_path / "bench").mkdir()
        made = bench_of(tmp_path / "bench", model_name_or_path=str(model))
        assert made.has_dropout == has_dropout
        copied = json.loads(Path(made.model_folder(0.5), "config.json").read_text())
        assert (0.5 in copied.values()) == has_dropout
        assert copied.get("hidden_size") == config.get("hidden_size")
        shutil.rmtree(tmp_path / "bench")
    # Before adapters there is dropout in any model.
    lora = dict(lora_r=4, lora_dropout=0.0)
    (model / "config.json").write_text("{}")
    assert bench_of(tmp_path, model_name_or_path=str(model), **lora).has_dropout
    sampling = bench_of(tmp_path, model_name_or_path=str(model), **lora, rollout_batch_size=4)
    assert not sampling.has_dropout


def test_first_rows_that_cannot_be_used_are_told(tmp_path):
    made = bench_of(tmp_path)

    def launch(*_, **__):
        raise bench.RunFailed("data set 'x': no usable row: 33 left out (too long)")

    made.launch = launch
    with pytest.raises(bench.Unchecked, match=r"no usable row: 33 left out \(too long\)"):
        made.run("1x16")


@pytest.mark.parametrize(
    "status, text, fails",
    [
        (0, "", False),
        (1, "\ndone: 6 updates\n", True),
        (-6, "\ndone: 6 updates\nterminate called without an active exception\n", False),
        (-6, "terminate called without an active exception\n", True),
    ],
)
def test_which_ends_are_failures(tmp_path, status, text, fails):
    console = tmp_path / "console.txt"
    console.write_text(text)
    process = SimpleNamespace(returncode=status)
    expected = pytest.raises(bench.RunFailed) if fails else contextlib.nullcontext()
    with expected:
        bench_of(tmp_path).check_end("run", process, console)


def test_a_run_that_hangs_or_is_watched_wrongly_is_killed(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(600)\n")
    made = bench_of(tmp_path)
    monkeypatch.setattr(bench, "HANG_SECONDS", 0.5)

    def wrong():
        raise OSError("the disk is gone")

    for until, error in (
        (None, bench.RunFailed),
        (lambda: False, bench.RunFailed),
        (wrong, OSError),
    ):
        process, console = made.start("hanging", [str(script)], "plain")
        with pytest.raises(error, match=r"the run `hanging` hung|the disk is gone"):
            made.wait("hanging", process, console, until)
        assert process.returncode == -signal.SIGKILL
    with pytest.raises(bench.RunFailed, match="hung"):
        made.run_script("hanging", str(script))
    assert not made.running


def test_workers_in_groups_of_their_own_are_killed(tmp_path):
    """As a real torchrun starts them."""
    file = tmp_path / "worker"
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "worker = subprocess.Popen(command, start_new_session=True)\n"
        "file = pathlib.Path(sys.argv[1])\n"
        "file.with_suffix('.tmp').write_text(str(worker.pid))\n"
        "file.with_suffix('.tmp').rename(file)\n"
        "time.sleep(600)\n"
    )
    made = bench_of(tmp_path)
    process, console = made.start("fresh", [str(script), str(file)], "plain", fresh=True)
    begun = []

    def has_begun() -> bool:
        if file.exists():
            begun.append(psutil.Process(int(file.read_text())))
        return bool(begun)

    assert made.wait("fresh", process, console, has_begun)
    (worker,) = begun
    assert not processes.is_alive(worker)


def test_after_a_stop_no_run_starts(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(600)\n")
    made = bench_of(tmp_path)
    process, console = made.start("running", [str(script)], "plain")
    made.stop()
    assert made.wait("running", process, console) is False
    with pytest.raises(bench.RunFailed):
        made.check_end("running", process, console)
    with pytest.raises(bench.RunFailed, match="was stopped"):
        made.start("late", [str(script)], "plain")


# ============================================================ nothing compared is not green


def finished(folder: Path, *lines: dict) -> bench.Finished:
    folder.mkdir(exist_ok=True)
    write_jsonl(folder / "metrics.jsonl", lines)
    return bench.Finished(folder.name, folder)


def test_two_empty_logs_are_not_equal():
    found = compare.lines([], [])
    assert not found.green and found.where == "the log: neither run has such a line"


def test_two_runs_without_a_model_are_not_equal(tmp_path):
    one, other = finished(tmp_path / "one"), finished(tmp_path / "other")
    found = compare.models(one, other)
    assert not found.green and found.where.endswith("neither run has saved a model")


@pytest.mark.parametrize(
    "some, others",
    [
        ([], []),
        ([{"loss": 1.0}], []),
        ([{"loss": 1.0}], [{"grad_norm": 2.0}]),
        # What says where a line is, and how far the schedule, is no metric.
        ([{"samples": 16, "learning_rate": 0.1}], [{"samples": 32, "learning_rate": 0.2}]),
    ],
)
def test_without_a_common_metric_nothing_differs(some, others):
    found = compare.unlike(some, others)
    assert not found.green and found.where == "the log: the two runs have no metric in common"


def test_an_actor_that_is_never_evaluated_is_checked_otherwise(tmp_path, monkeypatch):
    """Under every engine, and with another reference, before it is told what is not checked."""
    made = bench_of(tmp_path, ref_model_name_or_path=None)
    made.quick = False
    run = finished(tmp_path / "run", {"global_step": 1, "loss": 1.0})
    (run.folder / "actor").mkdir()
    other = finished(tmp_path / "other", {"global_step": 1, "loss": 2.0})
    monkeypatch.setattr(runs, "one_process", lambda _: run)
    monkeypatch.setattr(runs, "on_engine", lambda *_: run)
    monkeypatch.setattr(made, "run_script", lambda *_: "{}")
    monkeypatch.setattr(made, "run", lambda name, **_: other if name == "reference-itself" else run)
    checks = []
    with pytest.raises(bench.Unchecked, match=r"a new run on the actor: .* logs no evaluation"):
        for check in promises.check_actor(made):
            checks.append(check)
    assert all(check.difference.green for check in checks)
    assert [check.what for check in checks] == [
        "1 process: plain transformers loads it",
        "another reference: unlike",
        "ZeRO-3: plain transformers loads it",
        "FSDP2: plain transformers loads it",
    ]


def test_means_without_evaluations_are_not_all_checked(tmp_path, monkeypatch):
    lines = [{"global_step": step, "loss": float(step)} for step in (1, 2, 3)]
    run = finished(tmp_path / "run", *lines)
    for name, found in (("pass_at_once", run), ("pass_in_parts", run), ("updates_of_a_pass", 1)):
        monkeypatch.setattr(runs, name, lambda _, found=found: found)
    checks = promises.check_means(bench_of(tmp_path))
    assert [next(checks).what, next(checks).what] == ["training lines", "since the last line alone"]
    with pytest.raises(bench.Unchecked, match="logs no evaluation"):
        next(checks)


def test_a_run_that_saves_nothing_may_have_moved(tmp_path):
    with pytest.raises(bench.Unchecked, match="saves no model"):
        promises.distance_moved(bench_of(tmp_path), finished(tmp_path / "run"))


@pytest.mark.parametrize(
    "asked, per_epoch, shown",
    [
        (
            {"max_epochs": 2},
            2,
            ["another: unlike in the first line", "another epoch: another order"],
        ),
        # The rows of an only update are the same in any order.
        ({"max_epochs": 2}, 1, []),
        ({"rollout_batch_size": 4}, None, ["another: unlike in the first line"]),
    ],
)
def test_another_order_is_looked_for_where_it_shows(tmp_path, monkeypatch, asked, per_epoch, shown):
    run = finished(tmp_path / "run", {"global_step": 1, "loss": 1.0})
    for name in ("uninterrupted", "other_seed", "one_process", "unclipped"):
        monkeypatch.setattr(runs, name, lambda _: run)
    monkeypatch.setattr(runs, "updates_of_a_pass", lambda _: per_epoch)
    made = bench_of(tmp_path, **asked)
    monkeypatch.setattr(made, "run", lambda *_, **__: run)
    found = []
    expected = pytest.raises(bench.Unchecked, match="another seed: an epoch is one update")
    with contextlib.nullcontext() if shown else expected:
        for check in promises.check_seed(made):
            found.append(check.what)
    assert found == ["twice: log lines", "twice: weights", *shown]


@pytest.mark.parametrize("generates, unchecked", [(False, True), (True, False)])
def test_random_states_count_only_where_there_is_dropout(
    tmp_path, monkeypatch, generates, unchecked
):
    (tmp_path / "config.json").write_text("{}")
    asked = dict(model_name_or_path=str(tmp_path), save_steps=0, logging_steps=1, eval_steps=1)
    made = bench_of(tmp_path, **asked, **({"rollout_batch_size": 4} if generates else {}))
    monkeypatch.setattr(runs, "uninterrupted", lambda _: None)
    monkeypatch.setattr(interrupted, "resumed", lambda *_: iter([]))
    expected = pytest.raises(bench.Unchecked, match="random states: the model's config names no")
    with expected if unchecked else contextlib.nullcontext():
        list(promises.check_resume(made))


def test_without_dropout_an_evaluation_proves_less(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    made = bench_of(tmp_path, model_name_or_path=str(tmp_path), eval_steps=1)
    run = finished(
        tmp_path / "run", {"global_step": 0, "eval/loss": 1.0}, {"global_step": 1, "x": 1}
    )
    monkeypatch.setattr(runs, "uninterrupted", lambda _: run)
    monkeypatch.setattr(made, "run", lambda *_, **__: run)
    checks = promises.check_evaluation(made)
    assert [next(checks).what, next(checks).what] == ["log lines of training", "weights"]
    with pytest.raises(bench.Unchecked, match="evaluations without dropout"):
        next(checks)


# ============================================================ killed and resumed


class Killed(bench.Bench):
    """A bench whose runs only make the folders of checkpoints that a list names."""

    def launch(self, name, launcher, flags, until):
        folder = Path(flags[flags.index("--output_dir") + 1]) / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        self.names.append(name)
        for path, is_moment in self.script.pop(0):
            (folder / path).mkdir()
            manifest = {"state.json": [0, 0]}
            (folder / path / "state.json").touch()
            (folder / path / "manifest.json").write_text(json.dumps(manifest))
            assert until() == is_moment, path
            if is_moment:
                return True
        return False


def killed(folder: Path, *script) -> Killed:
    made = Killed(Path("x.py"), [], folder, quick=True)
    made.arguments = bench_of(folder).arguments
    made.train_rows = made.eval_rows = [[{}]]
    made.script = list(script)
    made.names = []
    return made


def kill_twice(made: Killed, name: str) -> tuple[bool, list[str]]:
    """Whether a run was killed twice, and what was found at fault."""
    watch = interrupted.Watch(made.folder / name / "checkpoints")
    was_killed = interrupted.kill_twice(made, name, "plain", watch)
    return was_killed, watch.faults


def test_a_run_is_killed_at_its_first_checkpoint_and_at_the_next_new_one(tmp_path):
    """Also if it had written two when it was killed, as on a busy machine."""
    first = [(".global_step_000002.writing", False), ("global_step_000002", True)]
    next_one = [("another", False), ("global_step_000004", True)]
    made = killed(tmp_path, first, next_one, [])
    assert kill_twice(made, "prompt") == (True, [])
    assert made.names == ["prompt-0", "prompt-1", "prompt"]

    # The first run was killed while it wrote the second checkpoint: that name is not new.
    made = killed(tmp_path, first, [(".global_step_000006.writing", True)], [])
    folder = tmp_path / "late/checkpoints/.global_step_000004.writing"
    folder.mkdir(parents=True)
    assert kill_twice(made, "late") == (True, [])

    made = killed(tmp_path, first, [])
    assert kill_twice(made, "too-late") == (False, [])


def test_a_run_that_cannot_be_killed_is_begun_again(tmp_path, monkeypatch):
    reference = finished(tmp_path / "whole", {"global_step": 1, "x": 1}, {"global_step": 6, "x": 1})
    names = []

    def kill_twice(_, name, *__):
        names.append(name)
        (tmp_path / name).mkdir(exist_ok=True)
        write_jsonl(tmp_path / name / "metrics.jsonl", reference.lines)
        return name == last

    monkeypatch.setattr(interrupted, "kill_twice", kill_twice)
    last = "killed-plain-2"
    checks = interrupted.resumed(bench_of(tmp_path), "alone", "plain", reference)
    assert [next(checks).difference.green, next(checks).difference.green] == [True, True]
    assert names == ["killed-plain-0", "killed-plain-1", last]

    last = None
    made = bench_of(tmp_path)
    with pytest.raises(bench.Unchecked, match="alone: the machine is too busy: 3 times"):
        next(interrupted.resumed(made, "alone", "plain", reference))
    short = finished(tmp_path / "short", {"global_step": 3, "x": 1})
    with pytest.raises(bench.Unchecked, match="too few updates"):
        next(interrupted.resumed(made, "alone", "plain", short))


def test_rows_that_cannot_be_used_are_not_expected(tmp_path):
    console = (
        "data /x/train_33_0.jsonl: 20 usable rows; 13 left out: empty answer\n"
        "data /x/held_out_5_0.jsonl: 4 usable rows\n"
    )
    for samples, wrong in ((40, 0), (33, 7)):
        lines = [{"global_step": 4, "loss": 1.0, "samples": samples}]
        write_jsonl(tmp_path / "metrics.jsonl", lines)
        assert promises.counts_of_epochs(bench.Finished("", tmp_path, console)).measured == wrong


def test_weights_are_compared_relative_to_their_norm():
    one = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    other = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0001])}
    found = compare.weights(one, other, "actor", exact=False)
    assert found.measured == pytest.approx(2e-5, rel=1e-2) and not found.green
    assert found.where == "actor, most in b"
    assert not compare.weights(one, {"a": one["a"]}, "actor", exact=False).green


def test_rows_of_one_length_become_uneven():
    say = lambda text: [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": text}]
    even = [{"messages": say(text)} for text in ("12", "34", "56", "78")]
    found = [row["messages"] for row in rows.uneven(even)]
    assert found == [say(text) for text in ("12", "3434", "565656", "78")]
    asked = [{"prompt": say("")[:1], "answer": "2"} for _ in range(4)]
    assert [row["prompt"][0]["content"] for row in rows.uneven(asked)] == [
        "1+1",
        "1+11+1",
        "1+1",
        "1+1",
    ]
    of_many_lengths = [{"messages": say("1" * number)} for number in range(1, 6)]
    assert rows.uneven(of_many_lengths) == of_many_lengths


def test_a_proof_needs_no_extra(monkeypatch):
    """peft is one. The server that forks the runs imports it only to save time."""
    import accelerate.commands.launch
    import torch.distributed.run

    for variable in ("DS_ACCELERATOR", "DEEPSPEED_LOG_LEVEL"):
        monkeypatch.setenv(variable, os.environ.get(variable, "cpu"))
    launcher = accelerate.commands.launch.simple_launcher
    monkeypatch.setattr(accelerate.commands.launch, "simple_launcher", launcher)
    monkeypatch.setattr(torch.distributed.run, "run", torch.distributed.run.run)
    monkeypatch.setitem(sys.modules, "peft", None)
    warm.import_libraries()
    assert accelerate.commands.launch.simple_launcher is warm.run_alone
    assert sys.modules["peft"] is None
