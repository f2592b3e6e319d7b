"""Loads and prepares an actor, a critic and a frozen model as the recipes do, and prints what each process holds."""

import argparse
import json
import runpy
import sys
import types

import torch
from torch.distributed.tensor import DTensor

from common import engine, launch, optim
from common.shared_args import SharedArgs
from preference_recipes.models import load, prepare
from preference_recipes.models.logprobs import LogProbModel
from preference_recipes.models.packing import Packer
from preference_recipes.rollouts import generation
from runs import recipe


def memory(field: str) -> int:
    """Bytes of this process: `VmRSS`, or `VmHWM`, the most since the last `forget_peak`."""
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(field)]
    return 1024 * int(line.split()[1])


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All weights, gathered, and all buffers."""
    values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in values.items()
    }


def is_cut(module: torch.nn.Module) -> list[bool]:
    return [isinstance(parameter, DTensor) for parameter in module.parameters()]


@torch.no_grad()
def is_cut_after_forward(model: torch.nn.Module) -> list[bool]:
    """Which weights FSDP2 has in shards again after a forward pass in evaluation."""
    batch = Packer(next(model.parameters()).device).make_batch([[1]], [[2, 3]])
    model(batch)
    return is_cut(model)


def main(folder: str, output_dir: str) -> None:
    args = argparse.Namespace(
        train_batch_size=2, micro_train_batch_size=1, micro_train_tokens=0, max_grad_norm=1.0, seed=5,
        resume="never", output_dir=output_dir, report_to="none",
    )  # fmt: skip
    accelerator = launch.make_accelerator(args, "loading")
    tokenizer = load.tokenizer_of(folder)
    ActorCritic = runpy.run_path(str(recipe("ppo")))["ActorCritic"]
    forget_peak()
    before = memory("VmRSS")
    settings = SharedArgs()
    actor = load.causal_lm(folder, tokenizer, settings)
    critic = load.score_model(folder, tokenizer, settings, new_head=True)
    reference = LogProbModel(load.causal_lm(folder, tokenizer, settings, frozen=True))
    loading = memory("VmHWM") - before
    # What a buffer that is saved would hold, as some architectures have one in each layer.
    values = torch.full((3,), 1.0 + accelerator.process_index, device=actor.lm_head.weight.device)
    actor.model.register_buffer("saved", values)

    policy = ActorCritic(actor, critic)
    optimizer = torch.optim.AdamW(optim.parameter_groups(policy, settings), lr=1e-4)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer)
    reference = prepare.frozen(accelerator, reference)
    held = {id(parameter) for parameter in model.parameters()}
    steps = [id(p) for group in optimizer.param_groups for p in group["params"]]
    sampler = types.SimpleNamespace(accelerator=accelerator, model=model, unwrapped=policy)
    in_training = is_cut_after_forward(model)  # as each run checks its log-probs first
    with generation.ready_to_generate(sampler):
        gathered = {"actor": is_cut(policy.model), "critic": is_cut(policy.critic)}
    after_generation = is_cut_after_forward(model)

    model.set_reshard_after_forward(False)  # as with `fsdp_reshard_after_forward: false`
    with generation.ready_to_generate(sampler):
        pass
    without_resharding = is_cut_after_forward(model)
    engine.reshard(model)
    found = {
        "loading": loading,
        "optimizer": sorted(steps) == sorted(held),
        "cut while it generates": {name: [any(cut), all(cut)] for name, cut in gathered.items()},
        "cut after forward": [in_training, after_generation, without_resharding],
        "cut": [all(is_cut(policy)), all(is_cut(reference))],
        "saved buffers": [name for name in policy.state_dict() if name.endswith("saved")],
    }
    weights = {"policy": whole(policy), "reference": whole(reference)}
    torch.save(weights, f"{output_dir}/{accelerator.process_index}.pt")
    print(f"FOUND {accelerator.process_index} {json.dumps(found)}", flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()


main(*sys.argv[1:])
