"""Proximal Policy Optimization: sample answers, score them, raise the better than expected ones.

Schulman et al. 2017, arXiv:1707.06347; for language models Ziegler et al. 2019, arXiv:1909.08593,
and the details of Huang et al. 2024, arXiv:2403.17031. Loss of an update, over its response tokens,
with r_t = pi(a_t)/pi_old(a_t), A_t by GAE, and V clipped around V_old:

    loss = mean of -min(r_t A_t, clip(r_t, 1 - c, 1 + c) A_t)
                   + vf_coef * 1/2 max((V_t - R_t)^2, (clip(V_t) - R_t)^2)

Demo, offline:
    python recipes/ppo.py
One GPU:
    accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/ppo.py \
        --model_name_or_path M --dataset_name D --reward_model_name_or_path R
N GPUs:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 recipes/ppo.py \
        --model_name_or_path M --dataset_name D --reward_model_name_or_path R
DeepSpeed fp16:
    accelerate launch --config_file accelerate_configs/ds_fp16.yaml recipes/ppo.py

Every argument, every metric: docs/ppo.md
"""

# ============================================================ imports
import common

# Somebody else's package of this name may be found first.
if getattr(common, "PROJECT", None) != "preference-recipes":
    raise SystemExit(
        f"'common' is {common.__file__ or common.__path__[0]}, not this recipe's package: move or "
        "rename it, or keep the recipe in another folder, and `pip install -e` its repository"
    )
common.check_recipe(__file__)

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from transformers import get_scheduler
from transformers.hf_argparser import HfArg

from common import (
    actor,
    arguments,
    batches,
    checkpoint,
    console,
    engine,
    errors,
    guards,
    launch,
    optim,
)
from common.checkpoint import Run
from common.data import dataset, formats, prompts
from common.metrics import Metrics
from common.models import architecture, checks, load, logprobs, lora, merge, packing, prepare
from common.models.logprobs import LogProbModel, ScoreModel
from common.progress import Progress
from common.rollout import answers, generation, rewards, sizes
from common.rollout.rewards import Scores
from common.rollout.samples import Collected, Samples, sample_lengths
from common.rollout.schedule import RolloutSchedule


