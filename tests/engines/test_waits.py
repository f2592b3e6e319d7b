"""Whole runs on a pretended device, see pretended_device.py: when the host waits for it, and what never meets.

A wait leaves a GPU without work, so it costs most where it is repeated: what one update costs once may stay.
"""

import sys

import pytest
from transformers import LlamaConfig, LlamaForSequenceClassification

import pretended_device
from common import engine
from common.actor import ActorSaver
from recipes import RECIPES, load
from runs import ASSETS, evaluation_lines, first_rows, recipe, short_run, tiny_llama

ROWS = 16
PER_UPDATE = 8  # waits that an update may have, however many micro-batches it consists of


def unequal(prompts, responses, **columns):
    """Scores by which no group of responses is left out."""
    return [float(number) for number in range(len(responses))]


class Ended(Exception):
    pass


def flags_of_run(name: str, folder, micro_batch_size: int) -> list:
    """Those of a run of two updates, evaluated before and after them."""
    folder.mkdir()
    of_recipe = RECIPES[name]
    data = ASSETS / of_recipe.held_out_file
    first_rows(folder / f"{name}.jsonl", data, 2 * ROWS)
    first_rows(folder / "held_out.jsonl", data, 4)
    tiny_llama(folder / "model")
    settings = dict(train_batch_size=ROWS, micro_train_batch_size=micro_batch_size, max_steps=2)
    settings |= dict(eval_dataset_name=folder / "held_out.jsonl", max_length=64, logging_steps=1)
    settings["values_steps"] = 1
    if "--reward_function" in of_recipe.device_flags:  # and by a model
        scorer = tiny_llama(folder / "scorer")  # its tokenizer
        config = LlamaConfig.from_pretrained(scorer, num_labels=1)
        LlamaForSequenceClassification(config).save_pretrained(scorer)
        settings["reward_model_name_or_path"] = scorer
    return [*short_run(folder, name, folder / "run", **settings), *of_recipe.device_flags]


def waits_of_last_update(monkeypatch, folder, name: str, micro_batch_size: int) -> list[str]:
    """What the host waits for in the last update of a run, until it is evaluated."""
    words = [recipe(name), *flags_of_run(name, folder, micro_batch_size)]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    module = load(name)
    micro_batches, waits = [], []
    with monkeypatch.context() as patch, pretended_device.device(patch) as device:

        def begin_update(accelerator, parts, original=engine.begin_update):
            micro_batches.append(len(parts))
            device.waits.clear()
            return original(accelerator, parts)

        def evaluate(*args, original=module.evaluate):
            waits[:] = device.waits
            return original(*args)

        def save(*args, **kwargs):
            raise Ended

        patch.setattr(engine, "begin_update", begin_update)
        patch.setattr(module, "evaluate", evaluate)
        patch.setattr(ActorSaver, "save", save)
        with pytest.raises(Ended):
            module.main()
    assert micro_batches == [ROWS // micro_batch_size] * 2
    assert [line["global_step"] for line in evaluation_lines(folder / "run")] == [0, 2]
    return waits


@pytest.mark.parametrize("name", RECIPES)
def test_no_micro_batch_waits(name, tmp_path, monkeypatch):
    few = waits_of_last_update(monkeypatch, tmp_path / "few", name, ROWS // 2)
    many = waits_of_last_update(monkeypatch, tmp_path / "many", name, ROWS // 4)
    assert len(few) == len(many), "\n".join(many)
    assert 0 < len(few) <= PER_UPDATE, "\n".join(few)
