"""Under every chat template, what is learned is what the model reads and writes when it is used.

The templates are those of current models, from TRL's wheel, and three of our own; see templates.py. What is expected is
computed here from `apply_chat_template` and a table of what templates write in front of an answer.
"""

import runpy

import datasets
import pytest

import templates
from common.data.pairs import preference_row
from common.data.tokens import stop_tokens
from runs import recipe, write_jsonl

sft = runpy.run_path(str(recipe("sft")))
sft_row = sft["sft_row"]
prompt_row = runpy.run_path(str(recipe("ppo")))["prompt_row"]
reward_row = runpy.run_path(str(recipe("reward")))["reward_row"]

NAMES = templates.names()
WANT_PARTS = ("idefics3", "llava_next", "smolvlm")
# What a template writes between its generation prompt and an answer without thinking.
LEADS = {
    "qwen3": "<think>\n\n</think>\n\n",
    "qwen3_5_think": "\n</think>\n\n",
    "qwen3_6": "\n</think>\n\n",
    "qwen3_8": "\n</think>\n\n",
    "nemotron_3_5_lightning": "</think>",
    "nemotron_3_nano": "</think>",
    "nemotron_3_super": "</think>",
    "nemotron_3_ultra": "</think>",
    "glm4moe": "\n<think></think>\n",
    "gptoss": "<|channel|>final<|message|>",
    "muse_glimmer": " to=user<|message|>",
    **dict.fromkeys(WANT_PARTS, " "),
}
# What stands between an answer and the token that ends it.
BEFORE_END = {"cohere2": "<|END_RESPONSE|>"}
# Templates whose generation prompt ends with what an answer without thinking does not continue.
OPEN_THOUGHT = {"deepseek_r1_distill": "<think>\n", "deepseekv3": "<think>\n", "own_thinks": "<think>"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def message(role: str, content: str, **more) -> dict:
    return {"role": role, "content": content, **more}


def base(name: str) -> str:
    """TRL's training variants write what the model's own template writes."""
    return name.removesuffix("_training")


def inference_ids(name: str, history: list[dict]) -> list[int]:
    """Ids of the history and the generation prompt, by transformers alone."""
    if base(name) in WANT_PARTS:
        history = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in history]
    return templates.tokenizer(name).apply_chat_template(history, add_generation_prompt=True, return_dict=False)


def context_ids(name: str, history: list[dict]) -> list[int]:
    """The same without a thought that an answer without thinking does not continue."""
    tokenizer = templates.tokenizer(name)
    text = tokenizer.decode(inference_ids(name, history))
    text = text.removesuffix(OPEN_THOUGHT.get(base(name), ""))
    return tokenizer(text, add_special_tokens=False).input_ids


def plain_answer(name: str, content: str) -> str:
    return LEADS.get(base(name), "") + content + BEFORE_END.get(base(name), "") + templates.end_of(name)


def learned(row: dict) -> list[tuple[list[int], list[int]]]:
    """(ids before it, ids of it) of each run of targets, sequence after sequence."""
    found = []
    start = 0
    for length in row.get("sequence_lengths") or [row["length"]]:
        ids = row["input_ids"][start : start + length]
        targets = [False, *row["targets"][start : start + length], False]
        begins = [place for place in range(1, len(targets)) if targets[place] and not targets[place - 1]]
        for begin in begins:
            end = targets.index(False, begin)
            found.append((ids[: begin - 1], ids[begin - 1 : end - 1]))
        start += length
    assert start == len(row["input_ids"]) == len(row["targets"]) == row["length"]
    return found


CHAT = [message("user", "one two"), message("assistant", "three four."), message("user", "five"), message("assistant", "six seven")]


@pytest.mark.parametrize("name", NAMES)
def test_two_answers_without_thinking(name):
    templates.folder()
    tokenizer = templates.tokenizer(name)
    row = sft_row({"messages": CHAT}, tokenizer, 10_000, "assistant")
    found = learned(row)
    assert [tokenizer.decode(ids) for _, ids in found] == [plain_answer(name, CHAT[place]["content"]) for place in (1, 3)]
    assert [before for before, _ in found] == [context_ids(name, CHAT[:place]) for place in (1, 3)]
    assert row["prompt_ids"] == inference_ids(name, CHAT[:3])
    assert row["n_targets"] == sum(len(ids) for _, ids in found) and row["reason"] == "" and not row["truncated"]
    # One sequence, where the history of the second answer begins with the first answer as it was learned.
    first = found[0][0] + found[0][1]
    assert len(row.get("sequence_lengths", [1])) == 2 - (found[1][0][: len(first)] == first)
