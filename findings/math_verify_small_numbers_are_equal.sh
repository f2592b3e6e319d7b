#!/usr/bin/env bash
# math-verify 0.9.0: the charge of an electron is its mass; and 101 in base 2 is 101 in base 3.
#
# The good guess: numbers are compared by their ratio, so an answer that is 12 orders of magnitude off is wrong.
# What was seen: against 1.6 \times 10^{-19} the answers 9.1 \times 10^{-31}, 6.6 \times 10^{-34} and
# -1.6 \times 10^{-19} are right. So it is with numbers below 10^{-17}, not with 1.6 \times 10^{-12} and
# 9.1 \times 10^{-12}. Written as decimals they are equal from 7 zeros on: 0.00000002 is 0.00000003. Against 101_2 the
# answers 101_3 and 101 are right.
# Why it matters: as a reward for tasks of physics it pays for the wrong constant, and for a wrong sign.
# Where: sympy_numeric_eq in math_verify/grader.py rounds decimals to 6 places, and takes ratios with evalf(chop=True),
# which makes small differences 0; latex2sympy2_extended drops the base.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0
"$folder/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

from math_verify import parse, verify

CHARGE, MASS, PLANCK = (rf"{number} \times 10^{{{power}}}" for number, power in ((1.6, -19), (9.1, -31), (6.6, -34)))
expected = {
    (CHARGE, MASS): True,
    (CHARGE, PLANCK): True,
    (CHARGE, "-" + CHARGE): True,
    (CHARGE, "1.6"): False,
    (r"1.6 \times 10^{-12}", r"9.1 \times 10^{-12}"): False,
    ("0.00000002", "0.00000003"): True,
    ("0.0002", "0.0003"): False,
    ("101_2", "101_3"): True,
    ("101_2", "101"): True,
    ("101_2", "110_2"): False,
}
found = {
    (gold, answer): verify(parse(f"${gold}$"), parse(f"${answer}$")) for gold, answer in expected
}
print(version("math-verify"))
for (gold, answer), right in found.items():
    print(f"{gold} | {answer} | {right}")
assert found == expected
PYTHON
echo "as described"
