"""Proximal Policy Optimization: sample answers, score them, raise the probability of those better than expected.

Schulman et al. 2017, arXiv:1707.06347; for language models Ziegler et al. 2019, arXiv:1909.08593, and the details of Huang et al.
2024, arXiv:2403.17031. Loss of a window, over its response tokens, r_t = pi(a_t)/pi_old(a_t), A_t by GAE, V clipped around V_old:

    loss = mean of -min(r_t A_t, clip(r_t, 1 - c, 1 + c) A_t) + vf_coef * 1/2 max((V_t - R_t)^2, (clip(V_t) - R_t)^2)

Demo, offline:   python recipes/ppo.py
One GPU:         accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/ppo.py --model_name_or_path M --dataset_name D --reward_model_name_or_path R
N GPUs:          accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 recipes/ppo.py --model_name_or_path M --dataset_name D --reward_model_name_or_path R
DeepSpeed fp16:  accelerate launch --config_file accelerate_configs/ds_fp16.yaml recipes/ppo.py
Docs, metrics:   docs/ppo.md
"""

# ============================================================ imports
import json
import math
import os
import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from transformers import get_scheduler
from transformers.hf_argparser import HfArg

import common
from common import actor, arguments, batches, checkpoint, distributed, engine, guards, launch, optim
from common.checkpoint import Run
from common.data import dataset, formats, tokens
from common.metrics import Metrics
from common.models import checks, load, packing, prepare
from common.models.logprobs import LogProbModel, ScoreModel
from common.progress import Progress
from common.rollout import answers, generation

common.check_recipe(__file__)


