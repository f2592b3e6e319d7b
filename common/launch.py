"""One function that returns a right `Accelerator` in plain python, DDP, FSDP2 and every ZeRO stage, on CPU and GPU."""

import datetime
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs, PartialState
from accelerate.utils import DistributedType, GradientAccumulationPlugin, broadcast_object_list, gather_object, set_seed
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.overrides import TorchFunctionMode

from . import REPOSITORY


def make_accelerator(args, recipe: str) -> Accelerator:
    """Builds the `Accelerator` that the launcher's environment asks for, and checks that it is what was asked for.

    Derives `gradient_accumulation_steps`, writes accumulation, micro-batch size and clipping into the DeepSpeed
    config, decides `args.output_dir` once for all ranks, and seeds Python, NumPy and torch with `args.seed`.

    Args:
        args: needs `train_batch_size micro_train_batch_size max_grad_norm output_dir report_to resume seed`.
        recipe: the recipe's name, for the default of `output_dir`.

    Raises:
        SystemExit: batch sizes that do not divide, a missing DeepSpeed JSON, settings that would be silently ignored,
            a world of another size than the launcher's, a non-empty `output_dir` with `--resume never`.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    accumulation = accumulation_steps(args.train_batch_size, args.micro_train_batch_size, world)
    on_cpu = not torch.cuda.is_available()
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"
    fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false") == "true"
    quiet()
    # accelerate's own default address without a world: it was asked for several processes, and starts one in silence.
    if "WORLD_SIZE" not in os.environ and os.environ.get("MASTER_ADDR") == "127.0.0.1" and "ACCELERATE_MIXED_PRECISION" in os.environ:
        sys.exit("accelerate launch was asked for several processes and started one: this YAML is for one process (distributed_type NO). "
                 "Use accelerate_configs/ddp.yaml or another for several.")  # fmt: skip
    if on_cpu and not deepspeed and os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "fp16":
        sys.exit("fp16 without DeepSpeed needs a GPU: accelerate would run fp32 here and say nothing. "
                 "Use accelerate_configs/ds_fp16.yaml (real fp16, emulated on a CPU) or accelerate_configs/cpu.yaml.")  # fmt: skip
    # Without gloo on a CPU each process believes that it is alone. On GPUs NCCL's 10 minutes are too short for those that wait
    # while one tokenises, checks or writes files.
    group = {"backend": "gloo"} if on_cpu else {"timeout": datetime.timedelta(hours=12)}
    if on_cpu and fsdp:
        # On a CPU accelerate falls back to DDP in silence; only a GPU world goes on to become FSDP.
        PartialState(cpu=True, backend="gloo")
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False),
        log_with=None if args.report_to == "none" else args.report_to,
        project_dir=".",
        step_scheduler_with_optimizer=False,
        cpu=on_cpu and not deepspeed,
        deepspeed_plugin=deepspeed_plugin(accumulation, args) if deepspeed else None,
        kwargs_handlers=[InitProcessGroupKwargs(**group)] if "LOCAL_RANK" in os.environ else None,
    )
    if accelerator.num_processes != world or accelerator.gradient_accumulation_steps != accumulation:
        sys.exit(f"asked for {world} processes with {accumulation} accumulation steps, got {accelerator.num_processes} "
                 f"with {accelerator.gradient_accumulation_steps}: the launcher's settings were not honoured")  # fmt: skip
    if fsdp != (accelerator.distributed_type == DistributedType.FSDP) or (fsdp and not accelerator.is_fsdp2):
        sys.exit(f"FSDP2 was asked for, accelerate made {accelerator.distributed_type} (fsdp_version must be 2)")
    if fsdp and accelerator.mixed_precision == "bf16":
        # accelerate would round what each shard returns, log-probs too, and add up gradients, in bf16.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    args.output_dir = on_main_process(accelerator, decide_output_dir, args, recipe)
    if not all(gather_object([Path(args.output_dir).is_dir()])):
        sys.exit(f"--output_dir {args.output_dir} is not visible to every process: several nodes need a shared file system")
    accelerator.project_configuration.logging_dir = args.output_dir
    set_seed(args.seed)
    precision = engine_precision(accelerator)
    if precision != "no" and on_cpu:
        HalfProductsInFp32().__enter__()  # for the life of the process
        accelerator.print(f"NOTE: this machine has no GPU: {precision} is emulated on the CPU, for checking only "
                          "(half weights, fp32 arithmetic inside each matrix product).")  # fmt: skip
    accelerator.print(
        f"train_batch_size {args.train_batch_size} = micro_train_batch_size {args.micro_train_batch_size} x {world} "
        f"processes x {accumulation} gradient accumulation steps; {describe(accelerator)}; output in {args.output_dir}"
    )
    return accelerator


def accumulation_steps(train_batch_size: int, micro_train_batch_size: int, processes: int) -> int:
    """`train_batch_size / (micro_train_batch_size * processes)`, or an exit that names the nearest sizes that divide."""
    if min(train_batch_size, micro_train_batch_size) < 1:
        sys.exit(f"--train_batch_size {train_batch_size} and --micro_train_batch_size {micro_train_batch_size} must be at least 1")  # fmt: skip
    per_step = micro_train_batch_size * processes
    if train_batch_size % per_step:
        low = train_batch_size // per_step * per_step
        nearest = f"--train_batch_size {f'{low} or ' if low else ''}{low + per_step}"
        micros = [m for m in range(1, train_batch_size + 1) if train_batch_size % (m * processes) == 0]
        if micros:
            nearest += f", or --micro_train_batch_size {min(micros, key=lambda m: abs(m - micro_train_batch_size))}"
        sys.exit(f"--train_batch_size {train_batch_size} is not a multiple of --micro_train_batch_size {micro_train_batch_size} "
                 f"x {processes} processes = {per_step}. Nearest that would do: {nearest}.")  # fmt: skip
    return train_batch_size // per_step


def deepspeed_plugin(accumulation: int, args):
    """The launcher's DeepSpeed settings with this run's accumulation, micro-batch size and clipping written in."""
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    import deepspeed  # slow to import: only where it is used

    if not torch.cuda.is_available():
        # Its first use compiles C++ for more than a minute, and fails without a compiler; gloo does the same work.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # emulated, see HalfProductsInFp32
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    plugin = DeepSpeedPlugin(hf_ds_config=read_deepspeed_json(path) if path else None)
    config = plugin.deepspeed_config
    for key, value in {
        "gradient_accumulation_steps": accumulation,
        "train_micro_batch_size_per_gpu": args.micro_train_batch_size,
        "gradient_clipping": float(args.max_grad_norm),
    }.items():
        if config.get(key, "auto") not in ("auto", value):
            sys.exit(f'the DeepSpeed config sets "{key}": {config[key]}, this run needs {value}. Write "auto" there: '
                     "the recipe's arguments decide.")  # fmt: skip
        config[key] = value
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True  # actors are saved from it
    config["checkpoint"] = {"load_universal": (Path(args.resume) / "engine/pytorch_model/zero").is_dir()}  # see common/export.py
    plugin.gradient_accumulation_steps = accumulation
    return plugin


def read_deepspeed_json(path: str) -> dict:
    """The DeepSpeed JSON that a YAML names, relative to the current directory or else to this repository."""
    found = [file for file in (Path(path), REPOSITORY / path) if file.is_file()]
    if not found:
        sys.exit(f"the DeepSpeed config {path!r} named by the accelerate YAML was found neither in {Path.cwd()} nor in {REPOSITORY}")  # fmt: skip
    config = json.loads(found[0].read_text(encoding="utf-8"))
    for half in ("fp16", "bf16"):
        if config.get(half, {}).get("enabled") == "auto":
            sys.exit(f'{path}: "{half}": {{"enabled": "auto"}} is silently fp32 unless --mixed_precision is given too. Write true or false.')  # fmt: skip
    mixed = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed != "no" and not config.get(mixed, {}).get("enabled"):
        sys.exit(f'--mixed_precision {mixed}, but {path} does not enable it. Write "{mixed}": {{"enabled": true}} there.')  # fmt: skip
    return config


def engine_precision(accelerator: Accelerator) -> str:
    """`"fp16"`, `"bf16"` or `"no"`: what the forward pass computes in, whoever decides it."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        return next((half for half in ("fp16", "bf16") if config.get(half, {}).get("enabled") is True), "no")
    return accelerator.mixed_precision


