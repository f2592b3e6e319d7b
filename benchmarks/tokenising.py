"""Times how a data set becomes token ids, here and in another tree, and by one process and by two.

    python benchmarks/tokenising.py ../older --data hh_pairs.jsonl.gz [--rows 100000] [--rounds 1] [--as strings messages]

Each tree runs `recipes/dpo.py --preview 1`, which tokenises and ends, twice on a cache of its own: with the cache empty, and filled. The difference is what
tokenising took: CPU seconds of all processes, and seconds. Wall time means little if others use the machine.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from preference_recipes.data import formats
from preference_recipes.data.messages import BadRow, LeftOut

OURS = Path(__file__).resolve().parents[1]


def write_pairs(source: Path, rows: int, kind: str, file: Path) -> None:
    """Writes so many pairs, numbered so that no two are alike: transcripts, or lists of messages."""
    open_source = gzip.open if source.suffix == ".gz" else open
    with open_source(source, "rt", encoding="utf-8") as lines:
        pairs = [json.loads(line) for line in lines]
    if kind == "messages":
        pairs = [pair for pair in map(as_messages, pairs) if pair]
    with open(file, "w", encoding="utf-8") as out:
        for number in range(rows):
            text = json.dumps(pairs[number % len(pairs)])
            first = '"content": "' if kind == "messages" else "Human:"
            out.write(text.replace(first, f"{first} {number}") + "\n")


def as_messages(pair: dict) -> dict | None:
    """Returns a pair of transcripts as one of messages; None if they are no pair of these."""
    try:
        prompt, (chosen, rejected), *_ = formats.read_pair(pair, strings_as_messages=True)
        messages = {"chosen": prompt + chosen, "rejected": prompt + rejected}
        formats.read_pair(messages, strings_as_messages=False)
    except (BadRow, LeftOut):
        return None
    return messages


def seconds(tree: Path, model: Path, file: Path, cores: set[int]) -> tuple[float, float]:
    """Returns the CPU seconds and the seconds that tokenising takes on these cores."""
    command = [sys.executable, "recipes/dpo.py", "--model_name_or_path", model]
    command += ["--dataset_name", file, "--max_length", "512", "--preview", "1"]
    used = []
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "PYTHONPATH": str(tree),
            "HF_DATASETS_CACHE": cache,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
        }
        for output in ("empty", "filled"):
            words = [str(word) for word in [*command, "--output_dir", f"{cache}/{output}"]]
            before = os.times()
            start = time.perf_counter()
            os.sched_setaffinity(0, cores)
            subprocess.run(words, cwd=tree, env=environment, check=True, capture_output=True)
            took = time.perf_counter() - start
            after = os.times()
            cpu = after.children_user + after.children_system
            used.append((cpu - before.children_user - before.children_system, took))
    (cpu, took), (cpu_of_start, start) = used
    return cpu - cpu_of_start, took - start


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="hh-rlhf pairs")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--as", dest="kinds", nargs="+", default=["strings", "messages"])
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        maker = [sys.executable, OURS / "benchmarks/make_model.py", model, "--data", args.data]
        subprocess.run([*maker, "--hidden_size=64", "--layers=1"], check=True, capture_output=True)
        for kind in args.kinds:
            file = Path(folder, f"{kind}.jsonl")
            write_pairs(args.data, args.rows, kind, file)
            for _ in range(args.rounds):
                other, _ = seconds(args.other.resolve(), model, file, set(cores[:1]))
                cpu, one = seconds(OURS, model, file, set(cores[:1]))
                _, two = seconds(OURS, model, file, set(cores[:2]))
                print(
                    f"{kind}: CPU seconds {cpu:.1f}, other {other:.1f}, ratio {cpu / other:.2f}; "
                    f"by two processes {one / two:.2f} times as fast",
                    flush=True,
                )


if __name__ == "__main__":
    main()
