"""Runs the recipe named first. Into the file that HELD names go the parameters that its model holds at the end, whole, by
name, and the stage and the optimizer of its DeepSpeed engine, if it has one."""

import os
import runpy
import sys

import torch

from common import console, zero

end = console.finish_run


def hold(saver) -> None:
    """Before the last call of a recipe: all updates are made, and the processes still reach each other."""
    parameters = dict(saver.unwrapped.named_parameters())
    with zero.gathered(list(parameters.values())):
        whole = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone()
        held = {name.removeprefix("model."): whole(p) for name, p in parameters.items()}
    if saver.run.accelerator.is_main_process:
        engine = saver.model if hasattr(saver.model, "zero_optimization_stage") else None
        kind = engine and [engine.zero_optimization_stage(), type(engine.basic_optimizer).__name__]
        torch.save((held, kind), os.environ["HELD"])
    end(saver)


console.finish_run = hold
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