# ============================================================ arguments
@dataclass
class Args:
    model_name_or_path: str | None = HfArg(
        default=None, help="the policy to train, usually an SFT model: a hub name or a folder"
    )
    ref_model_name_or_path: str | None = HfArg(
        default=None,
        help="the reference policy; default: the policy before training. None at --kl_coef 0",
    )
    critic_model_name_or_path: str | None = HfArg(
        default=None,
        help="what the critic starts from; default: the reward model, or else the policy",
    )
    reward_model_name_or_path: str | None = HfArg(
        default=None, help="a reward model with one label, such as recipes/reward.py saves"
    )
    reward_function: list[str] | None = HfArg(
        default=None,
        help="one or several MODULE:NAME, functions (prompts, responses, **columns) -> scores",
    )
    reward_weights: list[float] | None = HfArg(
        default=None,
        help="of the reward model, if there is one, and then of each function; default: 1 each",
    )
    reward_timeout: float = HfArg(
        default=600.0, help="seconds that a call of a reward function may take; 0: any"
    )
    dataset_name: list[str] | None = HfArg(
        default=None,
        help="prompts: one or several of hub name, hub name:config, file or folder; "
        "the reward function gets the other columns",
    )
    dataset_weights: list[float] | None = HfArg(
        default=None,
        help="of several --dataset_name, one each. 2: each row twice an epoch; 0.5: half of the "
        "rows, the other half in the next epoch",
    )
    dataset_split: str = HfArg(default="train", help="split of --dataset_name")
    eval_dataset_name: list[str] | None = HfArg(
        default=None,
        help="held-out prompts, one or several sets; a column `answer` adds exact match",
    )
    eval_dataset_split: str = HfArg(
        default="train", help="split of --eval_dataset_name; a local file is the split train"
    )
    columns: list[str] | None = HfArg(
        default=None, help="FORMAT=YOURS for columns with other names, such as prompt=question"
    )
    chat_template: str | None = HfArg(
        default=None, help="a Jinja file that replaces the model's own chat template"
    )
    chat_template_kwargs: str | None = HfArg(
        default=None,
        help="variables of the chat template as a JSON object, such as "
        '{"enable_thinking": false}; saved in the template of the actor',
    )
    strings_as_messages: bool = HfArg(
        default=False,
        help="make prompts and answers that are strings turns of user and assistant",
    )
    output_dir: str | None = HfArg(default=None, help="default: runs/ppo/<date-time>")

    rollout_batch_size: int = HfArg(default=1024, help="prompts of one rollout, over all processes")
    n_samples_per_prompt: int = HfArg(default=1, help="responses to each prompt")
    generate_batch_size: int = HfArg(
        default=0, help="responses that one process generates at once; 0: as many as fit"
    )
    score_batch_size: int = HfArg(
        default=0, help="responses that one process scores at once; 0: as many as fit"
    )
    num_epochs_per_rollout: int = HfArg(default=1, help="passes over the samples of a rollout")
    max_new_tokens: int = HfArg(default=256, help="longest response")
    temperature: float = HfArg(default=1.0, help="of sampling and of every log-prob in training")
    eval_temperature: float = HfArg(
        default=0.0, help="of the responses in an evaluation; 0: greedy decoding"
    )
    eval_samples: int = HfArg(
        default=1, help="responses to each held-out prompt; above 1 needs --eval_temperature"
    )

    kl_coef: float = HfArg(default=0.05, help="weight of the KL to the reference; 0: no reference")
    kl_estimator: Literal["k1", "k2", "k3"] = HfArg(default="k1", help="see kl_estimate")
    kl_in: Literal["reward", "loss"] = HfArg(
        default="reward", help="reward: taken from each token's reward; loss: a term of the loss"
    )
    kl_target: float = HfArg(
        default=0.0, help="adapts the coefficient to this KL of a response; 0: it is fixed"
    )
    kl_horizon: float = HfArg(
        default=10000, help="larger: the coefficient adapts more slowly (samples)"
    )
    reward_clip: float = HfArg(
        default=0.0, help="scores are clipped to plus and minus this; 0: no clipping"
    )
    normalize_reward: bool = HfArg(
        default=False,
        help="normalise the reward model's scores by the mean and the deviation in its config",
    )
    missing_eos_penalty: float = HfArg(
        default=0.0,
        help="taken from the score of a response that does not end within --max_new_tokens",
    )
    gamma: float = HfArg(default=1.0, help="discount")
    gae_lambda: float = HfArg(default=1.0, help="lambda of generalised advantage estimation")
    clip_range: float = HfArg(default=0.2, help="clipping of the ratio, below and above 1")
    clip_range_high: float | None = HfArg(default=None, help="clipping above 1, if it is to differ")
    dual_clip: float = HfArg(
        default=0.0, help="bound above 1 on the ratio where the advantage is negative; 0: no bound"
    )
    value_clip_range: float = HfArg(
        default=0.2, help="clipping of the values around the old ones; 0: none"
    )
    vf_coef: float = HfArg(default=0.1, help="weight of the value loss")
    critic_warmup_rollouts: int = HfArg(
        default=0, help="rollouts at the start in which only the critic learns"
    )

    train_batch_size: int = HfArg(default=128, help="samples of one update, over all processes")
    micro_train_batch_size: int | None = HfArg(
        default=None,
        help="samples that one process runs at once; without this and micro_train_tokens it is "
        "4, and on a GPU as many as fit 16384 tokens",
    )
    micro_train_tokens: int = HfArg(
        default=0,
        help="above 0: a micro-batch holds as many samples as fit into this many tokens, "
        "padding counted",
    )
    share_prompts: bool = HfArg(
        default=True,
        help="compute a prompt once for its responses, where the model allows it",
    )
    max_epochs: int = HfArg(default=1, help="passes over the prompts")
    max_steps: int = HfArg(default=0, help="updates; 0: as many as the epochs hold")
    max_length: int = HfArg(
        default=1024,
        help="of prompt and response; prompts without room for --max_new_tokens are left out",
    )
    learning_rate: float = HfArg(default=1e-6, help="peak learning rate of the actor")
    critic_learning_rate: float = HfArg(default=1e-5, help="peak learning rate of the critic")
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"
    ] = HfArg(default="linear", help="see transformers.get_scheduler")
    warmup_steps: float = HfArg(default=0.03, help="updates of warm-up; below 1: a share of all")
    weight_decay: float = HfArg(default=0.0, help="on matrices only, not on biases and norms")
    adam_epsilon: float = HfArg(default=1e-8, help="Adam's epsilon")
    max_grad_norm: float = HfArg(
        default=1.0, help="clipping of the joint norm of actor and critic; 0: none"
    )
    lora_r: int = HfArg(
        default=0, help="rank of low-rank adapters, such as 16; 0: train all weights"
    )
    lora_alpha: float | None = HfArg(
        default=None, help="adapters are scaled by alpha / r; default: 2 * lora_r"
    )
    lora_dropout: float = HfArg(default=0.0, help="dropout before the adapters")
    lora_target_modules: list[str] = HfArg(
        default_factory=lambda: ["all-linear"],
        help="names of the layers that get an adapter, such as q_proj v_proj",
    )
    load_in_4bit: bool = HfArg(
        default=False, help="pack the frozen weights below the adapters (QLoRA); one GPU or DDP"
    )
    gradient_checkpointing: bool = HfArg(default=False, help="saves memory, costs time")
    attn_implementation: str | None = HfArg(default=None, help="sdpa, eager, flash_attention_2 ...")
    seed: int = HfArg(default=0, help="of the data order and of sampling")

    logging_steps: float = HfArg(
        default=1, help="updates between log lines; below 1: a share of all updates"
    )
    eval_steps: float = HfArg(
        default=0, help="updates between evaluations; 0: only before and after training"
    )
    save_steps: float = HfArg(default=0, help="updates between checkpoints to resume from; 0: none")
    save_total_limit: int = HfArg(default=2, help="checkpoints to keep; 0: all")
    save_actor_steps: float = HfArg(
        default=0, help="updates between saved actors; 0: only the last, in <output_dir>/actor"
    )
    save_actor_limit: int = HfArg(default=0, help="saved actors to keep; 0: all")
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = HfArg(
        default=None, help="dtype of saved actors; default: as trained. Checkpoints stay exact"
    )
    resume: str = HfArg(
        default="never",
        help="never, auto (the newest whole checkpoint in --output_dir) or a checkpoint's path",
    )
    report_to: list[str] = HfArg(
        default_factory=lambda: ["tensorboard"],
        help="tensorboard, wandb, trackio, mlflow ... or none; metrics.jsonl is always written",
    )
    debug_overflow: bool = HfArg(
        default=False, help="name the module and the tensor that overflow; slow"
    )

    # Besides what all recipes share, a resumed run may change these.
    may_change: ClassVar[set[str]] = {
        "generate_batch_size",
        "score_batch_size",
        "micro_rollout_batch_size",  # of older checkpoints
        "share_prompts",
        "reward_timeout",
        "eval_temperature",
        "eval_samples",
    }
    # Arguments of older releases, and what replaced them.
    renamed: ClassVar[dict[str, str]] = {
        "micro_rollout_batch_size": "--generate_batch_size and --score_batch_size",
    }


