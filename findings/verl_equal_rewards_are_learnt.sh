#!/usr/bin/env bash
# verl 0.9.1, reinforce_plus_plus_baseline: answers to a prompt are learnt where all of them are wrong.
#
# The good guess: each reward is taken less the mean of its group, so a group with equal rewards teaches nothing, as
# in GRPO.
# What was seen: three prompts with four answers each; of the first one two are right, all of the second are right,
# all of the third are wrong. Where the first one's wrong answers have six tokens and the right ones two, each answer
# of the other two prompts has the advantage 0.33; the other way round it is -0.33. With GRPO it is 0.
# Why it matters: the lengths of answers to one prompt decide whether wrong answers to another one are learnt, or
# right ones unlearnt.
# Where: in verl/trainer/ppo/core_algos.py, masked_whiten subtracts the mean over the batch's tokens. Group means make
# the mean over answers 0; that over tokens is 0 only where right and wrong answers are equally long.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6 transformers==5.10.4 tensordict==0.10.0 \
    ray==2.60.0 hydra-core==1.3.8 codetiming==1.4.0
"$folder/env/bin/pip" install -q --no-deps verl==0.9.1
"$folder/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

prompts = np.array(["mixed"] * 4 + ["right"] * 4 + ["wrong"] * 4, dtype=object)
rewards = [0, 0, 1, 1] + [1] * 4 + [0] * 4


def advantages(estimator: str, wrong_length: int, right_length: int) -> list[float]:
    """Of a wrong and a right answer to the first prompt, and of the first answer to the two others."""
    lengths = [wrong_length] * 2 + [right_length] * 2 + [3] * 8
    mask = torch.zeros(len(lengths), max(lengths))
    token_rewards = torch.zeros_like(mask)
    for row, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        mask[row, :length] = 1
        token_rewards[row, length - 1] = reward
    values, _ = get_adv_estimator_fn(estimator)(
        token_level_rewards=token_rewards, response_mask=mask, index=prompts, config=AlgoConfig()
    )
    return [round(values[row, 0].item(), 2) + 0.0 for row in (0, 2, 4, 8)]


print(version("verl"), "advantages: wrong, right; one of four right ones, one of four wrong ones")
found = {}
for estimator in ("grpo", "reinforce_plus_plus_baseline"):
    for lengths in ((6, 2), (4, 4), (2, 6)):
        found[estimator, lengths] = advantages(estimator, *lengths)
        print(estimator, "tokens of wrong and right answers", lengths, found[estimator, lengths])
for lengths in ((6, 2), (4, 4), (2, 6)):
    assert found["grpo", lengths] == [-0.87, 0.87, 0.0, 0.0]
assert found["reinforce_plus_plus_baseline", (4, 4)][2:] == [0.0, 0.0]
assert found["reinforce_plus_plus_baseline", (6, 2)][2:] == [0.33, 0.33]
assert found["reinforce_plus_plus_baseline", (2, 6)][2:] == [-0.33, -0.33]
PYTHON
echo "as described"