# ============================================================ arguments
@dataclass
class Args:
    model_name_or_path: str | None = HfArg(
        default=None, help="policy to train, usually the SFT model: hub name or folder"
    )
    ref_model_name_or_path: str | None = HfArg(
        default=None, help="reference policy; default: the policy as it starts"
    )
    critic_model_name_or_path: str | None = HfArg(
        default=None, help="the critic's start; default: the reward model, else the policy"
    )
    reward_model_name_or_path: str | None = HfArg(
        default=None, help="reward model with one label, such as recipes/reward.py saves"
    )
    reward_function: str | None = HfArg(
        default=None,
        help="MODULE:NAME, a function (prompts, responses, **columns) -> scores; added to the reward model's",
    )
    dataset_name: str | None = HfArg(
        default=None,
        help="prompts: hub name, hub name:config, file or folder; other columns go to the reward function",
    )
    dataset_split: str = HfArg(default="train", help="split of --dataset_name")
    eval_dataset_name: list[str] | None = HfArg(
        default=None, help="held-out prompts, one or several sets; a column answer adds exact match"
    )
    eval_dataset_split: str = HfArg(
        default="train", help="split of --eval_dataset_name (a local file's is train)"
    )
    columns: list[str] | None = HfArg(
        default=None, help="where a format's column stands in the data, such as prompt=question"
    )
    output_dir: str | None = HfArg(default=None, help="default: runs/ppo/<date-time>")

    rollout_batch_size: int = HfArg(default=1024, help="prompts of one rollout, over all processes")
    n_samples_per_prompt: int = HfArg(default=1, help="responses to each prompt")
    micro_rollout_batch_size: int = HfArg(
        default=16, help="responses one process generates and scores at once"
    )
    num_epochs_per_rollout: int = HfArg(default=1, help="passes over the samples of a rollout")
    max_new_tokens: int = HfArg(default=256, help="longest response")
    temperature: float = HfArg(
        default=1.0, help="of sampling and of every log-prob; evaluation is greedy"
    )

    kl_coef: float = HfArg(default=0.05, help="weight of the KL to the reference")
    kl_estimator: Literal["k1", "k2", "k3"] = HfArg(default="k1", help="see kl_estimate")
    kl_in: Literal["reward", "loss"] = HfArg(
        default="reward", help="reward: a penalty on each token's reward; loss: a term of the loss"
    )
    kl_target: float = HfArg(
        default=0.0, help="KL of a response that the coefficient is adapted to; 0: it is fixed"
    )
    kl_horizon: float = HfArg(default=10000, help="samples over which it is adapted")
    reward_clip: float = HfArg(
        default=0.0, help="scores are clipped to plus and minus this; 0: not"
    )
    normalize_reward: bool = HfArg(
        default=False, help="reward model's scores by the mean and standard deviation in its config"
    )
    missing_eos_penalty: float = HfArg(
        default=0.0,
        help="taken from the score of a response that does not end within --max_new_tokens",
    )
    gamma: float = HfArg(default=1.0, help="discount")
    gae_lambda: float = HfArg(default=0.95, help="lambda of generalised advantage estimation")
    clip_range: float = HfArg(default=0.2, help="clipping of the ratio, below 1 and above")
    clip_range_high: float | None = HfArg(default=None, help="above 1, if it is to differ")
    dual_clip: float = HfArg(
        default=0.0, help="a bound on the ratio where the advantage is negative, above 1; 0: none"
    )
    value_clip_range: float = HfArg(
        default=0.2, help="clipping of the values around the old ones; 0: none"
    )
    vf_coef: float = HfArg(default=0.1, help="weight of the value loss")
    critic_warmup_rollouts: int = HfArg(
        default=0, help="rollouts at the start in which only the critic learns"
    )

    train_batch_size: int = HfArg(default=128, help="samples of one update, over all processes")
    micro_train_batch_size: int = HfArg(default=4, help="samples one process trains on at once")
    micro_train_tokens: int = HfArg(
        default=0, help="tokens with padding it trains on at once, instead; 0: not used"
    )
    share_prompts: bool = HfArg(
        default=True,
        help="compute a prompt once for its responses, where the architecture allows it",
    )
    max_epochs: int = HfArg(default=1, help="passes over the prompts")
    max_steps: int = HfArg(default=0, help="updates; 0: as many as the epochs hold")
    max_length: int = HfArg(
        default=1024,
        help="tokens of prompt and response; a prompt without room for --max_new_tokens is left out",
    )
    learning_rate: float = HfArg(default=1e-6, help="peak learning rate of the actor")
    critic_learning_rate: float = HfArg(default=1e-5, help="peak learning rate of the critic")
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"
    ] = HfArg(default="linear", help="see transformers.get_scheduler")
    warmup_steps: float = HfArg(default=0.03, help="updates of warm-up; below 1 a share of all")
    weight_decay: float = HfArg(default=0.0, help="on matrices, not on biases and norms")
    adam_epsilon: float = HfArg(default=1e-5, help="Adam's epsilon")
    max_grad_norm: float = HfArg(
        default=1.0, help="clipping of the joint norm of actor and critic; 0: none"
    )
    gradient_checkpointing: bool = HfArg(default=False, help="less memory for more time")
    attn_implementation: str | None = HfArg(default=None, help="sdpa, eager, flash_attention_2 ...")
    seed: int = HfArg(default=0, help="data order and sampling")

    logging_steps: float = HfArg(
        default=1, help="updates between log lines; below 1 a share of all"
    )
    eval_steps: float = HfArg(
        default=0, help="updates between evaluations; 0: only before and after"
    )
    save_steps: float = HfArg(default=0, help="updates between checkpoints to resume from; 0: none")
    save_total_limit: int = HfArg(default=2, help="checkpoints to keep; 0: all")
    save_actor_steps: float = HfArg(
        default=0, help="updates between saved actors; 0: only the last, in <output_dir>/actor"
    )
    save_actor_limit: int = HfArg(default=0, help="saved actors to keep; 0: all")
    resume: str = HfArg(
        default="never",
        help="never, auto (the newest whole checkpoint in --output_dir) or a checkpoint's path",
    )
    report_to: Literal["tensorboard", "none"] = HfArg(
        default="tensorboard", help="metrics.jsonl is always written"
    )
    debug_overflow: bool = HfArg(
        default=False, help="name the module and the tensor that overflow; slow"
    )


# ============================================================ the algorithm
class ActorCritic(LogProbModel):
    """Actor (`model`) and critic in one module: one engine, one backward, one checkpoint under every strategy."""

    def __init__(self, policy_model, critic):
        super().__init__(policy_model)
        self.critic = ScoreModel(critic)
        self._no_split_modules = sorted(
            {*policy_model._no_split_modules, *critic._no_split_modules}
        )

    def forward(self, batch: dict, temperature: float = 1.0, check: bool = False):
        """`LogProbModel.forward` with `entropy`, and `values`: those of the states in which the targets are chosen."""
        scores, mask = super().forward(batch, temperature, ("entropy",), check), batch["mask"]
        return scores | {
            "values": torch.zeros_like(scores["logps"]).masked_scatter(
                mask, self.critic(batch, batch["before"])
            )
        }


