#!/usr/bin/env bash
# verl 0.9.1: best@4 of four answers, of which one is right, is 0.69; and maj@8 where five of eight agree is 0.93.
#
# The good guess: best@N of N answers is their best, so it is 1 where one is right, as with pass@N; and a majority of
# five in eight is a majority.
# What was seen: one prompt, one right answer. Of four answers: best@2 is 0.45 (pass@2 is 0.50), best@4 is 0.69. Of
# eight answers: best@8 is 0.65. With three right answers of four, worst@4 is 0.32, not 0. With five votes of eight
# for the right answer, maj@8 is 0.93.
# Why it matters: on hard prompts the curve is a third below the pass@N of papers, and more answers do not bring it
# nearer.
# Where: bootstrap_metric in verl/trainer/ppo/metric_utils.py draws N of the N answers with replacement, so that each
# draw misses one answer with (1 - 1/N)^N; https://github.com/verl-project/verl/pull/7240
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6 transformers==5.10.4 tensordict==0.10.0 \
    ray==2.60.0 hydra-core==1.3.8
"$folder/env/bin/pip" install -q --no-deps verl==0.9.1
"$folder/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

from verl.trainer.ppo.metric_utils import process_validation_metrics


def logged(answers: str, right: str) -> dict[str, float]:
    """What a validation logs of a prompt with these answers, a letter each."""
    scores = [float(answer == right) for answer in answers]
    values = {"acc": scores, "pred": list(answers)}
    metrics = process_validation_metrics(["task"] * len(answers), ["prompt"] * len(answers), values)
    return {tag: round(float(value), 2) for tag, value in metrics["task"]["acc"].items()}


expected = {
    ("abcd", "a"): {"mean@4": 0.25, "best@2/mean": 0.45, "best@4/mean": 0.69},
    ("abcdefgh", "a"): {"mean@8": 0.12, "best@8/mean": 0.65},
    ("aaab", "a"): {"mean@4": 0.75, "worst@4/mean": 0.32},
    ("aaaaabcd", "a"): {"mean@8": 0.62, "maj@8/mean": 0.93},
}
found = {}
for (answers, right), tags in expected.items():
    values = logged(answers, right)
    found[answers, right] = {tag: values[tag] for tag in tags}
print(version("verl"))
for (answers, right), values in found.items():
    print("answers", answers, "right", right, values)
assert found == expected
PYTHON
echo "as described"
