"""Checkpoints that are whole or not there, and resuming from them."""

import json
import random
import shutil
import sys
import types
import zlib
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import DistributedType, broadcast_object_list, gather_object, set_seed
from safetensors.torch import load_model, save_model

from .launch import describe, engine_precision
from .metrics import Means
from .models import reshard
from .saving import by_step, flush, flush_entry, rotate, save_actor

# A resumed run may differ in these; in all others it must agree with the checkpoint.
MAY_CHANGE = {"output_dir", "max_epochs", "max_steps", "logging_steps", "eval_steps", "save_steps", "save_total_limit",
              "save_actor_steps", "save_actor_limit", "resume", "report_to", "micro_train_batch_size", "max_new_tokens",
              "gradient_checkpointing", "attn_implementation", "eval_dataset_name", "eval_dataset_split",
              "precompute_ref_log_probs", "dataset_name", "micro_rollout_batch_size", "share_prompts"}  # fmt: skip


class Run(types.SimpleNamespace):
    """All that a checkpoint holds: `accelerator args optimizer scheduler tokenizer progress metrics`, and

    Attributes:
        model, unwrapped: what `accelerator.prepare` returned, and the `LogProbModel` inside it.
        data_fingerprint: of the tokenised training set; it stands for data, tokenizer and lengths.
        extra: what else the recipe carries from update to update, the same on all ranks: tensors, numbers, lists and dicts of them.
    """

    extra: dict | None = None

    @property
    def folder(self) -> Path:
        return Path(self.args.output_dir) / "checkpoints"

    @property
    def identity(self) -> dict:
        """What a run must share with the checkpoint it resumes from; a sharded state needs the same world, too."""
        world = f"{describe(self.accelerator)} with {self.accelerator.num_processes} processes"
        return {**vars(self.args), "data": self.data_fingerprint, "world": world if self.sharded else engine_precision(self.accelerator)}

    @property
    def sharded(self) -> bool:
        return self.accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)


def save_checkpoint(run: Run) -> None:
    """Writes `checkpoints/global_step_...` under another name, flushes it, renames it, then deletes the oldest. All ranks call it."""
    accelerator = run.accelerator
    final = run.folder / f"global_step_{run.progress.global_step:06d}"
    temporary = run.folder / f".{final.name}.writing"
    if accelerator.is_main_process:
        for leftover in run.folder.glob(".*.writing"):  # of a run that was killed while saving
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    reshard(run.model)
    if run.sharded:
        accelerator.save_state(str(temporary / "engine"))
    elif accelerator.is_main_process:
        (temporary / "engine").mkdir()
        save_model(run.unwrapped, temporary / "engine" / "model.safetensors")
        scaler = accelerator.scaler.state_dict() if accelerator.scaler else None
        torch.save({"optimizer": run.optimizer.state_dict(), "scaler": scaler}, temporary / "engine" / "optimizer.pt")
    save_actor(accelerator, run.model, run.unwrapped, run.tokenizer, temporary / "actor")
    torch.save(rank_state(run), temporary / f"rank_{accelerator.process_index:05d}.pt")
    if accelerator.is_main_process:
        torch.save(run.extra, temporary / "extra.pt")
        write_json(temporary / "state.json", main_state(run))
    accelerator.wait_for_everyone()
    flush(temporary)  # on every rank: each flushes what its own node holds back
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    mine = files[accelerator.process_index :: accelerator.num_processes]
    sums = gather_object([(str(path.relative_to(temporary)), path.stat().st_size, checksum(path)) for path in mine])
    if accelerator.is_main_process:
        write_json(temporary / "manifest.json", {name: [size, crc] for name, size, crc in sorted(sums)})
        flush_entry(temporary)
        if final.exists():  # not whole, or the run would have gone on from it
            shutil.rmtree(final)
        temporary.rename(final)
        flush_entry(run.folder)
        rotate(run.folder, run.args.save_total_limit)
    accelerator.wait_for_everyone()


def resume(run: Run) -> None:
    """Puts a run where `--resume` says: at a checkpoint, or (auto, and none was ever written) at the start. All ranks call it.

    Raises:
        SystemExit: no whole checkpoint though there are some, or one of another run: the difference is shown.
    """
    set_seed(run.args.seed, device_specific=True)  # models were made alike on all ranks; dropout differs between them
    if run.args.resume == "never":
        return run.metrics.start()
    accelerator, found = run.accelerator, [None, None]
    if accelerator.is_main_process:
        found = find_checkpoint(run)
    path, problem = broadcast_object_list(list(found))
    if problem:
        sys.exit(problem)
    metrics_size = 0
    if path is None:
        accelerator.print(f"no checkpoint in {run.folder}: starting from the beginning")
    else:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        check_same_run(run, path, state)
        load(run, path, state)
        same_directory = path.parent.resolve() == run.folder.resolve()
        metrics_size = state["metrics_bytes"] if same_directory else 0
        if same_directory and accelerator.is_main_process:  # like the lines beyond it: they are of the run that is left behind
            for later in [*by_step(run.folder), *by_step(run.folder.parent / "actors")]:
                if int(later.name.split("_")[-1]) > run.progress.global_step:
                    shutil.rmtree(later)
        accelerator.print(f"resumed from {path}: {run.progress.global_step} updates, {run.progress.windows_seen} windows seen")
    run.metrics.start(metrics_size)
    accelerator.wait_for_everyone()


