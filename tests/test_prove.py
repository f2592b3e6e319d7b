"""`python -m common.prove` is green for every recipe and every fork in docs/, and red for each fault, under its name."""

import ast
import gzip
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from common.prove import __main__ as command
from common.prove import bench, compare, promises
from mutations import copy_repository
from planting import Plant, drop_call, replace, together
from runs import ASSETS, OFFLINE, REPOSITORY, recipe, write_jsonl
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
        "dpo",
        "recipes/dpo.py",
        replace(
            "main",
            "(losses * weights).sum() * divisor / len(update_rows)",
            by="(losses * weights).sum() * divisor / args.train_batch_size",
        ),
    ),
    "the sums of a log line are not emptied": Fault(
        "means",
        "sft",
        "common/metrics.py",
        replace("Means.reduce", "self.sums = {}", by="pass"),
    ),
    "a skipped update is logged with the next one": Fault(
        "overflow",
        "sft",
        "common/metrics.py",
        replace(
            "Metrics.update_done",
            "self.pending.sums = {}",
            by="self.pending.sums = {} if applied else self.pending.sums",
        ),
    ),
    "a skipped update's samples are used again": Fault(
        "overflow",
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "batches.rows_of_update(mixture, args.train_batch_size, args.seed, progress.updates_seen)",
            by="batches.rows_of_update(mixture, args.train_batch_size, args.seed, progress.global_step)",
        ),
    ),
    "old checkpoints are deleted before the next one is written": Fault(
        "resume",
        "sft",
        "common/checkpoint.py",
        replace(
            "save",
            "write(run, temporary, final)",
            by="[shutil.rmtree(path) for path in earlier if run.accelerator.is_main_process]; write(run, temporary, final)",
        ),
    ),
    "samples that a killed run wrote stay": Fault(
        "resume",
        "ppo",
        "common/left_behind.py",
        replace(
            "leave",
            "is_longer(file, size)",
            by="file == metrics and is_longer(file, size)",
        ),
    ),
    "Adam's moments are not restored": Fault(
        "resume",
        "sft",
        "common/checkpoint.py",
        replace(
            "load",
            "load_engine(run, path / 'engine')",
            by="load_engine(run, path / 'engine'); run.optimizer.state.clear()",
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
        "recipes/sft.py",
        replace("main", "args.seed", by="args.seed + accelerator.num_processes"),
    ),
    "packed rows lose their last target": Fault(
        "packed",
        "sft",
        "recipes/sft.py",
        replace(
            "collate",
            "columns['targets']",
            by="[[*row[:-1], row[-1] and not args.packing] for row in columns['targets']]",
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
                "metrics.start_interval()",
                by="metrics.start_interval()\nfactor = 1.0",
            ),
            replace(
                "main",
                "(losses * weights).sum() * divisor / len(update_rows)",
                by="(losses * weights).sum() * factor * divisor / len(update_rows)",
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
            "    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)",
            by="grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)",
        ),
    ),
    "one process alone clips": Fault(
        "split",
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "args.max_grad_norm if args.max_grad_norm > 0 else math.inf",
            by="args.max_grad_norm if accelerator.num_processes == 1 and args.max_grad_norm else math.inf",
        ),
    ),
    "the gradient norm is logged after clipping": Fault(
        "means",
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "metrics.update_done(applied, grad_norm=grad_norm, learning_rate=learning_rate, loss_scale=loss_scale)",
            by="metrics.update_done(applied, grad_norm=min(grad_norm, max_grad_norm), "
            "learning_rate=learning_rate, loss_scale=loss_scale)",
        ),
    ),
    "padding rows count in evaluations": Fault(
        "means",
        "sft",
        "recipes/sft.py",
        replace(
            "evaluate",
            "compare(output, inputs['mask'], weights)",
            by="compare(output, inputs['mask'], torch.ones_like(weights))",
        ),
    ),
    "an evaluation stops after its first micro-batch": Fault(
        "means",
        "sft",
        "recipes/sft.py",
        replace(
            "evaluate",
            "for values, value_weights in logged:\n    means.add(values, value_weights)",
            by="for values, value_weights in logged:\n    means.add(values, value_weights)\nbreak",
        ),
    ),
    "padding tokens count in metrics": Fault(
        "means",
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "metrics.pending.add(values, value_weights)",
            by="metrics.pending.add(values, torch.ones_like(value_weights))",
        ),
    ),
    "evaluation leaves dropout on": Fault(
        "evaluation",
        "sft",
        "recipes/sft.py",
        replace("evaluate", "checks.evaluation_mode(model)", by="torch.no_grad()"),
    ),
    "the model stays in evaluation mode": Fault(
        "evaluation",
        "sft",
        "common/models/checks.py",
        replace("evaluation_mode", "module.training = True", by="pass"),
    ),
    "evaluation draws from the random state of the training": Fault(
        "evaluation",
        "sft",
        "recipes/sft.py",
        replace(
            "evaluate", "all_examples = []", by="all_examples = [] if len(torch.rand(1)) else []"
        ),
    ),
    "the reference has dropout": Fault(
        "evaluation",
        "dpo",
        "recipes/dpo.py",
        replace(
            "main",
            "reference = prepare.frozen(accelerator, reference)",
            by="reference = prepare.frozen(accelerator, reference).train()",
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
                "applied = not accelerator.optimizer_step_was_skipped",
                by="applied = not accelerator.optimizer_step_was_skipped\n"
                "if applied:\n    scheduler.step()\n    learning_rate = scheduler.get_last_lr()[0]",
            ),
        ),
    ),
    "a second condition in the rule for checkpoints": Fault(
        "log-lines",
        "sft",
        "recipes/sft.py",
        replace(
            "main",
            "args.save_steps and progress.due(args.save_steps)",
            by="args.save_steps and progress.due(args.save_steps) "
            "and progress.samples % args.train_batch_size == 0",
        ),
    ),
    "old checkpoints stay": Fault(
        "log-lines",
        "sft",
        "common/checkpoint.py",
        replace(
            "write",
            "folders.replace(temporary, final, run.args.save_total_limit)",
            by="folders.replace(temporary, final)",
        ),
    ),
    "rows that fill no micro-batch are dropped": Fault(
        "last-update",
        "dpo",
        "recipes/dpo.py",
        replace(
            "main",
            "divisor = engine.begin_update(accelerator, model, micro_batches)",
            by="""
full = args.micro_train_batch_size * accelerator.num_processes
update_rows = update_rows[: max(len(update_rows) // full * full, 1)]
micro_batches = batches.split(accelerator, update_rows, lengths, args.micro_train_batch_size, args.micro_train_tokens)
divisor = engine.begin_update(accelerator, model, micro_batches)
""",
        ),
    ),
    "every epoch has the same order": Fault(
        "seed",
        "sft",
        "common/batches.py",
        replace("epoch_order", "np.append(seed, epoch)", by="np.append(seed, 0)"),
    ),
    "the schedule begins anew": Fault(
        "resume",
        "sft",
        "common/checkpoint.py",
        drop_call("load_schedule", "scheduler.load_state_dict"),
    ),
    "the sums of an open line are lost": Fault(
        "resume",
        "sft",
        "common/checkpoint.py",
        drop_call("load_open_sums", "run.metrics.open.load_state"),
    ),
    "all processes resume with the first one's random states": Fault(
        "resume",
        "sft",
        "common/checkpoint.py",
        replace(
            "load",
            "load_engine(run, path / 'engine')",
            by="""
load_engine(run, path / 'engine')
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
            "reference = prepare.frozen(accelerator, reference)",
            by="reference = policy",
        ),
    ),
    "advantages are whitened in each micro-batch": Fault(
        "split",
        "ppo",
        "recipes/ppo.py",
        replace(
            "compare",
            "logps = output['logps']",
            by="logps = output['logps']\n"
            "old = {**old, 'advantages': whiten(old['advantages'], old['mask'])}",
        ),
    ),
    "generation reads its padding": Fault(
        "split",
        "ppo",
        "common/rollout/generation.py",
        replace("mask_of", "padding[:, None]", by="0 * padding[:, None]"),
    ),
    "a skipped update of a rollout is repeated": Fault(
        "overflow",
        "grpo",
        "recipes/grpo.py",
        replace(
            "main",
            "position['update'] += 1",
            by="position['update'] += not accelerator.optimizer_step_was_skipped",
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
    flags = ["--quick", "--only", fault.promise]
    report, output = prove(file, tmp_path, *flags, repository=repository)
    assert of_status(report, "red") == [fault.promise], output
    assert f"RED {fault.promise}: " in output
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
    assert not words & {"ref_name", "ref_logps", "reference_logps", "ref_model_name_or_path"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("base, name", [("dpo", "simpo"), ("sft", "ema")])
def test_a_new_loss_and_a_running_value_keep_every_promise(tmp_path, base, name):
    report, output = prove(fork(tmp_path, base, name), tmp_path)  # on every engine
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
    flags = ["--model_name_or_path", ASSETS / "model", "--dataset_name", data, "--quick"]
    report, output = prove(file, tmp_path, *flags)
    # KTO's rows stand alone: there are no prompts to share.
    assert of_status(report, "unchecked") == ["packed"], output
    assert not of_status(report, "red"), output


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_new_reward_keeps_every_promise(tmp_path):
    fork(tmp_path, "", "rewards")
    functions = ["my_rewards:digits", "my_rewards:brief"]
    flags = ["--reward_function", *functions, "--reward_weights", 1, 0.2, "--quick"]
    report, output = prove(recipe("grpo"), tmp_path, *flags)
    assert of_status(report, "green") == NAMES_OF_PROMISES, output


@pytest.mark.slow
def test_an_average_that_a_resume_begins_anew_is_red(tmp_path):
    """What `Run.own` is for."""
    file = fork(tmp_path, "sft", "ema")
    text = file.read_text()
    kept = "    checkpoint.resume(run)\n"
    lost = kept + (
        "    if not accelerator.is_main_process or args.resume != 'never':\n"
        "        run.own = {n: p.float().clone() for n, p in shards.parts_of(policy).items()}\n"
    )
    assert text.count(kept) == 1
    file.write_text(text.replace(kept, lost))
    report, output = prove(file, tmp_path, "--quick", "--only", "resume")
    assert of_status(report, "red") == ["resume"] and "ema, most in" in output, output


# ============================================================ the command


@pytest.mark.slow
def test_a_fork_without_a_flag_is_told_what_could_not_be_checked(tmp_path):
    text = recipe("sft").read_text()
    flag = re.search(r"    weight_decay: float = HfArg\(.*?\)\n", text)[0]
    file = tmp_path / "my_sft.py"
    file.write_text(text.replace(flag, "").replace("args.weight_decay", "0.0"))
    report, output = prove(file, tmp_path, "--quick", "--only", "still", "--only", "last-update")
    assert of_status(report, "unchecked") == ["still"] and of_status(report, "red") == [], output
    assert re.search(r"^- +still +the recipe has no --weight_decay", output, re.M), output


@pytest.mark.slow
def test_rows_that_cannot_be_used_make_nothing_red(tmp_path):
    """Of the first 33 rows 13 can be used: they are one update an epoch."""
    rows = [json.loads(line) for line in (ASSETS / "sft_train.jsonl").read_text().splitlines()[:60]]
    unanswered = {
        **rows[0],
        "messages": [*rows[0]["messages"][:-1], {"role": "assistant", "content": ""}],
    }
    data = write_jsonl(tmp_path / "rows.jsonl", [unanswered] * 20 + rows)
    flags = ["--model_name_or_path", ASSETS / "model", "--dataset_name", data, "--quick"]
    flags += ["--only", "seed", "--only", "last-update"]
    report, output = prove(recipe("sft"), tmp_path, *flags)
    assert of_status(report, "green") == ["seed"] and not of_status(report, "red"), output
    assert "cannot be used: no usable row: 6 left out (empty answer)" in output


@pytest.mark.slow
def test_an_overflow_with_adapters_leaves_no_trace(tmp_path):
    report, output = prove(recipe("dpo"), tmp_path, "--lora_r", 4, "--quick", "--only", "overflow")
    assert of_status(report, "green") == ["overflow"], output


@pytest.mark.slow
def test_a_recipe_that_does_not_start_says_why(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "common.prove", recipe("sft"), "--learning_rat", "1"],
        cwd=tmp_path,
        env={**os.environ, **OFFLINE, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "did you mean --learning_rate?" in result.stderr and "Traceback" not in result.stderr


def test_the_promises_are_listed_and_explained(capsys):
    assert command.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    page = (REPOSITORY / "docs/forking.md").read_text()
    assert listed == NAMES_OF_PROMISES == re.findall(r"^### ([a-z-]+)$", page, re.M)
    for promise in promises.PROMISES:
        assert promise.docs == f"docs/forking.md#{promise.name}"


@pytest.mark.parametrize(
    "words, said",
    [(["--only", "speed", "x.py"], "--only speed: no such promise"), (["x.py"], "no such file")],
)
def test_what_cannot_be_proved_is_refused(capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def judged(*steps) -> tuple[str, str]:
    """Status and table of a promise whose check yields each difference and raises each error."""

    def check(_):
        for step in steps:
            if isinstance(step, Exception):
                raise step
            yield promises.Check(f"of {step.where}", step)

    outcome = command.judge(promises.Promise("means", "says", "docs", check), None)
    return outcome.status, command.table([outcome]) + command.explain([outcome])


def test_what_was_measured_before_a_run_fails_is_told():
    good, bad = compare.Difference(0, 1, "good"), compare.Difference(2, 1, "bad")
    failed, missing = bench.RunFailed("KeyError: 'loss'"), bench.Unchecked("no --seed")
    assert judged(good, good)[0] == "green"

    status, said = judged(good, bad, failed)
    assert status == "red"
    assert re.search(r"^green +means +of good", said, re.M)
    assert re.search(r"^RED +means +of bad", said, re.M)
    assert re.search(r"^RED +means +a run failed", said, re.M)
    assert "off by 2, bound 1. First in bad" in said and "    KeyError: 'loss'" in said
    assert judged(good, failed)[0] == "red"

    status, said = judged(good, missing)
    assert status == "unchecked"
    assert re.search(r"^green +means +of good", said, re.M)
    assert re.search(r"^- +means +no --seed", said, re.M)
    status, said = judged(bad, missing)
    assert status == "red" and re.search(r"^- +means +no --seed", said, re.M)


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
    assert bench.end_of(console).splitlines()[-1] == "this is wrong"


def lines_with(**changes) -> list[dict]:
    """Three log lines, `loss_1=2.1` being the loss of the second one."""
    made = [{"global_step": step, "loss": 2.0, "logps/x": -50.0} for step in (1, 2, 3)]
    for place, value in changes.items():
        tag, number = place.split("_")
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
    ],
)
def test_bounds_of_log_lines(changes, exact, green):
    assert compare.of_lines(lines_with(), lines_with(**changes), exact=exact).green == green


def test_the_first_line_and_metric_beyond_its_bound_is_named():
    found = compare.of_lines(lines_with(), lines_with(loss_1=2.1, loss_2=3.0))
    assert found.where == "loss, update 2: 2, 2.1"
    assert found.measured == pytest.approx(0.1)
    assert "3 lines, 2" in compare.of_lines(lines_with(), lines_with()[:2]).where


@pytest.mark.parametrize(
    "rates, green",
    [
        ([0.3, 0.2, 0.1], True),
        ([0.2, 0.1, 0.0], False),  # those of the next update
        ([0.3, 0.25, 0.2], False),  # of twice as many updates
    ],
)
def test_learning_rates_of_a_linear_schedule(tmp_path, rates, green):
    lines = [
        {"global_step": step, "learning_rate": rate} for step, rate in enumerate(rates, start=1)
    ]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    made = bench.Bench(Path("x.py"), [], tmp_path, quick=True)
    made.arguments = {"lr_scheduler_type": "linear", "warmup_steps": 0}
    (check,) = promises.linear_schedule(made, bench.Finished("", tmp_path, ""))
    assert check.difference.green == green
    made.arguments = {}  # a fork with a schedule of its own
    assert promises.linear_schedule(made, bench.Finished("", tmp_path, "")) == []


@pytest.mark.parametrize(
    "losses, expected",
    [
        ([1.0, 2.0, 2.0, 1.0], [True]),
        ([1.0, 2.0, 1.0, 2.0], [False]),
        ([1.0, 1.0], []),  # an epoch is one update
    ],
)
def test_epochs_have_orders_of_their_own(tmp_path, losses, expected):
    lines = [{"global_step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    checks = promises.of_epochs(bench.Finished("", tmp_path, ""))
    assert [check.difference.green for check in checks] == expected


def test_rows_that_cannot_be_used_are_not_expected(tmp_path):
    console = (
        "data /x/train_33_0.jsonl: 20 usable rows; 13 left out: empty answer\n"
        "data /x/held_out_5_0.jsonl: 4 usable rows\n"
    )
    for samples, wrong in ((40, 0), (33, 7)):
        lines = [{"global_step": 4, "samples": samples}]
        write_jsonl(tmp_path / "metrics.jsonl", lines)
        assert promises.of_counts(bench.Finished("", tmp_path, console)).measured == wrong


def test_weights_are_compared_relative_to_their_norm():
    one = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    other = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0001])}
    found = compare.of_weights(one, other, "actor", exact=False)
    assert found.measured == pytest.approx(2e-5, rel=1e-2) and not found.green
    assert found.where == "actor, most in b"
    assert not compare.of_weights(one, {"a": one["a"]}, "actor", exact=False).green


def test_rows_of_one_length_become_uneven():
    say = lambda text: [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": text}]
    even = [{"messages": say(text)} for text in ("12", "34", "56", "78")]
    found = [row["messages"] for row in bench.uneven(even)]
    assert found == [say(text) for text in ("12", "3434", "565656", "78")]
    asked = [{"prompt": say("")[:1], "answer": "2"} for _ in range(4)]
    assert [row["prompt"][0]["content"] for row in bench.uneven(asked)] == [
        "1+1",
        "1+11+1",
        "1+1",
        "1+1",
    ]
    of_many_lengths = [{"messages": say("1" * number)} for number in range(1, 6)]
    assert bench.uneven(of_many_lengths) == of_many_lengths
