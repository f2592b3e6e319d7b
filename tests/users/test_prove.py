"""The proof, contracts/test_recipe.py, is green for forks, and red for each fault, under its name."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from runs import REPOSITORY, copy_repository, forked, launch, recipe

PYTEST = Path(pytest.__file__).with_name("__main__.py")
PROOF = (REPOSITORY / "tests/contracts/test_recipe.py").read_text()
PROMISES = [name.replace("_", "-") for name in re.findall(r"^def test_(\w+)", PROOF, re.M)]


def prove(
    file: Path, folder: Path, *arguments, only=(), repository: Path = REPOSITORY
) -> tuple[dict[str, str], str]:
    """What became of each promise, `green`, `red` or `unchecked`, and what was printed.

    Args:
        arguments: the recipe's.
        only: the promises that are checked; none: all.
    """
    report = folder / "report.xml"
    proof = repository / "tests/contracts/test_recipe.py"
    tests = [f"{proof}::test_{name.replace('-', '_')}" for name in only] or [str(proof)]
    words = ["--quick", "--recipe", shlex.join(map(str, [file, *arguments]))]
    written = ["--basetemp", folder / "runs", "--junit-xml", report, "-p", "no:cacheprovider"]
    how = dict(cwd=folder, env={"PYTHONPATH": str(repository)}, check=False, timeout=1200)
    result = launch([], PYTEST, *tests, *words, *written, "-raP", **how)
    output = result.stdout
    assert report.exists(), output
    statuses = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = re.sub(r"^test_|\[.*", "", case.get("name")).replace("_", "-")
        is_red = case.find("failure") is not None or case.find("error") is not None
        is_unchecked = case.find("skipped") is not None
        statuses[name] = "red" if is_red else "unchecked" if is_unchecked else "green"
    assert result.returncode == (1 if "red" in statuses.values() else 0), output
    return statuses, output


# ============================================================ faults


class Fault(NamedTuple):
    """A wrong recipe, or a wrong `common`.

    Attributes:
        promise: the one that it breaks.
        file: where it is planted: the recipe that is proved, or a file of `common`, with SFT.
        edits: pieces of that file, which it has once, and what takes their place.
    """

    promise: str
    file: str
    edits: dict[str, str]


LOSS_OF_SFT = "(losses * token_weights).sum() * update.engine_divisor / n_targets"
STEP_OF_SCHEDULE = "        if applied:\n            scheduler.step()\n"
LOADS_SCHEDULE = 'self.scheduler.load_state_dict(state["scheduler"])'
ZERO_GRAD = "optimizer.zero_grad()\n"


def shrink_weights(factor: str) -> str:
    """Code after `zero_grad`, in the loop of a recipe."""
    return f"""{ZERO_GRAD}
                with torch.no_grad():
                    for parameter in policy.parameters():
                        parameter.mul_({factor})
"""


FAULTS = {
    "a_mean_of_means": Fault(
        "split",
        "recipes/sft.py",
        {LOSS_OF_SFT: "(losses * token_weights).sum() / token_weights.sum().clamp(min=1)"},
    ),
    "weights_are_changed_past_the_engine": Fault(
        "engines", "recipes/sft.py", {ZERO_GRAD: shrink_weights("0.999")}
    ),
    "answers_that_share_a_prompt_lose_their_last_target": Fault(
        "packed",
        "recipes/dpo.py",
        {
            'columns["rejected_loss_mask"]': "[[*row[:-1], row[-1] and not packer.share] "
            'for row in columns["rejected_loss_mask"]]'
        },
    ),
    "a_short_update_is_divided_by_the_size_of_a_full_one": Fault(
        "last-update",
        "recipes/dpo.py",
        {
            "update.engine_divisor / update.n_samples": "update.engine_divisor / args.train_batch_size"
        },
    ),
    **{
        f"the_mean_over_a_micro_batch_in_{name}": Fault(
            "last-update", f"recipes/{name}.py", {f"loss = {loss}": "loss = losses.mean()"}
        )
        for name, loss in {
            "dpo": "(losses * sample_weights).sum() * update.engine_divisor / update.n_samples",
            "reward": "(losses * sample_weights).sum() * update.engine_divisor / update.n_samples",
            "kto": "(losses * answer_weights).sum() * update.engine_divisor / n_answers",
            "sft": LOSS_OF_SFT,
            "grpo": "(losses * weights).sum() * update.engine_divisor / total_weight",
        }.items()
    },
    "the_metric_of_rank_0": Fault(
        "means", "common/metrics.py", {"self.accelerator.gather(mine[None])": "mine[None]"}
    ),
    "a_skipped_update_is_recorded": Fault(
        "values", "common/values.py", {"if pending and applied:": "if pending:"}
    ),
    "the_learning_rate_is_logged_an_update_late": Fault(
        "log-lines",
        "recipes/sft.py",
        {
            STEP_OF_SCHEDULE: "",
            "        rate = scheduler": f"{STEP_OF_SCHEDULE}        rate = scheduler",
        },
    ),
    "evaluation_leaves_dropout_on": Fault(
        "evaluation",
        "recipes/sft.py",
        {"prepare.evaluation_mode(model)": "torch.no_grad()"},
    ),
    "a_checkpoint_is_written_in_place": Fault(
        "resume",
        "common/checkpoint.py",
        {
            'temporary = final.with_name(f".{final.name}.writing")': "temporary = final",
            "folders.replace(temporary, final)": "pass",
        },
    ),
    "all_processes_resume_with_the_random_states_of_the_first": Fault(
        "resume",
        "common/checkpoint.py",
        {
            LOADS_SCHEDULE: f"""{LOADS_SCHEDULE}
        from accelerate.utils import broadcast
        torch.set_rng_state(broadcast(torch.get_rng_state()))
