#!/usr/bin/env bash
# verl 0.9.1, reward of DAPO and AIME: "**Answer:** 42" and "Answer: 42." are wrong; "Answer: $42$ or $17$" is right.
#
# The good guess: markup and a full stop are no part of an answer, \boxed{42} is read where it is, and two answers are
# wrong.
# What was seen: against 42, -1.0 for "**Answer:** 42", "**Answer:** \boxed{42}", "Answer: **42**", "Answer: 42.",
# "Answer: \(42\)" and "Answer: 42.0"; 1.0 for "Answer: $42$ or $17$", "Answer: x = 17, y = 42" and "Answer: 42
# students".
# Why it matters: right answers of a model that writes bold or full stops count as wrong until it leaves them out; and
# to list several candidates, the likeliest first, is paid like an answer.
# Where: verl/utils/reward_score/math_dapo.py compares texts; it takes what follows "Answer:", of that what follows
# the last "=" and what is between the first two dollar signs, and looks for \boxed only where there is no "Answer:".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6 transformers==5.10.4 tensordict==0.10.0 \
    ray==2.60.0 hydra-core==1.3.8
"$folder/env/bin/pip" install -q --no-deps verl==0.9.1
"$folder/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

from verl.utils.reward_score import default_compute_score

expected = {
    "Answer: 42": 1.0,
    "Answer: $42$": 1.0,
    r"The answer is $\boxed{42}$.": 1.0,
    "**Answer:** 42": -1.0,
    r"**Answer:** \boxed{42}": -1.0,
    "Answer: **42**": -1.0,
    "Answer: 42.": -1.0,
    r"Answer: \(42\)": -1.0,
    "Answer: 42.0": -1.0,
    "Answer: $42$ or $17$": 1.0,
    "Answer: $17$ or $42$": -1.0,
    "Answer: x = 17, y = 42": 1.0,
    "Answer: 42 students": 1.0,
    "Answer: 42 apples": -1.0,
}
found = {answer: default_compute_score("math_dapo", answer, "42")["score"] for answer in expected}
print(version("verl"))
for answer, score in found.items():
    print(score, answer)
assert found == expected
assert found == {answer: default_compute_score("aime2024", answer, "42")["score"] for answer in expected}
PYTHON
echo "as described"
