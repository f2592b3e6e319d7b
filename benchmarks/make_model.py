"""Makes what a real run needs where nothing can be downloaded: a BPE tokenizer trained on the text itself, a random model from a config.

    python benchmarks/make_model.py OUT --data FILE [FILE ...] [--architecture llama] [--vocab_size 16384] [--hidden_size 256] [--layers 6]

Writes OUT (model and tokenizer, with a ChatML template, BOS, EOS and pad), ready for --model_name_or_path.
"""

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def texts(files: list[Path]) -> Iterator[str]:
    """All strings of JSON-lines files, also gzipped."""
    for file in files:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield from (value for value in json.loads(line).values() if isinstance(value, str))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument(
        "--architecture",
        default="llama",
        help="a model_type of transformers: llama, qwen2, gemma2, gpt_neox ...",
    )
    parser.add_argument("--vocab_size", type=int, default=16384)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--config", type=json.loads, default={}, help="JSON: of the model's config")
    args = parser.parse_args()

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts(args.data),
        vocab_size=args.vocab_size,
        min_frequency=2,
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[3],
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(args.out)
    torch.manual_seed(0)
    heads = args.hidden_size // 64
    settings = dict(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 8 // 3 // 16 * 16,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
        tie_word_embeddings=False,
    )
    config = AutoConfig.for_model(args.architecture, **(settings | args.config))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(args.out)
    print(
        f"{args.out}: {args.architecture}, {model.num_parameters() / 1e6:.1f} M parameters, {len(tokenizer)} tokens"
    )


if __name__ == "__main__":
    main()