"""
        },
    ),
    "the_schedule_goes_on_with_a_skipped_update": Fault(
        "overflow", "recipes/sft.py", {STEP_OF_SCHEDULE: "        scheduler.step()\n"}
    ),
    "the_seed_of_the_data_order_is_none": Fault(
        "seed",
        "common/batches.py",
        {"np.random.default_rng(np.append(seed, epoch))": "np.random.default_rng()"},
    ),
    "a_learning_rate_of_0_with_weight_decay": Fault(
        "still", "recipes/sft.py", {ZERO_GRAD: shrink_weights("1 - 1e-6")}
    ),
    "the_actor_is_saved_before_the_last_update": Fault(
        "actor",
        "recipes/sft.py",
        {
            "    saver.save()\n": "",
            "update = run.begin_update(train)": "update = run.begin_update(train); run.global_step and saver.save()",
        },
    ),
    "the_reference_learns": Fault(
        "actor",
        "recipes/dpo.py",
        {
            "reference = Reference(accelerator, args, tokenizer, model)": "reference = Reference("
            "accelerator, args, tokenizer, model); reference.model = model"
        },
    ),
}


def with_fault(fault: Fault) -> str:
    """The file of a fault with the fault in it."""
    text = (REPOSITORY / fault.file).read_text(encoding="utf-8")
    for piece, other in fault.edits.items():
        assert text.count(piece) == 1, f"{fault.file} has this not once: {piece}"
        text = text.replace(piece, other)
    return text


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fits_the_code(name):
    compile(with_fault(FAULTS[name]), name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_red_under_its_name(tmp_path, name):
    fault = FAULTS[name]
    repository = REPOSITORY
    file = tmp_path / "my_recipe.py"  # anywhere on the disk
    if fault.file.startswith("common/"):
        repository = tmp_path / "repository"
        copy_repository(repository)
        (repository / fault.file).write_text(with_fault(fault))
        file = repository / "recipes/sft.py"
    else:
        file.write_text(with_fault(fault))
    report, output = prove(file, tmp_path, only=[fault.promise], repository=repository)
    assert report == {fault.promise: "red"}, output
    # Which metric or model, and by how much: not only that a run failed.
    assert re.search(r"bound \S+|checkpoints whole", output), output


def test_each_promise_has_a_fault_and_is_explained():
    page = (REPOSITORY / "docs/forking.md").read_text()
    assert sorted(re.findall(r"^### ([a-z-]+)$", page, re.M)) == sorted(PROMISES)
    assert {fault.promise for fault in FAULTS.values()} == set(PROMISES)


# ============================================================ forks


@pytest.mark.slow
def test_an_average_that_a_resume_starts_again_is_red(tmp_path):
    """What is not handed to `Checkpoint` is not in one."""
    text = forked("ema").read_text()
    kept = ", average=average"
    assert text.count(kept) == 1
    file = tmp_path / "my_ema.py"
    file.write_text(text.replace(kept, ""))
    report, output = prove(file, tmp_path, only=["resume"])
    assert report == {"resume": "red"} and "ema, most in" in output, output


@pytest.mark.slow
def test_a_recipe_that_does_not_start_says_why(tmp_path):
    report, output = prove(recipe("sft"), tmp_path, "--learning_rat", 1, only=["split"])
    assert report == {"split": "red"}
    assert "unrecognized arguments: --learning_rat 1" in output and "Traceback" not in output
