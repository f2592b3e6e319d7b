"""A bench for the files that show more than test_recipe.py."""

import functools
import json

import pytest

from contracts.proof.bench import Bench
from recipes import RECIPES
from runs import ASSETS, recipe, tiny_llama


@pytest.fixture(scope="module")
def bench_of(tmp_path_factory):
    """`recipe, further arguments -> Bench`, of a tiny random model, whose responses end at many tokens."""
    folder = tmp_path_factory.mktemp("benches")
    file = tiny_llama(folder / "model") / "generation_config.json"
    ends = {"eos_token_id": [1, *range(20, 60)]}
    file.write_text(json.dumps(json.loads(file.read_text()) | ends))

    @functools.cache
    def bench_of(name: str, *argv) -> Bench:
        (folder / name).mkdir()
        data = ASSETS / RECIPES[name].held_out_file
        own = ["--model_name_or_path", folder / "model", "--dataset_name", data]
        return Bench(recipe(name), [str(word) for word in (*own, *argv)], folder / name, quick=True)

    return bench_of
