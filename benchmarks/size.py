"""Whether an update costs the same in a small and in a large data set: time per token, and the memory of the process.

    python benchmarks/size.py --data hh_pairs.jsonl.gz [--rows 1000 10000 100000 1000000] [--runs 3] [--updates 8]

Each data set repeats the pairs of --data, numbered so that no two are alike, and is tokenised once, which is timed and not counted. Then recipes/dpo.py
runs on each in turn, so many times, always on the same pairs of its first windows' lengths as the seed gives them: the rate in tokens
a second is that of the updates from the third on, the memory the peak resident one of the whole run, start included. Of that, `own` leaves out what is
mapped of files, as of the data's: pages that the system takes back when it needs them. The last lines are the largest distances from the
smallest data set's medians.
"""

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from preference_recipes.data import formats

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent


def make_data(path: Path, pairs: list[tuple], rows: int) -> Path:
    """A file of so many pairs."""
    if not path.exists():
        with open(path.with_suffix(".writing"), "w", encoding="utf-8") as file:
            for row in range(rows):
                prompt, chosen, rejected = pairs[row % len(pairs)]
                file.write(
                    json.dumps({"prompt": f"{row}{prompt}", "chosen": chosen, "rejected": rejected})
                    + "\n"
                )
        path.with_suffix(".writing").rename(path)
    return path


def run(args, data: Path, updates: int) -> dict:
    """One run of the recipe: its seconds, tokens a second from the third update on, peak resident memory in MiB, and that of the process's own."""
    output = args.folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    flags = {
        "model_name_or_path": args.folder / "model",
        "dataset_name": data,
        "output_dir": output,
        "train_batch_size": 64,
        "micro_train_batch_size": 8,
        "max_steps": updates,
        "max_length": 512,
        "learning_rate": 0,
        "report_to": "none",
    }
    command = [
        sys.executable,
        REPOSITORY / "recipes" / "dpo.py",
        *(f"--{key}={value}" for key, value in flags.items()),
    ]
    env = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "HF_DATASETS_CACHE": str(args.folder / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    begun = time.perf_counter()
    own = 0
    with open(args.folder / "run.log", "w") as log:
        process = subprocess.Popen(
            [str(word) for word in command],
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=args.folder,
        )
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            own = max(
                [own, *(int(line.split()[1]) for line in status if line.startswith("RssAnon"))]
            )
            time.sleep(0.05)
        _, process.returncode, usage = os.wait4(process.pid, 0)
    if process.returncode:
        sys.exit((args.folder / "run.log").read_text()[-3000:])
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    tokens = [line["tokens"] for line in lines]
    seconds = sum(
        (b - a) / line["perf/tokens_per_second"]
        for a, b, line in zip(tokens[1:], tokens[2:], lines[2:])
    )
    rate = (tokens[-1] - tokens[1]) / seconds if seconds else 0.0
    return {
        "seconds": time.perf_counter() - begun,
        "rate": rate,
        "memory": usage.ru_maxrss / 1024,
        "own": own / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--folder", type=Path, default=Path.home() / ".cache" / "preference-recipes-size"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--updates", type=int, default=8)
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not (args.folder / "model").exists():
        sizes = ["--vocab_size=4096", "--hidden_size=128", "--layers=4"]
        subprocess.run(
            [
                sys.executable,
                HERE / "make_model.py",
                args.folder / "model",
                "--data",
                args.data,
                *sizes,
            ],
            check=True,
        )
    with (gzip.open if args.data.suffix == ".gz" else open)(
        args.data, "rt", encoding="utf-8"
    ) as lines:
        rows = map(json.loads, lines)
        pairs = [
            formats.split_strings(row.get("prompt"), row["chosen"], row["rejected"]) for row in rows
        ]
    files = {rows: make_data(args.folder / f"{rows}.jsonl", pairs, rows) for rows in args.rows}
    for rows, file in files.items():
        print(
            f"{rows:9,} pairs: first run, which tokenises them, {run(args, file, 1)['seconds']:.0f} s",
            flush=True,
        )
    found = {rows: [] for rows in args.rows}
    for number in range(args.runs):
        for rows in args.rows if number % 2 == 0 else args.rows[::-1]:
            found[rows].append(run(args, files[rows], args.updates))
    medians = {
        rows: {key: statistics.median(one[key] for one in some) for key in some[0]}
        for rows, some in found.items()
    }
    print(
        "| pairs | tokens/s | peak memory, MiB | own, MiB | command to end, s |\n| --- | --- | --- | --- | --- |"
    )
    for rows, median in medians.items():
        print(
            f"| {rows:,} | {median['rate']:.0f} | {median['memory']:.0f} | {median['own']:.0f} | {median['seconds']:.1f} |"
        )
    first = medians[args.rows[0]]
    for key in ("rate", "memory", "own"):
        print(
            f"{key}: at most {max(abs(one[key] / first[key] - 1) for one in medians.values()):.1%} from that of {args.rows[0]:,} pairs"
        )


if __name__ == "__main__":
    main()
