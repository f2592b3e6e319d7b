"""Arrays that are costly to compute, kept on disk beside the tokenised data."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
from accelerate.utils import gather_object


def cached_array(accelerator, key: list, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """`compute()` or what an earlier run with the same key computed. All ranks must call it, and get the same array.

    Args:
        key: everything the array depends on, as JSON values.
        compute: collective; returns the whole array on every rank.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:32]
    path = Path(datasets.config.HF_DATASETS_CACHE) / "computed" / f"{digest}.npy"
    if all(gather_object([path.is_file()])):  # ranks may see different disks: all read it, or all compute
        accelerator.print(f"taken from the cache: {path}")
        return np.load(path)
    array = compute()
    if accelerator.is_local_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{digest}.{os.getpid()}.npy")
        np.save(temporary, array)
        os.replace(temporary, path)
    accelerator.wait_for_everyone()
    return array
