"""Keeps computed arrays on disk, so that a later run with the same inputs takes them from there."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from accelerate.utils import gather_object

from common import lazily

datasets = lazily("datasets")


def array(accelerator, key: list, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Returns `compute()`, or what an earlier run with the same key computed.

    All processes must call it, and all get the same array.

    Args:
        key: everything the array depends on, as JSON values.
        compute: collective; returns the whole array on every process.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:32]
    path = Path(datasets.config.HF_DATASETS_CACHE) / "computed" / f"{digest}.npy"
    # Processes may see different disks. `compute` is collective, so all read or all compute.
    if all(gather_object([path.is_file()])):
        accelerator.print(f"taken from the cache: {path}")
        return np.load(path)

    result = compute()
    if accelerator.is_local_main_process:
        write(path, result)
    accelerator.wait_for_everyone()
    return result


def write(path: Path, result: np.ndarray) -> None:
    """Writes an array under a temporary name, then renames it: no reader meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.npy")
    np.save(temporary, result)
    os.replace(temporary, path)
