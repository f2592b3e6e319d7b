"""torchtune's recipes for benchmarks/audit.py: full fine-tuning, by demonstrations and by preferences."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import adapting
from adapting import Description, Request, Row

LIBRARIES = ["torchtune", "torchtune.datasets", "torchtune.training", "tokenizers"]
OF_ANSWERS = {
    f"{name}/{kind}": f"{tag}/{kind}"
    for name, tag in (("rewards", "rewards"), ("logps", "log_probs"), ("logits", "logits"))
    for kind in ("chosen", "rejected")
}
DESCRIPTION = Description(
    program="torchtune",
    packages=["torchtune", "torchao", "torch"],
    tags={
        "sft": {"loss": "loss", "grad_norm": "grad_norm"},
        "dpo": {
            "loss": "loss",
            **OF_ANSWERS,
            "rewards/margins": "rewards/margins",
            "rewards/accuracies": "rewards/accuracies",
        },
    },
    cannot={
        "dpo packed": "the recipe has no packing",
        "padding": "it has no such setting",
        "last-update": "what does not fill an epoch's last update is added to the next epoch's first "
        "one; rows that do not fill a batch are left out",
        "resume": "it writes checkpoints after an epoch alone",
    },
    definitions={
        "sft": {"line": "last update"},
        "dpo": {"line": "last update", "logits": "all positions"},
    },
    rounded={},
    notes=[
        "SFT on one process is the recipe full_finetune_single_device, on two "
        "full_finetune_distributed; DPO is full_dpo_distributed, also on one.",
        "A log line has the numbers of its update alone, also where it is the only one of several.",
        "Of DPO, `logits/*` are means over all positions, by its definition; here over all that are "
        "no padding.",
        "The recipes for several processes ask for the memory of a GPU. The adapter answers.",
    ],
)


def train(request: Request) -> None:
    from omegaconf import OmegaConf

    output = Path(request.output)
    if adapting.is_main() and not request.packing:
        adapting.write_lines(output / "rows.jsonl", tokens_of(request))
    name = "full_finetune_single_device" if request.processes == 1 else "full_finetune_distributed"
    if request.work == "dpo":
        name = "full_dpo_distributed"
    config = OmegaConf.create(settings(request))
    recipe_of(name)(config)
    if adapting.is_main():
        epochs = {int(path.name[6:]): path for path in (output / "run").glob("epoch_*")}
        folders = {epoch + 1: path for epoch, path in epochs.items()}  # an update each
        adapting.write_weights(request, folders)


def settings(request: Request) -> dict:
    """What is in a recipe's YAML file."""
    model = json.loads((Path(request.model) / "config.json").read_text())
    run = str(Path(request.output) / "run")
    batch_size, accumulation = request.micro, request.accumulation
    if request.packing:  # so that the packed rows are one update
        batch_size = 1
        tokenizer = Tokenizer(request.model, adapting.PACKED_LENGTH)
        accumulation = len(rows(tokenizer, request.data, packed=True))
    checkpointer = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": request.model,
        "checkpoint_files": ["model.safetensors"],
        "recipe_checkpoint": None,
        "output_dir": run,
        "model_type": "LLAMA3_2",
        "safe_serialization": True,
    }
    loss = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
    if request.work == "dpo":
        loss = {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.1, "label_smoothing": 0}
    return {
        "output_dir": run,
        "model": {
            "_component_": "torchtune.models.llama3_2.llama3_2",
            "vocab_size": model["vocab_size"],
            "num_layers": model["num_hidden_layers"],
            "num_heads": model["num_attention_heads"],
            "num_kv_heads": model["num_key_value_heads"],
            "embed_dim": model["hidden_size"],
            "intermediate_dim": model["intermediate_size"],
            "max_seq_len": model["max_position_embeddings"],
            "norm_eps": model["rms_norm_eps"],
            "rope_base": int(model["rope_parameters"]["rope_theta"]),
            "scale_factor": 1,
            "attn_dropout": model["attention_dropout"],
        },
        "tokenizer": {
            "_component_": "torchtune_adapter.Tokenizer",
            "path": request.model,
            "max_seq_len": adapting.PACKED_LENGTH if request.packing else None,
        },
        "dataset": {
            "_component_": "torchtune_adapter.rows",
            "data": request.data,
            "packed": request.packing,
        },
        "seed": request.seed,
        "shuffle": True,
        "checkpointer": checkpointer,
        "ref_checkpointer": checkpointer,
        "resume_from_checkpoint": False,
        "batch_size": batch_size,
        "epochs": request.epochs,
        "optimizer": {
            "_component_": "torch.optim.AdamW",
            "lr": request.learning_rate,
            "eps": request.adam_epsilon,
        },
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 0,
        },
        "loss": loss,
        "max_steps_per_epoch": None,
        "gradient_accumulation_steps": accumulation,
        "optimizer_in_bwd": False,
        "clip_grad_norm": request.max_grad_norm,
        "compile": False,
        "device": "cpu",
        "enable_activation_checkpointing": False,
        "enable_activation_offloading": False,
        "dtype": "fp32",
        "metric_logger": {
            "_component_": "torchtune_adapter.Log",
            "file": str(Path(request.output) / "log.jsonl"),
        },
        "log_every_n_steps": request.logging_steps,
    }


