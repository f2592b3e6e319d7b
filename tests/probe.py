"""Runs the recipe named first and writes, as rank 0, what DeepSpeed's engine really is into the file that PROBE names."""

import json
import os
import runpy
import sys

import deepspeed

initialize = deepspeed.initialize


def probed(*args, **kwargs):
    engine, *rest = initialize(*args, **kwargs)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    parameter = next(engine.module.parameters())
    found = {
        "stage": engine.zero_optimization_stage(),
        "dtype": str(parameter.dtype),
        "optimizer": type(engine.basic_optimizer).__name__,
        "offloaded": [engine.zero_offload_optimizer() is not None, engine.zero_offload_param() is not None],
        "scaler": {
            name: getattr(scaler, name) for name in ("dynamic", "scale_window", "delayed_shift", "min_scale") if hasattr(scaler, name)
        },
    }
    if engine.global_rank == 0:
        with open(os.environ["PROBE"], "w") as file:
            json.dump(found, file)
    return engine, *rest


deepspeed.initialize = probed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
