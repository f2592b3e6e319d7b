"""Runs on rows with images, as a user starts them: saved, resumed, split over processes, refused."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

import runs
from preference_recipes.data import rendering
from preference_recipes.tools import export, rows
from recipes import ANSWER_REWARD
from runs import message, say, write_jsonl
from vlms import picture, save_vlm

FLAGS = dict(train_batch_size=4, micro_train_batch_size=2, learning_rate=1e-2, max_length=200)
FLAGS |= dict(lr_scheduler_type="constant", max_new_tokens=4, weight_decay=0.1)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model, and six rows whose files lie next to them: the images of three, then no others."""
    folder = tmp_path_factory.mktemp("images")
    save_vlm("llava", folder / "model")
    rows = {"sft": [], "dpo": [], "kto": [], "grpo": []}
    for number in range(6):
        (folder / f"{number}.png").write_bytes(picture(number))
        image = {"images": [f"{number}.png"]} if number < 3 else {}
        asked = say("user", f"How many {number}?")
        answer, other = say("assistant", str(number)), say("assistant", "none")
        rows["sft"].append({"messages": asked + answer, "answer": str(number), **image})
        rows["dpo"].append({"prompt": asked, "chosen": answer, "rejected": other, **image})
        rows["kto"].append({"prompt": asked, "completion": answer, "label": number % 2, **image})
        parts = [{"type": "image", "path": file} for file in image.get("images", [])]
        in_parts = message("user", [*parts, {"type": "text", "text": "How many?"}])
        # Those without images come first.
        rows["grpo"].insert(0, {"prompt": [in_parts], "answer": str(number)})
    for name, of_recipe in rows.items():
        write_jsonl(folder / f"{name}.jsonl", of_recipe)
    return folder


def run(inputs, recipe: str, output, launcher: str = "plain", check: bool = True, **changes) -> str:
    flags = runs.short_run(inputs, recipe, output, **FLAGS | changes)
    return runs.launch(runs.LAUNCHERS[launcher], runs.recipe(recipe), *flags, check=check).stdout


def weights(folder, part: str = "") -> dict:
    return {n: x for n, x in load_file(folder / "model.safetensors").items() if part in n}


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_holds_its_processor_and_goes_on_bit_for_bit(inputs, tmp_path, capsys):
    evaluated = dict(max_steps=4, save_steps=2, save_total_limit=0, train_vision="true")
    evaluated |= dict(values_steps=2)
    evaluated |= dict(eval_dataset_name=inputs / "sft.jsonl")
    run(inputs, "sft", tmp_path / "whole", **evaluated)
    checkpoint = tmp_path / "whole/checkpoints/global_step_000002"
    run(inputs, "sft", tmp_path / "resumed", resume=checkpoint, **evaluated)
    whole, resumed = weights(tmp_path / "whole/actor"), weights(tmp_path / "resumed/actor")
    assert same(whole, resumed)
    assert runs.timeless(tmp_path / "whole") == runs.timeless(tmp_path / "resumed")
    assert not same(
        weights(tmp_path / "whole/actor", "vision"), weights(inputs / "model", "vision")
    )

    rows.main([str(tmp_path / "whole"), "--step", "4", "--source", "eval"])
    assert capsys.readouterr().out.count(" pixels, ") == 3

    export.export(checkpoint, tmp_path / "exported")
    for folder in (tmp_path / "exported", tmp_path / "whole/actor"):
        processor = transformers.AutoProcessor.from_pretrained(folder)
        given = transformers.AutoProcessor.from_pretrained(inputs / "model")
        assert rendering.describe_processor(processor) == rendering.describe_processor(given)
        assert processor.chat_template == given.chat_template
        transformers.AutoModelForImageTextToText.from_pretrained(folder)

    config = inputs / "model/processor_config.json"
    text = config.read_text()
    try:
        config.write_text(text.replace('"do_normalize": true', '"do_normalize": false'))
        said = run(inputs, "sft", tmp_path / "other", check=False, resume=checkpoint, **evaluated)
    finally:
        config.write_text(text)
    assert "belongs to another run: images" in said


def test_the_tower_stays_as_it_is_and_samples_name_files(inputs, tmp_path):
    sampling = dict(rollout_batch_size=2, n_samples_per_prompt=2, drop_equal_groups=False)
    # It must be given a list for each response, also where a rollout has no image.
    sampling |= dict(reward_function=[ANSWER_REWARD, "tests.tied_rewards:n_images"])
    sampling |= dict(kl_coef=0.1, eval_dataset_name=inputs / "grpo.jsonl", max_steps=3)
    said = run(inputs, "grpo", tmp_path / "grpo", **sampling)
    assert "not trained: " in said
    trained, given = weights(tmp_path / "grpo/actor"), weights(inputs / "model")
    assert same(weights(tmp_path / "grpo/actor", "vision"), weights(inputs / "model", "vision"))
    assert not same(trained, given)
    named = {line["row"]: line.get("images") for line in runs.samples(tmp_path / "grpo")}
    assert named == {6 - n: [f"{n}.png"] if n < 3 else None for n in range(6)}
    line = runs.evaluation_lines(tmp_path / "grpo")[0]
    assert line["eval/rewards/n_images/mean"] == 0.5


