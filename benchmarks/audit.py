"""Asks trainers what `make prove` asks our recipes: is the update the same, are its numbers right?

    python benchmarks/audit.py trl                                 TRL, all its works, in an environment made anew
    python benchmarks/audit.py ours --works sft dpo                our recipes, in this environment
    python benchmarks/audit.py trl --works dpo --repeats 2 --results

A program is asked through an adapter, `audit/PROGRAM_adapter.py`, that says how its trainers are
called and what their tags mean. All programs get the same tiny model and rows, in fp32 on the CPU.
Most questions are asked of data that are one update long, so that no order of the data matters:

    split         4 micro-batches of 4 give the update of 1 micro-batch of 16
    processes     so do 2 processes with 2 micro-batches of 4 each
    packed        so do rows that are packed, where the trainer can do that
    padding       so do rows that are padded to a multiple of 64; their logged numbers are right
    last-update   6 samples give one update, whether it could hold 6 or 16; on 2 processes, too
    numbers       each logged number is that of the whole update, in each of these runs
    log-lines     a line after every `logging_steps` updates, which has the means since the last one
    resume        a run that goes on from a checkpoint ends as the one that was never stopped

"The same" is up to the rounding of fp32: the weights' distance is at most 1e-4 of the way that they
went, a logged number is at most 1e-5 of its size (at least of 1), a gradient norm 1e-4, from what
audit/expected.py computes anew, in fp64, from the weights that the program itself saved.

A result is `holds`, `does not hold` (by how much, in which number) or `could not be asked` (why).
`--repeats 2` does everything twice, each time in an environment, a cache and folders made anew, and
says by how much the second time differs. `--results` writes benchmarks/audit/PROGRAM.json, of which
the table in docs/counting.md is made: `python benchmarks/audit.py --page`.
"""

import argparse
import datetime
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
sys.path.insert(0, str(HERE / "audit"))

import expected  # noqa: E402
import inputs  # noqa: E402
import torch  # noqa: E402
from adapting import GROUP, Request, Row, Sample, read_lines  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers.utils import logging  # noqa: E402

RESULTS = HERE / "audit"
PAGE = REPOSITORY / "docs" / "counting.md"
BEGIN = "<!-- tables of the audit -->"
END = "<!-- end of the audit's tables -->"

ROLLOUTS = ("grpo", "rloo")
UPDATE = 16  # samples
UPDATES = 4
SHORT = 6  # samples
# Of the runs that are resumed: updates of 8, 8 and 6 samples, twice.
RESUMED_ROWS = 22
RESUMED_UPDATE = 8
WEIGHTS_BOUND = 1e-4
NUMBERS_BOUND = 1e-5
GRADIENT_BOUND = 1e-4


class Unasked(Exception):
    """Why a question could not be asked."""


class Check(NamedTuple):
    """One comparison.

    Attributes:
        what: was compared.
        distance: how far it is off; NaN or infinite: it cannot be compared.
        bound: how far it may be off.
        where: the number that is farthest off, with both of its values.
    """

    what: str
    distance: float
    bound: float
    where: str

    @property
    def holds(self) -> bool:
        return self.distance <= self.bound


class Finished(NamedTuple):
    """A run that has ended."""

    request: Request
    folder: Path

    @property
    def lines(self) -> list[dict]:
        file = self.folder / "log.jsonl"
        return read_lines(file) if file.exists() else []

    @property
    def weights(self) -> dict[int, Path]:
        found = json.loads((self.folder / "weights.json").read_text(encoding="utf-8"))
        return {int(step): Path(path) for step, path in found.items()}

    @property
    def samples(self) -> list[Sample]:
        files = sorted(self.folder.glob("samples-*.jsonl"))
        return [Sample(*line) for file in files for line in read_lines(file)]

    @property
    def rows(self) -> list[list[Row]]:
        return [[Row(*row) for row in sample] for sample in read_lines(self.folder / "rows.jsonl")]


