#!/usr/bin/env bash
# lm-evaluation-harness 0.4.13, hendrycks_math: the data's own solutions score 0.
#
# The good guess: the answer is read from \boxed, as it is read from the solutions and by the task aime; at least a
# model that writes the solutions themselves is right.
# What was seen: exact_match is 0.0 for the solutions, and for $\boxed{42}$. It is 1.0 for 42 alone and for $42$. "As
# $x + 2 = 44$, it is $42$." is wrong, since all between the first and the last dollar sign is the answer. Where the
# answer is 1 \text{ or } 5, the answer $1 \text{ or } 7$ is right.
# Why it matters: it measures how little a model writes. A model that learns to reason in the data's form drops to 0.
# Where: process_results in lm_eval/tasks/hendrycks_math/utils.py, which also cuts an answer at "\text{ ", taken for a
# unit; https://github.com/EleutherAI/lm-evaluation-harness/issues/3643
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q lm-eval==0.4.13 datasets==5.2.0 numpy==2.4.6
HF_HOME="$folder/cache" "$folder/env/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

folder = Path(sys.argv[1])
rows = [
    {"problem": "What is $x$?", "solution": r"As $x + 2 = 44$, it is $x = \boxed{42}$."},
    {"problem": "Which $y$ solve it?", "solution": r"They are $\boxed{1 \text{ or } 5}$."},
]
(folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
# The task itself, on these two rows instead of the hub's.
(folder / "task.yaml").write_text(f"""
include: {Path(lm_eval.__file__).parent}/tasks/hendrycks_math/hendrycks_math_algebra.yaml
task: two_rows
tag: []
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{train: {folder}/rows.jsonl, test: {folder}/rows.jsonl}}}}
""")
manager = TaskManager(include_path=str(folder), include_defaults=False)


class Writes(LM):
    """Answers with given texts."""

    def __init__(self, texts: list[str]):
        super().__init__()
        self.texts = texts

    def generate_until(self, requests, disable_tqdm=False):
        return [self.texts[request.doc_id] for request in requests]

    def loglikelihood(self, requests):
        raise NotImplementedError

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError


answers = {
    "the solutions": [row["solution"] for row in rows],
    "boxed": [r"$\boxed{42}$", r"$\boxed{1 \text{ or } 5}$"],
    "alone": ["42", r"1 \text{ or } 5"],
    "in dollar signs": ["It is $42$.", r"They are $1 \text{ or } 5$."],
    "with steps": ["As $x + 2 = 44$, it is $42$.", r"As $y > 0$, they are $1 \text{ or } 5$."],
    "with a wrong second one": ["42", r"$1 \text{ or } 7$"],
}
found = {}
for name, texts in answers.items():
    run = lm_eval.simple_evaluate(
        model=Writes(texts), tasks=["two_rows"], task_manager=manager, bootstrap_iters=0, cache_requests=False
    )
    found[name] = float(run["results"]["two_rows"]["exact_match,none"])
print(version("lm-eval"), "exact_match:", found)
assert found == {
    "the solutions": 0.0,
    "boxed": 0.0,
    "alone": 1.0,
    "in dollar signs": 1.0,
    "with steps": 0.0,
    "with a wrong second one": 1.0,
}
PYTHON
echo "as described"