def prompt_row(row: dict, tokenizer, max_length: int, max_new_tokens: int) -> dict:
    """`prompt_ids length reason truncated columns` of one prompt; `columns` is the row as JSON, for a reward function."""
    formats.require(row, "prompt", expected="'prompt'")
    prompt, reason = row["prompt"], "" if formats.has_text(row["prompt"]) else "empty prompt"
    if isinstance(prompt, str):
        ids = tokens.encode(tokenizer, [prompt, ""], plain=True)[0]
    else:
        ids = tokens.encode(
            tokenizer,
            [tokens.render(tokenizer, formats.as_messages(prompt, "user"), True, row.get("tools"))],
        )[0]
    if len(ids) + max_new_tokens > max_length:
        reason = reason or "prompt leaves no room for max_new_tokens within max_length"
    return {
        "prompt_ids": ids,
        "length": len(ids),
        "truncated": False,
        "columns": json.dumps(row, default=str),
        "reason": reason,
    }


def kl_estimate(logps: torch.Tensor, ref_logps: torch.Tensor, estimator: str) -> torch.Tensor:
    """KL(policy || reference) of each token from the sampled one alone. Source: Schulman 2020, http://joschu.net/blog/kl-approx.html."""
    difference = logps - ref_logps
    if estimator == "k1":  # unbiased, may be negative
        return difference
    if estimator == "k2":  # biased, never negative, little variance
        return difference**2 / 2
    return torch.exp(-difference) - 1 + difference  # k3: unbiased, never negative


def token_rewards(
    scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float
) -> torch.Tensor:
    """Rewards `[samples, length]`: minus the KL of each token, and on the last real token the score `[samples]` of the response.

    Source: arXiv:1909.08593 eq. 2.
    """
    is_last = torch.arange(mask.shape[1], device=mask.device) == mask.sum(1, keepdim=True) - 1
    return torch.where(mask, -kl_coef * kl, 0.0) + is_last * scores[:, None]


def estimate_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
):
    """Advantages and returns `[samples, length]`, zero behind the end of a response, where the value of the state is zero.

    Source: Generalised Advantage Estimation, arXiv:1506.02438 eq. 16; the return is advantage plus value (TD(lambda)).
    """
    values = torch.where(mask, values, 0.0)
    advantages, following, next_values = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        following = torch.where(mask[:, t], delta + gamma * lam * following, 0.0)
        advantages[:, t], next_values = following, values[:, t]
    return advantages, torch.where(mask, advantages + values, 0.0)


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean 0 and standard deviation 1 over the masked values, zero elsewhere."""
    kept = values[mask].double()
    return torch.where(
        mask, (values - kept.mean()) * torch.rsqrt(kept.var(unbiased=False) + 1e-8), 0.0
    ).to(values.dtype)


def policy_losses(
    logps, old_logps, advantages, clip_low: float, clip_high: float, dual_clip: float
):
    """Loss of each token, and where clipping decided it.

    Sources: arXiv:1707.06347 eq. 7; another range above 1 DAPO, arXiv:2503.14476 section 3.1; dual clip arXiv:1912.09729.
    """
    ratios = torch.exp(logps - old_logps)
    free, clipped = -advantages * ratios, -advantages * ratios.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(free, clipped)
    if dual_clip:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)
    return losses, losses != free


def value_losses(values, old_values, returns, clip: float):
    """Loss of each token's value, and where clipping decided it. Source: PPO's first code, see arXiv:2403.17031."""
    clipped = (
        values.clamp(old_values - clip, old_values + clip) if clip else values
    )  # to the digit the value itself where it is within
    free, clipped = (values - returns) ** 2, (clipped - returns) ** 2
    return torch.maximum(free, clipped) / 2, clipped > free


def next_kl_coef(kl_coef: float, kl: float, target: float, horizon: float, samples: int) -> float:
    """The coefficient after a rollout whose responses had this KL on average. Source: arXiv:1909.08593 section 2.2 and its code."""
    return (
        kl_coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * samples / horizon)
        if target
        else kl_coef
    )


def count_from_zero(optimizer, *_) -> None:
    """After a step: where a parameter group does not learn yet, its gradients and so its moments are zero, and Adam's count stays zero, too."""
    for parameter in [
        p for group in optimizer.param_groups if not group["learns"] for p in group["params"]
    ]:
        if "step" in optimizer.state[parameter]:
            optimizer.state[parameter]["step"] = optimizer.state[parameter]["step"] * 0


def collate(samples: dict, rows: list[int], share: bool, device) -> dict:
    """Samples as the models read them, see `lay_out`."""
    prompts, responses = ([samples[part][row] for row in rows] for part in ("prompts", "responses"))
    return packing.make_batch(prompts, responses, share, device)


