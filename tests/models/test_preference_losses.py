"""The losses of pairs that know no reference, against plain arithmetic in float64."""

import math
import runpy

import pytest
import torch

from recipes import REPOSITORY

DPO = runpy.run_path(str(REPOSITORY / "recipes/dpo.py"))
CHOSEN = [-0.7, -2.5, -0.01, -9.0]
REJECTED = [-1.1, -0.4, -0.02, -30.0]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def loss(kind, beta, gamma=0.0):
    averages = [torch.tensor(values, dtype=torch.float64) for values in (CHOSEN, REJECTED)]
    return DPO["reference_free_loss"](*averages, beta=beta, loss_type=kind, gamma=gamma)


@pytest.mark.parametrize("gamma", [0.0, 1.4])
def test_simpo(gamma):
    expected = [
        -math.log(sigmoid(2.5 * (chosen - rejected) - gamma))
        for chosen, rejected in zip(CHOSEN, REJECTED)
    ]
    assert loss("simpo", 2.5, gamma).tolist() == pytest.approx(expected, abs=1e-12)


def test_orpo():
    expected = []
    for chosen, rejected in zip(CHOSEN, REJECTED):
        p, q = math.exp(chosen), math.exp(rejected)
        odds_ratio = (p / (1 - p)) / (q / (1 - q))
        expected.append(-chosen - 0.3 * math.log(sigmoid(math.log(odds_ratio))))
    assert loss("orpo", 0.3).tolist() == pytest.approx(expected, abs=1e-9)


def test_orpo_keeps_its_gradient_where_an_answer_is_almost_certain():
    chosen = torch.tensor([-1e-6], requires_grad=True)
    of_pair = DPO["reference_free_loss"](chosen, torch.tensor([-3.0]), 0.1, "orpo", 0.0)
    of_pair.sum().backward()
    assert torch.isfinite(of_pair).all() and torch.isfinite(chosen.grad).all()
