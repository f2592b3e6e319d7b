"""The first losses of each recipe, as they were when golden.json was written: an upgrade that moves a number is seen.

When a number should move, write the file again and look at the difference:

    PYTHONPATH=tests python tests/users/test_golden.py

The settings are those of the demos, in fp32, without evaluation. Those that sample have an eighth of the demo's
batches: rounding may change which token is drawn. CPUs round differently: by up to 5e-6 of a number's size.
"""

import json
import tempfile
from pathlib import Path

import pytest
import yaml

from recipes import RECIPES
from runs import ASSETS, first_rows, flags_of, launch, recipe, training_lines

STORED = Path(__file__).with_name("golden.json")
TAGS = ["loss", "grad_norm"]
ROWS = 640  # of the data: what five updates of the largest batch take


def first_updates(name: str, folder: Path) -> dict[str, list[float]]:
    """Loss and gradient norm of a recipe's first five updates."""
    demo = yaml.safe_load((ASSETS / f"{name}.yaml").read_text().replace("{assets}", str(ASSETS)))
    settings = {flag: value for flag, value in demo.items() if not flag.startswith("eval_")}
    for flag in settings:
        if flag.endswith("batch_size"):
            settings[flag] //= 8 if RECIPES[name].generates else 1

    rows = first_rows(folder / f"{name}.jsonl", Path(demo["dataset_name"]), ROWS)
    settings |= {"dataset_name": rows, "output_dir": folder / name, "max_steps": 5}
    launch([], recipe(name), *flags_of(settings | {"report_to": "none"}))
    lines = training_lines(folder / name)
    return {tag: [line[tag] for line in lines] for tag in TAGS}


@pytest.mark.parametrize("name", RECIPES)
def test_the_first_updates_are_as_they_were(name, tmp_path):
    stored = json.loads(STORED.read_text())[name]
    found = first_updates(name, tmp_path)
    for tag in TAGS:
        assert len(found[tag]) == 5
        assert found[tag] == pytest.approx(stored[tag], rel=1e-4, abs=1e-6), tag


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = {name: first_updates(name, Path(folder)) for name in RECIPES}
        STORED.write_text(json.dumps(found, indent=1) + "\n")
