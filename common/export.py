"""Takes the actor out of a checkpoint, or makes the checkpoint fit another number of processes.

    python -m common.export runs/dpo/.../checkpoints/global_step_000100 OUT [--dtype bfloat16]
    python -m common.export runs/dpo/.../checkpoints/global_step_000100 OUT --universal

Every checkpoint holds the actor in safetensors, whatever recipe, strategy and ZeRO stage wrote it.
The first command checks the checkpoint against its manifest and copies the actor, bit for bit
unless `--dtype` converts it. OUT is then an ordinary Hugging Face folder. This works offline,
without a GPU, and reads no pickle.

DeepSpeed cuts its own files for the processes that wrote them. With `--universal` OUT is a whole
checkpoint again, from which another number of processes can resume, in the same ZeRO stage and
precision. This reads DeepSpeed's pickles: use it only on checkpoints that you trust.
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
    """Ends the program if there is no whole checkpoint, or if `out` is taken."""
    fault = folders.fault_of(checkpoint)
    if fault:
        sys.exit(f"{checkpoint} is not a whole checkpoint: {fault}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        sys.exit(f"{out} exists and is not an empty folder: choose another")


def make_temporary(out: Path) -> Path:
    """The name under which `out` is written, free to be used."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    return temporary


# ============================================================ the actor


def export(checkpoint: Path, out: Path, dtype: str | None = None) -> None:
    """Copies `checkpoint/actor` to `out`.

    Args:
        checkpoint: a folder `.../checkpoints/global_step_...`.
        out: must not exist, or be an empty folder.
        dtype: one of `DTYPES`, to which floating-point weights are converted; None leaves them as
            they are.

    Raises:
        SystemExit: the checkpoint is foreign, torn or damaged (with the file and what is wrong with
            it), or `out` is taken.
    """
    check(checkpoint, out)
    temporary = make_temporary(out)
    shutil.copytree(checkpoint / "actor", temporary)
    if dtype:
        convert(temporary, dtype)
    folders.replace(temporary, out)


def convert(actor: Path, dtype: str) -> None:
    """Converts the floating-point weights of a Hugging Face folder, and says so in its config."""
    for path in actor.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[name] = tensor.to(getattr(torch, dtype))
        save_file(tensors, path, metadata=metadata)
    config_file = actor / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["dtype"] = dtype
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# ============================================================ a universal checkpoint


def universal(checkpoint: Path, out: Path) -> None:
    """Writes a whole checkpoint, its engine state being DeepSpeed's universal checkpoint.

    Raises:
        SystemExit: as `export`; also if DeepSpeed did not write the checkpoint, or cannot convert
            it.
    """
    from common import checkpoint as checkpoints  # slow to import

    check(checkpoint, out)
    source = checkpoint / "engine" / "pytorch_model"
    if not source.is_dir():
        sys.exit(
            f"{checkpoint} was not written under DeepSpeed: one process and DDP resume from it "
            "as it is, FSDP2 with its own world only"
        )
    temporary = make_temporary(out)
    copy_without(checkpoint, temporary, source)
    convert_engine(source, temporary / "engine" / "pytorch_model")

    state_file = temporary / "state.json"
    state = json.loads(state_file.read_text(encoding="utf-8"))
    world = checkpoints.universal_world(state["arguments"]["world"])
    if world.startswith("DeepSpeed ZeRO-3"):
        steps = step_counts(temporary)
        if len(steps) > 1:
            shutil.rmtree(temporary)
            sys.exit(
                f"{checkpoint}: Adam's step counts differ, {sorted(steps)} (PPO's critic had a "
                "warm-up), and from a universal checkpoint DeepSpeed's ZeRO-3 gives every "
                "parameter the same one. ZeRO-1 and ZeRO-2 keep them apart."
            )
    state["arguments"]["world"] = world
    state["metrics_bytes"] = 0  # of the folder that it will be in
    state_file.write_text(json.dumps(state, indent=1), encoding="utf-8")

    (temporary / "manifest.json").unlink()
    folders.write_manifest(temporary, folders.describe_files(temporary))
    folders.replace(temporary, out)


def copy_without(checkpoint: Path, out: Path, left_out: Path) -> None:
    """Copies a checkpoint but for one folder in it."""

    def ignore(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(folder) / name == left_out]

    shutil.copytree(checkpoint, out, ignore=ignore)


def convert_engine(source: Path, out: Path) -> None:
    """Writes DeepSpeed's universal checkpoint of the engine state in `source`.

    Raises:
        SystemExit: DeepSpeed could not, with the end of what it printed.
    """
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", source, "--output_folder", out]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    command += ["--inject_missing_state"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"DeepSpeed could not convert {source}:\n{result.stderr[-2000:]}")


def step_counts(checkpoint: Path) -> set[float]:
    """The different step counts that Adam has in a universal ZeRO-3 checkpoint."""
    file = checkpoint / "engine" / "pytorch_model" / "zero" / "optimizer_state.pt"
    shared = torch.load(file, weights_only=False)
    moments = shared["optimizer_state_dict"]["state"].values()
    return {float(part["step"]) for part in moments}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m common.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, help="folder .../checkpoints/global_step_...")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="convert the weights; default: as they were trained",
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
