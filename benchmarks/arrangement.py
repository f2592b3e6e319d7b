"""How many positions a model computes for each token of an update: as the rows come, sorted by length, and with shared prompts.

    python benchmarks/arrangement.py TOKENIZER dpo|sft --data hh_pairs.jsonl.gz|gsm8k_train.jsonl [--micro 1 8] [--window 64]

Counted, not timed: the same on every machine. The updates are those of one epoch at seed 0, the micro-batches those of `common.batches`. Rows are
padded to the longest of their micro-batch. The tokens count a pair's prompt twice, as `tokens` in a log line does.
"""

import argparse
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from transformers import AutoTokenizer

from common import batches
from preference_recipes.data import formats

MAX_LENGTH = 1024
ALONE = SimpleNamespace(num_processes=1, process_index=0)


def read(data: Path, work: str, tokenizer) -> list[tuple[int, ...]]:
    """Returns for each row the tokens of its prompt and of each answer; rows beyond MAX_LENGTH are left out."""

    def length(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    rows = []
    with (gzip.open if data.suffix == ".gz" else open)(data, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if work == "sft":
                texts = row["question"] + "\n", row["answer"]
            else:
                texts = formats.preference(row)
            prompt, *answers = map(length, texts)
            rows.append((prompt, *(answer + 1 for answer in answers)))  # and its end
    return [row for row in rows if row[0] + max(row[1:]) <= MAX_LENGTH]


def positions(rows: list[tuple[int, ...]], micro_batches: list[list[int]], shared: bool) -> int:
    """Returns how many positions some micro-batches have, padding included."""
    total = 0
    for micro_batch in micro_batches:
        answers = len(rows[micro_batch[0]]) - 1
        if shared:
            total += len(micro_batch) * max(sum(rows[row]) for row in micro_batch)
        else:
            longest = max(rows[row][0] + max(rows[row][1:]) for row in micro_batch)
            total += len(micro_batch) * answers * longest
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer")
    parser.add_argument("work", choices=["dpo", "sft"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--window", type=int, default=64)
    args = parser.parse_args()
    rows = read(args.data, args.work, AutoTokenizer.from_pretrained(args.tokenizer))
    tokens = np.array([row[0] * (len(row) - 1) + sum(row[1:]) for row in rows])
    updates = [
        batches.rows_of_update(len(rows), args.window, 0, index)
        for index in range(len(rows) // args.window)
    ]
    trained = sum(tokens[update].sum() for update in updates)
    print("| work | micro-batch | as they come | sorted | sorted, prompts shared |")
    print("| --- | --- | --- | --- | --- |")
    for micro in args.micro:
        as_they_come = []
        in_order = []
        for update in updates:
            as_they_come += [update[at : at + micro] for at in range(0, len(update), micro)]
            for micro_batch in batches.split(ALONE, update, tokens, micro):
                in_order.append(
                    [row for row, weight in zip(micro_batch.rows, micro_batch.weights) if weight]
                )
        found = [
            positions(rows, as_they_come, shared=False),
            positions(rows, in_order, shared=False),
        ]
        if args.work == "dpo":
            found.append(positions(rows, in_order, shared=True))
        cells = [f"{number / trained:.2f}" for number in found] + ["-"] * (3 - len(found))
        print(f"| {args.work} | {micro} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
