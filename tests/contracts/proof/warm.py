"""Starts recipes, under a launcher or not, in processes forked from one that imported everything.

A short run spends most of its time on imports. A forked run has its own command line, environment,
folder, process group and signals. It shares the imported libraries, and the seed of Python's
hashes.

Under `accelerate launch` accelerate itself reads the YAML and the flags and sets the environment.
Only torchrun, which would start new interpreters, is replaced: `run_ranks` forks the processes of
the world. So some runs start everything as a user does: `fresh` in `Bench.run` and in `launch`.
"""

import atexit
import contextlib
import gc
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from functools import cache
from multiprocessing.connection import Client, Connection

# Libraries read these when they are imported. One thread adds sums in the same order everywhere.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# What DeepSpeed imports inside `initialize`. Its Muon imports PyTorch's compiler, which takes
# seconds in each process.
LATE = [
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "peft",
    "torch._functorch.aot_autograd",
]
# The beginning of the line that names the process of a world that failed first.
FAILED = "the process that failed first:"


def aborted_at_exit(output: str) -> bool:
    """Whether a run was done, and then torch's gloo threads aborted it, as they do now and then."""
    return "\ndone: " in output and "terminate called without an active exception" in output


# Names the socket of a server that runs already: set by the process that starts one, for what it starts.
ADDRESS = "WARM_SERVER"


@cache
def server() -> tuple[tempfile.TemporaryDirectory, subprocess.Popen]:
    """Starts a server, which ends when its stdin is closed; returns the folder of its socket, and it."""
    folder = tempfile.TemporaryDirectory()
    os.environ[ADDRESS] = f"{folder.name}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[ADDRESS])
        listener.listen()
        number = listener.fileno()
        return folder, subprocess.Popen(
            [sys.executable, __file__, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # of the imports
            stderr=subprocess.DEVNULL,
            pass_fds=[number],
            env=os.environ | ENVIRONMENT,
        )


class Process:
    """A running `python *command`, its stdout and stderr going to the file `output`."""

    def __init__(
        self, command: list[str], cwd: str | os.PathLike, environment: dict[str, str], output: str
    ):
        self.args = command
        self.output = output
        self.returncode = None
        if ADDRESS not in os.environ:
            server()
        self.connection = Client(os.environ[ADDRESS])
        self.connection.send((command, str(cwd), environment, output))
        self.pid = self.connection.recv()

    def poll(self, timeout: float | None = 0) -> int | None:
        """Returns the exit status, as `Popen.poll` does; None if it still runs at the timeout."""
        if self.returncode is None and self.connection.poll(timeout):
            self.returncode = self.connection.recv()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status, as `Popen.wait` does."""
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode


def import_libraries() -> None:
    """Imports and computes once what each run would while it starts."""
    os.environ.update(DS_ACCELERATOR="cpu", DEEPSPEED_LOG_LEVEL="warning")  # as the recipes do
    import accelerate.commands.launch
    import datasets  # noqa: F401
    import deepspeed
    import torch.distributed.run
    import torch.utils.tensorboard
    from transformers import AutoModelForSequenceClassification, LlamaForCausalLM  # noqa: F401

    accelerate.commands.launch.simple_launcher = run_alone
    torch.distributed.run.run = run_ranks
    # The rest only saves time: another version may have other names, and peft is an extra.
    for name in LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError, AttributeError, KeyError):
        _ = deepspeed.ops.__compatible_ops__["async_io"]  # runs a compiler
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")  # compiles a thousand regular expressions


def serve(listener: socket.socket) -> None:
    """Imports everything, and forks a process for each connection."""
    gc.disable()
    import_libraries()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked here
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
    while True:
        connection = Connection(listener.accept()[0].detach())
        if os.fork() == 0:
            listener.close()
            wait_for_one(connection)
        connection.close()


def wait_for_one(connection: Connection) -> None:
    """Forks the run that is asked for, and sends its process id, then its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    command, cwd, environment, output = connection.recv()
    pid = os.fork()
    if pid == 0:
        connection.close()
        become(lambda: start(command, cwd, environment, output))
    connection.send(pid)
    connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def become(function) -> None:
    """Calls a function as if this process did nothing else, and exits."""
    status = 1
    try:
        function()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def start(command: list[str], cwd: str, environment: dict[str, str], output: str) -> None:
    """Continues as `python *command` in a session of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if command[:2] == ["-m", "accelerate.commands.launch"]:
        from accelerate.commands.launch import main

        sys.argv = command[1:]
        main()
    else:
        run_script(command)


def run_script(command: list[str]) -> None:
    """Runs a script in this process, as `python *command` does."""
    sys.argv = command
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [os.path.dirname(os.path.abspath(command[0])), *named]
    runpy.run_path(command[0], run_name="__main__")


def run_alone(args) -> None:
    """Takes the place of accelerate's launcher of a single process: continues as that process."""
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    _, environment = prepare_simple_launcher_cmd_env(args)
    os.environ.update(environment)
    run_script([args.training_script, *args.training_script_args])


def run_ranks(args) -> None:
    """Takes the place of torchrun: forks the processes of one node; if one fails, it ends all.

    As with torchrun this process keeps the store, so that none of them waits for another one to
    end. The store is a thread and begins after the forks. Processes that connect before that wait
    in the socket's queue.
    """
    from torch.distributed import TCPStore

    processes = int(args.nproc_per_node)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    os.environ.update(
        TORCHELASTIC_RUN_ID="none",
        WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    running = set()
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            listener.close()
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            become(lambda: run_script([args.training_script, *args.training_script_args]))
        running.add(pid)
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    failed = False
    while running:
        pid, status = os.waitpid(-1, 0)
        running.discard(pid)
        if status and not failed:
            failed = True
            status = os.waitstatus_to_exitcode(status)
            print(f"{FAILED} {pid}, status {status}", file=sys.stderr)
            for other in running:
                os.kill(other, signal.SIGTERM)
    del store
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
