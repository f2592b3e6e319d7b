"""Takes the actor out of a checkpoint.

    python -m preference_recipes.tools.export CHECKPOINT OUT [--dtype bfloat16]
    python -m preference_recipes.tools.export CHECKPOINT OUT --critic
    python -m preference_recipes.tools.export CHECKPOINT OUT --merge

CHECKPOINT is a folder such as `runs/dpo/.../checkpoints/global_step_000100`. Every checkpoint holds
the actor in safetensors, whatever recipe, strategy and ZeRO stage wrote it.
The first command checks the checkpoint against its manifest and copies those files of the actor
that the manifest names, bit for bit unless `--dtype` converts it. It follows no links. OUT is then
an ordinary Hugging Face folder. This works offline, without a GPU, and reads no pickle. With
`--critic` it is PPO's critic instead, a sequence classifier with one label.

Of a run with `--lora_r` the checkpoint holds adapters. OUT is then an ordinary folder of peft. With
`--merge` it is a whole model, the adapter added to its base in fp32; the base must be where the
adapter's config says. `--merge` also takes an adapter in the place of a checkpoint: a folder, such
as a run's `actor/`, or a hub name.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from common import folders

DTYPES = ("float32", "bfloat16", "float16")


def check(checkpoint: Path, out: Path) -> list[str]:
    """Returns the files that the checkpoint's manifest names, after checking them."""
    names = named_in_manifest(checkpoint)
    for name in names:
        if not is_inside(checkpoint, name):
            sys.exit(
                f"{checkpoint} is not a whole checkpoint: its manifest names {name!r}, which is a "
                "link or not in the checkpoint"
            )
    fault = folders.fault_of(checkpoint)
    if fault:
        sys.exit(f"{checkpoint} is not a whole checkpoint: {fault}")
    check_free(out)
    return names


def check_free(out: Path) -> None:
    """Refuses a place that is taken."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        sys.exit(f"{out} exists and is not an empty folder: choose another")


def named_in_manifest(checkpoint: Path) -> list[str]:
    """The names in a checkpoint's manifest; none if it cannot be read, see `folders.fault_of`."""
    try:
        return list(folders.read_json(checkpoint / "manifest.json"))
    except (OSError, ValueError, TypeError):
        return []


def is_inside(checkpoint: Path, name: str) -> bool:
    """Whether a name stays in the checkpoint's folder, without any link on the way."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        return False
    parts = [checkpoint / path, *(checkpoint / parent for parent in path.parents)]
    return not any(part.is_symlink() for part in parts if part != checkpoint)


def copy_files(checkpoint: Path, names: list[str], out: Path) -> None:
    """Copies these files of a checkpoint, and nothing else that is there."""
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(checkpoint / name, out / name, follow_symlinks=False)


def make_temporary(out: Path) -> Path:
    """Returns the name under which `out` is written, free to be used."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    return temporary


# ============================================================ the actor, the critic


def export(
    checkpoint: Path,
    out: Path,
    dtype: str | None = None,
    model: str = "actor",
    merge_adapter: bool = False,
) -> None:
    """Copies `checkpoint/actor`, or another model's folder, to `out`.

    Args:
        checkpoint: a folder `.../checkpoints/global_step_...`; with `merge_adapter` also an
            adapter's folder or hub name.
        out: must not exist, or be an empty folder.
        dtype: one of `DTYPES`, to which floating-point weights are converted; None leaves them as
            they are.
        model: the name of the folder, `actor` or `critic`.
        merge_adapter: write a whole model instead of an adapter.

    Raises:
        SystemExit: the checkpoint is foreign, torn or damaged (with the file and what is wrong with
            it) or has no such model, or `out` is taken; there is no adapter to merge, or no base.
    """
    if merge_adapter:
        temporary = merged(checkpoint, out, model)
    else:
        files = files_of_model(checkpoint, out, model)
        temporary = make_temporary(out)
        copy_files(checkpoint / model, files, temporary)
    if dtype:
        convert(temporary, dtype)
    folders.replace(temporary, out)


def merged(checkpoint: Path, out: Path, model: str) -> Path:
    """Writes the whole model that an adapter makes of its base, and returns where; see `export`."""
    from preference_recipes.models import load, merge  # slow to import

    if load.is_adapter(str(checkpoint)):
        check_free(out)
        temporary = make_temporary(out)
        merge.write(str(checkpoint), temporary)
        return temporary
    files = files_of_model(checkpoint, out, model)
    if "adapter_config.json" not in files:
        sys.exit(f"{checkpoint}: its {model} is whole already: --merge is for runs with --lora_r")
    temporary = make_temporary(out)
    with tempfile.TemporaryDirectory() as adapter:
        copy_files(checkpoint / model, files, Path(adapter))
        merge.write(adapter, temporary)
    return temporary


def files_of_model(checkpoint: Path, out: Path, model: str) -> list[str]:
    """Returns the files of a model that a checkpoint's manifest names, after checking them."""
    names = [name for name in check(checkpoint, out) if name.startswith(f"{model}/")]
    files = [name.removeprefix(f"{model}/") for name in names]
    if "config.json" not in files and "adapter_config.json" not in files:
        if model == "critic":
            sys.exit(f"{checkpoint} holds no critic: only checkpoints of recipes/ppo.py do")
        sys.exit(f"{checkpoint} is not a whole checkpoint: its manifest names no {model}")
    return files


def convert(folder: Path, dtype: str) -> None:
    """Converts the floating-point weights of a Hugging Face folder, and its config with them."""
    from common import actor  # slow to import

    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            names = file.keys()
            tensors = {name: actor.converted(name, file.get_tensor(name), dtype) for name in names}
        save_file(tensors, path, metadata=metadata)
    if (folder / "config.json").is_file():  # an adapter has none
        actor.write_dtype(folder, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m preference_recipes.tools.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="folder .../checkpoints/global_step_...; with --merge also an adapter",
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="convert the weights; default: as they were trained",
    )
    parser.add_argument(
        "--critic",
        action="store_true",
        help="PPO's critic instead of the actor",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="the whole model instead of the adapter, for runs with --lora_r",
    )
    args = parser.parse_args()
    export(
        args.checkpoint,
        args.out,
        dtype=args.dtype,
        model="critic" if args.critic else "actor",
        merge_adapter=args.merge,
    )
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
