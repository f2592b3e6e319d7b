"""What a program should have logged of an update: computed anew in fp64, by plain transformers, a row at a time.

There is no micro-batch, no padding and no process here, so nothing of this can depend on them. Each
function takes the model with the weights before the update, and returns one number a name. A choice
that is a program's own is in its `definitions`, see `adapting.Description`.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from adapting import GROUP, LONGEST_RESPONSE, Row, Sample
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

BETA = 0.1  # of DPO and KTO: the default of all programs here
KL_OF_RLOO = 0.05  # TRL's default


def load(folder: Path, is_scorer: bool) -> torch.nn.Module:
    auto_class = AutoModelForSequenceClassification if is_scorer else AutoModelForCausalLM
    model = auto_class.from_pretrained(folder, dtype=torch.float64)
    return model.eval()


class Reading:
    """A model's reading of one sequence: of each target its log-prob and what is logged of it."""

    def __init__(self, model: torch.nn.Module, row: Row):
        ids = torch.tensor([row.ids])
        targets = torch.tensor(row.targets[1:]).bool()
        all_logits = model(ids).logits[0]
        logits = all_logits[:-1][targets]
        logps = logits.log_softmax(-1)
        self.logps = logps.gather(1, ids[0, 1:][targets, None])[:, 0]
        with torch.no_grad():
            self.entropy = -(logps.exp() * logps).sum(1)
            self.mean_logits = logits.mean(1)
            self.all_logits = all_logits.mean(1)
            self.correct = (logits.argmax(1) == ids[0, 1:][targets]).double()


def joined(readings: list[Reading], name: str) -> torch.Tensor:
    """Returns one value a token, of all sequences."""
    return torch.cat([getattr(reading, name) for reading in readings])


def gradient_norm(model: torch.nn.Module, loss: torch.Tensor) -> float:
    model.zero_grad()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))


def finish(model: torch.nn.Module, loss: torch.Tensor, values: dict) -> dict[str, float]:
    """Adds loss and gradient norm, and makes numbers of tensors."""
    found = {"loss": loss.item(), "grad_norm": gradient_norm(model, loss), **values}
    return {
        name: value.item() if isinstance(value, torch.Tensor) else float(value)
        for name, value in found.items()
    }


def count_tokens(samples: list[list[Row]], definitions: dict) -> int:
    """Returns the tokens of an update.

    Definitions of `tokens`: `all` that the model reads; `targets`: those that are learned;
    `length`: all of each row, also where a model reads a prompt once for two answers.
    """
    rows = [row for sample in samples for row in sample]
    if definitions.get("tokens") == "targets":
        return sum(sum(row.targets[1:]) for row in rows)
    return sum(len(row.ids) for row in rows)


# ============================================================ works


def sft(model, reference, samples: list[list[Row]], definitions: dict) -> dict[str, float]:
    readings = [Reading(model, row) for sample in samples for row in sample]
    loss = -joined(readings, "logps").mean()
    values = {
        "accuracy": joined(readings, "correct").mean(),
        "entropy": joined(readings, "entropy").mean(),
        "tokens": count_tokens(samples, definitions),
        "targets": len(joined(readings, "correct")),
    }
    return finish(model, loss, values)


def of_answers(
    kind: str, readings: list[Reading], references: list[Reading], definitions: dict
) -> dict:
    """Returns what is logged of the chosen answers, or of the rejected ones.

    Definitions of `logits`: the mean over the tokens of the answers, or over `all positions`.
    """
    logits = "all_logits" if definitions.get("logits") == "all positions" else "mean_logits"
    logps = torch.stack([reading.logps.sum() for reading in readings])
    ref_logps = torch.stack([reading.logps.sum() for reading in references])
    return {
        f"rewards/{kind}": BETA * (logps - ref_logps).mean(),
        f"logps/{kind}": logps.mean(),
        f"logits/{kind}": joined(readings, logits).mean(),
    }


def log_ratios(readings: list[Reading], references: list[Reading]) -> torch.Tensor:
    return torch.stack(
        [
            reading.logps.sum() - other.logps.sum()
            for reading, other in zip(readings, references, strict=True)
        ]
    )


def dpo(model, reference, samples: list[list[Row]], definitions: dict) -> dict[str, float]:
    chosen, rejected = ([Reading(model, row) for row in rows] for rows in zip(*samples))
    with torch.no_grad():
        ref_chosen, ref_rejected = (
            [Reading(reference, row) for row in rows] for rows in zip(*samples)
        )
    margins = BETA * (log_ratios(chosen, ref_chosen) - log_ratios(rejected, ref_rejected))
    loss = -F.logsigmoid(margins).mean()
    values = {
        **of_answers("chosen", chosen, ref_chosen, definitions),
        **of_answers("rejected", rejected, ref_rejected, definitions),
        "rewards/margins": margins.mean(),
        "rewards/accuracies": (margins > 0).double().mean(),
        "chosen_accuracy": joined(chosen, "correct").mean(),
        "entropy": joined(chosen + rejected, "entropy").mean(),
        "tokens": count_tokens(samples, definitions),
    }
    return finish(model, loss, values)


