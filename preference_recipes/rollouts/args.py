"""The arguments of recipes that sample, and of those whose samples are scored."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from common.shared_args import SharedArgs, arg


@dataclass
class RolloutArgs(SharedArgs):
    """The arguments of recipes that learn from their own samples."""

    rollout_batch_size: int = arg(128, "prompts of one rollout, over all processes", at_least=1)
    n_samples_per_prompt: int = arg(1, "responses to each prompt", at_least=1)
    generate_batch_size: int = arg(0, "responses generated at once; 0: as many as fit", at_least=0)
    score_batch_size: int = arg(0, "responses scored at once; 0: as many as fit", at_least=0)
    lora_dropout: float = arg(0.0, "0, since the sampler has no dropout", at_least=0, at_most=0)
    num_epochs_per_rollout: int = arg(1, "passes over the samples of a rollout", at_least=1)
    max_new_tokens: int = arg(256, "longest response", at_least=1)
    temperature: float = arg(1.0, "for sampling and for every log-prob in training", above=0)
    share_prompts: bool = arg(True, "compute a prompt once for its responses")
    vllm_url: list[str] | None = arg(None, "vLLM servers that sample, see docs/vllm.md")
    sampler_correction: Literal["token_truncate", "token_mask", "sequence_mask", "none"] = arg(
        "sequence_mask",
        "how losses are weighted where a server sampled, see docs/vllm.md",
        only_with="vllm_url",
    )
    sampler_correction_max: float = arg(
        3.0, "bound of --sampler_correction's ratio", only_with="vllm_url", at_least=1
    )
    max_sampler_difference: float | None = arg(
        None, "largest log-prob gap to a server", only_with="vllm_url", at_least=0
    )
    rollouts_ahead: int = arg(
        0, "1: servers sample a rollout ahead", only_with="vllm_url", at_least=0, at_most=1
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
    """The arguments of recipes whose samples are scored by a reward model or by functions."""

    reward_model_name_or_path: str | None = arg(None, "a reward model with one label")
    reward_function: list[str] | None = arg(None, "one or several MODULE:NAME, see docs/ppo.md")
    reward_weights: list[float] | None = arg(None, "in order: model, each function, environment")
    environment: str | None = arg(None, "MODULE:CLASS that replies, see docs/environments.md")
    max_turns: int = arg(
        8, "answers of the model in one response", only_with="environment", at_least=1
    )
    environment_timeout: float = arg(
        60.0, "seconds a call may take; 0: no limit", only_with="environment", at_least=0
    )
    normalize_reward: bool = arg(
        False,
        "normalise the reward model's scores, see docs/ppo.md",
        only_with="reward_model_name_or_path",
    )

    may_change: ClassVar[set[str]] = RolloutArgs.may_change | {"environment_timeout"}
