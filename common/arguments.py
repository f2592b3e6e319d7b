"""The command line of a recipe: YAML, flags, intervals, and sizes that must divide."""

import argparse
import gc
import hashlib
import math
import os
import pkgutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import transformers
import yaml

from common import ASSETS, best, counted, errors, speaks_for_all
from common.shared_args import Bounds

# What a resumed run of any recipe may change. Each recipe names its own such arguments in
# `Args.may_change`. In all other arguments the run must agree with its checkpoint.
MAY_CHANGE = {
    "output_dir",
    "resume",
    "report_to",
    # How long the run is, and when it logs, evaluates and saves.
    "max_epochs",
    "max_steps",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "save_total_limit",
    "save_actor_steps",
    "save_actor_limit",
    "save_dtype",
    "stop_after",
    "push_to_hub",
    # What changes the speed and the memory, not the update.
    "micro_train_batch_size",
    "micro_train_tokens",
    "gradient_checkpointing",
    "attn_implementation",
    # Data is compared by its content, not by its name.
    "dataset_name",
    "eval_dataset_name",
    "eval_dataset_split",
    "source of the rewards",  # a resume says so
}

# What a micro-batch holds on a GPU, unless the user sets it.
TOKENS_ON_GPU = 16_384

# Numbers of updates, or shares of all of them.
INTERVALS = ("logging_steps", "eval_steps", "save_steps", "save_actor_steps")


class Parser(transformers.HfArgumentParser):
    """Reads a recipe's arguments; an error is one line below the usage."""

    def add_argument(
        self, *flags, bounds: Bounds | None = None, with_lora: Any = None, **settings
    ) -> argparse.Action:
        """Adds an argument as `argparse` does; keeps its range, and its default with adapters."""
        action = super().add_argument(*flags, **settings)
        action.bounds = bounds
        action.with_lora = with_lora
        return action

    def error(self, message: str):
        errors.refuse(f"{self.format_usage()}{self.prog}: error: {message}", status=2)


def parse(args_class: type, demo: str | Path, argv: list[str] | None = None):
    """Reads a recipe's arguments from the command line.

    A first argument that ends in .yaml or .yml sets defaults, which the flags after it override.
    Abbreviations are refused. Without a model and a data set, the embedded demo's YAML is read.

    Args:
        args_class: flat dataclass, its fields made by transformers' `HfArg`.
        demo: the YAML of the embedded demo, in `assets/`.
        argv: the arguments without the program's name; default `sys.argv[1:]`.

    Raises:
        SystemExit: unknown argument, wrong type, a YAML file that is not a flat mapping. The
            message names the argument.
    """
    gc.freeze()  # modules are never freed: the collector need not look through them
    gc.enable()  # it is off while a recipe loads its modules
    demo = ASSETS / demo
    args, is_demo = read(args_class, demo, argv)
    # A single data set is recorded by its name, not as a list of one.
    if isinstance(args.dataset_name, list) and len(args.dataset_name) == 1:
        (args.dataset_name,) = args.dataset_name
    if is_demo and speaks_for_all():
        print(f"no model and no data set given: running the demo, {demo}", flush=True)
    return args


def read(args_class: type, demo: Path, argv: list[str] | None = None):
    """Does the part of `parse` that reads YAML and flags alone.

    Returns:
        the arguments, and whether they are those of the demo.
    """
    parser = make_parser(args_class)
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0].endswith((".yaml", ".yml")):
        # Read as flags, so that the same parser checks types, choices and unknown names.
        argv = yaml_to_flags(argv[0], parser) + argv[1:]
    is_demo = not names_model_or_dataset(argv)
    if is_demo:
        argv = yaml_to_flags(demo, parser) + argv

    args, unknown = read_flags(argv, parser)
    refuse_incomplete(args, unknown, parser)
    for name, value in vars(args).items():
        if value == [""]:  # as in --reward_function= to take away what a YAML names
            setattr(args, name, None)
    check_numbers(args, parser)
    if fault := best.fault_of_settings(args):
        parser.error(fault)
    return args, is_demo