def find_checkpoint(run: Run) -> tuple[Path | None, str | None]:
    """(the checkpoint to take or None, what is wrong or None); names those passed over."""
    if run.args.resume != "auto":
        path = Path(run.args.resume)
        fault = fault_of(path)
        return path, f"--resume {path}: not a whole checkpoint: {fault}" if fault else None
    candidates = by_step(run.folder)[::-1]
    for path in candidates:
        fault = fault_of(path)
        if fault is None:
            return path, None
        run.accelerator.print(f"passed over {path}: {fault}")
    if candidates:
        none_whole = f"none of the {len(candidates)} checkpoints in {run.folder} is whole. Choose another --output_dir to start anew."
        return None, f"--resume auto: {none_whole}"
    finished = (run.folder.parent / "actor").exists()
    return None, f"--resume auto: the run in {run.folder.parent} has ended and left no checkpoint" if finished else None


def fault_of(path: Path) -> str | None:
    """What keeps a folder from being a whole checkpoint; None if nothing does."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        for name, (size, crc) in manifest.items():
            if (path / name).stat().st_size != size:
                return f"{name} has {(path / name).stat().st_size} bytes, not {size}"
            if checksum(path / name) != crc:
                return f"{name} has another checksum than when it was written"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (ValueError, TypeError, AttributeError, OSError) as error:
        return f"manifest.json cannot be read: {error}"
    return None if "state.json" in manifest else "its manifest does not name state.json"


def check_same_run(run: Run, path: Path, state: dict) -> None:
    """Refuses a checkpoint of other data, another algorithm's settings, or another world where that cannot be loaded."""
    now = run.identity
    differences = [
        f"{name}: {before!r} in the checkpoint, {now.get(name)!r} now"
        for name, before in state["arguments"].items()
        if name not in MAY_CHANGE and now.get(name) != before
    ]
    if differences:
        sys.exit(f"--resume: {path} is of another run: {'; '.join(differences)}")


def main_state(run: Run) -> dict:
    counters = ("global_step", "skipped_steps", "windows_seen", "samples", "tokens")
    scheduler = {name: value for name, value in run.scheduler.state_dict().items() if name != "lr_lambdas"}
    return {
        "arguments": run.identity,
        "progress": {name: getattr(run.progress, name) for name in counters},
        "scheduler": scheduler,
        "last_update": run.metrics.last_update,
        "metrics_bytes": run.metrics.file.stat().st_size if run.metrics.file.exists() else 0,
    }


def rank_state(run: Run) -> dict:
    """What each process has of its own: random states, and the sums of the log line not yet written."""
    return {
        "python": random.getstate(),
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(run.accelerator.device) if torch.cuda.is_available() else None,
        "open_sums": {name: value.cpu() for name, value in run.metrics.open.sums.items()},
    }


def load(run: Run, path: Path, state: dict) -> None:
    """Reads a verified checkpoint into the run."""
    accelerator, rank = run.accelerator, run.accelerator.process_index
    reshard(run.model)
    if run.sharded:
        accelerator.load_state(str(path / "engine"))
        accelerator.step = 0
    else:
        load_model(run.unwrapped, path / "engine" / "model.safetensors")
        saved = torch.load(path / "engine" / "optimizer.pt", map_location="cpu", weights_only=True)
        run.optimizer.load_state_dict(saved["optimizer"])
        if accelerator.scaler:
            accelerator.scaler.load_state_dict(saved["scaler"])
    run.scheduler.load_state_dict({**state["scheduler"], "lr_lambdas": [None] * len(run.scheduler.base_lrs)})
    run.metrics.last_update = state["last_update"]
    run.extra = torch.load(path / "extra.pt", weights_only=True)
    for name, value in state["progress"].items():
        setattr(run.progress, name, value)
    files = sorted(path.glob("rank_*.pt"))
    same_world = accelerator.num_processes == len(files)
    for part in (torch.load(file, weights_only=True) for file in (files[rank : rank + 1] if same_world else files)):
        for name, value in part["open_sums"].items():  # of another number of processes rank 0 takes all, the others the names
            run.metrics.open.merge(name, value.to(accelerator.device) if same_world or rank == 0 else Means.nothing(accelerator.device))
    if same_world:
        random.setstate(part["python"])
        np.random.set_state(tuple(part["numpy"]))
        torch.set_rng_state(part["torch"])
        if part["cuda"] is not None:
            torch.cuda.set_rng_state(part["cuda"], accelerator.device)
    else:  # the data order goes on exactly; random states cannot
        accelerator.print(f"note: {len(files)} processes before, {accelerator.num_processes} now: dropout, if any, is drawn anew")


def checksum(path: Path) -> int:
    """CRC-32 of a file: finds what storage damages; it is no signature."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(2**22):
            value = zlib.crc32(block, value)
    return value


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1, default=str), encoding="utf-8")
    flush_entry(path)