# ============================================================ the program


class Bench:
    """Runs one program's trainer of one work again and again. Each run is made once."""

    def __init__(self, server: subprocess.Popen, description: dict, folder: Path, work: str):
        self.server = server
        self.description = description
        self.work = work
        self.folder = folder / work
        self.inputs = inputs.make(folder / "inputs", {work: sizes_of(work)})
        self.finished: dict[str, Finished] = {}

    @property
    def is_rollout(self) -> bool:
        return self.work in ROLLOUTS

    @property
    def tags(self) -> dict[str, str]:
        return self.description["tags"][self.work]

    @property
    def definitions(self) -> dict:
        definitions = dict(self.description["definitions"][self.work])
        if self.work == "kto":
            definitions["labels"] = [row["label"] for row in inputs.rows_of("kto", UPDATE)]
        return definitions

    def run(self, name: str, rows: int = UPDATE, dropout: bool = False, **changes) -> Finished:
        """Trains once, or returns what an earlier call of this name has trained."""
        if name in self.finished:
            return self.finished[name]
        output = self.folder / name
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        settings = dict(
            work=self.work,
            model=str(self.inputs.model_for(self.work, dropout)),
            data=str(self.inputs.rows[self.work, rows_for(self.work, rows)]),
            output=str(output),
            samples=UPDATE,
            micro=4,
            processes=1,
            epochs=UPDATES,
            learning_rate=1e-2,
            adam_epsilon=1e-2,
            max_grad_norm=1e9,
            logging_steps=1,
            save_steps=1,
            pad_to=0,
            packing=False,
            resume="",
            seed=1,
        )
        request = Request(**{**settings, **changes})
        file = output / "request.json"
        file.write_text(json.dumps(request._asdict()), encoding="utf-8")
        self.server.stdin.write(f"{file}\n")
        self.server.stdin.flush()
        answer = self.server.stdout.readline()
        while answer and not answer.startswith("ended "):  # what its libraries print
            answer = self.server.stdout.readline()
        if answer != "ended 0\n":
            console = output / "console.txt"
            text = console.read_text(errors="replace") if console.exists() else ""
            raise Unasked(f"the run {name} ended with an error: {last_error(text.splitlines())}")
        self.finished[name] = Finished(request, output)
        return self.finished[name]


def sizes_of(work: str) -> list[int]:
    sizes = {UPDATE, SHORT, RESUMED_ROWS}
    return sorted({rows_for(work, size) for size in sizes})


def rows_for(work: str, samples: int) -> int:
    """Returns how many rows of data make so many samples; each prompt of a rollout makes four."""
    return math.ceil(samples / GROUP) if work in ROLLOUTS else samples


def last_error(lines: list[str]) -> str:
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return (errors or lines or ["it printed nothing"])[-1].strip()[:300]


