"""`python -m common.prove` is green for every recipe and every fork in docs/, and red for each fault, under its name."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from common.prove import __main__ as command
from common.prove import compare, promises
from common.prove.compare import Difference
from mutations import copy_repository
from planting import Plant, argument, drop_call, replace, together
from runs import OFFLINE, REPOSITORY, recipe
from test_alike import NAMES

FORKS = REPOSITORY / "docs/forks"
NAMES_OF_PROMISES = [promise.name for promise in promises.PROMISES]


def prove(file: Path, folder: Path, *flags, repository: Path = REPOSITORY) -> tuple[dict, str]:
    """The report of a proof, and what it printed."""
    report = folder / "report.json"
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(repository)}
    result = subprocess.run(
        [sys.executable, "-m", "common.prove", file, "--json", report, *map(str, flags)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    output = result.stdout + result.stderr
    assert report.exists(), output
    found = json.loads(report.read_text())
    assert result.returncode == (0 if found["green"] else 1), output
    return found, output


def of_status(report: dict, status: str) -> list[str]:
    return [name for name, promise in report["promises"].items() if promise["status"] == status]


def test_sft_keeps_every_promise(tmp_path):
    report, output = prove(recipe("sft"), tmp_path, "--quick")
    assert of_status(report, "green") == NAMES_OF_PROMISES, output


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_keeps_every_promise(tmp_path, name):
    report, output = prove(recipe(name), tmp_path, *(["--quick"] if name != "dpo" else []))
    assert of_status(report, "green") == NAMES_OF_PROMISES, output


# ============================================================ faults


class Fault(NamedTuple):
    """A wrong recipe, or a wrong `common`.

    Attributes:
        promise: the one that it breaks.
        recipe: the one that is proved.
        file: where it is planted: that recipe, or a file of `common`.
        flags: of the proof, beside `--quick --only PROMISE`.
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
            "(losses * token_weights).sum() * divisor / update_targets",
            by="(losses * token_weights).sum() / token_weights.sum().clamp(min=1)",
        ),
    ),
    "a logged mean of means": Fault(
        "means",
        "sft",
        "common/metrics.py",
        replace(
            "Means.add",
            "torch.stack([total, weights.sum(), smallest, largest])",
            by="torch.stack([total / weights.sum().clamp(min=1), counts.any().double(), smallest, largest])",
        ),
    ),
    "the metric of rank 0": Fault(
        "means",
        "sft",
        "common/metrics.py",
        replace("Means.reduce", "self.accelerator.gather(mine)", by="mine"),
    ),
    "a second condition in the rule for log lines": Fault(
        "log-lines",
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "progress.log_due(args.logging_steps)",
            by="progress.log_due(args.logging_steps) and progress.samples % args.train_batch_size == 0",
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
            "optimizer = optim.adamw(accelerator, parameter_groups, args)",
            by="optimizer = optim.adamw(accelerator, parameter_groups, args)\n"
            "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model("
            "scorer, ['model.score.weight'])",
        ),
    ),
    "random states are not restored": Fault(
        "resume",
        "sft",
        "common/checkpoint.py",
        replace(
            "load",
            "load_engine(run, path / 'engine')",
            by="states = torch.get_rng_state(); load_engine(run, path / 'engine'); torch.set_rng_state(states)",
        ),
    ),
    "a checkpoint is written in place": Fault(
        "resume",
        "sft",
        "common/checkpoint.py",
        together(
            replace("save", "write(run, temporary, final)", by="write(run, final, final)"),
            drop_call("write", "folders.replace"),
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
            replace(
                "main",
                "actor.publish(accelerator, model, policy, tokenizer, folder, dtype=args.save_dtype)",
                by="pass",
            ),
            replace(
                "main",
                "micro_batches = batches.split(accelerator, update_sequences, lengths, "
                "args.micro_train_batch_size, args.micro_train_tokens)",
                by="""
micro_batches = batches.split(accelerator, update_sequences, lengths, args.micro_train_batch_size, args.micro_train_tokens)
actor.publish(accelerator, model, policy, tokenizer, f"{args.output_dir}/actor", dtype=args.save_dtype)
""",
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
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "divisor / update_targets",
            by="divisor / update_targets",
        ),
    ),
    "packed rows see each other's positions": Fault(
        "packed",
        "sft",
        "recipes/sft.py",
        replace("collate", "columns['targets']", by="columns['targets'] if not pack else None"),
    ),
}
# A full update here has as many samples as the argument says.
FAULTS["a short update is divided by the size of a full one"] = Fault(
    "last-update",
    "dpo",
    "recipes/dpo.py",
    replace(
        "main",
        "(losses * weights).sum() * divisor / len(update_rows)",
        by="(losses * weights).sum() * divisor / args.train_batch_size",
    ),
)


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
    report, output = prove(
        file,
        tmp_path,
        *demo(fault, file),
        "--quick",
        "--only",
        fault.promise,
        repository=repository,
    )
    assert of_status(report, "red") == [fault.promise], output
    assert f"RED {fault.promise}: " in output and f"docs/forking.md#{fault.promise}" in output
    # Which metric and update, and by how much: it is not only that a run failed.
    assert "First in " in output or "ended with an error" in output


def demo(fault: Fault, file: Path) -> list[str]:
    return []
