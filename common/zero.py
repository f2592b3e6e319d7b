"""DeepSpeed's internals."""

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path

import torch
from accelerate import DeepSpeedPlugin
from torch import nn

from common import REPOSITORY


def stage(accelerator) -> int:
    """The ZeRO stage; 0 without DeepSpeed."""
    return (
        plugin.deepspeed_config["zero_optimization"]["stage"]
        if (plugin := accelerator.state.deepspeed_plugin)
        else 0
    )


def plugin(accumulation: int, args):
    """The launcher's DeepSpeed settings with this run's accumulation, micro-batch size and clipping written in."""
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    import deepspeed  # slow to import: only where it is used

    if not torch.cuda.is_available():
        # Its first use compiles C++ for more than a minute, and fails without a compiler; gloo does the same work.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: (
            True
        )  # emulated, see HalfProductsInFp32
    plugin = DeepSpeedPlugin(
        read_json(path) if (path := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")) else None
    )
    config = plugin.deepspeed_config
    sizes = {
        "gradient_accumulation_steps": accumulation,
        "train_micro_batch_size_per_gpu": args.micro_train_batch_size,
    }
    for key, value in {**sizes, "gradient_clipping": float(args.max_grad_norm)}.items():
        if config.get(key, "auto") not in ("auto", value):
            sys.exit(
                f'the DeepSpeed config sets "{key}": {config[key]}, the arguments say {value}: write "auto" there'
            )
        config[key] = value
    if config["zero_optimization"]["stage"] not in (1, 2, 3):
        sys.exit(
            f'the DeepSpeed config has "stage": {config["zero_optimization"]["stage"]}, expected 1, 2 or 3'
        )
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = (
        True  # actors are saved from it
    )
    if config["zero_optimization"].get("offload_optimizer", {}).get("device") in ("cpu", "nvme"):
        # A false alarm: DeepSpeed's own optimizer steps in the place of the one that the scheduler watches.
        warnings.filterwarnings("ignore", "Detected call of .lr_scheduler.step")
        if os.getenv("LOCAL_RANK", "0") == "0":
            # torch compiles without a word, and as silently waits, without end, for the lock of a compilation that was killed.
            print(
                "Adam runs on the CPU: DeepSpeed compiles its own at the first run, for some minutes. If nothing compiles and it waits here, a killed run left ~/.cache/torch_extensions/*/cpu_adam/lock: remove it",
                flush=True,
            )
    config.setdefault(
        "timers", {"throughput": {"enabled": False}}
    )  # or it waits for the GPU before each forward pass
    delay_scale_growth()
    return plugin


def read_json(path: str) -> dict:
    """The DeepSpeed JSON that a YAML names, relative to the current directory or else to this repository."""
    if not (found := [file for file in (Path(path), REPOSITORY / path) if file.is_file()]):
        sys.exit(
            f"the DeepSpeed config {path!r} named by the accelerate YAML was found neither in {Path.cwd()} nor in {REPOSITORY}"
        )
    config = json.loads(found[0].read_text(encoding="utf-8"))
    for half in ("fp16", "bf16", "fp8"):
        enabled, asked = (
            config.get(half, {}).get("enabled", False),
            os.environ.get("ACCELERATE_MIXED_PRECISION") == half,
        )
        if enabled not in (True, False) or asked > enabled:
            sys.exit(
                f'{path}: "{half}": {{"enabled": {json.dumps(enabled)}}} does not switch {half} on (alone it is silently fp32): write true or false, and give no --mixed_precision'
            )
    return config


def delay_scale_growth() -> None:
    """Lets DeepSpeed's loss scale grow between two windows. DeepSpeed 0.19.8 does so within an update, whose gradients it then divides
    by twice the scale that they were multiplied by: the update is halved, unless clipping decides its size.

    At the smallest scale it does not raise here: `Metrics.update_done` ends the run, and says where.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    def update_scale(scaler, overflow: bool) -> None:
        before, scaler.raise_error_at_min_scale = scaler.cur_scale, False
        update(scaler, overflow)
        if scaler.cur_scale > before:
            scaler.grown, scaler.cur_scale = scaler.cur_scale, before

    def scale_loss(scaler, loss: torch.Tensor) -> torch.Tensor:
        scaler.cur_scale = scaler.__dict__.pop("grown", scaler.cur_scale)
        return loss * scaler.cur_scale

    update = DynamicLossScaler.update_scale
    DynamicLossScaler.update_scale, DynamicLossScaler.scale_loss = update_scale, scale_loss


def gathered(parameters: list[nn.Parameter], writer: int | None = None):
    """Under ZeRO-3 parameters are cut into shards: inside the block every rank holds the whole of these, and what rank `writer`
    writes into them lasts."""
    if not hasattr(parameters[0], "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=writer)