def environment(cache: Path) -> dict[str, str]:
    """Nothing from a network, no GPU, a cache of its own, one thread."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {
        **kept,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(cache),
        "HF_DATASETS_CACHE": str(cache / "datasets"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "WANDB_DISABLED": "true",
    }


# ============================================================ comparisons


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    # Programs differ in whether they write a tied head.
    return {name: value.double() for name, value in tensors.items() if name != "lm_head.weight"}


def last_weights(run: Finished) -> dict[str, torch.Tensor]:
    return weights_of(run.weights[max(run.weights)])


def distance(one: dict, other: dict) -> float:
    if one.keys() != other.keys():
        return math.inf
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in one))


def of_weights(what: str, run: Finished, reference: Finished) -> Check:
    """Compares the last weights of two runs, relative to the way from the start."""
    steps = max(run.weights), max(reference.weights)
    if steps[0] != steps[1]:
        return Check(what, math.inf, WEIGHTS_BOUND, f"{steps[0]} updates instead of {steps[1]}")
    start = weights_of(reference.weights[0])
    moved = distance(last_weights(reference), start)
    apart = distance(last_weights(run), last_weights(reference))
    where = "weights, of the way that they went"
    return Check(f"{what}: weights", apart / moved, WEIGHTS_BOUND, where)


def numbers_of(bench: Bench, run: Finished) -> list[dict[str, float]]:
    """Returns what each update of a run should have logged, from the weights before it."""
    compute = expected.WORKS[bench.work]
    weights = run.weights
    is_scorer = bench.work == "reward"
    reference = expected.load(weights[0], is_scorer)
    found = []
    tokens = 0
    for step in range(max(weights)):
        model = expected.load(weights[step], is_scorer)
        samples = samples_of(run, step) if bench.is_rollout else run.rows
        values = compute(model, reference, samples, bench.definitions)
        tokens += values["tokens"]
        found.append({**values, "tokens": tokens})
    return found


def samples_of(run: Finished, step: int) -> list[Sample]:
    """Returns what the weights after so many updates have sampled."""
    return [sample for sample in run.samples if sample.step == step]


def possible_values(name: str, since: list[dict[str, float]], definitions: dict) -> list[float]:
    """Returns what a log line may show of the updates since the last one.

    Whether each update weighs the same in its mean or each learned token does is a choice. So is a
    line that has the numbers of the `last update`, by a definition of `line`.
    """
    values = [update[name] for update in since]
    if name in ("tokens", "grad_norm") or definitions.get("line") == "last update":
        return [values[-1]]
    means = [sum(values) / len(values)]
    if "targets" in since[0]:
        targets = [update["targets"] for update in since]
        weighted = sum(value * number for value, number in zip(values, targets, strict=True))
        means.append(weighted / sum(targets))
    return means


def of_numbers(bench: Bench, what: str, run: Finished) -> Iterator[Check]:
    """Compares each logged number with what it should be; one check a number, its worst update."""
    updates = numbers_of(bench, run)
    lines = {line["step"]: line for line in run.lines}
    last_logged = 0
    worst: dict[str, Check] = {}
    for step in sorted(lines):
        since = updates[last_logged:step]
        last_logged = step
        if not since:
            continue
        for name, tag in bench.tags.items():
            rights = possible_values(name, since, bench.definitions)
            if name in ("shortest", "min_reward", "longest", "max_reward") and len(since) > 1:
                continue  # whether a line has the extreme or the mean of extremes is a choice
            logged = lines[step].get(tag)
            if logged is None:
                worst[name] = Check(what, math.inf, NUMBERS_BOUND, f"{tag}: not logged")
                continue
            right = min(rights, key=lambda one: abs(logged - one))
            apart = abs(logged - right) / max(1.0, abs(right))
            bound = max(bound_of(tag), bench.description["rounded"].get(tag, 0.0))
            where = f"{tag}, update {step}: {logged:.7g} instead of {right:.7g}"
            check = Check(f"{what}: {tag}", apart, bound, where)
            if name not in worst or not apart <= worst[name].distance:
                worst[name] = check
    if not worst:
        worst["lines"] = Check(what, math.inf, NUMBERS_BOUND, "no line was logged")
    yield from worst.values()


# ============================================================ questions


def whole(bench: Bench) -> Finished:
    return bench.run("whole", micro=UPDATE)


def split(bench: Bench) -> Finished:
    return bench.run("split")


def processes(bench: Bench) -> Finished:
    return bench.run("processes", processes=2)


def ask_split(bench: Bench) -> Iterator[Check]:
    yield of_weights("4 x 4", split(bench), whole(bench))


def ask_processes(bench: Bench) -> Iterator[Check]:
    yield of_weights("2 processes", processes(bench), whole(bench))


def ask_packed(bench: Bench) -> Iterator[Check]:
    yield of_weights("packed", bench.run("packed", packing=True), whole(bench))


def ask_padding(bench: Bench) -> Iterator[Check]:
    padded = bench.run("padded", micro=UPDATE, pad_to=64)
    yield of_weights("padded to 64", padded, whole(bench))
    yield from of_numbers(bench, "padded to 64", padded)


def ask_last_update(bench: Bench) -> Iterator[Check]:
    size = 2 * GROUP if bench.is_rollout else SHORT
    full = bench.run("full", rows=size, samples=size, micro=size)
    yield of_weights(f"{size} of 16", bench.run("short", rows=size), full)
    on_two = bench.run("short-processes", rows=size, processes=2, micro=2)
    yield of_weights(f"{size} of 16, 2 processes", on_two, full)


def ask_numbers(bench: Bench) -> Iterator[Check]:
    yield from of_numbers(bench, "1 x 16", whole(bench))
    yield from of_numbers(bench, "4 x 4", split(bench))
    yield from of_numbers(bench, "2 processes", processes(bench))


def ask_log_lines(bench: Bench) -> Iterator[Check]:
    """Lines at the multiples of the interval. One at the first and the last update, too, is a choice.

    The places are asked with accumulation and two processes, the means without: what those do to
    a number is asked by `numbers`.
    """
    run = bench.run("interval", logging_steps=2, epochs=5, processes=2, micro=2)
    steps = [line["step"] for line in run.lines]
    due = {2, 4}
    wrong = len(due - set(steps)) + len(set(steps) - due - {1, 5}) + len(steps) - len(set(steps))
    yield Check("places", wrong, 0, f"lines at {steps}, expected at [2, 4]")
    whole_updates = bench.run("interval-whole", logging_steps=2, epochs=5, micro=UPDATE)
    yield from of_numbers(bench, "means of 2 updates", whole_updates)


def ask_resume(bench: Bench) -> Iterator[Check]:
    """Goes on from checkpoints of a run with dropout that ended long ago, as after a kill."""
    same = dict(rows=RESUMED_ROWS, samples=RESUMED_UPDATE, epochs=2, dropout=True, logging_steps=1)
    for what, step, count in (
        ("in mid-epoch", 4, 1),
        ("after an epoch", 3, 1),
        ("2 processes, in mid-epoch", 4, 2),
    ):
        same |= dict(processes=count, micro=4 // count)
        unbroken = bench.run(f"unbroken-{count}", **same)
        checkpoint = unbroken.weights[step]
        resumed = bench.run(f"resumed-{count}-{step}", **same, resume=str(checkpoint))
        yield of_weights(what, resumed, unbroken)
        yield from of_lines(what, resumed, unbroken, step)


def of_lines(what: str, resumed: Finished, unbroken: Finished, step: int) -> Iterator[Check]:
    """Compares what two runs logged after an update, but for what depends on time; a check a tag.

    A run that began at its start, whatever it was told, has lines of the updates before that, too.
    """
    found = {line["step"]: line for line in resumed.lines}
    expected_lines = {line["step"]: line for line in unbroken.lines if line["step"] > step}
    if found.keys() != expected_lines.keys():
        where = f"lines at {sorted(found)} instead of {sorted(expected_lines)}"
        yield Check(f"{what}: log lines", math.inf, NUMBERS_BOUND, where)
        return
    worst: dict[str, Check] = {}
    for number, line in expected_lines.items():
        for tag, value in line.items():
            if not isinstance(value, float | int) or depends_on_time(tag):
                continue
            logged = found[number].get(tag, math.nan)
            apart = abs(logged - value) / max(1.0, abs(value))
            if tag not in worst or not apart <= worst[tag].distance:
                where = f"{tag}, update {number}: {logged:.7g} instead of {value:.7g}"
                worst[tag] = Check(f"{what}: {tag}", apart, bound_of(tag), where)
    yield from worst.values()


def bound_of(tag: str) -> float:
    return GRADIENT_BOUND if "grad_norm" in tag else NUMBERS_BOUND


def depends_on_time(tag: str) -> bool:
    return any(part in tag for part in ("time", "runtime", "per_sec", "perf/", "profiling"))


QUESTIONS: dict[str, Callable[[Bench], Iterator[Check]]] = {
    "split": ask_split,
    "processes": ask_processes,
    "packed": ask_packed,
    "padding": ask_padding,
    "last-update": ask_last_update,
    "numbers": ask_numbers,
    "log-lines": ask_log_lines,
    "resume": ask_resume,
}


def ask(bench: Bench, question: str) -> dict:
    """Asks one question and returns its row of the results."""
    row = {"work": bench.work, "question": question, "why": "", "checks": []}
    cannot = bench.description["cannot"]
    reason = cannot.get(f"{bench.work} {question}") or cannot.get(question)
    if reason:
        return {**row, "result": "could not be asked", "why": reason}
    checks = []
    try:
        checks.extend(QUESTIONS[question](bench))
    except Unasked as error:
        return {**row, "result": "could not be asked", "why": str(error)}
    result = "holds" if all(check.holds for check in checks) else "does not hold"
    named = [
        {
            "what": check.what,
            "holds": check.holds,
            "distance": float(f"{check.distance:.3g}"),
            "bound": check.bound,
            "where": check.where,
        }
        for check in checks
    ]
    return {**row, "result": result, "checks": named}


# ============================================================ the command


def python_of(program: str, folder: Path) -> Path:
    """Returns the interpreter of a program's own environment, which is made if it is not there.

    Its packages are those of `audit/PROGRAM_requirements.txt`.
    """
    requirements = HERE / "audit" / f"{program}_requirements.txt"
    environment_folder = folder / f"{program}-venv"
    python = environment_folder / "bin" / "python"
    if not (environment_folder / "installed").exists():
        shutil.rmtree(environment_folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", environment_folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "-r", requirements]
        subprocess.run(install, check=True, cwd=REPOSITORY)
        (environment_folder / "installed").touch()
    return python


def audit(args) -> dict:
    """Asks a program once, from scratch, and returns the results."""
    program = args.program
    folder = args.folder.absolute() / program
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    adapter = HERE / "audit" / f"{program}_adapter.py"
    python = args.python.absolute() if args.python else python_of(program, folder)
    told = subprocess.run(
        [python, adapter, "describe"],
        capture_output=True,
        text=True,
        check=True,
        env=environment(folder / "cache"),
    )
    description = json.loads(told.stdout.splitlines()[-1])
    rows = []
    with subprocess.Popen(
        [python, adapter, "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(folder / "cache"),
    ) as server:
        for work in args.works or list(description["tags"]):
            bench = Bench(server, description, folder, work)
            for question in args.only or QUESTIONS:
                row = ask(bench, question)
                rows.append(row)
                print(as_text(row), flush=True)
        server.stdin.close()
    python_version = subprocess.run(
        [python, "-c", "import platform; print(platform.python_version())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return {
        "program": description["program"],
        "versions": {"python": python_version, **description["versions"]},
        "notes": description["notes"],
        "rows": rows,
    }


def as_text(row: dict) -> str:
    lines = [f"{row['work']:7} {row['question']:12} {row['result']}  {row['why']}".rstrip()]
    failed = [check for check in row["checks"] if not check["holds"]]
    for check in failed:
        lines.append(f"        {check['what']}: {check['distance']:.1e}  {check['where']}")
    if row["checks"] and not failed:
        worst = max(row["checks"], key=lambda check: check["distance"] / (check["bound"] or 1))
        lines.append(f"        at most {worst['distance']:.1e}, {worst['what']}")
    return "\n".join(lines)


def largest_difference(one: dict, other: dict) -> float:
    """Returns by how much two times of asking differ: in a distance, or infinitely in a result."""
    largest = 0.0
    for row, again in zip(one["rows"], other["rows"], strict=True):
        if row["result"] != again["result"] or len(row["checks"]) != len(again["checks"]):
            return math.inf
        for check, second in zip(row["checks"], again["checks"], strict=True):
            if check["distance"] != second["distance"]:
                largest = max(largest, abs(check["distance"] - second["distance"]))
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    programs = sorted(
        path.name.removesuffix("_adapter.py") for path in (HERE / "audit").glob("*_adapter.py")
    )
    parser.add_argument("program", nargs="?", choices=programs)
    parser.add_argument("--works", nargs="*", default=[], help="default: all of the program")
    parser.add_argument("--only", nargs="*", default=[], choices=list(QUESTIONS))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/audit"))
    parser.add_argument("--python", type=Path, help="of an environment that is there already")
    parser.add_argument("--repeats", type=int, default=1, help="each time from scratch")
    parser.add_argument(
        "--results", action="store_true", help="write benchmarks/audit/PROGRAM.json"
    )
    parser.add_argument("--page", action="store_true", help="write the tables of docs/counting.md")
    args = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for a busy core cost several times the work
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if args.program:
        found = [audit(args) for _ in range(args.repeats)]
        differs = max((largest_difference(found[0], other) for other in found[1:]), default=None)
        if differs is not None:
            print(f"asked {args.repeats} times: distances differ by at most {differs:.1e}")
        if args.results:
            write(args, found[0], differs)
    if args.page:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_tables(text, render(read())), encoding="utf-8")


def write(args, found: dict, differs: float | None) -> None:
    """Writes the results of a program, with what is needed to make them again."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True
    ).stdout.strip()
    words = [word for word in sys.argv[1:] if word not in ("--page", "--folder", str(args.folder))]
    result = {
        "command": " ".join(["python", "benchmarks/audit.py", *words]),
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "repeats": args.repeats,
        "largest_difference_of_repeats": differs,
        **found,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{args.program}.json").write_text(as_json(result), encoding="utf-8")


def as_json(result: dict) -> str:
    """Returns a result as a file holds it: of a row's checks their numbers, and the worst failed."""
    rows = []
    for row in result["rows"]:
        failed = [check for check in row["checks"] if not check["holds"]]
        kept = {name: value for name, value in row.items() if name != "checks"}
        kept |= {"asked": len(row["checks"]), "failed": len(failed)}
        kept["worst"] = max(failed, key=lambda check: check["distance"], default=None)
        rows.append(f"  {json.dumps(kept)}")
    text = json.dumps({**result, "rows": []}, indent=1)
    lines = ",\n".join(rows)
    return text.replace('"rows": []', f'"rows": [\n{lines}\n ]') + "\n"


def read(folder: Path = RESULTS) -> list[dict]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]


