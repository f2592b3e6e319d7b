"""From the launcher's environment to an Accelerator."""

import datetime
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from accelerate.utils import DistributedType, GradientAccumulationPlugin, gather_object, set_seed
from torch.distributed.fsdp import MixedPrecisionPolicy

from common import arguments, distributed, zero
from common.cpu import HalfProductsInFp32
from common.engine import describe


def make_accelerator(args, recipe: str) -> Accelerator:
    """Builds the `Accelerator` that the launcher's environment asks for, and checks that it is what was asked for.

    Derives `gradient_accumulation_steps`, writes accumulation, micro-batch size and clipping into the DeepSpeed
    config, decides `args.output_dir` once for all ranks, and seeds Python, NumPy and torch with `args.seed`.

    Args:
        args: needs `train_batch_size micro_train_batch_size micro_train_tokens max_grad_norm output_dir resume seed`.
        recipe: the recipe's name, for the default of `output_dir`.

    Raises:
        SystemExit: batch sizes that do not divide, a missing DeepSpeed JSON, settings that would be silently ignored,
            a world of another size than the launcher's, a non-empty `output_dir` with `--resume never`.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    accumulation = arguments.accumulation_steps(
        args.train_batch_size, args.micro_train_batch_size, world, args.micro_train_tokens
    )
    on_cpu = (
        not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    )
    deepspeed, fsdp = (
        os.environ.get(f"ACCELERATE_USE_{engine}", "false") == "true"
        for engine in ("DEEPSPEED", "FSDP")
    )
    quiet()
    # accelerate's own default address without a world: it was asked for several processes, and starts one in silence.
    if (
        "WORLD_SIZE" not in os.environ
        and os.environ.get("MASTER_ADDR") == "127.0.0.1"
        and "ACCELERATE_MIXED_PRECISION" in os.environ
    ):
        sys.exit(
            "accelerate launch was asked for several processes and started one: use accelerate_configs/ddp.yaml or the like"
        )
    if on_cpu and not deepspeed and os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "fp16":
        sys.exit(
            "fp16 without DeepSpeed needs a GPU (accelerate would run fp32 in silence): use ds_fp16.yaml or cpu.yaml"
        )
    # Without gloo on a CPU each process believes that it is alone. On GPUs NCCL's 10 minutes are too short for those that wait
    # while one tokenises, checks or writes files.
    group = {"backend": "gloo"} if on_cpu else {"timeout": datetime.timedelta(hours=12)}
    if on_cpu and fsdp:
        # On a CPU accelerate falls back to DDP in silence; only a GPU world goes on to become FSDP.
        PartialState(cpu=True, backend="gloo")
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=accumulation, sync_with_dataloader=False
        ),
        deepspeed_plugin=zero.plugin(accumulation, args) if deepspeed else None,
        kwargs_handlers=[InitProcessGroupKwargs(**group)] if "LOCAL_RANK" in os.environ else None,
        cpu=on_cpu and not deepspeed,
    )
    asked, got = (
        (world, accumulation, fsdp),
        (accelerator.num_processes, accelerator.gradient_accumulation_steps, accelerator.is_fsdp2),
    )
    if got != asked:
        sys.exit(
            f"settings not honoured: asked for processes, accumulation steps, FSDP2 (fsdp_version 2) {asked}, got {got}"
        )
    if fsdp and (policy := accelerator.state.fsdp_plugin.mixed_precision_policy):
        # accelerate would round what each shard returns, log-probs too, and add up gradients, in half precision.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            policy.param_dtype, reduce_dtype=torch.float32
        )
    args.output_dir = distributed.on_main_process(accelerator, decide_output_dir, args, recipe)
    if not all(gather_object([Path(args.output_dir).is_dir()])):
        sys.exit(
            f"--output_dir {args.output_dir} is not visible to every process: several nodes need a shared file system"
        )
    set_seed(args.seed)
    if accelerator.mixed_precision != "no" and on_cpu:
        HalfProductsInFp32().__enter__()  # for the life of the process
        accelerator.print(
            f"NOTE: {accelerator.mixed_precision} is emulated on the CPU, for checking only (half weights, fp32 products)"
        )
    rows = f"= micro_train_batch_size {args.micro_train_batch_size} x {world} processes x {accumulation} gradient accumulation steps"
    parts = (
        f"in micro-batches of up to {args.micro_train_tokens} tokens on {world} processes"
        if args.micro_train_tokens
        else rows
    )
    accelerator.print(
        f"train_batch_size {args.train_batch_size} {parts}; {describe(accelerator)}; output in {args.output_dir}"
    )
    return accelerator


def decide_output_dir(args, recipe: str) -> str:
    """`--output_dir` or `runs/<recipe>/<date-time>`, made if it is not there."""
    if args.resume == "auto" and not args.output_dir:
        sys.exit("--resume auto looks for checkpoints in --output_dir: give it")
    path, own = (
        Path(args.output_dir or f"runs/{recipe}/{datetime.datetime.now():%Y%m%d-%H%M%S}"),
        args.resume == "auto",
    )
    if args.resume not in ("never", "auto"):
        if not (Path(args.resume) / "manifest.json").is_file():
            sys.exit(
                f"--resume {args.resume}: not a checkpoint, it holds no manifest.json. Give never, auto or .../global_step_..."
            )
        folder = Path(args.resume).resolve().parent
        if not args.output_dir and folder.name != "checkpoints":
            sys.exit(
                f"--resume {args.resume} is not in the checkpoints of a run: give --output_dir, too"
            )
        path = Path(args.output_dir or folder.parent)  # without one the run goes on where it was
        own = path.resolve() / "checkpoints" == folder
    if not own and path.is_dir() and any(path.iterdir()):
        sys.exit(
            f"--output_dir {path} already holds another run. Take another, or --resume auto to go on from its last checkpoint."
        )
    try:
        path.mkdir(parents=True, exist_ok=bool(args.output_dir) or own)
    except (
        OSError
    ) as error:  # a file of that name, no permission, a run that began in the same second ...
        sys.exit(f"--output_dir {path} cannot be made: {error}")
    return str(path)


def quiet() -> None:
    """Leaves the console to the run: libraries report warnings and errors only."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs, too, what it raises
    transformers.logging.disable_progress_bar()
    for name in (
        "torch.distributed",
        "accelerate.utils.other",
    ):  # the other warns of tied weights, which are saved once
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.distributed")
