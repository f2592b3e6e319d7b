"""From the launcher's environment to an Accelerator."""

import datetime
import logging
import os
import sys
import warnings

import datasets
import torch
import transformers
from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from accelerate.utils import DistributedType, GradientAccumulationPlugin, set_seed
from torch.distributed.fsdp import MixedPrecisionPolicy

from common import arguments, engine, run_folder

# How long processes wait for each other. By default NCCL gives up after 10 minutes, gloo after 30.
# That is too short while one of them tokenises, checks or writes files.
PATIENCE = datetime.timedelta(hours=12)


def make_accelerator(args, recipe: str) -> Accelerator:
    """Builds the `Accelerator` that the launcher's environment asks for.

    Fills in what the arguments leave open: the size of micro-batches, and `args.output_dir`, the
    same on all processes, by default in `runs/<recipe>`. Seeds Python, NumPy and torch.
    """
    asks_for_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    on_cpu = asks_for_cpu or not torch.cuda.is_available()
    processes = int(os.environ.get("WORLD_SIZE", 1))
    accumulation = arguments.accumulation_steps(args, not on_cpu, processes)
    quiet()
    if processes == int(os.environ.get("LOCAL_WORLD_SIZE", 0)):
        # By default gloo listens where the network may reach it: SECURITY.md.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    accelerator = build(args, on_cpu, accumulation)
    if accelerator.num_processes != processes:
        sys.exit(f"the launcher started {processes} processes, got {accelerator.num_processes}")
    mend_rounding(accelerator)
    set_seed(args.seed)
    if not getattr(args, "preview", 0):  # which writes nothing
        run_folder.make(accelerator, args, recipe)
        what = f"{engine.describe(accelerator)}; output in {args.output_dir}"
        accelerator.print(what, flush=True)
    return accelerator


def build(args, on_cpu: bool, accumulation: int) -> Accelerator:
    """Builds the Accelerator itself, with the plugins of its engine."""
    use_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    use_fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    deepspeed_plugin = None
    if use_deepspeed:
        from common import zero

        deepspeed_plugin = zero.make_plugin(accumulation, args)
    process_group = None
    if "LOCAL_RANK" in os.environ:  # of a launcher
        backend = "gloo" if on_cpu else "nccl"
        process_group = [InitProcessGroupKwargs(backend=backend, timeout=PATIENCE)]
    if on_cpu and use_fsdp:
        # accelerate applies FSDP only to what it believes is MULTI_GPU, and on a CPU silently uses
        # DDP. So we tell it that this is MULTI_GPU.
        PartialState(cpu=True, backend="gloo", timeout=PATIENCE)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=accumulation, sync_with_dataloader=False
        ),
        deepspeed_plugin=deepspeed_plugin,
        kwargs_handlers=process_group,
        # If accelerate is told to use the CPU it ignores DeepSpeed and silently uses DDP.
        cpu=on_cpu and not use_deepspeed,
    )
    if use_fsdp and not accelerator.is_fsdp2:
        sys.exit("FSDP without fsdp_version: 2, see accelerate_configs/fsdp2.yaml")
    if on_cpu and accelerator.mixed_precision == "fp16" and not use_deepspeed:
        sys.exit("fp16 without DeepSpeed needs a GPU: accelerate would run fp32 in silence")
    return accelerator


def mend_rounding(accelerator: Accelerator) -> None:
    """Keeps what accelerate and torch would round, and makes half precision work on a CPU."""
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy if accelerator.is_fsdp2 else None
    if policy:
        # accelerate would let FSDP2 round the sums of gradients, and outputs such as log-probs.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            policy.param_dtype, reduce_dtype=torch.float32
        )
    if accelerator.device.type == "cpu":
        from common import cpu

        cpu.clip_by_exact_norm(accelerator)
        if accelerator.mixed_precision != "no":
            cpu.HalfProductsInFp32().__enter__()  # for the life of the process
            accelerator.print(
                f"NOTE: {accelerator.mixed_precision} is emulated on the CPU, for checking only "
                "(half weights, fp32 products)"
            )


def quiet() -> None:
    """Leaves the console to the run: libraries report warnings and errors only."""
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it also logs the errors that it raises
    transformers.logging.disable_progress_bar()
    # `preference_recipes.models.load` itself reports what a model lacks, or has too much of.
    logging.getLogger("transformers.modeling_utils").addFilter(
        lambda record: "LOAD REPORT" not in record.getMessage()
    )
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    # It warns of tied weights, which are saved once.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.distributed")
