"""Makes a set that needs eyes, and a tiny random model that has some.

Each image shows two digits; the row asks for one of them.

    python examples/digits.py runs/digits
    make sft ARGS="examples/digits.yaml"

The folder gets `model`, a LLaVA of 160 thousand random weights with its processor, and rows whose
images lie next to them: `train.jsonl`, `held_out.jsonl`, `prompts.jsonl` for GRPO. Needs pillow.
docs/images.md shows the runs.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

ASSETS = Path(__file__).resolve().parent.parent / "assets"
# Five columns and seven rows for each digit, row by row.
DIGITS = """
01110 00100 01110 11110 00010 11111 00110 11111 01110 01110
10001 01100 10001 00001 00110 10000 01000 00001 10001 10001
10011 00100 00001 00001 01010 11110 10000 00010 10001 10001
10101 00100 00110 01110 10010 00001 11110 00100 01110 01111
11001 00100 01000 00001 11111 00001 10001 01000 10001 00001
10001 00100 10000 00001 00010 10001 10001 01000 10001 00010
01110 01110 11111 11110 00010 01110 01110 01000 01110 01100
"""
CELLS = [[list(map(int, cell)) for cell in line.split()] for line in DIGITS.split("\n")[1:-1]]
SHAPES = np.array(CELLS).transpose(1, 0, 2)  # [digits, 7, 5]
PART = "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}" + PART + "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def drawn(left: int, right: int, rng: np.random.Generator) -> Image.Image:
    """Returns 32 x 32 pixels: both digits, twice as large as their shapes, of any light colour."""
    pixels = rng.integers(0, 60, (32, 32, 3))
    for digit, column in ((left, 3), (right, 19)):
        shape = SHAPES[digit].repeat(2, 0).repeat(2, 1)[..., None]
        pixels[9:23, column : column + 10] += shape * rng.integers(130, 190, 3)
    return Image.fromarray(pixels.astype(np.uint8))


def write_rows(folder: Path, name: str, n_rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    (folder / name).mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(n_rows):
        digits = rng.integers(0, 10, 2).tolist()
        side = int(rng.integers(2))
        file = f"{name}/{number}.png"
        drawn(*digits, rng).save(folder / file)
        asked = [{"type": "image", "path": file}, {"type": "text", "text": ("left", "right")[side]}]
        row = {"prompt": [{"role": "user", "content": asked}], "answer": str(digits[side])}
        if name != "prompts":
            row["completion"] = row["answer"]
        rows.append(json.dumps(row) + "\n")
    (folder / f"{name}.jsonl").write_text("".join(rows))


def write_model(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(
        ASSETS / "model", extra_special_tokens={"image_token": "<image>"}
    )
    tokenizer.chat_template = TEMPLATE
    square = {"height": 32, "width": 32}
    pixels = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=square)
    layers = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2)
    layers["initializer_range"] = 0.1  # large, so that images count from the beginning
    eyes = dict(layers, model_type="clip_vision_model", image_size=32, patch_size=8)
    eyes["initializer_factor"] = 5.0
    text = dict(layers, model_type="llama", vocab_size=len(tokenizer), num_key_value_heads=4)
    text |= dict(max_position_embeddings=64, pad_token_id=0, bos_token_id=None)
    text |= dict(eos_token_id=tokenizer.eos_token_id)
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        text_config=text,
        vision_config=eyes,
        image_token_index=image,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    LlavaProcessor(
        pixels,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    write_model(out / "model")
    for seed, (name, n_rows) in enumerate([("train", 3000), ("held_out", 200), ("prompts", 500)]):
        write_rows(out, name, n_rows, seed)
    print(f"wrote {out}")
