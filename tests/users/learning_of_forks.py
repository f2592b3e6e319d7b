"""Each fork's demo learns as forks/README.md says, and it keeps every promise; DPO's learns with adapters, too.

An hour, so once a week: python -m pytest tests/users/learning_of_forks.py
"""

import re
import shlex

import pytest

import runs
from test_gallery import ON, PROVED
from test_prove import prove

PAGE = (runs.REPOSITORY / "forks/README.md").read_text()
# By name: before and after, and the arguments.
FIGURES = re.findall(r"^\| \[(\w+)\].*\| ([\d.]+), ([\d.]+) \|$", PAGE, re.M)
SETTINGS = {
    name: shlex.split(words)
    for names, flags in re.findall(r"^\| ([a-z_, ]+) \| (`.*|the defaults) \|$", PAGE, re.M)
    for name, words in zip(names.split(", "), [*re.findall(r"`(.*?)`", flags), ""])
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name, before, after", FIGURES)
def test_the_demo_of_a_fork_learns(tmp_path, name, before, after):
    words = [runs.REPOSITORY / word if word.endswith(".yaml") else word for word in SETTINGS[name]]
    output = tmp_path / "out"
    launcher = runs.config_launcher("cpu")
    runs.launch(launcher, runs.forked(name), *words, "--output_dir", output, timeout=1200)
    metric = "eval/scores" if name == "echo" else "eval/exact_match"
    first, *_, last = [line[metric] for line in runs.evaluation_lines(output)]
    assert first == pytest.approx(float(before))
    assert last == pytest.approx(float(after), abs=0.1)  # other processors round differently


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PROVED)
def test_a_fork_keeps_every_promise(name, tmp_path):
    red, output = prove(runs.forked(name), tmp_path, *ON[name].split())
    assert not red, output


@pytest.mark.timeout(1200)
def test_a_demo_learns_with_adapters(tmp_path):
    """DPO, at the learning rate that docs/lora.md gives."""
    words = ["--lora_r", 16, "--learning_rate", 2e-3, "--output_dir", tmp_path]
    runs.launch(runs.config_launcher("cpu"), runs.recipe("dpo"), *words, timeout=1200)
    first, *_, last = [line["eval/exact_match"] for line in runs.evaluation_lines(tmp_path)]
    assert last - first >= 0.15
