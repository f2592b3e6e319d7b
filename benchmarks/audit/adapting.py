"""What the adapters of benchmarks/audit.py have in common. It needs nothing but Python.

An adapter is a script that is run by its program's own virtual environment:

    python trl_adapter.py describe      prints a `Description` as JSON
    python trl_adapter.py serve         reads names of files from stdin, each with a `Request`, trains as
                                        it says, and writes what came of it

What a run leaves in the folder `Request.output`:

    console.txt      what it printed
    log.jsonl        what the program logged, a JSON object a line: `step` and its own tags
    weights.json     Hugging Face folders by the number of updates that made them
    rows.jsonl       the token ids that it trained on, see `Row`
    samples-*.jsonl  for grpo and rloo: what it sampled, see `Sample`
"""

import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

GROUP = 4  # responses to a prompt
LONGEST_RESPONSE = 12  # tokens
PACKED_LENGTH = 128  # tokens: so that sixteen rows make several packed ones


class Request(NamedTuple):
    """One training run.

    Attributes:
        work: sft, dpo, reward, kto, grpo or rloo.
        model: a Hugging Face folder in fp32.
        data: a .jsonl file in TRL's formats.
        output: the folder to write to.
        samples: of an update, over all processes; for grpo and rloo responses.
        micro: samples that a process runs at once.
        processes: on this machine.
        epochs: passes over the data.
        learning_rate: its peak; it falls linearly to 0, without warm-up.
        adam_epsilon: so large that an update is nearly proportional to its gradient: then Adam does
            not hide a factor.
        max_grad_norm: so large that nothing is clipped.
        logging_steps: updates between log lines.
        save_steps: updates between checkpoints.
        pad_to: 0, or a number that padded rows must be a multiple of, where the program can do so.
        packing: whether rows are packed, where the program can do so.
        resume: a checkpoint of another run to go on from, as `weights.json` names it; or empty.
        seed: of the data order and of dropout.
    """

    work: str
    model: str
    data: str
    output: str
    samples: int
    micro: int
    processes: int
    epochs: int
    learning_rate: float
    adam_epsilon: float
    max_grad_norm: float
    logging_steps: int
    save_steps: int
    pad_to: int
    packing: bool
    resume: str
    seed: int

    @property
    def accumulation(self) -> int:
        return self.samples // (self.micro * self.processes)

    def rows(self) -> list[dict]:
        return read_lines(Path(self.data))


class Description(NamedTuple):
    """What a program is, and what its tags mean.

    Attributes:
        program: its name.
        packages: those whose versions are recorded.
        tags: for each work that it has, its tags by the names of `expected.py`.
        cannot: why it cannot be asked something: the reason by question, or by `work question`.
        definitions: for each work, which of the definitions in `expected.py` is its own.
        rounded: by how much a tag is rounded where it is logged.
        notes: what a reader must know of its settings here.
    """

    program: str
    packages: list[str]
    tags: dict[str, dict[str, str]]
    cannot: dict[str, str]
    definitions: dict[str, dict[str, str]]
    rounded: dict[str, float]
    notes: list[str]


class Row(NamedTuple):
    """A sequence that was trained on: all its token ids, and which of them are learned."""

    ids: list[int]
    targets: list[int]


class Sample(NamedTuple):
    """A response that was sampled, its end token with it, and its reward.

    Attributes:
        step: updates before it was sampled.
    """

    step: int
    prompt_ids: list[int]
    response_ids: list[int]
    reward: float


def main(
    description: Description,
    train: Callable[[Request], None],
    libraries: list[str] | None = None,
) -> None:
    """The adapter's command line.

    Args:
        libraries: what `train` imports. They are imported once, and each process of each run is
            forked from that. Without them `train` itself starts its program's command.
    """
    if sys.argv[1] == "describe":
        from importlib.metadata import version

        versions = {name: version(name) for name in description.packages}
        print(json.dumps({**description._asdict(), "versions": versions}))
        return
    for name in libraries or []:
        importlib.import_module(name)
    for line in sys.stdin:
        request = read(Path(line.strip()))
        console = os.open(Path(request.output) / "console.txt", os.O_WRONLY | os.O_CREAT, 0o644)
        if libraries:
            started = run_processes(request, train, console)
            status = int(any([os.waitpid(pid, 0)[1] for pid in started]))
        else:
            status = call(train, request, console)
        os.close(console)
        print(f"ended {status}", flush=True)


def call(train: Callable, request: Request, console: int) -> int:
    """Trains in this process; returns the exit status that a process of its own would have."""
    try:
        train(request)
    except Exception:
        os.write(console, traceback.format_exc().encode())
        return 1
    return 0


def run_processes(request: Request, train: Callable, console: int) -> list[int]:
    """Forks the processes of a run as torchrun starts them, and returns their ids."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started = []
    for rank in range(request.processes):
        environment = {}
        if request.processes > 1:
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(request.processes),
                "LOCAL_WORLD_SIZE": str(request.processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        started.append(run_process(train, request, console, environment))
    return started


def run_process(train: Callable, request: Request, console: int, environment: dict) -> int:
    """Forks a process that trains and ends; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.dup2(console, 1)
        os.dup2(console, 2)
        os.environ.update(environment)
        train(request)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def read(file: Path) -> Request:
    return Request(**json.loads(file.read_text(encoding="utf-8")))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    return rank() == 0


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def append(path: Path, line: Any) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def write_weights(request: Request, folders: dict[int, Path]) -> None:
    """Writes where the weights are after each number of updates; before the first, the model."""
    named = {step: str(path) for step, path in folders.items()}
    text = json.dumps({0: request.model, **named})
    (Path(request.output) / "weights.json").write_text(text, encoding="utf-8")


def write_sample(request: Request, sample: Sample) -> None:
    """Each process has a file of its own."""
    name = f"samples-{rank()}.jsonl"
    append(Path(request.output) / name, sample)


# ============================================================ responses


def scripted_response(prompt: str, number: int) -> str:
    """Returns what a prompt is answered with where a program's own sampling depends on its split.

    Of 1 to 12 digits; a response of 12 is cut by `LONGEST_RESPONSE`, and has no end token.

    Args:
        number: which response of its group, from 0.
    """
    seed = sum(prompt.encode()) + 31 * number
    length = 1 + seed * (number + 3) % LONGEST_RESPONSE
    return "".join(str((seed // (place + 1) + place * number) % 10) for place in range(length))


def reward(response: str) -> float:
    """Returns a score that depends on the response alone."""
    return sum(map(int, filter(str.isdigit, response))) % 7 + 0.25 * len(response)