def recipe_of(name: str):
    """Returns what runs a recipe, which is a file that its authors do not want to be imported."""
    import torch
    import torchtune
    import torchtune.training

    # The recipe for several processes asks for a GPU's memory, and empties its cache.
    torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda: None
    torchtune.training.get_memory_stats = lambda device: {}
    torchtune.training.log_memory_stats = lambda stats: None
    file = Path(torchtune.__file__).parents[1] / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (recipe_class,) = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == name
    ]

    def run(config) -> None:
        if name == "full_dpo_distributed" and not torch.distributed.is_initialized():
            alone = {"rank": 0, "world_size": 1, "store": torch.distributed.HashStore()}
            torch.distributed.init_process_group("gloo", **({} if "RANK" in os.environ else alone))
        recipe = recipe_class(cfg=config)
        recipe.setup(cfg=config)
        recipe.train()
        recipe.cleanup()

    return run


class Log:
    """A metric logger that writes a line of JSON."""

    def __init__(self, file: str):
        self.file = Path(file)

    def log_config(self, config) -> None:
        pass

    def log_dict(self, payload: dict, step: int) -> None:
        if adapting.is_main():
            values = {name: float(value) for name, value in payload.items()}
            adapting.append(self.file, {"step": step, **values})

    def close(self) -> None:
        pass


class Tokenizer:
    """That of the model, with its chat template."""

    def __init__(self, path: str, max_seq_len: int | None = None):
        from tokenizers import Tokenizer as Backend

        self.backend = Backend.from_file(f"{path}/tokenizer.json")
        self.pad_id = self.backend.token_to_id("<|pad|>")
        self.max_seq_len = max_seq_len

    def encode(self, row: dict, answer: str = "completion", prefix: str = "") -> dict:
        """Returns ids and labels of a row in the format that torchtune's data sets have."""
        prompt = "".join(f"<|{one['role']}|>{one['content']}<|end|>" for one in row["prompt"])
        prompt_ids = self.backend.encode(f"{prompt}<|assistant|>", add_special_tokens=False).ids
        text = row[answer][0]["content"] + "<|end|>"
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return {
            f"{prefix}_input_ids" if prefix else "tokens": prompt_ids + ids,
            f"{prefix}_labels" if prefix else "labels": [-100] * len(prompt_ids) + ids,
        }


def rows(tokenizer: Tokenizer, data: str, packed: bool = False):
    """The data set, packed by torchtune's own class."""
    from torchtune.datasets import PackedDataset

    lines = adapting.read_lines(Path(data))
    if "chosen" in lines[0]:
        return [
            tokenizer.encode(row, "chosen", "chosen")
            | tokenizer.encode(row, "rejected", "rejected")
            for row in lines
        ]
    found = [tokenizer.encode(row) for row in lines]
    if packed:
        return PackedDataset(found, max_seq_len=tokenizer.max_seq_len, padding_idx=tokenizer.pad_id)
    return found


def tokens_of(request: Request) -> list[list[Row]]:
    def row(ids: list[int], labels: list[int]) -> Row:
        return Row(ids, [int(label != -100) for label in labels])

    encoded = rows(Tokenizer(request.model), request.data)
    if request.work == "sft":
        return [[row(one["tokens"], one["labels"])] for one in encoded]
    return [
        [row(one[f"{kind}_input_ids"], one[f"{kind}_labels"]) for kind in ("chosen", "rejected")]
        for one in encoded
    ]


if __name__ == "__main__":
    sys.modules["torchtune_adapter"] = sys.modules["__main__"]
    adapting.main(DESCRIPTION, train, LIBRARIES)