def zero_stage(accelerator: Accelerator) -> int:
    """The ZeRO stage; 0 without DeepSpeed."""
    with_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    return accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage"] if with_deepspeed else 0


def describe(accelerator: Accelerator) -> str:
    """How the run computes, in words: `DeepSpeed ZeRO-2 fp16 on cpu`."""
    kinds = {DistributedType.DEEPSPEED: f"DeepSpeed ZeRO-{zero_stage(accelerator)}", DistributedType.FSDP: "FSDP2"}
    kind = kinds.get(accelerator.distributed_type, "DDP" if accelerator.num_processes > 1 else "one process")
    precision = engine_precision(accelerator)
    return f"{kind} {'fp32' if precision == 'no' else precision} on {accelerator.device.type}"


def on_main_process(accelerator: Accelerator, function: Callable, *args):
    """What `function` returns on the main process, on every rank; all leave where it leaves. All ranks must call it."""
    result, problem = None, None
    if accelerator.is_main_process:
        try:
            result = function(*args)
        except SystemExit as error:
            problem = error.code
    result, problem = broadcast_object_list([result, problem])
    if problem:
        sys.exit(problem if accelerator.is_main_process else 1)
    return result


def decide_output_dir(args, recipe: str) -> str:
    """`--output_dir` or `runs/<recipe>/<date-time>`, made if it is not there."""
    if args.resume == "auto" and not args.output_dir:
        sys.exit("--resume auto looks for checkpoints in --output_dir: give it")
    path = Path(args.output_dir or f"runs/{recipe}/{datetime.datetime.now():%Y%m%d-%H%M%S}")
    if args.resume not in ("never", "auto"):
        if not (Path(args.resume) / "manifest.json").is_file():
            sys.exit(f"--resume {args.resume}: not a checkpoint, it holds no manifest.json. Give never, auto or .../global_step_...")
        if not args.output_dir:  # the run goes on where it was
            path = Path(args.resume).resolve().parents[1]
    if args.resume == "never" and path.is_dir() and any(path.iterdir()):
        sys.exit(f"--output_dir {path} already holds another run. Take another, or --resume auto to go on from its last checkpoint.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a file of that name, no permission ...
        sys.exit(f"--output_dir {path} cannot be made: {error}")
    return str(path)


class HalfProductsInFp32(TorchFunctionMode):
    """Computes half-precision matrix products and attention in fp32 and rounds the result: what tensor cores do, and on a CPU
    without half kernels many times faster than the library's own."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        half = (torch.float16, torch.bfloat16)
        if function in (F.linear, F.scaled_dot_product_attention) and args[0].device.type == "cpu" and args[0].dtype in half:
            single = lambda value: value.float() if isinstance(value, torch.Tensor) and value.dtype in half else value
            kwargs = {name: single(value) for name, value in (kwargs or {}).items()}
            return function(*map(single, args), **kwargs).to(args[0].dtype)
        return function(*args, **(kwargs or {}))


def quiet() -> None:
    """Leaves the console to the run: libraries report warnings and errors only."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs, too, what it raises
    transformers.logging.disable_progress_bar()
    for name in ("torch.distributed", "accelerate.utils.other"):  # the other warns of tied weights, which are saved once
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.distributed")
