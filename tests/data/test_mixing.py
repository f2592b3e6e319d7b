"""Several data sets with weights: which rows an epoch takes, in what order, and that a resume goes on in it."""

import collections
import runpy

import datasets
import numpy as np
import pytest

from common.batches import Mixture, rows_of_update
from preference_recipes.data import dataset
from preference_recipes.data.conversion import Converter
from runs import recipe, refuses, write_jsonl

sft = runpy.run_path(str(recipe("sft")))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def epochs_of(mixture: Mixture, n: int, batch: int = 4, seed: int = 3) -> list[list[int]]:
    """The rows of the first epochs, in the order of their updates."""
    per_epoch = -(-mixture.samples // batch)
    return [
        np.concatenate(
            [rows_of_update(mixture, batch, seed, epoch * per_epoch + k) for k in range(per_epoch)]
        ).tolist()
        for epoch in range(n)
    ]


def test_sets_of_weight_one_are_one_set():
    """Bit for bit the order of a run on one file that holds them all."""
    for index in range(9):
        expected = rows_of_update(30, 4, 7, index).tolist()
        assert rows_of_update(Mixture((10, 20), (1.0, 1.0)), 4, 7, index).tolist() == expected
        assert rows_of_update(Mixture((30,), (1.0,)), 4, 7, index).tolist() == expected


def test_whole_weights_take_each_row_so_often_in_every_epoch():
    mixture = Mixture((5, 3), (2.0, 1.0))
    assert (
        mixture.samples == 13
        and "a 5 rows x 2 = 10; b 3 rows x 1 = 3; 13 samples" in mixture.describe(["a", "b"])
    )
    epochs = epochs_of(mixture, 3)
    assert all(sorted(epoch) == sorted([*range(5), *range(8)]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert (
        epochs_of(mixture, 1, batch=13)[0] == epochs[0]
    )  # the cut alone depends on the batch size
    assert epochs_of(mixture, 1, seed=4)[0] != epochs[0]


def test_half_of_a_set_and_the_other_half_in_the_next_epoch():
    mixture = Mixture((4, 10), (1.0, 0.5))
    epochs = epochs_of(mixture, 4)
    halves = [{row for row in epoch if row >= 4} for epoch in epochs]
    assert [len(epoch) for epoch in epochs] == [9] * 4 and [len(half) for half in halves] == [5] * 4
    assert halves[0] | halves[1] == set(range(4, 14)) == halves[2] | halves[3]
    assert all(set(range(4)) <= set(epoch) for epoch in epochs)
    assert halves[0] not in (
        halves[2],
        halves[3],
        set(range(4, 9)),
    )  # drawn anew, and not in the file's order


@pytest.mark.parametrize("size, weight", [(7, 1.5), (10, 0.3), (3, 0.5), (9, 2.25), (5, 0.01)])
def test_no_row_comes_twice_before_every_other_came_once(size, weight):
    mixture = Mixture((size,), (weight,))
    assert mixture.samples == max(round(size * weight), 1)
    counts = collections.Counter()
    for epoch in epochs_of(mixture, 12):
        assert len(epoch) == mixture.samples
        counts.update(epoch)
        assert max(counts.values()) - min(counts[row] for row in range(size)) <= 1


def test_a_mixture_of_files(accelerator, tokenizer, tmp_path, capsys):
    one = str(
        write_jsonl(tmp_path / "one.jsonl", [{"prompt": "a", "completion": "b", "answer": "b"}] * 2)
    )
    two = str(write_jsonl(tmp_path / "two.jsonl", [{"text": "c"}, {"text": ""}, {"text": "d"}]))

    settings = dict(max_length=99, loss_on="assistant")
    converter = Converter(sft["sft_row"], tokenizer, {}, settings)

    def load(names, weights=None):
        return dataset.load_mixture(accelerator, names, weights, "train", converter)

    rows, mixture = load([one, two], [2, 0.5])
    assert mixture == Mixture((2, 2), (2, 0.5)) and mixture.samples == 5
    assert [tokenizer.decode(ids) for ids in rows["input_ids"]] == ["ab<|end|>"] * 2 + [
        "c<|end|>",
        "d<|end|>",
    ]
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == [f"reading {one} ...", f"data {one}: 2 usable rows", f"reading {two} ..."]
    assert said[3].startswith(f"data {two}: 2 usable rows; 1 of 3 left out")
    assert said[4] == f"mixed: {one} 2 rows x 2 = 4; {two} 2 rows x 0.5 = 1; 5 samples an epoch"
    assert load([one, two], [2, 0.5])[0]._fingerprint == rows._fingerprint
    others = [
        load([one])[0],
        load([one, two])[0],
        load([two, one], [2, 0.5])[0],
        load([one, two], [2, 1])[0],
        load([one], [2])[0],
    ]
    assert len({rows._fingerprint, *(other._fingerprint for other in others)}) == 6
    alone = dataset.load(accelerator, one, "train", converter)
    for weights in (None, [1.0]):
        assert load([one], weights)[0]._fingerprint == alone._fingerprint
    for weights in ([1], [1, 2, 3], [1, 0], [1, -1], [1, float("nan")], [1, float("inf")]):
        refuses(
            "--dataset_weights",
            "2 numbers above 0",
            call=lambda weights=weights: load([one, two], weights),
        )
