"""The files of forks/: they fit their recipes, their table is true, and the recipes that they make keep the promises."""

import itertools
import re
import subprocess
import sys

import pytest

from preference_recipes import __main__
from preference_recipes.tools import forks
from runs import ASSETS, REPOSITORY, forked, refuses
from test_prove import prove

README = (REPOSITORY / "forks/README.md").read_text()
ROWS = re.findall(r"^\| \[(\w+)\]\(\w+\.diff\) \| (.*) \|$", README, re.M)
CARDS = f"--model_name_or_path {ASSETS}/model --dataset_name {ASSETS}/cards_train.jsonl"
CARDS += f" --eval_dataset_name {ASSETS}/cards_eval.jsonl --max_turns 2"
# What turns each one on.
ON = {
    "adaptive_kl": "--kl_target 0.5",
    "curriculum": "--curriculum --advantage_std group",
    "dapo": "--refill_rounds 1 --overlong_buffer 2",
    "dpo_norm": "--loss_type sigmoid_norm --beta 5",
    "dppo": "--loss_type dppo_kl --clip_range 0.1 --clip_range_high 0.1",
    "dual_clip": "--dual_clip 1.05",
    "echo": f"--echo_coef 0.1 --drop_equal_groups false --environment assets.card:Card {CARDS}",
    "ema": "--ema_decay 0.5",
    "gdpo": "--reward_scaling each",
    "gkd": "--on_policy_share 0.5 --columns completion=answer",
    "maxrl": "--advantage_std mean",
    "muon": "--optimizer muon",
    "off_policy": "--off_policy_limit 0.01",
    "sapo": "--loss_type sapo --average sequence",
    "sdft": f"--model_name_or_path {ASSETS}/model --dataset_name {ASSETS}/prompts_train.jsonl "
    "--teacher_prompt answer --ema_decay 0.5",
    "sdpo": "--sdpo_weight 0.3 --sdpo_teacher ema --ema_decay 0.5",
}
# The proof samples three responses a prompt, gkd takes one: test_distill.py runs it on the engines.
# Muon refuses engines that cut matrices: test_optim.py runs it on DDP.
PROVED = sorted(ON.keys() - {"gkd", "muon"})
# A checkpoint holds what these add.
STATEFUL = {"adaptive_kl", "curriculum", "ema", "sdft", "sdpo"}


def test_the_table_names_every_fork_as_it_is():
    assert [name for name, _ in ROWS] == forks.names() == sorted(ON)
    for name, row in ROWS:
        paper, recipe, changed, *_ = row.split(" | ")
        head, _, hunks = (forks.FORKS / f"{name}.diff").read_text().partition("\n--- ")
        assert recipe == forks.recipe_of(name), name
        assert int(changed) == len(re.findall(r"^[-+]", hunks, re.M)) - 1, name  # +++ is no change
        assert len(head.splitlines()) <= 6 and f"Changes recipes/{recipe}.py: " in head
        assert all(number in head for number in re.findall(r"\d{4}\.\d{5}", paper)), name


@pytest.mark.parametrize("name", sorted(ON))
def test_a_fork_fits_its_recipe_line_by_line(name, tmp_path):
    recipe = REPOSITORY / f"recipes/{forks.recipe_of(name)}.py"
    words = ["patch", "--fuzz=0", "--verbose", "-o", tmp_path / "out.py", recipe]
    said = subprocess.run([*words, forks.FORKS / f"{name}.diff"], capture_output=True, text=True)
    assert said.returncode == 0 and "offset" not in said.stdout, said.stdout
    text = (tmp_path / "out.py").read_text()
    assert text == forked(name).read_text()
    assert not [line for line in text.splitlines() if len(line) > 100]


def test_the_command_ends_with_what_is_refused(monkeypatch, tmp_path):
    for words, said in (
        (["export", "none", "out"], "none is not a whole checkpoint: "),
        (["export", "none", "out", "--merge"], "none is no folder here, and not on the hub: "),
    ):
        monkeypatch.setattr(sys, "argv", ["preference-recipes", *words])
        with pytest.raises(SystemExit, match=said):
            __main__.main()


def test_which_forks_go_together_is_as_the_page_says():
    """In the order of the alphabet."""
    section = README.partition("## What goes together")[2]
    apart = re.findall(r"^\| (\w+) \| (\w+) \|$", section, re.M)[1:]
    found = []
    for one, two in itertools.combinations(forks.names(), 2):
        if forks.recipe_of(one) == forks.recipe_of(two):
            try:
                forks.patched(forks.recipe_of(one), [one, two])
            except ValueError as refusal:
                assert "both change the same lines" in str(refusal)
                found.append((one, two))
    assert found == apart


def test_what_does_not_fit_is_said_in_a_line():
    said = lambda recipe, *names: lambda: forks.patched(recipe, list(names))
    refuses("sapo changes recipes/grpo.py, not recipes/dpo.py", call=said("dpo", "sapo"))
    refuses("'mapo' is no fork; there are adaptive_kl, ", call=said("grpo", "mapo"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PROVED)
def test_a_fork_keeps_its_promises(name, tmp_path):
    only = ["split", "resume"] if name in STATEFUL else ["split"]  # all: learning_of_forks.py
    red, output = prove(forked(name), tmp_path, *ON[name].split(), only=only)
    assert not red, output
