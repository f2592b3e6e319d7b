"""Starts recipes, under a launcher or not, in processes forked from one that has imported the libraries: most of a short run is that.

Such a process has the command line, environment, folder, process group and signals of its own; what it shares with the others are
the libraries as they were imported, and the seed of Python's hashes. So a part of the tests starts everything as a user does: those of
launchers, YAMLs, several nodes, signals and memory, and the demo in fp32.
"""

import atexit
import gc
import inspect
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

OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # some are read when a library is imported


@cache
def server() -> tuple[tempfile.TemporaryDirectory, subprocess.Popen]:
    """The folder of the socket and the process, which ends with its stdin, of this interpreter's own server. The first call starts it."""
    folder = tempfile.TemporaryDirectory()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder.name}/socket")
        listener.listen()
        command, options = [sys.executable, __file__, str(listener.fileno())], dict(pass_fds=[listener.fileno()], env=os.environ | OFFLINE)
        return folder, subprocess.Popen(command, stdin=subprocess.PIPE, **options)


class Process:
    """A running `python *command`, its stdout and stderr going to the file `output`."""

    def __init__(self, command: list[str], cwd: str | os.PathLike, environment: dict[str, str], output: str):
        self.connection, self.args, self.returncode = Client(f"{server()[0].name}/socket"), command, None
        self.connection.send((command, str(cwd), environment, output))
        self.pid = self.connection.recv()

    def poll(self, timeout: float | None = 0) -> int | None:
        """Its exit status, as `subprocess.Popen` has it, or None if it has not ended within so many seconds."""
        if self.returncode is None and self.connection.poll(timeout):
            self.returncode = self.connection.recv()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode


def serve(listener: socket.socket) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", DEEPSPEED_LOG_LEVEL="warning")  # as the recipes do before they import it
    subprocess.Popen = Forked  # before the launchers take it
    gc.disable()
    import accelerate.commands.launch  # noqa: F401
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    from transformers import AutoModelForSequenceClassification, LlamaForCausalLM  # noqa: F401

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
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    command, cwd, environment, output = connection.recv()
    if (pid := os.fork()) == 0:
        connection.close()
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        become(command, cwd, environment, True, file, file)
    connection.send(pid)
    connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


class Forked(subprocess.Popen):
    """`subprocess.Popen`, with which a launcher starts its processes: in a launcher it forks where Python is to be run."""

    in_launcher = False

    def _execute_child(self, args, *rest):
        if not Forked.in_launcher or args[0] != sys.executable:
            return super()._execute_child(args, *rest)
        names = list(inspect.signature(super()._execute_child).parameters)[1:]
        cwd, environment, new_session, stdout, stderr = (
            rest[names.index(name)] for name in ("cwd", "env", "start_new_session", "c2pwrite", "errwrite")
        )
        sys.stdout.flush()
        self.pid, self._child_created = os.fork(), True
        if self.pid == 0:
            become([word for word in args[1:] if word != "-u"], cwd, environment, new_session, stdout, stderr)


def become(command: list[str], cwd: str | None, environment: dict | None, new_session: bool, stdout: int, stderr: int) -> None:
    """Goes on as `python *command`, and does not return."""
    status = 1
    try:
        if new_session:
            os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        for descriptor, number in ((stdout, 1), (stderr, 2)):
            if descriptor != -1:
                os.dup2(descriptor, number)
        sys.stdout.reconfigure(write_through=True)
        os.chdir(cwd or ".")
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        Forked.in_launcher = command[:2] == ["-m", "accelerate.commands.launch"]
        if Forked.in_launcher:
            from accelerate.commands.launch import main

            sys.argv, sys.path[0] = command[1:], os.getcwd()
            main()
        else:
            sys.argv, sys.path[0] = command, os.path.dirname(os.path.abspath(command[0]))
            runpy.run_path(command[0], run_name="__main__")
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


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
