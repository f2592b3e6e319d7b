#!/usr/bin/env bash
# reasoning-gym 0.1.25: -42000 is 42000, 42,000 is not; and where 1 is right, 10 is worth more than 1.0.
#
# The good guess: a number is right or wrong, whatever its form; what is paid in part is a right number among words.
# What was seen: in gsm_symbolic, against 42000, the answers -42000, "42000 or 7" and "42000 - 1" get 1.0, and 42,000
# gets 0.01. In gcd, against 1, the answers 10, 21 and -1 get 0.5, 1.0 gets 0.33, 2 gets 0. In leg_counting, against
# 292, the answers 2920 and -292 get 0.75, 292.0 gets 0.6, 291 gets 0.
# Why it matters: of a group without a right answer, GRPO learns the one whose digits happen to hold those of the
# right one, and a wrong sign is learnt like a right one.
# Where: the pattern in arithmetic/gsm_symbolic/gsm_symbolic.py begins with \b, which is between "-" and a digit. In
# dataset.py, score_answer pays len(oracle) / len(answer) for an answer that contains the right one; 33 of 106 tasks
# use it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q reasoning-gym==0.1.25 numpy==2.4.6 sympy==1.14.0
"$folder/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

expected = {
    ("gsm_symbolic", "42000"): {
        "42000": 1.0,
        "-42000": 1.0,
        "42000 or 7": 1.0,
        "42000 - 1": 1.0,
        "42,000": 0.01,
        "41999": 0.01,
    },
    ("gcd", "1"): {"1": 1.0, "10": 0.5, "21": 0.5, "-1": 0.5, "1.0": 0.33, "2": 0.0},
    ("leg_counting", "292"): {"292": 1.0, "2920": 0.75, "-292": 0.75, "292.0": 0.6, "291": 0.0},
}
found = {}
print(version("reasoning-gym"))
for (name, right), scores in expected.items():
    tasks = reasoning_gym.create_dataset(name, size=20, seed=1)
    entry = next(entry for entry in tasks if entry["answer"] == right)
    found[name, right] = {answer: round(tasks.score_answer(answer, entry), 2) for answer in scores}
    print(name, entry["question"].strip()[-80:], found[name, right])
shared = [name for name, (task, _) in DATASETS.items() if task.score_answer is ProceduralDataset.score_answer]
print("tasks that pay for what contains the answer:", len(shared), "of", len(DATASETS))
assert found == expected
assert {"gcd", "leg_counting"} < set(shared) and (len(shared), len(DATASETS)) == (33, 106)
PYTHON
echo "as described"
