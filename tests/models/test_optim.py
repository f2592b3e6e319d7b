"""AdamW as the recipes make it: fused on a GPU, and the same values under every engine."""

import json
from types import SimpleNamespace

import pytest
import torch

from common import optim
from runs import LAUNCHERS, REPOSITORY, launch

GPU = SimpleNamespace(device=torch.device("cuda"), scaler=None)
ARGS = SimpleNamespace(learning_rate=0.01, adam_epsilon=1e-6)


def test_it_is_fused_on_a_gpu_but_not_with_torchs_own_loss_scaler():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    cases = [
        (GPU, True),
        (SimpleNamespace(device=torch.device("cuda"), scaler=object()), None),
        (SimpleNamespace(device=torch.device("cpu"), scaler=None), None),
    ]
    for accelerator, fused in cases:
        optimizer = optim.adamw(accelerator, [{"params": [weight]}], ARGS)
        (group,) = optimizer.param_groups
        assert (group["fused"], group["lr"], group["eps"]) == (fused, 0.01, 1e-6)


STEPPING = """
import json, sys, torch
from types import SimpleNamespace
sys.path += {folders!r}
from common import engine, launch, optim
from preference_recipes.models import prepare
from test_optim import ARGS, GPU, gradients, layers

accelerator = launch.make_accelerator(
    SimpleNamespace(
        train_batch_size=2, micro_train_batch_size=1, micro_train_tokens=0, max_grad_norm=0.0, output_dir={output!r},
        resume="never", seed=0,
    ), "stepping")
model = layers()
optimizer = optim.adamw(GPU, optim.parameter_groups(model, 0.1), ARGS)  # fused, though this is a CPU
prepared, optimizer = prepare.for_training(accelerator, model, optimizer)
for number in range(4):
    with accelerator.accumulate(prepared):
        accelerator.backward(gradients(prepared, number))
        optimizer.step()
        optimizer.zero_grad()
state = accelerator.get_state_dict(prepared)
(group, *_) = engine.innermost_optimizer(optimizer).param_groups
if accelerator.is_main_process:
    print("done: ", json.dumps([group["fused"], [state[name].tolist() for name in sorted(state)]]))
"""


def layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def gradients(model, number: int) -> torch.Tensor:
    """A loss; the same on all processes."""
    return model(torch.arange(10.0).reshape(2, 5) / 7 + number).pow(2).mean()


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("ddp", "zero1", "zero2")))
        for name in ("ddp", "fsdp2", "zero1", "zero2", "zero3")
    ],
)
def test_fused_it_is_plain_adamw_under_every_engine(engine, tmp_path):
    script = tmp_path / "stepping.py"
    output = str(tmp_path / "run")
    folders = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests/models")]
    script.write_text(STEPPING.format(folders=folders, output=output))
    said = launch(LAUNCHERS[engine], script).stdout
    fused, found = json.loads(said.split("done: ")[1].splitlines()[0])
    assert fused is True

    expected = layers()
    groups = optim.parameter_groups(expected, 0.1)
    plain = torch.optim.AdamW(groups, lr=0.01, eps=1e-6, foreach=False)
    for number in range(4):
        plain.zero_grad()
        gradients(expected, number).backward()
        plain.step()
    state = expected.state_dict()
    for name, values in zip(sorted(state), found, strict=True):
        torch.testing.assert_close(torch.tensor(values), state[name], rtol=0, atol=1e-6)
        assert (state[name] - layers().state_dict()[name]).abs().max() > 0.01  # it has moved
