"""How many responses fit: closed forms, and the same number whenever and wherever it is asked."""

import types

import psutil
import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import GPT2Config, LlamaConfig, Qwen3Config

from common.rollout import sizes

GIB = 2**30
LLAMA = LlamaConfig(
    vocab_size=1000, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=2,
)  # fmt: skip
QWEN = Qwen3Config(
    vocab_size=1000, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=2, head_dim=32,
)  # fmt: skip
GPT2 = GPT2Config(vocab_size=1000, n_embd=64, n_layer=3, n_head=8)


@pytest.mark.parametrize(
    "config, cached, inner", [(LLAMA, 2 * 8, 160), (QWEN, 2 * 32, 160), (GPT2, 64, 256)]
)
def test_the_bytes_of_a_response(config, cached, inner):
    """Keys and values of all layers, twice; the activations of one layer; what a draw takes."""
    cache = 2 * 3 * cached * 2 * 100
    layer = (8 * 64 + 3 * inner) * 2
    assert sizes.bytes_to_generate(config, 100, 2) == 2 * cache + layer * 100 + 32 * 1000
    assert sizes.bytes_to_score(config, 100, 40, 1, 2) == layer * 100 + 100**2
    # Four responses of 40 tokens behind one prompt: a row of 60 + 4 * 40, and its mask for four.
    assert sizes.bytes_to_score(config, 100, 40, 4, 2) == layer * 100 + 220**2 // 4
    # Rows whose mask would be larger are not shared.
    long = sizes.bytes_to_score(config, 30_000, 40, 4, 2)
    assert long == layer * 30_000 + 2**28 // 4


def fill(
    args: dict,
    processes: int = 1,
    trained: int = 0,
    frozen: int = 0,
    critic: int = 0,
    precision: str = "no",
    kind: str | None = None,
):
    """Fills in the sizes of a made-up run; returns its arguments and what it printed."""
    printed = []
    accelerator = types.SimpleNamespace(
        mixed_precision=precision, device=torch.device("cpu"), num_processes=processes,
        distributed_type=kind, print=printed.append,
    )  # fmt: skip
    settings = dict(generate_batch_size=0, score_batch_size=0, max_length=100, max_new_tokens=40)
    args = types.SimpleNamespace(**{**settings, "n_samples_per_prompt": 1, **args})
    model = nn.Module()
    model.model = nn.Linear(trained or 1, 1, bias=False)
    model.critic = nn.Linear(critic, 1, bias=False)
    model.config = LLAMA
    sizes.fill_in(accelerator, args, model, [None, nn.Linear(frozen or 1, 1, bias=False)])
    return args, printed


def test_sizes_follow_from_the_memory_of_the_machine_and_the_models(monkeypatch):
    memory = lambda gib: types.SimpleNamespace(total=gib * GIB, available=1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(16))
    args, printed = fill({}, trained=1000, frozen=500)
    left = 8 * GIB - 20 * 1000 - 4 * 500
    assert args.generate_batch_size == int(left / sizes.bytes_to_generate(LLAMA, 100, 4))
    logits = 3 * 4 * 2**27
    assert args.score_batch_size == int(
        (left - logits) / sizes.bytes_to_score(LLAMA, 100, 40, 1, 4)
    )
    assert str(args.generate_batch_size) in printed[0] and "--score_batch_size" in printed[0]
    # What is free at the moment does not count, as `available` above shows; the total does.
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(32))
    assert fill({})[0].generate_batch_size > 1.9 * args.generate_batch_size
    # Processes of one machine share its memory.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert fill({})[0].generate_batch_size < 0.51 * args.generate_batch_size


def test_of_the_trained_models_the_actor_alone_is_gathered_to_generate(monkeypatch):
    """Beside the shards of both; in half precision two bytes a parameter."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(total=16 * GIB))
    both = dict(trained=200_000_000, critic=300_000_000, processes=4)
    for precision, element in (("no", 4), ("bf16", 2)):
        args, _ = fill({}, precision=precision, kind=DistributedType.FSDP, **both)
        left = 8 * GIB - 20 * 500_000_000 / 4 - element * 200_000_000 - 4
        assert args.generate_batch_size == int(left / sizes.bytes_to_generate(LLAMA, 100, element))


def test_the_smallest_number_of_all_processes_is_taken(monkeypatch):
    monkeypatch.setattr(sizes, "gather_object", lambda mine: [*mine, (7.9, 0.2)])
    args, _ = fill({})
    assert (args.generate_batch_size, args.score_batch_size) == (7, 1)  # at least one


def test_numbers_that_are_given_are_kept(monkeypatch):
    args, printed = fill({"generate_batch_size": 3, "score_batch_size": 5})
    assert (args.generate_batch_size, args.score_batch_size, printed) == (3, 5, [])
    args, _ = fill({"generate_batch_size": 3})
    assert args.generate_batch_size == 3 and args.score_batch_size > 0


def test_models_that_fill_the_memory_leave_a_little(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(total=10_000_000))
    args, _ = fill({}, trained=10_000_000)
    assert args.generate_batch_size == max(1, int(200_000 / sizes.bytes_to_generate(LLAMA, 100, 4)))
