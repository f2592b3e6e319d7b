"""What a run records of itself: arguments that repeat it, its surroundings, a card beside its model."""

import json
import re
import sys
import types

import torch
import transformers
import yaml

from common import record
from runs import LAUNCHERS, launch, recipe, short_run, timeless, weights, write_jsonl


def flags(inputs, output, **more):
    held_out = {"eval_dataset_name": inputs / "dpo.jsonl", "seed": 7}
    updates = dict(micro_train_batch_size=2, max_steps=3, learning_rate=0.01, warmup_steps=0.25)
    return short_run(inputs, "dpo", output, **updates | held_out | more)


def header_of(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def test_run_yaml_repeats_the_run(inputs, tmp_path):
    first, again = tmp_path / "runs/dpo/first", tmp_path / "again"
    given = flags(inputs, None, run_name="first", loss_type="ipo", lora_r=2)
    launch([], recipe("dpo"), *given, cwd=tmp_path)
    launch([], recipe("dpo"), first / "run.yaml", "--output_dir", again)
    assert timeless(first) == timeless(again)
    assert torch.equal(weights(first), weights(again))
    recorded = yaml.safe_load((first / "run.yaml").read_text())
    assert recorded == yaml.safe_load((again / "run.yaml").read_text())
    assert recorded["loss_type"] == "ipo" and recorded["seed"] == 7 and recorded["lora_alpha"] == 4
    assert not {"output_dir", "run_name", "resume"} & recorded.keys()


def test_each_start_is_recorded(inputs, tmp_path):
    output, own = tmp_path / "out", tmp_path / "mine.py"
    own.write_text(recipe("dpo").read_text())
    launch(LAUNCHERS["zero2"], own, *flags(inputs, output, save_steps=2))
    resumed = flags(inputs, output, save_steps=2, resume="auto", max_steps=4)
    launch(LAUNCHERS["zero2"], own, *resumed)
    first, second = json.loads((output / "environment.json").read_text())
    assert first["command"].endswith("--save_steps 2") and "--resume auto" in second["command"]
    assert first["engine"] == "DeepSpeed ZeRO-2 fp32 on cpu"
    assert first["launcher"]["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert first["deepspeed_config"]["zero_optimization"]["stage"] == 2
    assert first["versions"]["transformers"] == transformers.__version__
    assert first["python"] == sys.version
    assert yaml.safe_load((output / "run.yaml").read_text())["max_steps"] == 4

    card = (output / "actor/README.md").read_text()
    assert header_of(card) == {"library_name": "transformers", "tags": ["mine"]}
    assert "\n# model, trained by mine on dpo.jsonl\n" in card and str(inputs) not in card
    (arguments,) = re.findall(r"```yaml\n(.*)```\n$", card, re.DOTALL)
    assert yaml.safe_load(arguments).items() >= {"max_steps": 4, "save_steps": 2}.items()
    in_checkpoint = (output / "checkpoints/global_step_000004/actor/README.md").read_text()
    assert header_of(in_checkpoint) == header_of(card)


def test_a_card_shows_no_folders(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["recipes/sft.py"])
    data = ["owner/data:main", str(tmp_path)]
    args = types.SimpleNamespace(model_name_or_path="owner/model", dataset_name=data, beta=0.5)
    args.output_dir = tmp_path
    lines = [{"global_step": 1, "epoch": 1}, {"global_step": 2, "eval/exact_match": 0.51239}]
    write_jsonl(tmp_path / "metrics.jsonl", [{"global_step": 0, "eval/loss": 1.0}, *lines])
    (tmp_path / "adapter_config.json").touch()
    record.write_card(tmp_path, args)
    card = (tmp_path / "README.md").read_text()
    header = {"library_name": "peft", "tags": ["sft"], "base_model": "owner/model"}
    assert header_of(card) == header
    assert "| evaluation at update 2 | |\n| --- | --- |\n| eval/exact_match | 0.5124 |\n\n" in card
    assert "- owner/data:main\n" in card and "\nbeta: 0.5\n" in card and "output_dir" not in card
    assert f"# owner/model, trained by sft on owner/data:main, {tmp_path.name}\n" in card
    assert str(tmp_path) not in card