def compare(
    scores: dict, batch: dict, kl_coef: float, actor_learns: bool, args: Args
) -> tuple[torch.Tensor, dict]:
    """Losses and metrics of response tokens, each `[rows, response length]`.

    Args:
        scores: the policy's `logps values entropy`.
        batch: the rollout's `logps ref_logps values advantages returns` of these rows.
    """
    logps, old_logps = scores["logps"], batch["logps"]
    high = args.clip_range if args.clip_range_high is None else args.clip_range_high
    policy, policy_clipped = policy_losses(
        logps, old_logps, batch["advantages"], args.clip_range, high, args.dual_clip
    )
    value, value_clipped = value_losses(
        scores["values"], batch["values"], batch["returns"], args.value_clip_range
    )
    actor_loss = (
        policy + kl_coef * kl_estimate(logps, batch["ref_logps"], args.kl_estimator)
        if args.kl_in == "loss"
        else policy
    )
    losses = actor_loss * float(actor_learns) + args.vf_coef * value
    return losses, {
        "loss": losses,
        "loss/policy_avg": policy,
        "loss/value_avg": value,
        "policy/approxkl_avg": (logps - old_logps) ** 2 / 2,
        "policy/clipfrac_avg": policy_clipped.float(),
        "policy/entropy_avg": scores["entropy"],
        "val/clipfrac_avg": value_clipped.float(),
        "val/ratio": torch.exp(logps - old_logps),
    }


def share_of(accelerator, samples: dict, args: Args):
    """This process's micro-batches of samples, for scoring: rows and weights, 0 for a filler. Those of one prompt stand side by side."""
    lengths, n = samples["lengths"], args.n_samples_per_prompt
    longest = (
        lengths.reshape(-1, n).max(1).repeat(n) if len(lengths) % n == 0 else lengths
    )  # evaluation has one a prompt
    return batches.split(
        accelerator, np.arange(len(longest)), longest, args.micro_rollout_batch_size
    )


@torch.no_grad()
def score(
    accelerator, samples: dict, reward_model, reward_function, tokenizer, args: Args
) -> torch.Tensor:
    """The score of each response, fp32 `[samples]`, the same on every rank: reward model plus function, clipped, less the penalty.

    Args:
        samples: `prompts` and `responses` (token ids), `columns` of the prompts (JSON), `lengths`, `ended`.
    """
    mine = {}
    for rows, weights in share_of(accelerator, samples, args):
        real, scores = [row for row, weight in zip(rows, weights) if weight], 0.0
        if reward_model is not None:
            scores = (
                reward_model(collate(samples, rows, args.share_prompts, accelerator.device))[
                    : len(real)
                ]
                .double()
                .cpu()
                .numpy()
            )
        if args.normalize_reward:
            scores = (
                scores - (config := accelerator.unwrap_model(reward_model).config).reward_mean
            ) / config.reward_std
        if reward_function is not None and real:
            rest = [json.loads(samples["columns"][row]) for row in real]
            prompts = [row.pop("prompt") for row in rest]
            responses = tokenizer.batch_decode(
                [samples["responses"][row] for row in real], skip_special_tokens=True
            )
            # Columns that have the names of what is given anyway would be given twice.
            values = reward_function(
                prompts,
                responses,
                **{n: [row[n] for row in rest] for n in rest[0].keys() - {"prompts", "responses"}},
            )
            if len(values) != len(real) or not np.isfinite(np.array(values, dtype=float)).all():
                raise ValueError(
                    f"--reward_function {args.reward_function}: expected {len(real)} finite scores, got {values!r:.200}"
                )
            scores = scores + np.array(values, dtype=float)
        mine |= dict(zip(real, np.broadcast_to(scores, len(real)).tolist()))
    scores = torch.tensor(distributed.gather_rows(mine))
    scores = scores.clamp(-args.reward_clip, args.reward_clip) if args.reward_clip else scores
    return scores - args.missing_eos_penalty * ~samples["ended"]


@torch.no_grad()
def respond(accelerator, model, policy, tokenizer, columns: dict, args: Args, **sampling) -> dict:
    """Prompts and their responses, the same on every rank; greedy unless `sampling` gives `temperature` and `uniforms`."""
    prompts, sizes = columns["prompt_ids"], (args.micro_rollout_batch_size, args.max_new_tokens)
    responses = generation.generate(
        accelerator, model, policy.model, tokenizer, prompts, *sizes, **sampling
    )
    stops = policy.model.generation_config.eos_token_id
    return {
        "prompts": prompts,
        "responses": responses,
        "columns": columns["columns"],
        "rows": columns["row"],
        "lengths": np.array(
            [len(prompt) + len(response) for prompt, response in zip(prompts, responses)]
        ),
        "ended": torch.tensor([response[-1] in stops for response in responses]),
    }


