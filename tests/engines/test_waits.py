"""How often the host waits for the device within an update: no more often the more micro-batches it has.

A wait leaves a GPU without work until the host has answered, so it costs most where it is repeated. What one update
costs once (a check of its losses, its gradient norm) may stay. There is no GPU here: see pretended_device.py.
"""

import gzip
import itertools
import sys

import numpy as np
import pytest
import torch

import pretended_device
from common import batches, engine
from common.actor import Actor
from recipes import RECIPES, load
from runs import ASSETS, recipe, tiny_llama

ROWS = 16
PER_UPDATE = 8  # waits that an update may have, however many micro-batches it consists of
CASES = {
    f"{name} {case}": (name, flags)
    for name, of_recipe in RECIPES.items()
    for case, flags in of_recipe.waits.items()
}


def unequal(prompts, responses, **columns):
    """Scores by which no group of responses is left out."""
    return [float(number) for number in range(len(responses))]


class Ended(Exception):
    pass


def waits_of_last_update(monkeypatch, tmp_path, case: str, micro_batch_size: int) -> list[str]:
    """What the host waits for in the last update of a run of two, `ROWS` samples each."""
    name, settings = CASES[case]
    folder = tmp_path / f"{micro_batch_size}"
    folder.mkdir()
    data = folder / "rows.jsonl"
    source = ASSETS / RECIPES[name].train_file
    with (gzip.open if source.suffix == ".gz" else open)(source, "rt") as file:
        data.write_text("".join(itertools.islice(file, 2 * ROWS)))
    flags = [
        "--model_name_or_path", tiny_llama(folder / "model"), "--dataset_name", data, "--output_dir", folder / "run",
        "--train_batch_size", ROWS, "--micro_train_batch_size", micro_batch_size, "--max_steps", 2,
        "--max_length", 64, "--report_to", "none", "--logging_steps", 1, *RECIPES[name].device_flags, *settings,
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", [str(recipe(name)), *map(str, flags)])
    module = load(name)
    updates = []

    with monkeypatch.context() as patch, pretended_device.device(patch) as device:

        def begin_update(accelerator, micro_batches, original=engine.begin_update):
            updates.append(len(micro_batches))
            device.waits.clear()
            return original(accelerator, micro_batches)

        def save(*args, **kwargs):
            raise Ended

        patch.setattr(engine, "begin_update", begin_update)
        patch.setattr(Actor, "save", save)
        with pytest.raises(Ended):
            module.main()
        assert updates == [ROWS // micro_batch_size] * 2
        return list(device.waits)


@pytest.mark.parametrize("case", CASES)
def test_no_micro_batch_waits(case, tmp_path, monkeypatch):
    few = waits_of_last_update(monkeypatch, tmp_path, case, ROWS // 2)
    many = waits_of_last_update(monkeypatch, tmp_path, case, ROWS // 4)
    assert len(few) == len(many), "\n".join(many)
    assert len(few) <= PER_UPDATE, "\n".join(few)


def test_the_pretended_device_notes_each_wait(monkeypatch):
    """What a GPU waits for is counted; what it does not wait for is not."""
    with pretended_device.device(monkeypatch) as device:
        there = torch.arange(6.0).to(pretended_device.DEVICE).requires_grad_()
        mask = there > 2
        places = batches.send([3, 4, 5], pretended_device.DEVICE)

        def waits(action) -> int:
            before = len(device.waits)
            action()
            return len(device.waits) - before

        free = [
            lambda: there.index_select(0, places).sum().backward(),
            lambda: there.detach().index_copy(
                0, places, torch.ones(3, device=pretended_device.DEVICE)
            ),
            lambda: torch.where(mask, there, 0.0).sum() * 3 / 7,
            lambda: batches.send(np.ones(3), pretended_device.DEVICE),
        ]
        costly = [
            lambda: float(there.sum()),
            lambda: bool(mask.all()),
            lambda: there.tolist(),
            lambda: there.detach().cpu(),
            lambda: there[mask],
            lambda: there.masked_select(mask),
            lambda: mask.nonzero(),
            lambda: torch.ones(3).to(pretended_device.DEVICE),
            lambda: torch.ones(3).to(pretended_device.DEVICE, non_blocking=True),
            lambda: torch.ones(3).pin_memory().to(pretended_device.DEVICE),
            lambda: torch.tensor([1.0], device=pretended_device.DEVICE),
            lambda: torch.zeros_like(there).masked_scatter(mask, there).sum().backward(),
        ]
        assert [waits(action) for action in free] == [0] * len(free)
        assert [waits(action) for action in costly] == [1] * len(costly)
        with pytest.raises(AssertionError, match="a tensor of the host among the device's"):
            there + torch.ones(6)
        # Half of them is read once; `masked_scatter` takes the first three.
        assert there.grad.tolist() == [1, 1, 1, 1, 1, 1]
