"""Runs a recipe some windows of which overflow in fp16, or whose data lack them. What is left must be the same run.

    python tests/overflowing_recipe.py overflow|lack 0,4,6 recipes/sft.py --argument ...

Only process 0 overflows: all must skip. Of PPO these are windows of the first rollout.
"""

import runpy
import sys
from os import environ

import torch

import common.batches
import common.progress
import preference_recipes.models.distillation
import preference_recipes.models.logprobs
import preference_recipes.models.scores

_, mode, numbers, *sys.argv = sys.argv
windows = {int(number) for number in numbers.split(",")}
if "lack" in mode:
    window_rows = common.batches.indices_of_update

    def lacking(n_rows, train_batch_size, seed, index):
        if "ppo" in sys.argv[0] and isinstance(seed, int):  # the prompts of a rollout
            return window_rows(n_rows, train_batch_size, seed, index)
        kept = [number for number in range(index + len(windows) + 1) if number not in windows]
        return window_rows(n_rows, train_batch_size, seed, kept[index])

    common.batches.indices_of_update = lacking
if "overflow" in mode:
    update_done, seen = common.progress.Progress.update_done, [0]

    def counting(*args, **kwargs):
        seen[0] += 1
        return update_done(*args, **kwargs)

    def poison(forward):
        def poisoned(self, *args, **kwargs):
            out = forward(self, *args, **kwargs)
            tensors = out.values() if isinstance(out, dict) else [out]
            for tensor in tensors:
                if tensor.requires_grad and seen[0] in windows and environ.get("RANK", "0") == "0":
                    tensor.register_hook(lambda grad: grad * torch.inf)
            return out

        return poisoned

    common.progress.Progress.update_done = counting
    for module in (
        preference_recipes.models.logprobs.LogProbModel,
        preference_recipes.models.scores.ScoreModel,
        preference_recipes.models.distillation.DistillModel,
    ):
        module.forward = poison(module.forward)
runpy.run_path(sys.argv[0], run_name="__main__")