# ============================================================ the algorithm
# The random numbers of a rollout are drawn from [seed, rollout, stream]. No stream repeats another.
SAMPLING_STREAM = 1
ORDER_STREAM = 2
# Every evaluation takes the same numbers, from [seed, 0, stream], so that they compare.
EVALUATION_STREAM = 3


class ActorCritic(LogProbModel):
    """Actor (`model`) and critic in one module.

    So there is one engine, one backward pass and one checkpoint under every strategy.
    """

    def __init__(self, policy_model, critic):
        super().__init__(policy_model)
        self.critic = ScoreModel(critic)
        # FSDP2 gathers the critic by itself, so that it stays in shards while the actor generates.
        units = {*self._no_split_modules, *self.critic._no_split_modules, "ScoreModel"}
        self._no_split_modules = sorted(units)

    def forward(
        self,
        batch: dict,
        temperature: float = 1.0,
        check: bool = False,
        with_values: bool = True,
    ) -> dict:
        """Returns what `LogProbModel.forward` does, with `entropy` and `values`.

        The value of a token is that of the state in which it was chosen: the text before it.

        Args:
            with_values: without them the critic does not run.
        """
        output = super().forward(batch, temperature, ("entropy",), check)
        if not with_values:
            return output
        values = self.critic(batch, batch["before"])
        output["values"] = logprobs.by_answer(values, batch)
        return output


