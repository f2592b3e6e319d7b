"""ms-swift for benchmarks/audit.py: the functions behind `swift sft` and `swift rlhf`, with their defaults."""

from pathlib import Path

import adapting
from adapting import Description, Request, Row

LIBRARIES = ["swift.pipelines", "swift.trainers", "swift.rlhf_trainers", "datasets"]
OF_ALL = {"loss": "loss", "grad_norm": "grad_norm"}
OF_ANSWERS = {
    f"{name}/{kind}": f"{name}/{kind}"
    for name in ("rewards", "logps", "logits")
    for kind in ("chosen", "rejected")
}
OF_PAIRS = {"rewards/margins": "rewards/margins", "rewards/accuracies": "rewards/accuracies"}
DESCRIPTION = Description(
    program="ms-swift",
    packages=["ms-swift", "trl", "transformers", "accelerate", "torch"],
    tags={
        "sft": {**OF_ALL, "accuracy": "token_acc"},
        "dpo": {**OF_ALL, **OF_ANSWERS, **OF_PAIRS},
        "reward": {**OF_ALL, "margin": "rewards/margins", "accuracy": "rewards/accuracies"},
        "kto": {
            **OF_ALL,
            **{name: tag for name, tag in OF_ANSWERS.items() if not name.startswith("logits")},
            "rewards/margins": "rewards/margins",
        },
    },
    cannot={
        "packed": "packing needs flash attention, which needs a GPU",
        "padding": "it has no such setting",
    },
    definitions={"sft": {}, "dpo": {}, "reward": {}, "kto": {}},
    rounded={},
    notes=[
        "The template is the tokenizer's own, registered in ms-swift's way. The runs are in fp32.",
        "KTO has loss_type apo_zero_unpaired. The default estimates a KL on the rows of a "
        "micro-batch, by its definition, so that it cannot be the same for another split. Its "
        "`logits/*` are sums over tokens and vocabulary, which are not looked at.",
        "Resumed after an epoch, dropout draws other numbers than in the unbroken run: there the "
        "loader's workers live on, by default, so that a new epoch draws no seed for them. With "
        "`dataloader_persistent_workers` false all its runs are resumed exactly.",
    ],
)


def train(request: Request) -> None:
    from swift.callbacks import TrainerCallback, callbacks_map
    from swift.pipelines import rlhf_main, sft_main
    from swift.template import TemplateMeta, register_template

    output = Path(request.output)

    class Log(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            if state.is_world_process_zero and not request.packing:
                rows = tokens_of(self.trainer.train_dataset, request.work)
                adapting.write_lines(output / "rows.jsonl", rows)

        def on_log(self, args, state, control, logs=None, **_):
            if state.is_world_process_zero and "loss" in logs:
                adapting.append(output / "log.jsonl", {"step": state.global_step, **logs})

    callbacks_map["audit"] = Log
    register_template(  # that of the model's tokenizer, in ms-swift's way
        TemplateMeta(
            "audit",
            prefix=[],
            prompt=["<|user|>{{QUERY}}<|end|><|assistant|>"],
            chat_sep=["<|end|>"],
            suffix=["<|end|>"],
        ),
        exist_ok=True,
    )
    data = output / f"{adapting.rank()}.jsonl"
    adapting.write_lines(data, rows_of(request))
    settings = {
        "model": request.model,
        "model_type": "llama",
        "template": "audit",
        "tuner_type": "full",
        "dataset": data,
        "split_dataset_ratio": 0,
        "torch_dtype": "float32",
        "output_dir": output / "run",
        "add_version": False,
        "per_device_train_batch_size": request.micro,
        "gradient_accumulation_steps": request.accumulation,
        "num_train_epochs": request.epochs,
        "learning_rate": request.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0,
        "adam_epsilon": request.adam_epsilon,
        "max_grad_norm": request.max_grad_norm,
        "logging_steps": request.logging_steps,
        "save_steps": request.save_steps,
        "seed": request.seed,
        "report_to": "none",
        "use_cpu": True,
        "check_model": False,  # with a hub
        "callbacks": "audit",
    }
    if request.resume:
        settings["resume_from_checkpoint"] = request.resume
    main = sft_main
    if request.work != "sft":
        main = rlhf_main
        settings["rlhf_type"] = {"reward": "rm"}.get(request.work, request.work)
    if request.work == "kto":  # the loader shuffles the rows all the same
        settings |= {"loss_type": "apo_zero_unpaired", "dataset_shuffle": False}
    main([word for name, value in settings.items() for word in (f"--{name}", str(value))])
    if adapting.is_main():
        folders = (output / "run").glob("checkpoint-*")
        adapting.write_weights(
            request, {int(path.name.partition("-")[2]): path for path in folders}
        )


def rows_of(request: Request) -> list[dict]:
    """Returns the rows in its own format: messages, and a pair's other answer or what is thought of it."""
    found = []
    for row in request.rows():
        answer = row.get("completion") or row["chosen"]
        found.append({"messages": row["prompt"] + answer})
        if "rejected" in row:
            found[-1]["rejected_response"] = row["rejected"][0]["content"]
        if "label" in row:
            found[-1]["label"] = row["label"]
    return found


def tokens_of(data, work: str) -> list[list[Row]]:
    """The token ids of each row as the trainer's own data set holds them."""

    def row(one: dict, prefix: str = "") -> Row:
        ids = one[f"{prefix}input_ids"]
        labels = one.get(f"{prefix}labels") or [-100] * len(ids)  # a scored answer has none
        return Row(ids, [int(label != -100) for label in labels])

    if work == "sft":
        return [[row(one)] for one in data]
    if work == "kto":
        return [[row(one, "chosen_")] for one in data]
    return [[row(one, "chosen_"), row(one, "rejected_")] for one in data]


if __name__ == "__main__":
    adapting.main(DESCRIPTION, train, LIBRARIES)
