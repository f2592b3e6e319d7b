"""What TRL's GRPO computes on the same tensors: losses and gradients, as JSON.

    python tests/peers/trl_grpo.py [OTHER.json]            # needs `pip install -e '.[peers]'`

tests/rollout/test_grpo_values.py compares recipes/grpo.py with trl_grpo.json. Losses come from
`GRPOTrainer._compute_loss`, which is given log-probs, advantages and masks in place of a model.
"""

import collections
import itertools
import json
import os
import sys
import types
from pathlib import Path

import torch

VERSION = "1.16.0"
STORED = Path(__file__).with_suffix(".json")

MAX_NEW_TOKENS = 7
CLIP_LOW = 0.2
CLIP_HIGH = 0.28
KL_COEF = 0.3
# The loss types of TRL that stand for a loss and an average of ours.
LOSSES = {
    ("clip", "token"): "dapo",
    ("clip", "sequence"): "grpo",
    ("clip", "constant"): "dr_grpo",
    ("cispo", "token"): "cispo",
    ("sapo", "sequence"): "sapo",
}
# Loss, average, ratio, and whether there is a KL.
CASES = [
    (*pair, ratio, with_kl)
    for pair, ratio, with_kl in itertools.product(LOSSES, ("token", "sequence"), (False, True))
]
# Sampler correction: its smallest and its largest ratio.
CORRECTIONS = {
    "token_truncate": (None, 1.3),
    "token_mask": (1 / 1.3, 1.3),
    "sequence_mask": (None, 1.5),
}


def tensors() -> dict[str, torch.Tensor]:
    """Log-probs, masks and advantages of six responses, fp64. Many ratios are clipped."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([[1], [7], [4], [2], [7], [5]])
    mask = torch.arange(MAX_NEW_TOKENS) < lengths
    old_logps = -1 - draw(6, MAX_NEW_TOKENS).abs()
    return {
        "loss_mask": mask,
        "old_logps": old_logps * mask,
        "logps": (old_logps + 0.5 * draw(6, MAX_NEW_TOKENS)) * mask,
        "ref_logps": (old_logps + 0.5 * draw(6, MAX_NEW_TOKENS)) * mask,
        "advantages": draw(6).abs() * torch.tensor([1, -1, 1, -1, -1, 1]),
        "sampler_logps": (old_logps + 0.3 * draw(6, MAX_NEW_TOKENS)) * mask,
    }


def correction_of_trl(mode: str) -> torch.Tensor:
    """The weights of tokens, `[6, MAX_NEW_TOKENS]` or `[6, 1]`."""
    given = tensors()
    log_ratios = (given["old_logps"] - given["sampler_logps"]) * given["loss_mask"]
    ratios = log_ratios.exp()
    if mode == "sequence_mask":
        ratios = log_ratios.sum(1, keepdim=True).exp()
    smallest, largest = CORRECTIONS[mode]
    if mode == "token_truncate":
        return ratios.clamp(max=largest)
    return ratios * ((ratios >= (smallest or 0)) & (ratios <= largest))


def loss_of_trl(
    loss_type: str, average: str, ratio: str, with_kl: bool, correction: str | None = None
) -> dict[str, list[float]]:
    """The loss of one batch and its gradient with respect to the log-probs."""
    from trl import GRPOTrainer

    given = tensors()
    logps = given["logps"].requires_grad_()
    trainer = types.SimpleNamespace(
        loss_type=LOSSES[loss_type, average],
        importance_sampling_level=ratio,
        beta=KL_COEF if with_kl else 0.0,
        epsilon_low=CLIP_LOW,
        # TRL bounds CISPO's weights by this number itself, PPO's ratio by 1 plus it.
        epsilon_high=1 + CLIP_HIGH if loss_type == "cispo" else CLIP_HIGH,
        max_completion_length=MAX_NEW_TOKENS,
        args=types.SimpleNamespace(
            use_bias_correction_kl=True,
            delta=None,
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
        accelerator=types.SimpleNamespace(
            num_processes=1,
            gather=lambda tensor: tensor,
            reduce=lambda tensor, reduction: tensor,
        ),
        model=types.SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, torch.zeros_like(logps), None),
    )
    ids = torch.zeros(logps.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": given["loss_mask"].long(),
        "advantages": given["advantages"],
        "old_per_token_logps": given["old_logps"],
        "ref_per_token_logps": given["ref_logps"],
        "num_items_in_batch": given["loss_mask"].sum(),
    }
    if correction:
        inputs["importance_sampling_ratio"] = correction_of_trl(correction)
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    gradient = torch.autograd.grad(loss, logps)[0]
    return {"loss": [loss.item()], "gradient": gradient.flatten().tolist()}


def values() -> dict[str, dict[str, list[float]]]:
    import trl

    if trl.__version__ != VERSION:
        sys.exit(f"expected TRL {VERSION}, found {trl.__version__}: pip install -e '.[peers]'")
    found = {name_of(case): loss_of_trl(*case) for case in CASES}
    for mode in CORRECTIONS:
        found[f"corrected {mode}"] = loss_of_trl("clip", "token", "token", True, mode)
    return found


def name_of(case: tuple) -> str:
    loss_type, average, ratio, with_kl = case
    return f"{loss_type} {average} {ratio} {'kl' if with_kl else 'no kl'}"


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else STORED
    output.write_text(json.dumps(values(), indent=1) + "\n")