@pytest.mark.parametrize("recipe", ["dpo", "kto"])
def test_other_images_are_another_loss(inputs, tmp_path, recipe):
    losses = {}
    for name, number in (("given", 0), ("other", 5)):
        (inputs / "0.png").write_bytes(picture(number))
        rows = inputs / f"{recipe}.jsonl"
        rows.write_text(rows.read_text() + "\n")  # the set is another one
        run(inputs, recipe, tmp_path / name, max_steps=2, learning_rate=1e-2)
        losses[name] = [line["loss"] for line in runs.training_lines(tmp_path / name)]
    (inputs / "0.png").write_bytes(picture(0))
    assert losses["given"] != losses["other"]


def test_an_adapter_is_merged_into_a_model_that_reads_images(inputs, tmp_path):
    said = run(inputs, "sft", tmp_path / "adapted", max_steps=1, lora_r=2)
    config = json.loads((tmp_path / "adapted/actor/adapter_config.json").read_text())
    assert "vision" not in config["target_modules"]
    assert "adapters of rank 2" in said
    export.export(tmp_path / "adapted/actor", tmp_path / "merged", merge_adapter=True)
    transformers.AutoProcessor.from_pretrained(tmp_path / "merged")
    merged, given = weights(tmp_path / "merged"), weights(inputs / "model")
    assert merged.keys() == given.keys() and not same(merged, given)
    assert same(weights(tmp_path / "merged", "vision"), weights(inputs / "model", "vision"))


@pytest.mark.slow
@pytest.mark.parametrize("train_vision", [False, True])
def test_two_processes_of_which_one_has_images(inputs, tmp_path, train_vision):
    """The longest rows come first: with micro-batches of one row, the other process soon has texts alone."""
    sizes = dict(micro_train_batch_size=1, train_batch_size=6, max_steps=2)
    for launcher in ("plain", "ddp", "zero2", "zero3", "fsdp2"):
        run(inputs, "sft", tmp_path / launcher, launcher, **sizes, train_vision=train_vision)
        found, expected = (runs.training_lines(tmp_path / name) for name in (launcher, "plain"))
        for tag in ("loss", "grad_norm"):
            exact = [line[tag] for line in expected]
            assert [line[tag] for line in found] == pytest.approx(exact, rel=1e-5), launcher
        two, one = (weights(tmp_path / name / "actor") for name in (launcher, "plain"))
        for name, tensor in one.items():
            if "k_proj.bias" not in name:  # their true gradients are zero
                torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_the_demo_reads_digits_and_looks_at_them(tmp_path):
    """A model that SFT left at about half gets better by GRPO; with another row's image it answers wrong."""
    command = [sys.executable, str(runs.REPOSITORY / "examples/digits.py"), str(tmp_path)]
    subprocess.run(command, check=True)
    held_out = [json.loads(line) for line in (tmp_path / "held_out.jsonl").open()]
    images = [row["prompt"][0]["content"][0] for row in held_out]
    for row, other in zip(held_out, images[1:] + images[:1]):
        row["prompt"][0]["content"][0] = other
    wrong = write_jsonl(tmp_path / "wrong.jsonl", held_out)
    flags = yaml.safe_load((runs.REPOSITORY / "examples/digits.yaml").read_text())
    flags |= dict(model_name_or_path=tmp_path / "model", dataset_name=tmp_path / "train.jsonl")
    flags |= dict(eval_dataset_name=[tmp_path / "held_out.jsonl", wrong], report_to="none")

    def last(recipe: str, output: str, **changes) -> dict:
        settings = flags | {"train_vision": "true", "output_dir": tmp_path / output} | changes
        runs.launch([], runs.recipe(recipe), *runs.flags_of(settings))
        return runs.evaluation_lines(tmp_path / output)

    learned = last("sft", "sft")[-1]
    assert learned["eval/held_out/exact_match"] >= 0.9 and learned["eval/wrong/exact_match"] < 0.3
    last("sft", "half", max_steps=45)
    sampling = dict(
        model_name_or_path=tmp_path / "half/actor", dataset_name=tmp_path / "prompts.jsonl"
    )
    sampling |= dict(reward_function=ANSWER_REWARD, rollout_batch_size=32, n_samples_per_prompt=8)
    sampling |= dict(train_batch_size=256, learning_rate=1e-3, max_steps=200, max_length=48)
    first, *_, better = last("grpo", "grpo", **sampling)
    assert 0.3 < first["eval/held_out/exact_match"] < 0.7
    assert better["eval/held_out/exact_match"] > first["eval/held_out/exact_match"] + 0.1
