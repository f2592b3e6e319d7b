"""The arguments that all recipes share. A recipe's `Args` adds its own, and other defaults."""

import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

SchedulerType = Literal["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"]

# The comparison for each kind of limit of `arg`.
LIMITS = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}


def range_in_words(limits: dict[str, float]) -> str:
    """Returns a range in words, such as `at least 0 and below 1`."""
    return " and ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in limits.items())


def arg(
    default: Any, help: str, with_lora: Any = None, only_with: str | None = None, **limits: float
) -> Any:
    """Returns a field of a recipe's `Args`.

    Args:
        with_lora: the default when LoRA is on (`--lora_r`); None: no other default.
        only_with: the argument without which this one is refused, such as `kl_coef`; may name the
            values that it needs: `loss_type=sigmoid,robust`.
        limits: limits of the values, such as `at_least=0`, see `LIMITS`. None has no limits.
    """
    metadata = {"help": help, "limits": limits, "with_lora": with_lora, "only_with": only_with}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class DataArgs:
    """The model that is trained, and the data that it is trained on."""

    model_name_or_path: str | None = arg(None, "the model to train: a hub name or a folder")
    dataset_name: list[str] | None = arg(None, "hub names, NAME:CONFIG, files or folders")
    dataset_split: str = arg("train", "split of --dataset_name")
    eval_dataset_name: list[str] | None = arg(None, "held-out sets; a column `answer`: exact match")
    eval_dataset_split: str = arg("train", "split of --eval_dataset_name")
    columns: list[str] | None = arg(None, "your columns: FORMAT=YOURS, such as prompt=question")
    chat_template: str | None = arg(None, "a Jinja file instead of the model's own template")
    chat_template_kwargs: str | None = arg(None, "variables of the template, a JSON object")
    strings_as_messages: bool = arg(False, "turn strings into messages of user and assistant")
    output_dir: str | None = arg(None, "where the run writes; default: runs/<recipe>/<date-time>")
    run_name: str | None = arg(None, "replaces <date-time>, and names the run in trackers")
    max_length: int = arg(1024, "tokens of prompt and answer; the rest is cut off", at_least=2)
    preview: int = arg(
        0, "show how the first N rows of the training sets are read, and exit", at_least=0
    )


@dataclass
class UpdateArgs:
    """The updates: their samples, their learning rate, and how they are computed."""

    train_batch_size: int = arg(64, "samples of one update, over all processes", at_least=1)
    micro_train_batch_size: int | None = arg(
        None, "samples that run at once on a process; default: 4, on a GPU 16384 tokens", at_least=1
    )
    micro_train_tokens: int = arg(0, "tokens run at once, with padding; 0: by samples", at_least=0)
    max_epochs: int = arg(1, "passes over the data", at_least=0)
    max_steps: int = arg(0, "updates, however many epochs; 0: those of --max_epochs", at_least=0)
    learning_rate: float = arg(1e-5, "peak learning rate", with_lora=1e-4, at_least=0)
    lr_scheduler_type: SchedulerType = arg("linear", "how it goes after the warm-up")
    warmup_steps: float = arg(0.03, "updates of warm-up; below 1: a share of all", at_least=0)
    weight_decay: float = arg(0.0, "on matrices only, not on biases and norms", at_least=0)
    adam_epsilon: float = arg(1e-8, "Adam's epsilon", at_least=0)
    max_grad_norm: float = arg(1.0, "gradient clipping; 0: none", at_least=0)
    gradient_checkpointing: bool = arg(False, "saves memory, costs time")
    attn_implementation: str | None = arg(None, "sdpa, eager, flash_attention_2 ...")
    seed: int = arg(0, "for the data order, sampling and dropout", at_least=0, below=2**31)


@dataclass
class AdapterArgs:
    """Low-rank adapters."""

    lora_r: int = arg(0, "rank of adapters; 0: none", at_least=0)
    lora_alpha: float | None = arg(
        None, "scales adapters by alpha / r; default: 2 lora_r", only_with="lora_r", above=0
    )
    lora_dropout: float = arg(
        0.0, "dropout before the adapters", only_with="lora_r", at_least=0, below=1
    )
    lora_target_modules: list[str] = arg(
        ["all-linear"], "layers, such as q_proj v_proj", only_with="lora_r"
    )
    load_in_4bit: bool = arg(
        False, "pack the frozen weights below adapters into 4 bits (QLoRA)", only_with="lora_r"
    )


@dataclass
class SavingArgs:
    """When a run logs, evaluates and saves."""

    logging_steps: float = arg(1, "updates between log lines; below 1: a share of all", at_least=0)
    eval_steps: float = arg(0, "updates between evaluations; 0: only before and after", at_least=0)
    save_steps: float = arg(0, "updates between checkpoints to resume from; 0: none", at_least=0)
    save_total_limit: int = arg(2, "checkpoints to keep; 0: all", at_least=0)
    save_actor_steps: float = arg(0, "updates between saved actors; 0: only the last", at_least=0)
    save_actor_limit: int = arg(0, "saved actors to keep; 0: all", at_least=0)
    keep_best: str | None = arg(
        None,
        "the metric of actor_best/: eval/loss, or eval/x:max or :min",
        only_with="eval_dataset_name",
    )
    stop_after: int = arg(0, "end after N evaluations without a better one; 0: never", at_least=0)
    push_to_hub: str | None = arg(None, "upload the actor to this hub repository")
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = arg(
        None, "dtype of saved actors; default: as trained. Checkpoints stay exact"
    )
    resume: str = arg("never", "never, auto (the newest in --output_dir) or a checkpoint's path")
    values_steps: float = arg(
        0, "updates between records of each sample's values (docs/rows.md); 0: none", at_least=0
    )
    values_tokens: bool = arg(
        False, "record the log-prob of each trained token, too", only_with="values_steps"
    )
    report_to: list[str] = arg(["tensorboard"], "names of accelerate's trackers; or none")


@dataclass
class SharedArgs(SavingArgs, AdapterArgs, UpdateArgs, DataArgs):
    """The arguments of every recipe. The last base class's fields come first (dataclass order)."""

    # Further arguments that a resumed run may change, besides those of all recipes.
    may_change: ClassVar[set[str]] = set()
