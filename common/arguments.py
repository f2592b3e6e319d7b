"""The command line of a recipe: YAML, flags, ranges, and sizes that must divide."""

import argparse
import atexit
import dataclasses
import difflib
import gc
import inspect
import math
import os
import re
import sys
from os.path import expanduser
from pathlib import Path

import torch
import yaml
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from transformers import HfArgumentParser

from common import ASSETS, GC_THRESHOLD, one_line, patched, pluralize, print_once, refuse
from common.shared_args import LIMITS, SavingArgs, range_in_words

# What a resumed run of any recipe may change. Each recipe names its own such arguments in
# `Args.may_change`. In all other arguments the run must agree with its checkpoint.
MAY_CHANGE = {field.name for field in dataclasses.fields(SavingArgs)} - {"keep_best"}
MAY_CHANGE |= {"output_dir", "run_name", "max_epochs", "max_steps"}
# These change the speed and the memory, not the update.
MAY_CHANGE |= {"micro_train_batch_size", "micro_train_tokens"}
MAY_CHANGE |= {"gradient_checkpointing", "attn_implementation"}
# Data is compared by its content, not by its name.
MAY_CHANGE |= {"dataset_name", "eval_dataset_name", "eval_dataset_split"}

# What a micro-batch holds on a GPU, unless the user sets it.
TOKENS_ON_GPU = 16_384
# What other trainers' arguments are called here; docs/faq.md has this table.
OTHER_NAMES = Path(__file__).with_name("other_names.yaml")


class Parser(HfArgumentParser):
    """Reads a recipe's arguments; an error is one line below the usage. Its help is in groups."""

    def __init__(self, args_class: type):
        # Errors repeat the usage: this line instead of the list of all arguments.
        usage = "%(prog)s [DEFAULTS.yaml] [--argument value ...] [--help]"
        self.groups = {}  # by argument
        super().__init__(allow_abbrev=False, usage=usage)
        # The class that first had a field is its group; the algorithm's own come first.
        for cls in args_class.__mro__:
            is_own = "Args(" in cls.__doc__  # as `dataclass` writes it where a class has none
            title = "The algorithm" if is_own else cls.__doc__.partition(".")[0]
            group = self.add_argument_group(title)
            self.groups |= dict.fromkeys(inspect.get_annotations(cls), group)
        self._add_dataclass_arguments(args_class)

    def add_argument(
        self, *flags: str, limits=None, with_lora=None, only_with=None, **settings
    ) -> argparse.Action:
        """Adds an argument as `argparse` does, in one spelling and with its range in the help."""
        flags = tuple(flag for flag in flags if "-" not in flag.lstrip("-"))
        if limits:
            settings["help"] += f" [{range_in_words(limits)}]"
        group = self.groups.get(flags[0].lstrip("-").removeprefix("no_"))
        if group is None:  # --help
            return super().add_argument(*flags, **settings)
        return group.add_argument(*flags, **settings)

    def error(self, message: str):
        if message.startswith("unrecognized arguments: --"):
            unknown = (word for word in message.split() if word.startswith("--"))
            message += "".join(map(self.hint, unknown))
        sys.exit(f"{self.format_usage()}{self.prog}: error: {message}")

    def hint(self, flag: str) -> str:
        """Returns what an argument that does not exist may mean, for the end of a message."""
        name = flag.partition("=")[0].lstrip("-").replace("-", "_")
        tables = yaml.safe_load(OTHER_NAMES.read_text(encoding="utf-8"))
        for names, ours in (tables["current"] | tables["older"]).items():
            if name in names.split(", "):
                return f". Instead of {name} give {ours}"
        ours = [flag.lstrip("-") for flag in self._option_string_actions]
        close = difflib.get_close_matches(name, ours, n=1, cutoff=0.7)
        return f". Did you mean --{close[0]}?" if close else ""


def unfreeze() -> None:
    """Keeps triton 3.9, which torch 2.15 imports, from printing leaks below the last message."""
    if "triton" in sys.modules:
        gc.unfreeze()