@torch.no_grad()
def roll_out(
    accelerator,
    model,
    policy,
    reference,
    tokenizer,
    columns: dict,
    score_of,
    number: int,
    kl_coef: float,
    metrics,
    args: Args,
):
    """Responses to prompts, and all that their updates need, the same on every rank; the mean KL of a response.

    Args:
        columns: of the prompts, one for each response.
        score_of: `samples -> scores [samples]`.
        number: of the rollout, counted over the whole run; with the seed it decides what is sampled.
    """
    model.eval()
    with metrics.timed("generate"):
        uniforms = np.random.default_rng([args.seed, number, 1]).random(
            (len(columns["prompt_ids"]), args.max_new_tokens)
        )
        samples = respond(
            accelerator,
            model,
            policy,
            tokenizer,
            columns,
            args,
            temperature=args.temperature,
            uniforms=uniforms,
        )
    with metrics.timed("score"):
        scores, mine = score_of(samples), {}
        for rows, weights in share_of(accelerator, samples, args):
            batch = collate(samples, rows, args.share_prompts, accelerator.device)
            # The log-probs and values that are old in the updates come from the forward pass that trains, not from generation.
            found = model(batch, args.temperature)
            found["ref_logps"] = reference(batch, args.temperature)["logps"]
            found = torch.stack([found[name] for name in ("logps", "ref_logps", "values")], 2).cpu()
            mine |= {
                row: part[kept]
                for row, part, kept, w in zip(rows, found, batch["mask"].cpu(), weights)
                if w
            }
        found = torch.nn.utils.rnn.pad_sequence(
            distributed.gather_rows(mine), batch_first=True
        )  # [samples, longest, 3]
    mask = torch.arange(found.shape[1]) < torch.tensor(
        [[len(response)] for response in samples["responses"]]
    )
    logps, ref_logps, values = found.unbind(2)
    parts = {"scores": scores, "logps": logps, "ref_logps": ref_logps, "values": values}
    guards.check_finite(
        [(samples["rows"], found.sum(2) + scores[:, None], mask)],
        metrics.progress,
        args.output_dir,
        parts,
    )
    kl = torch.where(mask, kl_estimate(logps, ref_logps, args.kl_estimator), 0.0)
    rewards = token_rewards(scores, kl, mask, kl_coef if args.kl_in == "reward" else 0.0)
    advantages, returns = estimate_advantages(rewards, values, mask, args.gamma, args.gae_lambda)
    model.train()
    means = {
        "objective/kl": kl.sum(1),
        "objective/entropy": -logps.sum(1),
        "objective/scores": scores,
        "objective/kl_coef": torch.full_like(scores, kl_coef),
        "objective/non_score_reward": rewards.sum(1) - scores,
        "objective/rlhf_reward": rewards.sum(1),
        "responses/length": mask.sum(1),
        "responses/eos_rate": samples["ended"],
    }
    # Every rank holds the whole rollout: one of them counts it.
    weights = torch.full(
        scores.shape, float(accelerator.is_main_process), device=accelerator.device
    )
    metrics.open.add({name: value.to(accelerator.device) for name, value in means.items()}, weights)
    metrics.log_rollout(scores, "\n".join(table(tokenizer, samples, scores)))
    tensors = {
        "mask": mask,
        "logps": logps,
        "ref_logps": ref_logps,
        "values": values,
        "returns": returns,
        "advantages": whiten(advantages, mask),
    }
    rollout = {
        **{part: samples[part] for part in ("prompts", "responses", "rows")},
        "kl_coef": kl_coef,
        "tensors": tensors,
    }
    return rollout, means["objective/kl"].mean().item()


def table(tokenizer, samples: dict, scores: torch.Tensor) -> list[str]:
    """The first few prompts, responses and scores as lines of a Markdown table."""
    texts = [tokenizer.batch_decode(samples[part][:8]) for part in ("prompts", "responses")]
    rows = [[" ".join(text.split()).replace("|", "\\|") for text in row] for row in zip(*texts)]
    lines = [
        f"| {prompt} | {response} | {value:.3f} |"
        for (prompt, response), value in zip(rows, scores.tolist())
    ]
    return ["| prompt | response | score |", "| --- | --- | --- |", *lines]


