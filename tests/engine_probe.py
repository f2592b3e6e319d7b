"""Runs the recipe named first and writes, as rank 0, what DeepSpeed's engine really is into the file that PROBE names, and the
parameters that it holds at the end beside it."""

import json
import os
import runpy
import sys

import deepspeed
import torch

from common.log import Logger

initialize, engines = deepspeed.initialize, []


def probed(*args, **kwargs):
    engine, *rest = initialize(*args, **kwargs)
    engines.append(engine)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    parameter = next(engine.module.parameters())
    found = {
        "stage": engine.zero_optimization_stage(),
        "dtype": str(parameter.dtype),
        "optimizer": type(engine.basic_optimizer).__name__,
        "offloaded": [
            engine.zero_offload_optimizer() is not None,
            engine.zero_offload_param() is not None,
        ],
        "scaler": {
            name: getattr(scaler, name)
            for name in ("dynamic", "scale_window", "delayed_shift", "min_scale")
            if hasattr(scaler, name)
        },
    }
    if engine.global_rank == 0:
        with open(os.environ["PROBE"], "w") as file:
            json.dump(found, file)
    return engine, *rest


def dump(self):
    """Before the last call of a recipe: all updates are made, and the processes still reach each other."""
    parameters = dict(engines[0].module.named_parameters())
    with deepspeed.zero.GatheredParameters(
        list(parameters.values()), enabled=engines[0].zero_optimization_stage() == 3
    ):
        if engines[0].global_rank == 0:
            torch.save(
                {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()},
                f"{os.environ['PROBE']}.pt",
            )
    close(self)


deepspeed.initialize = probed
close, Logger.close = Logger.close, dump
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
