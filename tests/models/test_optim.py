"""AdamW as the recipes make it, Muon as its fork does, and the same values under every engine."""

import re
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM

import runs
from architectures import build
from common import optim
from preference_recipes.models.logprobs import LogProbModel
from recipes import load

GPU = SimpleNamespace(device=torch.device("cuda"), scaler=None)
CPU = SimpleNamespace(device=torch.device("cpu"), scaler=None, distributed_type=DistributedType.NO)
ARGS = SimpleNamespace(learning_rate=0.01, adam_epsilon=1e-6, weight_decay=0.1)


def test_it_is_fused_on_a_gpu_but_not_with_torchs_own_loss_scaler():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    cases = [
        (GPU, True),
        (SimpleNamespace(device=torch.device("cuda"), scaler=object()), None),
        (SimpleNamespace(device=torch.device("cpu"), scaler=None), None),
    ]
    for accelerator, fused in cases:
        optimizer = optim.make_optimizer(accelerator, [{"params": [weight]}], ARGS)
        (group,) = optimizer.param_groups
        assert (group["fused"], group["lr"], group["eps"]) == (fused, 0.01, 1e-6)


# What is small by itself: norms, biases of experts, which have two dimensions, rates of decay.
STILL = re.compile(r"norm|ln|bias|A_log|\.D$|time_|sinks|recurrent_param")
DECAYING = ["llama", "gemma2", "cohere", "gpt2", "gpt_oss", "jamba", "recurrent_gemma", "rwkv"]
DECAYING += ["falcon", "qwen3_moe", "xlstm"]


@pytest.mark.parametrize("name", DECAYING)
def test_every_projection_decays_and_no_norm_bias_or_rate(name):
    """Cohere's norms of heads and Jamba's `A_log` are matrices; experts are one tensor of three dimensions."""
    model = LogProbModel(build(name))
    groups = optim.parameter_groups(model, ARGS)
    decay_of = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        own_name = ".".join(name.split(".")[-2:])
        assert decay_of[id(parameter)] == (0.0 if STILL.search(own_name) else 0.1), name


# ---------------------------------------------------------------------------------------------- Muon


def test_muon_steps_the_matrices_of_hidden_layers_alone(tmp_path):
    """As torch's Muon does, with updates as large as AdamW's. The other weights are AdamW's."""
    runs.tiny_llama(tmp_path)
    model = LogProbModel(AutoModelForCausalLM.from_pretrained(tmp_path))
    named = dict(model.named_parameters())
    expected = {name: torch.nn.Parameter(p.detach().clone()) for name, p in named.items()}
    hidden = [name for name in named if name.endswith("_proj.weight")]
    assert len(hidden) == 7 * model.config.num_hidden_layers
    of_hidden = [expected[name] for name in hidden]
    muon = torch.optim.Muon(of_hidden, 0.01, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    others = [expected[name] for name in named.keys() - {*hidden}]
    decays = [{"params": [p], "weight_decay": 0.2 * (p.ndim == 2)} for p in others]
    adamw = torch.optim.AdamW(decays, lr=0.01, eps=1e-6)

    args = SimpleNamespace(**vars(ARGS) | {"optimizer": "muon", "weight_decay": 0.2})
    optimizer = load("muon", runs.forked("muon")).build_optimizer(CPU, model, args)
    for _ in range(2):
        for name, parameter in named.items():
            parameter.grad = torch.randn_like(parameter)
            expected[name].grad = parameter.grad.clone()
        for each in (optimizer, muon, adamw):
            each.step()
    for name, parameter in named.items():
        assert torch.equal(parameter, expected[name]), name


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return runs.letters(tmp_path_factory.mktemp("muon"), 40)


def train(folder, name: str, launcher="plain", check=True, **more):
    given = dict(optimizer="muon", learning_rate=0.003, micro_train_batch_size=4, save_steps=2)
    flags = runs.short_run(folder, "sft", folder / name, **given | more)
    done = runs.launch(runs.LAUNCHERS[launcher], runs.forked("muon"), *flags, check=check)
    return folder / name if check else done.stdout


@pytest.fixture(scope="module")
def alone(chats):
    return train(chats, "alone", weight_decay=0.1)


def test_with_muon_two_processes_are_one(chats, alone):
    both = train(chats, "both", "ddp", weight_decay=0.1)
    assert (runs.weights(both) - runs.weights(alone)).norm() <= 1e-5 * runs.weights(alone).norm()
    for one, two in zip(runs.training_lines(alone), runs.training_lines(both), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=3e-6)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    first, *_, last = runs.training_lines(alone)
    assert last["loss"] < first["loss"] - 0.3


def test_with_muon_a_resumed_run_is_one_never_stopped(chats, alone):
    at_four = alone / "checkpoints/global_step_000004"
    resumed = train(chats, "resumed", weight_decay=0.1, resume=at_four)
    assert torch.equal(runs.weights(resumed), runs.weights(alone))
    assert runs.timeless(resumed) == runs.timeless(alone)


def test_muon_is_refused_where_it_has_no_whole_matrix(chats):
    said = train(chats, "refused", "zero2", check=False)
    assert "--optimizer muon: DeepSpeed and FSDP2 give" in said
