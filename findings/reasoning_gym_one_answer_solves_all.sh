#!/usr/bin/env bash
# reasoning-gym 0.1.25: 4*6*1*1 solves every puzzle24, and "I do not know" every game_of_life_halting.
#
# The good guess: the four numbers must be those of the puzzle, each used once, as its question says; True is not False.
# What was seen: in 100 tasks of puzzle24, two of which have the numbers 1, 1, 4 and 6, 4*6*1*1 has a mean reward of 1.
# In 100 tasks of game_of_life_halting, 53 of them False, so have "True", "False" and "I do not know".
# Why it matters: the first task teaches one fixed text and its curve looks like success; the second teaches nothing,
# since all answers of a group are right.
# Where: score_answer in games/puzzle24.py counts the numbers and looks at their range; the one in
# algorithmic/game_of_life_halting.py compares bool() of two texts, and bool("False") is true.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q reasoning-gym==0.1.25 numpy==2.4.6 sympy==1.14.0
"$folder/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

import reasoning_gym

tasks = {}
for name in ("puzzle24", "game_of_life_halting"):
    tasks[name] = reasoning_gym.create_dataset(name, size=100, seed=0)


def mean_reward(name: str, answer: str) -> float:
    return round(sum(tasks[name].score_answer(answer, entry) for entry in tasks[name]) / 100, 2)


same_numbers = sum(sorted(entry["metadata"]["numbers"]) == [1, 1, 4, 6] for entry in tasks["puzzle24"])
false = sum(entry["answer"] == "False" for entry in tasks["game_of_life_halting"])
puzzle = {answer: mean_reward("puzzle24", answer) for answer in ("4*6*1*1", "4*6*1+1")}
halting = {answer: mean_reward("game_of_life_halting", answer) for answer in ("True", "False", "I do not know", "")}
print(version("reasoning-gym"))
print("puzzle24:", tasks["puzzle24"][0]["question"].splitlines()[0])
print("tasks of 1, 1, 4 and 6:", same_numbers, "mean rewards:", puzzle)
print("game_of_life_halting, answers that are False:", false, "mean rewards:", halting)
assert (same_numbers, false) == (2, 53)
assert puzzle == {"4*6*1*1": 1.0, "4*6*1+1": 0.01}
assert halting == {"True": 1.0, "False": 1.0, "I do not know": 1.0, "": 0.0}
PYTHON
echo "as described"
