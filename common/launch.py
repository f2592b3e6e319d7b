"""The command line of a recipe, and a right `Accelerator` in plain python, DDP, FSDP2 and every ZeRO stage, on CPU and GPU."""

import datetime
import importlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
import yaml
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs, PartialState
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    broadcast_object_list,
    gather_object,
    set_seed,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.overrides import TorchFunctionMode

from . import ASSETS, REPOSITORY
from .engine import hold_growth, zero_stage


def parse_args(args_class: type, demo: Path, argv: list[str] | None = None):
    """Reads a recipe's arguments from the command line.

    A first argument that ends in .yaml or .yml sets defaults that the flags after it override. Abbreviations are refused.
    Without a model and a data set the embedded demo's YAML is that first argument.

    Args:
        args_class: flat dataclass, its fields made by transformers' `HfArg`.
        demo: the YAML of the embedded demo.
        argv: the arguments without the program's name; default `sys.argv[1:]`.

    Raises:
        SystemExit: unknown argument, wrong type, YAML file missing or not a flat mapping. It names the argument.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # Errors repeat the usage: one line of it, not the list of all arguments, which --help gives.
    parser = transformers.HfArgumentParser(
        args_class,
        allow_abbrev=False,
        usage="%(prog)s [DEFAULTS.yaml] [--argument value ...] [--help]",
    )
    for action in parser._actions:
        action.help = action.help.replace("%", "%%") if action.dest != "help" else action.help
    if argv and argv[0].endswith((".yaml", ".yml")):
        # Read as flags, so that types, choices and unknown names are checked by the same parser.
        argv = yaml_to_flags(argv[0], parser) + argv[1:]
    given = {word.partition("=")[0].replace("-", "_") for word in argv} & {
        "__model_name_or_path",
        "__dataset_name",
    }
    demo_flags = [] if given else yaml_to_flags(demo, parser)
    args, unknown = parser.parse_args_into_dataclasses(
        demo_flags + argv, look_for_args_file=False, return_remaining_strings=True
    )
    if unknown:
        parser.error(
            f"unknown argument {' '.join(unknown)}: --help lists all (none can be abbreviated, a file of defaults comes first)"
        )
    if None in (args.model_name_or_path, args.dataset_name):
        parser.error(
            "--model_name_or_path or --dataset_name is missing (give both, or neither for the demo)"
        )
    if demo_flags and os.environ.get("RANK", "0") == "0":
        print(f"no model and no data set given: running the demo, {demo}", flush=True)
    return args


def yaml_to_flags(path: str | Path, parser: transformers.HfArgumentParser) -> list[str]:
    """The flags that say what a flat YAML mapping says; `null` leaves the default, `{assets}` is the assets' folder."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        parser.error(f"{path} cannot be read as YAML: {' '.join(str(error).split())}")
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        parser.error(f"{path}: expected a flat mapping of argument names to values")
    flags = []
    for name, value in values.items():
        if f"--{name}" not in parser._option_string_actions:
            parser.error(f"{path}: {name!r} is no argument of this recipe; --help lists them")
        if value is not None:
            flags += [
                f"--{name}",
                *(
                    str(v).replace("{assets}", str(ASSETS))
                    for v in (value if isinstance(value, list) else [value])
                ),
            ]
    return flags


def load_function(argument: str, name: str):
    """The function that an argument names as `MODULE:NAME`; modules are looked for in the current directory, too.

    Raises:
        SystemExit: no such module or name.
    """
    module, _, attribute = name.partition(":")
    sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        sys.exit(
            f"--{argument} {name}: {error} (expected MODULE:NAME, the module installed or in {os.getcwd()})"
        )


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
    accumulation = accumulation_steps(
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
        deepspeed_plugin=deepspeed_plugin(accumulation, args) if deepspeed else None,
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
    args.output_dir = on_main_process(accelerator, decide_output_dir, args, recipe)
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


def accumulation_steps(
    train_batch_size: int, micro_train_batch_size: int, processes: int, micro_train_tokens: int = 0
) -> int:
    """`train_batch_size / (micro_train_batch_size * processes)`, or an exit that names the nearest sizes that divide. Where tokens cut
    micro-batches, the most there can be."""
    if min(train_batch_size, micro_train_batch_size) < 1 or micro_train_tokens < 0:
        sys.exit(
            f"--train_batch_size {train_batch_size} and --micro_train_batch_size {micro_train_batch_size} must be at least 1, --micro_train_tokens {micro_train_tokens} at least 0"
        )
    if micro_train_tokens:
        return -(-train_batch_size // processes)  # rounded up
    per_step = micro_train_batch_size * processes
    if train_batch_size % per_step:
        low = train_batch_size // per_step * per_step
        sizes = sorted(
            range(1, train_batch_size + 1), key=lambda m: abs(m - micro_train_batch_size)
        )
        other = [
            f"--micro_train_batch_size {m}"
            for m in sizes
            if train_batch_size % (m * processes) == 0
        ]
        nearest = ", or ".join(
            [f"--train_batch_size {f'{low} or ' if low else ''}{low + per_step}", *other[:1]]
        )
        sys.exit(
            f"--train_batch_size {train_batch_size} is not a multiple of --micro_train_batch_size {micro_train_batch_size} "
            f"x {processes} processes = {per_step}. Nearest that would do: {nearest}."
        )
    return train_batch_size // per_step


def deepspeed_plugin(accumulation: int, args):
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
        read_deepspeed_json(path)
        if (path := os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"))
        else None
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
    hold_growth()
    return plugin


def read_deepspeed_json(path: str) -> dict:
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


def describe(accelerator: Accelerator) -> str:
    """How the run computes, in words: `DeepSpeed ZeRO-2 fp16 on cpu`."""
    kinds = {
        DistributedType.DEEPSPEED: f"DeepSpeed ZeRO-{zero_stage(accelerator)}",
        DistributedType.FSDP: "FSDP2",
    }
    kind = kinds.get(
        accelerator.distributed_type, "DDP" if accelerator.num_processes > 1 else "one process"
    )
    return (
        f"{kind} {accelerator.mixed_precision.replace('no', 'fp32')} on {accelerator.device.type}"
    )


def all_or_none(accelerator: Accelerator, mine: bool, function, *args):
    """What `function` returns on the processes where `mine` is true, None on the others. Where one leaves all leave, lest others wait for
    it, and one says why. All ranks must call it."""
    try:
        result, problem = function(*args) if mine else None, None
    except SystemExit as error:
        result, problem = None, error.code
    if any(problems := gather_object([problem])):
        sys.exit(next(filter(None, problems)) if accelerator.is_main_process else 1)
    return result


def on_main_process(accelerator: Accelerator, function, *args):
    """What `function` returns on the main process, on every rank; see `all_or_none`."""
    return broadcast_object_list(
        [all_or_none(accelerator, accelerator.is_main_process, function, *args)]
    )[0]


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


class HalfProductsInFp32(TorchFunctionMode):
    """Computes half-precision matrix products and attention in fp32 and rounds the result: what tensor cores do, and on a CPU
    without half kernels many times faster than the library's own."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if (
            function in (F.linear, F.scaled_dot_product_attention)
            and args[0].device.type == "cpu"
            and args[0].dtype.itemsize == 2
        ):
            single = lambda value: (
                value.float()
                if isinstance(value, torch.Tensor) and value.dtype.itemsize == 2
                else value
            )
            return function(
                *map(single, args),
                **{name: single(value) for name, value in (kwargs or {}).items()},
            ).to(args[0].dtype)
        return function(*args, **(kwargs or {}))


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
