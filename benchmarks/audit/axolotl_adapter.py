"""Axolotl for benchmarks/audit.py: what `axolotl train` calls, with its defaults."""

import json
import os
import sys
from pathlib import Path

import adapting
from adapting import Description, Request, Row

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
os.environ["ACCELERATE_USE_CPU"] = "true"  # it has no setting that says so

LIBRARIES = ["axolotl.cli.train", "axolotl.train", "axolotl.common.datasets", "datasets"]
OF_ALL = {"loss": "loss", "grad_norm": "grad_norm"}
OF_ANSWERS = {
    f"{name}/{kind}": f"{name}/{kind}"
    for name in ("rewards", "logps", "logits")
    for kind in ("chosen", "rejected")
}
DESCRIPTION = Description(
    program="Axolotl",
    packages=["axolotl", "trl", "transformers", "accelerate", "torch"],
    tags={
        "sft": OF_ALL,
        "dpo": {
            **OF_ALL,
            **OF_ANSWERS,
            "rewards/margins": "rewards/margins",
            "rewards/accuracies": "rewards/accuracies",
        },
    },
    cannot={
        "dpo packed": "it has no packing for preferences, as its configuration says",
        "padding": "it pads to a multiple of 64 or to the whole length alone",
    },
    definitions={"sft": {}, "dpo": {}},
    rounded={},
    notes=[
        "The template is the tokenizer's own. The runs are in fp32.",
        "`packed` has attn_implementation sdpa. Without it packed rows see each other, as it warns.",
        "The updates of a run are computed from rows times epochs, so that runs of short epochs end "
        "before their last one: smallest/axolotl_epochs.py. That is what last-update found.",
        "DPO, which is TRL's trainer, was not asked.",
    ],
)


def train(request: Request) -> None:
    import axolotl.integrations.base as integrations
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.cli.train import do_train
    from transformers import TrainerCallback

    output = Path(request.output)

    class Log(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if state.is_world_process_zero and "loss" in logs:
                adapting.append(output / "log.jsonl", {"step": state.global_step, **logs})

    class Audit(integrations.BasePlugin):
        def add_callbacks_post_trainer(self, cfg, trainer):
            if adapting.is_main() and not request.packing:
                rows = tokens_of(trainer.train_dataset, request.work)
                adapting.write_lines(output / "rows.jsonl", rows)
            return [Log()]

    sys.modules["axolotl_adapter"].Audit = Audit
    rank = adapting.rank()
    config = output / f"{rank}.yaml"
    config.write_text(json.dumps(settings(request, output)))  # JSON is YAML
    cfg = load_cfg(str(config))
    if request.processes > 1:
        cfg.device_map = {"": "cpu"}  # not the number of a GPU
    do_train(cfg, TrainerCliArgs())
    if adapting.is_main():
        folders = (output / "run").glob("checkpoint-*")
        adapting.write_weights(
            request, {int(path.name.partition("-")[2]): path for path in folders}
        )


def settings(request: Request, output: Path) -> dict:
    """What is in its YAML file."""
    rows = []
    for row in request.rows():
        if request.work == "sft":
            rows.append({"messages": row["prompt"] + row["completion"]})
        else:
            answers = {name: row[name][0] for name in ("chosen", "rejected")}
            rows.append({"messages": row["prompt"], **answers})
    data = output / f"{adapting.rank()}.jsonl"
    adapting.write_lines(data, rows)
    dataset = {"path": str(data), "ds_type": "json", "type": "chat_template"}
    found = {
        "base_model": request.model,
        "chat_template": "tokenizer_default",
        "plugins": ["axolotl_adapter.Audit"],
        "output_dir": str(output / "run"),
        "dataset_prepared_path": str(output / f"prepared-{adapting.rank()}"),
        "val_set_size": 0,
        "sequence_len": 512,
        "micro_batch_size": request.micro,
        "gradient_accumulation_steps": request.accumulation,
        "num_epochs": request.epochs,
        "optimizer": "adamw_torch",
        "learning_rate": request.learning_rate,
        "lr_scheduler": "linear",
        "warmup_steps": 0,
        "adam_epsilon": request.adam_epsilon,
        "max_grad_norm": request.max_grad_norm,
        "logging_steps": request.logging_steps,
        "save_steps": request.save_steps,
        "save_total_limit": 100,
        "seed": request.seed,
        "bf16": False,
        "fp16": False,
        "tf32": False,
    }
    if request.work == "dpo":
        dataset["type"] = "chat_template.default"
        found["rl"] = "dpo"
    if request.packing:
        found |= {"sample_packing": True, "sequence_len": adapting.PACKED_LENGTH}
        found["attn_implementation"] = "sdpa"  # without it packed rows see each other, as it warns
    if request.resume:
        found["resume_from_checkpoint"] = request.resume
    return {**found, "datasets": [dataset]}


def tokens_of(data, work: str) -> list[list[Row]]:
    """The token ids of each row as the trainer's own data set holds them."""

    def answer(prompt: list[int], ids: list[int]) -> Row:
        return Row(prompt + ids, [0] * len(prompt) + [1] * len(ids))

    if work == "sft":
        return [
            [Row(one["input_ids"], [int(label != -100) for label in one["labels"]])] for one in data
        ]
    return [
        [answer(one["prompt_ids"], one[f"{kind}_ids"]) for kind in ("chosen", "rejected")]
        for one in data
    ]


if __name__ == "__main__":
    sys.modules["axolotl_adapter"] = sys.modules["__main__"]
    adapting.main(DESCRIPTION, train, LIBRARIES)
