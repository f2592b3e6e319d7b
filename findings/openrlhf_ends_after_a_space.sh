#!/usr/bin/env bash
# OpenRLHF 0.11.2: SFT learns a space before each end, and an end wherever a row was cut.
#
# The good guess: the end-of-text token follows the answer's last token; a row that is too long has no end to learn.
# What was seen: of the answer " Paris." the tokens learnt are "_Paris" "." "_" and the end, with "_" for a space. Cut
# at 11 tokens, " Rome. The capital of France is Paris." is learnt as "_Rome" "." "_The" "_capital" "_of" and the end.
# DPO's pairs have the same space.
# Why it matters: finished answers end in a space that no row has, one token more each; and the model learns to stop
# in mid-sentence, the more often the shorter --data.max_len is.
# Where: __getitem__ of SFTDataset in openrlhf/datasets/sft_dataset.py adds " " and the end to the text, and then
# writes the end over the last token; reward_dataset.py does the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.4.6 transformers==5.15.0 datasets==5.2.0 \
    sympy==1.14.0 pylatexenc==2.10
"$folder/env/bin/pip" install -q --no-deps openrlhf==0.11.2
"$folder/env/bin/python" - <<'PYTHON'
from importlib.metadata import version
from types import SimpleNamespace

from datasets import Dataset, disable_progress_bars
from openrlhf.datasets import RewardDataset, SFTDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

disable_progress_bars()
END = "<|endoftext|>"
backend = Tokenizer(models.BPE())
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()
letters = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[END], initial_alphabet=letters, show_progress=False)
backend.train_from_iterator(["The capital of France is Paris. The capital of Italy is Rome."] * 10, trainer)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END)
settings = SimpleNamespace(
    input_key="prompt", output_key="answer", prompt_key="prompt", chosen_key="answer", rejected_key="other"
)
strategy = SimpleNamespace(args=SimpleNamespace(data=settings))
rows = Dataset.from_list(
    [
        {"prompt": "The capital of France is", "answer": " Paris.", "other": " Rome."},
        {"prompt": "The capital of Italy is", "answer": " Rome. The capital of France is Paris.", "other": " Paris."},
    ]
)


def words(ids: list[int]) -> list[str]:
    return [tokenizer.decode([number]).replace(" ", "_") for number in ids]


def learnt(row: int, max_length: int) -> list[str]:
    """The tokens that SFT's loss is a mean over: a position's mask is that of the token that follows it."""
    ids, _, mask = SFTDataset(rows, tokenizer, max_length, strategy, num_processors=1)[row]
    return words([int(ids[0, at + 1]) for at in range(ids.shape[1] - 1) if mask[0, at]])


chosen = words(RewardDataset(rows, tokenizer, 100, strategy, is_dpo=True, num_processors=1)[0][0][0].tolist())
print(version("openrlhf"), "learnt:", learnt(0, 100), learnt(1, 11), "chosen by DPO:", chosen)
assert learnt(0, 100) == ["_Paris", ".", "_", END]
assert learnt(1, 11) == ["_Rome", ".", "_The", "_capital", "_of", END]
assert chosen[-4:] == ["_Paris", ".", "_", END]
PYTHON
echo "as described"
