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
        "reward": OF_ALL,
        "kto": {name: tag for name, tag in OF_ANSWERS.items() if not name.startswith("logits")},
    },
    cannot={
        "dpo packed": "the stage has no packing",
        "reward packed": "the stage has no packing",
        "kto packed": "the stage has no packing",
        "reward resume": "it says that this stage cannot be resumed, and begins anew",
        "padding": "it has no such setting; it pads to a multiple of 8",
        "kto split": KL,
        "kto processes": KL,
        "kto last-update": KL,
    },
    definitions={"sft": {}, "dpo": {"logits": "all positions"}, "reward": {}, "kto": {}},
    rounded={},
    notes=[
        "The template is the tokenizer's own. bf16 is off: the runs are in fp32.",
        "Of DPO, `logits/*` are means over all positions, by its definition; here over all that are "
        "no padding. KTO's are sums over positions, which are not looked at.",
        "`packed` has neat_packing. With `packing` alone packed rows see each other, as it documents.",
        "Of reward models (stage rm) the score's head has a dropout of 0.1, TRL's default; here the "
        "model's config has none, `summary_dropout_prob` 0. Their embeddings are not tied, since a "
        "checkpoint of tied ones ended with an error; nor is there gradient checkpointing, with "
        "which two processes did.",
    ],
)


def train(request: Request) -> None:
    import torch
    from llamafactory.train.tuner import run_exp
    from transformers import TrainerCallback

    output = Path(request.output)
    # On two processes the accelerate that it asks for names the CPU `cpu:0`, where torch.load would
    # not put the optimizer's state of a checkpoint.
    torch.serialization.register_package(0, lambda storage: None, put_on_cpu)

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
    model = request.model
    if request.work == "reward":
        model = str(output / "scorer")
        if adapting.is_main():
            write_scorer(Path(request.model), Path(model))
        else:
            adapting.wait_for(Path(model) / "written")
    arguments = {
        "stage": {"reward": "rm"}.get(request.work, request.work),
        "do_train": True,
        "finetuning_type": "full",
        "model_name_or_path": model,
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
        "resume_from_checkpoint": request.resume.removesuffix("/classifier") or None,
    }
    if request.work == "reward":
        arguments["disable_gradient_checkpointing"] = True
    if request.processes > 1:
        arguments["ddp_backend"] = "gloo"
    if request.packing:
        # With `packing` alone packed rows see each other, which its documentation says.
        arguments |= {"packing": True, "neat_packing": True}
        arguments["cutoff_len"] = adapting.PACKED_LENGTH
    run_exp(arguments, callbacks=[Log()])
    if adapting.is_main():
        checkpoints = (output / "run").glob("checkpoint-*")
        folders = {int(path.name.partition("-")[2]): path for path in checkpoints}
        if request.work == "reward":
            for folder in folders.values():
                write_classifier(folder, Path(request.model))
            folders = {step: path / "classifier" for step, path in folders.items()}
        adapting.write_weights(request, folders)


def write_scorer(classifier: Path, folder: Path) -> None:
    """Writes a classifier of transformers as what it is in TRL: a model, and the head of its values."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    for file in classifier.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "summary_dropout_prob": 0.0}
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(classifier / "model.safetensors")
    head = {"v_head.summary.weight": weights.pop("score.weight")}
    head["v_head.summary.bias"] = torch.zeros(1)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    save_file(head, folder / "value_head.safetensors", {"format": "pt"})
    (folder / "written").touch()


def write_classifier(checkpoint: Path, classifier: Path) -> None:
    """Writes a checkpoint as a classifier beside it. The head's bias is in both scores of a pair."""
    from safetensors.torch import load_file, save_file

    folder = checkpoint / "classifier"
    folder.mkdir()
    weights = load_file(checkpoint / "model.safetensors")
    head = load_file(checkpoint / "value_head.safetensors")
    weights = {name: value for name, value in weights.items() if name.startswith("model.")}
    weights["score.weight"] = head["v_head.summary.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((classifier / "config.json").read_bytes())


def put_on_cpu(storage, location: str):
    return storage if location.startswith("cpu:") else None


def write_data(request: Request, output: Path) -> None:
    """Writes the rows in its own `sharegpt` format, and the file that describes them."""
    rows = []
    for row in request.rows():
        if request.work in ("dpo", "reward"):
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
    is_ranking = request.work in ("dpo", "reward")
    if is_ranking:
        columns |= {"chosen": "chosen", "rejected": "rejected"}
    if request.work == "kto":
        columns["kto_tag"] = "label"
    (output / "audit.json").write_text(json.dumps(rows))
    described = {
        "file_name": "audit.json",
        "formatting": "sharegpt",
        "ranking": is_ranking,
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

    if work in ("dpo", "reward"):
        return [[row(one, "chosen_"), row(one, "rejected_")] for one in data]
    return [[row(one)] for one in data]


if __name__ == "__main__":
    adapting.main(DESCRIPTION, train, LIBRARIES)
