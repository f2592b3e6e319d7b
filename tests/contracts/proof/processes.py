"""Starts a recipe's processes under each launcher, and kills them all."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from common import FILES
from contracts.proof import warm

CONFIGS = FILES / "accelerate_configs"
ACCELERATE = ["-m", "accelerate.commands.launch"]
AUTO = ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "gradient_clipping")


# ============================================================ launchers
def launcher_words(launcher: str, folder: Path) -> list[str]:
    """Returns what is between `python` and the recipe on a command line.

    Args:
        launcher: `plain`; `ddp`, `fsdp2`, `zero1`, `zero2` or `zero3` for two processes; or the
            path of a DeepSpeed JSON for one process.
        folder: where a DeepSpeed JSON is written.
    """
    if launcher == "plain":
        return []
    processes = str(number_of(launcher))
    common_words = ["--num_processes", processes, "--mixed_precision", "no"]
    common_words += ["--main_process_port", "0"]
    if launcher in ("ddp", "fsdp2"):
        return [*ACCELERATE, "--config_file", str(CONFIGS / f"{launcher}.yaml"), *common_words]
    path = launcher
    if not launcher.endswith(".json"):
        path = str(deepspeed_config(folder, int(launcher.removeprefix("zero"))))
    deepspeed_words = ["--use_deepspeed", "--deepspeed_config_file", path]
    alone = ["--num_machines", "1", "--dynamo_backend", "no"]
    return [*ACCELERATE, *deepspeed_words, *alone, *common_words]


def number_of(launcher: str) -> int:
    """Returns how many processes a launcher starts."""
    return 1 if launcher == "plain" or launcher.endswith(".json") else 2


def deepspeed_config(folder: Path, stage: int, **fp16) -> Path:
    """Writes a DeepSpeed JSON and returns its path.

    Args:
        fp16: settings of the loss scale; none for fp32.
    """
    # Threshold 0: so that ZeRO-3 shards even the smallest parameters.
    zero: dict[str, object] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config: dict[str, object] = {"zero_optimization": zero, **dict.fromkeys(AUTO, "auto")}
    if fp16:
        config["fp16"] = {
            "enabled": True,
            "loss_scale": 0.0,
            "loss_scale_window": 1000,
            "min_loss_scale": 1,
            **fp16,
        }
    words = [f"zero{stage}", *(f"{name}{value}" for name, value in sorted(fp16.items()))]
    path = folder / f"{'_'.join(words)}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


# ============================================================ starting
class Slots:
    """Lets as many processes run at once as there are cores, and at least two."""

    def __init__(self):
        self.free = max(2, len(os.sched_getaffinity(0)))
        self.changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, processes: int):
        """Waits until so many processes, one or two, may run, and holds their places."""
        with self.changed:
            self.changed.wait_for(lambda: self.free >= processes)
            self.free -= processes
        try:
            yield
        finally:
            with self.changed:
                self.free += processes
                self.changed.notify_all()


class Fresh:
    """A new interpreter, with the methods of `warm.Process` that are used here."""

    def __init__(self, command: list[str], environment: dict[str, str], console: Path):
        with open(console, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    def poll(self, timeout: float = 0) -> int | None:
        """Returns the exit status, None if it still runs after the timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        return self.process.returncode


Process = warm.Process | Fresh


def start(command: list[str], console: Path, fresh: bool) -> Process:
    """Starts `python *command`.

    Args:
        console: the file of what it prints.
        fresh: in a new interpreter, as a user starts it; else see `warm`.
    """
    environment = {**os.environ, **warm.ENVIRONMENT}
    console.touch()  # a run that is killed at once may not come to it
    if fresh:
        return Fresh(command, environment, console)
    return warm.Process(command, os.getcwd(), environment, str(console))


def end_of(console: Path, most: int = 12) -> str:
    """Returns the last lines of what a run printed, up to where its first process failed.

    The other processes fail after that one because it is gone, and say no more than that.
    """
    text = console.read_text(encoding="utf-8", errors="replace")
    until_failure, _, _ = f"\n{text}".partition(f"\n{warm.FAILED}")
    return "\n".join(until_failure.strip().splitlines()[-most:])


# ============================================================ killing
def kill(process: Process) -> None:
    """Kills a run's processes, and waits until there are none."""
    killed = send_kill(process)
    process.poll(30)
    # Most of them are not this process's children, so nobody tells it when they have ended.
    while any(is_alive(one) for one in killed):
        time.sleep(0.01)


def show_stacks(process: Process) -> None:
    """Has each process of a run print where its threads are; a fresh one ends instead."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, warm.SHOW_STACKS)
    time.sleep(1)


def send_kill(process: Process) -> list[psutil.Process]:
    """Kills a run's processes and returns them: they may need a moment to end.

    They are one process group, and so die at once. But under a real torchrun each worker has a
    group of its own, and a run that has only just begun has none yet.
    """
    running = []
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(process.pid)
        running = [first, *first.children(recursive=True)]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    return running


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs; one that has ended but was not waited for does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
