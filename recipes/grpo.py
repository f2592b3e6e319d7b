"""Group Relative Policy Optimization: sample a group of answers, raise those above its average.

Shao et al. 2024, arXiv:2402.03300; from its family Dr. GRPO, DAPO, GSPO, RLOO, REINFORCE++ and
CISPO by the arguments of the section `the algorithm`, see docs/grpo.md. Loss of an update, with
r_t = pi(a_t)/pi_old(a_t) and A the score of a response minus its group's mean, divided by a
deviation:

    loss = average of -min(r_t A, clip(r_t, 1 - c_low, 1 + c_high) A) + kl_coef * KL_t

Demo, offline:
    python recipes/grpo.py
One GPU:
    accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/grpo.py \
        --model_name_or_path M --dataset_name D --reward_function MODULE:NAME
N GPUs:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 \
        recipes/grpo.py --model_name_or_path M --dataset_name D --reward_function MODULE:NAME
DeepSpeed fp16:
    accelerate launch --config_file accelerate_configs/ds_fp16.yaml recipes/grpo.py

Every argument, every metric: docs/grpo.md
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

import contextlib
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
from common.models import architecture, checks, load, lora, merge, packing, prepare
from common.models.logprobs import LogProbModel
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
        help="the reference policy, needed with --kl_coef alone; default: the policy before "
        "training",
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
    output_dir: str | None = HfArg(default=None, help="default: runs/grpo/<date-time>")

    rollout_batch_size: int = HfArg(default=128, help="prompts of one rollout, over all processes")
    n_samples_per_prompt: int = HfArg(default=8, help="responses to each prompt, its group")
    generate_batch_size: int = HfArg(
        default=0, help="responses that one process generates at once; 0: as many as fit"
    )
    score_batch_size: int = HfArg(
        default=0, help="responses that one process scores at once; 0: as many as fit"
    )
    num_epochs_per_rollout: int = HfArg(default=1, help="passes over the samples of a rollout")
    max_new_tokens: int = HfArg(default=1024, help="longest response")
    temperature: float = HfArg(default=1.0, help="of sampling and of every log-prob in training")
    eval_temperature: float = HfArg(
        default=0.0, help="of the responses in an evaluation; 0: greedy decoding"
    )
    eval_samples: int = HfArg(
        default=1, help="responses to each held-out prompt; above 1 needs --eval_temperature"
    )

    baseline: Literal["group", "rloo", "none"] = HfArg(
        default="group",
        help="subtracted from each score: the mean of its group, that of the others in it, or "
        "nothing",
    )
    advantage_std: Literal["batch", "group", "none"] = HfArg(
        default="batch",
        help="advantages are divided by their deviation over the rollout, over the group, or not",
    )
    loss_type: Literal["clip", "cispo"] = HfArg(default="clip", help="see policy_losses")
    ratio: Literal["token", "sequence"] = HfArg(
        default="token", help="the ratio of each token, or one for a whole response"
    )
    average: Literal["token", "sequence", "constant"] = HfArg(
        default="token",
        help="of the losses: over tokens; over responses, each the mean of its tokens; over "
        "responses, each the sum of its tokens / --max_new_tokens",
    )
    clip_range: float = HfArg(default=0.2, help="clipping of the ratio below 1")
    clip_range_high: float = HfArg(default=0.28, help="clipping of the ratio above 1")
    kl_coef: float = HfArg(default=0.0, help="weight of the KL to the reference in the loss")
    kl_estimator: Literal["k3", "k2"] = HfArg(default="k3", help="see kl_losses")

    normalize_reward: bool = HfArg(
        default=False,
        help="normalise the reward model's scores by the mean and the deviation in its config",
    )
    drop_equal_groups: bool = HfArg(
        default=True,
        help="leave out groups whose advantages are all zero before the penalty for length; with "
        "--kl_coef above 0 they are kept, since the KL has a gradient there, too",
    )
    refill_rounds: int = HfArg(
        default=0, help="how often a rollout samples more prompts in place of groups left out"
    )
    overlong_buffer: int = HfArg(
        default=0,
        help="the last tokens of --max_new_tokens over which a penalty grows from 0 to "
        "--overlong_penalty; 0: no penalty",
    )
    overlong_penalty: float = HfArg(
        default=1.0, help="subtracted from the score, see --overlong_buffer"
    )
    mask_truncated: bool = HfArg(
        default=False, help="do not train on responses cut at --max_new_tokens"
    )

    train_batch_size: int = HfArg(default=256, help="samples of one update, over all processes")
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
        default=2048,
        help="of prompt and response; prompts without room for --max_new_tokens are left out",
    )
    learning_rate: float = HfArg(default=1e-6, help="peak learning rate")
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"
    ] = HfArg(default="constant_with_warmup", help="see transformers.get_scheduler")
    warmup_steps: float = HfArg(default=0.03, help="updates of warm-up; below 1: a share of all")
    weight_decay: float = HfArg(default=0.0, help="on matrices only, not on biases and norms")
    adam_epsilon: float = HfArg(default=1e-8, help="Adam's epsilon")
    max_grad_norm: float = HfArg(default=1.0, help="gradient clipping; 0: none")
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
        "share_prompts",
        "reward_timeout",
        "eval_temperature",
        "eval_samples",
    }


# ============================================================ the algorithm
# The random numbers of a rollout are drawn from [seed, rollout, stream]. No stream repeats another.
SAMPLING_STREAM = 1
ORDER_STREAM = 2
EVALUATION_STREAM = 3
# Added to a deviation before it divides.
EPSILON = 1e-4


def final_scores(
    scores: torch.Tensor, lengths: torch.Tensor, max_new_tokens: int, buffer: int, penalty: float
) -> torch.Tensor:
    """Subtracts a penalty for length from the scores `[samples]`; a buffer of 0 subtracts nothing.

    It grows from 0, `buffer` tokens before the longest possible response, to `penalty` at it.
    Source: DAPO, arXiv:2503.14476 eq. 13.
    """
    if buffer == 0:
        return scores
    beyond = (lengths - (max_new_tokens - buffer)).clamp(min=0)
    return scores - penalty * beyond / buffer


def with_penalty(scores: Scores, samples: Samples, args: Args) -> Scores:
    """Returns the scores of samples with the penalty for length in their total."""
    total = final_scores(
        scores.total,
        samples.mask.sum(1),
        args.max_new_tokens,
        args.overlong_buffer,
        args.overlong_penalty,
    )
    return scores._replace(total=total)


def groups_to_keep(scores: torch.Tensor, args: Args) -> torch.Tensor:
    """Returns which groups of a rollout are kept, bool `[groups]`.

    Source: DAPO, arXiv:2503.14476 section 3.2. With a KL all are kept: where the advantages are
    zero, its term of the loss still has a gradient.

    Args:
        scores: `[samples]`, without the penalty for length: where all responses are right, or all
            wrong, a group is left out though their lengths differ.
    """
    if args.kl_coef or not args.drop_equal_groups:
        return torch.ones(len(scores) // args.n_samples_per_prompt, dtype=torch.bool)
    return groups_with_advantages(
        scores, args.n_samples_per_prompt, args.baseline, args.advantage_std
    )


def groups_with_advantages(
    scores: torch.Tensor, n_samples: int, baseline: str, advantage_std: str
) -> torch.Tensor:
    """Returns which groups can have an advantage that is not zero, bool `[groups]`.

    With a baseline, a group of equal scores has none. Without one, a group of zeros has none,
    unless its scores are compared with those of the whole rollout.
    """
    groups = scores.reshape(-1, n_samples)
    if baseline != "none":
        return groups.amin(1) != groups.amax(1)
    if advantage_std == "batch":
        return torch.ones(len(groups), dtype=torch.bool)
    return groups.ne(0).any(1)


def estimate_advantages(
    scores: torch.Tensor,
    n_samples: int,
    baseline: str,
    advantage_std: str,
    is_trained: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the advantage of each response, `[samples]`: that of all its tokens.

    Sources: mean and deviation of the group, arXiv:2402.03300 section 4.1.2; no deviation,
    Dr. GRPO, arXiv:2503.20783; rloo, arXiv:2402.14740; deviation of the whole batch, REINFORCE++,
    arXiv:2501.03262.

    Args:
        scores: `[samples]`, those of a group side by side.
        is_trained: bool `[samples]`; the others count in their group, but not in the mean and the
            deviation of the batch. None: all. One alone has no deviation: then the batch takes off
            no mean, and divides by nothing.
    """
    groups = scores.double().reshape(-1, n_samples)
    if is_trained is None:
        is_trained = torch.ones_like(scores, dtype=torch.bool)
    if baseline == "group":
        advantages = groups - groups.mean(1, keepdim=True)
    elif baseline == "rloo":
        of_others = (groups.sum(1, keepdim=True) - groups) / (n_samples - 1)
        advantages = groups - of_others
    else:
        advantages = groups

    if advantage_std == "group":
        advantages = advantages / (advantages.std(1, keepdim=True) + EPSILON)
    elif advantage_std == "batch" and is_trained.sum() > 1:
        trained = advantages.flatten()[is_trained]
        if baseline == "none":  # a mean of groups is taken off already
            advantages = advantages - trained.mean()
        advantages = advantages / (trained.std() + EPSILON)
    return advantages.flatten().to(scores.dtype)