def parse(args_class: type, demo: str | Path, argv: list[str] | None = None):
    """Reads a recipe's arguments from the command line.

    A first argument that ends in .yaml or .yml sets defaults, which the flags after it override.

    Args:
        args_class: flat dataclass, its fields made by `shared_args.arg`.
        demo: the YAML in `assets/` that is read where neither a model nor a data set is given.
    """
    gc.freeze()  # modules are never freed: the collector need not look through them
    atexit.register(unfreeze)
    gc.set_threshold(*GC_THRESHOLD)
    parser = Parser(args_class)
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].endswith((".yaml", ".yml")):
        # Read as flags, so that the same parser checks types, choices and unknown names.
        words = yaml_to_flags(words[0], parser) + words[1:]
    # A shell expands `~` where it begins a word, but not after `=`, nor in a YAML.
    words = [re.sub(r"(?<![^=])~.*", lambda path: expanduser(path[0]), word) for word in words]
    given = parser.parse_args(words)
    if given.model_name_or_path is None and given.dataset_name is None:
        words = yaml_to_flags(ASSETS / demo, parser) + words
        print_once(f"no model and no data set given: running the demo, {ASSETS / demo}")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # more would wait for each other: the demo's model is tiny
    elif given.model_name_or_path is None or given.dataset_name is None:
        parser.error(
            "--model_name_or_path or --dataset_name is missing: give both, or neither for the demo"
        )
    if given.lora_r:
        rates = {each.name: each.metadata["with_lora"] for each in dataclasses.fields(args_class)}
        parser.set_defaults(**{name: value for name, value in rates.items() if value is not None})
    args = args_class(**vars(parser.parse_args(words)))
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        limits = {} if value is None else field.metadata["limits"]
        if not all(LIMITS[name](value, limit) for name, limit in limits.items()):
            parser.error(f"--{field.name} {value}: expected {range_in_words(limits)}")
        if field.name.endswith("_steps") and value > 1 and value % 1 != 0:
            parser.error(f"--{field.name} {value}: expected whole updates, or a share below 1")
    trackers = [str(tracker) for tracker in get_available_trackers()]
    for name in set(args.report_to).difference(trackers, ["none"]):
        if name in map(str, LoggerType) and name != "all":
            parser.error(f"--report_to {name}: {name} is not installed: pip install {name}")
        parser.error(f"--report_to {name}: expected one of {', '.join(trackers)}, or none")
    if str(args.push_to_hub).lower() in ("true", "false", "yes", "no", "1", "0"):
        parser.error(f"--push_to_hub {args.push_to_hub}: expected a name, such as me/my-model")
    if args.stop_after and not (args.keep_best and args.eval_steps):
        parser.error(f"--stop_after {args.stop_after} needs --keep_best and --eval_steps")
    if args.values_steps and len(args.dataset_name) > 1:
        parser.error("--values_steps names rows by number: join the files of --dataset_name to one")
    refuse_unused(args)
    return args


def refuse_unused(args) -> None:
    """Refuses arguments that were changed and would be ignored, see `only_with` of `arg`."""
    defaults = type(args)()
    for field in dataclasses.fields(args):
        needed, _, values = (field.metadata["only_with"] or "").partition("=")
        value = getattr(args, field.name)
        if not needed or value == getattr(defaults, field.name):
            continue
        given = getattr(args, needed)
        if not values and not given:
            refuse(f"--{field.name} {value}: not used: give --{needed}, too")
        if values and given not in values.split(","):
            allowed = " or ".join(values.split(","))
            refuse(f"--{field.name} {value}: not used with --{needed} {given}, only {allowed}")


def yaml_to_flags(path: str | Path, parser: Parser) -> list[str]:
    """Returns the flags that say the same as a flat YAML mapping.

    A value of `null` leaves the default. `{assets}` in a value is the folder of the assets.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = yaml.safe_load(text) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(f"{path} cannot be read: {one_line(error)}")
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        parser.error(f"{path}: expected a flat mapping of argument names to values")
    names = [key.value for key, _ in yaml.compose(text).value] if values else []
    if len(set(names)) < len(names):
        twice = max(names, key=names.count)
        parser.error(f"{path}: {twice} is there {names.count(twice)} times: leave one of them")
    flags = []
    for name, value in values.items():
        if f"--{name}" not in parser._option_string_actions:
            parser.error(f"{path}: there is no argument {name}{parser.hint(str(name))}")
        if value is not None:
            words = value if isinstance(value, list) else [value]
            flags += [f"--{name}", *(str(word).replace("{assets}", str(ASSETS)) for word in words)]
    with patched((parser, "prog", f"{parser.prog} {path}")):  # for what is wrong with a value
        parser.parse_args(flags)
    return flags


def accumulation_steps(args, on_gpu: bool, processes: int) -> int:
    """Returns the number of micro-batches that each process accumulates for one update.

    Fills in their size if none is given: 4 samples, or the size nearest to it that divides an
    update; on a GPU, which that would leave idle, a number of tokens. The number of micro-batches
    is then the most there can be.
    """
    samples = args.train_batch_size
    if args.micro_train_batch_size is None:
        sizes = [size for size in range(1, samples + 1) if samples % (size * processes) == 0]
        nearest_to_4 = min(sizes, key=lambda size: abs(size - 4), default=1)
        args.micro_train_batch_size = 4 if args.micro_train_tokens else nearest_to_4
        if on_gpu and not args.micro_train_tokens:
            args.micro_train_tokens = TOKENS_ON_GPU
    if args.micro_train_tokens:
        return math.ceil(samples / processes)
    step = args.micro_train_batch_size * processes
    if samples % step and getattr(args, "preview", 0):
        return 1  # it makes no update
    if samples % step:
        below = samples // step * step
        nearest = " or ".join(str(size) for size in (below, below + step) if size)
        refuse(
            f"--train_batch_size {samples} is not a multiple of --micro_train_batch_size "
            f"{args.micro_train_batch_size} x {pluralize(processes, 'process')} = {step}. "
            f"Nearest valid sizes: {nearest}."
        )
    return samples // step
