"""From the launcher's environment to an Accelerator."""

import datetime
import logging
import os
import socket
import sys
import warnings
from typing import NamedTuple

import datasets
import torch
import transformers
from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from accelerate.utils import DistributedType, GradientAccumulationPlugin, set_seed
from torch.distributed.fsdp import MixedPrecisionPolicy

from common import PARENT, arguments, cpu, distributed, engine, hub, run_folder, zero

# How long processes wait for each other. By default NCCL gives up after 10 minutes, gloo after 30.
# That is too short while one of them tokenises, checks or writes files.
PATIENCE = datetime.timedelta(hours=12)

# Each launcher sets one of these for what it starts, and nobody else does: torchrun, which
# accelerate's launcher of several processes is too, accelerate's launcher of one, and deepspeed.
SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_MODE", "CROSS_SIZE")


class Launcher(NamedTuple):
    """What the launcher's environment asks for."""

    processes: int
    on_cpu: bool
    deepspeed: bool
    fsdp: bool


def make_accelerator(args, recipe: str) -> Accelerator:
    """Builds the `Accelerator` that the launcher's environment asks for.

    Fills in what the arguments leave open: the size of micro-batches, and `args.output_dir`, the
    same on all processes. Seeds Python, NumPy and torch with `args.seed`.

    Args:
        recipe: its name, for the default of `output_dir`.

    Raises:
        SystemExit: batch sizes that do not divide, another number of processes than the launcher's,
            an `output_dir` that another run uses, or with `--resume never` one that holds another
            run.
    """
    launcher = read_environment()
    accumulation = arguments.accumulation_steps(args, not launcher.on_cpu, launcher.processes)
    quiet()
    stay_on_this_machine()
    accelerator = build(args, launcher, accumulation)
    mend_rounding(accelerator, launcher)
    distributed.on_main_process(accelerator, hub.check_push, args)
    set_seed(args.seed)
    if not getattr(args, "preview", 0):  # which writes nothing
        run_folder.make(accelerator, args, recipe)
        what = f"{engine.describe(accelerator)}; output in {args.output_dir}"
        accelerator.print(what, flush=True)
    return accelerator


def read_environment() -> Launcher:
    """Returns what `accelerate launch` or `torchrun` told this process in its environment."""
    use_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    return Launcher(
        processes=int(os.environ.get("WORLD_SIZE", 1)),
        on_cpu=use_cpu or not torch.cuda.is_available(),
        deepspeed=os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true",
        fsdp=os.environ.get("ACCELERATE_USE_FSDP") == "true",
    )


def launcher_is_gone() -> bool:
    """Whether a launcher started this process and has ended before it, so it was killed.

    Whoever starts a recipe without a launcher, such as a shell with `&`, may go.
    """
    was_launched = any(name in os.environ for name in SET_BY_LAUNCHERS)
    return was_launched and os.getppid() != PARENT


def stay_on_this_machine() -> None:
    """Lets gloo listen on the loopback interface alone, where one machine runs all processes.

    By default it listens at the address that the host's name resolves to, which the network may
    reach. What else listens, and why that cannot be changed here: SECURITY.md.
    """
    processes = os.environ.get("WORLD_SIZE")
    interfaces = [name for _, name in socket.if_nameindex()]
    if processes and processes == os.environ.get("LOCAL_WORLD_SIZE") and "lo" in interfaces:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def build(args, launcher: Launcher, accumulation: int) -> Accelerator:
    """Builds the Accelerator itself, with the plugins of its engine."""
    if launcher.on_cpu and launcher.fsdp:
        # accelerate applies FSDP only to what it believes is MULTI_GPU, and on a CPU silently uses
        # DDP. So we tell it that this is MULTI_GPU.
        PartialState(cpu=True, backend="gloo", timeout=PATIENCE)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=accumulation, sync_with_dataloader=False
        ),
        deepspeed_plugin=zero.make_plugin(accumulation, args) if launcher.deepspeed else None,
        kwargs_handlers=process_group_settings(launcher),
        # If accelerate is told to use the CPU it ignores DeepSpeed and silently uses DDP.
        cpu=launcher.on_cpu and not launcher.deepspeed,
    )
    asked = f"{launcher.processes} processes, FSDP2 {launcher.fsdp}"
    got = f"{accelerator.num_processes} processes, FSDP2 {accelerator.is_fsdp2}"
    if asked != got:
        sys.exit(f"the launcher's settings were not honoured: asked for {asked}, got {got}")
    if launcher.on_cpu and accelerator.mixed_precision == "fp16" and not launcher.deepspeed:
        sys.exit("fp16 without DeepSpeed needs a GPU: accelerate would run fp32 in silence")
    return accelerator


def process_group_settings(launcher: Launcher) -> list[InitProcessGroupKwargs] | None:
    """Returns how processes find and wait for each other; None if no launcher started this one."""
    if "LOCAL_RANK" not in os.environ:
        return None
    if launcher.on_cpu:
        # Without gloo each process on a CPU would believe that it is alone.
        return [InitProcessGroupKwargs(backend="gloo", timeout=PATIENCE)]
    return [InitProcessGroupKwargs(timeout=PATIENCE)]


def mend_rounding(accelerator: Accelerator, launcher: Launcher) -> None:
    """Keeps what accelerate and torch would round, and makes half precision work on a CPU."""
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy if launcher.fsdp else None
    if policy:
        # accelerate would let FSDP2 round the sums of gradients, and outputs such as log-probs.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            policy.param_dtype, reduce_dtype=torch.float32
        )
    if launcher.on_cpu:
        cpu.clip_by_exact_norm(accelerator)
    if launcher.on_cpu and accelerator.mixed_precision != "no":
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