def read_flags(argv: list[str], parser: Parser) -> tuple[Any, list[str]]:
    """Returns the arguments, and the words that are none.

    Adapters have defaults of their own, such as a higher learning rate. So with `--lora_r` the
    flags are read once more, over these.
    """
    read_all = partial(
        parser.parse_args_into_dataclasses,
        argv,
        look_for_args_file=False,
        return_remaining_strings=True,
    )
    args, unknown = read_all()
    if getattr(args, "lora_r", 0):
        for action in parser._actions:
            action.default = default_with_lora(action)
        args, unknown = read_all()
    return args, unknown


def default_with_lora(action: argparse.Action) -> Any:
    """Returns the default of an argument at `--lora_r` above 0."""
    own = getattr(action, "with_lora", None)
    return action.default if own is None else own


def refuse_incomplete(args, unknown: list[str], parser: Parser) -> None:
    """Refuses unknown arguments, and a model without data or data without a model.

    Raises:
        SystemExit: with what to give instead.
    """
    if unknown:
        parser.error(
            f"unknown argument {' '.join(unknown)}: --help lists all arguments "
            "(none can be abbreviated, and a file of defaults comes first)"
        )
    if args.model_name_or_path is None or args.dataset_name is None:
        parser.error(
            "--model_name_or_path or --dataset_name is missing: give both, or neither for the demo"
        )


def check_numbers(args, parser: Parser) -> None:
    """Refuses numbers that are not finite or not in the range of their argument.

    Raises:
        SystemExit: with the argument and its value.
    """
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        if isinstance(value, float) and not math.isfinite(value):
            parser.error(f"--{action.dest} {value}: expected a finite number")
        bounds = getattr(action, "bounds", None)
        if bounds is not None and value is not None and not bounds.contains(value):
            parser.error(f"--{action.dest} {value}: expected {bounds.describe()}")
    for name in INTERVALS:
        value = getattr(args, name)
        if value >= 1 and value != int(value):
            parser.error(
                f"--{name} {value}: expected 0, a share below 1, or a whole number of updates"
            )


def make_parser(args_class: type) -> Parser:
    """Returns the parser of a recipe's arguments."""
    parser = Parser(
        args_class,
        allow_abbrev=False,
        # Errors repeat the usage: this line instead of the list of all arguments.
        usage="%(prog)s [DEFAULTS.yaml] [--argument value ...] [--help]",
    )
    for action in parser._actions:
        if action.dest != "help":
            describe_flag(action)
    return parser


def describe_flag(action: argparse.Action) -> None:
    """Makes --help show a flag once, with its range and its default."""
    # argparse reads % in a help text as a format.
    action.help = action.help.replace("%", "%%")
    # The spelling with dashes is read all the same.
    flags = action.option_strings
    action.option_strings = [flag for flag in flags if "-" not in flag.lstrip("-")]
    if action.const is False:  # --no_share_prompts
        action.help = argparse.SUPPRESS
        return
    if bounds := getattr(action, "bounds", None):
        action.help += f" [{bounds.describe()}]"
    if default_with_lora(action) != action.default:
        action.help += " (default: %(default)s; with --lora_r: %(with_lora)s)"


def names_model_or_dataset(argv: list[str]) -> bool:
    """Whether the flags say what to train, or on what: then the demo is not wanted."""
    for word in argv:
        flag = word.partition("=")[0].replace("-", "_")
        if flag in ("__model_name_or_path", "__dataset_name"):
            return True
    return False


def yaml_to_flags(path: str | Path, parser: Parser) -> list[str]:
    """Returns the flags that say the same as a flat YAML mapping.

    A value of `null` leaves the default. `{assets}` in a value is the folder of the assets.
    """
    values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        parser.error(f"{path}: expected a flat mapping of argument names to values")

    flags = []
    for name, value in values.items():
        if value is None:
            continue
        words = value if isinstance(value, list) else [value]
        flags.append(f"--{name}")
        flags += [str(word).replace("{assets}", str(ASSETS)) for word in words]
    return flags


def load_function(argument: str, name: str) -> Callable:
    """Loads the function or class that an argument names as `MODULE:NAME`.

    Modules are looked for in the current directory, too.

    Raises:
        SystemExit: the argument names something else.
    """
    here = os.getcwd()
    sys.path.append(here)
    function = pkgutil.resolve_name(name)
    os.chdir(here)  # what the arguments name lies here, wherever the module went
    if not callable(function):
        sys.exit(f"--{argument} {name}: expected MODULE:NAME, a function")
    return function


