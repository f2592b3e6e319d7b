"""LLaMA-Factory for benchmarks/audit.py: `llamafactory-cli train`'s own function, with its defaults."""

import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import adapting
from adapting import Description, Request, Row

# It imports torchaudio, of which there is no build for torch's CPU build, and uses it for sounds.
sys.modules["torchaudio"] = ModuleType("torchaudio")
sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

LIBRARIES = ["llamafactory.train.tuner", "datasets"]
OF_ALL = {"loss": "loss", "grad_norm": "grad_norm"}
OF_ANSWERS = {
    f"{name}/{kind}": f"{name}/{kind}"
    for name in ("rewards", "logps", "logits")
    for kind in ("chosen", "rejected")
}
KL = "its loss has a KL that is estimated on each micro-batch, by KTO's definition"
DESCRIPTION = Description(
    program="LLaMA-Factory",
    packages=["llamafactory", "trl", "transformers", "accelerate", "torch"],
    tags={
        "sft": OF_ALL,
        "dpo": {
            **OF_ALL,
            **OF_ANSWERS,
            "rewards/margins": "rewards/margins",
            "rewards/accuracies": "rewards/accuracies",
        },
        "kto": {name: tag for name, tag in OF_ANSWERS.items() if not name.startswith("logits")},
    },
    cannot={
        "dpo packed": "the stage has no packing",
        "kto packed": "the stage has no packing",
        "padding": "it has no such setting; it pads to a multiple of 8",
        "kto split": KL,
        "kto processes": KL,
        "kto last-update": KL,
    },
    definitions={"sft": {}, "dpo": {"logits": "all positions"}, "kto": {}},
    rounded={},
    notes=[
        "The template is the tokenizer's own. bf16 is off: the runs are in fp32.",
        "Of DPO, `logits/*` are means over all positions, by its definition; here over all that are "
        "no padding. KTO's are sums over positions, which are not looked at.",
        "Reward models (stage rm) were not asked: the dropout of TRL's value head is always on.",
    ],
)


def train(request: Request) -> None:
    from llamafactory.train.tuner import run_exp
    from transformers import TrainerCallback

    output = Path(request.output)

    class Log(TrainerCallback):
        def on_train_begin(self, args, state, control, train_dataloader=None, **_):
            if state.is_world_process_zero and not request.packing:
                rows = tokens_of(train_dataloader.dataset, request.work)
                adapting.write_lines(output / "rows.jsonl", rows)

        def on_log(self, args, state, control, logs=None, **_):
            if state.is_world_process_zero and "loss" in logs:
                adapting.append(output / "log.jsonl", {"step": state.global_step, **logs})

    if adapting.is_main():
        write_data(request, output)
    else:
        adapting.wait_for(output / "dataset_info.json")
    arguments = {
        "stage": request.work,
        "do_train": True,
        "finetuning_type": "full",
        "model_name_or_path": request.model,
        "dataset": "audit",
        "dataset_dir": str(output),
        "output_dir": str(output / "run"),
        "per_device_train_batch_size": request.micro,
        "gradient_accumulation_steps": request.accumulation,
        "num_train_epochs": request.epochs,
        "learning_rate": request.learning_rate,
        "lr_scheduler_type": "linear",
        "adam_epsilon": request.adam_epsilon,
        "max_grad_norm": request.max_grad_norm,
        "logging_steps": request.logging_steps,
        "save_steps": request.save_steps,
        "seed": request.seed,
        "report_to": "none",
        "use_cpu": True,
        "overwrite_cache": True,
        "resume_from_checkpoint": request.resume or None,
    }
    if request.processes > 1:
        arguments["ddp_backend"] = "gloo"
    if request.packing:
        arguments |= {"packing": True, "cutoff_len": adapting.PACKED_LENGTH}
    run_exp(arguments, callbacks=[Log()])
    if adapting.is_main():
        folders = (output / "run").glob("checkpoint-*")
        adapting.write_weights(
            request, {int(path.name.partition("-")[2]): path for path in folders}
        )


def write_data(request: Request, output: Path) -> None:
    """Writes the rows in its own `sharegpt` format, and the file that describes them."""
    rows = []
    for row in request.rows():
        if request.work == "dpo":
            rows.append(
                {
                    "messages": row["prompt"],
                    "chosen": row["chosen"][0],
                    "rejected": row["rejected"][0],
                }
            )
        else:
            rows.append({"messages": row["prompt"] + row["completion"]})
            if request.work == "kto":
                rows[-1]["label"] = row["label"]
    columns = {"messages": "messages"}
    if request.work == "dpo":
        columns |= {"chosen": "chosen", "rejected": "rejected"}
    if request.work == "kto":
        columns["kto_tag"] = "label"
    (output / "audit.json").write_text(json.dumps(rows))
    described = {
        "file_name": "audit.json",
        "formatting": "sharegpt",
        "ranking": request.work == "dpo",
        "columns": columns,
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
            "system_tag": "system",
        },
    }
    whole = output / "dataset_info.json.writing"
    whole.write_text(json.dumps({"audit": described}))
    os.rename(whole, output / "dataset_info.json")


def tokens_of(data, work: str) -> list[list[Row]]:
    """The token ids of each row as the trainer's own data set holds them."""

    def row(one: dict, prefix: str = "") -> Row:
        labels = one[f"{prefix}labels"]
        return Row(one[f"{prefix}input_ids"], [int(label != -100) for label in labels])

    if work == "dpo":
        return [[row(one, "chosen_"), row(one, "rejected_")] for one in data]
    return [[row(one)] for one in data]


if __name__ == "__main__":
    adapting.main(DESCRIPTION, train, LIBRARIES)