def check_settings(args: Args, processes: int) -> None:
    """Refuses sizes that do not divide, with the nearest that do, and settings that would be ignored or cannot work."""
    prompts, per_prompt, models = (
        args.rollout_batch_size,
        args.n_samples_per_prompt,
        args.reward_model_name_or_path,
    )
    if min(prompts, per_prompt, args.micro_rollout_batch_size, args.num_epochs_per_rollout) < 1:
        sys.exit(
            "--rollout_batch_size, --n_samples_per_prompt, --micro_rollout_batch_size and --num_epochs_per_rollout must be at least 1"
        )
    rollout = f"--rollout_batch_size {prompts} x --n_samples_per_prompt {per_prompt} = {prompts * per_prompt} samples"
    many = (
        f"--micro_rollout_batch_size {args.micro_rollout_batch_size} x {processes} processes",
        args.micro_rollout_batch_size * processes,
    )
    for what, unit in (
        many,
        (f"--train_batch_size {args.train_batch_size}", args.train_batch_size),
    ):
        step = (
            math.lcm(max(unit, 1), per_prompt) // per_prompt
        )  # a --train_batch_size of 0 is refused like any other recipe's
        if prompts % step:
            nearest = " or ".join(
                str(size)
                for size in (prompts // step * step, prompts // step * step + step)
                if size
            )
            sys.exit(
                f"{rollout} are not a multiple of {what}. Nearest that would do: --rollout_batch_size {nearest}."
            )
    for wrong, message in (
        (
            not (models or args.reward_function),
            "nothing scores the responses: give --reward_model_name_or_path or --reward_function",
        ),
        (
            args.normalize_reward and not models,
            "--normalize_reward is for a reward model's scores: give --reward_model_name_or_path",
        ),
        (
            args.kl_in == "loss" and args.kl_estimator == "k1",
            "--kl_in loss --kl_estimator k1: its mean gradient is zero. Use k2 or k3",
        ),
        (
            args.temperature <= 0,
            f"--temperature {args.temperature}: expected more than 0 (evaluation is greedy whatever it is)",
        ),
        (
            args.dual_clip and args.dual_clip <= 1,
            f"--dual_clip {args.dual_clip}: expected more than 1, or 0 for none",
        ),
        (
            args.kl_target and args.kl_coef <= 0,
            f"--kl_target {args.kl_target} needs --kl_coef above 0",
        ),
        (
            args.kl_target < 0 or args.reward_clip < 0,
            f"--kl_target {args.kl_target} or --reward_clip {args.reward_clip}: below 0",
        ),
        (
            args.kl_target and args.kl_horizon <= prompts * per_prompt / 5,
            f"{rollout}: --kl_target needs --kl_horizon above a fifth",
        ),
    ):
        if wrong:
            sys.exit(message)


def main():
    # ============================================================ accelerator
    args = arguments.parse(Args, demo=common.ASSETS / "ppo.yaml")
    check_settings(args, int(os.environ.get("WORLD_SIZE", 1)))
    accelerator = launch.make_accelerator(args, "ppo")
    arguments.check_intervals(args)

    # ============================================================ data
    tokenizer = load.tokenizer_of(args.model_name_or_path)
    limits = dict(max_length=args.max_length, max_new_tokens=args.max_new_tokens)
    how = dict(
        function=prompt_row,
        tokenizer=tokenizer,
        columns=formats.column_names(args.columns),
        **limits,
    )
    train_set = dataset.load(accelerator, args.dataset_name, args.dataset_split, **how)
    eval_sets = dataset.load_evaluation_sets(
        accelerator, args.eval_dataset_name, args.eval_dataset_split, **how
    )
    rollouts_per_epoch = math.ceil(len(train_set) / args.rollout_batch_size)
    last_prompts = (
        len(train_set) - (rollouts_per_epoch - 1) * args.rollout_batch_size
    )  # of an epoch's last rollout
    windows_of = lambda samples: (
        args.num_epochs_per_rollout * math.ceil(samples / args.train_batch_size)
    )
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    windows_per_rollout, last_windows = (
        windows_of(samples),
        windows_of(last_prompts * args.n_samples_per_prompt),
    )
    progress = Progress(len(train_set), args.train_batch_size, args.max_epochs, args.max_steps)
    progress.updates_per_epoch = (rollouts_per_epoch - 1) * windows_per_rollout + last_windows
    accelerator.print(
        f"a rollout: {args.rollout_batch_size} prompts x {args.n_samples_per_prompt} responses = {samples} samples, "
        f"x {args.num_epochs_per_rollout} / train_batch_size = {windows_per_rollout} updates; {rollouts_per_epoch} rollouts an epoch, "
        f"the last of {last_prompts} prompts, {last_windows} updates; {progress.total_steps} updates in all"
    )

    # ============================================================ model and optimizer
    critic_name = (
        args.critic_model_name_or_path or args.reward_model_name_or_path or args.model_name_or_path
    )
    loading = args.attn_implementation, args.gradient_checkpointing
    policy_model = load.causal_lm(args.model_name_or_path, tokenizer, *loading)
    policy = ActorCritic(
        policy_model, load.score_model(critic_name, tokenizer, *loading, new_head=True)
    )
    prepare.disable_dropout(policy)
    actor_groups = optim.parameter_groups(
        policy.model, args.weight_decay, lr=args.learning_rate, name="actor", learns=True
    )
    critic_groups = optim.parameter_groups(
        policy.critic, args.weight_decay, lr=args.critic_learning_rate, name="critic", learns=True
    )
    optimizer = torch.optim.AdamW(
        actor_groups + critic_groups, lr=args.learning_rate, eps=args.adam_epsilon
    )
    warmup = (
        args.warmup_steps
        if args.warmup_steps >= 1
        else math.ceil(args.warmup_steps * progress.total_steps)
    )
    scheduler = get_scheduler(
        args.lr_scheduler_type, optimizer, int(warmup), progress.total_steps
    )  # not prepared: ours to step
    model, optimizer = prepare.for_training(accelerator, policy, optimizer, args.debug_overflow)
    group_norms = engine.record_group_norms(accelerator, optimizer)
    engine.innermost_optimizer(optimizer).register_step_post_hook(count_from_zero)
    checks.check_logprobs(
        model, train_set[0]["prompt_ids"], accelerator.device, args.model_name_or_path
    )

    # ============================================================ reference and reward
    ref_name = args.ref_model_name_or_path or args.model_name_or_path
    reference = prepare.frozen(
        accelerator, LogProbModel(load.causal_lm(ref_name, tokenizer, args.attn_implementation))
    )
    reward_function, reward_model = (
        arguments.load_function("reward_function", args.reward_function)
        if args.reward_function
        else None,
        None,
    )
    if args.reward_model_name_or_path:
        name = args.reward_model_name_or_path
        reward_model = ScoreModel(load.score_model(name, tokenizer, args.attn_implementation))
        if args.normalize_reward and not getattr(reward_model.config, "reward_std", None):
            sys.exit(
                f"--normalize_reward: {name!r} has no reward_std in its config; recipes/reward.py with --eval_dataset_name writes it"
            )
        reward_model = prepare.frozen(accelerator, reward_model)
    models = [one for one in (model, reference, reward_model) if one is not None]
    args.share_prompts = args.share_prompts and checks.can_pack(
        models, args.max_length, accelerator.device
    )
    accelerator.print(
        f"prompts are computed {'once for their' if args.share_prompts else 'for each of their'} responses"
    )
    score_of = lambda samples: score(
        accelerator, samples, reward_model, reward_function, tokenizer, args
    )

    # ============================================================ the loop
    metrics = Metrics(accelerator, args, progress, bar_metric="objective/scores")
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
        extra={"kl_coef": args.kl_coef, "rollout": None},
    )
    checkpoint.resume(run)
    if progress.updates_seen == 0:
        metrics.log_evaluation(
            *evaluate(accelerator, model, policy, tokenizer, eval_sets, score_of, args)
        )
    model.train()
    metrics.start_interval()
    while not progress.finished:
        epoch, place = divmod(progress.updates_seen, progress.updates_per_epoch)
        in_epoch, window_number = divmod(place, windows_per_rollout)
        number = epoch * rollouts_per_epoch + in_epoch
        actor_learns = number >= args.critic_warmup_rollouts  # only then is there a KL to adapt to
        if (rollout := run.extra["rollout"]) is None:
            prompts = batches.rows_of_update(
                len(train_set), args.rollout_batch_size, args.seed, number
            )
            columns = train_set[np.repeat(prompts, args.n_samples_per_prompt)]
            state = number, run.extra["kl_coef"], metrics, args
            rollout, kl = roll_out(
                accelerator, model, policy, reference, tokenizer, columns, score_of, *state
            )
            kl_coef = next_kl_coef(
                run.extra["kl_coef"],
                kl,
                args.kl_target * actor_learns,
                args.kl_horizon,
                len(rollout["prompts"]),
            )
            run.extra = {"kl_coef": kl_coef, "rollout": rollout}
        lengths = np.array(
            [
                len(prompt) + len(response)
                for prompt, response in zip(rollout["prompts"], rollout["responses"])
            ]
        )
        window = batches.rows_of_update(
            len(lengths), args.train_batch_size, (args.seed, number, 2), window_number
        )
        micro_batches = batches.split(
            accelerator, window, lengths, args.micro_train_batch_size, args.micro_train_tokens
        )
        divisor = engine.begin_update(accelerator, model, micro_batches)
        window_tokens = int(rollout["tensors"]["mask"][window].sum())
        for group, learning_rate in zip(optimizer.param_groups, scheduler.get_last_lr()):
            group["learns"] = actor_learns or group["name"] == "critic"
            group["lr"] = (
                learning_rate * group["learns"]
            )  # at zero, weight decay moves nothing either
        rates = {
            "learning_rate": optimizer.param_groups[0]["lr"],
            "critic_learning_rate": optimizer.param_groups[-1]["lr"],
        }
        scale, seen = engine.loss_scale(accelerator, model), []
        for rows, weights in micro_batches:
            with metrics.timed("data"):
                sequences = collate(rollout, rows, args.share_prompts, accelerator.device)
                width = sequences["mask"].shape[1]
                batch = {
                    name: part[rows, :width].to(accelerator.device, non_blocking=True)
                    for name, part in rollout["tensors"].items()
                }
                token_weights = batch["mask"] * torch.tensor(weights)[:, None].to(
                    accelerator.device, non_blocking=True
                )
            with accelerator.accumulate(model):
                scores = model(sequences, args.temperature)
                losses, values = compare(scores, batch, rollout["kl_coef"], actor_learns, args)
                seen.append(
                    ([rollout["rows"][row] for row in rows], losses.detach(), token_weights)
                )
                if accelerator.sync_gradients:
                    guards.check_finite(
                        seen,
                        progress,
                        args.output_dir,
                        {**batch, **{f"new {name}": part for name, part in scores.items()}},
                    )
                # The mean over the window's response tokens: the engine divides by micro-batches and processes.
                accelerator.backward((losses * token_weights).sum() * divisor / window_tokens)
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(
                        model.parameters(), max(args.max_grad_norm, 0) or math.inf
                    )
                optimizer.step()
                optimizer.zero_grad()
            metrics.pending.add(values, token_weights)
        applied = not accelerator.optimizer_step_was_skipped
        if window_number + 1 == windows_of(len(lengths)):
            run.extra["rollout"] = None
        progress.update_done(applied, samples=len(window), tokens=int(lengths[window].sum()))
        norms = group_norms()
        parts = {
            f"grad_norm/{name}": grad_norm * norm / (math.hypot(*norms.values()) or 1.0)
            for name, norm in norms.items()
        }
        metrics.update_done(applied, grad_norm=grad_norm, loss_scale=scale, **parts, **rates)
        if applied:
            scheduler.step()
        if progress.log_due(args.logging_steps):
            metrics.log()
        if progress.due(args.eval_steps):
            with metrics.timed("paused"):
                metrics.log_evaluation(
                    *evaluate(accelerator, model, policy, tokenizer, eval_sets, score_of, args)
                )
        if args.save_steps and progress.due(args.save_steps):
            with metrics.timed("paused"):
                checkpoint.save(run)
        if args.save_actor_steps and progress.due(args.save_actor_steps):
            with metrics.timed("paused"):
                folder = f"{args.output_dir}/actors/global_step_{progress.global_step:06d}"
                actor.save(accelerator, model, policy, tokenizer, folder, args.save_actor_limit)
        checkpoint.stop_if_asked(run)
    actor.save(accelerator, model, policy, tokenizer, f"{args.output_dir}/actor")
    metrics.close()
    accelerator.print(
        f"done: {progress.global_step} updates, {progress.skipped_steps} skipped; actor in {args.output_dir}/actor"
    )


# ============================================================ evaluation and saving
def evaluate(
    accelerator, model, policy, tokenizer, eval_sets, score_of, args: Args
) -> tuple[dict[str, float], list[str]]:
    """Greedy responses to each held-out set: their scores, length and share that ends, exact match where it has answers; samples."""
    training, line, shown = model.training, {}, []
    model.eval()
    for prefix, eval_set in eval_sets.items():
        columns = eval_set[:]
        samples = respond(accelerator, model, policy, tokenizer, columns, args)
        scores, texts = (
            score_of(samples),
            tokenizer.batch_decode(samples["responses"], skip_special_tokens=True),
        )
        values = {
            "scores": scores,
            "length": [len(response) for response in samples["responses"]],
            "eos_rate": samples["ended"],
        }
        if "answer" in columns:
            values["exact_match"] = [
                answers.is_right(text, answer)
                for text, answer in zip(texts, columns["answer"])
                if answer
            ]
        line |= {
            prefix + name: float(np.mean(np.asarray(value, dtype=float)))
            for name, value in values.items()
        }
        shown += table(tokenizer, samples, scores)[2:6]
    model.train(training)
    return line, shown


if __name__ == "__main__":
    main()