# ============================================================ the page


def render(results: list[dict]) -> str:
    """Returns one table of all programs, and below it which versions were asked."""
    header = ["program", "work", *QUESTIONS]
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    for result in results:
        for work in dict.fromkeys(row["work"] for row in result["rows"]):
            rows = {row["question"]: row for row in result["rows"] if row["work"] == work}
            cells = [cell(rows.get(question)) for question in QUESTIONS]
            lines.append(f"| {' | '.join([result['program'], work, *cells])} |")
    return "\n".join([*lines, "", *(asked(result) for result in results)])


def cell(row: dict | None) -> str:
    if row is None or row["result"] == "could not be asked":
        return "not asked"
    if row["result"] == "holds":
        return "holds"
    number = row["worst"]["what"].rpartition(": ")[2]
    return f"**{number}** off by {shown(row['worst']['distance'])}"


def shown(distance: float) -> str:
    return f"{distance:.1e}" if math.isfinite(distance) else "any bound"


def asked(result: dict) -> str:
    """Returns which versions of a program were asked, and how. Its JSON has every note."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return (
        f"- {result['program']}: {versions}; `{result['command']}`, {result['date']}, "
        f"{result['repeats']} times from scratch"
    )


def with_tables(text: str, tables: str) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} has no {BEGIN} with {END} after it")
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


if __name__ == "__main__":
    main()
