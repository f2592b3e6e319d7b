"""The proof, contracts/test_recipe.py, is green for every fork in docs/, and red for each fault, under its name."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from mutations import copy_repository, with_fault
from planting import Plant, drop_call, replace, together
from runs import OFFLINE, REPOSITORY, recipe

FORKS = REPOSITORY / "docs/forks"
PROOF = (REPOSITORY / "tests/contracts/test_recipe.py").read_text()
PROMISES = [name.replace("_", "-") for name in re.findall(r"^def test_(\w+)", PROOF, re.M)]


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
    return [name for name in PROMISES if statuses.get(name) == status]


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
    "a_mean_of_means": Fault(
        "split",
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "(losses * token_weights).sum() * update.divisor / n_targets",
            by="(losses * token_weights).sum() / token_weights.sum().clamp(min=1)",
        ),
    ),
    "the_metric_of_rank_0": Fault(
        "means",
        "sft",
        "common/metrics.py",
        replace("Sums.reduce", "self.accelerator.gather(mine[None])", by="mine[None]"),
    ),
    "a_checkpoint_is_written_in_place": Fault(
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
    "the_schedule_goes_on_with_a_skipped_update": Fault(
        "overflow",
        "sft",
        "recipes/sft.py",
        replace("main", "if applied:\n    scheduler.step()", by="scheduler.step()"),
    ),
    "the_actor_is_saved_before_the_last_update": Fault(
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
    "a_learning_rate_of_0_with_weight_decay": Fault(
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
    "the_seed_of_the_data_order_is_none": Fault(
        "seed",
        "sft",
        "common/batches.py",
        replace(
            "epoch_order",
            "np.random.default_rng(np.append(seed, epoch))",
            by="np.random.default_rng()",
        ),
    ),
    "a_short_update_is_divided_by_the_size_of_a_full_one": Fault(
        "last-update",
        "dpo",
        "recipes/dpo.py",
        replace(
            "main",
            "(losses * weights).sum() * update.divisor / update.n_samples",
            by="(losses * weights).sum() * update.divisor / args.train_batch_size",
        ),
    ),
    "packed_rows_lose_their_last_target": Fault(
        "packed",
        "sft",
        "recipes/sft.py",
        replace(
            "collate",
            "columns['learned']",
            by="[[*row[:-1], row[-1] and not packer.share] for row in columns['learned']]",
        ),
    ),
    "weights_are_changed_past_the_engine": Fault(
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
    "evaluation_leaves_dropout_on": Fault(
        "evaluation",
        "sft",
        "recipes/sft.py",
        replace("evaluate", "checks.evaluation_mode(actor.model)", by="torch.no_grad()"),
    ),
    "the_learning_rate_is_logged_an_update_late": Fault(
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
    "all_processes_resume_with_the_random_states_of_the_first": Fault(
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
    "the_reference_learns": Fault(
        "actor",
        "dpo",
        "recipes/dpo.py",
        replace(
            "main",
            "reference = Reference(accelerator, args, tokenizer, model)",
            by="reference = Reference(accelerator, args, tokenizer, model); reference.model = model",
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_red_under_its_name(tmp_path, name):
    fault = FAULTS[name]
    repository = REPOSITORY
    if fault.file.startswith("recipes/"):
        file = tmp_path / "my_recipe.py"  # anywhere on the disk
        file.write_text(with_fault(fault))
    else:
        repository = tmp_path / "repository"
        copy_repository(repository)
        (repository / fault.file).write_text(with_fault(fault))
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
    for base, name in (("sft", "ema"), ("", "rewards")):
        compile(fork(tmp_path, base, name).read_text(), name, "exec")
    assert not list(tmp_path.glob("*.rej")) + list(tmp_path.glob("*.orig"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_running_value_keeps_every_promise(tmp_path):
    report, output = prove(fork(tmp_path, "sft", "ema"), tmp_path, quick=False)  # on every engine
    assert of_status(report, "green") == PROMISES, output


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_new_reward_keeps_its_promises(tmp_path):
    fork(tmp_path, "", "rewards")
    functions = ["my_rewards:digits", "my_rewards:brief"]
    flags = ["--reward_function", *functions, "--reward_weights", 1, 0.2]
    only = ["split", "means", "resume"]  # test_recipe.py proves the others of GRPO
    report, output = prove(recipe("grpo"), tmp_path, *flags, only=only)
    assert of_status(report, "green") == only, output


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
    """A copy of the repository that has dropped an argument, and its SFT: a fixed value is in its place."""
    repository = folder / "repository"
    copy_repository(repository)
    shared = repository / "common/shared_args.py"
    text = shared.read_text()
    (field,) = re.findall(rf"    {name}: \w+ = arg\(.*?\)\n(?=    \w|\n)", text, re.S)
    shared.write_text(text.replace(field, ""))
    file = repository / "recipes/sft.py"
    for reader in (file, repository / "common/optim.py"):
        reader.write_text(reader.read_text().replace(f"args.{name}", value))
    return repository, file


@pytest.mark.slow
def test_a_fork_without_a_flag_is_told_what_could_not_be_checked(tmp_path):
    repository, file = without_flag(tmp_path, "weight_decay", "0.0")
    only = ["still", "last-update"]
    report, output = prove(file, tmp_path, only=only, repository=repository)
    assert of_status(report, "unchecked") == ["still"] and of_status(report, "red") == [], output
    assert "the recipe has no --weight_decay" in output


@pytest.mark.slow
def test_a_recipe_that_does_not_start_says_why(tmp_path):
    report, output = prove(recipe("sft"), tmp_path, "--learning_rat", 1, only=["split"])
    assert report == {"split": "red"}
    assert "unrecognized arguments: --learning_rat 1" in output and "Traceback" not in output


def test_each_promise_is_a_test_and_explained():
    page = (REPOSITORY / "docs/forking.md").read_text()
    assert sorted(re.findall(r"^### ([a-z-]+)$", page, re.M)) == sorted(PROMISES)
