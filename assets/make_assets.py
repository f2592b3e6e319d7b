"""Makes the embedded demo: a tiny tokenizer, a tiny Llama, and data in the ecosystem's formats. See README.md beside it.

The task is two-digit addition, where better is measurable: the share of held-out problems answered exactly right.

    python assets/make_assets.py base WORK          tokenizer, untrained model and SFT data
    python assets/make_assets.py teacher WORK       an untrained model of another shape, for recipes/distill.py
    python assets/make_assets.py preferences        pairs whose rejected answers the SFT model itself gave
"""

import gzip
import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

ASSETS = Path(__file__).resolve().parent
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
HELD_OUT = 500
# Wider than the model and with fewer layers: a teacher has only its tokens in common with a student.
SHAPES = {
    "base": dict(hidden_size=128, intermediate_size=344, num_hidden_layers=4),
    "teacher": dict(hidden_size=160, intermediate_size=432, num_hidden_layers=3),
}


def problems() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All sums of two numbers below 100, shuffled: (for training, held out)."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(0).shuffle(pairs)
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


def question(pair: tuple[int, int]) -> list[dict]:
    """Numbers have as many digits everywhere: a model this small learns where to look, and a reward model to check, in less time."""
    return [{"role": "user", "content": f"{pair[0]:02d}+{pair[1]:02d}="}]


def total(pair: tuple[int, int]) -> str:
    return f"{sum(pair):03d}"


def answer(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def write_jsonl(path: Path, rows: list[dict]) -> None:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    print(f"{path}: {len(rows)} rows")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that it can write any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL[2:],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(folder: Path, shape: str) -> None:
    """A random model, with the tokenizer."""
    make_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        num_attention_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        **SHAPES[shape],
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_data() -> None:
    """Problems with answers for SFT, and for recipes that sample their own."""
    train, held_out = problems()
    for name, pairs in (("sft_train", train), ("sft_eval", held_out)):
        rows = [{"messages": question(p) + answer(total(p))} for p in pairs]
        if name == "sft_eval":
            rows = [{**row, "answer": total(p)} for row, p in zip(rows, pairs)]
        write_jsonl(ASSETS / f"{name}.jsonl", rows)
    write_jsonl(
        ASSETS / "prompts_train.jsonl", [{"prompt": question(p), "answer": total(p)} for p in train]
    )
    for name, rows in (("cards_train", 640), ("cards_eval", 10)):
        cards = [
            {"prompt": [{"role": "user", "content": "?"}], "answer": str(row % 10)}
            for row in range(rows)
        ]
        write_jsonl(ASSETS / f"{name}.jsonl", cards)
    write_jsonl(
        ASSETS / "prompts_eval.jsonl",
        [{"prompt": question(p), "answer": total(p)} for p in held_out],
    )


@torch.no_grad()
def sample(model, tokenizer, pairs: list[tuple[int, int]]) -> list[str]:
    """One answer of the model to each problem, at temperature 1."""
    texts = []
    for start in range(0, len(pairs), 500):
        prompts = [
            tokenizer.apply_chat_template(question(p), tokenize=False, add_generation_prompt=True)
            for p in pairs[start : start + 500]
        ]
        batch = tokenizer(
            prompts,
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
        )
        batch.pop("token_type_ids", None)
        out = model.generate(**batch, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=8)
        texts += tokenizer.batch_decode(
            out[:, batch.input_ids.shape[1] :], skip_special_tokens=True
        )
    return texts


def make_preferences() -> None:
    """Chosen: the sum. Rejected: wrong answers that the SFT model gave, up to four different ones of eight samples for a training
    problem; for every held-out problem its first wrong one, however many samples that takes, so that none is favoured."""
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "model")
    torch.manual_seed(0)
    train, held_out = problems()
    for name, pairs, samples, most in (
        ("preferences_train.jsonl.gz", train, 8, 4),
        ("preferences_eval.jsonl", held_out, 1000, 1),
    ):
        rejected = {p: [] for p in pairs}
        for _ in range(samples):
            open_pairs = [p for p in pairs if len(rejected[p]) < most]
            for p, text in zip(open_pairs, sample(model, tokenizer, open_pairs)):
                if text and text != total(p) and text not in rejected[p]:
                    rejected[p].append(text)
        rows = [
            {"prompt": question(p), "chosen": answer(total(p)), "rejected": answer(text)}
            for p in pairs
            for text in rejected[p]
        ]
        if pairs is held_out:
            rows = [{**row, "answer": row["chosen"][0]["content"]} for row in rows]
        write_jsonl(ASSETS / name, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["base"] and len(sys.argv) == 3:
        make_model(Path(sys.argv[2]), "base")
        make_data()
    elif sys.argv[1:2] == ["teacher"] and len(sys.argv) == 3:
        make_model(Path(sys.argv[2]), "teacher")
    elif sys.argv[1:] == ["preferences"]:
        make_preferences()
    else:
        sys.exit(__doc__)