def kl_estimate(logps: torch.Tensor, ref_logps: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimates KL(policy || reference) of each token from the sampled token alone.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    difference = logps - ref_logps
    if estimator == "k1":  # unbiased, may be negative
        return difference
    if estimator == "k2":  # biased, never negative, little variance
        return difference**2 / 2
    return torch.exp(-difference) - 1 + difference  # k3: unbiased, never negative


def final_scores(
    scores: torch.Tensor, ended: torch.Tensor, reward_clip: float, missing_eos_penalty: float
) -> torch.Tensor:
    """Clips scores `[samples]`, if `reward_clip` is not 0, and then penalises missing ends."""
    if reward_clip:
        scores = scores.clamp(-reward_clip, reward_clip)
    return scores - missing_eos_penalty * ~ended


def token_rewards(
    scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float
) -> torch.Tensor:
    """Returns the reward of each token `[samples, length]`, zero behind a response.

    It is minus the KL of the token and, on the last token, the score `[samples]` of the response.
    Source: arXiv:1909.08593 eq. 2.
    """
    places = torch.arange(mask.shape[1], device=mask.device)
    is_last = places == mask.sum(1, keepdim=True) - 1
    return torch.where(mask, -kl_coef * kl, 0.0) + is_last * scores[:, None]


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns advantages and returns `[samples, length]`, zero behind a response.

    The state at the end of a response has the value zero. Sources: Generalised Advantage
    Estimation, arXiv:1506.02438 eq. 16; a return is advantage plus value, TD(lambda).
    """
    values = torch.where(mask, values, 0.0)
    advantages = torch.zeros_like(values)
    next_values = 0.0
    last_gae = 0.0
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        last_gae = torch.where(mask[:, t], delta + gamma * gae_lambda * last_gae, 0.0)
        advantages[:, t] = last_gae
        next_values = values[:, t]
    returns = torch.where(mask, advantages + values, 0.0)
    return advantages, returns


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Normalises the values where `mask` is true to mean 0 and deviation 1; elsewhere 0."""
    kept = values[mask].double()
    whitened = (values - kept.mean()) * torch.rsqrt(kept.var(unbiased=False) + 1e-8)
    return torch.where(mask, whitened, 0.0).to(values.dtype)


def policy_losses(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the policy loss of each token, and where clipping decided it.

    Sources: arXiv:1707.06347 eq. 7; another range above 1: DAPO, arXiv:2503.14476 section 3.1;
    dual clip: arXiv:1912.09729.
    """
    ratios = torch.exp(logps - old_logps)
    unclipped = -advantages * ratios
    clipped = -advantages * ratios.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(unclipped, clipped)
    if dual_clip:
        bounded = torch.minimum(losses, -advantages * dual_clip)
        losses = torch.where(advantages < 0, bounded, losses)
    return losses, losses != unclipped


def value_losses(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss of each token's value, and where clipping decided it.

    Source: PPO's first code, see arXiv:2403.17031.
    """
    clipped_values = values
    if clip:
        # Not old + clamp(values - old): its rounding would count as clipping.
        clipped_values = values.clamp(old_values - clip, old_values + clip)
    unclipped = (values - returns) ** 2
    clipped = (clipped_values - returns) ** 2
    return torch.maximum(unclipped, clipped) / 2, clipped > unclipped


def explained_variance(
    values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Returns the share of the returns' variance over tokens that the critic's values explain.

    It is 1 - Var(returns - values) / Var(returns): 1 where they agree, 0 where a constant would do
    as well, below 0 where it would do better. NaN where the returns hardly differ.
    """
    kept = returns[mask].double()
    errors = kept - values[mask].double()
    variance = kept.var(unbiased=False)
    return torch.where(variance > 1e-8, 1 - errors.var(unbiased=False) / variance, torch.nan)


def next_kl_coef(kl_coef: float, kl: float, target: float, horizon: float, samples: int) -> float:
    """Returns the KL coefficient after a rollout whose responses had the KL `kl` on average.

    Source: arXiv:1909.08593 section 2.2 and its code.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * samples / horizon)


def collate(rollout: dict, numbers: list[int], share_prompts: bool, device) -> dict:
    """Returns samples of a rollout as the model reads them."""
    prompts = [rollout["prompts"][number] for number in numbers]
    responses = [rollout["responses"][number] for number in numbers]
    return packing.make_batch(prompts, responses, share_prompts, device)


def compare(
    output: dict,
    old: dict,
    weights: torch.Tensor,
    kl_coef: float,
    actor_learns: bool,
    args: Args,
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[dict, torch.Tensor]]]:
    """Returns the losses of response tokens, their weights, and what is logged of them.

    Args:
        output: what `ActorCritic.forward` returned.
        old: the rollout's `mask logps values returns advantages` of the same samples, and
            `ref_logps` where there is a reference.
        weights: `[samples]`, 0 for a padding row.

    Returns:
        losses and weights `[samples, length]`; metrics, each a dict of values with their weights.
    """
    logps = output["logps"]
    clip_high = args.clip_range if args.clip_range_high is None else args.clip_range_high
    of_policy, policy_clipped = policy_losses(
        logps, old["logps"], old["advantages"], args.clip_range, clip_high, args.dual_clip
    )
    of_values, values_clipped = value_losses(
        output["values"], old["values"], old["returns"], args.value_clip_range
    )
    of_actor = of_policy
    if args.kl_in == "loss" and "ref_logps" in old:
        of_actor = of_policy + kl_coef * kl_estimate(logps, old["ref_logps"], args.kl_estimator)
    losses = of_actor * float(actor_learns) + args.vf_coef * of_values

    token_weights = old["mask"] * weights[:, None]
    of_tokens = {
        "loss": losses,
        "loss/policy_avg": of_policy,
        "loss/value_avg": of_values,
        "policy/approxkl_avg": (logps - old["logps"]) ** 2 / 2,
        "policy/clipfrac_avg": policy_clipped.float(),
        "policy/entropy_avg": output["entropy"],
        "val/clipfrac_avg": values_clipped.float(),
        "val/ratio": torch.exp(logps - old["logps"]),
    }
    return losses, token_weights, [(of_tokens, token_weights)]


def sample(
    accelerator, model, policy, tokenizer, columns: dict, rollout_number: int, args: Args
) -> Samples:
    """Draws responses to prompts.

    The seed and the number of the rollout decide the draws: not the number of processes, nor what
    was drawn before.
    """
    draws = np.random.default_rng([args.seed, rollout_number, SAMPLING_STREAM])
    n_samples = len(columns["prompt_ids"]) * args.n_samples_per_prompt
    return generation.respond(
        accelerator,
        model,
        policy.model,
        tokenizer,
        columns,
        args.n_samples_per_prompt,
        args.generate_batch_size,
        args.max_new_tokens,
        temperature=args.temperature,
        uniforms=draws.random((n_samples, args.max_new_tokens)),
    )


@torch.no_grad()
def read_tokens(
    accelerator, model, reference, samples: Samples, args: Args
) -> dict[str, torch.Tensor]:
    """Returns `logps values` of response tokens, before any update of the rollout.

    They come from the forward pass that trains, not from generation, whose rounding differs.

    Args:
        reference: adds `ref_logps`; None where there is none.

    Returns:
        `[samples, longest response]` each, zero behind a response, the same on every process.
    """
    collected = Collected(accelerator)
    scoring_batches = samples.scoring_batches(
        accelerator, args.score_batch_size, args.share_prompts
    )
    with checks.evaluation_mode(model):
        for numbers, inputs in scoring_batches:
            output = model(inputs, args.temperature)
            found = {"logps": output["logps"], "values": output["values"]}
            if reference is not None:
                found["ref_logps"] = reference(inputs, args.temperature)["logps"]
            collected.add(numbers, inputs["mask"], **found)
    return collected.gather()


def check_rollout(
    samples: Samples, scores: torch.Tensor, old: dict, progress: Progress, output_dir: str
) -> None:
    """Stops the run if a score, a log-prob or a value is not finite.

    It must be called before advantages are whitened, which spreads such a value over all samples.
    The sampler's log-probs count, too: where a logit is NaN, the drawn token means nothing.
    """
    token_values = {**old, "sampler_logps": samples.padded_sampler_logps}
    # A sum is finite only if all its parts are.
    sums = sum(token_values.values()) + scores[:, None]
    tensors = {"scores": scores, **token_values}
    guards.check_finite([(samples.rows, sums, samples.mask)], progress, output_dir, tensors)


def estimate_advantages(
    samples: Samples, scores: torch.Tensor, old: dict, kl_coef: float, args: Args
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns what the updates of a rollout compare with, and what is logged of its responses.

    Args:
        scores: `[samples]`.
        old: of the response tokens, see `read_tokens`.

    Returns:
        tensors `[samples, longest response]`, see `compare`; metrics `[samples]`, NaN where a
        sample has no such value.
    """
    mask = samples.mask
    kl = torch.zeros(mask.shape)
    if "ref_logps" in old:
        kl = torch.where(mask, kl_estimate(old["logps"], old["ref_logps"], args.kl_estimator), 0.0)
    penalty = kl_coef if args.kl_in == "reward" else 0.0
    by_token = token_rewards(scores, kl, mask, penalty)
    advantages, returns = gae(by_token, old["values"], mask, args.gamma, args.gae_lambda)
    tensors = {
        "mask": mask,
        **old,
        "returns": returns,
        "advantages": whiten(advantages, mask),
    }
    lengths = mask.sum(1)
    explained = explained_variance(old["values"], returns, mask)
    logged = {
        **({"objective/kl": kl.sum(1)} if "ref_logps" in old else {}),
        "objective/entropy": -old["logps"].sum(1),
        "objective/scores": scores,
        "objective/kl_coef": torch.full_like(scores, kl_coef),
        "objective/non_score_reward": by_token.sum(1) - scores,
        "objective/rlhf_reward": by_token.sum(1),
        "val/explained_variance": explained.expand(len(scores)),
        "responses/length": lengths,
        "responses/min_length": lengths,
        "responses/max_length": lengths,
        "responses/eos_rate": samples.ended.float(),
    }
    return tensors, logged


def log_rollout(
    accelerator,
    metrics: Metrics,
    tokenizer,
    samples: Samples,
    scores: Scores,
    tensors: dict,
    logged: dict,
) -> None:
    """Adds a rollout's metrics to the next log line, and writes down its samples.

    Args:
        tensors, logged: what `estimate_advantages` returned.
    """
    # Every process holds the whole rollout: one of them counts it.
    counts = float(accelerator.is_main_process)
    values = dict(logged)
    for name, part in scores.parts.items():
        values[f"rewards/{name}/mean"] = part  # NaN: the function returned None
    values["val/returns_avg"] = torch.where(tensors["mask"], tensors["returns"], torch.nan)
    for name, value in values.items():
        value = value.to(accelerator.device)
        # Not to `pending`, which is dropped if the engine skips the rollout's first update: the
        # rollout was made all the same.
        metrics.open.add({name: value}, counts * ~value.isnan())
    if accelerator.is_main_process:
        metrics.log_rollout(scores.total, samples.examples(tokenizer, scores, "rollout"))


def set_learning_rates(optimizer, scheduler, actor_learns: bool) -> None:
    """Gives each parameter group its scheduled learning rate, or zero if it does not learn yet."""
    for group, learning_rate in zip(optimizer.param_groups, scheduler.get_last_lr()):
        group["learns"] = actor_learns or group["name"] == "critic"
        # At a rate of zero, weight decay moves nothing either.
        group["lr"] = learning_rate if group["learns"] else 0.0


def parts_of_norm(grad_norm: float, group_norms: dict[str, float]) -> dict[str, float]:
    """Returns the actor's and the critic's part of the joint gradient norm.

    Args:
        group_norms: their norms up to one common factor.
    """
    joint = math.hypot(*group_norms.values()) or 1.0  # all zero where the update was skipped
    return {f"grad_norm/{name}": grad_norm * norm / joint for name, norm in group_norms.items()}


def check_settings(args: Args) -> None:
    """Refuses sizes that do not divide, and settings that would be ignored or cannot work."""
    n_prompts = args.rollout_batch_size
    n_responses = args.n_samples_per_prompt
    if min(n_prompts, n_responses, args.num_epochs_per_rollout) < 1:
        sys.exit(
            "--rollout_batch_size, --n_samples_per_prompt and --num_epochs_per_rollout must be at "
            "least 1"
        )
    if min(args.generate_batch_size, args.score_batch_size) < 0:
        sys.exit(
            f"--generate_batch_size {args.generate_batch_size} and --score_batch_size "
            f"{args.score_batch_size}: expected at least 1, or 0 for as many as fit"
        )
    check_rollout_size(
        args,
        # make_accelerator refuses 0, with every recipe's message.
        divisor=max(args.train_batch_size, 1),
        divisor_text=f"--train_batch_size {args.train_batch_size}",
    )
    check_rewards(args)
    for name in ("gamma", "gae_lambda"):
        if not 0 <= getattr(args, name) <= 1:
            sys.exit(f"--{name} {getattr(args, name)}: expected 0 to 1")
    at_least_0 = {
        "clip_range": args.clip_range,
        "clip_range_high": args.clip_range_high or 0,
        "value_clip_range": args.value_clip_range,
        "vf_coef": args.vf_coef,
        "critic_learning_rate": args.critic_learning_rate,
        "critic_warmup_rollouts": args.critic_warmup_rollouts,
        "reward_clip": args.reward_clip,
        "reward_timeout": args.reward_timeout,
    }
    for name, number in at_least_0.items():
        if number < 0:
            sys.exit(f"--{name} {number}: below 0")
    if args.temperature <= 0:
        sys.exit(
            f"--temperature {args.temperature}: expected more than 0 "
            "(--eval_temperature 0 makes evaluation greedy)"
        )
    if args.eval_temperature < 0 or args.eval_samples < 1:
        sys.exit(
            f"--eval_temperature {args.eval_temperature} and --eval_samples {args.eval_samples}: "
            "expected at least 0 and at least 1"
        )
    if args.eval_samples > 1 and args.eval_temperature == 0:
        sys.exit(
            f"--eval_samples {args.eval_samples} at --eval_temperature 0 would be the same greedy "
            "response each time: give --eval_temperature above 0"
        )
    if args.dual_clip and args.dual_clip <= 1:
        sys.exit(f"--dual_clip {args.dual_clip}: expected more than 1, or 0 for none")
    check_kl(args)


def describe_rollout(args: Args) -> str:
    """Returns the arithmetic of a rollout's samples, for messages."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    return (
        f"--rollout_batch_size {args.rollout_batch_size} x --n_samples_per_prompt "
        f"{args.n_samples_per_prompt} = {samples} samples"
    )


def check_rollout_size(args: Args, divisor: int, divisor_text: str) -> None:
    """Refuses a rollout whose samples are no multiple of `divisor`; names the nearest that are."""
    # The fewest prompts whose samples are a multiple of `divisor`.
    step = math.lcm(divisor, args.n_samples_per_prompt) // args.n_samples_per_prompt
    if args.rollout_batch_size % step == 0:
        return
    below = args.rollout_batch_size // step * step
    nearest = " or ".join(str(size) for size in (below, below + step) if size)
    sys.exit(
        f"{describe_rollout(args)} are not a multiple of {divisor_text}. "
        f"Nearest that would do: --rollout_batch_size {nearest}."
    )


def check_rewards(args: Args) -> None:
    """Refuses settings by which nothing could be scored."""
    if not args.reward_model_name_or_path and not args.reward_function:
        sys.exit(
            "nothing scores the responses: give --reward_model_name_or_path or --reward_function"
        )
    if args.normalize_reward and not args.reward_model_name_or_path:
        sys.exit(
            "--normalize_reward is for a reward model's scores: give --reward_model_name_or_path"
        )
    if args.reward_clip < 0:
        sys.exit(f"--reward_clip {args.reward_clip}: below 0")


def check_kl(args: Args) -> None:
    """Refuses settings of the KL that would be ignored or cannot work."""
    if args.kl_coef < 0:
        sys.exit(f"--kl_coef {args.kl_coef}: below 0")
    if args.kl_coef == 0 and args.ref_model_name_or_path:
        sys.exit(
            f"--ref_model_name_or_path {args.ref_model_name_or_path}: at --kl_coef 0 there is no "
            "reference, so it would be ignored"
        )
    if args.kl_in == "loss" and args.kl_estimator == "k1":
        sys.exit("--kl_in loss --kl_estimator k1: its mean gradient is zero. Use k2 or k3")
    if args.kl_target < 0:
        sys.exit(f"--kl_target {args.kl_target}: below 0")
    if args.kl_target and args.kl_coef <= 0:
        sys.exit(f"--kl_target {args.kl_target} needs --kl_coef above 0")
    # Else one rollout could turn the sign of the coefficient, see next_kl_coef.
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if args.kl_target and args.kl_horizon <= samples / 5:
        sys.exit(
            f"{describe_rollout(args)}: --kl_target needs --kl_horizon above a fifth of them "
            f"({samples / 5:g})"
        )


def main():
    # ============================================================ accelerator
    args = arguments.parse(Args, demo=common.ASSETS / "ppo.yaml")
    check_settings(args)
    accelerator = launch.make_accelerator(args, "ppo")
    arguments.check_intervals(args)
    lora.check_settings(accelerator, args, samples=True)
    # What cannot work is said before long work.
    functions = rewards.load_functions(args.reward_function)
    rewards.weights_by_part(args.reward_model_name_or_path, functions, args.reward_weights)

    # ============================================================ data
    model_name = merge.name_to_load(accelerator, args.model_name_or_path, args.output_dir)
    tokenizer = load.tokenizer_of(
        model_name,
        args.chat_template,
        args.chat_template_kwargs,
        checkpoint.date_of_run(accelerator, args),
    )
    limits = dict(max_length=args.max_length, max_new_tokens=args.max_new_tokens)
    data_settings = dict(
        function=prompts.prompt_row,
        tokenizer=tokenizer,
        columns=formats.column_names(args.columns),
        strings_as_messages=args.strings_as_messages,
        **limits,
    )
    train_set, mixture = dataset.load_mixture(
        accelerator,
        args.dataset_name,
        args.dataset_weights,
        args.dataset_split,
        **data_settings,
    )
    eval_sets = dataset.load_evaluation_sets(
        accelerator, args.eval_dataset_name, args.eval_dataset_split, **data_settings
    )
    columns = rewards.check_signatures(functions, train_set, mixture, eval_sets)
    rollouts = RolloutSchedule(
        mixture.samples,
        args.rollout_batch_size,
        args.n_samples_per_prompt,
        args.train_batch_size,
        args.num_epochs_per_rollout,
    )
    progress = Progress(
        mixture.samples,
        args.train_batch_size,
        args.max_epochs,
        args.max_steps,
        rollouts.updates_per_epoch,
    )

    # ============================================================ model and optimizer
    reward_name = merge.name_to_load(
        accelerator, args.reward_model_name_or_path, args.output_dir, "base_reward"
    )
    critic_name = merge.name_to_load(
        accelerator, args.critic_model_name_or_path, args.output_dir, "base_critic"
    )
    critic_name = critic_name or reward_name or model_name
    policy_model = load.causal_lm(
        model_name,
        tokenizer,
        args.attn_implementation,
        args.gradient_checkpointing,
        lora.in_4bit(accelerator, args),
    )
    critic_model = load.score_model(
        critic_name,
        tokenizer,
        args.attn_implementation,
        args.gradient_checkpointing,
        lora.in_4bit(accelerator, args),
        new_head=True,
    )
    policy = ActorCritic(policy_model, critic_model)
    prepare.disable_dropout(policy)  # the reference has none
    architecture.freeze_unreached(accelerator, policy, args.max_length)
    lora.add_adapters(accelerator, policy, args)
    # set_learning_rates decides in each update which groups learn.
    actor_groups = optim.parameter_groups(
        policy.model, args.weight_decay, lr=args.learning_rate, name="actor", learns=True
    )
    critic_groups = optim.parameter_groups(
        policy.critic, args.weight_decay, lr=args.critic_learning_rate, name="critic", learns=True
    )
    parameter_groups = actor_groups + critic_groups
    optimizer = optim.adamw(accelerator, parameter_groups, args)
    # The scheduler is not prepared: accelerate would step it num_processes times per update.
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        optim.warmup_updates(args.warmup_steps, progress.total_steps),
        progress.total_steps,
    )
    schedule = optim.describe_schedule(optimizer, args, progress.total_steps)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer, args.debug_overflow)
    group_norms = engine.record_group_norms(accelerator, optimizer)
    engine.innermost_optimizer(optimizer).register_step_post_hook(optim.hold_step_counts)
    first_row = train_set[0]["prompt_ids"]
    checks.check_logprobs(model, first_row, accelerator.device, model_name)

    # ============================================================ reference and reward
    models = [model]
    # Of models whose change is noticed when a run is resumed.
    fingerprints = lora.fingerprints(accelerator, policy)
    ref_name = merge.name_to_load(
        accelerator, args.ref_model_name_or_path, args.output_dir, "base_reference"
    )
    reference = None  # nothing reads it if the KL has no weight
    if args.kl_coef and args.lora_r and ref_name is None:
        reference = lora.WithoutAdapters(model, with_values=False)  # the policy before training
        models.append(reference)
    elif args.kl_coef:
        ref_name = ref_name or model_name
        reference = LogProbModel(load.causal_lm(ref_name, tokenizer, args.attn_implementation))
        fingerprints["reference model"] = load.fingerprint(accelerator, ref_name, reference.config)
        reference = prepare.frozen(accelerator, reference)
        models.append(reference)
    judge = rewards.load_judge(
        accelerator,
        tokenizer,
        reward_name,
        args.reward_function,
        args.reward_weights,
        args.normalize_reward,
        args.reward_timeout,
        args.attn_implementation,
        columns,
    )
    if judge.model is not None:
        models.append(judge.model)
        fingerprints["reward model"] = load.fingerprint(
            accelerator, reward_name, judge.model.config
        )
    checks.check_positions(models, args.max_length)
    args.share_prompts = args.share_prompts and checks.can_pack(
        models, args.max_length, accelerator.device
    )
    how_often = "once for their responses" if args.share_prompts else "for each of their responses"
    sizes.fill_in(accelerator, args, trained=policy, frozen=models[1:])

    def scores_of(samples: Samples) -> Scores:
        """Returns the scores of the responses, the same on every process."""
        scores = rewards.score(
            accelerator,
            tokenizer,
            judge,
            samples,
            args.score_batch_size,
            args.share_prompts,
            progress.global_step,
        )
        total = final_scores(
            scores.total, samples.ended, args.reward_clip, args.missing_eos_penalty
        )
        return scores._replace(total=total)

    # ============================================================ the loop
    metrics = Metrics(
        accelerator,
        args,
        progress,
        bar_metric="objective/scores",
        bar_label=f"scores_at_temperature_{args.temperature:g}",
        charts={
            "scores": ["objective/scores", "scores"],
            "right answers": ["exact_match"],
            "KL to the reference": ["objective/kl"],
            "losses": ["loss/policy_avg", "loss/value_avg"],
            "entropy": ["objective/entropy"],
            "length": ["responses/length", "length"],
        },
        flop=lora.flop(policy),
    )
    run = Run(
        accelerator=accelerator,
        args=args,
        model=model,
        unwrapped=policy,
        optimizer=optimizer,
        scheduler=scheduler,
        tokenizer=tokenizer,
        progress=progress,
        metrics=metrics,
        data_fingerprint=f"{train_set._fingerprint} {limits}",
        models=fingerprints,
        extra={"kl_coef": args.kl_coef, "rollout": None},
        beside_actor={"critic": policy.critic.model},
    )
    checkpoint.resume(run)
    console.begin(
        run,
        data=f"{len(train_set)} rows; prompts are computed {how_often}",
        updates=rollouts.describe(progress.total_steps),
        schedule=schedule,
    )
    guard = guards.FiniteLosses(accelerator, progress, args.output_dir)
    max_grad_norm = args.max_grad_norm if args.max_grad_norm > 0 else math.inf
    if progress.updates_seen == 0:
        metrics.log_evaluation(
            *evaluate(accelerator, model, policy, tokenizer, eval_sets, scores_of, args)
        )
    model.train()
    metrics.start_interval()
    while not progress.finished:
        position = rollouts.position(progress.updates_seen)
        actor_learns = position.rollout >= args.critic_warmup_rollouts

        # If no rollout is left, make one: sample responses, score them, estimate each token's
        # advantage. Every process holds all of it, on the CPU.
        if run.extra["rollout"] is None:
            # The same permutation rule: a rollout is a batch of prompts.
            prompt_rows = batches.rows_of_update(
                mixture, args.rollout_batch_size, args.seed, position.rollout
            )
            columns = train_set[prompt_rows]
            with metrics.timed("generate"):
                samples = sample(
                    accelerator, model, policy, tokenizer, columns, position.rollout, args
                )
            with metrics.timed("score"):
                scores = scores_of(samples)
                old = read_tokens(accelerator, model, reference, samples, args)
            check_rollout(samples, scores.total, old, progress, args.output_dir)
            kl_coef = run.extra["kl_coef"]
            tensors, logged = estimate_advantages(samples, scores.total, old, kl_coef, args)
            log_rollout(accelerator, metrics, tokenizer, samples, scores, tensors, logged)
            rollout = {
                "prompts": samples.prompts,
                "responses": samples.responses,
                "rows": samples.rows,
                "kl_coef": kl_coef,
                "made_at": progress.global_step,
                "tensors": tensors,
            }
            # Before the actor learns there is no KL to adapt to.
            if args.kl_target and actor_learns:
                kl = logged["objective/kl"].mean().item()
                kl_coef = next_kl_coef(
                    kl_coef, kl, args.kl_target, args.kl_horizon, samples=len(samples.rows)
                )
            # Checkpoints hold it: a resumed run goes on with the same rollout.
            run.extra = {"kl_coef": kl_coef, "rollout": rollout}

        # All processes agree on the samples of this update. Each takes its share of them.
        rollout = run.extra["rollout"]
        rollout.setdefault("made_at", None)  # older checkpoints do not say
        lengths = sample_lengths(rollout["prompts"], rollout["responses"])
        order_seed = (args.seed, position.rollout, ORDER_STREAM)
        update_rows = batches.rows_of_update(
            len(lengths), args.train_batch_size, order_seed, position.update
        )
        micro_batches = batches.split(
            accelerator,
            update_rows,
            lengths,
            args.micro_train_batch_size,
            args.micro_train_tokens,
        )
        update_tokens = int(rollout["tensors"]["mask"][update_rows].sum())
        divisor = engine.begin_update(accelerator, model, micro_batches)
        loss_scale = engine.loss_scale(accelerator, model)
        set_learning_rates(optimizer, scheduler, actor_learns)
        learning_rate = optimizer.param_groups[0]["lr"]
        critic_learning_rate = optimizer.param_groups[-1]["lr"]

        for micro_batch in micro_batches:
            with metrics.timed("data"):
                data_rows = [rollout["rows"][number] for number in micro_batch.rows]
                weights = batches.send(micro_batch.weights, accelerator.device)
                inputs = collate(rollout, micro_batch.rows, args.share_prompts, accelerator.device)
                longest = inputs["mask"].shape[1]
                old = {
                    name: batches.send(tensor[micro_batch.rows, :longest], accelerator.device)
                    for name, tensor in rollout["tensors"].items()
                }

            with accelerator.accumulate(model):
                output = model(inputs, args.temperature)
                if rollout["made_at"] == progress.global_step:
                    # No update was applied since the rollout was made: the actor has not moved, so
                    # its ratios are exactly 1. The pass that scored had other micro-batches, and
                    # rounded otherwise.
                    now = output["logps"].detach()
                    rounding = {"val/max_rounding": (now - old["logps"]).expm1().abs()}
                    metrics.pending.add(rounding, old["mask"] * weights[:, None])
                    old["logps"] = now
                losses, token_weights, logged = compare(
                    output, old, weights, rollout["kl_coef"], actor_learns, args
                )
                new = {f"new {name}": tensor for name, tensor in output.items()}
                guard.check(data_rows, losses, token_weights, tensors={**old, **new})
                # The loss is the mean over the update's tokens. The engine itself divides by
                # `divisor`, the number of micro-batches of all processes.
                accelerator.backward((losses * token_weights).sum() * divisor / update_tokens)
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            for values, value_weights in logged:
                metrics.pending.add(values, value_weights)
            metrics.computed(inputs, micro_batch.weights)

        if position.ends_rollout:
            run.extra["rollout"] = None
        applied = not accelerator.optimizer_step_was_skipped  # skipped: an fp16 overflow
        progress.update_done(
            applied, samples=len(update_rows), tokens=int(lengths[update_rows].sum())
        )
        metrics.update_done(
            applied,
            grad_norm=grad_norm,
            loss_scale=loss_scale,
            **parts_of_norm(grad_norm, group_norms()),
            learning_rate=learning_rate,
            critic_learning_rate=critic_learning_rate,
        )
        if applied:
            scheduler.step()

        if progress.log_due(args.logging_steps):
            metrics.log()
        if progress.due(args.eval_steps):
            with metrics.timed("paused"):
                metrics.log_evaluation(
                    *evaluate(accelerator, model, policy, tokenizer, eval_sets, scores_of, args)
                )
        if args.save_steps and progress.due(args.save_steps):
            with metrics.timed("paused"):
                checkpoint.save(run)
        if args.save_actor_steps and progress.due(args.save_actor_steps):
            with metrics.timed("paused"):
                folder = f"{args.output_dir}/actors/global_step_{progress.global_step:06d}"
                actor.publish(
                    accelerator,
                    model,
                    policy,
                    tokenizer,
                    folder,
                    args.save_actor_limit,
                    args.save_dtype,
                )
        checkpoint.stop_if_asked(run)

    folder = f"{args.output_dir}/actor"
    actor.publish(accelerator, model, policy, tokenizer, folder, dtype=args.save_dtype)
    metrics.close()
    console.end(run)


