"""Runs the recipe named first and counts, in each update of each process, what `common/moved.py` reports, from whole weights:
the forward pass's, as a hook of each layer sees them, and the masters, as the engine assembles them. Rank 0 appends both to
the file that PROBE names."""

import contextlib
import json
import os
import runpy
import sys

import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch.distributed.tensor import DTensor

from common import moved


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def snapshot(watch) -> tuple[dict, dict]:
    """Returns what is read and the masters of all trained parameters, whole."""
    accelerator, model = watch.run.accelerator, watch.run.unwrapped
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}[accelerator.mixed_precision]
    deepspeed = accelerator.state.deepspeed_plugin is not None
    gather = contextlib.nullcontext()
    if deepspeed and hasattr(next(model.parameters()), "ds_id"):
        import deepspeed as library

        gather = library.zero.GatheredParameters(list(model.parameters()))
    read, masters = {}, {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and deepspeed:
                masters[name] = safe_get_full_fp32_param(parameter).clone().flatten()
            elif parameter.requires_grad:
                masters[name] = whole(parameter).detach().clone().flatten()
        with gather:
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    continue
                weight = whole(parameter).detach().flatten()
                # autocast: the linear layers of the demo's model, but not its output layer, which a CPU computes in fp32
                if accelerator.is_fsdp2 or (not deepspeed and "_proj" in name):
                    weight = weight.to(half)
                read[name] = weight.clone().float()
    return read, masters


def flat(tensors: dict) -> torch.Tensor:
    return torch.cat([tensors[name].double() for name in sorted(tensors)])


def make(watch, run):
    original_make(watch, run)
    watch.whole_before = snapshot(watch)


def update_done(watch):
    before, watch.whole_before = watch.whole_before, snapshot(watch)
    read_before, masters_before = [flat(tensors) for tensors in before]
    read, masters = [flat(tensors) for tensors in watch.whole_before]
    counted = {
        "update/moved": read.ne(read_before).double().mean().item(),
        "update/norm": (masters - masters_before).norm().item(),
        "update/read_norm": (read - read_before).norm().item(),
    }
    reported = original_update_done(watch)
    if watch.run.accelerator.is_main_process:
        with open(os.environ["PROBE"], "a") as file:
            file.write(json.dumps([counted, reported]) + "\n")
    return reported


original_make, original_update_done = moved.Watch.__init__, moved.Watch.update_done
moved.Watch.__init__, moved.Watch.update_done = make, update_done
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
