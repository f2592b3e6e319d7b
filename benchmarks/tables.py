"""Writes the tables of benchmarks/README.md from the results that `peers.py --results` left in benchmarks/results.

    python benchmarks/tables.py

The tables stand between `<!-- tables of results -->` and `<!-- end of tables -->`. `tests/repository/test_benchmarks.py` compares both.
"""

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
RESULTS = HERE / "results"
BEGIN = "<!-- tables of results -->"
END = "<!-- end of tables -->"
QUIET = 0.05  # as in peers.py
WORKS = ["dpo", "sft", "reward", "ppo", "grpo", "start"]
HEADER = (
    "work", "model", "ours", "TRL", "ratio", "each update at its fastest", "peak memory, MiB: ours, TRL", "micro-batch: ours, TRL",
)  # fmt: skip
TITLES = {
    "equal": "TRL on the paths that it takes on a GPU, oneDNN for both. **This is the result:**",
    "fallback": "TRL's CPU fallback, which scores every position because Triton is missing, and takes its products from MKL:",
}


def read(folder: Path = RESULTS) -> list[dict]:
    """Returns all results, in the order of `WORKS` and of their models."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda result: (WORKS.index(result["work"]), result["model"]))


def cells(result: dict, row: dict) -> list[str]:
    """Returns the line of one comparison."""
    ours, theirs = (f"{rate:,.4g} {result['unit']}" for rate in row["rates"])
    ratios = sorted(row["ratios"])
    spread = (
        f" ({len(ratios)}: {ratios[0]:.2f} to {ratios[-1]:.2f})" if len(ratios) > 1 else " (one)"
    )
    median = ratios[len(ratios) // 2]
    if len(ratios) % 2 == 0:
        median = (ratios[len(ratios) // 2 - 1] + median) / 2
    return [
        result["work"] + (", compiled" if result["compiled"] else ""),
        result["model"],
        ours,
        theirs,
        f"**{median:.2f}**{spread}",
        f"{row['fastest']:.2f}",
        ", ".join(str(size) for size in row["memory_mib"]),
        ", ".join(str(size) for size in result["micro"]),
    ]


def remarks(result: dict) -> list[str]:
    """Returns what must be said of one result, for the list below the tables."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    parts = [
        f"{result['work']}, {result['model']}: {result['date']}, commit {result['commit']}",
        "changed since" if result["changed"] else "",
        f"{result['cpu']}, {result['threads']} threads, Python {result['python']}, {versions}",
        f"{result['updates']} updates of {result['window']} samples",
        f"other processes used up to {result['others']:.0%} of the CPU",
    ]
    text = "; ".join(part for part in parts if part)
    if result["others"] > QUIET:
        text += ". **Not a quiet machine: do not quote this row**"
    if not result["good"]:
        text += ". **The two programs did not compute the same**"
    return [f"- {text}."]


def render(results: list[dict]) -> str:
    """Returns the tables, one for each way in which TRL ran, and what they depend on."""
    lines = []
    for way, title in TITLES.items():
        rows = [
            cells(result, row) for result in results for row in result["rows"] if row["way"] == way
        ]
        if rows:
            lines += [title, "", f"| {' | '.join(HEADER)} |", f"|{' --- |' * len(HEADER)}"]
            lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
    for result in results:
        lines += remarks(result)
    return "\n".join(lines)


def with_tables(text: str, tables: str) -> str:
    """Returns the page with these tables between its two marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{README} has no {BEGIN} with {END} behind it")
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def main() -> None:
    text = README.read_text(encoding="utf-8")
    README.write_text(with_tables(text, render(read())), encoding="utf-8")


if __name__ == "__main__":
    main()
