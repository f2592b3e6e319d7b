"""The command line of a recipe."""

import importlib
import os
import sys
from pathlib import Path

import transformers
import yaml

from common import ASSETS

# Arguments of all recipes that a resumed run may change. In the others it must agree with the checkpoint, but for those that its recipe
# names in `Args.may_change`.
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
    # What changes the speed and the memory, not the update.
    "micro_train_batch_size",
    "micro_train_tokens",
    "gradient_checkpointing",
    "attn_implementation",
    "debug_overflow",
    # Data is compared by its content, not by its name.
    "dataset_name",
    "eval_dataset_name",
    "eval_dataset_split",
    "max_new_tokens",
}


def parse(args_class: type, demo: Path, argv: list[str] | None = None):
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


def check_intervals(args) -> None:
    """Refuses an interval that is neither a number of updates nor a share of them, and answers of no token."""
    for name in ("logging_steps", "eval_steps", "save_steps", "save_actor_steps"):
        if (value := getattr(args, name)) < 0 or (value >= 1 and value != int(value)):
            sys.exit(
                f"--{name} {value}: expected 0 (never), a share below 1, or a whole number of updates"
            )
    if getattr(args, "max_new_tokens", 1) < 1:
        sys.exit(f"--max_new_tokens {args.max_new_tokens}: expected at least 1")
