"""From the launcher's environment to an Accelerator, and to the folder that is this run's alone."""

import atexit
import datetime
import fcntl
import logging
import os
import warnings
from pathlib import Path

import datasets
import torch
import transformers
from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from accelerate.utils import DistributedType, GradientAccumulationPlugin, gather_object, set_seed
from torch.distributed.fsdp import MixedPrecisionPolicy

from common import arguments, distributed, engine, folders, log, one_line, record, refuse

# How long processes wait while one of them tokenises or writes files. NCCL's default is 10 minutes.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=12)


def make_accelerator(args, recipe: str) -> Accelerator:
    """Builds the `Accelerator` that the launcher's environment asks for, and seeds the processes.

    Fills in what the arguments leave open: the size of micro-batches, and `args.output_dir`, the
    same on all processes, by default in `runs/<recipe>`.
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
        refuse(f"{processes} processes were started, accelerate uses {accelerator.num_processes}")
    if accelerator.device.type == "cpu":
        from common import cpu

        cpu.make_exact(accelerator)
    set_seed(args.seed)
    if not getattr(args, "preview", 0):  # a preview writes nothing
        existed_before = Path(args.output_dir or "").exists() and args.output_dir
        args.output_dir = distributed.on_main_process(accelerator, decide_folder, args, recipe)
        if not existed_before:
            atexit.register(folders.remove_if_unused, Path(args.output_dir))
        if not all(gather_object([Path(args.output_dir).is_dir()])):
            refuse(
                f"--output_dir {args.output_dir} is not visible to every process: "
                "several nodes need a shared file system"
            )
        where = record.relative(Path(args.output_dir))
        accelerator.print(f"{engine.describe(accelerator)}; output in {where}", flush=True)
    return accelerator


def build(args, on_cpu: bool, accumulation: int) -> Accelerator:
    """Builds the Accelerator itself, with the plugins of its engine."""
    use_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    use_fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    deepspeed_plugin = None
    if use_deepspeed:
        from common import zero

        deepspeed_plugin = zero.make_plugin(accumulation, args)
    if not (on_cpu or use_deepspeed) and torch.cuda.is_bf16_supported(including_emulation=False):
        # python and torchrun do not say how to compute: accelerate would take fp32.
        os.environ.setdefault("ACCELERATE_MIXED_PRECISION", "bf16")
    process_group = []
    if "LOCAL_RANK" in os.environ:  # of a launcher
        backend = "gloo" if on_cpu else "nccl"
        process_group = [InitProcessGroupKwargs(backend=backend, timeout=COLLECTIVE_TIMEOUT)]
    if on_cpu and use_fsdp:
        # accelerate applies FSDP only to MULTI_GPU, and on a CPU silently uses DDP.
        PartialState(cpu=True, backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    # The number is for DeepSpeed's config, see `engine.begin_update`.
    plugin = GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False)
    accelerator = Accelerator(
        gradient_accumulation_plugin=plugin,
        deepspeed_plugin=deepspeed_plugin,
        kwargs_handlers=process_group,
        # If accelerate is told to use the CPU it ignores DeepSpeed and silently uses DDP.
        cpu=on_cpu and not use_deepspeed,
    )
    if use_fsdp and not accelerator.is_fsdp2:
        refuse("FSDP without fsdp_version: 2, see accelerate_configs/fsdp2.yaml")
    if on_cpu and accelerator.mixed_precision == "fp16" and not use_deepspeed:
        refuse("fp16 without DeepSpeed needs a GPU: accelerate would silently run fp32")
    if use_fsdp and accelerator.mixed_precision != "no":
        # accelerate would let FSDP2 round the sums of gradients, and outputs such as log-probs.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            engine.half_precision(accelerator), reduce_dtype=torch.float32
        )
    return accelerator


def quiet() -> None:
    """Leaves the console to the run: libraries report warnings and errors only."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed would warn of it
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it also logs the errors that it raises
    transformers.logging.disable_progress_bar()
    # `preference_recipes.models.load` itself reports what a model lacks, or has too much of.
    logging.getLogger("transformers.modeling_utils").addFilter(
        lambda record: "LOAD REPORT" not in record.getMessage()
    )
    # They warn of tied weights, which are saved once, and of kernels that no recipe uses.
    for name in ("accelerate.utils.other", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.distributed")
    warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated")  # by peft
    # Wrong after a resume at update 0, and where DeepSpeed steps an optimizer on the CPU.
    warnings.filterwarnings("ignore", "Detected call of .lr_scheduler.step")


# ============================================================ the run's folder
def decide_folder(args, recipe: str) -> str:
    """Returns `--output_dir`, `runs/<recipe>/<run_name or date-time>`, or a resumed run's folder.

    It is made if it is not there. From then on it is this run's alone, until this process ends.
    """
    if args.run_name is not None and not args.output_dir:
        if "/" in args.run_name or args.run_name[:1] in ("", "."):
            refuse(f"--run_name {args.run_name!r}: expected the name of a folder in runs/{recipe}")
        args.output_dir = str(Path("runs", recipe, args.run_name))
    own = None  # the folder of the run that goes on
    checkpoint = Path(args.resume).resolve()
    if args.resume == "auto":
        own = args.output_dir and Path(args.output_dir).resolve()
    elif args.resume != "never" and checkpoint.parent.name == "checkpoints":
        own = checkpoint.parents[1]
    if args.resume != "never" and not (args.output_dir or own):
        refuse(f"--resume {args.resume} does not say where to continue: give --output_dir")
    now = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    path = args.output_dir or own or folders.unused(Path("runs", recipe, now), separator="-")
    path = Path(path).absolute()  # a user's code may change the working directory
    try:
        # A folder named after the time must be new: another run may begin in the same instant.
        path.mkdir(parents=True, exist_ok=bool(args.output_dir or own))
        lock(path)
    except OSError as error:
        refuse(f"--output_dir {path} cannot be written: {one_line(error)}")
    written = [path / name for name in (log.METRICS, "checkpoints", "actors", "actor")]
    if path.resolve() != own and any(each.exists() for each in written):
        refuse(
            f"--output_dir {path} already holds another run. Take another, "
            "or --resume auto to go on from its last checkpoint."
        )
    return str(path)


def lock(folder: Path) -> None:
    """Locks a run's folder until this process ends, however it ends."""
    handle = os.open(folder / folders.LOCK, os.O_RDWR | os.O_CREAT, 0o666)  # never closed
    try:
        # Unlike `flock` it is not inherited by what a reward function forks, and works on NFS.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        refuse(f"--output_dir {folder} is in use: two runs would write over each other")
    except OSError as error:
        print(f"NOTE: {folder} cannot be locked ({error}): let no other run write to it")
