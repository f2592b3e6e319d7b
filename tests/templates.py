"""Chat templates of current models, from TRL's wheel, and three of our own, with tokenizers for them."""

import importlib.util
import os
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from preference_recipes.data import dataset
from preference_recipes.data.dataset import Converter
from preference_recipes.data.messages import LeftOut

# The token that ends an answer, by the beginning of a template's name; and the tokenizer's EOS, where that is another.
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<\uff5cend▁of▁sentence\uff5c>",
    "diffusion_gemma": "<turn|>",
    "gemma4": "<turn|>",
    "gemma": "<end_of_turn>",
    "glm": "<|endoftext|>",
    "gptoss": "<|return|>",
    "lfm": "<|im_end|>",
    "llama": "<|eot_id|>",
    "muse": "<|eot|>",
    "nemotron": "<|im_end|>",
    "phi": "<|end|>",
    "qwen": "<|im_end|>",
}
OTHER_EOS = {
    "gemma": "<eos>",
    "gemma3": "<eos>",
    "phi3": "<|endoftext|>",
    "phi3_5": "<|endoftext|>",
}

# A template without any end, as Alpaca's; one that writes the date; one that thinks in the prompt and
# drops thoughts from history.
ALPACA = (
    "{% for m in messages %}{% if m['role'] == 'user' %}### Instruction:\n{{ m['content'] }}\n\n"
    "{% elif m['role'] == 'assistant' %}### Response:\n{{ m['content'] }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Response:\n{% endif %}"
)
DATED = (
    "<|im_start|>system\n{{ strftime_now('%d %b %Y') }}<|im_end|>\n"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKS = (
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '[' + m['role'] + ']' + c + '[end]' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}"
    "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>' }}{% endif %}{% endif %}"
)
OWN = {"own_alpaca": ALPACA, "own_dated": DATED, "own_thinks": THINKS}
OWN_ENDS = {
    "glm4moe_training": "<|user|>",
    "own_alpaca": "<|endoftext|>",
    "own_dated": "<|im_end|>",
    "own_thinks": "[end]",
}


def folder() -> Path:
    """Where TRL keeps the templates. Without them the test fails: TRL is in the extra `peers`."""
    spec = importlib.util.find_spec("trl")
    found = Path(spec.origin).with_name("chat_templates") if spec else None
    if found is None and sys.version_info < (3, 11):
        pytest.skip("TRL needs Python 3.11")
    if found is None or not list(found.glob("*.jinja")):
        if os.environ.get("NEWEST_VERSIONS") == "1":
            pytest.skip("the newest TRL has no chat_templates/*.jinja")
        pytest.fail(
            f"no chat templates of TRL in {found}: pip install -c constraints.txt -e '.[peers]'"
        )
    return found


def names() -> list[str]:
    """All templates' names, found without failing: collecting must not."""
    spec = importlib.util.find_spec("trl")
    found = Path(spec.origin).with_name("chat_templates").glob("*.jinja") if spec else []
    # These want contents as lists of parts, and no causal language model has them.
    others = ("idefics", "llava", "smolvlm")
    stems = sorted(path.stem for path in found)
    return [name for name in stems if not name.startswith(others)] + list(OWN)


@cache
def text(name: str) -> str:
    return OWN.get(name) or (folder() / f"{name}.jinja").read_text(encoding="utf-8")


def end_of(name: str) -> str:
    if name in OWN_ENDS:
        return OWN_ENDS[name]
    return next(end for beginning, end in ENDS.items() if name.startswith(beginning))


CORPUS = [
    "one two three four five six seven. What is the capital of France?\n\nParis is the capital of France.\n",
    "\n\n\n\n think </think> thought",
] * 20


# How templates write special tokens.
SPECIAL = [r"<\|[\w/]+\|?>", r"<[\w/]+\|>", r"<\uff5c[^<>]+\uff5c>", r"</?s>"]
SPECIAL += [r"<(?:start|end)_of_\w+>", r"\[gMASK\]", r"<sop>", r"\[end\]"]


def byte_level_bpe(corpus: list[str], size: int, **settings) -> Tokenizer:
    """One that really merges."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    settings["initial_alphabet"] = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, **settings)
    backend.train_from_iterator(corpus, trainer)
    return backend


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A BPE that merges newlines, with the template's own special tokens."""
    template = text(name)
    backend = byte_level_bpe(CORPUS, 400)
    found = set(re.findall("|".join(SPECIAL), template))
    end = end_of(name)
    base = name.removesuffix("_training")
    eos = OTHER_EOS.get(base, end)
    special = sorted(found | {end, eos, "<bos>", "<pad>"})
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    ordinary = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    backend.add_tokens([AddedToken(token, normalized=False) for token in ordinary])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token=eos, pad_token="<pad>"
    )
    made.chat_template = template
    return made


def left_out(function, *given, **settings) -> str:
    """Why a row function leaves out a row."""
    with pytest.raises(LeftOut) as why:
        function(*given, **settings)
    return str(why.value)


def load_rows(accelerator, path, function, tokenizer, columns=None, split="train", **settings):
    """The usable rows of a data set, as a recipe loads them."""
    converter = Converter(function, tokenizer, columns or {}, settings)
    return dataset.load(accelerator, str(path), split, converter)
