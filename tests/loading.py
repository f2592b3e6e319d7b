"""Loads and prepares an actor and a critic as the recipes do, and prints what each process holds in shards."""

import argparse
import json
import sys
import types

import torch
from torch.distributed.tensor import DTensor

from common import engine, launch, optim
from common.shared_args import SharedArgs
from preference_recipes.models import load, prepare, scores
from preference_recipes.models.packing import Packer
from preference_recipes.rollouts import generation


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
    settings = SharedArgs()
    actor = load.causal_lm(folder, tokenizer, settings)
    critic = scores.score_model(folder, tokenizer, settings, new_head=True)
    policy = scores.ActorCritic(actor, critic)
    optimizer = torch.optim.AdamW(optim.parameter_groups(policy, settings), lr=1e-4)
    model, optimizer = prepare.for_training(accelerator, policy, optimizer)
    sampler = types.SimpleNamespace(
        accelerator=accelerator, model=model, unwrapped=policy, stop_tokens=lambda: {1}
    )
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
        "cut while it generates": {name: [any(cut), all(cut)] for name, cut in gathered.items()},
        "cut after forward": [in_training, after_generation, without_resharding],
    }
    print(f"FOUND {accelerator.process_index} {json.dumps(found)}", flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()


main(*sys.argv[1:])
