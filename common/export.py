"""Takes the actor out of a full checkpoint: an ordinary Hugging Face folder, offline, without a GPU, without reading a pickle.

    python -m common.export runs/dpo/.../checkpoints/global_step_000100 OUT [--dtype bfloat16]
    python -m common.export runs/dpo/.../checkpoints/global_step_000100 OUT --universal

Every checkpoint, whatever recipe, strategy and ZeRO stage wrote it, holds the actor in safetensors beside the engine's own files. This
verifies it against the checkpoint's manifest and copies it, bit for bit unless `--dtype` converts it.

With `--universal` OUT is a whole checkpoint again, which another number of processes can resume from, in the same ZeRO stage and precision:
DeepSpeed's own is cut for the processes that wrote it. This reads DeepSpeed's pickles: only use it on checkpoints you trust.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from common import folders

DTYPES = ("float32", "bfloat16", "float16")


def check(checkpoint: Path, out: Path) -> None:
    fault = folders.fault_of(checkpoint)
    if fault:
        sys.exit(f"{checkpoint} is not a whole checkpoint: {fault}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        sys.exit(f"{out} exists and is not an empty folder: choose another")
    out.parent.mkdir(parents=True, exist_ok=True)


def export(checkpoint: Path, out: Path, dtype: str | None = None) -> None:
    """Copies `checkpoint/actor` to `out`.

    Args:
        checkpoint: a folder `.../checkpoints/global_step_...`.
        out: must not exist, or be an empty folder.
        dtype: converts floating-point weights; None leaves them as they are.

    Raises:
        SystemExit: a foreign, torn or damaged checkpoint (the file and what is wrong with it), or an `out` that is taken.
    """
    check(checkpoint, out)
    temporary = out.with_name(f".{out.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(checkpoint / "actor", temporary)
    if dtype:
        for path in temporary.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            convert = {
                n: t.to(getattr(torch, dtype)) if t.is_floating_point() else t
                for n, t in tensors.items()
            }
            save_file(convert, path, metadata=metadata)
        config = json.loads((temporary / "config.json").read_text(encoding="utf-8"))
        (temporary / "config.json").write_text(
            json.dumps({**config, "dtype": dtype}, indent=2) + "\n", encoding="utf-8"
        )
    folders.replace(temporary, out)


def universal(checkpoint: Path, out: Path) -> None:
    """Writes a whole checkpoint whose engine state is DeepSpeed's universal checkpoint; `--resume OUT` takes it.

    Raises:
        SystemExit: see `export`; a checkpoint that DeepSpeed did not write, or cannot convert.
    """
    check(checkpoint, out)
    source = checkpoint / "engine" / "pytorch_model"
    if not source.is_dir():
        sys.exit(
            f"{checkpoint} was not written under DeepSpeed: one process and DDP resume from it as it is, FSDP2 with its own world only"
        )
    temporary = out.with_name(f".{out.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(
        checkpoint,
        temporary,
        ignore=lambda folder, names: ["pytorch_model"] if Path(folder).name == "engine" else [],
    )
    command = [
        sys.executable,
        "-m",
        "deepspeed.checkpoint.ds_to_universal",
        "--inject_missing_state",
        "--num_extract_workers",
        "1",
    ]
    command += [
        "--num_merge_workers",
        "1",
        "--input_folder",
        source,
        "--output_folder",
        temporary / "engine" / "pytorch_model",
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"DeepSpeed could not convert {source}:\n{result.stderr[-2000:]}")
    state = json.loads((temporary / "state.json").read_text(encoding="utf-8"))
    state["arguments"]["world"] = state["arguments"]["world"].partition(" on ")[
        0
    ]  # stage and precision: these must stay
    if state["arguments"]["world"].startswith("DeepSpeed ZeRO-3"):
        shared = torch.load(
            temporary / "engine/pytorch_model/zero/optimizer_state.pt", weights_only=False
        )
        steps = {float(part["step"]) for part in shared["optimizer_state_dict"]["state"].values()}
        if len(steps) > 1:
            shutil.rmtree(temporary)
            sys.exit(
                f"{checkpoint}: Adam's step counts differ, {sorted(steps)} (PPO's critic had a warm-up), and from a universal checkpoint "
                "DeepSpeed's ZeRO-3 gives every parameter the same one. ZeRO-1 and ZeRO-2 keep them apart."
            )
    (temporary / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    (temporary / "manifest.json").unlink()
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    manifest = {
        str(path.relative_to(temporary)): [path.stat().st_size, folders.checksum(path)]
        for path in files
    }
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    folders.replace(temporary, out)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m common.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help="folder .../checkpoints/global_step_...")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="convert the weights; default: as they were trained"
    )
    parser.add_argument(
        "--universal",
        action="store_true",
        help="a whole checkpoint for another number of processes, not the actor",
    )
    args = parser.parse_args()
    if args.universal and args.dtype:
        parser.error("--dtype is for the actor, --universal keeps every weight as it is")
    if args.universal:
        universal(args.checkpoint, args.out)
    else:
        export(args.checkpoint, args.out, args.dtype)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
