"""What TRL's distillation computes on the same tensors: losses and their gradients, as JSON.

    python tests/peers/trl_distill.py            # needs `pip install -e '.[peers]'`
    python tests/peers/trl_distill.py OTHER.json

Without an argument it writes trl_distill.json beside this file. tests/rollout/test_divergence.py compares ours with that.
`DistillationTrainer` computes its loss from hidden states and output layers, in fp32; `GKDTrainer` from logits, here in fp64.
"""

import itertools
import json
import sys
from pathlib import Path

import torch

VERSION = "1.16.0"
STORED = Path(__file__).with_suffix(".json")

VOCABULARY, SIZE, TEACHER_SIZE = 23, 5, 7
BETAS = (0.0, 0.1, 0.5, 1.0)
TEMPERATURES = (0.7, 1.0)
# Multiplier and soft cap of the student's logits, and of the teacher's. TRL's None is our 0.
FORMULAS = {"plain": ((1.0, None), (1.0, None)), "capped": ((0.25, 3.0), (1.5, 5.0))}
CASES = list(itertools.product(BETAS, TEMPERATURES, FORMULAS))


def tensors() -> dict[str, torch.Tensor]:
    """Hidden states and output layers of both, and which of 3 rows of 4 positions count; fp32."""
    generator = torch.Generator().manual_seed(8)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    lengths = torch.tensor([[4], [1], [3]])
    return {
        "hidden": draw(3, 4, SIZE),
        "weight": draw(VOCABULARY, SIZE),
        "bias": draw(VOCABULARY),
        "teacher_hidden": draw(3, 4, TEACHER_SIZE),
        "teacher_weight": draw(VOCABULARY, TEACHER_SIZE),
        "teacher_bias": draw(VOCABULARY),
        "mask": torch.arange(4) < lengths,
    }


def of_distillation(beta: float, temperature: float, formula: str) -> dict[str, list[float]]:
    """The mean loss over positions that count, the student's entropy, and the gradients, by TRL's chunked kernel."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    given = tensors()
    learned = [given[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    (scale, cap), (teacher_scale, teacher_cap) = FORMULAS[formula]
    loss, entropy, _ = _chunked_divergence_loss(
        given["hidden"],
        given["teacher_hidden"],
        given["weight"],
        given["teacher_weight"],
        given["mask"],
        beta,
        num_items_in_batch=given["mask"].sum(),
        student_lm_head_bias=given["bias"],
        teacher_lm_head_bias=given["teacher_bias"],
        student_logit_scale=scale,
        teacher_logit_scale=teacher_scale,
        student_final_logit_softcapping=cap,
        teacher_final_logit_softcapping=teacher_cap,
        temperature=temperature,
    )
    gradients = torch.autograd.grad(loss, learned)
    return {
        "loss": [loss.item()],
        "entropy": [entropy.item() / given["mask"].sum().item()],
        "gradient": torch.cat([gradient.flatten() for gradient in gradients]).tolist(),
    }


def of_gkd(beta: float, temperature: float) -> dict[str, list[float]]:
    """The loss of TRL's GKD, which has neither multipliers nor soft caps."""
    from trl.experimental.gkd import GKDTrainer

    given = {name: tensor.double() for name, tensor in tensors().items()}
    mask = tensors()["mask"]
    loss = GKDTrainer.generalized_jsd_loss(
        given["hidden"] @ given["weight"].T + given["bias"],
        given["teacher_hidden"] @ given["teacher_weight"].T + given["teacher_bias"],
        labels=torch.where(mask, 0, -100),
        beta=beta,
        temperature=temperature,
        num_items_in_batch=mask.sum(),
    )
    return {"loss": [loss.item()]}


def values() -> dict[str, dict[str, list[float]]]:
    import trl

    if trl.__version__ != VERSION:
        sys.exit(f"expected TRL {VERSION}, found {trl.__version__}: pip install -e '.[peers]'")
    found = {name_of(*case): of_distillation(*case) for case in CASES}
    for beta, temperature in itertools.product(BETAS, TEMPERATURES):
        found[f"gkd {beta} {temperature}"] = of_gkd(beta, temperature)
    return found


def name_of(beta: float, temperature: float, formula: str) -> str:
    return f"{formula} {beta} {temperature}"


if __name__ == "__main__":
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else STORED
    output.write_text(json.dumps(values(), indent=1) + "\n")
