"""The arguments that all recipes share, and those of recipes that sample or are rewarded.

A recipe's `Args` adds its own fields, and overrides a shared one where its default or its meaning
is the algorithm's.
"""

import sys
from collections.abc import Iterable
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from transformers.hf_argparser import HfArg

# The schedules of `transformers.get_scheduler` that need no further settings.
SchedulerType = Literal[
    "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"
]


class Bounds(NamedTuple):
    """The range of an argument's values; None where there is no such bound."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def describe(self) -> str:
        """Returns the range in words, such as `at least 0 and below 1`."""
        named = {name.replace("_", " "): limit for name, limit in self._asdict().items()}
        return " and ".join(f"{name} {limit}" for name, limit in named.items() if limit is not None)

    def contains(self, value: float) -> bool:
        """Whether a value is in the range."""
        return not (
            (self.at_least is not None and value < self.at_least)
            or (self.above is not None and value <= self.above)
            or (self.at_most is not None and value > self.at_most)
            or (self.below is not None and value >= self.below)
        )


def arg(
    *,
    help: str,
    default: Any = MISSING,
    default_factory: Any = MISSING,
    with_lora: Any = None,
    **bounds: float,
):
    """Returns a field of a recipe's `Args`: transformers' `HfArg`, with a range for its values.

    Args:
        with_lora: the default at `--lora_r` above 0; None: the same.
        bounds: fields of `Bounds`, such as `at_least=0`. A default of None is not checked.
    """
    metadata = {"bounds": Bounds(**bounds) if bounds else None, "with_lora": with_lora}
    return HfArg(default=default, default_factory=default_factory, help=help, metadata=metadata)


@dataclass
class DataArgs:
    """The model that is trained, and the data that it is trained on."""

    model_name_or_path: str | None = arg(
        default=None, help="the model to train: a hub name or a folder"
    )
    dataset_name: list[str] | None = arg(
        default=None, help="one or several of hub name, hub name:config, file or folder"
    )
    dataset_weights: list[float] | None = arg(
        default=None,
        help="one for each --dataset_name. 2: each row twice per epoch; 0.5: half of the rows, the "
        "other half in the next epoch",
    )
    dataset_split: str = arg(default="train", help="split of --dataset_name")
    eval_dataset_name: list[str] | None = arg(
        default=None,
        help="held-out rows, one or several sets; a column `answer` adds exact match",
    )
    eval_dataset_split: str = arg(
        default="train", help="split of --eval_dataset_name; a local file is the split train"
    )
    columns: list[str] | None = arg(
        default=None, help="FORMAT=YOURS for columns with other names, such as prompt=question"
    )
    chat_template: str | None = arg(
        default=None, help="a Jinja file that replaces the model's own chat template"
    )
    chat_template_kwargs: str | None = arg(
        default=None,
        help="variables of the chat template as a JSON object, such as "
        '{"enable_thinking": false}; saved in the template of the actor',
    )
    strings_as_messages: bool = arg(
        default=False,
        help="make prompts and answers that are strings turns of user and assistant",
    )
    output_dir: str | None = arg(default=None, help="default: runs/<recipe>/<date-time>")
    max_length: int = arg(
        default=1024,
        at_least=2,
        help="tokens of prompt and answer; longer ones are cut at the end",
    )
    preview: int = arg(
        default=0,
        at_least=0,
        help="show how the first N rows of each training set are read, token by token, and end; "
        "loads no model",
    )


@dataclass
class UpdateArgs:
    """The updates: their samples, their learning rate, how they are computed."""

    train_batch_size: int = arg(
        default=64, at_least=1, help="samples of one update, over all processes"
    )
    micro_train_batch_size: int | None = arg(
        default=None,
        at_least=1,
        help="samples that one process runs at once; without this and micro_train_tokens it is "
        "4 or the nearest that divides, and on a GPU as many as fit 16384 tokens",
    )
    micro_train_tokens: int = arg(
        default=0,
        at_least=0,
        help="above 0: a micro-batch holds as many samples as fit into this many tokens, "
        "padding counted, and of a pair both copies of the prompt",
    )
    max_epochs: int = arg(default=1, at_least=0, help="passes over the data")
    max_steps: int = arg(default=0, at_least=0, help="updates; 0: as many as the epochs hold")
    learning_rate: float = arg(default=1e-5, with_lora=1e-4, at_least=0, help="peak learning rate")
    lr_scheduler_type: SchedulerType = arg(default="linear", help="see transformers.get_scheduler")
    warmup_steps: float = arg(
        default=0.03, at_least=0, help="updates of warm-up; below 1: a share of all"
    )
    weight_decay: float = arg(
        default=0.0, at_least=0, help="on matrices only, not on biases and norms"
    )
    optimizer: Literal["adamw", "muon"] = arg(
        default="adamw", help="muon: for the matrices of hidden layers, AdamW for all else"
    )
    adam_epsilon: float = arg(default=1e-8, at_least=0, help="Adam's epsilon")
    max_grad_norm: float = arg(default=1.0, at_least=0, help="gradient clipping; 0: none")
    gradient_checkpointing: bool = arg(default=False, help="saves memory, costs time")
    attn_implementation: str | None = arg(default=None, help="sdpa, eager, flash_attention_2 ...")
    seed: int = arg(
        default=0, at_least=0, below=2**32, help="for the data order, sampling and dropout"
    )


@dataclass
class AdapterArgs:
    """Low-rank adapters."""

    lora_r: int = arg(
        default=0,
        at_least=0,
        help="rank of low-rank adapters, such as 16; 0: train all weights. Above 0 the default "
        "learning rate is ten times as high",
    )
    lora_alpha: float | None = arg(
        default=None, above=0, help="adapters are scaled by alpha / r; default: 2 * lora_r"
    )
    lora_dropout: float = arg(default=0.0, at_least=0, below=1, help="dropout before the adapters")
    lora_target_modules: list[str] = arg(
        default_factory=lambda: ["all-linear"],
        help="names of the layers that get an adapter, such as q_proj v_proj",
    )
    load_in_4bit: bool = arg(
        default=False, help="pack the frozen weights below the adapters (QLoRA); one GPU or DDP"
    )


@dataclass
class SavingArgs:
    """When a run logs, evaluates and saves."""

    logging_steps: float = arg(
        default=1, at_least=0, help="updates between log lines; below 1: a share of all updates"
    )
    eval_steps: float = arg(
        default=0,
        at_least=0,
        help="updates between evaluations; 0: only before and after training",
    )
    save_steps: float = arg(
        default=0, at_least=0, help="updates between checkpoints to resume from; 0: none"
    )
    save_total_limit: int = arg(default=2, at_least=0, help="checkpoints to keep; 0: all")
    save_actor_steps: float = arg(
        default=0,
        at_least=0,
        help="updates between saved actors; 0: only the last, in <output_dir>/actor",
    )
    save_actor_limit: int = arg(default=0, at_least=0, help="saved actors to keep; 0: all")
    keep_best: str | None = arg(
        default=None,
        help="a metric of evaluations: the actor of the best one is saved in "
        "<output_dir>/actor_best. Lower is better for names that end in loss or kl, higher for "
        "others; eval/loss:min or eval/x:max says it",
    )
    stop_after: int = arg(
        default=0,
        at_least=0,
        help="end the run after as many evaluations in a row without a better one; 0: never",
    )
    push_to_hub: str | None = arg(
        default=None,
        help="upload the actor at the end (with keep_best the best one) to this repository of the "
        "hub, NAME or OWNER/NAME, which is made private if it is new",
    )
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = arg(
        default=None, help="dtype of saved actors; default: as trained. Checkpoints stay exact"
    )
    resume: str = arg(
        default="never",
        help="never, auto (the newest whole checkpoint in --output_dir) or a checkpoint's path",
    )
    report_to: list[str] = arg(
        default_factory=lambda: ["tensorboard"],
        help="tensorboard, wandb, trackio, mlflow ... or none; metrics.jsonl is always written",
    )


@dataclass
class SharedArgs(SavingArgs, AdapterArgs, UpdateArgs, DataArgs):
    """What every recipe takes. The fields of the last base class come first (dataclass order)."""

    # Besides what all recipes share, a resumed run may change these.
    may_change: ClassVar[set[str]] = set()


@dataclass
class RolloutArgs(SharedArgs):
    """What recipes take that learn from their own samples."""

    rollout_batch_size: int = arg(
        default=128, at_least=1, help="prompts of one rollout, over all processes"
    )
    n_samples_per_prompt: int = arg(default=1, at_least=1, help="responses to each prompt")
    generate_batch_size: int = arg(
        default=0,
        at_least=0,
        help="responses that one process generates at once; 0: as many as fit",
    )
    score_batch_size: int = arg(
        default=0, at_least=0, help="responses that one process scores at once; 0: as many as fit"
    )
    num_epochs_per_rollout: int = arg(
        default=1, at_least=1, help="passes over the samples of a rollout"
    )
    max_new_tokens: int = arg(default=256, at_least=1, help="longest response")
    temperature: float = arg(
        default=1.0, above=0, help="for sampling and for every log-prob in training"
    )
    eval_temperature: float = arg(
        default=0.0, at_least=0, help="for the responses of an evaluation; 0: greedy decoding"
    )
    eval_samples: int = arg(
        default=1,
        at_least=1,
        help="responses to each held-out prompt; above 1 needs --eval_temperature",
    )
    share_prompts: bool = arg(
        default=True,
        help="compute a prompt once for its responses, where the model allows it",
    )
    vllm_url: list[str] | None = arg(
        default=None,
        help="one or several vLLM servers that sample, such as http://127.0.0.1:8000, started as "
        "docs/vllm.md says; default: transformers generates",
    )
    sampler_correction: Literal["token_truncate", "token_mask", "sequence_mask", "none"] = arg(
        default="sequence_mask",
        help="how losses are weighted by the ratio of training's probabilities to a vLLM "
        "server's, see docs/vllm.md",
    )
    sampler_correction_max: float = arg(
        default=3.0, at_least=1, help="the largest of these ratios that counts"
    )
    max_sampler_difference: float | None = arg(
        default=None,
        at_least=0,
        help="end the run if a server's log-probs differ from training's by more on average; "
        "default: by precision, see docs/vllm.md",
    )

    rollouts_ahead: int = arg(
        default=0,
        at_least=0,
        at_most=1,
        help="1: vLLM servers sample the next rollout while this one is trained on, so with "
        "weights that are one rollout old",
    )

    may_change: ClassVar[set[str]] = {
        "vllm_url",
        "max_sampler_difference",
        "generate_batch_size",
        "score_batch_size",
        "share_prompts",
    }


@dataclass
class RewardArgs(RolloutArgs):
    """What recipes take whose samples are scored by a reward model, by functions, or by both."""

    reward_model_name_or_path: str | None = arg(
        default=None, help="a reward model with one label, such as recipes/reward.py saves"
    )
    reward_function: list[str] | None = arg(
        default=None,
        help="one or several MODULE:NAME, functions (prompts, responses, **columns) -> scores",
    )
    reward_weights: list[float] | None = arg(
        default=None,
        help="one for the reward model, if there is one, then one for each function; default: 1 "
        "each",
    )
    environment: str | None = arg(
        default=None,
        help="MODULE:CLASS that answers the model or has tools that it may call, one instance for "
        "each response, see docs/environments.md",
    )
    max_turns: int = arg(
        default=8, at_least=1, help="answers of the model in one response, with --environment"
    )
    environment_timeout: float = arg(
        default=60.0,
        at_least=0,
        help="seconds that a call of an environment may take; 0: no limit",
    )
    environment_errors: Literal["stop", "drop"] = arg(
        default="stop",
        help="what an environment that fails does: it ends the run, or its response counts as not "
        "sampled (GRPO)",
    )
    normalize_reward: bool = arg(
        default=False,
        help="normalise the reward model's scores by the mean and standard deviation in its config",
    )

    may_change: ClassVar[set[str]] = RolloutArgs.may_change | {
        "environment_timeout",
        "environment_errors",
    }


def refuse_changed(args, names: Iterable[str], why: str) -> None:
    """Refuses arguments that would be ignored, unless they have their defaults.

    Raises:
        SystemExit: with the first of them, its value, and `why` it would be.
    """
    for name in names:
        if getattr(args, name) != type(args).__dataclass_fields__[name].default:
            sys.exit(f"--{name} {getattr(args, name)}: {why}")
