"""Takes the actor out of a full checkpoint: an ordinary Hugging Face folder, offline, without a GPU, without reading a pickle.

    python -m common.export runs/dpo/.../checkpoints/global_step_000100 OUT [--dtype bfloat16]

Every checkpoint, whatever recipe, strategy and ZeRO stage wrote it, holds the actor in safetensors beside the engine's own files. This
verifies it against the checkpoint's manifest and copies it, bit for bit unless `--dtype` converts it.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from common.checkpoint import fault_of, replace_directory

DTYPES = ("float32", "bfloat16", "float16")


def export(checkpoint: Path, out: Path, dtype: str | None = None) -> None:
    """Copies `checkpoint/actor` to `out`.

    Args:
        checkpoint: a folder `.../checkpoints/global_step_...`.
        out: must not exist, or be an empty folder.
        dtype: converts floating-point weights; None leaves them as they are.

    Raises:
        SystemExit: a foreign, torn or damaged checkpoint (the file and what is wrong with it), or an `out` that is taken.
    """
    fault = fault_of(checkpoint)
    if fault:
        sys.exit(f"{checkpoint} is not a whole checkpoint: {fault}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        sys.exit(f"{out} exists and is not an empty folder: choose another")
    temporary = out.with_name(f".{out.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(checkpoint / "actor", temporary)
    if dtype:
        for path in temporary.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            convert = {n: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for n, t in tensors.items()}
            save_file(convert, path, metadata=metadata)
        config = json.loads((temporary / "config.json").read_text(encoding="utf-8"))
        (temporary / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")
    replace_directory(temporary, out)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m common.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="folder .../checkpoints/global_step_...")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="convert the weights; default: as they were trained")
    args = parser.parse_args()
    export(args.checkpoint, args.out, args.dtype)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