def ratios_to_old(
    logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor, ratio: str
) -> torch.Tensor:
    """Returns the ratios of new to old probabilities, `[samples, length]`.

    Those of a sequence are the geometric mean of its tokens' ratios, `[samples, 1]`. Source: GSPO,
    arXiv:2507.18071 eq. 7.
    """
    log_ratios = logps - old_logps
    if ratio == "sequence":
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        log_ratios = (log_ratios * mask).sum(1, keepdim=True) / lengths
    return torch.exp(log_ratios)


def policy_losses(
    logps: torch.Tensor,
    ratios: torch.Tensor,
    advantages: torch.Tensor,
    loss_type: str,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the policy loss of each token, and where clipping below and above 1 decided it.

    Where `clip` decides, a token has no gradient. `cispo` keeps it: it clips the weight of the
    gradient, above only. Sources: clip, arXiv:2402.03300 eq. 3; another range above 1, DAPO,
    arXiv:2503.14476 section 3.1; cispo, arXiv:2506.13585 eq. 4 and 5.

    Args:
        ratios: `[samples, length]` or `[samples, 1]`; advantages: `[samples, 1]`.
    """
    above = ratios > 1 + clip_high
    if loss_type == "cispo":
        weights = ratios.clamp(max=1 + clip_high).detach()
        return -weights * advantages * logps, torch.zeros_like(above), above & (advantages != 0)
    clipped = ratios.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.minimum(ratios * advantages, clipped * advantages)
    return losses, (ratios < 1 - clip_low) & (advantages < 0), above & (advantages > 0)


def kl_losses(
    logps: torch.Tensor, ref_logps: torch.Tensor, ratios: torch.Tensor, estimator: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the estimated KL(policy || reference) of each token, and its term of the loss.

    The ratio weights the term, because the token was drawn by the old policy. So its expected
    gradient is that of the KL of the next token: for k3 because the ratio has a gradient, too, and
    for k2 because it has none. Sources: Schulman 2020, http://joschu.net/blog/kl-approx.html;
    DeepSeek-V3.2, arXiv:2512.02556 eq. 7.

    Args:
        ratios: of each token, `[samples, length]`.
    """
    difference = logps - ref_logps
    if estimator == "k2":
        kl = difference**2 / 2
        return kl, kl * ratios.detach()
    kl = torch.exp(-difference) - 1 + difference
    return kl, kl * ratios


def average_tokens(
    losses: torch.Tensor, mask: torch.Tensor, average: str, max_new_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss of each sample and its weight in the mean over an update, `[samples]` each.

    Sources: token, DAPO, arXiv:2503.14476 section 3.3; sequence, arXiv:2402.03300 eq. 3; constant,
    Dr. GRPO, arXiv:2503.20783.

    Args:
        losses: `[samples, length]`.
    """
    lengths = mask.sum(1)
    sums = (losses * mask).sum(1)
    if average == "constant":
        return sums / max_new_tokens, torch.ones_like(sums)
    means = sums / lengths.clamp(min=1)
    if average == "sequence":
        return means, torch.ones_like(sums)
    return means, lengths.to(sums.dtype)  # so each token counts the same


def compare(
    output: dict, old: dict, weights: torch.Tensor, is_first_update: bool, args: Args
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[dict, torch.Tensor]]]:
    """Returns the losses of samples, their weights, and what is logged of them.

    Args:
        output: what `LogProbModel.forward` returned, with `entropy`.
        old: of the same samples the rollout's `mask advantages logps sampler_logps`, with a KL also
            `ref_logps`.
        weights: `[samples]`, 0 for a padding row.
        is_first_update: whether no update of the rollout was applied before. Until then the policy
            is the one that the sampler drew by.

    Returns:
        losses and weights `[samples]`; metrics, each a dict of values with their weights.
    """
    logps = output["logps"]
    mask = old["mask"]
    ratios = ratios_to_old(logps, old["logps"], mask, args.ratio)
    losses, clipped_low, clipped_high = policy_losses(
        logps,
        ratios,
        old["advantages"],
        args.loss_type,
        args.clip_range,
        args.clip_range_high,
    )
    of_tokens = {
        "clip_ratio/low_mean": clipped_low.expand_as(mask).float(),
        "clip_ratio/high_mean": clipped_high.expand_as(mask).float(),
        "entropy": output["entropy"],
        "policy/approxkl_avg": (logps - old["logps"]) ** 2 / 2,
        "val/ratio": ratios.expand_as(logps),
    }
    if args.kl_coef:
        # Each token's own ratio, also where one of the whole response weights the policy loss.
        token_ratios = ratios_to_old(logps, old["logps"], mask, "token")
        kl, kl_loss = kl_losses(logps, old["ref_logps"], token_ratios, args.kl_estimator)
        losses = losses + args.kl_coef * kl_loss
        of_tokens["kl"] = kl
    if is_first_update:
        difference = (logps - old["sampler_logps"]).abs()
        of_tokens["sampling/sampling_logp_difference/mean"] = difference
        of_tokens["sampling/sampling_logp_difference/max"] = difference

    losses, sample_weights = average_tokens(losses, mask, args.average, args.max_new_tokens)
    sample_weights = sample_weights * weights
    logged = [({"loss": losses}, sample_weights), (of_tokens, mask * weights[:, None])]
    return losses, sample_weights, logged


def collate(rollout: dict, numbers: np.ndarray, share_prompts: bool, device) -> dict:
    """Returns samples of a rollout as the model reads them."""
    prompts = [rollout["prompts"][number] for number in numbers]
    responses = [rollout["responses"][number] for number in numbers]
    return packing.make_batch(prompts, responses, share_prompts, device)


def sample(
    accelerator,
    model,
    policy,
    tokenizer,
    columns: dict,
    rollout_number: int,
    round_number: int,
    args: Args,
) -> Samples:
    """Draws a group of responses to each prompt.

    The seed, the number of the rollout and that of the round decide the draws: not the number of
    processes, nor what was drawn before.

    Args:
        columns: of the prompts.
        round_number: 0, or how often this rollout was refilled before.
    """
    n_responses = len(columns["prompt_ids"]) * args.n_samples_per_prompt
    draws = np.random.default_rng([args.seed, rollout_number, SAMPLING_STREAM, round_number])
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
        uniforms=draws.random((n_responses, args.max_new_tokens)),
    )


@torch.no_grad()
def read_tokens(
    accelerator, samples: Samples, readers: dict[str, torch.nn.Module], args: Args
) -> dict[str, torch.Tensor]:
    """Returns the log-prob of each response token under each of these models.

    Args:
        readers: models by the name of what they return.

    Returns:
        `[samples, longest response]` each, zero behind a response, the same on every process.
    """
    if not readers:
        return {}
    collected = Collected(accelerator)
    scoring_batches = samples.scoring_batches(
        accelerator, args.score_batch_size, args.share_prompts
    )
    with contextlib.ExitStack() as undo:
        for reader in readers.values():
            undo.enter_context(checks.evaluation_mode(reader))
        for numbers, inputs in scoring_batches:
            logps = {
                name: reader(inputs, args.temperature)["logps"] for name, reader in readers.items()
            }
            collected.add(numbers, inputs["mask"], **logps)
    return collected.gather()


def check_rollout(
    samples: Samples, tensors: dict[str, torch.Tensor], progress: Progress, output_dir: str
) -> None:
    """Stops the run if a score or a log-prob is not finite, before one spreads over its group.

    Args:
        tensors: `[samples, longest response]` or `[samples, 1]` each, by name.
    """
    # A sum is finite only if all its parts are.
    sums = sum(tensors.values(), start=torch.zeros(samples.mask.shape))
    guards.check_finite([(samples.rows, sums, samples.mask)], progress, output_dir, tensors)


def build_rollout(samples: Samples, scores: torch.Tensor, args: Args) -> dict:
    """Returns what the updates of a rollout need, as checkpoints can hold it.

    `tensors` lacks only what `read_tokens` returns.

    Args:
        samples: those of the groups that are kept.
        scores: `[samples]`.
    """
    is_trained = torch.ones_like(samples.ended)
    if args.mask_truncated:
        is_trained = samples.ended
    advantages = estimate_advantages(
        scores, args.n_samples_per_prompt, args.baseline, args.advantage_std, is_trained
    )
    return {
        "prompts": samples.prompts,
        "responses": samples.responses,
        "rows": samples.rows,
        "is_trained": is_trained,
        "tensors": {
            "mask": samples.mask,
            "advantages": advantages[:, None],
            "sampler_logps": samples.padded_sampler_logps,
        },
    }


def order_of_samples(rollout: dict, order_seed: tuple, epoch: int, args: Args) -> np.ndarray:
    """Returns the numbers of a rollout's samples in the order of one pass over them.

    Groups come in a seeded order. The samples of a group stand side by side, so that most of them
    get into one update and can share the prompt.
    """
    n_groups = len(rollout["rows"]) // args.n_samples_per_prompt
    groups = batches.rows_of_update(n_groups, n_groups, order_seed, epoch)
    numbers = groups[:, None] * args.n_samples_per_prompt + np.arange(args.n_samples_per_prompt)
    numbers = numbers.flatten()
    return numbers[rollout["is_trained"][numbers].numpy()]


def updates_of(rollout: dict, args: Args) -> int:
    """Returns the number of updates that a rollout makes, as few as `--train_batch_size` allows."""
    n_samples = int(rollout["is_trained"].sum())
    return args.num_epochs_per_rollout * math.ceil(n_samples / args.train_batch_size)


def rows_of_update(rollout: dict, order_seed: tuple, update: int, args: Args) -> np.ndarray:
    """Returns the numbers of the samples of a rollout's update, counted from 0.

    The updates of a pass have as many samples as one another, or one more: every update is a whole
    step, so none is made from a few samples that are left over. A group may be divided.
    """
    updates_per_epoch = updates_of(rollout, args) // args.num_epochs_per_rollout
    epoch, update_of_epoch = divmod(update, updates_per_epoch)
    numbers = order_of_samples(rollout, order_seed, epoch, args)
    return np.array_split(numbers, updates_per_epoch)[update_of_epoch]


def longest_of_group(lengths: np.ndarray, n_samples: int) -> np.ndarray:
    """Returns for each sample the longest length of its group, `[samples]`.

    So the samples of a group sort side by side and can share their prompt.
    """
    return lengths.reshape(-1, n_samples).max(1).repeat(n_samples)


def end_rollout(position: dict) -> None:
    """Goes on to the next rollout."""
    position["rollout"] = None
    position["rollouts_seen"] += 1
    position["update"] = 0


def skip_rollout(metrics: Metrics, position: dict, n_prompts: int, ends_run: bool) -> None:
    """Goes on to the next rollout, because this one has nothing to train on, and says so.

    Raises:
        SystemExit: a whole epoch of prompts led to no update, and the run would go on.
    """
    end_rollout(position)
    since_update = position["prompts_seen"] - position["prompts_seen_at_update"]
    message = (
        f"no update from rollout {position['rollouts_seen']}: it has no response to train on "
        "(the advantages of all groups are zero, or all responses are cut)"
    )
    if since_update >= n_prompts and not ends_run:
        metrics.log_rollouts()
        sys.exit(f"{message}, nor from any of the last {since_update} prompts, a whole epoch")
    metrics.warn(message)


def log_samples(
    accelerator,
    metrics: Metrics,
    tokenizer,
    samples: Samples,
    scores: Scores,
    is_kept: torch.Tensor,
    args: Args,
) -> None:
    """Adds the metrics of sampled groups to the next log line, and writes down the samples.

    Args:
        is_kept: `[groups]`, which of them are trained on.
    """
    groups = scores.total.double().reshape(-1, args.n_samples_per_prompt)
    lengths = samples.mask.sum(1)
    of_samples = {
        "reward": scores.total,
        "completions/mean_length": lengths,
        "completions/min_length": lengths,
        "completions/max_length": lengths,
        "completions/clipped_ratio": ~samples.ended,
    }
    of_groups = {
        "frac_reward_zero_std": groups.amin(1) == groups.amax(1),
        "frac_groups_dropped": ~is_kept,
    }
    if args.n_samples_per_prompt > 1:
        of_groups["reward_std"] = groups.std(1)
    add_rollout_values(accelerator, metrics, of_samples)
    add_rollout_values(accelerator, metrics, of_groups)
    for name, part in scores.parts.items():
        add_rollout_values(accelerator, metrics, {f"rewards/{name}/mean": part})
    if accelerator.is_main_process:
        metrics.log_rollout(scores.total, samples.examples(tokenizer, scores, "rollout"))


def add_rollout_values(accelerator, metrics: Metrics, values: dict[str, torch.Tensor]) -> None:
    """Adds values of a rollout, of the same shape, to the next log line; NaN counts nowhere."""
    values = {name: value.to(accelerator.device) for name, value in values.items()}
    for name, value in values.items():
        # Every process holds the whole rollout: one of them counts it.
        counts = ~value.isnan() & accelerator.is_main_process
        # Not to `pending`, which is dropped if the engine skips the rollout's first update: the
        # rollout was made all the same.
        metrics.open.add({name: value}, counts)


def mark_position(progress: Progress, position: dict, n_prompts: int, args: Args) -> None:
    """Tells `progress` how many prompts are used up, and whether that ends the run."""
    progress.rows_seen = position["prompts_seen"]
    used_up = args.max_steps == 0 and progress.rows_seen >= args.max_epochs * n_prompts
    progress.data_ended = used_up and position["rollout"] is None


def check_settings(args: Args) -> None:
    """Refuses settings that would be ignored or cannot work."""
    at_least_1 = {
        "rollout_batch_size": args.rollout_batch_size,
        "n_samples_per_prompt": args.n_samples_per_prompt,
        "num_epochs_per_rollout": args.num_epochs_per_rollout,
        "eval_samples": args.eval_samples,
    }
    for name, size in at_least_1.items():
        if size < 1:
            sys.exit(f"--{name} {size}: expected at least 1")
    at_least_0 = {
        "generate_batch_size": args.generate_batch_size,
        "score_batch_size": args.score_batch_size,
        "refill_rounds": args.refill_rounds,
        "overlong_buffer": args.overlong_buffer,
        "overlong_penalty": args.overlong_penalty,
        "reward_timeout": args.reward_timeout,
        "kl_coef": args.kl_coef,
        "clip_range": args.clip_range,
        "clip_range_high": args.clip_range_high,
        "eval_temperature": args.eval_temperature,
    }
    for name, number in at_least_0.items():
        if number < 0:
            sys.exit(f"--{name} {number}: below 0")
    check_groups(args)
    check_rollout_size(args)
    if not args.reward_model_name_or_path and not args.reward_function:
        sys.exit(
            "nothing scores the responses: give --reward_model_name_or_path or --reward_function"
        )
    if args.normalize_reward and not args.reward_model_name_or_path:
        sys.exit(
            "--normalize_reward is for a reward model's scores: give --reward_model_name_or_path"
        )
    if args.temperature <= 0:
        sys.exit(
            f"--temperature {args.temperature}: expected more than 0 "
            "(that of evaluation is --eval_temperature)"
        )
    if args.eval_samples > 1 and args.eval_temperature == 0:
        sys.exit(
            f"--eval_samples {args.eval_samples} at --eval_temperature 0: greedy responses to one "
            "prompt are all the same"
        )
    if args.overlong_buffer > args.max_new_tokens:
        sys.exit(
            f"--overlong_buffer {args.overlong_buffer}: longer than "
            f"--max_new_tokens {args.max_new_tokens}"
        )
    if args.ref_model_name_or_path and args.kl_coef == 0:
        sys.exit("--ref_model_name_or_path would not be used: give --kl_coef above 0, too")


def check_groups(args: Args) -> None:
    """Refuses settings of groups that would be ignored or cannot work."""
    if args.n_samples_per_prompt == 1 and args.baseline != "none":
        sys.exit(
            f"--baseline {args.baseline} compares the responses to a prompt: "
            "--n_samples_per_prompt 1 leaves no other. Take 2 or more, or --baseline none"
        )
    if args.baseline == "none" and args.advantage_std == "group":
        sys.exit(
            "--baseline none --advantage_std group: a group of equal scores would be divided by "
            "its deviation of zero. Take --advantage_std batch or none"
        )
    if args.refill_rounds and not args.drop_equal_groups:
        sys.exit("--refill_rounds replaces groups left out: it needs --drop_equal_groups true")
    if args.refill_rounds and args.kl_coef:
        sys.exit(
            f"--refill_rounds {args.refill_rounds} --kl_coef {args.kl_coef}: no group is left out, "
            "since the KL teaches those without an advantage, too. So none would be replaced"
        )
    if args.refill_rounds and args.baseline == "none" and args.advantage_std == "batch":
        sys.exit(
            f"--refill_rounds {args.refill_rounds} with --baseline none --advantage_std batch: no "
            "group is left out, since its scores are compared with those of the whole rollout. So "
            "none would be replaced"
        )


def check_rollout_size(args: Args) -> None:
    """Refuses a rollout of fewer samples than an update: `--train_batch_size` would be ignored."""
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if samples < args.train_batch_size:
        least = math.ceil(args.train_batch_size / args.n_samples_per_prompt)
        sys.exit(
            f"--rollout_batch_size {args.rollout_batch_size} x --n_samples_per_prompt "
            f"{args.n_samples_per_prompt} = {samples} samples, fewer than --train_batch_size "
            f"{args.train_batch_size}: no update would have as many. Least that would do: "
            f"--rollout_batch_size {least}"
        )


def main():
    # ============================================================ accelerator
    args = arguments.parse(Args, demo=common.ASSETS / "grpo.yaml")
    check_settings(args)
    accelerator = launch.make_accelerator(args, "grpo")
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
    # The horizon counts every group as kept, whatever is left out later.
    progress = Progress(
        mixture.samples,
        args.train_batch_size,
        args.max_epochs,
        args.max_steps,
        rollouts.updates_per_epoch,
    )

    # ============================================================ model and optimizer
    policy_model = load.causal_lm(
        model_name,
        tokenizer,
        args.attn_implementation,
        args.gradient_checkpointing,
        lora.in_4bit(accelerator, args),
    )
    policy = LogProbModel(policy_model)
    prepare.disable_dropout(policy)  # the sampler has none
    architecture.freeze_unreached(accelerator, policy, args.max_length)
    lora.add_adapters(accelerator, policy, args)
    parameter_groups = optim.parameter_groups(policy, args.weight_decay)
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
    first_row = train_set[0]["prompt_ids"]
    checks.check_logprobs(model, first_row, accelerator.device, model_name)

    # ============================================================ reference and reward
    models = [model]
    # Of models whose change is noticed when a run is resumed.
    fingerprints = lora.fingerprints(accelerator, policy)
    ref_name = merge.name_to_load(
        accelerator, args.ref_model_name_or_path, args.output_dir, "base_reference"
    )
    reference = None
    if args.kl_coef and args.lora_r and ref_name is None:
        reference = lora.WithoutAdapters(model)  # the policy before training
        models.append(reference)
    elif args.kl_coef:
        ref_name = ref_name or model_name
        reference = LogProbModel(load.causal_lm(ref_name, tokenizer, args.attn_implementation))
        fingerprints["reference model"] = load.fingerprint(accelerator, ref_name, reference.config)
        reference = prepare.frozen(accelerator, reference)
        models.append(reference)
    reward_name = merge.name_to_load(
        accelerator, args.reward_model_name_or_path, args.output_dir, "base_reward"
    )
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
    sizes.fill_in(accelerator, args, trained=policy, frozen=[reference, judge.model])

    def scores_of(samples: Samples) -> Scores:
        """Returns the scores of the responses without a penalty, the same on every process."""
        return rewards.score(
            accelerator,
            tokenizer,
            judge,
            samples,
            args.score_batch_size,
            args.share_prompts,
            progress.global_step,
        )

    # ============================================================ the loop
    metrics = Metrics(
        accelerator,
        args,
        progress,
        bar_metric="reward",
        bar_label=f"reward_at_temperature_{args.temperature:g}",
        charts={
            "rewards": ["reward", "scores"],
            "right answers": ["exact_match"],
            "loss": ["loss"],
            "entropy, KL to the reference": ["entropy", "kl"],
            "length": ["completions/mean_length", "length"],
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
        # Where the run is in its prompts and rollouts; `update` counts within a rollout.
        extra={
            "prompts_seen": 0,
            "prompts_seen_at_update": 0,
            "rollouts_seen": 0,
            "update": 0,
            "rollout": None,
        },
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
    position = run.extra
    # Not `updates_seen == 0`: the run may be resumed after rollouts that led to no update.
    if position["prompts_seen"] == 0:
        metrics.log_evaluation(
            *evaluate(accelerator, model, policy, tokenizer, eval_sets, scores_of, args)
        )
    model.train()
    metrics.start_interval()
    mark_position(progress, position, mixture.samples, args)
    while not progress.finished:
        # If no rollout is left, make one: sample groups, score them, leave out those whose
        # advantages are all zero. Every process holds all of it, on the CPU.
        if position["rollout"] is None:
            kept = []  # samples and scores of each round
            missing = args.rollout_batch_size
            for round_number in range(1 + args.refill_rounds):
                prompt_rows = batches.rows_from(
                    mixture, args.seed, position["prompts_seen"], missing
                )
                position["prompts_seen"] += len(prompt_rows)
                with metrics.timed("generate"):
                    sampled = sample(
                        accelerator,
                        model,
                        policy,
                        tokenizer,
                        train_set[prompt_rows],
                        position["rollouts_seen"],
                        round_number,
                        args,
                    )
                # Where a logit is NaN, so is this log-prob, and the token is not worth a score.
                sampler_logps = {"sampler_logps": sampled.padded_sampler_logps}
                check_rollout(sampled, sampler_logps, progress, args.output_dir)
                with metrics.timed("score"):
                    without_penalty = scores_of(sampled)
                scored = with_penalty(without_penalty, sampled, args)
                sampled_scores = {"scores": scored.total[:, None]}
                check_rollout(sampled, sampled_scores, progress, args.output_dir)
                is_kept = groups_to_keep(without_penalty.total, args)
                log_samples(accelerator, metrics, tokenizer, sampled, scored, is_kept, args)
                kept_samples = is_kept.repeat_interleave(args.n_samples_per_prompt)
                kept.append((sampled.select(kept_samples), scored.total[kept_samples]))
                missing -= int(is_kept.sum())
                epoch_ended = position["prompts_seen"] % mixture.samples == 0
                if missing == 0 or epoch_ended:
                    break
            samples = Samples.joined([of_round for of_round, _ in kept])
            scores = torch.cat([of_round for _, of_round in kept])
            rollout = None
            if len(scores) > 0:
                rollout = build_rollout(samples, scores, args)

            if rollout is None or updates_of(rollout, args) == 0:
                progress.idle = True
                mark_position(progress, position, mixture.samples, args)
                skip_rollout(metrics, position, mixture.samples, ends_run=progress.finished)
                # The run ends without an update after which it would log, evaluate and save.
                if progress.finished and progress.global_step > 0:
                    metrics.log()
                    if progress.due(args.eval_steps):
                        metrics.log_evaluation(
                            *evaluate(
                                accelerator, model, policy, tokenizer, eval_sets, scores_of, args
                            )
                        )
                    if args.save_steps and progress.due(args.save_steps):
                        checkpoint.save(run)
                checkpoint.stop_if_asked(run)
                continue

            # Before its first update the policy has not moved. Only the later updates need the old
            # log-probs, as the pass that trains would compute them.
            readers = {}
            if updates_of(rollout, args) > 1:
                readers["logps"] = model
            if reference is not None:
                readers["ref_logps"] = reference
            with metrics.timed("score"):
                logps_before = read_tokens(accelerator, samples, readers, args)
            check_rollout(samples, logps_before, progress, args.output_dir)
            rollout["tensors"].update(logps_before)
            rollout["made_at"] = progress.global_step
            # Checkpoints hold it: a resumed run goes on with the same rollout.
            position["rollout"] = rollout
            position["prompts_seen_at_update"] = position["prompts_seen"]

        # All processes agree on the samples of this update. Each takes its share of them.
        rollout = position["rollout"]
        is_first_update = rollout["made_at"] == progress.global_step
        order_seed = (args.seed, position["rollouts_seen"], ORDER_STREAM)
        update_rows = rows_of_update(rollout, order_seed, position["update"], args)
        tokens_of_samples = sample_lengths(rollout["prompts"], rollout["responses"])
        update_tokens = int(tokens_of_samples[update_rows].sum())
        lengths = tokens_of_samples  # by which the samples are sorted
        if args.share_prompts:
            lengths = longest_of_group(tokens_of_samples, args.n_samples_per_prompt)
        micro_batches = batches.split(
            accelerator,
            update_rows,
            lengths,
            args.micro_train_batch_size,
            args.micro_train_tokens,
        )
        total_weight = len(update_rows)
        if args.average == "token":
            total_weight = int(rollout["tensors"]["mask"][update_rows].sum())
        divisor = engine.begin_update(accelerator, model, micro_batches)
        loss_scale = engine.loss_scale(accelerator, model)
        learning_rate = scheduler.get_last_lr()[0]

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
                output = model(inputs, args.temperature, extras=("entropy",))
                if is_first_update:
                    old["logps"] = output["logps"].detach()  # the ratios are exactly 1
                losses, sample_weights, logged = compare(
                    output, old, weights, is_first_update, args
                )
                new = {f"new {name}": tensor for name, tensor in output.items()}
                guard.check(data_rows, losses, sample_weights, tensors={**old, **new})
                # The loss is the weighted mean over the update's samples. The engine itself divides
                # by `divisor`, the number of micro-batches of all processes.
                accelerator.backward((losses * sample_weights).sum() * divisor / total_weight)
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            for values, value_weights in logged:
                metrics.pending.add(values, value_weights)
            metrics.computed(inputs, micro_batch.weights)

        position["update"] += 1
        if position["update"] == updates_of(rollout, args):
            end_rollout(position)
        mark_position(progress, position, mixture.samples, args)
        applied = not accelerator.optimizer_step_was_skipped  # skipped: an fp16 overflow
        progress.update_done(applied, samples=len(update_rows), tokens=update_tokens)
        metrics.update_done(
            applied,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            loss_scale=loss_scale,
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
        scores = with_penalty(scores_of(samples), samples, args)
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