def reward(model, reference, samples: list[list[Row]], definitions: dict) -> dict[str, float]:
    scores = torch.stack(
        [
            torch.stack([model(torch.tensor([row.ids])).logits[0, 0] for row in sample])
            for sample in samples
        ]
    )
    margins = scores[:, 0] - scores[:, 1]
    values = {
        "accuracy": (margins > 0).double().mean(),
        "margin": margins.mean(),
        "min_reward": scores.min(),
        "mean_reward": scores.mean(),
        "max_reward": scores.max(),
        "tokens": count_tokens(samples, definitions),
    }
    return finish(model, -F.logsigmoid(margins).mean(), values)


def kto(model, reference, samples: list[list[Row]], definitions: dict) -> dict[str, float]:
    """The unpaired loss of APO-zero, arXiv:2408.06266 eq. 7: KTO's without its KL."""
    labels = definitions["labels"]
    readings = [Reading(model, row) for sample in samples for row in sample]
    with torch.no_grad():
        references = [Reading(reference, row) for sample in samples for row in sample]
    rewards = BETA * log_ratios(readings, references)
    is_good = torch.tensor(labels)
    losses = torch.where(is_good, 1 - torch.sigmoid(rewards), torch.sigmoid(rewards))
    values = {"entropy": joined(readings, "entropy").mean()}
    for kind, wanted in (("chosen", True), ("rejected", False)):
        numbers = [number for number, label in enumerate(labels) if label == wanted]
        of_kind = ([each[n] for n in numbers] for each in (readings, references))
        values |= of_answers(kind, *of_kind, definitions)
    values["rewards/margins"] = values["rewards/chosen"] - values["rewards/rejected"]
    values["tokens"] = count_tokens(samples, definitions)
    return finish(model, losses.mean(), values)


def rollout(model, reference, samples: list[Sample], definitions: dict) -> dict[str, float]:
    """One update on samples that the same weights have drawn: all ratios are 1.

    Definitions of `advantages`: `group` less its mean, divided by its deviation; `batch`: divided by
    the deviation of all; `leave one out`: less the mean of the others. Of `average`: over all
    `tokens`; over `sequences`, each the sum of its tokens. `kl`: a coefficient of the KL in the
    reward, or absent. Of `std`, the logged deviation of the rewards: the mean of `groups`, or absent:
    of all responses.
    """
    rows = [
        Row(
            sample.prompt_ids + sample.response_ids,
            [0] * len(sample.prompt_ids) + [1] * len(sample.response_ids),
        )
        for sample in samples
    ]
    readings = [Reading(model, row) for row in rows]
    with torch.no_grad():
        references = [Reading(reference, row) for row in rows]
    scores = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    with torch.no_grad():
        kl = joined(readings, "logps") - joined(references, "logps")
        kl_of_samples = log_ratios(readings, references)
    shaped = scores
    if definitions.get("kl"):
        shaped = scores - float(definitions["kl"]) * kl_of_samples
    groups = shaped.reshape(-1, GROUP)
    if definitions["advantages"] == "leave one out":
        advantages = groups - (groups.sum(1, keepdim=True) - groups) / (GROUP - 1)
    else:
        advantages = groups - groups.mean(1, keepdim=True)
        deviations = groups.std(1, keepdim=True)
        if definitions["advantages"] == "batch":
            deviations = advantages.flatten().std()
        advantages = advantages / (deviations + 1e-4)
    advantages = advantages.flatten()
    ratios = [torch.exp(reading.logps - reading.logps.detach()) for reading in readings]
    if definitions["average"] == "tokens":
        tokens = sum(len(ratio) for ratio in ratios)
        loss = -sum(a * ratio.sum() for a, ratio in zip(advantages, ratios)) / tokens
    else:
        whole = [torch.exp((reading.logps - reading.logps.detach()).sum()) for reading in readings]
        loss = -sum(a * ratio for a, ratio in zip(advantages, whole)) / len(whole)
    groups_std = scores.reshape(-1, GROUP).std(1)
    lengths = torch.tensor([len(sample.response_ids) for sample in samples]).double()
    end = model.config.eos_token_id
    ended = torch.tensor([sample.response_ids[-1] == end for sample in samples])
    values = {
        "reward": scores.mean(),
        "reward_std": groups_std.mean() if definitions.get("std") == "groups" else scores.std(),
        "equal_groups": (groups.std(1) < 1e-8).double().mean(),
        "length": lengths.mean(),
        "shortest": lengths.min(),
        "longest": lengths.max(),
        "truncated": (~ended).double().mean(),
        "terminated_length": lengths[ended].mean(),
        "entropy": joined(readings, "entropy").mean(),
        "kl": kl.mean(),
        "tokens": sum(len(row.ids) for row in rows),
        "targets": lengths.sum(),
    }
    assert lengths.max() <= LONGEST_RESPONSE
    return finish(model, loss, values)


WORKS = {"sft": sft, "dpo": dpo, "reward": reward, "kto": kto, "grpo": rollout, "rloo": rollout}
