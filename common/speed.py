"""What `perf/*` of a log line tells: samples and tokens per second, seconds, memory, MFU."""

import contextlib
import time

import torch
from accelerate import Accelerator

from common.progress import Progress

# Dense half-precision operations per second with fp32 sums, from NVIDIA's data sheets, by the name
# that torch gives. Other GPUs, and parts of one (MIG), log no MFU.
PEAK_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165e12,
    "Tesla V100-SXM2-32GB": 125e12,
    "Tesla V100-SXM2-16GB": 125e12,
}


class Speed:
    """Measures the seconds since the last log line, and what was done in them.

    Attributes:
        flop_of_token, flop_of_target: operations, see `cost.flop`.
        seconds: of the blocks that were timed since the last line, by name.
        peak: operations a second that this GPU can do at most; None: not known, so no MFU.
        pending_flop, flop: operations of this process in the current update, and in those applied
            since the last line; float64 on the device, so that no GPU waits for them.
    """

    def __init__(self, accelerator: Accelerator, progress: Progress, flop: tuple[float, float]):
        self.accelerator = accelerator
        self.progress = progress
        self.flop_of_token, self.flop_of_target = flop
        self.seconds: dict[str, float] = {}
        self.peak = None
        if accelerator.device.type == "cuda":
            self.peak = PEAK_FLOPS.get(torch.cuda.get_device_name())
        self.pending_flop = torch.zeros(1, dtype=torch.float64, device=accelerator.device)
        self.flop = torch.zeros_like(self.pending_flop)
        self.restart()

    def restart(self) -> None:
        """Starts the clock of the next line."""
        # A name once timed stays in every line, if only as 0.
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.flop.zero_()
        self.since = time.perf_counter()
        self.samples_before = self.progress.samples
        self.tokens_before = self.progress.tokens

    @contextlib.contextmanager
    def timed(self, name: str):
        """Adds the seconds of a block to `perf/<name>_seconds` of the next line.

        `paused` stands for evaluating and saving: `perf/*` leaves these seconds out.
        """
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def count_flop(self, batch: dict, weights: torch.Tensor) -> None:
        """Counts the operations of a batch of `Packer.make_batch`, for `perf/mfu`."""
        if self.peak is not None:
            of_tokens = self.flop_of_token * batch["n_tokens"]
            of_targets = self.flop_of_target * len(batch["targets"])
            self.pending_flop += (of_tokens + of_targets) * weights.amax()  # 0: padding alone

    def update_done(self, applied: bool) -> None:
        """Counts the operations of an update if it was applied."""
        if applied:
            self.flop += self.pending_flop
        self.pending_flop.zero_()

    def values(self) -> dict[str, float]:
        """Returns `perf/*` of the time since the last line. All processes must call it."""
        elapsed = time.perf_counter() - self.since - self.seconds.get("paused", 0.0)
        values = {
            "perf/samples_per_second": (self.progress.samples - self.samples_before) / elapsed,
            "perf/tokens_per_second": (self.progress.tokens - self.tokens_before) / elapsed,
        }
        for name, seconds in self.seconds.items():
            if name != "paused":
                values[f"perf/{name}_seconds"] = seconds
        if self.accelerator.device.type == "cuda":
            values["perf/peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if self.peak is not None:
            mean_of_processes = self.accelerator.reduce(self.flop, "mean").item()
            if mean_of_processes:
                values["perf/mfu"] = mean_of_processes / elapsed / self.peak
        return values
