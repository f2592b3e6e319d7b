"""Command line of a recipe: one flat dataclass, a YAML file of defaults, flags that override it."""

import importlib
import os
import sys
from pathlib import Path

import yaml
from transformers import HfArgumentParser

from . import ASSETS


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
    parser = HfArgumentParser(args_class, allow_abbrev=False, usage="%(prog)s [DEFAULTS.yaml] [--argument value ...] [--help]")
    for action in parser._actions:
        action.help = action.help.replace("%", "%%") if action.dest != "help" else action.help
    if argv and argv[0].endswith((".yaml", ".yml")):
        # Read as flags, so that types, choices and unknown names are checked by the same parser.
        argv = yaml_to_flags(argv[0], parser) + argv[1:]
    args = parse(parser, argv)
    if args.model_name_or_path is None and args.dataset_name is None:
        if os.environ.get("RANK", "0") == "0":
            print(f"no model and no data set given: running the demo, {demo}", flush=True)
        args = parse(parser, yaml_to_flags(demo, parser) + argv)
    for name in ("model_name_or_path", "dataset_name"):
        if getattr(args, name) is None:
            parser.error(f"--{name} is missing (give both a model and a data set, or neither for the demo)")
    return args


def parse(parser: HfArgumentParser, argv: list[str]):
    """The dataclass that flags fill; what is no argument is refused."""
    args, unknown = parser.parse_args_into_dataclasses(argv, look_for_args_file=False, return_remaining_strings=True)
    if unknown:
        parser.error(f"unknown argument {' '.join(unknown)}: --help lists all (none can be abbreviated, a file of defaults comes first)")
    return args


def yaml_to_flags(path: str | Path, parser: HfArgumentParser) -> list[str]:
    """The flags that say what a flat YAML mapping says; `null` leaves the default, `{assets}` is the assets' folder."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        parser.error(f"{path} cannot be read as YAML: {' '.join(str(error).split())}")
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        parser.error(f"{path}: expected a flat mapping of argument names to values")
    unknown = [name for name in values if f"--{name}" not in parser._option_string_actions]
    if unknown:
        parser.error(f"{path}: {unknown[0]!r} is no argument of this recipe; --help lists them")
    flags = []
    for name, value in values.items():
        if value is not None:
            flags += [f"--{name}", *(str(v).replace("{assets}", str(ASSETS)) for v in (value if isinstance(value, list) else [value]))]
    return flags


def load_function(argument: str, name: str | None):
    """The function that an argument names as `MODULE:NAME`, or None; modules are looked for in the current directory, too.

    Raises:
        SystemExit: no such module or name.
    """
    if not name:
        return None
    module, _, attribute = name.partition(":")
    sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        sys.exit(f"--{argument} {name}: {error} (expected MODULE:NAME, the module installed or in {os.getcwd()})")