def source_of(name: str) -> str:
    """Returns a checksum of the source files behind a MODULE:NAME that was loaded.

    They are the module's own, and those beside it or in its package that it takes something from.
    """
    place = name.partition(":")[0]
    while place not in sys.modules:  # without a colon its end is the function's name
        place = place.rpartition(".")[0]
    module = sys.modules[place]
    top = sys.modules[module.__name__.partition(".")[0]]
    folder = (file_of(top) if file_of(top).exists() else file_of(module)).parent
    files: dict[str, bytes] = {}
    to_read = [module]
    while to_read:
        module = to_read.pop()
        file = file_of(module)
        is_own = folder in file.parents and "site-packages" not in file.parts
        if module.__name__ in files or not (is_own or not files):
            continue
        files[module.__name__] = file.read_bytes() if file.exists() else b""
        for value in list(vars(module).values()):
            is_named = isinstance(value, (ModuleType, FunctionType, type))
            holder = value if is_named else type(value)  # of an instance its class
            origin = getattr(holder, "__module__", None) or holder.__name__
            if origin in sys.modules:
                to_read.append(sys.modules[origin])
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]


def file_of(module: ModuleType) -> Path:
    """Returns the file of a module; one that does not exist, if it has none."""
    return Path(getattr(module, "__file__", None) or "/nowhere/file")


def fill_in_micro_batches(args, on_gpu: bool, processes: int) -> str | None:
    """Decides how large micro-batches are, where neither size was given.

    A micro-batch of 4 suits a CPU, or of the size nearest to it that divides an update. It would
    leave most of a GPU idle, which is filled by a number of tokens better than by one of samples.

    Args:
        args: `micro_train_batch_size` is None if it was not given, `micro_train_tokens` 0.

    Returns:
        What to print about it; None if there is nothing to print.
    """
    is_given = args.micro_train_batch_size is not None or args.micro_train_tokens
    if args.micro_train_batch_size is None:
        size = nearest_micro_batch_size(args.train_batch_size, 4, processes)
        args.micro_train_batch_size = 4 if args.micro_train_tokens else size or 4
    if is_given or not on_gpu:
        return None
    args.micro_train_tokens = TOKENS_ON_GPU
    return (
        f"micro-batches hold up to {TOKENS_ON_GPU} tokens, since this runs on a GPU "
        "(--micro_train_tokens; fewer if the memory does not suffice)"
    )


def accumulation_steps(
    train_batch_size: int,
    micro_train_batch_size: int,
    processes: int,
    micro_train_tokens: int = 0,
) -> int:
    """Returns the number of micro-batches that each process accumulates for one update.

    This is `train_batch_size / (micro_train_batch_size * processes)`. If `micro_train_tokens` is
    given, micro-batches are cut by tokens, and this is the most there can be: one for each sample.

    Raises:
        SystemExit: sizes that do not divide. The message names the nearest valid ones.
    """
    if micro_train_tokens:
        return math.ceil(train_batch_size / processes)

    samples_per_step = micro_train_batch_size * processes
    if train_batch_size % samples_per_step == 0:
        return train_batch_size // samples_per_step

    below = train_batch_size // samples_per_step * samples_per_step
    nearest = f"--train_batch_size {below + samples_per_step}"
    if below:
        nearest = f"--train_batch_size {below} or {below + samples_per_step}"
    micro_size = nearest_micro_batch_size(train_batch_size, micro_train_batch_size, processes)
    if micro_size:
        nearest += f", or --micro_train_batch_size {micro_size}"
    sys.exit(
        f"--train_batch_size {train_batch_size} is not a multiple of --micro_train_batch_size "
        f"{micro_train_batch_size} x {counted(processes, 'process')} = {samples_per_step}. "
        f"Nearest valid sizes: {nearest}."
    )


def nearest_micro_batch_size(train_batch_size: int, wanted: int, processes: int) -> int:
    """Returns the size nearest to the wanted one that divides the samples of an update, or 0."""
    sizes = [
        size
        for size in range(1, train_batch_size + 1)
        if train_batch_size % (size * processes) == 0
    ]
    return min(sizes, key=lambda size: abs(size - wanted), default=0)