# ============================================================ evaluation and saving
@torch.no_grad()
def evaluate(
    accelerator,
    model,
    policy,
    tokenizer,
    eval_sets: dict,
    scores_of: Callable,
    args: Args,
) -> tuple[dict[str, float], list[dict]]:
    """Evaluates responses to each held-out set: greedy ones, or drawn at `--eval_temperature`.

    Returns:
        their scores, lengths and the share that ends, and where the set has answers, the share that
        is right; the responses.
    """
    line = {}
    examples = []
    for prefix, eval_set in eval_sets.items():
        columns = eval_set[:]
        draws = np.random.default_rng([args.seed, 0, EVALUATION_STREAM])
        n_samples = len(columns["prompt_ids"]) * args.eval_samples
        samples = generation.respond(
            accelerator,
            model,
            policy.model,
            tokenizer,
            columns,
            args.eval_samples,
            args.generate_batch_size,
            args.max_new_tokens,
            temperature=args.eval_temperature,
            uniforms=draws.random((n_samples, args.max_new_tokens)),
        )
        scores = scores_of(samples)
        values = {
            "scores": scores.total,
            "length": [len(response) for response in samples.responses],
            "eos_rate": samples.ended,
        }
        for name, part in scores.parts.items():
            scored = part[~part.isnan()]
            if len(scored):
                values[f"rewards/{name}/mean"] = scored
        if "answer" in columns:
            values |= shares_of_right(samples, columns["answer"], tokenizer, args)
        for name, value in values.items():
            line[prefix + name] = float(np.mean(np.asarray(value, dtype=float)))
        examples += samples.examples(tokenizer, scores, prefix.rstrip("/"))
    return line, examples


def shares_of_right(
    samples: Samples, prompt_answers: list[str], tokenizer, args: Args
) -> dict[str, np.ndarray]:
    """Returns what the shares of right responses are means of, a value for each prompt by name.

    Args:
        prompt_answers: one for each prompt; prompts without one are left out.
    """
    texts = tokenizer.batch_decode(samples.responses, skip_special_tokens=True)
    is_right = []  # `[prompts with an answer, samples of each]`
    for number, answer in enumerate(prompt_answers):
        if answer:
            of_prompt = texts[number * args.eval_samples :][: args.eval_samples]
            is_right.append([answers.is_right(text, answer) for text in of_prompt])
    is_right = np.array(is_right)
    if args.eval_temperature == 0:
        return {"exact_match": is_right[:, 0]}
    return {
        f"avg_at_{args.eval_samples}": is_right.mean(1),
        f"pass_at_{args.eval_samples}": is_right.any(1),
    }


if __name__ == "__main__":
    errors.run(main)
